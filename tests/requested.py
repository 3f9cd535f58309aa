"""Requests of a program, and segments that say what a test wants, in the place of what a policy draws."""

from __future__ import annotations

from collections import Counter
from typing import Any

from talks import ids_of
from transformers import PreTrainedTokenizerBase

from grpo.agents.formats import Formats
from grpo.agents.requests import ChatRequest
from grpo.agents.tree import Episode, Node

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


def make_request(messages: list[dict], tools: list[dict] | tuple = (), **fields: Any) -> ChatRequest:
    """Make a request as grpo/agents/requests.py reads it."""
    options = dict(n=1, stop=[], max_tokens=None, seed=None, logprobs=False, stream=False, include_usage=False)
    options |= dict(temperature=None, top_p=None, may_call=True)
    return ChatRequest(messages=messages, tools=[*tools], **options | fields)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def tool(call_id: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def sent_back(node: Node, **changes: Any) -> dict:
    """Return a reply as a program sends it back, with a text for its content."""
    return node.reply | {"content": node.reply["content"] or ""} | changes


def spelled(tokenizer: PreTrainedTokenizerBase, text: str, ends: bool = True) -> list[int]:
    """Return ids of a text as a policy may draw them, and no tokenizer writes them: each character is on its own."""
    return [*(i for letter in text for i in ids_of(tokenizer, letter, ends=False)), *ids_of(tokenizer, "", ends)]


class Asked:
    """An episode whose segments say what they are told to."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name=(7, 3, 1), parser: str = "auto", **options: Any):
        """`options`: template_kwargs and history of Formats."""
        self.tokenizer, kwargs = tokenizer, options.pop("template_kwargs", None)
        formats = Formats(tokenizer, [tokenizer.eos_token_id], parser, kwargs, **options)
        self.episode = Episode(formats, name)
        self.given: list[tuple[list[int], list[int]]] = []  # the ids before each segment, and its own

    def say(self, node: Node, drawn: str | list[int], *, seen: bool = True, stop_at: int | None = None) -> Node:
        ids = ids_of(self.tokenizer, drawn) if isinstance(drawn, str) else drawn
        self.given.append((node.prompt_ids, ids))
        self.episode.drew(node, ids, [-0.5] * len(ids), 4, stop_at=stop_at)
        node.is_seen = node.is_seen or seen
        return node

    def ask(self, messages: list[dict], drawn: str | list[int], tools=(), **options: Any) -> Node:
        """Ask for one segment, which says this."""
        said = {name: options.pop(name) for name in ("seen", "stop_at") if name in options}
        scale = options.pop("scale", 1.0)
        [node] = self.episode.ask(make_request(messages, tools, **options), scale)
        return self.say(node, drawn, **said)


def seen_turns(episode: Episode) -> list[dict]:
    return [turn for turn in episode.record(4).tree if turn["seen"]]


def unseen(episode: Episode) -> int:
    """How many segments were drawn, and never seen."""
    return sum(turn["tokens"] > 0 and not turn["seen"] for turn in episode.record(4).tree)


def begun(episode: Episode) -> Counter[str]:
    """How many seen segments begin a branch, by why."""
    return Counter(turn["begins"] for turn in seen_turns(episode) if turn["begins"])
