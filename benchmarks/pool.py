"""What a pool of rollouts carries, and what workers bring to the demo.

    python -m benchmarks.pool --part throughput      leases and uploads a second
    python -m benchmarks.pool --part demo            steps of the demo with 0 to 3 workers

throughput  Clients, each a thread with the workers' own PoolClient, lease groups by eights and upload each by itself:
            8 completions of 700 tokens, 67 kB. An upload is answered when it is on the disk. Beside it the same results
            stored without HTTP, and a plain write with fsync of the same bytes.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.common import REPOSITORY, machine, spread, table
from demo.__main__ import prepare, start, train
from grpo.client.server_errors import RequestFailure
from grpo.config.console import free_port
from grpo.pool.client import PoolClient
from grpo.pool.protocol import GroupResult, Lease, Probe, RunInfo, Task, Version
from grpo.pool.store import Store
from grpo.pool.task_tensors import encode_drawn

COPIES, TOKENS = 8, 700
DRAWN = GroupResult(0, 0, [[5] * TOKENS] * COPIES, [[-0.5] * TOKENS] * COPIES, [[0] * TOKENS] * COPIES)
MODEL = b"weights" * 1000


@contextmanager
def pool_server(folder: Path) -> Iterator[str]:
    """Start a pool; yield its URL."""
    port = free_port()
    words = ["--task", "rollouts", "--pool_file", folder / "pool.sqlite", "--port", port, "--log_level", "warning"]
    process = subprocess.Popen([sys.executable, "ref_server.py", *map(str, words)], cwd=REPOSITORY)
    url, client = f"http://127.0.0.1:{port}", PoolClient(f"http://127.0.0.1:{port}")
    try:
        while True:
            try:
                client.run()
                break
            except RequestFailure:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def fill(url: str, groups: int) -> None:
    """Put a run, a version and its tasks."""
    sha256, client = hashlib.sha256(MODEL).hexdigest(), PoolClient(url)
    client.send_file(MODEL, sha256)
    client.put_run(run_info(sha256))
    client.put_version(Version(0, sha256, len(MODEL), True, None, None, Probe([1], [2], [-1.0])))
    for first in range(0, groups, 1000):
        client.put_tasks([Task(group, 0, 0, [7] * 100) for group in range(first, min(groups, first + 1000))])


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


def work(url: str, name: str, leases: list[float], uploads: list[float]) -> None:
    """Draw until nothing is left; note the seconds of each lease and each upload."""
    client = PoolClient(url)
    while True:
        start = time.perf_counter()
        leased = client.lease(Lease(name, 8, [], 0.0))
        leases.append(time.perf_counter() - start)
        if not leased.tasks:
            return
        weights = [(leased.version, leased.sha256)]
        for task in leased.tasks:
            start = time.perf_counter()
            client.results(name, [replace(DRAWN, group=task.group)], weights)
            uploads.append(time.perf_counter() - start)


def throughput(groups: int, clients: int) -> list[object]:
    leases: list[float] = []
    uploads: list[float] = []
    with tempfile.TemporaryDirectory() as folder, pool_server(Path(folder)) as url:
        fill(url, groups)
        threads = [
            threading.Thread(target=work, args=(url, f"worker {number}", leases, uploads)) for number in range(clients)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - start
    if len(uploads) != groups:
        raise RuntimeError(f"{len(uploads)} of {groups} groups were uploaded")
    return [f"{clients} clients, HTTP", f"{len(uploads) / took:.0f}", milliseconds(leases), milliseconds(uploads)]


def stored_alone(groups: int) -> list[object]:
    """Store the same results without HTTP."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(str(Path(folder) / "pool.sqlite"), on_damage=print)
        tasks = [Task(group, 0, 0, [7] * 100) for group in range(groups)]
        store.put_tasks(tasks)
        for task in tasks:
            start = time.perf_counter()
            store.add_results([(task, replace(DRAWN, group=task.group))], "worker")
            times.append(time.perf_counter() - start)
        store.close()
    return ["SQLite without HTTP", f"{groups / sum(times):.0f}", "", milliseconds(times)]


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
    return ["write and fsync", f"{groups / sum(times):.0f}", "", milliseconds(times)]


def demo_steps(folder: Path, steps: int, workers: int = 0, groups: int = 1) -> list[object]:
    """Train the demo's model with so many workers, of so many groups at a time; without any the trainer draws."""
    options = ["--max_steps", str(steps), "--eval_steps", "0", "--report_to", "none"]
    for old in folder.glob("pool.sqlite*"):
        old.unlink()
    processes, url = [], f"http://127.0.0.1:{free_port()}"
    if workers:
        words = ["ref_server.py", "--task", "rollouts", "--pool_file", folder / "pool.sqlite"]
        processes.append(start([*words, "--port", url.split(":")[2]], folder / "pool.log"))
        draw = ["generate.py", "--engine", "transformers", "--pool", url, "--sequences_per_generate", str(8 * groups)]
        processes += [start(draw, folder / f"worker-{number}.log") for number in range(workers)]
        options += ["--sampler", "pool", "--pool", url, "--max_policy_lag", "1"]
    try:
        train(folder, 0, *options)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    measured = rows[len(rows) // 4 :]  # workers import and start in the first ones
    way = f"{workers} workers, groups at a time: {groups}" if workers else "the trainer itself"
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
    rows = [throughput(arguments.groups, clients) for clients in (1, 4)]
    rows += [stored_alone(arguments.groups), written_alone(arguments.groups)]
    print(table(["way", "groups a second", "ms a lease of 8: median, 99 %", "ms an upload: median, 99 %"], rows))


if __name__ == "__main__":
    main()
