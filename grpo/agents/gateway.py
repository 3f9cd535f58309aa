"""The OpenAI API of a run: a program's requests, each of which belongs to an episode by its key, drawn by the policy.

    program -> POST /v1/chat/completions -> Episode.ask: ids -> Drawer: more ids -> Episode.drew: a message -> program

It listens on 127.0.0.1 alone. A request waits in a thread of the web server until its segments are drawn.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import queue
import secrets
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import bottle

from grpo.agents.journal import Journal
from grpo.agents.requests import ChatRequest, Refused, read_request
from grpo.agents.tree import Episode, Node
from grpo.config.server import ServerConfig
from grpo.sampling.drawer import Drawer, Drawn, Segment
from grpo.server.http import THREADS, HttpServer
from grpo.wire.health import fingerprint
from grpo.wire.refusals import ProtocolError

log = logging.getLogger(__name__)

_BODY_BYTES = 4 << 20  # of a request: a hundred times what a long context has
_CONNECTIONS = 4  # of each episode
_MODEL = "policy"  # its name in the API
_HOTTEST = 2  # highest temperature of a request, as OpenAI has it
_SHARPEST = 2.0**40  # the scale of greedy drawing: the most likely token gets all
_PARTIAL = "\ufffd"  # decoded from a part of a character's bytes


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """What an episode may draw."""

    longest: int  # tokens of a segment
    context: int  # tokens of a request with its segment
    turns: int  # segments
    temperature: float  # the run's
    draw_temperature: float  # an evaluation may have its own; 1 where it draws greedily
    may_sample: bool = False  # whether a request may have another, as the setting agent_may_sample says


@dataclass(eq=False, kw_only=True)
class RunningEpisode:
    """A running episode."""

    episode: Episode
    drawer: Drawer
    limits: EpisodeLimits
    version: int  # of the policy
    journal: Journal | None = None  # of an episode that is trained on
    on_wait: Callable[[bool], None] = lambda waits: None  # is told that a request begins (True), and that it has ended
    lock: threading.Lock = field(default_factory=threading.Lock)  # of the episode
    segments: dict[Node, Segment] = field(default_factory=dict)
    exchanges: dict[str, ChatExchange] = field(default_factory=dict)  # by a request's body, for the client's retries
    began: float = field(default_factory=time.monotonic)
    turns: int = 0
    refusal: str = ""  # the code of the last refusal at a limit, which is how an episode that then fails has failed
    is_over: bool = False

    def check_turns(self, segments: int) -> None:
        """Raise Refused if so many more segments are above the limit."""
        if self.turns + segments > self.limits.turns:
            message = f"the episode has {self.turns} turns, and may have {self.limits.turns} (max_turns): end it"
            raise self.refuse(message, code="max_turns")

    def refuse(self, message: str, *, code: str, param: str | None = None) -> Refused:
        """Return the refusal of a request at a limit."""
        self.refusal = code
        return Refused(message, code=code, param=param)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let a request of the program wait inside."""
        self.on_wait(True)
        try:
            yield
        finally:
            self.on_wait(False)


class ChatExchange:
    """A request while it is drawn and after it."""

    def __init__(self, session: RunningEpisode, wanted: ChatRequest):
        """Ask for the segments. Raises Refused."""
        self._session, self._wanted = session, wanted
        self._tokenizer = session.episode.formats.tokenizer
        self._answer: dict[str, Any] | None = None
        self._lock = threading.Lock()  # of the answer, which a retry may wait for too
        self._pieces: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        """for a stream: which segment has which text by now; None: one has ended"""
        self._is_streamed = False
        scale = find_scale(wanted, session.limits)
        with session.lock:  # as whole as its end, which cancels the segments
            if session.is_over:
                raise Refused("the episode is over", code="episode_over")
            session.check_turns(wanted.n)
            self.nodes: list[Node] = session.episode.ask(wanted, scale)
            self._prompt_ids = self.nodes[0].prompt_ids
            room = self._find_room()
            session.turns += wanted.n  # a refused request takes none
            session.refusal = ""  # the program got over the last one
            self._wanted = replace(wanted, messages=[])  # else each turn would keep all before it
            self._segments = [self._segment(number, node, room) for number, node in enumerate(self.nodes)]
        for segment in self._segments:
            if not segment.done.done():
                session.drawer.submit(segment)

    def _find_room(self) -> int:
        """Return the most tokens of a segment. Raises Refused without any."""
        limits, length = self._session.limits, len(self._prompt_ids)
        room = min(self._wanted.max_tokens or limits.longest, limits.longest, limits.context - length)
        if room < 1:
            self._session.episode.withdraw(self.nodes)
            message = f"messages: they have {length} tokens, and with an answer may have {limits.context}: send fewer"
            raise self._session.refuse(message, code="context_length_exceeded", param="messages")
        return room

    def _seconds(self) -> float:
        return time.monotonic() - self._session.began

    def _segment(self, number: int, node: Node, room: int) -> Segment:
        session, watches = self._session, bool(self._wanted.stop) or self._wanted.stream
        segment = Segment(
            prompt_ids=self._prompt_ids,
            room=room,
            numbers=session.episode.numbers(node, room),
            scale=node.asked.scale,
            after=session.segments.get(node.parent),
            find_end=(lambda ids: self._watch(number, ids)) if watches else None,
        )
        node.asked_at, session.segments[node] = self._seconds(), segment
        if session.journal is not None:
            episode, request = session.episode.name, fingerprint(node.name, room, self._wanted.stop)
            segment.keep = functools.partial(session.journal.add, episode, request)
            if drawn := session.journal.find(episode, request):  # before the run was killed
                segment.done.set_result(drawn)
        segment.done.add_done_callback(lambda _: self._pieces.put(None))
        return segment

    def _watch(self, number: int, ids: list[int]) -> int | None:
        """See Segment.find_end: it ends with the token in which a stop text ends, whose last token may have more."""
        place = self._find_stop(ids)
        if self._wanted.stream:
            text = self._text(ids)
            held_back = max(map(len, self._wanted.stop), default=1) - 1  # a stop text may have begun
            self._pieces.put((number, text[: max(0, len(text) - held_back) if place is None else place]))
        if place is None:
            return None
        return bisect_left(range(len(ids)), True, key=lambda count: self._find_stop(ids[:count]) is not None)

    def _find_stop(self, ids: list[int]) -> int | None:
        """Return the place in the text at which the first stop text begins; None without."""
        if not self._wanted.stop:
            return None
        text = self._text(ids)
        return min((place for stop in self._wanted.stop if (place := text.find(stop)) >= 0), default=None)

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def answer(self) -> dict[str, Any]:
        """Wait for the segments, and return the answer, the same one each time. Raises Refused if the episode ends."""
        with self._lock:
            if self._answer is None:
                self._answer = self._finish()
            return self._answer

    def hand_over(self, is_gone: bool) -> None:
        """Note that the program has the answer, unless its connection is gone."""
        for node in self.nodes:
            node.is_seen = node.is_seen or not is_gone

    def _finish(self) -> dict[str, Any]:
        choices = []
        for number, (node, segment) in enumerate(zip(self.nodes, self._segments, strict=True)):
            try:
                drawn = segment.done.result()
            except CancelledError:
                raise Refused("the episode is over", code="episode_over") from None
            except Exception as error:  # the sampler's, which raises it too
                raise Refused(f"the run has failed: {error}", status=503) from None
            stop_at = self._find_stop(drawn.ids)
            with self._session.lock:
                if self._session.is_over:
                    raise Refused("the episode is over", code="episode_over")
                version, node.answered_at = self._session.version, self._seconds()
                self._session.episode.drew(node, drawn.ids, drawn.logprobs, version, stop_at=stop_at)
            reason = "stop" if node.finished or stop_at is not None else "length"
            choices.append(
                {
                    "index": number,
                    "message": node.reply,
                    "finish_reason": "tool_calls" if node.reply.get("tool_calls") else reason,
                    "logprobs": self._logprobs(drawn) if self._wanted.logprobs else None,
                }
            )
        prompt, completion = len(self._prompt_ids), sum(len(node.ids) for node in self.nodes)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.nodes[0].name}", "object": kind, "created": int(time.time()), "model": _MODEL}

    def _logprobs(self, drawn: Drawn) -> dict[str, Any]:
        content = []
        for token, logprob in zip(drawn.ids, drawn.logprobs, strict=True):
            text = self._tokenizer.decode([token])
            content.append({"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []})
        return {"content": content, "refusal": None}

    def stream(self, is_gone: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Yield the answer in pieces, as they are drawn; to a retry whole, as the first stream may have taken some. A
        text that may be the begin of a call waits for its end."""
        head, sent = self._head("chat.completion.chunk"), [0] * len(self.nodes)

        def chunk(number: int, delta: dict[str, Any], **at_end: Any) -> dict[str, Any]:
            choice = {"index": number, "delta": delta, "finish_reason": None, "logprobs": None}
            return {**head, "choices": [choice | at_end]}

        for number in range(len(self.nodes)):
            yield chunk(number, {"role": "assistant", "content": ""})
        left, self._is_streamed = 0 if self._is_streamed else len(self.nodes), True
        while left:
            piece = self._pieces.get()
            if piece is None:
                left -= 1
                continue
            number, text = piece
            if not self._wanted.tools and len(text) > sent[number] and not text.endswith(_PARTIAL):
                yield chunk(number, {"content": text[sent[number] :]})
                sent[number] = len(text)
        whole = self.answer()
        self.hand_over(is_gone())  # a program that has the last pieces may end at once
        for choice in whole["choices"]:
            number, message = choice["index"], choice["message"]
            if rest := (message["content"] or "")[sent[number] :]:
                yield chunk(number, {"content": rest})
            if calls := message.get("tool_calls"):
                yield chunk(number, {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]})
            yield chunk(number, {}, finish_reason=choice["finish_reason"], logprobs=choice["logprobs"])
        if self._wanted.include_usage:
            yield {**head, "choices": [], "usage": whole["usage"]}


def find_scale(wanted: ChatRequest, limits: EpisodeLimits) -> float:
    """Return the segment's scale. Raises Refused for sampling settings that are not allowed: the loss scores tokens as
    the run draws them."""
    if wanted.top_p not in (None, 1):
        raise Refused(f"top_p: {wanted.top_p:g}: the run draws with 1: leave it out", param="top_p")
    ours, theirs = limits.temperature, wanted.temperature
    if theirs is None or theirs == ours:
        return 1.0
    if not limits.may_sample:
        remedy = f"the run draws with {ours:g}: leave it out, or start the run with agent_may_sample"
        raise Refused(f"temperature: {theirs:g}: {remedy}", param="temperature")
    if not 0 <= theirs <= _HOTTEST:
        raise Refused(f"temperature: {theirs:g}: send a number from 0 to {_HOTTEST}", param="temperature")
    return min(limits.draw_temperature / theirs, _SHARPEST) if theirs else _SHARPEST


class Gateway:
    """The server, in threads of this process."""

    def __init__(self, episodes: int, segments: int) -> None:
        """Listen on a free port, for so many episodes that run at a time, and segments that are drawn at a time."""
        self._sessions: dict[str, RunningEpisode] = {}
        config = ServerConfig(port=0, max_connections=_CONNECTIONS * (episodes + segments))
        self._server = HttpServer(
            _App(self),
            config,
            admit=self._admit,
            on_refused=lambda **refused: None,
            # A program's clock stands still once a thread has its request, which it keeps until the answer is drawn.
            threads=max(THREADS, config.max_connections),
        )
        self.url = f"{self._server.url}/v1"
        threading.Thread(target=self._server.run, name="gateway", daemon=True).start()

    def open(self, session: RunningEpisode) -> str:
        """Let an episode begin; return its key."""
        key = f"sk-{secrets.token_hex(24)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """End an episode: the segments that it still waits for are not drawn."""
        session = self._sessions.pop(key)
        with session.lock:
            session.is_over = True
            segments = [*session.segments.values()]
        for segment in segments:
            segment.done.cancel()

    def shut_down(self) -> None:
        """Stop listening, and close all connections."""
        self._server.stop()

    def find(self, authorization: str) -> RunningEpisode:
        """Return the episode of a header. Raises Refused."""
        session = self._sessions.get(authorization.removeprefix("Bearer "))
        if session is None:
            raise Refused("the key belongs to no running episode", status=401, code="invalid_api_key")
        return session

    def _admit(self, path: str, headers: dict[str, str]) -> tuple[bool, ProtocolError | None]:
        """Refuse before the body is read; see HttpServer."""
        try:
            self.find(headers.get("AUTHORIZATION", ""))
        except Refused as refused:
            return False, ProtocolError(refused.status, refused.code, refused.message)
        if (length := headers.get("CONTENT_LENGTH", "")).isdecimal() and int(length) > _BODY_BYTES:
            message = f"the request has {length} bytes, and may have {_BODY_BYTES}: send less"
            return False, ProtocolError(413, "request_too_large", message)
        return True, None


class _App(bottle.Bottle):
    """The WSGI application: the paths of the API, and errors in its form."""

    def __init__(self, gateway: Gateway):
        super().__init__()
        self._gateway = gateway
        self.post("/v1/chat/completions", callback=self._chat)
        self.get("/v1/models", callback=self._models)
        self.install(_refusable)

    def default_error_handler(self, error: bottle.HTTPError) -> bytes:
        """Return OpenAI's form of 404, 405, or of a fault of ours."""
        if error.status_code >= 500:
            log.error("a request of a program failed", exc_info=error.exception)
        messages = {
            404: f"{bottle.request.path} is not served: use /v1/chat/completions or /v1/models",
            405: f"use {error.get_header('Allow')} for {bottle.request.path}",
        }
        message = messages.get(error.status_code, "the gateway failed: the run's log says how")
        error.content_type = "application/json"
        return Refused(message, status=error.status_code).to_json()

    def _models(self) -> dict[str, Any]:
        self._gateway.find(bottle.request.get_header("Authorization", ""))
        model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "grpo"}
        return {"object": "list", "data": [model]}

    def _chat(self) -> bottle.HTTPResponse | Iterator[bytes]:
        request = bottle.request
        session = self._gateway.find(request.get_header("Authorization", ""))
        with request.environ["wsgi.input"] as file:
            body = file.read()
        is_gone = request.environ["waitress.client_disconnected"]
        is_retry = request.get_header("X-Stainless-Retry-Count", "0").strip() not in ("", "0")
        wanted, name = read_request(body), hashlib.sha256(body).hexdigest()
        # A client that gave up, or lost the answer, asks again: nothing is drawn twice.
        exchange = session.exchanges.get(name) if is_retry else None
        if exchange is None:
            session.exchanges[name] = exchange = ChatExchange(session, wanted)
        if wanted.stream:
            bottle.response.content_type = "text/event-stream"
            return _events(session, exchange, is_gone)
        with session.waiting():
            answer = exchange.answer()
        exchange.hand_over(is_gone())
        return bottle.HTTPResponse(json.dumps(answer), 200, {"Content-Type": "application/json"})


def _events(session: RunningEpisode, exchange: ChatExchange, is_gone: Callable[[], bool]) -> Iterator[bytes]:
    """Yield server-sent events. An error in their midst is one of them, as the status is sent."""
    with session.waiting():
        try:
            for chunk in exchange.stream(is_gone):
                yield b"data: %s\n\n" % json.dumps(chunk).encode()
        except Refused as refused:
            yield b"data: %s\n\n" % refused.to_json()
            return
    yield b"data: [DONE]\n\n"


def _refusable(handler: Callable) -> Callable:
    def answer_or_refuse(*arguments: Any, **options: Any) -> Any:
        try:
            return handler(*arguments, **options)
        except Refused as refused:
            return bottle.HTTPResponse(refused.to_json(), refused.status, {"Content-Type": "application/json"})

    return answer_or_refuse
