"""Finds this process's rank and device, and exchanges values between ranks."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from grpo.config.errors import LAUNCHER_VARIABLES, ConfigError, cores_here, launcher_number, rank_count, require
from grpo.model.devices import take_device

_T = TypeVar("_T")


def own_place() -> tuple[int, int, torch.device]:
    """Take this rank's device and return (rank, number of ranks, device); without a launcher (0, 1, device). Only rank
    0 shows progress bars. Raises ConfigError as take_device, and for a missing or wrong variable of the launcher: ranks
    would wait for others for ever."""
    places = "RANK", "LOCAL_RANK", "WORLD_SIZE"
    for name in (*places, "MASTER_ADDR", "MASTER_PORT") if os.environ.keys() & {*places} else ():
        require(name in os.environ, name, None, LAUNCHER_VARIABLES)
    world_size = rank_count()
    rank, local_rank = (launcher_number(name, 0, most=world_size - 1) for name in ("RANK", "LOCAL_RANK"))
    launcher_number("MASTER_PORT", 1, least=1, most=65535)
    if rank != 0:
        disable_progress_bar()
    device = take_device(local_rank)
    # Without it each rank would use all cores; torchrun sets 1, and beside a card AdamW may run on the CPU (offload).
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if "OMP_NUM_THREADS" not in os.environ or (by_torchrun and device.type == "cuda"):
        torch.set_num_threads(cores_here())
    return rank, world_size, device


def from_first(value: _T) -> _T:
    """Return rank 0's value on every rank. All ranks must call it."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def on_first(rank: int, action: Callable[[], _T]) -> _T:
    """Run the action on rank 0 alone; return its result, or raise its ConfigError, on every rank."""
    result: _T | ConfigError | None = None
    if rank == 0:
        try:
            result = action()
        except ConfigError as error:
            result = error
    result = from_first(result)
    if isinstance(result, ConfigError):
        raise result
    return result


def gather(local_value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. All ranks must call it; a single one needs no group."""
    if not dist.is_initialized():
        return [local_value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, local_value)
    return values


def raise_together(error: Exception | None, kind: type[Exception]) -> None:
    """Raise `kind` on every rank if any rank has an error, with the first error's arguments. All ranks call it."""
    for arguments in gather(error.args if error else None):
        if arguments is not None:
            raise kind(*arguments)
