"""An agent's episodes on the wire: the run's settings of them, and what each became."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from grpo.wire import json_fields as fields
from grpo.wire.refusals import malformed

LONGEST_STORY = 4 << 20  # most bytes of an episode's text and tree as JSON
_REASON = re.compile(r"[a-z_]{1,40}")  # why a branch begins, which becomes a part of a metric's name
_TURN: dict[str, Any] = {
    **{"turn": int, "after": int | None, "begins": str | None, "prompt_tokens": int, "tokens": int, "seen": bool},
    "trained": bool,
    **{"asked_at": float | int, "answered_at": float | int},
}


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
