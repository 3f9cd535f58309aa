"""The servers that score a run's completions: reached, and checked against the policy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.client.reference import ReferenceClient, TaskClient, TeacherClient, check_reference, check_teacher
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example
from grpo.trainer.server_scores import ServerScores
from grpo.wire.health import ModelInfo
from grpo.wire.logprobs import MOST_LIKELIEST

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Servers:
    """The servers of a run, once they answer. Every rank asks: each keeps the fingerprint that answers must bear."""

    config: TrainerConfig
    any_version: bool  # whether the reference servers may have a later reference of this run
    reference_client: ReferenceClient | None = None  # None without reference servers
    reference: ModelInfo | None = None  # the reference servers' model
    teacher_clients: dict[str, TeacherClient] = field(default_factory=dict)  # by source
    teachers: dict[str, ModelInfo] = field(default_factory=dict)  # their models

    @classmethod
    def reach(cls, config: TrainerConfig, run: str, any_version: bool) -> Servers:
        """Wait for the servers that the settings name. Raises as `ReferenceClient.wait_ready`."""
        servers = cls(config=config, any_version=any_version)
        if config.beta > 0 and config.ref == "server":
            servers.reference_client = ReferenceClient(config, run)
            servers.reference = servers.reference_client.wait_ready(any_version)
        else:
            reason = "beta is 0: no KL term," if config.beta == 0 else f"ref is {config.ref}:"
            log.info("%s no reference server", reason)
        for source, urls in config.teachers.items():
            servers.teacher_clients[source] = TeacherClient(config, urls, run)
            servers.teachers[source] = servers.teacher_clients[source].wait_ready()
        return servers

    @property
    def clients(self) -> list[TaskClient]:
        of_reference = [] if self.reference_client is None else [self.reference_client]
        return [*of_reference, *self.teacher_clients.values()]

    def make_scorers(self) -> list[ServerScores]:
        """Return what rounds ask about completions."""
        scorers = []
        if self.reference_client is not None:
            scorers.append(ServerScores("ref_logprobs", {"": self.reference_client}, phase="wait_ref"))
        if self.teacher_clients:
            top_k = self.config.teacher_top_k
            scorers.append(ServerScores("teacher", self.teacher_clients, phase="wait_teacher", top_k=top_k))
        return scorers

    def check(self, policy: ModelInfo, has_pictures: bool) -> None:
        """Raise ServerError for servers whose model does not fit the policy. See check_reference and check_teacher."""
        config = self.config
        if self.reference is not None:
            check_reference(config, policy, self.reference, any_version=self.any_version, has_pictures=has_pictures)
        for source, client in self.teacher_clients.items():
            teacher, url = self.teachers[source], client.urls[0]
            check_teacher(config, url, policy=policy, teacher=teacher, has_pictures=has_pictures)
            client.vocab_size = policy.vocab_size
            log.info("the teacher%s is %s", f" of {source}" if source else "", teacher.name)


def check_teachers(config: TrainerConfig, examples: Sequence[Example]) -> None:
    """Raise ConfigError for a teacher of a source that the data lack, or if a group's answer is too large."""
    sources = {example.source for example in examples}
    for source in config.teachers.keys() - sources - {""}:
        known = ", ".join(sorted(sources - {""})) or "one dataset, without a label"
        config.refuse("teacher_servers", f"no prompt is of {source!r}; the sources are {known}")
    longest = config.longest_sequence if config.agent else config.max_completion_length  # an agent's branch is longer
    asked = config.num_generations * longest * config.teacher_top_k
    if asked > MOST_LIKELIEST:
        most = MOST_LIKELIEST // (config.num_generations * longest)
        reason = f"a group's completions would have {asked} likeliest tokens, above {MOST_LIKELIEST}"
        config.refuse("distillation_top_k", f"{reason}: use {most} or less")


def stopped_together(clients: Iterable[Any]) -> threading.Event:
    """Return the event that says that the run is asked to stop, which those that are clients of servers look at."""
    stopping = threading.Event()
    for client in clients:
        if isinstance(client, TaskClient):
            client.balancer.stopping = stopping
    return stopping
