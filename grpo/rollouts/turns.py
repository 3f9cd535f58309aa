"""The interface between samplers and what answers the policy: a completion of several segments.

The policy draws a segment up to its eos. Tools or an environment answer with token ids, which follow that segment in
the completion, and the policy draws on after them. Token ids stay the truth: nothing that was drawn is tokenised again.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from grpo.rollouts.records import Example, Outcome


class Dialogue(Protocol):
    """One completion, as what answers it sees it. A sampler calls it from one thread at a time."""

    outcome: Outcome | None
    """None until the completion is over"""

    def answer(self, drawn: list[int], room: int) -> Future[list[int] | None]:
        """Answer the segment `drawn`, after which the completion may have `room` more tokens.

        The segment ends with an eos, or was cut at the sampler's largest length: then there is no answer. The future
        has the ids of the answer, fewer than `room`, or None where the completion is over, and `outcome` with it. It
        raises RewardError where an environment of the user's fails.
        """
        ...

    def close(self) -> None:
        """End what the completion holds, such as its environment. Any number of times, in any state."""
        ...


class Turns(Protocol):
    """What answers the policy, in all completions of a run."""

    tools: list[dict[str, Any]] | None
    """the JSON schemas of what the policy may call, for its chat template; None where there is nothing to call"""

    def observe(self, columns: dict[str, Any]) -> str:
        """Return what the environment says of a row before the first turn, which ends its prompt; "" for nothing.

        From any thread. Raises RewardError where the environment fails.
        """
        ...

    def begin(self, example: Example) -> Dialogue:
        """Begin a completion of this example. The sampler closes it."""
        ...
