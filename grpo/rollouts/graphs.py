"""Steps of the decode loop as CUDA graphs: the hundreds of kernels of a forward pass in one launch.

A graph is a recording of kernels with the addresses of all they read and write. So a step that is recorded has shapes
that follow from a `Shape` alone, and reads whatever else changes from tensors that stay where they are. While it is
recorded nothing is computed, nothing may be loaded for the first time, and the host must not wait for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from grpo.model.shared_cache import Shape


class StepGraphs:
    """The graphs of one call, one for each shape. Elsewhere there is nothing to record: each step is a plain call."""

    def __init__(self, device: torch.device, refuse_waits: bool = False):
        """With `refuse_waits` raise RuntimeError where the host waits for the device in a shape's first step.

        In a recording that would raise too, but spoil torch's allocator. It is for the trial at the start alone: the
        refusal is the whole process's, and in a run other threads (rewards) may use the device meanwhile.
        """
        self._device, self._refuse_waits = device, refuse_waits
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: tensors that they read have moved."""
        self._graphs: dict[Shape, torch.cuda.CUDAGraph | None] = {}
        # A pool whose graphs have all gone takes no new ones.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def run(self, step: Callable[[Shape], None], shape: Shape) -> None:
        """Do the step: the first time plainly, which loads all it needs, the second time recorded, then replayed."""
        if self._device.type != "cuda":
            step(shape)
        elif shape not in self._graphs:
            with _waits_refused() if self._refuse_waits else nullcontext():
                step(shape)
            self._graphs[shape] = None
        else:
            graph = self._graphs[shape] = self._graphs[shape] or self._record(step, shape)
            graph.replay()

    def _record(self, step: Callable[[Shape], None], shape: Shape) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may call CUDA meanwhile.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            step(shape)
        return graph


@contextmanager
def _waits_refused() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
