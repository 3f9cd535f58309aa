"""Every setting of `python -m grpo.launch`: those of both programs, and how many trainer processes to start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo.config.errors import require
from grpo.config.fields import Section, option
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig


@dataclass
class LaunchSection(Section):
    """The settings of the launcher alone."""

    HEADING = "processes"

    nproc_per_node: int | None = option(
        None,
        "trainer processes; unset is one for each GPU that the reference server does not take, without GPUs one",
        common=True,
        above=0,
    )


@dataclass
class LaunchConfig(LaunchSection, TrainerConfig, ServerConfig):
    """The settings of a run on one machine: server and trainer."""

    def fill_in_unset(self, recorded: Mapping[str, Any], world_size: int, is_lora: bool) -> None:
        """Leave what depends on the number of ranks unset: the trainer fills it in, which knows that number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.task == "logprobs", "task", self.task, "start a reward server by itself: python ref_server.py")
        require(not self.estimate, "estimate", self.estimate, "python ref_server.py --estimate prints it")

    @property
    def starts_server(self) -> bool:
        """Tell whether the run asks a reference server, and names none that is started elsewhere."""
        is_unnamed = self.ref_servers == [f"http://127.0.0.1:{self.port}"]
        return self.beta > 0 and self.ref == "server" and is_unnamed and not self.dry_run
