"""Starts the programs on a Ray cluster: Ray finds places for them, and starts them elsewhere when it loses a node.

    grpo launch --on ray --nnodes 2 --gpus_per_node 8 --config configs/two_nodes.yaml --output_dir /shared/run

from a node of the cluster, or by `ray job submit -- grpo launch ...`. This package and the working folder are at the
same path on each node. Ray starts and ends processes; rollouts and gradients do not pass through it. A lost worker
starts again alone. When a rank, the server or the pool is lost, all end and start again from the last checkpoint.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo.clusters.plan import OF_POOL, Role, run_again, shared_files
from grpo.config.console import free_port, start_program
from grpo.config.errors import COMMAND, ConfigError, on_stop_signals, one_line, typed_command
from grpo.config.fields import PROGRAMS
from grpo.config.programs import LaunchConfig
from grpo.run.run_folder import forget_stop, is_stop_asked

log = logging.getLogger("grpo.launch")

_AGAIN = 30  # seconds after which the cluster's resources are looked at anew
_REST = 5.0  # seconds between two starts of a worker
_ASKED_BY = {"server": ["--ref_servers"], "pool": ["--sampler", "pool", "--pool"]}  # options of the trainer, and a URL


@ray.remote(num_cpus=1, max_concurrency=2)
class Program:
    """A program, on the node where Ray has put it."""

    def __init__(self, folder: str) -> None:
        self._folder, self._process, self._is_stopped = folder, None, False

    def address(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), free_port()

    def run(self, words: list[str], variables: dict[str, str]) -> int:
        """Run it to its end. Return its exit code, which is negative if a signal has killed it."""
        self._process = start_program(words, os.environ | variables, cwd=self._folder)
        if self._is_stopped:
            self._process.terminate()
        return self._process.wait()

    def stop(self) -> None:
        self._is_stopped = True
        if self._process is not None:
            self._process.terminate()


@ray.remote(num_cpus=1, max_retries=-1, retry_exceptions=True, scheduling_strategy="SPREAD")
def draw(words: list[str], folder: str) -> int:
    """Return the exit code of a worker that refuses its settings. After another, or a loss, Ray calls it again."""
    code = start_program(words, os.environ, cwd=folder).wait()
    if code != 2:
        time.sleep(_REST)
        raise RuntimeError(f"a worker ended with code {code}")
    return code


def start(config: LaunchConfig, roles: list[Role]) -> int:
    """Run the plan to the trainer's end, and return its exit code. Raises ConfigError if the cluster is too small."""
    run = Path(config.output_dir)
    ray.init(namespace=str(run.absolute()))
    attempt = Attempt(config, roles)
    forget_stop(run)
    on_stop_signals(attempt.stop)
    with shared_files(config, OF_POOL) as files:
        return run_again(run, partial(attempt.run, files))


class Attempt:
    """All programs of a run, from their start until the trainer has ended or one is lost."""

    def __init__(self, config: LaunchConfig, roles: list[Role]) -> None:
        """Raises ConfigError if the cluster is too small for the plan."""
        self._config, self._roles, self._is_asked_to_stop = config, {role.name: role for role in roles}, False
        self._needs = {"num_gpus": min(1, config.gpus_per_node), "num_cpus": 1}
        self._group: PlacementGroup | None = None
        self._services: list[ray.actor.ActorHandle] = []
        self._workers: list[ray.ObjectRef] = []
        self._ranks: list[ray.actor.ActorHandle] = []
        self._kind = "GPU" if config.gpus_per_node else "CPU"
        needed, has = sum(map(self._count, roles)), self._resources()
        words = f"the plan has {needed} programs with a {self._kind} each, the cluster {has} {self._kind}s"
        config.check(needed <= has, nnodes=words)

    def _count(self, role: Role) -> int:
        return role.count if role.gpus or self._kind == "CPU" else 0

    def _resources(self) -> int:
        return int(ray.cluster_resources().get(self._kind, 0))

    def run(self, files: list[str]) -> int | None:
        """Return the trainer's exit code, 130 if the run is asked to stop before it has places, None after a loss.
        `files` are the options that name settings and token."""
        try:
            servers, words = self._start_services(files)
            self._place_ranks()
            code = self._wait_for_ranks(servers, [*files, *words])
        except KeyboardInterrupt:
            code = 130
        except RayError as error:
            log.warning("a program is lost: %s", one_line(error))
            code = None
        finally:
            self.end()
        return 1 if code is None and self._is_asked_to_stop else code

    def _wait_for_ranks(self, servers: dict[ray.ObjectRef, str], words: list[str]) -> int | None:
        """Start the ranks, and wait for their end, and for services that end before."""
        host, port = ray.get(self._ranks[0].address.remote())
        shared = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(self._ranks))}
        # Ray shows each rank its own card alone.
        shared |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", COMMAND: typed_command()}
        command = [*self._command("trainer"), *words, "--resume_from_checkpoint", "last"]
        running = {rank.run.remote(command, shared | {"RANK": str(n)}): "a rank" for n, rank in enumerate(self._ranks)}
        codes = []
        if self._is_asked_to_stop:  # before there was anybody to ask
            self.stop()
        while running:
            (ended,), _ = ray.wait([*running, *servers])
            name, code = running.pop(ended, None) or servers.pop(ended), ray.get(ended)
            if name != "a rank":
                if self._is_asked_to_stop:
                    continue  # the ranks save, and ask it no more
                log.warning("%s ended with code %d", name, code)
                return code if code == 2 else None  # 2 is a mistake in its settings
            if code < 0 and not self._is_asked_to_stop:
                log.warning("a rank ended with code %d", code)
                return None
            codes.append(128 - code if code < 0 else code)
        return max(codes)

    def _start_services(self, files: list[str]) -> tuple[dict[ray.ObjectRef, str], list[str]]:
        """Start server, pool and workers. Return their ends, with names, and the trainer's options with the URLs."""
        ends, words = {}, []
        for name in [name for name in _ASKED_BY if name in self._roles]:
            # The pool has no GPU, and reads no settings but the token's.
            needs, settings = (self._needs, files) if name == "server" else ({"num_cpus": 1}, files[2:])
            actor = Program.options(name=name, scheduling_strategy="SPREAD", **needs).remote(os.getcwd())
            self._services.append(actor)
            host, port = self._wait_for(actor.address.remote(), f"the {name}")
            address = ["--host", "0.0.0.0", "--port", str(port)]
            ends[actor.run.remote([*self._command(name), *address, *settings], {})] = f"the {name}"
            words += [*_ASKED_BY[name], f"http://{host}:{port}"]
        if "worker" in self._roles:
            command = [*self._command("worker"), *files, *words[-2:]]
            tasks = [draw.options(name=f"worker {n}", **self._needs) for n in range(self._roles["worker"].count)]
            self._workers = [task.remote(command, os.getcwd()) for task in tasks]
            ends |= dict.fromkeys(self._workers, "a worker")
        return ends, words

    def _place_ranks(self) -> None:
        """Find places for the ranks, close to each other: with min_ranks for as many as the cluster has room for."""
        taken = sum(self._count(role) for name, role in self._roles.items() if name != "trainer")
        while not self._ranks:
            count = self._roles["trainer"].count
            if self._config.min_ranks is not None:
                with suppress(ConfigError):  # fewer than min_ranks: it waits for more
                    count = self._config.ranks_of(min(count, self._resources() - taken))
            bundle = {"CPU": 1, "GPU": self._needs["num_gpus"]}
            self._group = placement_group([bundle] * count, "PACK")
            if self._wait_for(self._group.ready(), f"{count} ranks", _AGAIN) is None:
                remove_placement_group(self._group)
                continue
            places = [PlacementGroupSchedulingStrategy(self._group, place) for place in range(count)]
            options = [{"name": f"rank {n}", "scheduling_strategy": place} for n, place in enumerate(places)]
            self._ranks = [Program.options(**self._needs, **each).remote(os.getcwd()) for each in options]

    def _wait_for(self, reference: ray.ObjectRef, name: str, most: float = math.inf) -> Any:
        """Return the object; None after `most` seconds. Raises KeyboardInterrupt if the run is asked to stop."""
        for seconds in itertools.count():
            if ray.wait([reference], timeout=1)[0]:
                return ray.get(reference)
            if self._is_asked_to_stop or is_stop_asked(Path(self._config.output_dir)):
                raise KeyboardInterrupt
            if seconds == most:
                return None
            if seconds % _AGAIN == 0:
                log.info("waiting for places of %s; the cluster has %d", name, self._resources())

    def _command(self, name: str) -> list[str]:
        return [str(PROGRAMS / self._roles[name].words[0]), *self._roles[name].words[1:]]

    def stop(self, *_: Any) -> None:
        self._is_asked_to_stop = True
        for rank in self._ranks:
            rank.stop.remote()

    def end(self) -> None:
        if self._workers:
            _, running = ray.wait(self._workers, num_returns=len(self._workers), timeout=0)
            for worker in running:  # of one that has ended Ray 2.60 crashes this process
                ray.cancel(worker, force=True)
        for actor in (*self._ranks, *self._services):
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._group, self._services, self._workers, self._ranks = None, [], [], []
