"""Answers the policy with the user's tools and environment: completions of several turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from grpo.config.errors import ConfigError, RewardError
from grpo.config.sampling_settings import TurnsSection
from grpo.config.user_code import Key
from grpo.data.records import Example, Outcome
from grpo.tools.runner import Failures, Instance, Runner
from grpo.tools.schema import load_tools, make_tool
from grpo.tools.session import EnvironmentClass, Reply, Session, TurnsService, clean, describe_failure
from grpo.tools.turn_text import AnswerTemplate, Call, Messages, Turn, TurnReader
from grpo.usercode.prints import PRINTS
from grpo.usercode.process import CallLost, ProcessPool, count_processes, run_in_loop

PRINTS_TOGETHER = 128  # how many completions share a limit of prints if they overlap without a pause, as on a worker
_Result = TypeVar("_Result")


def start_turns(
    config: TurnsSection, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]
) -> UserResponder | None:
    """Return the responder to the policy, or None. A turn ends with one of `eos_token_ids`. Raises ConfigError if a
    function or class cannot be used, or the tokenizer's chat template has no tools."""
    return UserResponder(config, tokenizer, eos_token_ids) if config.has_turns else None


class UserResponder:
    """The user's tools and environment, in all completions of a run: a Responder of grpo/data/records.py."""

    def __init__(self, config: TurnsSection, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]):
        """Take the arguments of `start_turns`."""
        loaded = load_tools(config.tools)
        environment = EnvironmentClass(config.environment) if config.environment else None
        for name, method in environment.methods.items() if environment else ():
            if name in loaded:
                raise ConfigError(f"environment={config.environment!r}: a tool is named {name!r} too: rename one")
            loaded[name] = make_tool("environment", config.environment, method, is_method=True)
        schemas = [tool.schema for tool in loaded.values()]
        self.tools: list[dict[str, Any]] | None = schemas or None  # the schemas, for the chat template, or None
        self.environment = environment
        gives_reward = environment is not None and environment.gives_reward
        self.rewards: dict[str, type] = {environment.label: environment.type} if gives_reward else {}
        """the environment's class by the name of its reward, if it gives one"""
        self.is_game = environment is not None and environment.is_game
        self.config, self.loaded = config, loaded
        self.template = AnswerTemplate(tokenizer, eos_token_ids, schemas, config.chat_template_kwargs, self.is_game)
        self.reader = TurnReader(tokenizer, eos_token_ids, schemas, config.tool_call_parser)
        self.failures = Failures()
        functions, longest = {name: tool.function for name, tool in loaded.items()}, config.max_tool_response_length
        processes = None
        if config.tool_timeout is not None:
            names = [*config.tools, *filter(None, [config.environment])]
            service = TurnsService, (config.tools, config.environment, longest), names
            processes = ProcessPool(service, config.tool_timeout, count_processes())
        self.runner = Runner(lambda: Session(functions, environment, longest), processes)
        self._end_id = eos_token_ids[0]
        self._live = self._ended = 0
        self._lock = threading.Lock()

    def observe(self, columns: dict[str, Any]) -> str:
        """See Responder."""
        return "" if self.environment is None else run_in_loop(self._observe(columns)).result()

    def try_on(self, example: Example) -> None:
        """Begin a completion of this example and end it by an empty turn, to find mistakes before sampling. Raises
        RewardError if `reset` says something else than as the data was read, or a method fails."""
        with closing(self.begin(example)) as dialogue:
            if (answer := dialogue.answer([self._end_id], room=1 << 30)) is not None:
                answer.result()

    def begin(self, example: Example, name: tuple[int, int, int] | None = None) -> UserDialogue:
        """See Responder."""
        with self._lock:
            self._live += 1
        return UserDialogue(self, example, ("greedy", example.index) if name is None else name)

    def close(self) -> None:
        """End the user's code, after all completions are closed."""
        self.runner.close()

    def make_instance(self, key: Key) -> Instance:
        return Instance(self.environment, self.runner.make_place(), key, self.failures)

    def count_end(self) -> None:
        """Note that a completion is closed."""
        with self._lock:
            self._live -= 1
            self._ended += 1
            ends_batch = self._live == 0 or self._ended % PRINTS_TOGETHER == 0
        if ends_batch:
            PRINTS.end_batch()

    async def _observe(self, columns: dict[str, Any]) -> str:
        instance = self.make_instance(("observe",))
        with PRINTS.limited():
            try:
                return await instance.reset(columns)
            except CallLost as lost:
                name = self.environment.name
                raise RewardError(f"environment={name!r}: reset {lost}, as the data was read") from None
            finally:
                await instance.close()


class UserDialogue:
    """A completion that tools and an environment answer: a Dialogue. All its steps run on the event loop, in order."""

    def __init__(self, responder: UserResponder, example: Example, key: Key):
        """Begin to reset an instance of the environment. `key` seeds the random numbers of the user's code."""
        self.outcome: Outcome | None = None
        self.messages: Messages = []
        self._responder, self._key = responder, key
        self._before = example.prompt_ids[:]  # the next turn
        self._turns = self._answered_turns = self._calls = self._failures = 0
        self._is_closed = False
        self._order = asyncio.Lock()
        self._instance: Instance | None = None
        self._reset: Future | None = None
        if responder.environment is not None:
            self._instance = responder.make_instance(key)
            self._reset = run_in_loop(self._in_order(self._open, self._instance, example))

    def answer(self, drawn: list[int], room: int) -> Future[list[int] | None] | None:
        """Answer a segment; see Dialogue."""
        reader = self._responder.reader
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
            run_in_loop(self._in_order(self._close)).result()
            self._responder.count_end()

    async def _in_order(self, step: Callable[..., Awaitable[_Result]], *arguments: Any) -> _Result:
        async with self._order:
            with PRINTS.limited():
                return await step(*arguments)

    async def _open(self, instance: Instance, example: Example) -> None:
        try:
            observation = await instance.reset(example.columns)
        except CallLost:
            return  # the first answer ends the completion
        instance.check_observation(observation, example)

    async def _close(self) -> None:
        if self._instance is not None:
            await self._instance.close()

    async def _answer(self, turn: Turn, is_whole: bool, room: int) -> list[int] | None:
        if self._reset is not None:
            await asyncio.wrap_future(self._reset)
        return await self._in_order(self._answer_turn, turn, is_whole, room)

    async def _answer_turn(self, turn: Turn, is_whole: bool, room: int) -> list[int] | None:
        if not is_whole or (self._instance is not None and self._instance.is_lost):
            return await self._end(False)
        try:
            if turn.calls:
                answers, is_over = await self._run_calls(turn), False
            elif self._responder.is_game:
                answers, is_over = await self._take_step(turn)
            else:
                answers, is_over = None, True
        except CallLost:
            answers, is_over = None, False
        if answers is None:
            return await self._end(is_over)
        ids = self._responder.template.encode(answers)
        if len(ids) >= room:
            return await self._end(False)
        self.messages += answers
        self._before = ids
        return ids

    async def _run_calls(self, turn: Turn) -> Messages | None:
        """Return the answers to the calls of a turn; None at the limits of turns."""
        config = self._responder.config
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
        tools, failures = self._responder.loaded, self._responder.failures
        if not (error := call.error):
            missing = f"there is no tool {call.name!r:.200}: there are {', '.join(tools)}"
            error = tools[call.name].find_misfit(call.arguments) if call.name in tools else missing
        if error:
            return _fail(error)
        tool = tools[call.name]
        try:
            if tool.is_method:
                reply = await self._instance.perform("method", call.name, call.arguments)
            else:
                key = *self._key, "tool", self._calls
                reply = await self._responder.runner.call_tool(key, tool, call.arguments)
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
        if is_done or self._turns == self._responder.config.max_turns:
            return None, is_done
        return [{"role": "user", "content": text}], False

    async def _end(self, finished: bool) -> None:
        rewards = {}
        if self._instance is not None:
            rewards = await self._instance.compute_reward()
            await self._instance.close()
        self._note_end(finished, rewards)

    def _note_end(self, finished: bool, rewards: dict[str, float]) -> None:
        self.outcome = Outcome(
            finished=finished,
            messages=self.messages,
            tool_calls=self._calls,
            tool_failures=self._failures,
            rewards=rewards,
        )


def _fail(reason: str) -> Reply:
    return {"text": clean(describe_failure(reason)), "failed": True}
