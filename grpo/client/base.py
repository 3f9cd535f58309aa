"""The base of the clients of both tasks: the threads that send requests, and the wait at the start."""

import logging
import os
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from grpo.client.balancer import IN_FLIGHT, Balancer, list_outcomes
from grpo.client.connection import Connection
from grpo.client.server_errors import ModelLoading, RequestFailure, ServersUnavailable
from grpo.config.connection_settings import ClientConfig
from grpo.config.errors import rank_count
from grpo.wire.health import ServerInfo

log = logging.getLogger(__name__)

LONGEST_LOADING = 6 * 3600.0
"""seconds: 140 GB at 10 MB/s take four hours; a server that hangs while it loads holds the trainer's cards so long"""
FIRST_LINE, BETWEEN_LINES = 5.0, 15.0  # seconds of waiting to the first line of the log, and at least to the next


class TaskClient:
    """The servers of one task, and the threads that send requests to them. Close it when the run ends."""

    def __init__(self, config: ClientConfig, task: str, urls: list[str], wanted: str, run: str):
        """`wanted` names the answers in messages, `run` the client's run on pages. Raises as open_sessions."""
        self._config = config
        self._client_id = make_client_name(run)  # servers serve their clients in turn
        self.connection = Connection(config, task)
        self.balancer = Balancer(self.connection, urls, wanted, config.ref_deadline)
        # Room for all that may be in flight: the threads that wait for one server are never those that another needs.
        self._threads = ThreadPoolExecutor(IN_FLIGHT * len(urls), thread_name_prefix=f"{task}-client")

    def close(self) -> None:
        """Send nothing more: waiting requests raise ServerError. A thread whose request is in flight ends with it."""
        self.balancer.close()
        self._threads.shutdown(wait=False)

    def wait_for_servers(self, kind: str, remedy: str) -> dict[str, ServerInfo]:
        """Wait until every server is ready; return their descriptions by URL. `remedy` ends the message. Logs each
        minute, more often at first, which servers it waits for. A server that is loading its model has LONGEST_LOADING
        seconds, any other `ref_startup_timeout`. Raises ServersUnavailable after that time, ServerError for a refused
        token or certificate."""
        began, patience, next_log = time.monotonic(), self._config.ref_startup_timeout, FIRST_LINE
        deadlines = dict.fromkeys(self.balancer.servers, began + patience)
        answers: dict[str, ServerInfo] = {}
        waiting, hint = self.balancer.servers, f": start {remedy}"
        while True:
            passed = time.monotonic() - began
            for server in waiting:
                try:
                    answers[server.url] = self.connection.health(server.url)
                except RequestFailure as failure:
                    server.last_outcome = str(failure)
                    if isinstance(failure, ModelLoading):
                        hint, deadlines[server] = "", time.monotonic() + patience
                        if passed > LONGEST_LOADING:
                            loading = f"{server.url} has been loading its model for {passed:.0f} s"
                            raise ServersUnavailable(f"{loading}: see its log, and start it again") from failure
            waiting = [server for server in waiting if server.url not in answers]
            if not waiting:
                pages = " or ".join(f"{url}/" for url in answers)
                log.info("the %s server is ready; to watch it, open %s in a browser", kind, pages)
                return answers
            now = time.monotonic()
            if silent := [server for server in waiting if deadlines[server] <= now]:
                missing = f"no {kind} server at {list_outcomes(silent)} after {patience:.0f} s"
                raise ServersUnavailable(f"{missing}: start {remedy}")
            if passed >= next_log:
                log.info("waiting for %s (%.0f s)%s", list_outcomes(waiting), passed, hint)
                hint, next_log = "", passed + min(60.0, max(BETWEEN_LINES, passed))
            time.sleep(min(0.5, min(deadlines[server] for server in waiting) - now))


def make_client_name(run: str) -> str:
    """Return a name that people can read and no other client has: "RUN, rank R of N, HOST #random". It has 128
    characters at most, as docs/protocol.md wants it. Without a run it begins with the rank."""
    place = f"rank {os.environ.get('RANK', '0')} of {rank_count()}, {socket.gethostname()[:32]}"
    name = f"{run[:48]}, {place}" if run else place
    # The name of a folder may hold bytes that are no text.
    return f"{name} #{secrets.token_hex(4)}".encode("utf-8", "replace").decode()
