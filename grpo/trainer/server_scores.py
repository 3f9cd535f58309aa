"""What servers say of a round's completions: asked as groups are drawn, waited for when an update needs it."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from grpo.client.reference import LogprobsClient
from grpo.client.server_errors import ServerError, ServersLost
from grpo.data.records import Group, Sample, StepBatch, make_samples
from grpo.run.collective import raise_together
from grpo.wire.picture_files import key_of

Answer = Future[list[np.ndarray]]  # float32 [len(completion), ...] of each completion of a prompt
AnswersOfBranches = dict[tuple[int, int | None], tuple[Answer, int]]  # by Sample.place and .branch, with its row there


class ServerScores:
    """The requests of a round to the servers of one kind, by group id. A group of episodes has one for each prompt of
    its branches."""

    def __init__(self, field: str, clients: Mapping[str, LogprobsClient], phase: str, top_k: int = 0):
        """A sample's `field` takes its answer: with `top_k` the rows of LogprobsAnswer.table. Each client has
        the prompts of a source, "" those of every other: without it these get NaN. Waiting is timed as `phase`."""
        self.field, self.clients, self.phase, self.top_k = field, clients, phase, top_k
        self._requests: dict[int, Answer | AnswersOfBranches | None] = {}

    def close(self) -> None:
        for client in self.clients.values():
            client.close()

    def forget(self) -> None:
        self._requests = {}

    def ask(self, groups: list[Group]) -> None:
        """Ask about groups: about all sequences of a group with one prompt together."""
        of_client: dict[str, list[Group]] = {source: [] for source in self.clients}
        for group in groups:
            source = group.example.source if group.example.source in self.clients else ""
            if source in self.clients:
                of_client[source].append(group)
            else:
                self._requests[group.id] = None
        for source, asked in of_client.items():
            self._ask(self.clients[source], asked)

    def _ask(self, client: LogprobsClient, groups: list[Group]) -> None:
        by_group = [_by_prompt(make_samples(group)) for group in groups]
        asked = [
            (f"group {group.id}", of_prompt[0].prompt_ids, [sample.completion_ids for sample in of_prompt])
            for group, prompts in zip(groups, by_group, strict=True)
            for of_prompt in prompts
        ]
        futures = iter(client.request_groups(asked))
        for group, prompts in zip(groups, by_group, strict=True):
            if all(rollout.branches is None for rollout in group.trained.values()):
                self._requests[group.id] = next(futures)  # they have one prompt
                continue
            self._requests[group.id] = answers = {}
            for of_prompt in prompts:
                answer = next(futures)
                answers |= {(sample.place, sample.branch): (answer, row) for row, sample in enumerate(of_prompt)}

    def ask_again(self, batches: Sequence[StepBatch]) -> None:
        """Ask about the groups of a resumed run's batches that had no answer when the run was saved."""
        for batch in batches:
            unanswered = {sample.group_id for sample in batch.samples if getattr(sample, self.field) is None}
            self.ask([group for group in batch.groups if group.id in unanswered])

    def cancel(self, group_id: int) -> None:
        """Take back the questions about a group, unless they are sent already."""
        asked = self._requests.pop(group_id, None) or {}
        for request in [answer for answer, _ in asked.values()] if isinstance(asked, dict) else [asked]:
            request.cancel()

    def wait(self, samples: Sequence[Sample]) -> None:
        """Fill in the answers that samples lack, as soon as they are there, but those of the tokens of tools' answers.
        Raises ServerError if a request failed; its samples stay as they are."""
        for sample in samples:
            if getattr(sample, self.field) is None:
                setattr(sample, self.field, self._answer(sample))

    def _answer(self, sample: Sample) -> np.ndarray:
        asked = self._requests[sample.group_id]
        if asked is None:
            return unanswered(sample, self.top_k, np.nan)
        answer, row = asked[sample.place, sample.branch] if isinstance(asked, dict) else (asked, sample.place)
        return sample.of_drawn(answer.result()[row])

    def wait_together(self, samples: Sequence[Sample]) -> None:
        """Do so on all ranks. Raises ServersLost on every rank if a request of any failed."""
        lost = None
        try:
            self.wait(samples)
        except ServerError as error:
            lost = error
        raise_together(lost, ServersLost)


def unanswered(sample: Sample, top_k: int, logprob: float) -> np.ndarray:
    """Return rows as a server's for a sample that has none, with these log-probs and ids of 0."""
    if not top_k:
        return np.full(sample.tokens, logprob, np.float32)
    rows = np.zeros((sample.tokens, 1 + 2 * top_k), np.float32)
    rows[:, : 1 + top_k] = logprob
    return rows


def _by_prompt(samples: list[Sample]) -> list[list[Sample]]:
    """Group the samples of equal prompts, in order of first appearance."""
    groups: dict[bytes, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key_of(sample.prompt_ids), []).append(sample)
    return [*groups.values()]
