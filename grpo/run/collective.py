"""Which of the launched processes this one is, and the device that it works on."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from grpo.model.devices import take_device

_T = TypeVar("_T")


def own_place() -> tuple[int, int, torch.device]:
    """(rank, number of ranks, device), as the launcher's environment says; without a launcher (0, 1, device).

    Takes the device, and a fair share of the cores where that is the CPU. Only rank 0 goes on to show progress bars.
    Raises ConfigError as take_device.
    """
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if rank != 0:
        disable_progress_bar()
    device = take_device(local_rank)
    # The launcher sets none, and ranks would fight for the cores.
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_SIZE", "1"))))
    return rank, world_size, device


def from_first(value: _T) -> _T:
    """What rank 0 has, on every rank. All must call it."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def gather(own: Any) -> list[Any]:
    """What each rank has, by rank. All must call it; all get the result. One alone needs no process group."""
    if not dist.is_initialized():
        return [own]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def raise_together(error: Exception | None, kind: type[Exception], device: torch.device) -> None:
    """Raise `kind` on every rank, with the first rank's message, where some rank has an error. All must call it."""
    failed = torch.tensor(int(error is not None), device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if failed:
        raise kind(next(message for message in gather(str(error) if error else None) if message))
