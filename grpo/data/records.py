"""The records that go from the sampler to the loss, plain data but for a batch's open requests; and the interface
between samplers and the tools or environment that answer the policy in a completion. The policy draws a segment up to
its eos. They answer with token ids, which follow that segment in the completion, and the policy draws on after them:
nothing that was drawn is tokenised again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo.wire.picture_files import PicturedPrompt, pictures_of
from grpo.wire.rewards import Message
from grpo.wire.tool_outcomes import Branch, Outcome, cut_segments


@dataclass(frozen=True, kw_only=True)
class Example:
    """One problem of a dataset, ready to be sampled from."""

    index: int  # the row in the dataset as loaded
    prompt: str  # the text that was tokenised, chat template applied; a picture is one placeholder
    prompt_ids: list[int] | PicturedPrompt
    columns: dict[str, Any]  # the dataset's, for rewards: pictures are EncodedPicture, the gold answer is `answer`
    messages: list[Message] = field(default_factory=list)  # the prompt's chat, for reward models of another template
    gold: str = ""  # the gold answer as text, which evaluation compares and records show
    conversation: list[Message] | None = None  # the dataset's own prompt, if that is a list of messages
    source: str = ""  # the label of its dataset, where several are mixed


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled completion. The ids are the truth; the text is decoded once, for rewards and logs only."""

    completion_ids: list[int]
    """the drawn tokens, an eos included, and between them those of answers; of an agent's episode the drawn alone"""
    finished: bool  # False if it was cut at max_completion_length, before an eos; with answers the outcome's
    text: str  # the drawn text without special tokens; segments are joined by line ends
    sampling_logprobs: list[float]
    """each id's log-prob in the distribution that it was drawn from; NaN if the sampler knows none, and in answers"""
    policy_version: int
    """the number of updates of the policy that drew the first token; in_flight_weight_updates may draw others later"""
    drawn: list[bool] | None = None  # True for each id that was drawn and is trained on, not an answer's; None: all are
    outcome: Outcome | None = None  # how a completion with tools or an environment ended; None without them
    branches: list[Branch] | None = None
    """the sequences of an agent's episode that are trained on, perhaps none; None: the prompt with the completion"""
    tree: list[dict[str, Any]] | None = None
    """each segment of an agent's episode, for people: its turn, from 0; the turn that it comes `after`, or why it
    `begins` a branch; its tokens and those before it; whether the program saw it; seconds since the episode began"""

    @property
    def drawn_tokens(self) -> int:
        """the number of tokens that the sampler drew: the completion's length in losses and metrics"""
        return len(self.completion_ids) if self.drawn is None else sum(self.drawn)

    @property
    def conversation(self) -> dict[str, Any]:
        """what records have of a completion of several turns beside its text"""
        messages = {} if self.outcome is None else {"messages": self.outcome.messages}
        return messages if self.tree is None else messages | {"failure": self.outcome.failure, "tree": self.tree}

    @property
    def answer_tokens(self) -> int:
        """the number of tokens that follow a prompt and are not trained on; those that branches share count in each"""
        if self.branches is None:
            return len(self.completion_ids) - self.drawn_tokens
        return sum(len(branch.drawn) - sum(branch.drawn) for branch in self.branches)

    @property
    def turns(self) -> int:
        """the number of segments that the sampler drew, with an answer between each two"""
        sequences = [self] if self.branches is None else self.branches
        segments = [segment for each in sequences for segment in cut_segments(each.completion_ids, each.drawn)]
        return sum(is_drawn for is_drawn, _ in segments)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The completions of one prompt, of which those that are trained on are compared with each other."""

    id: int  # the group's place in the run: (step - 1) x prompts_per_step + its place in the step
    example: Example
    rollouts: list[Rollout]
    extra: list[dict[str, Any]] = field(default_factory=list)  # what log_extra was given of each completion, by column
    chosen: list[int] | None = None  # the places of the completions that are trained on; None: all

    @property
    def trained(self) -> dict[int, Rollout]:
        """the completions that are trained on, by their places"""
        places = range(len(self.rollouts)) if self.chosen is None else self.chosen
        return {place: self.rollouts[place] for place in places}


@dataclass(kw_only=True)
class Sample:
    """One completion, or a branch of an episode, with all that the loss needs. Its log-probs are those of the T tokens
    that the policy drew, which the update trains on: all but the tokens of answers."""

    prompt_ids: list[int] | PicturedPrompt
    completion_ids: list[int]
    finished: bool  # False if the completion was cut at max_completion_length; of a branch its episode's, as advantage
    advantage: float = 0.0
    ref_logprobs: np.ndarray | None = None  # the reference's float32 [T]; None before its answer, or without a KL
    teacher: np.ndarray | None = None
    """the teacher's answer for each token, rows of LogprobsAnswer.table: float32 [T], or [T, 1 + 2k] with its k
    likeliest tokens; None before its answer, or without teachers"""
    sampling_logprobs: np.ndarray | None = None  # float32 [T], NaN where unknown
    old_logprobs: np.ndarray | None = None
    """float32 [T] of the policy as the sample's round began, not always the one that drew it; None: it is the same"""
    group_id: int = -1  # the id of its group; -1 without a group
    place: int = -1  # its place, or its episode's, among the group's completions that are trained on, from 0
    drawn: np.ndarray | None = None  # bool [len(completion_ids)], False for the tokens of answers; None: all are drawn
    branch: int | None = None  # its place among the branches of its episode, from 0; None: it is a whole completion
    tokens_of_episode: int | None = None  # T of all branches of its episode; None: it is a whole completion

    @property
    def tokens(self) -> int:
        """T, the number of tokens that the policy drew"""
        return len(self.completion_ids) if self.drawn is None else int(self.drawn.sum())

    @property
    def completion_tokens(self) -> int:
        """T of all branches of its episode, or its own"""
        return self.tokens if self.tokens_of_episode is None else self.tokens_of_episode

    @property
    def is_first(self) -> bool:
        """whether it is a whole completion, or the first branch of an episode: these count completions"""
        return not self.branch

    def of_drawn(self, values: np.ndarray) -> np.ndarray:
        """Return those of [len(completion_ids)] values that belong to tokens that the policy drew: [T]."""
        return values if self.drawn is None else values[self.drawn]


def make_samples(group: Group) -> list[Sample]:
    """Make a sample of each completion that is trained on; of an agent's episode one of each branch."""
    samples = []
    for place, rollout in enumerate(group.trained.values()):
        if rollout.branches is None:
            made = [_make_sample(group.example.prompt_ids, rollout, rollout.finished)]
        else:
            made = [_make_sample(branch.prompt_ids, branch, rollout.finished) for branch in rollout.branches]
            tokens = sum(sample.tokens for sample in made)
            for number, sample in enumerate(made):
                sample.branch, sample.tokens_of_episode = number, tokens
        for sample in made:
            sample.group_id, sample.place = group.id, place
        samples += made
    return samples


def _make_sample(prompt_ids: list[int] | PicturedPrompt, sequence: Rollout | Branch, finished: bool) -> Sample:
    sample = Sample(prompt_ids=prompt_ids, completion_ids=sequence.completion_ids, finished=finished)
    sample.drawn = None if sequence.drawn is None else np.asarray(sequence.drawn, bool)
    sample.sampling_logprobs = sample.of_drawn(np.asarray(sequence.sampling_logprobs, np.float32))
    return sample


def rewards_by_name(functions: Sequence[str], rewards: Sequence[float]) -> dict[str, float]:
    """Return what each of several reward functions gives a completion; of a single one it is the reward."""
    if len(functions) < 2:
        return {}
    return {f"rewards/{name}": value for name, value in zip(functions, rewards, strict=True)}


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What one step of a round trains on: this rank's share."""

    groups: list[Group]
    by_function: Tensor  # float64 [functions, groups, drawn completions], NaN if a function does not apply
    rewards: Tensor  # float64 [groups, drawn completions], the weighted sum over functions
    signal: Tensor  # bool [groups], True if the group's completions teach something
    samples: list[Sample]  # group after group: one of each completion that is trained on, or one of each branch

    def cut(self, start: int, end: int) -> StepBatch:
        """Return the batch of the groups from `start` up to `end`."""
        groups = self.groups[start:end]
        ids = {group.id for group in groups}
        return StepBatch(
            groups=groups,
            by_function=self.by_function[:, start:end],
            rewards=self.rewards[start:end],
            signal=self.signal[start:end],
            samples=[sample for sample in self.samples if sample.group_id in ids],
        )

    def to_lines(self, functions: Sequence[str] = (), count: int | None = None) -> list[dict[str, Any]]:
        """Return a line for completions.jsonl for each completion of the first `count` groups, or of all, with these
        reward functions' values; pictures are bytes. The advantage of a completion without a sample is None."""
        by_sample = {(sample.group_id, sample.place): sample.advantage for sample in self.samples}
        advantages = [
            {column: by_sample.get((group.id, place)) for place, column in enumerate(group.trained)}
            for group in self.groups
        ]
        return [
            {
                "prompt": group.example.prompt,
                **({"pictures": pictures} if (pictures := pictures_of(group.example.prompt_ids)) else {}),
                "completion": rollout.text,
                **rollout.conversation,
                "answer": group.example.gold,
                "reward": self.rewards[row, column].item(),
                "advantage": advantages[row].get(column),
                **rewards_by_name(functions, self.by_function[:, row, column].tolist()),
                **(group.extra[column] if group.extra else {}),
            }
            for row, group in enumerate(self.groups[:count])
            for column, rollout in enumerate(group.rollouts)
        ]


class Dialogue(Protocol):
    """One completion, as its responder sees it. A sampler calls it from one thread at a time."""

    messages: list[dict[str, Any]]  # the messages so far, as in Outcome.messages
    outcome: Outcome | None  # None until the completion is over

    def answer(self, drawn: list[int], room: int) -> Future[list[int] | None] | None:
        """Answer the segment `drawn`, which ends with an eos or was cut, and may be followed by `room` more tokens. The
        future has the ids of the answer, fewer than `room`, or None if the completion is over, with its `outcome`. It
        raises RewardError if an environment of the user's fails. Returns None, which no speed may decide, if the
        segment alone says that the completion is over: a sampler then need not wait."""

    def close(self) -> None:
        """Free the completion's resources, such as its environment. Any number of times, in any state."""


class Responder(Protocol):
    """Answers the policy in all completions of a run."""

    tools: list[dict[str, Any]] | None
    """the JSON schemas of the policy's tools, for its chat template; None without tools"""

    def observe(self, columns: dict[str, Any]) -> str:
        """Return the environment's observation of a row before the first turn, the end of its prompt, or "". From any
        thread. Raises RewardError if the environment fails."""

    def begin(self, example: Example, name: tuple[int, int, int] | None = None) -> Dialogue:
        """Begin a completion of this example. The sampler closes it. Its random numbers, the answers' too, follow from
        `name`: seed, group, number in the group; None if greedy."""


def close_all(dialogues: Iterable[Dialogue]) -> None:
    """Close all dialogues, even if one fails. Ctrl-C ends that: each may wait for a call that hangs."""
    failure: Exception | None = None
    for dialogue in dialogues:
        try:
            dialogue.close()
        except Exception as error:  # a dialogue is the user's code
            failure = failure or error
    if failure is not None:
        raise failure


def show_answer(message: Mapping[str, Any]) -> str:
    """Return the text that shows a message of a tool or an environment to people."""
    return f"[{message.get('name', 'environment')}: {message['content']}]"


def make_rollout(
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    *,
    ids: list[int],
    logprobs: list[float],
    policy_version: int,
    drawn: list[bool] | None = None,
    outcome: Outcome | None = None,
) -> Rollout:
    """Make the record of a whole completion. `drawn` and `outcome` are None in a run without turns."""
    segments = [segment for is_drawn, segment in cut_segments(ids, drawn) if is_drawn]
    text = "\n".join(tokenizer.decode(segment, skip_special_tokens=True) for segment in segments)
    finished = ids[-1] in eos_token_ids if outcome is None else outcome.finished
    return Rollout(
        completion_ids=ids,
        finished=finished,
        text=text,
        sampling_logprobs=logprobs,
        policy_version=policy_version,
        drawn=drawn,
        outcome=outcome,
    )
