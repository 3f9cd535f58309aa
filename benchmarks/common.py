"""What the benchmarks share: models in real shapes with random weights, skewed work, pairs in turn, peaks, tables.

Every comparison is a pair: both sides do the same work in the same run, one after the other, over and over, and what is
reported is the ratio of each pair. A single time on a shared machine says little; the ratio of neighbours says more.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

REPOSITORY = Path(__file__).resolve().parent.parent
VOCABULARY = 151_936
# For `qwen`: the sizes of well-known models, and one to try a benchmark out with.
SHAPES = {
    "Qwen2.5-1.5B": dict(layers=28, hidden_size=1536, intermediate_size=8960, num_attention_heads=12),
    "Qwen2.5-3B": dict(layers=36, hidden_size=2048, intermediate_size=11008, num_attention_heads=16),
}
OWN_HEAD = dict(num_key_value_heads=8, tie_word_embeddings=False)
LARGE_SHAPES = {
    "Qwen2.5-7B": OWN_HEAD
    | dict(layers=28, hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4),
    "Qwen2.5-14B": dict(layers=48, hidden_size=5120, intermediate_size=13824, num_attention_heads=40, **OWN_HEAD),
    "Qwen2.5-32B": dict(layers=64, hidden_size=5120, intermediate_size=27648, num_attention_heads=40, **OWN_HEAD),
}
TINY = dict(layers=2, hidden_size=64, intermediate_size=192, num_attention_heads=4, vocabulary=1024)
Group = tuple[list[int], list[list[int]]]
"""a prompt and its completions, token ids"""


def qwen(layers: int, vocabulary: int = VOCABULARY, **changes) -> Qwen2Config:
    """Qwen2.5-0.5B's shape with as many layers and tokens as asked for (tied head, as there)."""
    shape = dict(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        vocab_size=vocabulary,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Qwen2Config(**(shape | changes))


def random_model(config: Qwen2Config, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def skewed(count: int, low: int, high: int, draw: random.Random) -> list[int]:
    """Lengths as sampling gives them: many short, few long (the 2.5th power of a uniform draw), ends included."""
    return [low + round((high - low) * draw.random() ** 2.5) for _ in range(count)]


def groups(
    count: int, size: int, prompts: tuple[int, int], completions: tuple[int, int], seed: int, vocabulary: int
) -> list[Group]:
    """`count` prompts with uniform lengths, each with `size` completions of skewed lengths; random ids from 3 up."""
    draw = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(length)]

    return [
        (ids(draw.randint(*prompts)), [ids(length) for length in skewed(size, *completions, draw)])
        for _ in range(count)
    ]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turn(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each side, `repeats` times: a b, b a, a b, ... so that a slow minute of the machine hits both."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats):
        for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
            times[name].append(seconds(sides[name]))
    return times


def spread(values: list[float], digits: int = 2) -> str:
    """'median (least to most)'"""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratios(slower: list[float], faster: list[float]) -> list[float]:
    """Pair by pair."""
    return [one / other for one, other in zip(slower, faster, strict=True)]


def forget_peak() -> int:
    """Start a new peak of this process's memory; return the bytes that it holds now: on a card, of tensors. Linux."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def resident(pid: int | str = "self") -> int:
    """Bytes that a process holds now. Linux."""
    return _status("VmRSS", pid)


def peak_above(start: int, pid: int | str = "self") -> int:
    """Most bytes held since `forget_peak`, above what was held then."""
    if pid == "self" and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() - start
    return _status("VmHWM", pid) - start


def _status(field: str, pid: int | str = "self") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def fresh(script: str, *arguments: str) -> str:
    """Run a script in a process of its own and return the last line that it prints: peaks need a clean heap."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout.strip().splitlines()[-1]


def table(head: list[str], rows: list[list[object]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def machine(on_card: bool = False) -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "unknown processor",
    )
    place = torch.cuda.get_device_name() if on_card else f"{model}, {torch.get_num_threads()} threads"
    return f"{place}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"


BESIDE_TRL = ["TRL, s", "ours, s", "ratio, pair by pair", "TRL, MiB", "ours, MiB", "ratio"]
"""the head of what `beside_trl` returns, after its first column"""


def beside_trl(title: str, times: dict[str, list[float]], peaks: dict[str, int]) -> list[str]:
    """Return a row of a table: the seconds of pairs, and the bytes of peaks, by side, trl and ours."""
    return [
        title,
        spread(times["trl"]),
        spread(times["ours"]),
        spread(ratios(times["trl"], times["ours"])),
        f"{peaks['trl'] / 2**20:,.0f}",
        f"{peaks['ours'] / 2**20:,.0f}",
        f"{peaks['trl'] / peaks['ours']:.2f}",
    ]
