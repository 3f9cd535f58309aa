"""Runs the reference server, if the run needs one, and the trainer on the other GPUs: of this machine, or of several.

    grpo launch --config configs/lora_24gb.yaml
    grpo launch --nproc_per_node 2 --config configs/demo_cpu.yaml
    grpo launch --workers 2 --config configs/lora_24gb.yaml
    grpo launch --on slurm --nnodes 2 --gpus_per_node 8 --config configs/two_nodes.yaml --output_dir /shared/run

The second needs no GPU: it starts two CPU processes. The third gives two GPUs to workers, which draw. The last starts
it on two machines that SLURM gives; --on ssh, ray and k8s are others. The options are those of `ref_server.py` and
`grpo_ref_split.py`. With two GPUs or more the server gets the last one (of machine 0); with one GPU it shares that with
the trainer. `--beta 0`, `--ref local` or adapter_off, and `--ref_servers URL` start no server. Ctrl-C lets the trainer
finish its step and save, then everything ends; a second Ctrl-C ends at once. On one machine, a run whose process was
killed continues by itself, and so does one out of memory: twice, with half of the setting that failed.
"""

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType

from grpo.clusters.plan import (
    MOST_FAILURES,
    OF_POOL,
    FailureCount,
    Share,
    pool_words,
    roles_of,
    share_of,
    table,
    worker_words,
)
from grpo.config.command_line import parse_arguments, to_yaml
from grpo.config.console import free_port, start_program
from grpo.config.errors import COMMAND, LOWERED, on_stop_signals, say_once, typed_command
from grpo.config.fields import PROGRAMS
from grpo.config.programs import LaunchConfig
from grpo.report.status import is_ready, writer
from grpo.run.exit import exit_code
from grpo.run.run_folder import find_run_folder, forget_stop, is_finished, is_stop_asked

log = logging.getLogger("grpo.launch")

_GRACE = 30.0  # seconds in which the other ranks may end by themselves after one has failed
_AFTER_FIRST = 2.0  # the same after the first rank, whose error the others would say again (say_once)
_MOST_LOWERED = 2  # times that a run out of memory continues with a lower setting
_POLL = 0.2  # seconds between two looks at the processes


def launch(config: LaunchConfig) -> int:
    """Run all programs of the plan, here or on an engine, to the trainer's end. Return the exit code. Raises
    ConfigError."""
    if config.on != "local":
        try:
            engine = import_module(f"grpo.clusters.{config.on}")
        except ModuleNotFoundError as error:
            config.refuse("on", f"{sys.executable} has no {error.name}: pip install 'grpo-ref-split[{config.on}]'")
    elif not config.print_plan:
        return launch_here(config)
    if config.on == "ssh":
        hosts, config.gpus_per_node = engine.read_hosts(config.hostfile)
        config.check(config.nnodes in (1, len(hosts)), nnodes=f"the hostfile names {len(hosts)} machines: leave it out")
        config.nnodes = len(hosts)
    elif config.on == "local":
        config.gpus_per_node = len(visible_cards())
    if config.on != "k8s":  # whose disk is not here
        config.output_dir = str(find_run_folder(config))
    roles = roles_of(config)
    if config.print_plan:
        print(table(roles), flush=True)
        return 0
    return engine.start(config, roles)


def launch_here(config: LaunchConfig) -> int:
    """Run this machine's part to the trainer's end. Return the exit code of the first failed rank, else 0 if the run is
    done and 1 if it is not. Raises ConfigError if the ranks cannot share a step or a GPU, and as find_run_folder."""
    # The ranks would refuse it too, after seconds of imports. A folder without a name is chosen here, for all of them.
    run = find_run_folder(config)
    config.output_dir = str(run)
    # One that trains there still has it to obey.
    if config.node_rank == 0 and not config.dry_run and writer(run) is None:
        forget_stop(run)
    if not (cards := visible_cards()):
        from grpo.model.devices import take_device

        take_device(0)  # raises ConfigError if the machine has cards that torch cannot use
    share = share_of(config, cards)
    config.check_ranks(share.world_size)
    if share.server_cards and share.server_cards == share.cards:
        ways = "--ref local, --beta 0, or --use_peft with --ref adapter_off"
        log.info("the reference server shares GPU %s with the trainer; these need none: %s", *share.cards, ways)
    if config.nnodes > 1:
        last = share.first + share.ranks - 1
        log.info("machine %d runs ranks %d to %d of %d", config.node_rank, share.first, last, share.world_size)
        config.host = "0.0.0.0"
        if config.starts_server and not config.dry_run:
            config.ref_servers = [config.url_on_first(config.port)]
    with tempfile.TemporaryDirectory(prefix="grpo-launch-") as folder:
        # systemd-tmpfiles deletes what is ten days old in /tmp, but nothing in a folder that is locked.
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)
        programs = Programs(config, share, Path(folder))
        try:
            code = programs.run()
        finally:
            programs.end()
    if code == 0 and not (config.dry_run or is_finished(run) or is_stop_asked(run)):
        say_once(
            f"{run}: the trainer ended with code 0 before its last step: something ended its process: put reward "
            "functions behind --reward_timeout, tools and an environment behind --tool_timeout"
        )
        return 1
    return code


def visible_cards() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":  # by which all programs leave them
        return []
    import torch  # takes seconds: after the settings are known to be good

    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return names.split(",")[:count]


@dataclass(kw_only=True)
class ServiceProcess:
    """A program beside the ranks, which starts again when it ends: the reference server, the pool, a worker."""

    name: str
    words: list[str]
    cards: list[str]
    failures: FailureCount
    url: str | None = None  # at which it says that it is ready; None: it answers nobody
    process: subprocess.Popen | None = None
    was_ready: bool = False


class Programs:
    """Start and end the server and the trainer's ranks. Each has its own session: Ctrl-C in the terminal reaches only
    this process, which passes one signal to the ranks. If this process is killed, the kernel kills them."""

    def __init__(self, config: LaunchConfig, share: Share, folder: Path) -> None:
        """`folder` is for files that the programs read and write."""
        self._config, self._share = config, share
        self._settings = folder / "config.yaml"
        self._lowered = folder / "lowered.json"  # a rank out of memory writes it
        self._is_asked_to_stop = False
        self._ranks: list[subprocess.Popen] = []
        self._rank_failures = FailureCount(Path(config.output_dir))
        self._services = [] if config.dry_run else self._plan_services()

    def run(self) -> int:
        """Run services and trainer to the trainer's end, and return its exit code."""
        self._write_settings()
        Path(self._config.output_dir).parent.mkdir(parents=True, exist_ok=True)  # for the pool's file
        for service in self._services:
            self._start_service(service)
        times_lowered = 0
        while True:
            self._start_trainer()
            code = self._wait()
            killed_by = next((-code for code in self._exit_codes() if code < 0), 0)
            self._end_ranks()
            asked_to_stop = self._is_asked_to_stop or is_stop_asked(Path(self._config.output_dir))
            # Of several machines, whatever has started all of them does it again.
            if code == 0 or asked_to_stop or self._config.nnodes > 1:
                return code
            if self._lowered.exists() and times_lowered < _MOST_LOWERED:
                ((name, value),) = json.loads(self._lowered.read_text(encoding="utf-8")).items()
                self._lowered.unlink()
                log.warning("the run goes on with %s=%d instead of %d", name, value, getattr(self._config, name))
                setattr(self._config, name, value)
                times_lowered += 1
            elif killed_by and not self._rank_failures.is_last():
                log.warning("a rank was killed by %s: the run continues", signal.Signals(killed_by).name)
            else:
                return code
            self._config.resume_from_checkpoint = "last"
            self._write_settings()

    def _write_settings(self) -> None:
        settings = {name: value for name, value in self._config.changed().items() if name not in OF_POOL}
        self._settings.write_text(to_yaml(settings), encoding="utf-8")

    def _plan_services(self) -> list[ServiceProcess]:
        config, share, run = self._config, self._share, Path(self._config.output_dir)
        services, settings = [], ["--config", str(self._settings)]

        def add(name: str, words: list[str], cards: list[str], port: int | None = None) -> None:
            url = None if port is None else f"http://127.0.0.1:{port}"
            services.append(ServiceProcess(name=name, words=words, cards=cards, failures=FailureCount(run), url=url))

        if share.server_cards is not None:
            add("the reference server", ["ref_server.py", *settings], share.server_cards, config.port)
        if config.workers_beside and config.node_rank == 0:
            address = ["--host", config.host, "--port", str(config.pool_port)]
            token = ["--token_file", config.token_file] if config.token_file else []
            add("the pool", [*pool_words(config), *address, *token], [], config.pool_port)
        for number, card in enumerate(share.worker_cards, 1):
            add(f"worker {number}", [*worker_words(config), *settings], [card])
        return services

    def _start_service(self, service: ServiceProcess) -> None:
        service.was_ready = service.url is None
        service.process = self._start(service.words, service.cards, {})
        place = f"GPU {service.cards[0]}" if any(service.cards) else "the CPU"
        page = f"; its page is {service.url}/" if service.url else ""
        log.info("%s starts on %s%s", service.name, place, page)

    def _start_trainer(self) -> None:
        on_stop_signals(self._pass_on)
        share, config = self._share, self._config
        shared = {"WORLD_SIZE": share.world_size, "LOCAL_SIZE": share.ranks}
        if config.nnodes > 1:
            shared |= {"MASTER_ADDR": config.master_addr, "MASTER_PORT": config.master_port}
        else:
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), LOWERED: self._lowered}
        for rank in range(share.ranks):
            places = {"RANK": share.first + rank, "LOCAL_RANK": rank}
            self._ranks.append(
                self._start(["grpo_ref_split.py", "--config", str(self._settings)], share.cards, shared | places)
            )
        if self._is_asked_to_stop:  # between two starts, when there was nobody to pass it on to
            self._pass_on(signal.SIGTERM)

    def _start(self, words: list[str], cards: list[str], environment: dict[str, object]) -> subprocess.Popen:
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(cards), COMMAND: typed_command()} | environment
        environment = os.environ | {name: str(value) for name, value in environment.items()}
        return start_program([str(PROGRAMS / words[0]), *words[1:]], environment)

    def _pass_on(self, number: int, frame: FrameType | None = None) -> None:
        self._is_asked_to_stop = True
        for process in self._ranks:
            process.send_signal(number)

    def _wait(self) -> int:
        """Wait until every rank has ended. Return the exit code of the first that failed, or 0."""
        code, deadline = 0, float("inf")
        while None in [process.poll() for process in self._ranks] and time.monotonic() < deadline:
            code = code or self._failure() or self._watch_services()
            # Ranks that a lost service stops finish their step and save, however long that takes.
            if self._failure() and deadline == float("inf"):
                deadline = time.monotonic() + _GRACE
            if self._ranks[0].returncode:
                deadline = min(deadline, time.monotonic() + _AFTER_FIRST)
            time.sleep(_POLL)
        return code or self._failure()

    def _failure(self) -> int:
        """Return the exit code of a failed rank, as a shell gives it, or 0."""
        return next((128 - code if code < 0 else code for code in self._exit_codes()), 0)

    def _exit_codes(self) -> list[int]:
        """Return those of the ranks that have failed."""
        return [process.returncode for process in self._ranks if process.returncode]

    def _watch_services(self) -> int:
        """Start those again that ended after they were ready, and return 0. Return the exit code of one that never was,
        or that refuses a setting."""
        for service in self._services:
            if (code := service.process.poll()) is None:
                service.was_ready = service.was_ready or is_ready(service.url)
                continue
            # With 2 it has refused a setting; that "ready" was of another server, on the same port.
            if not service.was_ready or code == 2:
                how = "before it was ready"
            elif service.failures.is_last():
                how = f"{MOST_FAILURES} times without a step in between"
            else:
                log.warning("%s ended with code %d and starts again", service.name, code)
                self._start_service(service)
                continue
            place = f"{service.url}: " if service.url else ""
            say_once(f"{place}{service.name} ended {how}; its own message says why")
            self._pass_on(signal.SIGTERM)
            return code if code > 0 else 1
        return 0

    def end(self) -> None:
        """Kill the ranks that are left, and let the services end, those first that ask others."""
        self._end_ranks()
        for service in reversed(self._services):
            if service.process is not None:
                service.process.terminate()
                service.process.wait()

    def _end_ranks(self) -> None:
        for process in self._ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._ranks.clear()


def main() -> int:
    # The first process of a container has no other answer to it, until the ranks run.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    config = parse_arguments(LaunchConfig, __doc__)
    return exit_code(lambda: launch(config), (), "interrupted before the trainer started")


if __name__ == "__main__":
    sys.exit(main())
