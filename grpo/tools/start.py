"""Loads and checks the configured tools and environment, and answers the policy with them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.config.errors import ConfigError, RewardError
from grpo.config.sampling_settings import TurnsSection
from grpo.data.records import Example
from grpo.tools.dialogue import Failures, Instance, Setup, UserDialogue
from grpo.tools.environment import EnvironmentClass
from grpo.tools.parse import TurnReader
from grpo.tools.runner import Runner
from grpo.tools.schema import load_tools, make_tool
from grpo.tools.session import Session, TurnsService
from grpo.tools.template import AnswerTemplate
from grpo.usercode.prints import PRINTS
from grpo.usercode.process import CallLost, ProcessPool, count_processes, run_in_loop

PRINTS_TOGETHER = 128
"""how many completions share a limit of prints if they overlap without a pause, as on a worker"""


def start_turns(
    config: TurnsSection, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]
) -> UserResponder | None:
    """Return the responder to the policy, or None. `config` has AnswerSection's settings too; a turn ends with one of
    `eos_token_ids`.

    Raises ConfigError if a function or class cannot be used, or the tokenizer's chat template has no tools.
    """
    return UserResponder(config, tokenizer, eos_token_ids) if config.has_turns else None


class UserResponder:
    """The user's tools and environment, in all completions of a run: a Responder of grpo/data/responder.py."""

    def __init__(self, config: TurnsSection, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]):
        """Take the arguments of `start_turns`."""
        loaded = load_tools(config.tools)
        environment = EnvironmentClass(config.environment) if config.environment else None
        tools = {name: tool for name, (tool, _) in loaded.items()}
        for name, method in environment.methods.items() if environment else ():
            if name in tools:
                raise ConfigError(f"environment={config.environment!r}: a tool is named {name!r} too: rename one")
            tools[name] = make_tool("environment", config.environment, method, is_method=True)
        schemas = [tool.schema for tool in tools.values()]
        self.tools: list[dict[str, Any]] | None = schemas or None
        """the schemas, for the chat template, or None"""
        self.environment = environment
        self.rewards: dict[str, type] = {}
        """the environment's class by the name of its reward, if it gives one"""
        if environment is not None and environment.gives_reward:
            self.rewards[environment.label] = environment.type
        is_game = environment is not None and environment.is_game
        template = AnswerTemplate(tokenizer, eos_token_ids, schemas, config.chat_template_kwargs, is_game)
        reader = TurnReader(tokenizer, eos_token_ids, schemas, config.tool_call_parser)
        functions = {name: function for name, (_, function) in loaded.items()}
        longest = config.max_tool_response_length
        processes = None
        if config.tool_timeout is not None:
            names = [*config.tools, *([config.environment] if config.environment else [])]
            arguments = config.tools, config.environment, longest
            processes = ProcessPool((TurnsService, arguments, names), config.tool_timeout, count_processes())
        runner = Runner(lambda: Session(functions, environment, longest), processes)
        self._setup = Setup(config, tools, environment, reader, template, runner, Failures())
        self._end_id = eos_token_ids[0]
        self._live = self._ended = 0
        self._lock = threading.Lock()

    def observe(self, columns: dict[str, Any]) -> str:
        """Return the environment's observation of a dataset's row, the end of the prompt; "" without an environment.

        From any thread. Raises RewardError if reset fails.
        """
        if self.environment is None:
            return ""
        return run_in_loop(self._observe(self.environment, columns)).result()

    def try_on(self, example: Example) -> None:
        """Begin a completion of this example and end it by an empty turn, to find mistakes before sampling.

        Raises RewardError if `reset` says something else than as the data was read, or a method fails.
        """
        dialogue = self.begin(example)
        try:
            if (answer := dialogue.answer([self._end_id], room=1 << 30)) is not None:
                answer.result()
        finally:
            dialogue.close()

    def begin(self, example: Example, name: tuple[int, int, int] | None = None) -> UserDialogue:
        """Begin a completion of this example, with this name. The caller closes it."""
        with self._lock:
            self._live += 1
        key = ("greedy", example.index) if name is None else name
        return UserDialogue(self._setup, example, key, self._count_end)

    def close(self) -> None:
        """End the user's code, after all completions are closed."""
        self._setup.runner.close()

    async def _observe(self, environment: EnvironmentClass, columns: dict[str, Any]) -> str:
        instance = Instance(environment, self._setup.runner.make_place(), ("observe",), self._setup.failures)
        with PRINTS.limited():
            try:
                return await instance.reset(columns)
            except CallLost as lost:
                raise RewardError(f"environment={environment.name!r}: reset {lost}, as the data was read") from None
            finally:
                await instance.close()

    def _count_end(self) -> None:
        with self._lock:
            self._live -= 1
            self._ended += 1
            ends_batch = self._live == 0 or self._ended % PRINTS_TOGETHER == 0
        if ends_batch:
            PRINTS.end_batch()
