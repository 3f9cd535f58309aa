"""The trainer's side of the wire: groups go out the moment they are generated, log-probs come back when they are ready.

A request is stateless, so it is simply sent again, to another server if there is one, until one answers or the deadline
is over: a server that is killed and restarted costs time and nothing else. Work goes to each server by its measured
speed; one that fails is set aside, and has work again when it is well.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from grpo.protocol import Health, LogprobsRequest, decode_answer, encode_request
from grpo.records import Message
from grpo.ref_wire import Failure, Outdated, Reference, RefError, RefUnavailable, RefWire
from grpo.reward_protocol import RewardAnswer, RewardRequest
from grpo.trainer_config import TrainerConfig

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 5.0
_IN_FLIGHT = 8  # requests of one rank at one server at a time


def check_reference(config: TrainerConfig, policy: Health, reference: Health) -> None:
    """Refuse a reference whose token ids mean something else than the policy's, or that takes shorter sequences.

    Raises RefError. Other weights are allowed (training may go on from a fine-tuned model), and said.
    """
    urls = " ".join(config.ref_servers)
    restart = f"restart it with --model_name_or_path {config.model_name_or_path}"
    if reference.tokenizer_fingerprint != policy.tokenizer_fingerprint:
        raise RefError(f"{urls} serves {reference.model}, whose tokenizer is not that of {policy.model}: {restart}")
    if reference.vocab_size != policy.vocab_size:
        raise RefError(
            f"{urls} serves {reference.model} with a vocabulary of {reference.vocab_size}, and {policy.model} has "
            f"{policy.vocab_size}: {restart}"
        )
    if config.longest_sequence > reference.max_length:
        raise RefError(
            f"{urls} takes at most {reference.max_length} tokens a sequence, and max_prompt_length + "
            f"max_completion_length is {config.longest_sequence}: restart it with a larger --max_length, or lower one "
            "of them"
        )
    if config.ref_update_steps and reference.config_fingerprint != policy.config_fingerprint:
        raise RefError(
            f"{urls} serves {reference.model}, whose configuration is not that of {policy.model}, so it cannot take "
            f"these weights: {restart}, or set ref_update_steps to 0"
        )
    if reference.model_fingerprint != policy.model_fingerprint:
        log.warning(
            "the reference (%s) is another model than the policy starts from (%s): the KL will not begin at 0",
            reference.model,
            policy.model,
        )


class _Server:
    """What this client knows of one server. Once requests are under way it changes under the client's lock only."""

    def __init__(self, url: str):
        self.url = url
        self.requests = self.tokens = 0
        """in flight"""
        self.speed = 0.0
        """tokens a second, a moving average; 0 is not measured yet"""
        self.since = 0.0
        """when it last answered, or was sent something after it had nothing to do"""
        self.said = "has not answered yet"
        self.aside = False
        """has no work until `back`"""
        self.back = 0.0
        """when it was last taken back"""
        self.failures = 0
        """in a row: while there are any, one request at a time tries whether it works again"""
        self.on_trial = False
        self.other_model = ""

    def usable(self) -> bool:
        return not self.aside and not self.on_trial

    def expected_end(self, tokens: int, fastest: float) -> float:
        """Seconds after which `tokens` more would be answered; `fastest` is the speed of the fastest server."""
        speed, quiet = self.speed or fastest, time.monotonic() - self.since
        if not self.requests:
            # Old measurements fade, or one slow answer would shut a server out for good.
            return tokens / min(fastest, speed * (1 + quiet / 60))
        # A silence may well last as long again: others take over long before a stalled server's timeout.
        return max((self.tokens + tokens) / speed, quiet)


class RefClient:
    """Sends groups to the reference servers from threads of its own. Close it when the run ends.

    Given a URL instead, it is a reward model's: texts go there, and one server is all there is.
    """

    def __init__(self, config: TrainerConfig, reward_url: str | None = None):
        """Raises RefError if `ref_ca_file` holds no certificate."""
        self._config, self._reward_url = config, reward_url
        self._name = uuid.uuid4().hex  # the server serves clients in turn
        self._wire = RefWire(config, "reward" if reward_url else "logprobs")
        self._reference: Reference | None = None  # what a server that lacks it is sent
        self._sent = 0.0  # when a piece of it last went through
        self._servers = [_Server(url) for url in ([reward_url] if reward_url else config.ref_servers)]
        self._changed = threading.Condition()
        self._closing = threading.Event()
        # Room for all that may be in flight: the threads that wait for one server are never those that another needs.
        self._threads = ThreadPoolExecutor(_IN_FLIGHT * len(self._servers), thread_name_prefix="reference")

    def wait_ready(self) -> Health:
        """Wait until every server is ready and check that all serve the same model; return what they say of it.

        Says every 15 seconds what it waits for.

        Raises RefUnavailable after `ref_startup_timeout` seconds, RefError for a refused token, a certificate that
        does not verify, or differing models.
        """
        deadline = _Deadline(self._config.ref_startup_timeout)
        next_word = time.monotonic() + 5.0
        healths: dict[str, Health] = {}
        waiting = self._servers
        while True:
            for server in waiting:
                try:
                    healths[server.url] = self._wire.health(server.url)
                except Failure as failure:
                    server.said = str(failure)
            waiting = [server for server in waiting if server.url not in healths]
            if not waiting:
                break
            if deadline.left() <= 0:
                if self._reward_url:
                    raise RefUnavailable(
                        f"no reward server at {_each(waiting)} after {deadline.seconds:.0f} s: start 'python "
                        "ref_server.py --task reward' there, or name it in reward_funcs where it is"
                    )
                raise RefUnavailable(
                    f"no reference server at {_each(waiting)} after {deadline.seconds:.0f} s: start 'python "
                    f"ref_server.py --model_name_or_path {self._config.model_name_or_path}' there, or set ref_servers "
                    "to where it is, or beta to 0 to train without"
                )
            if time.monotonic() >= next_word:
                passed = deadline.seconds - deadline.left()
                log.info("waiting for %s (%.0f of %.0f s)", _each(waiting), passed, deadline.seconds)
                next_word = time.monotonic() + 15.0
            time.sleep(min(0.5, max(0.0, deadline.left())))
        first_url, first = self._servers[0].url, healths[self._servers[0].url]
        for url, other in healths.items():
            if other.model_fingerprint != first.model_fingerprint:
                raise RefError(
                    f"{first_url} serves {first.model} ({first.model_fingerprint}) but {url} serves "
                    f"{other.model} ({other.model_fingerprint}): start every server with the same model"
                )
            if self._config.ref_update_steps and not self._reward_url and not other.takes_updates:
                raise RefError(
                    f"{url} takes no new weights: restart it with --update_folder PATH, or set ref_update_steps to 0"
                )
        self._wire.fingerprint = first.model_fingerprint
        return first

    def expect(self, fingerprint: str) -> None:
        """From now on use no answer but of this model. What is still on its way is asked for again."""
        with self._changed:
            self._wire.outdated.add(self._wire.fingerprint)
            self._wire.fingerprint = fingerprint
            for server in self._servers:
                server.back = time.monotonic()  # an old request's answer speaks no longer of the server

    def publish(self, reference: Reference) -> None:
        """Bring the servers to a new reference, and from now on use only those that have it.

        Returns when each has it or has failed at least once: what is left goes on in the background, now and whenever
        a server has lost it by a restart.

        Raises RefUnavailable where none has it and nothing has moved for `ref_deadline` seconds.
        """
        self.expect(reference.fingerprint)
        deadline = self._config.ref_deadline
        with self._changed:
            self._reference, self._sent = reference, time.monotonic()
            for server in self._servers:
                if not server.aside:
                    server.aside, server.on_trial, server.failures = True, False, 0
                    server.said = "has not got all of it yet"
                    self._knock(server, Failure(server.said))

            def settled() -> bool:
                aside = [server for server in self._servers if server.aside]
                return len(aside) < len(self._servers) and all(server.failures for server in aside)

            while not settled():
                if time.monotonic() > self._sent + deadline:
                    raise RefUnavailable(
                        f"no reference server has got the new weights: nothing has moved for {deadline:.0f} s at "
                        f"{_each(self._servers)}: see the log there; ref_deadline sets how long to wait"
                    )
                self._changed.wait(0.2)

    def submit(self, prompt_ids: list[int], completions: list[list[int]], name: str) -> Future[list[np.ndarray]]:
        """Ask for the log-probs of one prompt's completions; returns at once.

        The future gives float32 [len(completion)] for each, or raises RefError.
        """
        request = LogprobsRequest.of(prompt_ids, completions, self._config.temperature, name, self._name)
        return self._threads.submit(self._score, request)

    def submit_texts(self, chats: list[list[Message]], name: str) -> Future[np.ndarray]:
        """Ask for the scores of chats; returns at once. The future gives float32 [len(chats)], or raises RefError."""
        return self._threads.submit(self._judge, RewardRequest(chats, name, self._name))

    def close(self) -> None:
        """Send nothing more; what still waits raises RefError. A thread whose request is under way ends with it."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _score(self, request: LogprobsRequest) -> list[np.ndarray]:
        tokens = int(request.completion_lengths.sum())
        body, decode = encode_request(request), partial(decode_answer, tokens=tokens)
        logprobs = self._send(body, decode, len(request.input_ids), request.request_id).logprobs
        return np.split(logprobs, np.cumsum(request.completion_lengths)[:-1])

    def _judge(self, request: RewardRequest) -> np.ndarray:
        body, decode = request.to_json(), partial(RewardAnswer.from_json, inputs=len(request.inputs))
        return self._send(body, decode, len(body), request.request_id).scores

    def _send(self, body: bytes, decode: Callable, size: int, name: str):
        """Send a request to one server after another until there is an answer. Raises RefError."""
        deadline = _Deadline(self._config.ref_deadline)
        while True:
            server, load = self._take(size, name, deadline)
            sent, failure = time.monotonic(), None
            try:
                return self._wire.ask(server.url, body, decode, deadline.left())
            except Failure as error:
                failure = error
            finally:
                self._end(server, size, load, sent, failure)

    def _take(self, size: int, name: str, deadline: _Deadline) -> tuple[_Server, int]:
        """Wait for the server that should answer first to have room, and book `size` tokens there.

        Returns it with the tokens that are then in flight there. Raises RefUnavailable at the deadline, RefError when
        every server has changed its model.
        """
        with self._changed:
            while not self._closing.is_set():
                if all(server.other_model for server in self._servers):
                    raise RefError(
                        f"every reference server has changed: {_each(self._servers)}: restart it with the model that "
                        f"this run began with (the reference is {self._wire.fingerprint} now)"
                    )
                if deadline.left() <= 0:
                    what = "scores" if self._reward_url else "log-probs"
                    raise RefUnavailable(
                        f"no {what} for {name} after {deadline.seconds:.0f} s from {_each(self._servers)}: see the log "
                        "there; ref_deadline sets how long to wait"
                    )
                fastest = max(server.speed for server in self._servers) or 1.0
                usable = [server for server in self._servers if server.usable()]
                random.shuffle(usable)  # or every rank's first request would go to the same of equals
                best = min(usable, key=lambda server: server.expected_end(size, fastest), default=None)
                if best is not None and best.requests < _IN_FLIGHT:
                    best.since = best.since if best.requests else time.monotonic()
                    best.on_trial = best.failures > 0
                    best.requests += 1
                    best.tokens += size
                    return best, best.tokens
                # Not only for news: while a server is silent it becomes a worse choice.
                self._changed.wait(max(0.0, min(0.2, deadline.left())))
        raise RefError(f"{name} was given up: the client is closed")

    def _end(self, server: _Server, size: int, load: int, sent: float, failure: Failure | None) -> None:
        """An attempt is over, for better or worse: what follows for its server."""
        now = time.monotonic()
        with self._changed:
            server.requests -= 1
            server.tokens -= size
            if failure is None:
                server.since, server.said = now, "answered the last time"
                speed = load / max(now - sent, 1e-6)
                server.speed = 0.75 * server.speed + 0.25 * speed if server.speed else speed
                if server.failures and not server.aside:
                    log.info("%s answers again", server.url)
                    server.failures, server.on_trial = 0, False
            # One trouble has as many failures as requests were in flight: the first of them counts.
            elif not server.aside and sent >= server.back:
                server.aside, server.on_trial = True, False
                self._note(server, failure)
                self._knock(server, failure)
            self._changed.notify_all()

    def _knock(self, server: _Server, failure: Failure) -> None:
        threading.Thread(target=self._bring_back, args=(server, failure), name="knock", daemon=True).start()

    def _note(self, server: _Server, failure: Failure) -> None:
        if failure.other_model and not server.other_model:
            log.error("%s %s: it is set aside until it is restarted with the right one", server.url, failure)
        elif not server.failures:
            log.warning("%s %s: it is set aside until it is well", server.url, failure)
        server.said, server.other_model = str(failure), failure.other_model
        server.failures += 1

    def _bring_back(self, server: _Server, failure: Failure) -> None:
        """The one thread that knocks at a server that was set aside, until it can have work again."""
        knock = not failure.retry_after  # one that names a time is alive
        while not self._closing.wait(_pause(server.failures, failure.retry_after)):
            try:
                if knock or self._reference is not None:
                    self._make_well(server)
            except Failure as error:
                failure = error
            except RefError as error:  # another token, or something else altogether: for now
                failure = Failure(str(error).removeprefix(f"{server.url} "))
                if str(failure) != server.said:
                    log.warning("%s", error)
            else:
                with self._changed:
                    server.aside, server.back, server.other_model = False, time.monotonic(), ""
                    self._changed.notify_all()
                return
            with self._changed:
                self._note(server, failure)
                self._changed.notify_all()

    def _make_well(self, server: _Server) -> None:
        """See whether the server can have work; give it the reference if that is what it lacks.

        Raises Failure, or RefError where that is no use.
        """
        try:
            self._wire.health(server.url)
        except Outdated as missed:
            if (reference := self._reference) is None:
                raise  # another rank's client sends it
            began = time.monotonic()
            try:
                for _ in self._wire.send_weights(server.url, reference, missed.fingerprint):
                    if self._closing.is_set() or self._reference is not reference:
                        raise Failure("was being sent a reference that is not wanted any more") from missed
                    self._sent = time.monotonic()
                    server.failures = min(server.failures, 1)  # it moves: the next attempt need not wait long
            except OSError as error:
                raise Failure(f"cannot be sent {reference.file} ({error.strerror or error})") from error
            seconds = time.monotonic() - began
            log.info("%s has the new reference: %d MiB in %.1f s", server.url, reference.size >> 20, seconds)


class _Deadline:
    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def _each(servers: list[_Server]) -> str:
    return " and ".join(f"{server.url} (it {server.said})" for server in servers)


def _pause(failures: int, retry_after: float) -> float:
    """Seconds to the next attempt, spread out so that many ranks do not knock at the same moment."""
    if retry_after:
        return retry_after * random.uniform(1.0, 1.25)
    return min(_LONGEST_PAUSE, 0.05 * 2 ** min(failures, 10)) * random.uniform(0.5, 1.0)
