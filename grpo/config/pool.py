"""Settings of who draws the trainer's completions: the trainer itself, or workers behind a pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo.config.errors import require
from grpo.config.fields import Section, option
from grpo.config.generation import LOCAL_SAMPLERS


@dataclass
class PoolSection(Section):
    """The settings of the trainer's sampler."""

    HEADING = "sampler and pool"

    sampler: Literal["continuous", "generate", "pool"] = option(
        "continuous",
        f"{LOCAL_SAMPLERS}. pool lets workers on any machine draw (generate.py); the trainer then draws held-out "
        "answers alone, by continuous",
    )
    pool: str | None = option(
        None, "URL of the pool that brings tasks to workers: a server with --task rollouts", needs="sampler pool"
    )
    max_policy_lag: int = option(
        0,
        "rounds of generation that workers draw ahead, with a policy that is as many rounds old: 0 lets the trainer "
        "wait for them, 1 lets both work at the same time",
        needs="sampler pool",
        at_least=0,
    )
    in_flight_weight_updates: bool = option(
        False,
        "workers take each new policy as soon as it is there, in the middle of completions too: for long answers. A "
        "round is then drawn by policies that are at most max_policy_lag rounds old, and other ones in each run",
        needs="max_policy_lag above 0",
    )
    pool_deadline: float = option(
        900.0,
        "seconds without any new group, or without an answer of the pool, after which the run ends",
        needs="sampler pool",
        above=0,
    )
    replay: str | None = option(
        None,
        "file of an earlier run's pool, to train on what was drawn then, without pool and workers",
        needs="sampler pool",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler != "pool":
            return
        require(
            (self.pool is None) != (self.replay is None),
            "sampler",
            self.sampler,
            "name where the completions come from: the URL of a pool, or the file of one as replay; one of the two",
        )
        if self.pool is not None:
            self.pool = self.pool.rstrip("/")
            require(self.pool.startswith(("http://", "https://")), "pool", self.pool, "write it as http://HOST:PORT")
        require(
            self.replay is None or Path(self.replay).is_file(),
            "replay",
            self.replay,
            "there is no such file: name the pool_file of an earlier run",
        )
