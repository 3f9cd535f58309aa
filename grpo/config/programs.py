"""Every setting of `generate.py`, grpo.evaluate, grpo.launch and grpo.report."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from grpo.config.connection_settings import TOKEN_VARIABLE, ClientConfig, check_ca_file, find_token, read_urls
from grpo.config.fields import Section, default_of, option
from grpo.config.loss_settings import RewardedConfig
from grpo.config.sampling_settings import (
    LOCAL_SAMPLERS,
    AgentCodeSection,
    AnswerSection,
    ChatConfig,
    TurnsCodeSection,
    TurnsSection,
)
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig


@dataclass
class WorkerConfig(AgentCodeSection, TurnsCodeSection):
    """Every setting of `generate.py`."""

    HEADING = "worker"

    pool: str | None = option(None, "URL of the pool to draw for (--task rollouts), or of several", common=True)
    token_file: str | None = option(None, f"file with the token; unset is the variable {TOKEN_VARIABLE}", common=True)
    engine: Literal["transformers", "vllm"] = option(
        "transformers", "what draws: the trainer's sampler, or vLLM's server, which the worker starts", common=True
    )
    # No error with vllm: the trainer's setting of this name is in the same file.
    sequences_per_generate: int | None = option(
        None, "completions drawn at a time by transformers; unset: 64 on a card, one group on a CPU", above=0
    )
    vllm_args: str | None = option(None, "more arguments of its server, one text", needs="engine vllm", common=True)
    name: str | None = option(None, "name on the pool's page and in its log; unset is this machine's")
    weights_folder: str | None = option(None, "folder for two models, kept; unset is a temporary one", common=True)
    trust_remote_code: bool = option(False, "run Python code that comes with the model")
    ref_ca_file: str | None = option(None, "PEM file of an https pool's authority; unset is the public ones")
    pool_deadline: float = option(900.0, "seconds without an answer of the pool after which the worker ends", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.pool is not None, pool="name the pool to draw for: --pool http://HOST:PORT")
        self.pool = read_urls("pool", self.pool)
        try:
            shlex.split(self.vllm_args or "")
        except ValueError as error:
            self.refuse("vllm_args", f"{error}: quote it as in a shell")
        self.token = find_token(self.token_file)
        check_ca_file(self)
        self.name = self.name or socket.gethostname()
        self.check(len(self.name) <= 100, name="use 100 characters at most")
        has_one_kind = self.agent is None or not self.has_turns
        self.check(has_one_kind, agent="the program has its own tools: leave out tools and environment")


@dataclass
class WorkerTurnsConfig(TurnsSection, AnswerSection):
    """The settings of tools and environment on a worker: the worker's code, with the run's settings."""


@dataclass
class EvaluateConfig(ClientConfig, RewardedConfig):
    """Every setting of `grpo eval`."""

    HEADING = "extent and output"

    sampler: Literal["continuous", "generate", "pool"] = option(
        "continuous", f"{LOCAL_SAMPLERS}; pool, from a trainer's file, is continuous"
    )
    eval_samples: int = option(0, "problems to ask, the split's first; 0 is all", at_least=0, common=True)
    output: str | None = option(None, "folder to make: completions, verdicts, metrics, settings", common=True)
    micro_batch_tokens: int = option(16384, "tokens that a reward model here scores at a time", above=0)

    SHORT: ClassVar = {"model": "model_name_or_path", "dataset": "dataset_name", "split": "dataset_test_split"}


@dataclass
class LaunchConfig(TrainerConfig, ServerConfig):
    """The settings of a run that grpo.launch starts: server, pool, workers and trainer."""

    HEADING = "processes"

    pool_url: str | None = option(
        None,
        "database of the workers' pool, instead of a file in output_dir: postgresql://USER@HOST/DATABASE",
        needs="workers",
    )
    pool_folder: str | None = option(
        None, "folder of its files, on a disk that all machines share, or s3://BUCKET/PREFIX", needs="pool_url"
    )
    on: Literal["local", "ssh", "slurm", "ray", "k8s"] = option(
        "local",
        "what starts them: this machine itself, or an engine on several machines (docs/recipes/two_nodes.md)",
        common=True,
    )
    on_args: str | None = option(
        None, "more options of ssh, sbatch or kubectl, one text", needs="on ssh or on slurm or on k8s"
    )
    hostfile: str | None = option(None, "file with a line 'HOST slots=GPUS' for each machine", needs="on ssh")
    gpus_per_node: int | None = option(
        None, "GPUs that the run gets on each machine; 0: CPUs", needs="on slurm or on ray or on k8s", at_least=0
    )
    image: str | None = option(None, "image of examples/Dockerfile, in a registry", needs="on k8s")
    render: str | None = option(
        None, "write the job to this file, to read and edit, and start nothing", needs="on slurm or on k8s"
    )
    print_plan: bool = option(False, "show the programs, their machines' GPUs and commands, and start nothing")
    workers: int = option(0, "programs that draw, each on a GPU, with a pool between them and the trainer", at_least=0)
    worker_args: str | None = option(None, "options of generate.py, one text", needs="workers")
    nproc_per_node: int | None = option(
        None, "trainer processes on each machine; unset: one for each GPU that is left", common=True, above=0
    )
    min_ranks: int | None = option(
        None,
        "train with fewer, but so many at least, where machines or GPUs are missing",
        needs="prompts_per_step",
        above=0,
    )
    nnodes: int = option(1, "machines; with on local start the same command on each, with its node_rank", above=0)
    node_rank: int = option(0, "this machine's number; machine 0 has the reference server", at_least=0)
    master_addr: str | None = option(None, "name or address by which the others reach machine 0")
    master_port: int = option(29500, "TCP port of machine 0, with several machines", above=0, at_most=65535)

    UNCOMMON: ClassVar = TrainerConfig.UNCOMMON | {"task", "pool_file", "estimate"}  # which it refuses

    def fill_in_unset(self, recorded: Mapping[str, Any], world_size: int, is_lora: bool) -> None:
        """Leave them unset: the trainer knows the number of ranks."""

    def __post_init__(self) -> None:
        if self.workers:
            self.check(self.pool is None, pool="workers get a pool of their own: leave out pool, or workers")
            self.sampler, self.pool = "pool", self.url_on_first(self.pool_port)
        super().__post_init__()
        self.check(self.task == "logprobs", task="start a reward server by itself: python ref_server.py")
        self.check(not self.estimate, estimate="python ref_server.py --estimate prints it")
        takes_updates = not self.starts_server or self.ref_update_steps == 0 or self.update_folder is not None
        self.check(takes_updates, update_folder="ref_update_steps sends weights to the server: name a folder for them")
        self.check(self.node_rank < self.nnodes, node_rank=f"of {self.nnodes} machines the last has {self.nnodes - 1}")
        both = self.pool_url is None or self.pool_folder is not None
        self.check(both, pool_folder="the pool's weights are no rows of a database: name a folder for them")
        for name in ("on_args", "worker_args"):
            try:
                shlex.split(getattr(self, name) or "")
            except ValueError as error:
                self.refuse(name, f"{error}: quote it as in a shell")
        if self.on != "local":
            self._check_engine()
        elif self.nnodes == 1:
            is_here = not (self.starts_server or self.workers) or self.host in ("127.0.0.1", "localhost", "0.0.0.0")
            self.check(is_here, host="the trainer asks server and pool at 127.0.0.1: use 0.0.0.0, or leave it out")
        else:
            self.check(self.master_addr is not None, master_addr="name machine 0 as the others reach it")
            self.check(":" not in self.master_addr, master_addr="server and pool listen by IPv4: use that, or a name")
            self.check(self.output_dir is not None, output_dir="name a folder on a disk that all machines share")
            reached = self.token is not None or not (self.starts_server or self.workers)
            self.check(reached, token_file="the other machines ask the reference server: name a file with a token")

    def _check_engine(self) -> None:
        for name, is_given in (("node_rank", self.node_rank), ("master_addr", self.master_addr)):
            self.check(not is_given, **{name: f"with on={self.on!r} each machine gets its own: leave it out"})
        self.check(self.output_dir is not None, output_dir="name a folder on a disk that all machines share")
        if self.on == "ssh":
            self.check(self.hostfile is not None, hostfile="name a file with a line 'HOST slots=GPUS' for each machine")
        else:
            self.check(self.gpus_per_node is not None, gpus_per_node="how many of each machine? 0 trains on CPUs")
        if self.on == "k8s":
            self.check(self.image is not None, image="name it as your registry does: REGISTRY/grpo")
            self.check(self.min_ranks is None, min_ranks="Kubernetes keeps the number of pods: leave it out")

    def ranks_of(self, count: int) -> int:
        """Return the most ranks, of `count` at most, that can share a step. Raises ConfigError if that is below
        min_ranks."""
        numbers = range(count, self.min_ranks - 1, -1)
        fits = (n for n in numbers if self.prompts_per_step % n == 0 and n % self.sequence_parallel_size == 0)
        if (ranks := next(fits, None)) is None:
            self.refuse("min_ranks", f"there are {count}, and no number from it to that divides prompts_per_step")
        return ranks

    def url_on_first(self, port: int) -> str:
        """Return the URL by which all machines reach a port of machine 0."""
        return f"http://{self.master_addr if self.nnodes > 1 else '127.0.0.1'}:{port}"

    @property
    def pool_port(self) -> int:
        return self.port + 2  # 59877, if the server has 59875

    @property
    def workers_beside(self) -> int:
        """Return how many workers run on the trainer's machines: Kubernetes gives them their own."""
        return 0 if self.on == "k8s" else self.workers

    @property
    def starts_server(self) -> bool:
        """Tell whether the run asks a reference server that nobody else starts. A dry run leaves its card free."""
        is_unnamed = self.ref_servers == [f"http://127.0.0.1:{self.port}"]
        return self.beta > 0 and self.ref == "server" and is_unnamed

    def changed(self) -> dict[str, Any]:
        """Return the settings that are not the defaults: a worker has another one for the trainer's
        sequences_per_generate."""
        return {
            field.name: value for field in fields(self) if (value := getattr(self, field.name)) != default_of(field)
        }

    def passed_on(self) -> dict[str, Any]:
        """Return the changed settings that a launcher on another machine needs: not its place, nor those that it
        finds out by itself."""
        derived = {"ref_servers": self.starts_server, "sampler": self.workers, "pool": self.workers}
        return {name: value for name, value in self.changed().items() if name not in _PLACES and not derived.get(name)}


_PLACES = {
    *("on", "on_args", "hostfile", "gpus_per_node", "image", "render", "print_plan", "resume_from_checkpoint"),
    *("nnodes", "node_rank", "master_addr", "master_port", "token_file"),
}


MOST_RUNS = 10  # the number of colours on a page


@dataclass
class ReportConfig(Section):
    """Every setting of `grpo report`."""

    HEADING = "report"

    runs: list[str] = option([], "folders of runs to show over each other, also without --runs", common=True)
    output: str | None = option(None, "folder to make; unset is report in the first run's folder", common=True)
    smoothing: int = option(0, "steps of the moving average; 0 is a twentieth, at least 5", at_least=0, common=True)
    png: bool = option(False, "draw each section of the page as a PNG too, beside it", common=True)
    serve: bool = option(False, "show the page live on this machine, until Ctrl-C; writes no file", common=True)
    port: int = option(59880, "TCP port; 0: any", needs="serve", at_least=0, at_most=65535, common=True)

    POSITIONAL: ClassVar = "runs"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(len(self.runs) > 0, runs="name the folder of a run")
        self.check(len(self.runs) <= MOST_RUNS, runs=f"only {MOST_RUNS} can be told apart: name fewer")
        written = self.output is not None or self.png
        self.check(not (self.serve and written), serve="it writes no file: leave output and png out")


# All settings: a launcher's are those of server and trainer.
PROGRAMS = (LaunchConfig, EvaluateConfig, ChatConfig, ReportConfig, WorkerConfig)
