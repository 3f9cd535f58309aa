"""One completion of several turns: calls are run, an environment answers, until the completion is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from grpo.config.turns import TurnsSection
from grpo.config.user_code import Key
from grpo.rewards.event_loop import run_in_loop
from grpo.rewards.prints import PRINTS
from grpo.rewards.process import CallLost
from grpo.rollouts.records import Example, Outcome
from grpo.turns.calls import Call, Turn, TurnReader
from grpo.turns.environment import EnvironmentClass
from grpo.turns.instance import Failures, Instance, check_observation
from grpo.turns.runner import Runner
from grpo.turns.session import Reply, clean, describe_failure
from grpo.turns.template import AnswerTemplate, Messages
from grpo.turns.tools import Tool


@dataclass(frozen=True)
class Setup:
    """What all completions of a run have in common."""

    config: TurnsSection
    tools: dict[str, Tool]
    environment: EnvironmentClass | None
    reader: TurnReader
    template: AnswerTemplate
    runner: Runner
    failures: Failures


class UserDialogue:
    """A completion that tools and an environment answer: a Dialogue of grpo/rollouts/turns.py.

    What happens to it happens on the event loop, one thing after another.
    """

    def __init__(self, setup: Setup, example: Example, key: Key, on_close: Callable[[], None]):
        """Begin to reset an instance of the environment, where there is one. `key` is what the random numbers of the
        user's code follow from."""
        self.outcome: Outcome | None = None
        self.messages: Messages = []
        self._setup, self._key, self._on_close = setup, key, on_close
        self._before = example.prompt_ids[:]  # what the next turn follows
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
        """Close the instance where it is still open, after a call that runs."""
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
        """Return the answers to the calls of a turn; None where no more of them are answered."""
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
        """Return the reply to a call. Raises CallLost where the environment is lost."""
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
        """Return what the environment says to a turn, None where it answers no more, and whether it is done."""
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
