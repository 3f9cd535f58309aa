"""A checkpoint for another number of ranks than saved it: DeepSpeed's own conversion, and the round shared anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from grpo.rollouts.records import StepBatch

LOAD_UNIVERSAL = {"load_universal": True}
"""what DeepSpeed's "checkpoint" section has to say when it is to load what `to_universal` wrote"""


def to_universal(engine: Path, to: Path) -> None:
    """Write what ZeRO-2 saved in a part a rank as one tensor a parameter, which any number of ranks can load.

    Raises OSError with the last words of DeepSpeed's program where that failed.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--input_folder", str(engine), "--output_folder", str(to)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(f"DeepSpeed's ds_to_universal: {(done.stdout.splitlines() or ['it was killed'])[-1]}")


def put_steps(optimizer: torch.optim.Optimizer) -> None:
    """Put each count of steps where its parameter is, as a fused AdamW reads it: DeepSpeed leaves it on the CPU."""
    for parameter, state in optimizer.state.items():
        state["step"] = state["step"].to(parameter.device)


def shared_anew(by_rank: Sequence[list[StepBatch]], rank: int, world_size: int) -> list[StepBatch]:
    """A round that these ranks had, in their order, as this one of `world_size` ranks has it."""
    parts = []
    for pieces in zip(*by_rank, strict=True):
        whole = StepBatch(
            [group for piece in pieces for group in piece.groups],
            torch.cat([piece.by_function for piece in pieces], dim=1),
            torch.cat([piece.rewards for piece in pieces]),
            torch.cat([piece.signal for piece in pieces]),
            [sample for piece in pieces for sample in piece.samples],
        )
        share = len(whole.groups) // world_size
        parts.append(whole.cut(rank * share, (rank + 1) * share))
    return parts
