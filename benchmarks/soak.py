"""The reference server at its capacity for half an hour: does it slow down, grow, or say anything wrong?

    python -m benchmarks.soak --minutes 30 --clients 16

A model that keeps the worker busy (4 layers, hidden 256, vocabulary 8,192, random weights, fp32), ref_server.py in a
process of its own with its default settings, and the clients in two other processes, a thread each: the next request
goes out when the last is answered. Requests are groups as the trainer sends them, of seeded mixed sizes: prompts of 20
to 300 tokens with 1 to 16 completions of 10 to 200. A run of one minute comes first, the long one after it, against the
same process. Then that process and a fresh one take turns, a minute each: on a machine whose speed wanders, only
neighbours tell whether the old one has become slower.

Every answer must have the right shape and be finite; every tenth request is always the same one, whose answer must stay
what it was at first (1e-4: what it shares a batch with moves its sums). A client that is told 503 busy comes back after
Retry-After; that is counted, and is no error.

Tables go to stdout, progress to stderr. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import REPOSITORY, groups, machine, qwen, random_model, ratios, resident, spread, table
from benchmarks.ref_server import Server, ours, save_model, say
from grpo.server.monitor import quantiles
from grpo.wire.logprobs import LogprobsRequest, decode_answer, encode_request
from grpo.wire.refusals import LOGPROBS_PATH, ProtocolError

VOCABULARY = 8192
PROCESSES = 2
INTERVALS = 10
PROMPTS, GROUP, COMPLETIONS = (20, 300), (1, 16), (10, 200)
SAME = 1e-4
LOST_SECONDS = 600  # without a word from a process of clients


@dataclass
class Answer:
    at: float
    """seconds since the run began"""
    seconds: float
    tokens: int
    """prompts counted with each completion"""


@dataclass
class Run:
    """The answers that clients got, and the server's memory meanwhile."""

    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    busy: int = 0
    resident: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the run began, bytes)"""

    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of the long run")
    parser.add_argument("--first_minutes", type=float, default=1.0, help="of the run before it")
    parser.add_argument("--turns", type=int, default=4, help="of the old server and a fresh one, as long as the first")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    print(f"{machine()}; {options.clients} clients; {options.layers} layers, hidden {options.hidden}\n", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = dict(hidden_size=options.hidden, intermediate_size=4 * options.hidden, num_attention_heads=4)
        save_model(folder / "model", random_model(qwen(options.layers, VOCABULARY, **size)))
        with ours(folder, 4096) as server:
            first, long = (run(server, 60 * minutes, options) for minutes in (options.first_minutes, options.minutes))
            with ours(folder, 4096) as fresh:
                run(fresh, 10 * options.first_minutes, options)  # what only the first requests of a process pay
                turns = in_turns(server, fresh, options)
    report(first, long)
    old, new = ([one.tokens_per_second() for one in runs] for runs in turns)
    if old:
        print(f"The old server's throughput over a fresh one's, {len(old)} turns: {spread(ratios(old, new), 3)}.")
    return 1 if any(one.errors for one in (first, long, *turns[0], *turns[1])) else 0


def in_turns(old: Server, fresh: Server, options: argparse.Namespace) -> tuple[list[Run], list[Run]]:
    runs: dict[Server, list[Run]] = {old: [], fresh: []}
    for turn in range(options.turns):
        for server in (old, fresh) if turn % 2 == 0 else (fresh, old):
            runs[server].append(run(server, 60 * options.first_minutes, options))
    return runs[old], runs[fresh]


def run(server: Server, seconds: float, options: argparse.Namespace) -> Run:
    context = multiprocessing.get_context("spawn")
    results, ready, go = context.Queue(), context.Barrier(PROCESSES + 1), context.Event()
    shares = [range(options.clients)[start::PROCESSES] for start in range(PROCESSES)]
    workers = [
        context.Process(target=clients, args=(server.port, seconds, share, results, ready, go)) for share in shares
    ]
    for worker in workers:
        worker.start()
    ready.wait(LOST_SECONDS)
    go.set()
    began, whole, said = time.monotonic(), Run(seconds), 0.0
    while (at := time.monotonic() - began) < seconds:
        if server.process.poll() is not None:
            whole.errors[f"the server ended with {server.process.returncode}"] += 1
            break
        whole.resident.append((at, resident(server.process.pid)))
        if at >= said:
            say(f"{at / 60:.2f} of {seconds / 60:g} minutes: {whole.resident[-1][1] >> 20} MiB")
            said += 10
        time.sleep(min(1.0, seconds / 100))
    for _ in workers:
        part: Run = results.get(timeout=LOST_SECONDS)
        whole.answers += part.answers
        whole.errors += part.errors
        whole.busy += part.busy
    for worker in workers:
        worker.join()
    return whole


def clients(port: int, seconds: float, numbers: range, results, ready, go) -> None:
    """A process of clients, a thread each."""
    torch.set_num_threads(1)
    whole, lock = Run(seconds), threading.Lock()
    fixed = encode(random.Random(0), "fixed")
    ready.wait()
    go.wait()
    began = time.monotonic()

    def client(number: int) -> None:
        draw, asked = random.Random(number + 1), 0
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        expected = None
        while time.monotonic() - began < seconds:
            again = asked % 10 == 0
            body, tokens, completion_tokens = fixed if again else encode(draw, f"client {number}")
            asked += 1
            start = time.monotonic()
            try:
                connection.request("POST", LOGPROBS_PATH, body)
                answer = connection.getresponse()
                status, retry_after, said = answer.status, answer.headers["Retry-After"], answer.read()
                if status == 503 and b'"busy"' in said:
                    with lock:
                        whole.busy += 1
                    time.sleep(int(retry_after))
                    continue
                if status != 200:
                    raise ProtocolError(status, str(status), said.decode())
                logprobs = decode_answer(said, completion_tokens).logprobs
                if again:
                    expected = logprobs if expected is None else expected
                    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=SAME)
            # All that can go wrong is counted: the soak goes on.
            except Exception as error:
                with lock:
                    whole.errors[error.code if isinstance(error, ProtocolError) else type(error).__name__] += 1
                say(f"client {number}: {type(error).__name__}: {str(error)[:300]}")
                connection.close()
                time.sleep(1)
                continue
            end = time.monotonic()
            with lock:
                whole.answers.append(Answer(end - began, end - start, tokens))
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(whole)


def encode(draw: random.Random, client: str) -> tuple[bytes, int, int]:
    """(body, tokens, completion tokens) of a group."""
    [(prompt, completions)] = groups(1, draw.randint(*GROUP), PROMPTS, COMPLETIONS, draw.getrandbits(32), VOCABULARY)
    request = LogprobsRequest.of(prompt, completions, 1.0, request_id="soak", client=client)
    return encode_request(request), len(request.input_ids), int(request.completion_lengths.sum())


def report(first: Run, long: Run) -> None:
    rows, step = [], long.seconds / INTERVALS
    for start in (step * place for place in range(INTERVALS)):
        answers = [one for one in long.answers if start <= one.at < start + step]
        resident = [size for at, size in long.resident if start <= at < start + step]
        times = ["" if x is None else f"{1000 * x:.0f}" for x in quantiles([one.seconds for one in answers])]
        speed = sum(one.tokens for one in answers) / step
        held = f"{max(resident) >> 20}" if resident else ""
        rows.append([f"{(start + step) / 60:.3g}", held, f"{speed:.0f}", len(answers), *times])
    print(table(["until minute", "most resident, MiB", "tokens/s", "answers", "p50, ms", "p99, ms"], rows))
    print("\nTokens are those of all sequences, a prompt counted with each of its completions.\n")

    rows = []
    for name, one in (("first", first), ("long", long)):
        times = ["" if x is None else f"{1000 * x:.0f}" for x in quantiles([answer.seconds for answer in one.answers])]
        errors = ", ".join(f"{count} x {code}" for code, count in one.errors.items()) or "none"
        minutes = f"{one.seconds / 60:g}"
        rows.append([name, minutes, f"{one.tokens_per_second():.0f}", len(one.answers), *times, one.busy, errors])
    print(table(["run", "minutes", "tokens/s", "answers", "p50, ms", "p99, ms", "busy", "errors"], rows))

    sizes = [size / 2**20 for _, size in long.resident]
    part = max(1, len(sizes) // INTERVALS)
    share = long.tokens_per_second() / first.tokens_per_second() if first.answers else float("nan")
    first_part, last_part = (statistics.median(some) for some in (sizes[:part], sizes[-part:]))
    print(
        f"\nThe long run has {share:.3f} of the first one's throughput. Resident: {first_part:.0f} MiB in the first "
        f"tenth of the long run, {last_part:.0f} in the last (medians), {max(sizes):.0f} at most."
    )


if __name__ == "__main__":
    sys.exit(main())
