"""A clock that books seconds and memory to the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseClock:
    """The seconds of one step by phase, as `time/...`. Time in an inner phase does not count for the outer one.

    On a card also the peak memory of each phase in GiB: that of tensors as `memory/peak_...`, and over all phases what
    torch's allocator took for them as `memory/peak_reserved`. On a CPU torch does not count tensors, so there are none.
    """

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self.open: list[str] = []
        """phases that have not ended, the outermost first"""
        self.ended = ""
        """the last phase that ended and was not within another one"""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start, booked_before = time.perf_counter(), sum(self.seconds.values())
        self._note_memory()
        self.open.append(phase)
        yield
        self._note_memory()
        self.open.pop()
        self.ended = self.ended if self.open else phase
        of_inner_phases = sum(self.seconds.values()) - booked_before
        seconds = time.perf_counter() - start - of_inner_phases
        self.seconds[f"time/{phase}"] = self.seconds.get(f"time/{phase}", 0.0) + seconds

    def _note_memory(self) -> None:
        """Book the peak since the last call to the open phase, and begin a new one.

        The numbers are the allocator's own counts, so this does not wait for the device.
        """
        if not torch.cuda.is_initialized():
            return
        phases = [phase for phase in self.open if phase != "wait_ref"]  # the memory held there is of the phase around
        if phases:
            tensors, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            for name, peak in ((phases[-1], tensors), ("reserved", reserved)):
                name = f"memory/peak_{name}"
                self.memory[name] = max(self.memory.get(name, 0.0), peak / 2**30)
        torch.cuda.reset_peak_memory_stats()

    def total(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self.start
