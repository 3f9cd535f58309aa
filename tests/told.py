"""The client of a server whose answers a test gives, and completions to ask it about."""

from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np

from grpo.data.records import Rollout
from grpo.trainer.server_scores import ServerScores


def sampled(ids: Iterable[int], text: str = "", **more) -> Rollout:
    """Make a completion, by default a finished one of whose log-probs the sampler knows nothing."""
    fixed = {"finished": True, "sampling_logprobs": [], "policy_version": 0}
    return Rollout(completion_ids=[*ids], text=text, **fixed | more)


class Told:
    """Takes questions as ReferenceClient does, and has these answers for them, one after the other: of each completion
    float32 [tokens], or an error."""

    def __init__(self, *answers: list[np.ndarray] | Exception):
        self.asked: list[tuple[str, list[int], list[list[int]]]] = []
        self.futures: list[Future] = []
        self._answers = iter(answers)

    def request_groups(self, groups: Iterable[tuple]) -> list[Future]:
        groups = [*groups]
        self.asked += groups
        futures = [self._future() for _ in groups]
        self.futures += futures
        return futures

    def _future(self) -> Future:
        future, answer = Future(), next(self._answers, None)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return future


def of_reference(*answers: list[np.ndarray] | Exception) -> ServerScores:
    return ServerScores("ref_logprobs", {"": Told(*answers)}, phase="wait_ref")
