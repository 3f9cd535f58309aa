"""A run's servers of one task: each gets requests by its measured speed.

A server that fails is taken out of rotation. A background thread probes it, sends it the reference's weights if it has
missed an update, and puts it back.
"""

import logging
import random
import threading
import time
from collections.abc import Callable

from grpo.client.connection import Answer, Connection, WeightsToSend
from grpo.client.server_errors import ModelOutdated, RequestFailure, RequestRefused, ServerError, ServersUnavailable
from grpo.client.sessions import seconds_to_next_try

log = logging.getLogger(__name__)

IN_FLIGHT = 8  # requests of one rank to one server at a time
AFTER_STOP = 10.0  # seconds: a machine that shuts down, or SLURM, kills what has not ended after 30 or more
_REMEDY = "see the log there; ref_deadline sets how long to wait"


class Server:
    """The state of one server for this process. With requests in flight it changes under the Balancer's lock."""

    def __init__(self, url: str):
        self.url = url
        self.requests = self.tokens = 0  # requests and tokens in flight
        self.speed = 0.0  # a moving average of tokens per second; 0 is not measured yet
        self.active_since = 0.0  # time of the last answer, or of the request that ended an idle period
        self.last_outcome = "has not answered yet"  # of a request, as the rest of a sentence that begins with "it"
        self.in_rotation = True
        self.restored_at = 0.0  # time of the last return to the rotation
        self.failures = 0  # failures in a row: while there are any, the server gets one request at a time
        self.has_trial_request = False  # True while that one request is in flight
        self.other_model = ""  # fingerprint of a model that does not belong to this run

    def has_room(self, tokens: int, patience: float) -> bool:
        """Tell whether to send a request of `tokens` now: by its measured speed, which other ranks share, the server
        would answer in half of the time that a request has. More would be given up, and computed again."""
        is_free = not (self.requests and self.speed) or (self.tokens + tokens) / self.speed <= patience / 2
        return self.requests < IN_FLIGHT and is_free

    def seconds_to_answer(self, tokens: int, fastest: float) -> float:
        """Estimate when `tokens` more would be answered; `fastest` is the speed of the fastest server."""
        speed, silence = self.speed or fastest, time.monotonic() - self.active_since
        if not self.requests:
            # Old measurements fade, or one slow answer would shut a server out for good.
            return tokens / min(fastest, speed * (1 + silence / 60))
        # A silence may well last as long again: others take over long before a stalled server's timeout.
        return max((self.tokens + tokens) / speed, silence)


class Balancer:
    """The servers of one task, as one process of the run sees them. Any thread may send a request."""

    def __init__(self, connection: Connection, urls: list[str], wanted: str, patience: float):
        """`wanted` names the answers in messages. After `patience` seconds without an answer, or progress of an update,
        the servers are given up."""
        self.servers = [Server(url) for url in urls]
        self._connection, self._wanted, self._patience = connection, wanted, patience
        self._weights: WeightsToSend | None = None  # for a server that lacks them
        self._last_progress = 0.0  # time at which a server last took a piece of them
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self.stopping = threading.Event()  # set when the run is asked to stop, perhaps with its servers

    def close(self) -> None:
        """Stop: every thread that waits for a server raises ServerError."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()

    def send(self, body: bytes, decode: Callable[[bytes], Answer], size: int, name: str, once: bool = False) -> Answer:
        """Send a request to one server after another until one answers; return the decoded answer. `size` is the
        request's cost for a server, in tokens; `name` stands for it in messages. With `once` it is sent to one server
        only, which may raise RequestFailure. Raises ServersUnavailable when no server answers in time, RequestRefused
        when one refuses the request, ServerError when all have changed their model."""
        deadline = time.monotonic() + self._patience
        while True:
            server, load = self._reserve(size, name, deadline)
            sent_at, failure = time.monotonic(), None
            try:
                return self._connection.request(server.url, body, decode, deadline - sent_at)
            except RequestFailure as error:
                failure = error
                if once:
                    raise
            except RequestRefused:
                load = 0
                raise
            finally:
                self._release(server, size=size, load=load, sent_at=sent_at, failure=failure)

    def use_only(self, fingerprint: str) -> None:
        """Accept answers of this model only, from now on. Requests in flight to an older one are sent again."""
        with self._changed:
            self._connection.outdated.add(self._connection.fingerprint)
            self._connection.fingerprint = fingerprint
            for server in self.servers:
                # An older request says nothing about the server now: neither its failure, nor that it is on its way.
                server.restored_at, server.has_trial_request = time.monotonic(), False

    def send_weights(self, weights: WeightsToSend) -> None:
        """Replace the model of all servers, and from now on use only those that have these weights. Returns when each
        server has them or has failed at least once. A background thread serves the others, and later every server that
        lost them by a restart. Raises ServersUnavailable if no server has them and none has made progress for
        `patience` seconds."""
        self.use_only(weights.fingerprint)
        with self._changed:
            self._weights, self._last_progress = weights, time.monotonic()
            for server in self.servers:
                if server.in_rotation:
                    server.in_rotation, server.has_trial_request, server.failures = False, False, 0
                    server.last_outcome = "has not got all of it yet"
                    self._start_recovery(server, RequestFailure(server.last_outcome))

            def is_settled() -> bool:
                waiting = [server for server in self.servers if not server.in_rotation]
                return len(waiting) < len(self.servers) and all(server.failures for server in waiting)

            while not self._changed.wait_for(is_settled, 0.2):
                patience = AFTER_STOP if self.stopping.is_set() else self._patience
                if time.monotonic() > self._last_progress + patience:
                    state = f"nothing has moved for {patience:.0f} s at {list_outcomes(self.servers)}"
                    raise ServersUnavailable(f"no reference server has got the new weights: {state}: {_REMEDY}")

    def _reserve(self, size: int, name: str, deadline: float) -> tuple[Server, int]:
        """Wait until the server that should answer first has room; count `size` tokens there, and return it with all
        its tokens in flight. Raises ServersUnavailable at the deadline, ServerError when every model has changed."""
        began, is_shortened = deadline - self._patience, False
        with self._changed:
            while not self._closing.is_set():
                is_away = not any(server.in_rotation for server in self.servers)
                if is_away and self.stopping.is_set() and not is_shortened:
                    deadline, is_shortened = min(deadline, time.monotonic() + AFTER_STOP), True
                if all(server.other_model for server in self.servers):
                    raise ServerError(
                        f"every reference server has changed: {list_outcomes(self.servers)}: restart it with the model "
                        f"that this run began with (the reference is {self._connection.fingerprint} now)"
                    )
                if (left := deadline - time.monotonic()) <= 0:
                    wait = f"after {deadline - began:.0f} s from {list_outcomes(self.servers)}"
                    remedy = f"{_REMEDY}, ref_request_timeout how long for one answer"
                    raise ServersUnavailable(f"no {self._wanted} for {name} {wait}: {remedy}")
                fastest = max(server.speed for server in self.servers) or 1.0
                usable = [server for server in self.servers if server.in_rotation and not server.has_trial_request]
                random.shuffle(usable)  # or every rank's first request would go to the same of equal servers
                best = min(usable, key=lambda server: server.seconds_to_answer(size, fastest), default=None)
                if best is not None and best.has_room(size, self._connection.patience):
                    best.active_since = best.active_since if best.requests else time.monotonic()
                    best.has_trial_request = best.failures > 0
                    best.requests += 1
                    best.tokens += size
                    return best, best.tokens
                # Not only for news: while a server is silent it becomes a worse choice.
                self._changed.wait(min(0.2, left))
        raise ServerError(f"{name} was given up: the client is closed")

    def _release(self, server: Server, *, size: int, load: int, sent_at: float, failure: RequestFailure | None) -> None:
        """Record the end of a request, and take a failed server out of rotation. `load` is 0 for a refused request."""
        now = time.monotonic()
        with self._changed:
            server.requests -= 1
            server.tokens -= size
            if failure is None:
                server.active_since, server.last_outcome = now, "answered the last time"
                if load:  # a quick refusal says nothing about the speed
                    speed = load / max(now - sent_at, 1e-6)
                    server.speed = 0.75 * server.speed + 0.25 * speed if server.speed else speed
                if server.failures and server.in_rotation:
                    log.info("%s answers again", server.url)
                    server.failures, server.has_trial_request = 0, False
            # One fault fails every request that is in flight: only the first of them counts.
            elif server.in_rotation and sent_at >= server.restored_at:
                server.in_rotation, server.has_trial_request = False, False
                self._record_failure(server, failure)
                self._start_recovery(server, failure)
            self._changed.notify_all()

    def _record_failure(self, server: Server, failure: RequestFailure) -> None:
        if failure.other_model and not server.other_model:
            log.error("%s %s; out of rotation until it is restarted with the right one", server.url, failure)
        elif not server.failures:
            log.warning("%s %s; out of rotation until it recovers", server.url, failure)
        server.last_outcome, server.other_model = str(failure), failure.other_model
        server.failures += 1

    def _start_recovery(self, server: Server, failure: RequestFailure) -> None:
        threading.Thread(target=self._recover, args=(server, failure), name="recovery", daemon=True).start()

    def _recover(self, server: Server, failure: RequestFailure) -> None:
        """Probe a server that is out of rotation until it can come back. Each such server has one thread for this."""
        must_probe = not failure.retry_after  # a server that names a time is alive
        while not self._closing.wait(seconds_to_next_try(server.failures, failure.retry_after)):
            try:
                if must_probe or self._weights is not None:
                    self._probe(server)
            except RequestFailure as error:
                failure = error
            except ServerError as error:  # a wrong token or another program, which may change too
                failure = RequestFailure(str(error).removeprefix(f"{server.url} "))
                if str(failure) != server.last_outcome:
                    log.warning("%s", error)
            else:
                with self._changed:
                    server.in_rotation, server.restored_at, server.other_model = True, time.monotonic(), ""
                    self._changed.notify_all()
                return
            with self._changed:
                self._record_failure(server, failure)
                self._changed.notify_all()

    def _probe(self, server: Server) -> None:
        """Check that a server is ready; send it the weights if it lacks them. Raises RequestFailure, ServerError."""
        try:
            self._connection.health(server.url)
        except ModelOutdated as outdated:
            if (weights := self._weights) is None:
                raise  # another rank's client sends them
            began = time.monotonic()
            try:
                for _ in self._connection.upload_weights(server.url, weights, outdated.fingerprint):
                    if self._closing.is_set() or self._weights is not weights:
                        raise RequestFailure("was being sent a reference that is not wanted any more") from outdated
                    self._last_progress = time.monotonic()
                    server.failures = min(server.failures, 1)  # after progress the next probe need not wait long
            except OSError as error:
                raise RequestFailure(f"cannot be sent {weights.file} ({error.strerror or error})") from error
            seconds = time.monotonic() - began
            log.info("%s has the new reference: %d MiB in %.1f s", server.url, weights.size >> 20, seconds)


def list_outcomes(servers: list[Server]) -> str:
    return " and ".join(f"{server.url} (it {server.last_outcome})" for server in servers)
