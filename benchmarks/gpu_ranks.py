"""One of two ranks that sum tensors together, as ZeRO-2 sums gradients, that gather and scatter them, as ZeRO-3 does
weights and gradients, and that exchange the heads of a layer of 7B, as ranks do that share rows:
`python -m benchmarks.gpu --part ranks`."""

import os
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.card import CUDA, Clock
from grpo.model.packing import RowParts, RowRanks

HEADS, KEY_HEADS, WIDTH = 28, 4, 128


def show(what: str, size: float, work: Callable[[], object]) -> None:
    """Print the milliseconds of a turn, and the gigabytes a second. `size` is in megabytes."""

    def turns() -> None:
        for _ in range(5):
            work()

    turns()
    # A fixed number of turns: ranks that counted by their own clocks would not meet.
    seconds = statistics.median(Clock(1e9).times(turns, most=1)[0] for _ in range(3)) / 5
    if dist.get_rank() == 0:
        print(what, f"{size:.1f}", f"{1000 * seconds:.2f}", f"{size / 1000 / seconds:.1f}")


def main() -> None:
    rank, is_tiny = int(os.environ["RANK"]), os.environ["TINY"] == "1"
    if CUDA:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if CUDA else "gloo", rank=rank, world_size=2)
    numbers = {"dtype": torch.bfloat16, "device": "cuda" if CUDA else "cpu"}
    for megabytes in (1, 4) if is_tiny else (1, 100, 1000):
        gradients = torch.ones(megabytes * 500_000, **numbers)
        part = gradients.chunk(2)[rank].clone()
        show("all-reduce", megabytes, partial(dist.all_reduce, gradients))
        show("all-gather", megabytes, partial(dist.all_gather_into_tensor, gradients, part))
        show("reduce-scatter", megabytes, partial(dist.reduce_scatter_tensor, part, gradients))
    for tokens in (64,) if is_tiny else (16_384, 65_536):
        states = [torch.ones(1, heads, tokens // 2, WIDTH, **numbers) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        attend = partial(RowParts(RowRanks.of(2), [], torch.empty(0)).attend, lambda query, *_: query.transpose(1, 2))
        of_rank = tokens // 2 * WIDTH * (2 * HEADS + 2 * KEY_HEADS) * 2 / 1e6
        show("exchange", of_rank / 2, partial(attend, *states))  # half of it stays
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
