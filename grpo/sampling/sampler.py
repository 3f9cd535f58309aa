"""The interface of every sampler: what the trainer, the evaluation and the chat ask for completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from grpo.data.records import Example, Rollout

OnGroups = Callable[[dict[int, list[Rollout]]], None]
"""takes the completions of groups that have ended, by the index of their example"""


class Sampler(Protocol):
    """Anything that draws completions from the policy, wherever the policy's weights are.

    A completion is drawn token by token from softmax(logits / temperature) over the whole vocabulary: no top-k or
    top-p, no penalty, no minimum length. This is the distribution that the loss scores. It ends with its first eos, or
    without one at the sampler's largest length. A `Rollout` has the ids that were drawn, never ids of re-tokenised
    text, and the log-prob that each id had when it was drawn (NaN where the sampler does not know it). Where something
    answers the policy (grpo/data/responder.py), a completion goes on after an eos with the ids of the answer.

    `Rounds` (grpo/trainer/round.py) calls `update_weights` and `sample` in every round. The trainer calls
    `update_weights` before each evaluation too, and `evaluate` then calls `greedy` and `sample`.
    `python -m grpo.chat` calls `stream`. Each rank has a sampler and calls it with its own share of examples: all ranks
    together in a round, even where one has no example, and each alone elsewhere.
    """

    def sample(
        self,
        examples: Sequence[Example],
        copies: int,
        temperature: float,
        seed: int,
        on_groups: OnGroups | None = None,
        ids: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Draw `copies` completions of each example; return them in the order of the examples.

        A completion's random numbers follow from `seed`, its group's id (`ids`; 0, 1, ... where there are none) and its
        number in the group: earlier calls, the other examples and how many rows are drawn at a time change nothing but
        the last bits of log-probs. `on_groups` is called with the completions of examples, by their index, soon after
        the last of them has ended and while others are still being drawn: once for each example, perhaps with several.
        """
        ...

    def greedy(self, examples: Sequence[Example]) -> list[Rollout]:
        """Return the completion of each example whose every token is the most likely one."""
        ...

    def stream(self, example: Example, temperature: float, seed: int, on_token: Callable[[list[int]], bool]) -> Rollout:
        """Draw one completion; a temperature of 0 is greedy. Call `on_token(ids so far)` after each token.

        Where `on_token` returns True the completion stops there, unfinished.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Draw from now on with the policy as it is after `version` updates, which each `Rollout` then carries.

        Returns at once where the sampler has that version already.
        """
        ...
