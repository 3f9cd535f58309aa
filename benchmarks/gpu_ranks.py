"""One of two ranks that sum tensors together, as ZeRO sums gradients: `python -m benchmarks.gpu --part ranks`."""

import os
import statistics

import torch
import torch.distributed as dist

from benchmarks.card import CUDA, Clock


def main() -> None:
    rank = int(os.environ["RANK"])
    if CUDA:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if CUDA else "gloo", rank=rank, world_size=2)
    for megabytes in (1, 4) if os.environ["TINY"] == "1" else (1, 100, 1000):
        gradients = torch.ones(megabytes * 500_000, dtype=torch.bfloat16, device="cuda" if CUDA else "cpu")

        def work(gradients: torch.Tensor = gradients) -> None:
            for _ in range(5):
                dist.all_reduce(gradients)

        work()
        # A fixed number of turns: ranks that counted by their own clocks would not meet.
        seconds = statistics.median(Clock(1e9).times(work, most=1)[0] for _ in range(3)) / 5
        if rank == 0:
            print(megabytes, f"{1000 * seconds:.2f}", f"{megabytes / 1000 / seconds:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
