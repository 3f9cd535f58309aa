"""Tools, environments and agents on the wire: a run's settings of them, and what a completion or an episode became."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from grpo.wire import json_fields as fields
from grpo.wire.refusals import malformed

LONGEST_COLUMNS = 1 << 20  # most bytes of a row's columns as JSON
LONGEST_OUTCOME = 4 << 20  # most bytes of an outcome as JSON, which takes many times its size in memory
LONGEST_STORY = 4 << 20  # most bytes of an episode's text and tree as JSON
DEEPEST_ARGUMENTS = 50
"""most lists and objects within each other in a call's arguments: reward functions get a copy of the messages, which
takes Python several calls a level"""
_DEEPEST_MESSAGES = DEEPEST_ARGUMENTS + 5  # the messages, one of them, its calls, one of them, its function
_LIMITS = ("max_turns", "max_tool_calling_iterations", "max_tool_response_length")
SETTINGS = (*_LIMITS, "tool_call_parser", "chat_template_kwargs")  # those of a run that its workers take over
_REASON = re.compile(r"[a-z_]{1,40}")  # why a branch begins, which becomes a part of a metric's name
_TURN: dict[str, Any] = {
    **{"turn": int, "after": int | None, "begins": str | None, "prompt_tokens": int, "tokens": int, "seen": bool},
    "trained": bool,
    **{"asked_at": float | int, "answered_at": float | int},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a completion of several segments ended. Plain data, as all records."""

    finished: bool  # False for one that was cut: at max_completion_length, or after as many turns as the settings allow
    messages: list[dict[str, Any]]
    """the completion as chat messages, as a chat template takes them: of the assistant, perhaps with `tool_calls`, of
    role `tool`, and of the user where an environment answers in its own words. Each has a `content`, perhaps ''"""
    tool_calls: int = 0
    tool_failures: int = 0  # of the calls: malformed, of no such tool, with other arguments, raised, too slow
    rewards: dict[str, float] = field(default_factory=dict)  # of environment or agent, by the name in the log
    failure: str = ""  # the kind of failure of an agent's program: an exception's name, timeout; "" without
    parts: dict[str, float] = field(default_factory=dict)  # of an agent's reward, by name, for metrics alone

    def to_json(self) -> bytes:
        """Return it as JSON. A reward of NaN is null."""
        rewards = {name: None if math.isnan(value) else value for name, value in self.rewards.items()}
        return json.dumps(asdict(self) | {"rewards": rewards}).encode()

    @classmethod
    def of_json(cls, body: bytes) -> Outcome:
        """Read what `to_json` wrote. Raises ProtocolError, 400."""
        if len(body) > LONGEST_OUTCOME:
            raise malformed(f"an outcome of {len(body)} bytes: send {LONGEST_OUTCOME} at most")
        outcome = fields.read_fields(cls, fields.read_json(body))
        if not isinstance(outcome.finished, bool):
            raise malformed("finished: send true or false")
        if not (isinstance(outcome.messages, list) and all(map(_is_message, outcome.messages))):
            raise malformed("messages: send objects with a role and content, and calls with name and arguments")
        if not outcome.messages or outcome.messages[0]["role"] != "assistant":
            raise malformed("messages: send a message of the assistant first")
        if fault := fields.find_unrecordable(outcome.messages, _DEEPEST_MESSAGES):
            raise malformed(f"messages: send none that has {fault}")
        calls = fields.check_int("tool_calls", outcome.tool_calls, least=0)
        fields.check_int("tool_failures", outcome.tool_failures, least=0, most=calls)
        fields.check_text("failure", outcome.failure)
        if not isinstance(outcome.parts, dict) or not all(map(fields.is_number, outcome.parts.values())):
            raise malformed("parts: send an object of numbers")
        if not isinstance(outcome.rewards, dict) or not all(
            value is None or fields.is_number(value) for value in outcome.rewards.values()
        ):
            raise malformed("rewards: send an object of numbers, and null for no reward")
        rewards = {name: math.nan if value is None else float(value) for name, value in outcome.rewards.items()}
        return replace(outcome, rewards=rewards)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One sequence of an agent's episode. A token that several branches share is trained on in one of them."""

    prompt_ids: list[int]
    completion_ids: list[int]  # all that follows, from the first id that is trained on here
    sampling_logprobs: list[float]  # as a rollout's: of each of completion_ids, NaN for tokens not trained on here
    drawn: list[bool]  # True for each of completion_ids that is trained on here


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """What an episode became beside its drawn tokens and its outcome: see Rollout."""

    branches: list[Branch]
    text: str
    tree: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RunTools:
    """The tools and environment that a worker must have, and the run's settings of them."""

    tools: list[str]  # names of the functions that the model may call, the environment's methods among them
    schemas: str  # SHA-256 of the functions' JSON schemas, which the chat template gets
    environment: str | None  # name of the environment's class
    rewards: list[str]  # names of the rewards that the environment gives
    max_turns: int | None
    max_tool_calling_iterations: int | None
    max_tool_response_length: int
    tool_call_parser: str
    chat_template_kwargs: dict[str, Any] | None

    @classmethod
    def of(
        cls, schemas: Sequence[dict[str, Any]] | None, environment: str | None, rewards: Sequence[str], **settings: Any
    ) -> RunTools:
        """Describe functions by their JSON schemas, and an environment by its setting, path/to/file.py:Class.
        `settings` are those that SETTINGS names."""
        schemas = [*(schemas or [])]
        names = [schema["function"]["name"] for schema in schemas]
        digest = hashlib.sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()
        class_name = environment and environment.rpartition(":")[2]
        return cls(tools=names, schemas=digest, environment=class_name, rewards=[*rewards], **settings)

    @classmethod
    def of_fields(cls, content: object) -> RunTools:
        """Read a JSON object. Raises ProtocolError, 400."""
        turns = fields.read_fields(cls, content)
        for name in ("tools", "rewards"):
            fields.check_texts(name, getattr(turns, name), "names")
        fields.check_hex("schemas", turns.schemas, 64)
        fields.check_text("tool_call_parser", turns.tool_call_parser)
        if turns.environment is not None:
            fields.check_text("environment", turns.environment)
        for name in _LIMITS:
            if (value := getattr(turns, name)) is not None or name == "max_tool_response_length":
                fields.check_int(name, value, least=1)
        if not isinstance(turns.chat_template_kwargs, dict | None):
            raise malformed("chat_template_kwargs: send an object or null")
        return turns


@dataclass(frozen=True, kw_only=True)
class RunAgent:
    """The agent that a worker must have, and the run's settings of its episodes."""

    name: str  # of its function; `agent` for a command
    program: list[str]  # fingerprints of its files
    context: int  # most tokens of a request with its answer
    max_turns: int  # most answers of an episode
    agent_history: str
    agent_failure_reward: float | None
    agent_may_sample: bool
    tool_call_parser: str
    chat_template_kwargs: dict[str, Any] | None
    rewards: list[str]  # names of those that an episode may have

    @classmethod
    def of_fields(cls, content: object) -> RunAgent:
        """Read a JSON object. Raises ProtocolError, 400."""
        agent = fields.read_fields(cls, content)
        for name in ("name", "agent_history", "tool_call_parser"):
            fields.check_text(name, getattr(agent, name))
        for name in ("program", "rewards"):
            fields.check_texts(name, getattr(agent, name), "texts")
        fields.check_int("context", agent.context, least=1)
        fields.check_int("max_turns", agent.max_turns, least=1)
        if agent.agent_history not in ("drawn", "rendered"):
            raise malformed(f"agent_history {fields.shown(agent.agent_history)}: send drawn or rendered")
        if agent.agent_failure_reward is not None and not fields.is_number(agent.agent_failure_reward):
            raise malformed("agent_failure_reward: send a number or null")
        if not isinstance(agent.agent_may_sample, bool):
            raise malformed("agent_may_sample: send true or false")
        if not isinstance(agent.chat_template_kwargs, dict | None):
            raise malformed("chat_template_kwargs: send an object or null")
        return agent


def cut_segments(ids: Sequence[int], drawn: Sequence[bool] | None) -> list[tuple[bool, list[int]]]:
    """Cut a completion into (whether the policy drew it, ids) of each turn, of the policy or of an answer to it.
    `drawn` has for each id whether the policy drew it; None is all of them."""
    if drawn is None:
        return [(True, [*ids])]
    parts = groupby(zip(drawn, ids, strict=True), key=itemgetter(0))
    return [(is_drawn, [token for _, token in part]) for is_drawn, part in parts]


def check_columns(text: str) -> None:
    """Raise ProtocolError, 400, for all but a JSON object of LONGEST_COLUMNS bytes at most."""
    if len(text.encode()) > LONGEST_COLUMNS:
        raise malformed(f"the columns of a row have {len(text.encode())} bytes: send {LONGEST_COLUMNS} at most")
    fields.read_json(text.encode())


def _is_message(value: object) -> bool:
    """Tell whether a value is one of Outcome.messages."""
    if not isinstance(value, dict):
        return False
    calls = value.get("tool_calls", [])
    return (
        value.get("role") in ("assistant", "tool", "user")
        and isinstance(value.get("content"), str)
        and isinstance(value.get("name", ""), str)
        and isinstance(calls, list)
        and all(isinstance(call, dict) and _is_function(call.get("function")) for call in calls)
    )


def _is_function(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("arguments"), dict)


def read_story(body: bytes) -> tuple[str, list[dict[str, Any]]]:
    """Read an episode's text and tree, a JSON object. Raises ProtocolError, 400."""
    if len(body) > LONGEST_STORY:
        raise malformed(f"the text and tree of an episode have {len(body)} bytes: send {LONGEST_STORY} at most")
    content = fields.read_json(body)
    if not isinstance(content, dict) or content.keys() != {"text", "tree"}:
        raise malformed("an episode: send an object of text and tree")
    text, tree = content["text"], content["tree"]
    if not isinstance(text, str) or not isinstance(tree, list) or not all(map(_is_turn, tree)):
        raise malformed(f"an episode: send a text, and turns with {', '.join(_TURN)}")
    if fault := fields.find_unrecordable(text, deepest=0):
        raise malformed(f"an episode: send no text that has {fault}")
    return text, tree


def _is_turn(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _TURN.keys()
        and all(isinstance(value[name], kind) for name, kind in _TURN.items())
        and all(fields.is_number(value[name]) for name in ("asked_at", "answered_at"))
        and (value["begins"] is None or bool(_REASON.fullmatch(value["begins"])))
    )
