"""Versions of the policy on their way to a worker: what they cost the trainer, and bytes and seconds over slow lines.

    python -m benchmarks.weights                    # both parts, about a quarter of an hour
    python -m benchmarks.weights --part cost        # seconds and CPU seconds of each step, 27 M and 494 M parameters
    python -m benchmarks.weights --part lines

`lines` publishes with the trainer's own publisher to a pool that runs as a program, and fetches with the worker's own
code through a proxy on this machine that lets so many bits a second through, both ways together. The weights are of a
training of the demo's model (GRPO with two ranks, bfloat16), and of 100 M numbers from N(0, 0.02) that move as AdamW
moves them: by 0.3 to 1 times the learning rate. Every weight that arrives is compared with what was published.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.common import machine, qwen, random_model, spread, table
from benchmarks.pool import pool_servers
from demo.__main__ import prepare, train
from grpo.model.packing import Batcher
from grpo.model.weights_file import named_weights, write_weights
from grpo.pool.client import PoolClient, Retrier
from grpo.pool.delta import apply_delta, make_delta
from grpo.trainer.publish_policy import PolicyCopy, PolicyPublisher
from grpo.workers.weights_folder import ModelFolder

SIZES = {
    "27 M": dict(layers=8, vocabulary=8192, hidden_size=512, intermediate_size=1408, num_attention_heads=8),
    "494 M": dict(layers=24),
}
HUNDRED = dict(layers=6, vocabulary=12_000)
LINES = {"10 Mbit/s": 10e6, "100 Mbit/s": 100e6, "loopback": None}
RATES = (1e-6, 1e-5)
Move = Callable[[PreTrainedModel], None]
"""lets a model go on to its next version"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["cost", "lines"], help="one of the two parts")
    parser.add_argument("--versions", type=int, default=5, help="versions after the first, in `lines`")
    parser.add_argument("--folder", type=Path, default=Path("runs/weights"), help="for the demo's runs")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}\n")
    if options.part != "lines":
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            rows = [row for size in SIZES for row in cost(size, Path(name))]
        print(table(["parameters, bf16", "learning rate", *STEPS], rows), "\n")
    if options.part != "cost":
        head = [
            "weights",
            "changed",
            "line",
            "whole, bytes",
            "its seconds",
            "delta, bytes",
            "whole / delta",
            "its seconds",
        ]
        print(table(head, [row for weights in sources(options) for row in lines(*weights, options)]))


# Costs


STEPS = ("copy", "write and SHA-256", "delta", "apply and SHA-256")


def cost(size: str, folder: Path) -> Iterator[list[object]]:
    """Yield a row for each learning rate: median seconds and CPU seconds of each step, of three times."""
    model = random_model(qwen(**SIZES[size]), torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    old, new, delta, result = (folder / name for name in ("old", "new", "delta", "result"))
    for rate in RATES:
        move = adam(model, rate)
        write_weights(old, named_weights(model))
        move(model)
        weights = named_weights(model)
        copies = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        times: list[list[tuple[float, float]]] = []
        for _ in range(3):
            marks = [clocks()]
            for name, weight in weights.items():
                copies[name].copy_(weight)
            marks.append(clocks())
            after = write_weights(new, copies)
            marks.append(clocks())
            length = make_delta(old, new, delta=delta, limit=new.stat().st_size)
            marks.append(clocks())
            apply_delta(old, delta, new=result, sha256=after)
            marks.append(clocks())
            times.append([(end[0] - start[0], end[1] - start[1]) for start, end in pairwise(marks)])
        share = f"{rate:g} (delta 1/{new.stat().st_size / length:.0f})"
        medians = [
            [statistics.median(values) for values in zip(*of_step, strict=True)] for of_step in zip(*times, strict=True)
        ]
        yield [f"{count / 1e6:.0f} M", share, *(f"{wall:.2f} s, {cpu:.2f} CPU s" for wall, cpu in medians)]


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def adam(model: PreTrainedModel, rate: float) -> Move:
    """Return what moves every weight by 0.3 to 1 times the learning rate, either way, in float32 masters."""
    draw = torch.Generator().manual_seed(1)
    uniform = torch.empty(1 << 22).uniform_(-1, 1, generator=draw)  # used again and again: drawing takes long

    def parts(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, int, torch.Tensor, torch.Tensor]]:
        for name, weight in weights.items():
            for place, part in enumerate(weight.view(-1).split(len(uniform))):
                yield name, place, part, uniform.roll(int(torch.randint(len(uniform), (), generator=draw)))[: len(part)]

    # A bf16 weight stands for all numbers around it: a master that has moved for a while is any of them.
    masters = {}
    for name, place, part, noise in parts(named_weights(model)):
        masters[name, place] = part.float() * (1 + noise * 2**-9)

    @torch.no_grad()
    def move(model: PreTrainedModel) -> None:
        for name, place, part, noise in parts(named_weights(model)):
            part.copy_(masters[name, place].add_(0.7 * noise + 0.3 * noise.sign(), alpha=rate))

    move(model)  # the masters' own rounding
    return move


# Over lines


def sources(options: argparse.Namespace) -> Iterator[tuple[str, PreTrainedModel, Move]]:
    """Yield the weights: their name, a model with the first version, and what makes the next ones."""
    folder = options.folder.absolute()
    prepare(folder, 0)
    for rate in RATES:
        settings = f"--max_steps {options.versions} --learning_rate {rate} --lr_scheduler_type constant_with_warmup"
        saving = (
            f"--warmup_steps 0 --save_steps 1 --save_total_limit {options.versions} --eval_steps 0 --report_to none"
        )
        train(folder, 0, "--dtype", "bfloat16", *settings.split(), *saving.split())
        checkpoints = sorted((folder / "run").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        states = iter([read_weights(checkpoint) for checkpoint in checkpoints])
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).eval()
        name = f"{count_of(model)}, the demo's GRPO at {rate:g}"
        yield name, model, lambda model, states=states: model.load_state_dict(next(states), strict=False)
    for rate in RATES:
        model = random_model(qwen(**HUNDRED), torch.bfloat16)
        yield f"{count_of(model)}, simulated AdamW at {rate:g}", model, adam(model, rate)


def count_of(model: PreTrainedModel) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M"


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    [path] = checkpoint.rglob("mp_rank_00_model_states.pt")
    return torch.load(path, map_location="cpu", weights_only=False)["module"]


def lines(name: str, model: PreTrainedModel, move: Move, options: argparse.Namespace) -> Iterator[list[object]]:
    """Yield a row for each line. The worker of each line gets every version before the next is made."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, pool_servers(Path(folder).absolute()) as [url]:
        client, stop = PoolClient(url), threading.Event()
        port = int(url.rpartition(":")[2])
        policy = PolicyCopy(model, Batcher(0, packs=False))
        publisher = PolicyPublisher(
            client=client, policy=policy, run_folder=Path(folder), ask=Retrier(client, 60.0, stop), stop=stop
        )
        workers = [Worker(Path(folder) / f"worker{place}", port, rate) for place, rate in enumerate(LINES.values())]
        changed, published = [], []
        for version in range(options.versions + 1):
            before = {name: weight.clone() for name, weight in named_weights(model).items()}
            if version:
                move(model)
                different = sum((before[name] != weight).sum() for name, weight in named_weights(model).items())
                changed.append(100 * different.item() / sum(weight.numel() for weight in before.values()))
            start = time.perf_counter()
            policy.take()
            publisher.publish(version)
            publisher.wait()
            published.append(time.perf_counter() - start)
            for worker in workers:
                worker.bring(version, model)
        publisher.close()
        print(
            f"{name}: the pool had the first version after {published[0]:.2f} s, others after {spread(published[1:])} s"
        )
        for line, worker in zip(LINES, workers, strict=True):
            (whole, seconds), *deltas = worker.brought
            length = statistics.mean(bytes_of for bytes_of, _ in deltas)
            share = f"{statistics.mean(changed):.2f} % ({min(changed):.2f} to {max(changed):.2f})"
            row = [line, f"{whole:,}", f"{seconds:.2f}", f"{length:,.0f}", f"{whole / length:.1f}"]
            yield [name, share, *row, spread([seconds for _, seconds in deltas])]


class Worker:
    """A worker behind a line, without an engine."""

    def __init__(self, folder: Path, port: int, rate: float | None):
        folder.mkdir()
        self._line = Line(port, rate)
        self._client = PoolClient(self._line.url)
        self._model = ModelFolder(folder, self._client, Retrier(self._client, 60.0, threading.Event()))
        self.brought: list[tuple[int, float]] = []
        """bytes over the line and seconds of each version"""

    def bring(self, number: int, model: PreTrainedModel) -> None:
        """Bring a version, and compare it with what was published."""
        [sha256] = [version.sha256 for version in self._client.versions() if version.version == number]
        before, start = self._line.bytes, time.perf_counter()
        self._model.bring(number, sha256)
        self.brought.append((self._line.bytes - before, time.perf_counter() - start))
        with tempfile.NamedTemporaryFile() as file:
            assert write_weights(Path(file.name), named_weights(model)) == sha256 == self._model.sha256


class Line:
    """A TCP proxy to a port of this machine that lets so many bits a second through, both ways together."""

    def __init__(self, port: int, rate: float | None):
        self._port, self._rate = port, rate
        self._lock, self._free = threading.Lock(), 0.0
        self.bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._port))
            for source, target in ((client, server), (server, client)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(16384 if self._rate else 1 << 20):
                with self._lock:
                    self.bytes += len(data)
                    if self._rate:
                        self._free = max(self._free, time.monotonic()) + 8 * len(data) / self._rate
                time.sleep(max(0.0, self._free - time.monotonic()) if self._rate else 0.0)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
