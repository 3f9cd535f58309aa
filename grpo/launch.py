"""Runs the reference server, if the run needs one, and the trainer on the other GPUs of this machine.

    grpo launch --config configs/lora_24gb.yaml
    grpo launch --nproc_per_node 2 --config configs/demo_cpu.yaml

The second needs no GPU: it starts two CPU processes. The options are those of `ref_server.py` and
`grpo_ref_split.py`. With two GPUs or more the server gets the last one; with one GPU it shares that with the trainer.
`--beta 0`, `--ref local` or adapter_off, and `--ref_servers URL` start no server. Ctrl-C lets the trainer finish its
step and save, then everything ends; a second Ctrl-C ends at once. Out of memory, the run continues twice by itself,
with half of the setting that failed.
"""

import json
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import requests

from grpo.config.command_line import parse_arguments, to_yaml
from grpo.config.console import free_port, start_program
from grpo.config.errors import COMMAND, LOWERED, ConfigError, program_name, say_once
from grpo.config.fields import PROGRAMS
from grpo.config.programs import LaunchConfig
from grpo.config.record_settings import settings_in
from grpo.run.exit import exit_code
from grpo.run.run_folder import find_run_folder, finished_steps

log = logging.getLogger("grpo.launch")

_GRACE = 30.0  # seconds in which the other ranks may end by themselves after one has failed
_AFTER_FIRST = 2.0  # the same after the first rank, whose error the others would say again (say_once)
_MOST_LOWERED = 2  # times that a run out of memory continues with a lower setting
_POLL = 0.2  # seconds between two looks at the processes


def launch(config: LaunchConfig) -> int:
    """Run server and trainer to the trainer's end. Return the exit code of the first failed rank, else 0 if the run is
    done and 1 if it is not. Raises ConfigError if the ranks cannot share a step or a GPU, and as find_run_folder."""
    # The ranks would refuse it too, after seconds of imports. A folder without a name is chosen here, for all of them.
    run = find_run_folder(config)
    config.output_dir = str(run)
    server_cards, cards = share_cards(visible_cards(), config.starts_server)
    ranks = config.nproc_per_node or max(1, len(cards))
    if cards and ranks > len(cards):
        raise ConfigError(f"nproc_per_node={ranks}: the trainer has {len(cards)} GPUs: use that many at most")
    config.check_ranks(ranks)
    if server_cards and server_cards == cards:
        ways = "--ref local, --beta 0, or --use_peft with --ref adapter_off"
        log.info("the reference server shares GPU %s with the trainer; these need none: %s", *cards, ways)
    with tempfile.TemporaryDirectory(prefix="grpo-launch-") as folder:
        settings = Path(folder) / "config.yaml"
        settings.write_text(to_yaml(asdict(config)), encoding="utf-8")
        programs = Programs(settings, server_cards, f"http://127.0.0.1:{config.port}")
        try:
            if config.starts_server:
                programs.start_server()
            for attempts_left in reversed(range(1 + _MOST_LOWERED)):
                programs.start_trainer(ranks, cards)
                code = programs.wait()
                if not (code and attempts_left and (lowered := programs.take_lowered())):
                    break
                ((name, value),) = lowered.items()
                log.warning("the run goes on with %s=%d instead of %d", name, value, getattr(config, name))
                setattr(config, name, value)
                config.resume_from_checkpoint = "last"
                settings.write_text(to_yaml(asdict(config)), encoding="utf-8")
        finally:
            programs.end()
    if code == 0 and not config.dry_run and finished_steps(run) < settings_in(run).get("max_steps", math.inf):
        say_once(
            f"{run}: the trainer ended with code 0 before its last step: something ended its process: put reward "
            "functions behind --reward_timeout, tools and an environment behind --tool_timeout"
        )
        return 1
    return code


def visible_cards() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # takes seconds: after the settings are known to be good

    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return names.split(",")[:count]


def share_cards(cards: list[str], with_server: bool) -> tuple[list[str], list[str]]:
    return (cards[-1:], cards[:-1] or cards) if with_server else ([], cards)


class Programs:
    """Start and end the server and the trainer's ranks. Each has its own session: Ctrl-C in the terminal reaches only
    this process, which passes one signal to the ranks. If this process is killed, the kernel kills them."""

    def __init__(self, settings: Path, server_cards: list[str], server_url: str) -> None:
        self._settings, self._server_cards, self._server_url = settings, server_cards, server_url
        self._lowered = settings.with_name("lowered.json")  # a rank out of memory writes it
        self._is_asked_to_stop = False
        self._ranks: list[subprocess.Popen] = []
        self._server: subprocess.Popen | None = None

    def start_server(self) -> None:
        """Start the reference server on its GPU; without one, on the CPU."""
        self._server_was_ready = False
        self._server = self._start("ref_server.py", self._server_cards, {})
        place = f"GPU {self._server_cards[0]}" if self._server_cards else "the CPU"
        log.info("the reference server starts on %s; its page is %s/", place, self._server_url)

    def start_trainer(self, ranks: int, cards: list[str]) -> None:
        """Start a rank on each of these GPUs; without any, `ranks` processes on the CPU."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # under nohup SIGHUP is
                signal.signal(number, self._pass_on)
        shared = {"WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for rank in range(ranks):
            own = shared | {LOWERED: self._lowered, "RANK": rank, "LOCAL_RANK": rank}
            self._ranks.append(self._start("grpo_ref_split.py", cards, own))

    def _start(self, program: str, cards: list[str], environment: dict[str, object]) -> subprocess.Popen:
        command = f"{program_name()} {shlex.join(sys.argv[1:])}"
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(cards), COMMAND: command} | environment
        environment = os.environ | {name: str(value) for name, value in environment.items()}
        return start_program([str(PROGRAMS / program), "--config", str(self._settings)], environment)

    def take_lowered(self) -> dict[str, int]:
        """Return the setting that a rank out of memory would lower, with its value, unless the run is to stop."""
        self._end_ranks()
        self._ranks.clear()
        if self._is_asked_to_stop or not self._lowered.exists():
            return {}
        lowered = json.loads(self._lowered.read_text(encoding="utf-8"))
        self._lowered.unlink()
        return lowered

    def _pass_on(self, number: int, frame: FrameType | None = None) -> None:
        self._is_asked_to_stop = True
        for process in self._ranks:
            process.send_signal(number)

    def wait(self) -> int:
        """Wait until every rank has ended. Return the exit code of the first that failed, or 0."""
        code, deadline = 0, float("inf")
        while None in [process.poll() for process in self._ranks] and time.monotonic() < deadline:
            if not code and (code := self._failure() or self._watch_server()):
                deadline = time.monotonic() + _GRACE
            if self._ranks[0].returncode:
                deadline = min(deadline, time.monotonic() + _AFTER_FIRST)
            time.sleep(_POLL)
        return code or self._failure()

    def _failure(self) -> int:
        """Return the exit code of a failed rank, as a shell gives it, or 0."""
        codes = [process.returncode for process in self._ranks if process.returncode]
        return next((128 - code if code < 0 else code for code in codes), 0)

    def _watch_server(self) -> int:
        """Restart a server that ended after it was ready, and return 0. Return the exit code of one that never was."""
        if self._server is None:
            return 0
        if (code := self._server.poll()) is None:
            if not self._server_was_ready:
                with suppress(requests.RequestException):
                    self._server_was_ready = requests.get(f"{self._server_url}/health", timeout=5).status_code == 200
            return 0
        # With 2 it has refused a setting; that "ready" was of another server, on the same port.
        if self._server_was_ready and code != 2:
            log.warning("the reference server ended with code %d and starts again", code)
            self.start_server()
            return 0
        say_once(f"{self._server_url}: the reference server ended before it was ready; its own message says why")
        self._pass_on(signal.SIGTERM)
        return code if code > 0 else 1

    def end(self) -> None:
        """Kill the ranks that are left, and let the server end."""
        self._end_ranks()
        if self._server is not None:
            self._server.terminate()
            self._server.wait()

    def _end_ranks(self) -> None:
        for process in self._ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


def main() -> int:
    config = parse_arguments(LaunchConfig, __doc__)
    return exit_code(lambda: launch(config), (), "interrupted before the trainer started")


if __name__ == "__main__":
    sys.exit(main())
