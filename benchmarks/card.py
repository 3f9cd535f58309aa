"""Shared by the parts of benchmarks/gpu.py: the card and its ceilings, time, memory, tables that are JSON too."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Dense bf16 TFLOP/s by what the card's name contains, the first that fits; the makers' data sheets.
PEAKS = {
    "H200 NVL": 835,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "4090": 165,
}


class Tables:
    """Prints Markdown row by row, so that a part that is stopped leaves what it has measured; `save` writes JSON."""

    def __init__(self, part: str):
        self._part = part
        self._tables: list[dict] = []

    def head(self, *names: str) -> None:
        self._tables.append({"columns": names, "rows": []})
        print("\n| " + " | ".join(names) + " |\n|" + "---|" * len(names), flush=True)

    def row(self, *cells: object) -> None:
        self._tables[-1]["rows"].append(list(map(str, cells)))
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)

    def save(self, path: Path) -> None:
        """Add the part's tables to a JSON file, {part: {"card", "torch", "date", "tables"}}."""
        parts = json.loads(path.read_text()) if path.exists() else {}
        parts[self._part] = {
            "card": card(),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "tables": self._tables,
        }
        path.write_text(json.dumps(parts, indent=1) + "\n")


class Clock:
    """The rest of a part's time."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds
        self._told = False

    def left(self) -> float:
        return self._end - time.monotonic()

    def over(self, next_thing: str) -> bool:
        """Say so, once, if there is no time left to begin it."""
        if self.left() > 0:
            return False
        if not self._told:
            print(f"\nNot measured, the part's time is over: {next_thing}, and what comes after it.", flush=True)
        self._told = True
        return True

    def times(self, work: Callable[[], object], most: int = 5) -> list[float]:
        """Seconds of up to `most` runs, at least one, as long as they take no more than 5 s together."""
        times: list[float] = []
        while not times or (len(times) < most and sum(times) + times[-1] < 5 and self.left() > 0):
            synchronize()
            start = time.perf_counter()
            work()
            synchronize()
            times.append(time.perf_counter() - start)
        return times


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def peak_of(work: Callable[[], object]) -> int:
    """Bytes above what was allocated before."""
    if not CUDA:
        work()
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def free(model: PreTrainedModel) -> None:
    model.to("meta")  # whoever else still holds the model holds no memory with it
    if CUDA:
        torch.cuda.empty_cache()


def card() -> str:
    return torch.cuda.get_device_name() if CUDA else "no GPU"


def card_peak() -> float | None:
    return next((peak for part, peak in PEAKS.items() if part in card()), None)


def bandwidth() -> float | None:
    """Bytes a second that a large copy reads and writes, measured; None without a card."""
    if not CUDA:
        return None
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / statistics.median(Clock(10).times(lambda: target.copy_(source)))


def where() -> str:
    peak = f"{card_peak()} TFLOP/s dense bf16" if card_peak() else "peak unknown"
    return f"{card()} ({peak}), torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
