"""The plan of a run: its programs, the GPUs of each, and what becomes of the others when it ends.

`grpo launch` makes it, and what starts the programs (this machine, or a module beside this one) reads it.
"""

from __future__ import annotations

import logging
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jinja2

from grpo.config.command_line import to_yaml
from grpo.config.errors import ConfigError, say_once
from grpo.config.programs import LaunchConfig
from grpo.run.run_folder import read_records, writable

log = logging.getLogger("grpo.launch")

MOST_FAILURES = 3  # times that the ranks, or another program, are lost without a step in between
OF_POOL = {"pool_url", "pool_folder"}  # settings that only a launcher and the pool may read
_CPUS, _MEMORY = 8, 64  # cores and GiB of memory that a program wants for each of its GPUs


@dataclass(kw_only=True)
class Share:
    """What this machine runs of `world_size` ranks: `ranks` of them on its `cards`, from number `first` on."""

    first: int
    ranks: int
    world_size: int
    cards: list[str]  # none: on the CPU
    server_cards: list[str] | None  # None: no server
    worker_cards: list[str]  # of each worker one; on the CPU an empty word


def share_of(config: LaunchConfig, cards: list[str], nnodes: int | None = None) -> Share:
    """Return the share of a machine with these GPUs, if all machines have as many; of `nnodes` instead of the
    settings'. Raises ConfigError if the GPUs are too few for nproc_per_node or the workers, and the ranks for
    min_ranks."""
    node, count = config.node_rank, nnodes or config.nnodes
    workers = [(config.workers_beside + place) // count for place in range(count)]
    left = [len(cards) - workers_there for workers_there in workers]
    server_cards = None
    if config.starts_server:
        server_cards = cards[-1:] if left[0] > 1 else cards[:1]  # which it then shares with the trainer
        left[0] -= left[0] > 1
    if cards and min(left) < 1:
        config.refuse("workers", f"they leave no GPU to the trainer, of {len(cards)} on each machine: use fewer")
    ranks = [config.nproc_per_node or max(1, cards_there) for cards_there in left]
    if cards and ranks[node] > left[node]:
        config.refuse("nproc_per_node", f"the trainer has {left[node]} GPUs: use that many at most")
    if config.min_ranks is not None:
        for _ in range(sum(ranks) - config.ranks_of(sum(ranks))):
            ranks[ranks.index(max(ranks))] -= 1
        config.check(min(ranks) > 0, nnodes=f"only {sum(ranks)} ranks can share a step: use fewer machines")
    end = max(0, left[node])
    worker_cards = cards[end : end + workers[node]] if cards else [""] * workers[node]
    here = server_cards if node == 0 else None
    return Share(
        first=sum(ranks[:node]),
        ranks=ranks[node],
        world_size=sum(ranks),
        cards=cards[:end],
        server_cards=here,
        worker_cards=worker_cards,
    )


def are_enough(config: LaunchConfig, nnodes: int) -> bool:
    """Tell whether so many machines have the GPUs that the run needs, and ranks for min_ranks."""
    try:
        share_of(config, list(map(str, range(config.gpus_per_node))), nnodes)
    except ConfigError:
        return False
    return True


@dataclass(kw_only=True)
class Role:
    """Processes of one program of a run."""

    name: str
    count: int
    words: list[str]  # the program and its options, without those that depend on the place
    gpus: int = 0  # of each process
    cpus: int = 2
    memory: int = 8  # GiB
    waits_for: str = ""
    at_its_end: str = "starts again"

    def __post_init__(self) -> None:
        if self.gpus:
            self.cpus, self.memory = _CPUS * self.gpus, _MEMORY * self.gpus


def roles_of(config: LaunchConfig) -> list[Role]:
    """Return the programs of a run on nnodes machines with gpus_per_node each. Raises ConfigError as share_of."""
    ranks = share_of(config, list(map(str, range(config.gpus_per_node)))).world_size
    config.check_ranks(ranks)
    gpus = min(1, config.gpus_per_node)
    roles = [Role(name="server", count=1, words=["ref_server.py"], gpus=gpus)] if config.starts_server else []
    if config.workers:
        roles.append(Role(name="pool", count=1, words=pool_words(config)))
        roles.append(Role(name="worker", count=config.workers, words=worker_words(config), gpus=gpus, waits_for="pool"))
    asked = " and ".join(role.name for role in roles if role.name != "worker")
    end = "all end; a lost rank: all ranks start again"
    trainer = Role(name="trainer", count=ranks, words=["grpo_ref_split.py"], gpus=gpus, waits_for=asked, at_its_end=end)
    return [trainer, *roles]


def pool_words(config: LaunchConfig) -> list[str]:
    """Return the command of the workers' pool, without its address."""
    place = ["--pool_file", f"{config.output_dir}.pool"]
    if config.pool_url is not None:
        place = ["--pool_url", config.pool_url, "--pool_folder", config.pool_folder]
    return ["ref_server.py", "--task", "rollouts", *place]


def worker_words(config: LaunchConfig) -> list[str]:
    """Return the command of a worker, without its settings."""
    return ["generate.py", *shlex.split(config.worker_args or "")]


def table(roles: list[Role]) -> str:
    """Return the plan as text to read."""
    rows = [("role", "processes", "GPUs", "CPUs", "GiB", "waits for", "when it ends", "program")]
    for role in roles:
        numbers = map(str, (role.count, role.gpus, role.cpus, role.memory))
        rows.append((role.name, *numbers, role.waits_for or "-", role.at_its_end, shlex.join(role.words)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "GPUs, CPUs and GiB are those of one process"])


class FailureCount:
    """Counts failures without a step of the run in between."""

    def __init__(self, run: Path) -> None:
        self._metrics, self._step, self._count = run / "metrics.jsonl", 0, 0

    def is_last(self) -> bool:
        """Count another failure. Return whether it is the third."""
        step = max((record["step"] for record in read_records(self._metrics)), default=0)
        self._count = 1 if step > self._step else self._count + 1
        self._step = max(step, self._step)
        return self._count == MOST_FAILURES


def run_again(run: Path, attempt: Callable[[], int | None]) -> int:
    """Attempt a run until a code is returned, and return it; None says that a machine or a program is lost. After too
    many losses without a step in between return 1."""
    failures = FailureCount(run)
    while (code := attempt()) is None:
        if failures.is_last():
            say_once(f"lost {MOST_FAILURES} times without a step in between: what stands above says why")
            return 1
        log.warning("a machine or a program is lost: the run continues from its last checkpoint")
    return code


def run_tool(
    config: LaunchConfig, command: list[str], remedy: str, *, text: str = "", seconds: float | None = None
) -> subprocess.CompletedProcess:
    """Run a command of the engine's on a text to its end. Raises ConfigError, with a remedy, if it is not installed,
    and subprocess.TimeoutExpired after so many seconds."""
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        config.refuse("on", f"there is no {command[0]} here: {remedy}")


def fill_in(template: str, /, **values: object) -> str:
    """Return the text of a template beside this module. Raises jinja2's error for a value that it lacks."""
    text = (Path(__file__).parent / template).read_text(encoding="utf-8")
    return jinja2.Template(text, undefined=jinja2.StrictUndefined, keep_trailing_newline=True).render(values)


@contextmanager
def shared_files(config: LaunchConfig, without: Set[str] = frozenset()) -> Iterator[list[str]]:
    """Keep settings, but for those `without`, and a token, the user's or a new one, in a folder beside the run's, on
    the disk that all machines share. Yield the options that name them."""
    run = Path(config.output_dir).absolute()
    with writable("output_dir", run.parent):
        run.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{run.name}-launch-", dir=run.parent))  # which others cannot read
    try:
        settings, token = folder / "settings.yaml", folder / "token"
        passed_on = {name: value for name, value in config.passed_on().items() if name not in without}
        settings.write_text(to_yaml(passed_on), encoding="utf-8")
        token.write_text(f"{config.token or secrets.token_urlsafe(32)}\n")
        yield ["--config", str(settings), "--token_file", str(token)]
    finally:
        shutil.rmtree(folder)
