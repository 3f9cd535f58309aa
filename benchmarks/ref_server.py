"""Our reference server against simple_GRPO's method, against its own scoring without HTTP, and its latency.

    python -m benchmarks.ref_server --layers 4                     # 16 groups of 8, all parts
    python -m benchmarks.ref_server --layers 24 --part speed       # Qwen2.5-0.5B's depth

Random weights in Qwen2.5-0.5B's shape (vocabulary 151,936, tied head), fp32. Prompts of 60 to 300 tokens, each with 8
completions of 20 to 400 tokens, many short and few long. Both servers are processes of their own with all cores; only
one works at a time. Four clients share the groups, each the trainer's own ReferenceClient that submits its share at
once.

speed       completion tokens a second of both servers, chunk after chunk in turn. The answers are compared first.
inprocess   our server against the same calls in this process, and against the matrix products alone.
memory      most memory above the loaded weights while scoring the four largest groups, each server freshly started.
latency     what HTTP adds to one small group on a model whose forward takes about a millisecond, one thread a side.
alone       what `--deterministic` costs, each request computed by itself: on those groups, and on the demo's.

Tables go to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import requests
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.arithmetic import completion_tokens, padded, prompt_once
from benchmarks.common import (
    REPOSITORY,
    VOCABULARY,
    Group,
    groups,
    machine,
    peak_above,
    qwen,
    random_model,
    ratios,
    seconds,
    spread,
    table,
)
from demo.model import build_tokenizer
from grpo.client.reference import ReferenceClient
from grpo.config.console import free_port
from grpo.config.trainer import TrainerConfig
from grpo.model.logprobs import CPU_BLOCK, token_logprobs
from grpo.model.packing import Batcher
from grpo.model.trial import make_batcher

CLIENTS = 4
OURS_TO_ORACLE = 1e-5
OURS_TO_BASELINE = 1e-4  # its fp32 log-softmax over the whole row rounds
PAD = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["speed", "inprocess", "memory", "latency", "alone", "all"], default="all")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--chunk", type=int, help="groups a turn; unset is all for up to 4 layers, else 4")
    parser.add_argument("--repeats", type=int, default=3, help="of every chunk, and of the servers of memory")
    parser.add_argument("--max_batch_tokens", type=int, default=4096, help="of our server and of the calls without it")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="smaller to try the script out")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # a run takes an hour: what is measured is written
    os.chdir(REPOSITORY)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, if installed, warns in the middle of a table
    work = groups(options.groups, 8, (60, 300), (20, 400), seed=0, vocabulary=options.vocabulary)
    size = options.chunk or (options.groups if options.layers <= 4 else CLIENTS)
    chunks = [work[start : start + size] for start in range(0, len(work), size)]

    print(
        f"{machine()}; {options.layers} layers, {len(work)} groups of 8, {completion_tokens(work)} completion tokens\n"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder / "model", random_model(qwen(options.layers, options.vocabulary)))
        if options.part in ("speed", "all"):
            speed(folder, chunks, options)
        if options.part in ("inprocess", "all"):
            inprocess(folder, chunks, options)
        if options.part in ("memory", "all"):
            memory(folder, work, options)
        if options.part in ("latency", "all"):
            latency(folder)
        if options.part in ("alone", "all"):
            alone(folder, chunks, options)


# Parts


def speed(folder: Path, chunks: list[list[Group]], options: argparse.Namespace) -> None:
    with ours(folder, options.max_batch_tokens) as our_server, baseline(folder) as their_server:
        compare(folder, chunks[0], our_server, their_server)
        times = take_turns(chunks, options.repeats, {"ours": our_server.score, "baseline": their_server.score})
    work = [group for chunk in chunks for group in chunk]
    config = qwen(options.layers, options.vocabulary)
    needs = {"ours": prompt_once(work).multiply_adds(config), "baseline": padded(work).multiply_adds(config)}
    rows = [
        [
            name,
            f"{options.repeats * completion_tokens(work) / sum(times[name]):.0f}",
            *(f"{count / 1e12:.3f}" for count in needs[name].values()),
            f"{sum(needs[name].values()) / 1e12:.3f}",
            f"{2e-9 * options.repeats * sum(needs[name].values()) / sum(times[name]):.0f}",
        ]
        for name in ("ours", "baseline")
    ]
    head = ["server", "completion tokens/s", *(f"{part}, 10^12 multiply-adds" for part in needs["ours"]), "all"]
    print(table([*head, "GFLOP/s"], rows))
    expected = sum(needs["baseline"].values()) / sum(needs["ours"].values())
    print(
        f"\nOurs is {spread(ratios(times['baseline'], times['ours']))} times as fast, median and range of "
        f"{len(times['ours'])} chunks of {len(chunks[0])} groups; the arithmetic alone makes it {expected:.2f}.\n"
    )


def inprocess(folder: Path, chunks: list[list[Group]], options: argparse.Namespace) -> None:
    model = load(folder / "model")
    batcher = make_batcher(model, PAD)
    budget = options.max_batch_tokens

    def bare_products(chunk: list[Group]) -> None:
        work = prompt_once(chunk)
        products(model, work.rows, work.head_rows, budget)

    with ours(folder, budget) as server:
        here = score(model, batcher, chunks[0][:1], budget)
        check("over HTTP against in this process", server.score(chunks[0][:1]), [here], OURS_TO_ORACLE)
        sides = {
            "over HTTP": server.score,
            "in this process": lambda chunk: score(model, batcher, chunk, budget),
            "matrix products alone": bare_products,
        }
        times = take_turns(chunks, options.repeats, sides)
    tokens = options.repeats * sum(completion_tokens(chunk) for chunk in chunks)
    print(table(["way", "completion tokens/s"], [[name, f"{tokens / sum(t):.0f}"] for name, t in times.items()]))
    print(
        f"\nThe server reaches {spread(ratios(times['in this process'], times['over HTTP']))} of the speed of the same "
        f"calls without it, and {spread(ratios(times['matrix products alone'], times['over HTTP']))} of the floor: "
        "the matrix products of the same rows with nothing between them.\n"
    )


def memory(folder: Path, work: list[Group], options: argparse.Namespace) -> None:
    largest = sorted(work, key=lambda group: padded([group]).rows)[-CLIENTS:]
    peaks: dict[str, list[float]] = {"ours": [], "baseline": []}
    for _ in range(options.repeats):
        for name, started in (("ours", ours(folder, options.max_batch_tokens)), ("baseline", baseline(folder))):
            with started as server:
                server.score([([3], [[4, 5]])])  # weights are mapped from their file and come in with the first use
                Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # the peak is what is held now
                start = peak_above(0, server.process.pid)
                server.score(largest)
                peaks[name].append(peak_above(start, server.process.pid) / 2**20)
                say(f"{name}: {start / 2**20:.0f} MiB before, {peaks[name][-1]:.0f} MiB above")
    print(table(["server", "peak above the weights, MiB"], [[name, spread(mib, 0)] for name, mib in peaks.items()]))
    print(f"\nOurs needs {spread(ratios(peaks['baseline'], peaks['ours']), 1)} times less.\n")


def latency(folder: Path) -> None:
    """One thread a side: on so small a model others would only wait, and on a busy machine for each other.

    In blocks, so that caches are warm as they are in a run.
    """
    torch.set_num_threads(1)
    tokenizer_size = len(build_tokenizer(seed=0))
    model = tiny_model(folder, tokenizer_size)
    [group] = groups(1, 8, (16, 16), (8, 8), seed=0, vocabulary=tokenizer_size)
    batcher = make_batcher(model, PAD)
    times: dict[str, list[float]] = {"over HTTP": [], "in this process": []}
    with ours(folder, 4096, name="tiny", OMP_NUM_THREADS="1") as server:
        sides = {
            "over HTTP": lambda: server.score([group]),
            "in this process": lambda: score(model, batcher, [group], 4096),
        }
        for block in range(11):
            for name, side in sides.items():
                block_times = [seconds(side) * 1000 for _ in range(20)]
                if block > 0:  # the first warms up
                    times[name] += block_times
    rows = [[name, f"{statistics.median(ms):.2f}", f"{p95(ms):.2f}"] for name, ms in times.items()]
    bare = statistics.median(times["in this process"])
    added = [one - bare for one in times["over HTTP"]]
    rows.append(["added by HTTP", f"{statistics.median(added):.2f}", f"{p95(added):.2f}"])
    print(table([f"8 completions of 8 tokens, {len(added)} times", "median, ms", "95th percentile, ms"], rows) + "\n")


def alone(folder: Path, chunks: list[list[Group]], options: argparse.Namespace) -> None:
    tokenizer_size = len(build_tokenizer(seed=0))
    tiny_model(folder, tokenizer_size)
    small = groups(64, 8, (16, 48), (8, 40), seed=0, vocabulary=tokenizer_size)
    rows = []
    for work, name, chunks_of_it in (
        (f"{options.groups} groups, {options.layers} layers", "model", chunks),
        ("64 groups of the demo's lengths, a model of its size", "tiny", [small]),
    ):
        with (
            ours(folder, options.max_batch_tokens, "--deterministic", "false", name=name) as shared,
            ours(folder, options.max_batch_tokens, "--deterministic", "true", name=name) as by_itself,
        ):
            check(f"{name}, by itself against shared", by_itself.score(small[:4]), shared.score(small[:4]), 2e-5)
            sides = {"shared": shared.score, "by itself": by_itself.score}
            times = take_turns(chunks_of_it, options.repeats, sides)
        tokens = options.repeats * sum(completion_tokens(chunk) for chunk in chunks_of_it)
        speeds = [f"{tokens / sum(times[side]):.0f}" for side in sides]
        rows.append([work, *speeds, spread(ratios(times["shared"], times["by itself"]))])
    head = ["completion tokens/s", "passes shared", "each group by itself", "ratio of pairs"]
    print(table(head, rows) + "\n")


def take_turns(
    chunks: list[list[Group]], repeats: int, sides: dict[str, Callable[[list[Group]], object]]
) -> dict[str, list[float]]:
    """Seconds of each side for chunk after chunk, `repeats` times: the order alternates, and each chunk meets both."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats):
        for place, chunk in enumerate(chunks):
            for name in list(sides) if (turn + place) % 2 == 0 else reversed(list(sides)):
                times[name].append(seconds(lambda side=sides[name], chunk=chunk: side(chunk)))
            last = ", ".join(f"{name} {all_[-1]:.1f} s" for name, all_ in times.items())
            say(f"turn {turn + 1} of {repeats}, chunk {place + 1} of {len(chunks)}: {last}")
    return times


# Answers


def compare(folder: Path, chunk: list[Group], our_server: Server, their_server: Server) -> None:
    """End the script unless both servers say the same, and ours what float64 says."""
    mine, theirs = our_server.score(chunk), their_server.score(chunk)
    check("ours against the baseline", mine, theirs, OURS_TO_BASELINE)
    check("ours against float64", mine[:1], [oracle(load(folder / "model"), *chunk[0])], OURS_TO_ORACLE)


def check(name: str, these: list[np.ndarray], those: list[np.ndarray], allowed: float) -> None:
    difference = max(np.abs(one - other).max() for one, other in zip(these, those, strict=True))
    print(f"{name}: log-probs differ by {difference:.1e} at most (allowed: {allowed:.0e})\n")
    if not difference <= allowed:
        sys.exit("benchmarks.ref_server: the answers differ: nothing is timed")


@torch.inference_mode()
def oracle(model: PreTrainedModel, prompt: list[int], completions: list[list[int]]) -> np.ndarray:
    """The model's own logits and a float64 log-softmax, one sequence at a time."""
    answers = []
    for completion in completions:
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double()
        answers.append(logits.log_softmax(-1).gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1))
    return torch.cat(answers).numpy()


# Without HTTP


@torch.inference_mode()
def score(model: PreTrainedModel, batcher: Batcher, work: list[Group], budget: int) -> np.ndarray:
    """What the server does with its requests, in one call."""
    sequences = [(prompt, completion) for prompt, completions in work for completion in completions]
    answers: list[np.ndarray] = [np.empty(0, np.float32)] * len(sequences)
    for rows in batcher.cut(sequences, budget):
        batch = batcher.make([sequences[row] for row in rows], model.device)
        logprobs = token_logprobs(model, batch, 1.0)[0].cpu().numpy()
        ends = np.cumsum([len(sequences[row][1]) for row in rows])
        for row, answer in zip(rows, np.split(logprobs, ends[:-1]), strict=True):
            answers[row] = answer
    return np.concatenate(answers)


@torch.inference_mode()
def products(model: PreTrainedModel, rows: int, head_rows: int, budget: int) -> None:
    """The matrix products of scoring that many rows, in batches of `budget` and blocks as ours, and nothing else."""
    config, vocabulary = model.config, model.lm_head.weight
    block_rows, block_tokens = CPU_BLOCK
    most = max(budget, block_rows)
    hidden, wide = torch.randn(most, config.hidden_size), torch.randn(most, config.intermediate_size)
    out = torch.empty(most * max(config.intermediate_size, block_tokens))

    def multiply(inputs: torch.Tensor, weight: torch.Tensor) -> None:
        torch.mm(inputs, weight.t(), out=out[: len(inputs) * len(weight)].view(len(inputs), len(weight)))

    for start in range(0, rows, budget):
        count = min(budget, rows - start)
        for layer in model.base_model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
                multiply(hidden[:count], part.weight)
            multiply(hidden[:count], mlp.gate_proj.weight)
            multiply(hidden[:count], mlp.up_proj.weight)
            multiply(wide[:count], mlp.down_proj.weight)
    for start in range(0, head_rows, block_rows):
        for block in vocabulary.split(block_tokens):
            multiply(hidden[: min(block_rows, head_rows - start)], block)


# Servers


class Server:
    """A server process and the clients that share the work."""

    def __init__(self, port: int, process: subprocess.Popen, log: Path):
        self.port, self.process, self.log = port, process, log
        url = f"http://127.0.0.1:{port}"
        patient = {"ref_request_timeout": 3600.0, "ref_deadline": 3600.0}
        self.clients = [ReferenceClient(TrainerConfig(ref_servers=[url], **patient)) for _ in range(CLIENTS)]

    def score(self, work: list[Group]) -> list[np.ndarray]:
        """One array a group: its completions' log-probs one after the other."""
        futures = [
            self.clients[index % CLIENTS].request_groups([(f"group {index}", prompt, completions)])[0]
            for index, (prompt, completions) in enumerate(work)
        ]
        while wait(futures, timeout=1.0).not_done:
            if self.process.poll() is not None:  # the clients would wait for it to come back
                raise RuntimeError(f"the server ended with code {self.process.returncode}:\n{self.log.read_text()}")
        return [np.concatenate(future.result()) for future in futures]


def ours(folder: Path, max_batch_tokens: int, *options: str, name: str = "model", **environment: str):
    command = ["ref_server.py", "--model_name_or_path", str(folder / name), "--max_batch_tokens", str(max_batch_tokens)]
    return serving(folder, lambda port: [*command, *options, "--port", port], environment)


def baseline(folder: Path):
    return serving(folder, lambda port: ["-m", "benchmarks.baseline_server", str(folder / "model"), port], {})


@contextmanager
def serving(folder: Path, command: Callable[[str], list[str]], environment: dict[str, str]) -> Iterator[Server]:
    port = free_port()
    log = folder / f"server-{port}.log"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | environment
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, *command(str(port))], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_ready(f"http://127.0.0.1:{port}", process, log)
        server = Server(port, process, log)
        try:
            yield server
        finally:
            for client in server.clients:
                client.close()
    finally:
        process.kill()
        process.wait()


def wait_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    """Wait until a server answers /health with 200. Raises RuntimeError where it ends, or is not ready in 120 s."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}:\n{log.read_text()}")
        try:
            if requests.get(url + "/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready after 120 s:\n{log.read_text()}")


# Small things


def save_model(folder: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(folder)
    build_tokenizer(seed=0).save_pretrained(folder)


def tiny_model(folder: Path, vocabulary: int) -> PreTrainedModel:
    """The demo's shape, saved as "tiny"."""
    model = random_model(qwen(2, vocabulary, hidden_size=64, intermediate_size=192, num_attention_heads=4))
    save_model(folder / "tiny", model)
    return model


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def p95(values: list[float]) -> float:
    return float(np.percentile(values, 95))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
