"""What a pool of rollouts carries, and what workers bring to the demo.

    python -m benchmarks.pool --part throughput      leases and uploads a second
    python -m benchmarks.pool --clients 8 64 --pool_url postgresql://grpo@localhost/bench --pools 3     likewise
    python -m benchmarks.pool --clients 512 --seconds 20 --groups 4096 --pool_url ...     clients that take time to draw
    python -m benchmarks.pool --part demo            steps of the demo with 0 to 3 workers

throughput  Clients, each a thread with the workers' own PoolClient, lease groups by eights and upload each by itself:
            8 completions of 700 tokens, 67 kB. An upload is answered when it is on the disk. A client that waits for
            over 30 s loses its groups, which are drawn twice. Beside it the same results stored without HTTP, and a
            plain write with fsync of the same bytes. With --pool_url also through pools on PostgreSQL, one and --pools
            of them; each measurement makes a schema there.
demo        Steps of configs/demo_cpu.yaml without evaluations: first with the trainer's own sampler, then with
            `--max_policy_lag 1` and workers of the engine transformers, which draw one group of 8 at a time, or 8. All
            share this machine's cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, machine, spread, table
from demo.__main__ import prepare, train, workers
from grpo.client.server_errors import RequestFailure
from grpo.config.console import free_port
from grpo.pool.client import PoolClient
from grpo.pool.protocol import GroupResult, Lease, Probe, RunInfo, Task, Version
from grpo.pool.store import Store
from grpo.pool.task_tensors import encode_drawn

COPIES, TOKENS = 8, 700
DRAWN = GroupResult(
    group=0,
    attempt=0,
    completions=[[5] * TOKENS] * COPIES,
    logprobs=[[-0.5] * TOKENS] * COPIES,
    versions=[[0] * TOKENS] * COPIES,
)
MODEL = b"weights" * 1000


@contextmanager
def pool_servers(folder: Path, count: int = 1, pool_url: str | None = None) -> Iterator[list[str]]:
    """Start pools on one file or database; yield their URLs."""
    kept = ["--pool_url", new_schema(pool_url)] if pool_url else ["--pool_file", folder / "pool.sqlite"]
    ports = [free_port() for _ in range(count)]
    words = ["ref_server.py", "--task", "rollouts", *kept, "--pool_folder", folder, "--log_level", "warning"]
    commands = [[sys.executable, *map(str, words), "--port", str(port)] for port in ports]
    processes = [subprocess.Popen(command, cwd=REPOSITORY) for command in commands]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url in urls:
            while True:
                try:
                    PoolClient(url).run()
                    break
                except RequestFailure:
                    if any(process.poll() is not None for process in processes):
                        raise
                    time.sleep(0.1)
        yield urls
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def new_schema(pool_url: str) -> str:
    """Make an empty schema in a database; return a URL whose tables are there."""
    import psycopg

    name = f"bench_{time.time_ns()}"
    with psycopg.connect(pool_url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    return f"{pool_url}?options=-csearch_path%3D{name}"


def fill(url: str, groups: int) -> None:
    """Put a run, a version and its tasks."""
    sha256, client = hashlib.sha256(MODEL).hexdigest(), PoolClient(url)
    client.send_file(MODEL, sha256)
    client.put_run(run_info(sha256))
    client.put_version(
        Version(
            version=0,
            sha256=sha256,
            size=len(MODEL),
            whole=True,
            base=None,
            delta=None,
            probe=Probe(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0]),
        )
    )
    for first in range(0, groups, 1000):
        client.put_tasks(
            [
                Task(group=group, attempt=0, version=0, prompt_ids=[7] * 100)
                for group in range(first, min(groups, first + 1000))
            ]
        )


def run_info(sha256: str) -> RunInfo:
    return RunInfo(
        run="0" * 16,
        name="benchmark",
        vocab_size=100,
        eos_token_ids=[2],
        num_generations=COPIES,
        max_completion_length=TOKENS,
        temperature=1.0,
        seed=0,
        model_files=sha256,
    )


def work(url: str, name: str, seconds: float, leases: list[float], uploads: list[float]) -> None:
    """Draw, each group in so many seconds, until nothing is left; note the seconds of each lease and each upload."""
    client = PoolClient(url)

    def ask(send: Callable, times: list[float]) -> Any:
        """Return an answer, and note its seconds, with those of the times that the pool was too busy."""
        start = time.perf_counter()
        while True:
            try:
                answer = send()
                times.append(time.perf_counter() - start)
                return answer
            except RequestFailure as failure:
                time.sleep(failure.retry_after or 0.1)

    while True:
        leased = ask(partial(client.lease, Lease(worker=name, room=8, holds=[], wait=0.0)), leases)
        if not leased.tasks:
            return
        weights = [(leased.version, leased.sha256)]
        for task in leased.tasks:
            time.sleep(seconds)
            group = replace(DRAWN, group=task.group)
            ask(partial(client.results, name, [group], weights), uploads)


def throughput(
    groups: int, clients: int, seconds: float = 0.0, pools: int = 1, pool_url: str | None = None
) -> list[object]:
    leases: list[float] = []
    uploads: list[float] = []
    with tempfile.TemporaryDirectory() as folder, pool_servers(Path(folder), pools, pool_url) as urls:
        fill(urls[0], groups)
        threads = [
            threading.Thread(target=work, args=(urls[number % pools], f"worker {number}", seconds, leases, uploads))
            for number in range(clients)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - start
    if len(uploads) < groups:
        raise RuntimeError(f"{len(uploads)} of {groups} groups were uploaded")
    engine = f"PostgreSQL, {pools} pools" if pool_url else "SQLite"
    name = f"{engine}, {clients} clients"
    waits = *map(milliseconds, (leases, uploads)), f"{max(uploads + leases):.1f}"
    return [name, f"{groups / took:.0f}", *waits, len(uploads) - groups]


def stored_alone(groups: int) -> list[object]:
    """Store the same results without HTTP."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(str(Path(folder) / "pool.sqlite"), on_damage=print)
        tasks = [Task(group=group, attempt=0, version=0, prompt_ids=[7] * 100) for group in range(groups)]
        store.put_tasks(tasks)
        for task in tasks:
            start = time.perf_counter()
            store.add_results([(task, replace(DRAWN, group=task.group))], "worker")
            times.append(time.perf_counter() - start)
        store.close()
    return ["SQLite without HTTP", f"{groups / sum(times):.0f}", "", milliseconds(times), f"{max(times):.1f}", ""]


def written_alone(groups: int) -> list[object]:
    """Append the same bytes to a file, with fsync for each group."""
    body, times = encode_drawn([DRAWN]), []
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(groups):
            start = time.perf_counter()
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return ["write and fsync", f"{groups / sum(times):.0f}", "", milliseconds(times), f"{max(times):.1f}", ""]


def demo_steps(folder: Path, steps: int, count: int = 0, groups: int = 1) -> list[object]:
    """Train the demo's model with so many workers, of so many groups at a time; without any the trainer draws."""
    options = ["--max_steps", str(steps), "--eval_steps", "0", "--report_to", "none"]
    with ExitStack() as stack:
        if count:
            url, _ = stack.enter_context(workers(folder, count, "--sequences_per_generate", str(8 * groups)))
            options += ["--sampler", "pool", "--pool", url, "--max_policy_lag", "1"]
        train(folder, 0, *options)
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    measured = rows[len(rows) // 4 :]  # workers import and start in the first ones
    way = f"{count} workers, groups at a time: {groups}" if count else "the trainer itself"
    tokens = statistics.median(row["tokens_per_second"] for row in measured)
    return [
        way,
        *(spread([row[name] for row in measured], 3) for name in ("step_time", "time/generate")),
        f"{tokens:.0f}",
    ]


def milliseconds(seconds: list[float]) -> str:
    """Median and 99th percentile."""
    ordered = sorted(seconds)
    return f"{1e3 * ordered[len(ordered) // 2]:.2f}, {1e3 * ordered[len(ordered) * 99 // 100]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["throughput", "demo"], default="throughput")
    parser.add_argument("--groups", type=int, default=2000, help="of the part throughput")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="of the part throughput")
    parser.add_argument("--seconds", type=float, default=0.0, help="that a client takes to draw a group")
    parser.add_argument("--pool_url", help="a PostgreSQL database, for the part throughput")
    parser.add_argument("--pools", type=int, default=3, help="pools on PostgreSQL beside one alone")
    parser.add_argument("--steps", type=int, default=40, help="of the part demo")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/pool"), help="for all that is made")
    arguments = parser.parse_args()
    if arguments.part == "demo":
        prepare(arguments.folder, 0)
        ways = (), (1,), (1, 8), (2,), (2, 8), (3,), (3, 8), ()
        rows = [demo_steps(arguments.folder, arguments.steps, *way) for way in ways]
        print(machine())
        print(table(["who draws", "seconds a step", "of them waiting for completions", "tokens/s"], rows))
        return
    print(machine())
    rows = []
    for clients in arguments.clients:
        load = arguments.groups, clients, arguments.seconds
        rows.append(throughput(*load))
        if arguments.pool_url:
            rows += [throughput(*load, pools, arguments.pool_url) for pools in (1, arguments.pools)]
    rows += [stored_alone(arguments.groups), written_alone(arguments.groups)]
    columns = "way", "groups a second", "ms a lease of 8: median, 99 %", "ms an upload: median, 99 %", "s the longest"
    print(table([*columns, "drawn twice"], rows))


if __name__ == "__main__":
    main()
