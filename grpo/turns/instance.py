"""An instance of the environment: it lives as long as a completion, wherever its code runs."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from grpo.config.errors import RewardError
from grpo.config.user_code import Key
from grpo.rewards.process import CallLost
from grpo.rollouts.records import Example
from grpo.turns.environment import EnvironmentClass
from grpo.turns.runner import Place
from grpo.turns.session import Reply

log = logging.getLogger(__name__)

_FALLBACK = 0.0  # the reward of a completion whose environment hangs or ends its process, as of a reward function


class Failures:
    """Failures of the user's code that end nothing: the first of each kind is logged, and then how many there are."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, kind: str, traceback: str = "") -> None:
        """Count a failure of this kind; `traceback` is the user's part of the stack, with line ends."""
        self._counts[kind] += 1
        # Errors, not warnings: ranks other than the first show nothing less.
        if (count := self._counts[kind]) == 1:
            log.error("%s%s: the run goes on, and more of these are counted", traceback, kind)
        elif str(count).rstrip("0") == "1":
            log.error("%s, %d times by now", kind, count)


class Instance:
    """The environment of one completion. Its calls raise CallLost where it hangs or ends its process, which is logged;
    and RewardError where it fails."""

    def __init__(self, environment: EnvironmentClass, place: Place, key: Key, failures: Failures):
        """`key` is what the random numbers of its calls follow from, each call's others."""
        self._environment, self._key, self._calls = environment, key, 0
        self._failures = failures
        self._place: Place | None = place
        self._steps_reward = 0.0
        self.is_lost = False
        """whether it has gone with its process"""

    async def reset(self, columns: dict[str, Any]) -> str:
        """Make the instance; return what it says first."""
        return (await self._perform("reset", columns))["text"]

    async def step(self, text: str) -> tuple[str, bool]:
        """Return what it answers to a turn, and whether the completion is over."""
        reply = await self._perform("step", text)
        self._steps_reward += reply["reward"]
        return reply["text"], reply["done"]

    async def call_method(self, name: str, arguments: dict[str, Any]) -> Reply:
        """Return the reply of a method that is a tool."""
        return await self._perform("method", name, arguments)

    async def compute_reward(self) -> dict[str, float]:
        """Return what it gives the completion, by name: what get_reward says, or the sum of the steps' rewards."""
        if not self._environment.gives_reward:
            return {}
        reward: float | None = self._steps_reward
        try:
            if self.is_lost:
                reward = _FALLBACK
            elif self._environment.has_get_reward:
                reward = (await self._perform("get_reward"))["reward"]
        except CallLost:
            reward = _FALLBACK
        return {} if reward is None else {self._environment.label: reward}

    async def close(self) -> None:
        """Close it, the first time. What its `close` raises is logged."""
        if self._place is None:
            return
        try:
            if not self.is_lost:
                reply = await self._place.perform((*self._key, "close"), "close")
                if "error" in reply:
                    self._failures.note(f"{self._prefix}close raised {reply['error']}", reply["traceback"])
        except CallLost as lost:
            self._failures.note(f"{self._prefix}close {lost}")
        finally:
            self._place.release()
            self._place = None

    async def _perform(self, task: str, *arguments: Any) -> Reply:
        self._calls += 1
        try:
            reply = await self._place.perform((*self._key, self._calls), task, *arguments)
        except CallLost as lost:
            self.is_lost = True
            # An error, not a warning: ranks other than the first show nothing less.
            log.error(
                "%s%s %s: the completion ends, and the environment gives it %g", self._prefix, task, lost, _FALLBACK
            )
            raise
        except RewardError:  # no process starts
            self.is_lost = True
            raise
        if "raised" in reply:
            raise RewardError(f"environment={self._environment.name!r}: {reply['raised']}", reply["traceback"])
        return reply

    @property
    def _prefix(self) -> str:
        return f"environment={self._environment.name!r}: "


def check_observation(environment: EnvironmentClass, observation: str, example: Example) -> None:
    """Raise RewardError unless the prompt has what `reset` says to the completion's instance.

    An example without messages, a worker's, is not checked: its text is what a chat template has made of them.
    """
    contents = [message["content"].rstrip() for message in example.messages]
    if contents and not any(content.endswith(observation.rstrip()) for content in contents):
        raise RewardError(
            f"environment={environment.name!r}: reset said {observation[:200]!r} to a completion, and something else "
            "as the data was read: what it says must follow from the row alone: draw random numbers from a seed in "
            "the row"
        )
