"""Which of a run's servers is asked next, and what becomes of one that fails.

Work goes to each server by its measured speed. One that fails is set aside; a thread knocks at it until it is well, and
gives it the reference if it has missed an update. Then it has work again.
"""

from __future__ import annotations

import logging
import random
import threading
import time

from grpo.client.connection import Connection, WeightsToSend
from grpo.client.errors import Failure, Outdated, ServerError, ServersUnavailable

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 5.0
IN_FLIGHT = 8  # requests of one rank at one server at a time


class Deadline:
    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


class Server:
    """What this client knows of one server. Once requests are under way it changes under Balancer' lock only."""

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


class Balancer:
    """A run's servers of one task, as one process of it sees them. Any thread may take one."""

    def __init__(self, wire: Connection, urls: list[str], sought: str):
        """`sought` says in messages what they are asked for."""
        self.all = [Server(url) for url in urls]
        self._wire, self._sought = wire, sought
        self._reference: WeightsToSend | None = None  # what a server that lacks it is sent
        self._sent = 0.0  # when a piece of it last went through
        self._changed = threading.Condition()
        self._closing = threading.Event()

    def close(self) -> None:
        """Whoever waits for a server raises ServerError."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()

    def expect(self, fingerprint: str) -> None:
        """From now on use no answer but of this model. What is still on its way is asked for again."""
        with self._changed:
            self._wire.outdated.add(self._wire.fingerprint)
            self._wire.fingerprint = fingerprint
            for server in self.all:
                server.back = time.monotonic()  # an old request's answer speaks no longer of the server

    def publish(self, reference: WeightsToSend, deadline: float) -> None:
        """Bring the servers to a new reference, and from now on use only those that have it.

        Returns when each has it or has failed at least once: what is left goes on in the background, now and whenever
        a server has lost it by a restart.

        Raises ServersUnavailable where none has it and nothing has moved for `deadline` seconds.
        """
        self.expect(reference.fingerprint)
        with self._changed:
            self._reference, self._sent = reference, time.monotonic()
            for server in self.all:
                if not server.aside:
                    server.aside, server.on_trial, server.failures = True, False, 0
                    server.said = "has not got all of it yet"
                    self._knock(server, Failure(server.said))

            def settled() -> bool:
                aside = [server for server in self.all if server.aside]
                return len(aside) < len(self.all) and all(server.failures for server in aside)

            while not settled():
                if time.monotonic() > self._sent + deadline:
                    raise ServersUnavailable(
                        f"no reference server has got the new weights: nothing has moved for {deadline:.0f} s at "
                        f"{each(self.all)}: see the log there; ref_deadline sets how long to wait"
                    )
                self._changed.wait(0.2)

    def take(self, size: int, name: str, deadline: Deadline) -> tuple[Server, int]:
        """Wait for the server that should answer first to have room, and book `size` tokens there.

        Returns it with the tokens that are then in flight there. Raises ServersUnavailable at the deadline, ServerError
        when every server has changed its model.
        """
        with self._changed:
            while not self._closing.is_set():
                if all(server.other_model for server in self.all):
                    raise ServerError(
                        f"every reference server has changed: {each(self.all)}: restart it with the model that "
                        f"this run began with (the reference is {self._wire.fingerprint} now)"
                    )
                if deadline.left() <= 0:
                    raise ServersUnavailable(
                        f"no {self._sought} for {name} after {deadline.seconds:.0f} s from {each(self.all)}: see the "
                        "log there; ref_deadline sets how long to wait"
                    )
                fastest = max(server.speed for server in self.all) or 1.0
                usable = [server for server in self.all if server.usable()]
                random.shuffle(usable)  # or every rank's first request would go to the same of equals
                best = min(usable, key=lambda server: server.expected_end(size, fastest), default=None)
                if best is not None and best.requests < IN_FLIGHT:
                    best.since = best.since if best.requests else time.monotonic()
                    best.on_trial = best.failures > 0
                    best.requests += 1
                    best.tokens += size
                    return best, best.tokens
                # Not only for news: while a server is silent it becomes a worse choice.
                self._changed.wait(max(0.0, min(0.2, deadline.left())))
        raise ServerError(f"{name} was given up: the client is closed")

    def end(self, server: Server, size: int, load: int, sent: float, failure: Failure | None) -> None:
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

    def _knock(self, server: Server, failure: Failure) -> None:
        threading.Thread(target=self._bring_back, args=(server, failure), name="knock", daemon=True).start()

    def _note(self, server: Server, failure: Failure) -> None:
        if failure.other_model and not server.other_model:
            log.error("%s %s: it is set aside until it is restarted with the right one", server.url, failure)
        elif not server.failures:
            log.warning("%s %s: it is set aside until it is well", server.url, failure)
        server.said, server.other_model = str(failure), failure.other_model
        server.failures += 1

    def _bring_back(self, server: Server, failure: Failure) -> None:
        """The one thread that knocks at a server that was set aside, until it can have work again."""
        knock = not failure.retry_after  # one that names a time is alive
        while not self._closing.wait(_pause(server.failures, failure.retry_after)):
            try:
                if knock or self._reference is not None:
                    self._make_well(server)
            except Failure as error:
                failure = error
            except ServerError as error:  # another token, or something else altogether: for now
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

    def _make_well(self, server: Server) -> None:
        """See whether the server can have work; give it the reference if that is what it lacks.

        Raises Failure, or ServerError where that is no use.
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


def each(servers: list[Server]) -> str:
    return " and ".join(f"{server.url} (it {server.said})" for server in servers)


def _pause(failures: int, retry_after: float) -> float:
    """Seconds to the next attempt, spread out so that many ranks do not knock at the same moment."""
    if retry_after:
        return retry_after * random.uniform(1.0, 1.25)
    return min(_LONGEST_PAUSE, 0.05 * 2 ** min(failures, 10)) * random.uniform(0.5, 1.0)
