"""Seconds and memory by phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseClock:
    """Seconds by phase of one step, as `time/...`. A phase inside another is taken out of it: none counts twice.

    On a card also the most memory of each phase in GiB: that of tensors as `memory/peak_...`, and over all phases what
    torch's allocator took for them as `memory/peak_reserved`. On a CPU nobody counts tensors, so there are none.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self.open: list[str] = []
        """phases that are not over, the outermost first"""
        self.ended = ""
        """the last one that was not within another"""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start, booked = time.perf_counter(), sum(self.seconds.values())
        self._note_memory()
        self.open.append(phase)
        yield
        self._note_memory()
        self.open.pop()
        self.ended = self.ended if self.open else phase
        within = sum(self.seconds.values()) - booked
        own = time.perf_counter() - start - within
        self.seconds[f"time/{phase}"] = self.seconds.get(f"time/{phase}", 0.0) + own

    def _note_memory(self) -> None:
        """Book the peak since the last call to the phase that is open, and begin a new one.

        The allocator's own counts: the device is not waited for.
        """
        if not torch.cuda.is_initialized():
            return
        working = [phase for phase in self.open if phase != "wait_ref"]  # there, what the phase around it has is held
        if working:
            tensors, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            for name, peak in ((working[-1], tensors), ("reserved", reserved)):
                name = f"memory/peak_{name}"
                self.memory[name] = max(self.memory.get(name, 0.0), peak / 2**30)
        torch.cuda.reset_peak_memory_stats()

    def total(self) -> float:
        return time.perf_counter() - self.start
