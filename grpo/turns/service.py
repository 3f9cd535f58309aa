"""What a process for tools and environments does."""

from __future__ import annotations

import asyncio
from typing import Any

from grpo.config.user_code import Key, user_code
from grpo.config.user_files import load_function
from grpo.turns.environment import EnvironmentClass
from grpo.turns.session import Reply, Session


class TurnsService:
    """Does the tasks of grpo/turns/session.py: a Service of grpo/rewards/worker.py."""

    def __init__(self, tools: list[str], environment: str | None, longest: int):
        """The arguments are the settings `tools`, `environment` and `max_tool_response_length`."""
        functions = {function.__name__: function for name in tools for function in [load_function("tools", name)]}
        self._session = Session(functions, EnvironmentClass(environment) if environment else None, longest)
        self._loop = asyncio.new_event_loop()

    def answer(self, key: Key, *task: Any) -> Reply:
        """Return the reply to a task, whose random numbers follow from `key`."""
        with user_code(*key):
            started = self._session.start(*task)
            if isinstance(started, dict):
                return started
            return self._loop.run_until_complete(self._session.finish(task[0], started))
