"""The servers that score a run's completions: reached, and checked against the policy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from grpo.client.reference import ReferenceClient, TaskClient, check_reference
from grpo.config.trainer import TrainerConfig
from grpo.trainer.server_scores import ServerScores
from grpo.wire.health import ModelInfo

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Servers:
    """The servers of a run, once they answer. Every rank asks: each keeps the fingerprint that answers must bear."""

    config: TrainerConfig
    any_version: bool  # whether the servers may have a later reference of this run
    reference_client: ReferenceClient | None = None  # None without reference servers
    reference: ModelInfo | None = None  # the reference servers' model
    scorers: list[ServerScores] = field(default_factory=list)

    @classmethod
    def reach(cls, config: TrainerConfig, run: str, any_version: bool) -> Servers:
        """Wait for the servers that the settings name. Raises as `ReferenceClient.wait_ready`."""
        servers = cls(config=config, any_version=any_version)
        if config.beta > 0 and config.ref == "server":
            servers.reference_client = client = ReferenceClient(config, run)
            servers.reference = client.wait_ready(any_version)
            servers.scorers.append(ServerScores(client, "ref_logprobs", phase="wait_ref"))
        else:
            reason = "beta is 0: no KL term," if config.beta == 0 else f"ref is {config.ref}:"
            log.info("%s no reference server", reason)
        return servers

    @property
    def clients(self) -> list[ReferenceClient]:
        return [scorer.client for scorer in self.scorers]

    def check(self, policy: ModelInfo, has_pictures: bool) -> None:
        """Raise ServerError for servers whose model does not fit the policy. See check_reference."""
        if self.reference is not None:
            check_reference(
                self.config, policy, self.reference, any_version=self.any_version, has_pictures=has_pictures
            )


def stopped_together(clients: Iterable[Any]) -> threading.Event:
    """Return the event that says that the run is asked to stop, which those that are clients of servers look at."""
    stopping = threading.Event()
    for client in clients:
        if isinstance(client, TaskClient):
            client.balancer.stopping = stopping
    return stopping
