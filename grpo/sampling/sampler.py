"""The interface of every sampler: trainer, evaluation and chat ask it for completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo.data.records import Example, Rollout

OnGroups = Callable[[dict[int, list[Rollout]]], None]
"""takes the completions of groups that have ended, by the index of their example"""
Name = tuple[int, int, int]  # seed, group, number in the group: a completion's random numbers follow from them
EVALUATION_SEED = 1 << 63  # of evaluations, added to the run's: no seed of groups that are trained on


@dataclass(frozen=True, kw_only=True)
class Order:
    """The completions to draw in one call, numbered example by example."""

    examples: Sequence[Example]
    copies: int = 1  # completions of each example
    temperature: float = 1.0
    names: Sequence[Name] | None = None  # the name of each completion; None draws greedily
    on_groups: OnGroups | None = None

    def name(self, number: int) -> Name | None:
        return None if self.names is None else self.names[number]


class Groups:
    """The completions of an order that have ended; each group is handed over once, when it is whole."""

    def __init__(self, order: Order):
        self.all: list[list[Rollout | None]] = [[None] * order.copies for _ in order.examples]
        self._copies, self._on_groups = order.copies, order.on_groups
        self._whole: dict[int, list[Rollout]] = {}

    def add(self, number: int, rollout: Rollout) -> None:
        index, copy = divmod(number, self._copies)
        self.all[index][copy] = rollout
        if None not in self.all[index]:
            self._whole[index] = self.all[index]

    def hand_over(self) -> None:
        if self._whole and self._on_groups is not None:
            self._on_groups(self._whole)
        self._whole = {}


class Sampler(Protocol):
    """Anything that draws completions from the policy, wherever the policy's weights are.

    A completion is drawn token by token from softmax(logits / temperature) over the whole vocabulary: no top-k or
    top-p, no penalty, no minimum length. This is the distribution that the loss scores. It ends with its first eos, or
    without one at the sampler's largest length. A `Rollout` has the ids that were drawn, never ids of re-tokenised
    text, and the log-prob that each id had when it was drawn (NaN if the sampler does not know it). With a
    Responder (grpo/data/records.py) the ids of its answer follow an eos in the completion.

    Each rank calls its own with its share of examples: all ranks together in a round, and each alone elsewhere.
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
        """Draw `copies` completions of each example; return them in the order of the examples. A completion's random
        numbers follow from `seed`, its group's id (`ids`; by default 0, 1, ...) and its number in the group: whatever
        else is drawn, before or beside it, changes nothing but the last bits of log-probs. `on_groups` is called once
        for each example, soon after its last completion has ended."""

    def greedy(self, examples: Sequence[Example]) -> list[Rollout]:
        """Return the completion of each example whose every token is the most likely one."""

    def stream(self, example: Example, temperature: float, seed: int, on_token: Callable[[list[int]], bool]) -> Rollout:
        """Draw one completion; a temperature of 0 is greedy. It stops where `on_token(ids so far)` returns True."""

    def update_weights(self, version: int) -> None:
        """Draw from now on with the policy after `version` updates, which each `Rollout` then carries."""
