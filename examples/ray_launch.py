"""Start GRPO on a Ray cluster: Ray finds a card for the reference server and one for each rank of the trainer.

    python examples/ray_launch.py 15 configs/two_nodes.yaml --output_dir /shared/run

starts 15 ranks and a server, from a node of the cluster or by `ray job submit -- python ...`. Options of the trainer
may follow; what the server must know too, such as the model, belongs in the file. Repository and Python environment are
at the same path on each node, output_dir is on a disk that they share. `--no_server` starts none: for --ref local or
adapter_off, and --beta 0. Without cards a rank gets a CPU.

Ray starts and ends processes; rollouts and gradients do not pass through it. When it loses a node, or a process is
killed, all end and start again from the last checkpoint, as soon as there are cards for them; after three times
without a step in between it gives up. Ctrl-C lets the trainer finish its step and save. It needs ray==2.60.0.
"""

import argparse
import os
import secrets
import signal
import sys
import threading
from pathlib import Path

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from grpo.config.console import free_port, start_program  # noqa: E402

MOST_FAILURES = 3  # without a step in between


@ray.remote(max_concurrency=2)
class Program:
    """A program of the repository, on the node where Ray has put it."""

    def __init__(self) -> None:
        self._process, self._is_stopped = None, False

    def address(self) -> tuple[str, str]:
        return ray.util.get_node_ip_address(), str(free_port())

    def run(self, words: list[str], environment: dict[str, str]) -> int:
        """Run it to its end; return its exit code, which is negative if a signal has killed it."""
        self._process = start_program(words, os.environ | environment, cwd=REPOSITORY)
        if self._is_stopped:
            self._process.terminate()
        return self._process.wait()

    def stop(self) -> None:
        self._is_stopped = True
        if self._process is not None:
            self._process.terminate()


class Attempt:
    """All programs of a run, from their start until the trainer has ended or one of its ranks is lost."""

    def __init__(self, ranks: int, with_server: bool):
        has = {name: int(ray.cluster_resources().get(name, 0)) for name in ("GPU", "CPU")}
        card = {"GPU": 1, "CPU": 1} if has["GPU"] else {"CPU": 1}
        count = ranks + with_server
        self._group = placement_group([card] * count)
        print(f"waiting for {count} times {card}; the cluster has {has}", file=sys.stderr)
        ray.get(self._group.ready())
        self._programs = []
        for place in range(count):
            strategy = PlacementGroupSchedulingStrategy(self._group, place)
            actor = Program.options(num_cpus=1, num_gpus=card.get("GPU", 0), scheduling_strategy=strategy)
            self._programs.append(actor.remote())
        self.ranks, self._server = self._programs[:ranks], self._programs[ranks:]

    def run(self, config: str, options: list[str], token: Path, asked: threading.Event) -> int | None:
        """Return the trainer's exit code, or None if it lost a program. `asked` is set once the ranks are to stop."""
        words = ["grpo_ref_split.py", "--config", config, *options, "--resume_from_checkpoint", "last"]
        servers, running, codes = [], [], []
        for server in self._server:
            host, port = ray.get(server.address.remote())
            words += ["--ref_servers", f"http://{host}:{port}"]
            listening = ["--host", "0.0.0.0", "--port", port, "--token_file", str(token)]
            servers = [server.run.remote(["ref_server.py", "--config", config, *listening], {})]
        host, port = ray.get(self.ranks[0].address.remote())
        shared = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(len(self.ranks))}
        shared |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "1"}  # Ray shows each rank its own card alone
        running = [each.run.remote(words, shared | {"RANK": str(rank)}) for rank, each in enumerate(self.ranks)]
        while running:
            (ended,), _ = ray.wait([*running, *servers])
            if ended in servers and asked.is_set():
                servers = []  # the ranks save, and ask it no more
                continue
            name = "the reference server" if ended in servers else "a rank"
            try:
                code = ray.get(ended)
            except RayActorError as error:
                print(f"{name} is lost: {error}", file=sys.stderr)
                return None
            if code < 0 and asked.is_set():
                code = 128 - code  # a rank that was asked to stop has saved, and ends by the signal
            if ended in servers or code < 0:
                print(f"{name} ended with code {code}", file=sys.stderr)
                return code if code == 2 else None  # 2 is a mistake in its settings
            running.remove(ended)
            codes.append(code)
        return max(codes)

    def end(self) -> None:
        for program in self._programs:
            ray.kill(program)
        remove_placement_group(self._group)


def steps_of(output_dir: str) -> int:
    metrics = Path(output_dir) / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, help="how many processes train, each with a card")
    parser.add_argument("config", type=os.path.abspath, help="file of settings for server and trainer")
    parser.add_argument("--output_dir", type=os.path.abspath, required=True, help="the run's folder")
    parser.add_argument("--token_file", type=Path, help="the pool's, if workers draw: the server takes it too")
    parser.add_argument("--no_server", action="store_true", help="start no reference server")
    arguments, options = parser.parse_known_args()
    options += ["--output_dir", arguments.output_dir]
    made = Path(f"{arguments.output_dir}.token")
    if arguments.token_file is None:
        made.parent.mkdir(parents=True, exist_ok=True)
        made.touch(mode=0o600)
        made.write_text(secrets.token_urlsafe(32) + "\n")
    token = made if arguments.token_file is None else arguments.token_file.absolute()
    options += ["--token_file", str(token)]
    ray.init()
    try:
        return run_to_the_end(arguments, options, token)
    except KeyboardInterrupt:
        return 130
    finally:
        made.unlink(missing_ok=True)


def run_to_the_end(arguments: argparse.Namespace, options: list[str], token: Path) -> int:
    """Run, again if a rank or the server is lost, and return the trainer's exit code."""
    failures, steps, asked = 0, steps_of(arguments.output_dir), threading.Event()
    attempt: Attempt | None = None

    def stop(number: int, frame: object) -> None:
        asked.set()
        if attempt is None:  # it waits for cards
            raise KeyboardInterrupt
        for rank in attempt.ranks:
            rank.stop.remote()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    while True:
        attempt = None
        attempt = Attempt(arguments.ranks, not arguments.no_server)
        try:
            code = attempt.run(arguments.config, options, token, asked)
        finally:
            attempt.end()
        before, steps = steps, steps_of(arguments.output_dir)
        failures = 0 if steps > before else failures + 1
        if code is not None or asked.is_set() or failures == MOST_FAILURES:
            return 1 if code is None else code
        print("starting again from the last checkpoint", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
