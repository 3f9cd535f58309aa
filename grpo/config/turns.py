"""Settings of what answers the policy between its turns: tools and environments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo.config.fields import Section, option
from grpo.config.user_files import check_file

ANSWERED = "tools or environment"


@dataclass
class TurnsCodeSection(Section):
    """The user's code that answers the model, and how it is run: a worker of a pool has settings of its own."""

    tools: list[str] = option(
        [],
        "functions that the model may call, each with type hints and a docstring: path/to/file.py:function",
        may_be_empty=True,
    )
    environment: str | None = option(
        None,
        "class that answers the model, one instance for each completion: path/to/file.py:Class, with reset and methods "
        "that the model calls as tools, or with reset and step",
    )
    tool_timeout: float | None = option(
        None,
        "seconds that a call of a tool or environment may take: all but async tools run in other processes, which are "
        "killed if they hang; unset runs them in this process",
        needs=ANSWERED,
        above=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.tools:
            check_file("tools", name, name.rpartition(":")[0])
        if self.environment is not None:
            check_file("environment", self.environment, self.environment.rpartition(":")[0])

    @property
    def has_turns(self) -> bool:
        return bool(self.tools) or self.environment is not None


@dataclass
class TurnsSection(TurnsCodeSection):
    """The settings of tools and environments."""

    HEADING = "tools and environments"

    max_tool_calling_iterations: int | None = option(
        None,
        "most turns of a completion whose calls are answered; unset is as many as there is room for",
        needs=ANSWERED,
        above=0,
    )
    max_turns: int | None = option(
        None,
        "most turns of the model in a completion; unset is as many as there is room for",
        needs=ANSWERED,
        above=0,
    )
    max_tool_response_length: int = option(
        2048, "characters of an answer, of a tool or an environment, beyond which it is cut", needs=ANSWERED, above=0
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = option(
        "auto",
        "how the model writes calls, where its tokenizer has no response template; auto looks into the chat template",
        needs=ANSWERED,
    )
