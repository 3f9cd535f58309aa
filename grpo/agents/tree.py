"""The token tree of an episode: what a program's requests became, and what was drawn after them.

A request whose messages continue an answer continues on the very ids that were drawn; any other begins a branch,
which is rendered once. No drawn id is ever replaced.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np

from grpo.agents.formats import Formats, read_messages, write_function
from grpo.agents.requests import ChatRequest
from grpo.data.records import Outcome, Rollout
from grpo.sampling.draw import uniforms
from grpo.sampling.sampler import Name
from grpo.tools.turn_text import Turn
from grpo.wire.tool_outcomes import Branch

Message = dict[str, Any]

NEW, EDITED, OTHER_TOOLS = "new_conversation", "changed_history", "other_tools"
NOT_DRAWN, NO_MESSAGE, RENDERED = "assistant_not_drawn", "no_new_message", "rendered_otherwise"
"""why a request begins a branch: it has no message of the assistant; the last of them was drawn here, after other
messages or with other tools; it was not drawn here; nothing follows it; see `history` of Formats"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What nodes need of the request for them. It may have a long history, which is not kept."""

    tools: list[dict]
    may_call: bool
    max_tokens: int | None
    chain: tuple[str, str]  # the digests of its tools and of all its messages
    told: list[tuple[str, Message]]  # the messages after its parent's reply, each with the digest up to it
    begins: str | None  # why it begins a branch; None: it continues
    scale: float = 1.0  # of the logits, see Segment


@dataclass(eq=False, kw_only=True, repr=False)
class Node:
    """A segment: asked for, then drawn."""

    key: tuple[int, str, float, bool, int, int]
    """its place in the tree: length and digest of the ids before it, the scale of its logits, whether the client sent a
    seed, the seed, how many such segments were asked for before. It follows from no time: only equal requests that race
    are in their order"""
    parent: Node | None
    before: list[int]  # the ids between the parent's and its own; without a parent all ids before it
    asked: Asked
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int = 0  # of the policy that drew it
    reply: Message = field(default_factory=dict)  # as the program gets it; empty until it is drawn
    finished: bool = False  # whether it ended with an end of the turn
    is_stopped: bool = False  # whether it ended as the program wanted: by a stop text or its max_tokens
    is_seen: bool = False  # whether the program got it; the gateway says so. Others are not trained on
    asked_at: float = 0.0  # seconds since the episode began, for people alone
    answered_at: float = 0.0
    calls: int = 0  # of tools, the unreadable ones included
    unreadable: int = 0

    @property
    def name(self) -> str:
        """its key as 32 hex digits"""
        return _digest(self.key)

    @property
    def is_trained(self) -> bool:
        """whether the program saw it, and it was drawn as the run draws: the loss scores tokens by that distribution,
        and another one's would need weights of any size"""
        return self.is_seen and self.asked.scale == 1

    @property
    def prompt_ids(self) -> list[int]:
        """all ids before it"""
        parts, node = [self.before], self.parent
        while node is not None:
            parts += node.ids, node.before
            node = node.parent
        return [*chain.from_iterable(reversed(parts))]


class Episode:
    """The tree of one episode. The caller calls one method at a time."""

    def __init__(self, formats: Formats, name: Name | None):
        """`name` is seed, group, number in the group: all random numbers follow from it. None draws greedily."""
        self.formats, self.name = formats, name
        self.nodes: list[Node] = []  # in the order of requests
        self._counts: Counter[tuple] = Counter()
        self._answered: dict[tuple[str, str], list[Node]] = defaultdict(list)  # by tools and messages, the reply too
        self._chains: set[str] = set()  # messages that end with a reply, whatever the tools
        self._replies: set[str] = set()

    def ask(self, request: ChatRequest, scale: float = 1.0) -> list[Node]:
        """Return the `n` nodes to draw for a request, with logits of this scale. Raises Refused if the chat template
        takes no such messages or tools. The time is linear in the length of the history.

        Among answered segments of equal texts, which a program cannot distinguish, the first by seen and key is
        continued."""
        messages, tools = read_messages(request.messages), _digest(_sorted(request.tools))
        names = [_digest(_identity(message)) for message in request.messages]
        chains = [*accumulate(names, _digest)]
        length = max((place for place, each in enumerate(messages, 1) if each["role"] == "assistant"), default=0)
        parent, begins = self._find(tools, names, chains, length)
        parent, before, ids = self._encode(parent, messages, length, request.tools)
        if parent is None:
            length, begins = 0, begins or RENDERED
        else:
            parent.is_seen = True  # whoever continues it has it
        told = [*zip(chains[length:], messages[length:], strict=True)]
        asked = Asked(
            tools=request.tools,
            may_call=request.may_call,
            max_tokens=request.max_tokens,
            chain=(tools, chains[-1]),
            told=told,
            begins=begins,
            scale=scale,
        )
        digest = hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()
        place = len(ids), digest, scale, request.seed is not None, request.seed or 0
        counts = range(self._counts[place], self._counts[place] + request.n)
        self._counts[place] += request.n
        nodes = [Node(key=(*place, count), parent=parent, before=before, asked=asked) for count in counts]
        self.nodes += nodes
        return nodes

    def withdraw(self, nodes: list[Node]) -> None:
        """Forget the nodes of the last request, which a limit refuses."""
        del self.nodes[-len(nodes) :]
        self._counts[nodes[0].key[:-1]] -= len(nodes)

    def numbers(self, node: Node, count: int) -> np.ndarray | None:
        """Return the random numbers of a node, float64 [count], 0 <= number < 1; None if greedy."""
        if self.name is None:
            return None
        seed, group, place = self.name
        return uniforms((int(_digest(seed, node.key), 16), group, place), count)

    def drew(
        self, node: Node, ids: list[int], logprobs: list[float], version: int, *, stop_at: int | None = None
    ) -> None:
        """Note what was drawn, one token at least, and fill in the reply. `stop_at` is the place in the text, without
        special tokens, at which a stop text of the request begins: the reply ends there, and the ids are kept."""
        reader = self.formats.reader(node.asked.tools)
        node.ids, node.logprobs, node.version = ids, logprobs, version
        node.finished = reader.is_whole(ids)
        node.is_stopped = stop_at is not None or len(ids) == node.asked.max_tokens
        whole = node.finished and stop_at is None and node.asked.may_call
        turn = reader.read(ids, node.prompt_ids) if whole else Turn(reader.read_text(ids).content[:stop_at])
        node.calls, node.unreadable = len(turn.calls), sum(bool(call.error) for call in turn.calls)
        node.reply = _write_reply(turn, node.name)
        reply = _digest(_identity(node.reply))
        tools, messages = node.asked.chain
        end = _digest(messages, reply)
        self._answered[tools, end].append(node)
        self._chains.add(end)
        self._replies.add(reply)

    def branches(self) -> list[Branch]:
        """Return the sequences to train on, in an order that no speed decides: each token of a seen segment is drawn in
        exactly one of them. A branch has the ids that earlier ones share with it in its prompt."""
        seen = sorted((node for node in self.nodes if node.is_seen), key=lambda node: node.key)
        # Which of equal segments was continued may follow from speed. Their ids are the same.
        first: dict[tuple, Node] = {}
        for node in seen:
            first.setdefault(_place(node), node)
        below: dict[Node | None, list[Node]] = defaultdict(list)
        for node in seen:
            below[node.parent and first[_place(node.parent)]].append(node)
        branches, begun = [], [[root] for root in reversed(below[None])]
        while begun:
            path = begun.pop()
            while following := below[path[-1]]:
                begun += [[node] for node in reversed(following[1:])]
                path.append(following[0])
            if any(node.is_trained for node in path):
                branches.append(_join(path))
        return branches

    def record(self, version: int) -> Rollout:
        """Return the record of the episode so far, drawn by this version of the policy, without rewards. All is of the
        segments that the program saw, in the order in which it asked for them: of several at once that in which they
        arrived. It has not finished if the run's limits cut a segment that nothing follows."""
        seen = [node for node in self.nodes if node.is_seen]
        trained = [node for node in seen if node.is_trained]
        parents, turns = {node.parent for node in seen}, {node: turn for turn, node in enumerate(self.nodes)}
        decode = functools.partial(self.formats.tokenizer.decode, skip_special_tokens=True)
        outcome = Outcome(
            finished=all(node.finished or node.is_stopped for node in seen if node not in parents),
            messages=_tell(seen),
            tool_calls=sum(node.calls for node in seen),
            tool_failures=sum(node.unreadable for node in seen),
        )
        return Rollout(
            completion_ids=[*chain.from_iterable(node.ids for node in trained)],
            finished=outcome.finished,
            text="\n".join(decode(node.ids) for node in seen),
            sampling_logprobs=[*chain.from_iterable(node.logprobs for node in trained)],
            policy_version=version,
            outcome=outcome,
            branches=self.branches(),
            tree=[_describe(node, turns) for node in self.nodes],
        )

    def _find(
        self, tools: str, names: list[str], chains: list[str], length: int
    ) -> tuple[Node, None] | tuple[None, str]:
        """Return the node whose reply is the last message of the assistant, the one at `length` from 1; or why there is
        none to continue."""
        if length == 0:
            return None, NEW
        if length == len(names):
            return None, NO_MESSAGE
        reply, end = names[length - 1], chains[length - 1]
        if nodes := self._answered.get((tools, end)):
            found = min(nodes, key=lambda node: (not node.is_seen, node.key))
            return found, None
        if end in self._chains:
            return None, OTHER_TOOLS
        return None, EDITED if reply in self._replies else NOT_DRAWN

    def _encode(
        self, parent: Node | None, messages: list[Message], length: int, tools: list[dict]
    ) -> tuple[Node | None, list[int], list[int]]:
        """Return the node that is continued, if any, the ids after it, and all ids before the new segment."""
        self.formats.reader(tools)
        rendered = None
        if parent is None or self.formats.history == "rendered":
            rendered = self.formats.render(messages, tools)
        if parent is not None:
            before = self.formats.continue_on(parent.ids, messages[length:], tools)
            ids = [*parent.prompt_ids, *parent.ids, *before]
            if rendered is None or self.formats.is_same_text(ids, rendered):
                return parent, before, ids
        return None, rendered, rendered


def _describe(node: Node, turns: dict[Node, int]) -> dict[str, Any]:
    return {
        "turn": turns[node],
        "after": turns.get(node.parent),
        "begins": node.asked.begins,
        "prompt_tokens": node.key[0],
        "tokens": len(node.ids),
        "seen": node.is_seen,
        "trained": node.is_trained,
        "asked_at": round(node.asked_at, 3),
        "answered_at": round(node.answered_at, 3),
    }


def _identity(message: Message) -> list:
    """Return what makes a message, as programs send and get it, this one."""
    calls = [
        (call["id"], call["function"]["name"], _normalise(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return [message["role"], (message["content"] or "").strip(), calls, message.get("tool_call_id")]


def _normalise(arguments: str) -> str:
    """Return what texts of the same JSON value share; a text that is none as it is."""
    try:
        return _sorted(json.loads(arguments, parse_float=_number))
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> int | float:
    """Read a number that JavaScript may have written without its .0."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


def _write_reply(turn: Turn, name: str) -> Message:
    """Return a turn as a program gets it. `name`: of its node, from which the ids of calls follow."""
    message = turn.to_message()
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": f"call_{_digest(name, place)[:24]}", **call, "function": write_function(call["function"])}
            for place, call in enumerate(calls)
        ]
    return message


def _place(node: Node) -> tuple:
    """Return what equal segments after the same ids share."""
    return *node.key[:3], *node.ids


def _join(path: list[Node]) -> Branch:
    """Make a branch of segments that follow each other, from the first to the last that is trained on."""
    first, *_, last = [place for place, node in enumerate(path) if node.is_trained] * 2
    ids, logprobs, drawn = [], [], []
    for node in path[first : last + 1]:
        before = node.before if ids else []  # those before the first are in the prompt
        ids += [*before, *node.ids]
        logprobs += [math.nan] * len(before)
        logprobs += node.logprobs if node.is_trained else [math.nan] * len(node.ids)
        drawn += [False] * len(before) + [node.is_trained] * len(node.ids)
    return Branch(prompt_ids=path[first].prompt_ids, completion_ids=ids, sampling_logprobs=logprobs, drawn=drawn)


def _tell(seen: list[Node]) -> list[Message]:
    """Return the messages of these segments' replies, and those of tools and users before them, as in Outcome.messages;
    the prompt of the first is left out. A program that rewrites its history, such as one that keeps the last twenty
    messages, sends messages again: of those with the same text only the ones beyond the number told so far are new."""
    told, known, messages = set(), Counter(), []
    for node in seen:
        rewrites, said = node.asked.begins not in (None, NEW), Counter()
        for end, message in node.asked.told:
            text = message["role"], message["content"], message.get("tool_call_id")
            said[text] += 1
            if end not in told and (not rewrites or said[text] > known[text]):
                known[text] += 1
                if node is not seen[0] and message["role"] in ("tool", "user"):
                    messages.append(message)
            told.add(end)
        [reply] = read_messages([node.reply])
        messages.append(reply | {"content": reply["content"] or ""})
    return messages
