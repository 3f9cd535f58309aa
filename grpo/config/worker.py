"""Every setting of `generate.py`."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass
from typing import Literal

from grpo.config.connection import TOKEN_VARIABLE, check_ca_file, find_token
from grpo.config.errors import ConfigError, require
from grpo.config.fields import option
from grpo.config.generation import AnswerSection
from grpo.config.turns import TurnsCodeSection, TurnsSection


@dataclass
class WorkerConfig(TurnsCodeSection):
    """Every setting of `generate.py`. `token` is no setting, as of a ConnectionSection."""

    HEADING = "worker"

    pool: str | None = option(None, "URL of the pool to draw for: a server with --task rollouts", common=True)
    token_file: str | None = option(
        None,
        "file that holds the token, the secret that pool, trainer and workers share, and nothing else; unset is the "
        f"environment variable {TOKEN_VARIABLE}, if there is one",
        common=True,
    )
    engine: Literal["transformers", "vllm"] = option(
        "transformers",
        "what draws: the trainer's own sampler, one group at a time, or vLLM's server, which the worker starts with "
        "its own interpreter",
        common=True,
    )
    vllm_args: str | None = option(
        None,
        "more arguments for vLLM's server, as one text: --vllm_args='--gpu-memory-utilization 0.8'",
        needs="engine vllm",
        common=True,
    )
    name: str | None = option(None, "name on the pool's page and in its log; unset is this machine's")
    weights_folder: str | None = option(
        None,
        "folder for the model and its weights, with room for two models; what is there after a restart is not fetched "
        "again. Unset is a temporary one that is removed at the end",
        common=True,
    )
    trust_remote_code: bool = option(False, "run Python code that comes with the model")
    ref_ca_file: str | None = option(
        None, "PEM file of the authority that signed an https pool's certificate; unset is the public ones"
    )
    pool_deadline: float = option(900.0, "seconds without an answer of the pool after which the worker ends", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.pool is not None, "pool", self.pool, "name the pool to draw for: --pool http://HOST:PORT")
        self.pool = self.pool.rstrip("/")
        require(self.pool.startswith(("http://", "https://")), "pool", self.pool, "write it as http://HOST:PORT")
        try:
            shlex.split(self.vllm_args or "")
        except ValueError as error:
            raise ConfigError(f"vllm_args={self.vllm_args!r}: {error}: quote it as in a shell") from error
        self.token = find_token(self.token_file)
        check_ca_file(self.ref_ca_file)
        self.name = self.name or socket.gethostname()
        require(len(self.name) <= 100, "name", self.name, "use 100 characters at most")


@dataclass
class WorkerTurnsConfig(TurnsSection, AnswerSection):
    """What answers the policy on a worker: the worker's own code, with the run's settings."""
