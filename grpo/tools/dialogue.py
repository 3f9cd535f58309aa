"""One completion of several turns: tools and an environment answer the policy until it is over."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from grpo.config.errors import RewardError
from grpo.config.sampling_settings import TurnsSection
from grpo.config.user_code import Key
from grpo.data.records import Example, Outcome
from grpo.tools.environment import EnvironmentClass
from grpo.tools.parse import Call, Turn, TurnReader
from grpo.tools.runner import Place, Runner
from grpo.tools.schema import Tool
from grpo.tools.session import Reply, clean, describe_failure
from grpo.tools.template import AnswerTemplate, Messages
from grpo.usercode.prints import PRINTS
from grpo.usercode.process import CallLost, run_in_loop

log = logging.getLogger(__name__)

_FALLBACK = 0.0  # the reward of a completion whose environment hangs or ends its process


class Failures:
    """Failures of the user's code that do not end the run: logs the first of each kind, then counts."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, kind: str, traceback: str = "") -> None:
        """Count a failure of this kind; `traceback` is the user's part of the stack, with line ends."""
        self._counts[kind] += 1
        # Errors: ranks other than the first show no warnings.
        if (count := self._counts[kind]) == 1:
            log.error("%s%s: the run continues, and counts more of these", traceback, kind)
        elif str(count).rstrip("0") == "1":
            log.error("%s, %d times by now", kind, count)


class Instance:
    """The environment of one completion. Its calls log and raise CallLost if it hangs or ends its process, and raise
    RewardError if it fails. `is_lost`: it has gone with its process."""

    def __init__(self, environment: EnvironmentClass, place: Place, key: Key, failures: Failures):
        """`key` and a call's number seed the call's random numbers."""
        self._environment, self._key, self._calls = environment, key, 0
        self._prefix = f"environment={environment.name!r}: "
        self._failures = failures
        self._place: Place | None = place
        self._steps_reward = 0.0
        self.is_lost = False

    async def reset(self, columns: dict[str, Any]) -> str:
        """Make the instance; return its observation."""
        return (await self._perform("reset", columns))["text"]

    async def step(self, text: str) -> tuple[str, bool]:
        """Return its answer to a turn, and whether the completion is over."""
        reply = await self._perform("step", text)
        self._steps_reward += reply["reward"]
        return reply["text"], reply["done"]

    async def call_method(self, name: str, arguments: dict[str, Any]) -> Reply:
        return await self._perform("method", name, arguments)

    async def compute_reward(self) -> dict[str, float]:
        """Return the completion's reward by name: that of get_reward, or the sum of the steps' rewards."""
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
        """Close it once. Errors of its `close` are logged."""
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
            # An error: ranks other than the first show no warnings.
            log.error("%s%s %s: the completion ends with the reward %g", self._prefix, task, lost, _FALLBACK)
            raise
        except RewardError:  # no process starts
            self.is_lost = True
            raise
        if "raised" in reply:
            raise RewardError(f"{self._prefix}{reply['raised']}", reply["traceback"])
        return reply


def check_observation(environment: EnvironmentClass, observation: str, example: Example) -> None:
    """Raise RewardError unless the prompt ends with the observation of the completion's `reset`.

    A worker's example has no messages, only their text in a chat template, and is not checked.
    """
    contents = [message["content"].rstrip() for message in example.messages]
    if contents and not any(content.endswith(observation.rstrip()) for content in contents):
        raise RewardError(
            f"environment={environment.name!r}: reset said {observation[:200]!r} to a completion, and something else "
            "as the data was read: it must depend on the row alone: draw random numbers from a seed in the row"
        )


@dataclass(frozen=True)
class Setup:
    """The common parts of all completions of a run."""

    config: TurnsSection
    tools: dict[str, Tool]
    environment: EnvironmentClass | None
    reader: TurnReader
    template: AnswerTemplate
    runner: Runner
    failures: Failures


class UserDialogue:
    """A completion that tools and an environment answer: a Dialogue of grpo/data/responder.py.

    All its steps run on the event loop, one after another.
    """

    def __init__(self, setup: Setup, example: Example, key: Key, on_close: Callable[[], None]):
        """Begin to reset an instance of the environment. `key` seeds the random numbers of the user's code."""
        self.outcome: Outcome | None = None
        self.messages: Messages = []
        self._setup, self._key, self._on_close = setup, key, on_close
        self._before = example.prompt_ids[:]  # the next turn
        self._turns = self._answered_turns = self._calls = self._failures = 0
        self._is_closed = False
        self._order = asyncio.Lock()
        self._instance: Instance | None = None
        self._reset: Future | None = None
        if setup.environment is not None:
            self._instance = Instance(setup.environment, setup.runner.make_place(), key, setup.failures)
            self._reset = run_in_loop(self._open(self._instance, example))

    def answer(self, drawn: list[int], room: int) -> Future[list[int] | None] | None:
        """Answer a segment; see Dialogue."""
        reader = self._setup.reader
        is_whole = reader.is_whole(drawn)
        turn = reader.read(drawn, self._before) if is_whole else reader.read_text(drawn)
        self._turns += 1
        self.messages.append(turn.to_message())
        if self._instance is None and not turn.calls:
            self._note_end(is_whole, {})
            return None
        return run_in_loop(self._answer(turn, is_whole, room))

    def close(self) -> None:
        """Close the instance after the running call."""
        if not self._is_closed:
            self._is_closed = True
            run_in_loop(self._close()).result()
            self._on_close()

    async def _open(self, instance: Instance, example: Example) -> None:
        async with self._order:
            with PRINTS.limited():
                try:
                    observation = await instance.reset(example.columns)
                except CallLost:
                    return  # the first answer ends the completion
                check_observation(self._setup.environment, observation, example)

    async def _answer(self, turn: Turn, is_whole: bool, room: int) -> list[int] | None:
        if self._reset is not None:
            await asyncio.wrap_future(self._reset)
        async with self._order:
            with PRINTS.limited():
                return await self._answer_turn(turn, is_whole, room)

    async def _answer_turn(self, turn: Turn, is_whole: bool, room: int) -> list[int] | None:
        if not is_whole or (self._instance is not None and self._instance.is_lost):
            return await self._end(False)
        try:
            if turn.calls:
                answers, is_over = await self._run_calls(turn), False
            elif self._setup.environment is not None and self._setup.environment.is_game:
                answers, is_over = await self._take_step(turn)
            else:
                answers, is_over = None, True
        except CallLost:
            answers, is_over = None, False
        if answers is None:
            return await self._end(is_over)
        ids = self._setup.template.encode(answers)
        if len(ids) >= room:
            return await self._end(False)
        self.messages += answers
        self._before = ids
        return ids

    async def _run_calls(self, turn: Turn) -> Messages | None:
        """Return the answers to the calls of a turn; None at the limits of turns."""
        config = self._setup.config
        if self._turns == config.max_turns or self._answered_turns == config.max_tool_calling_iterations:
            return None
        self._answered_turns += 1
        answers: Messages = []
        for call in turn.calls:
            if self._is_closed:
                return None
            self._calls += 1
            self._failures += 1  # until it has succeeded
            reply = await self._run_call(call)
            self._failures -= not reply["failed"]
            answers.append({"role": "tool", "name": clean(call.name), "content": reply["text"]})
        return answers

    async def _run_call(self, call: Call) -> Reply:
        """Return the reply to a call. Raises CallLost if the environment is lost."""
        tools = self._setup.tools
        tool = tools.get(call.name)
        if call.error:
            return _fail(call.error)
        if tool is None:
            return _fail(f"there is no tool {call.name!r:.200}: there are {', '.join(tools)}")
        if misfit := tool.find_misfit(call.arguments):
            return _fail(misfit)
        failures = self._setup.failures
        try:
            if tool.is_method:
                reply = await self._instance.call_method(call.name, call.arguments)
            else:
                key = *self._key, "tool", self._calls
                reply = await self._setup.runner.call_tool(key, tool, call.arguments)
        except CallLost as lost:
            if tool.is_method:
                raise
            failures.note(f"tool {call.name!r} {lost}")
            return _fail(f"{call.name} {lost}")
        if "error" in reply:
            failures.note(f"tool {call.name!r} raised {reply['error']}", reply["traceback"])
        return reply

    async def _take_step(self, turn: Turn) -> tuple[Messages | None, bool]:
        """Return the environment's answer to a turn, None if it is the last, and whether it is done."""
        text, is_done = await self._instance.step(turn.content.strip())
        if is_done or self._turns == self._setup.config.max_turns:
            return None, is_done
        return [{"role": "user", "content": text}], False

    async def _end(self, finished: bool) -> None:
        rewards = {}
        if self._instance is not None:
            rewards = await self._instance.compute_reward()
            await self._instance.close()
        self._note_end(finished, rewards)

    def _note_end(self, finished: bool, rewards: dict[str, float]) -> None:
        self.outcome = Outcome(finished, self.messages, self._calls, self._failures, rewards)

    async def _close(self) -> None:
        async with self._order:
            if self._instance is not None:
                with PRINTS.limited():
                    await self._instance.close()


def _fail(reason: str) -> Reply:
    return {"text": clean(describe_failure(reason)), "failed": True}
