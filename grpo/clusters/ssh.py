"""Starts the launcher of each machine by ssh, and all of them again when one is lost.

    grpo launch --on ssh --hostfile hosts --config configs/two_nodes.yaml --output_dir /shared/run

The hostfile is DeepSpeed's: a line `node-1 slots=8` for each machine. Repository, Python environment and working folder
are at the same path on each. Variables NCCL_*, GLOO_*, OMP_* and HF_HOME travel; secrets do not.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from grpo.clusters.plan import Role, are_enough, run_again, run_tool, shared_files
from grpo.config.console import start_command
from grpo.config.errors import COMMAND, ConfigError, on_stop_signals, one_line, typed_command
from grpo.config.programs import LaunchConfig
from grpo.run.run_folder import forget_stop, is_stop_asked

log = logging.getLogger("grpo.launch")

_TRAVELS = re.compile("(NCCL|GLOO|OMP)_.*|HF_HOME")
_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"]
_LOOK, _RETRY = 0.2, 5.0  # seconds between two looks at the launchers, and at machines that do not answer
_ANSWER = 60.0  # seconds in which a machine starts Python in this folder
_SAID = 60.0  # seconds between two lines about machines that do not answer
_GRACE = 60.0  # seconds in which the other machines may end by themselves after one has
_BETWEEN, _MOST_INTERRUPTS = 5.0, 3  # seconds between two Ctrl-C then; the second ends ranks at once


def read_hosts(path: str) -> tuple[list[str], int]:
    """Return the machines, and the GPUs that each has. Raises ConfigError for a file that cannot be read or has a line
    of another kind, and for machines that differ."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile={path!r}: {error}: name a file with a line 'HOST slots=GPUS'") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        if (found := re.fullmatch(r"([\w.@-]+)\s+slots=(\d+)", text)) is None or found[1] in slots:
            raise ConfigError(f"hostfile={path!r}: line {number} is {text!r}: write 'HOST slots=GPUS', each host once")
        slots[found[1]] = int(found[2])
    if not slots:
        raise ConfigError(f"hostfile={path!r}: it names no machine: write a line 'HOST slots=GPUS' for each")
    if len(set(slots.values())) != 1:
        raise ConfigError(f"hostfile={path!r}: its machines have {sorted(set(slots.values()))} slots: give all as many")
    return list(slots), next(iter(slots.values()))


def start(config: LaunchConfig, roles: list[Role]) -> int:
    """Run launchers on all machines to the trainer's end, again where one is lost. Return the exit code. Raises
    ConfigError if a machine does not answer at first."""
    launchers = Launchers(config)
    forget_stop(Path(config.output_dir))
    with shared_files(config) as files:
        return run_again(Path(config.output_dir), partial(launchers.attempt, files))


class Launchers:
    """The launchers of a run, one on each machine."""

    def __init__(self, config: LaunchConfig) -> None:
        """Raises ConfigError if a machine does not answer, or lacks this folder or this Python."""
        self._config, self._run = config, Path(config.output_dir)
        self._hosts, _ = read_hosts(config.hostfile)
        self._ssh = [*_SSH, *shlex.split(config.on_args or "")]
        self._is_asked_to_stop = False
        self._launchers: list[subprocess.Popen] = []
        for host, refusal in self._refusals().items():
            self._config.check(not refusal, hostfile=f"{host} cannot be used by ssh: {refusal}")
        # From here on a signal is answered: no folder with a token may stay behind.
        on_stop_signals(self._ask)

    def _is_over(self) -> bool:
        return self._is_asked_to_stop or is_stop_asked(self._run)

    def _refusals(self) -> dict[str, str]:
        """Return why each machine cannot be used; an empty text if it can. One that has just started may answer before
        it has its disks."""
        command = self._in_this_folder([sys.executable, "-c", ""])

        def ask(host: str) -> str:
            try:
                done = run_tool(self._config, [*self._ssh, host, command], "install it", seconds=_ANSWER)
            except subprocess.TimeoutExpired:  # the network is there, and the disk perhaps not
                return f"this folder did not answer within {_ANSWER:.0f} s"
            return done.returncode and (one_line(done.stderr) or f"ssh ended with code {done.returncode}")

        with ThreadPoolExecutor(len(self._hosts)) as threads:
            return dict(zip(self._hosts, threads.map(ask, self._hosts), strict=True))

    def _wait_for_hosts(self) -> list[str]:
        """Return the machines to continue on: all, or with min_ranks those that answer; none if the run is to stop."""
        said = -math.inf
        while not self._is_over():
            refusals = self._refusals()
            hosts = [host for host, refusal in refusals.items() if not refusal]
            may_be_fewer = self._config.min_ranks is not None and hosts
            if len(hosts) == len(refusals) or (may_be_fewer and are_enough(self._config, len(hosts))):
                return hosts
            if time.monotonic() > said + _SAID:
                said, missing = time.monotonic(), [host for host in refusals if host not in hosts]
                log.warning("waiting for %s: %s", ", ".join(missing), refusals[missing[0]])
            time.sleep(_RETRY)
        return []

    def attempt(self, files: list[str]) -> int | None:
        """Run a launcher on each machine, with the options that name settings and token. Return the highest exit code,
        130 if the run is asked to stop before there are machines, or None if one is lost, or a process there was killed
        or asked to stop."""
        if not (hosts := self._wait_for_hosts()):
            return 130
        self._launchers = [self._start(files, hosts, node) for node in range(len(hosts))]
        if self._is_asked_to_stop:  # between two attempts, when there was nobody to pass it on to
            self._interrupt()
        deadline, times = math.inf, 0
        while None in (codes := [launcher.poll() for launcher in self._launchers]):
            if any(codes):
                deadline = min(deadline, time.monotonic() + _GRACE)
            if time.monotonic() > deadline:  # they wait for a machine that is lost
                self._interrupt()
                deadline, times = time.monotonic() + _BETWEEN, times + 1
            if times == _MOST_INTERRUPTS:
                for launcher in self._launchers:
                    launcher.kill()
            time.sleep(_LOOK)
        ended, self._launchers = self._launchers, []  # a signal from now on writes to none of them
        for launcher in ended:
            with suppress(BrokenPipeError):
                launcher.stdin.close()
        # Those that waited answer that Ctrl-C with 130: no machine is lost if one has failed by itself.
        code = max(255 if code < 0 else 1 if times and code == 130 else code for code in codes)
        return code if code <= 128 or self._is_over() else None

    def _start(self, files: list[str], hosts: list[str], node: int) -> subprocess.Popen:
        """Start a machine's launcher. With a terminal of its own there it gets Ctrl-C, and SIGHUP if ssh ends."""
        variables = {name: value for name, value in os.environ.items() if _TRAVELS.fullmatch(name)}
        words = ["env", *(f"{name}={value}" for name, value in (variables | {COMMAND: typed_command()}).items())]
        words += [sys.executable, "-m", "grpo.launch", *files, "--resume_from_checkpoint", "last"]
        words += ["--nnodes", str(len(hosts)), "--node_rank", str(node), "--master_addr", hosts[0].rpartition("@")[2]]
        words += ["--master_port", str(self._config.master_port)]
        command = [*self._ssh, "-tt", hosts[node], self._in_this_folder(words)]
        return start_command(command, os.environ, stdin=subprocess.PIPE)

    def _in_this_folder(self, words: list[str]) -> str:
        return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked_to_stop = True
        self._interrupt()

    def _interrupt(self) -> None:
        """Type Ctrl-C on every machine."""
        for launcher in self._launchers:
            with suppress(BrokenPipeError):
                launcher.stdin.write("\x03")
                launcher.stdin.flush()
