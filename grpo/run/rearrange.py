"""Checkpoints for another number of ranks than saved them: DeepSpeed's own conversion, and the round shared anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from grpo.rollouts.records import StepBatch

LOAD_UNIVERSAL = {"load_universal": True}
"""the setting in DeepSpeed's "checkpoint" section with which it loads what `to_universal` wrote"""


def to_universal(engine: Path, to: Path) -> None:
    """Write the parts that ZeRO-2 saved on each rank as one tensor a parameter, which any number of ranks can load.

    Raises OSError with the last line of DeepSpeed's program where that failed.
    """
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--input_folder", str(engine), "--output_folder", str(to)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise OSError(f"DeepSpeed's ds_to_universal: {(ended.stdout.splitlines() or ['it was killed'])[-1]}")


def put_steps(optimizer: torch.optim.Optimizer) -> None:
    """Move each count of steps from the CPU, where DeepSpeed leaves it, to its parameter, as a fused AdamW needs it."""
    for parameter, state in optimizer.state.items():
        state["step"] = state["step"].to(parameter.device)


def share_anew(by_rank: Sequence[list[StepBatch]], rank: int, world_size: int) -> list[StepBatch]:
    """Return the share that this one of `world_size` ranks has of a round; `by_rank` has the shares as they were."""
    batches = []
    for shares in zip(*by_rank, strict=True):
        whole = StepBatch(
            [group for share in shares for group in share.groups],
            torch.cat([share.by_function for share in shares], dim=1),
            torch.cat([share.rewards for share in shares]),
            torch.cat([share.signal for share in shares]),
            [sample for share in shares for sample in share.samples],
        )
        groups = len(whole.groups) // world_size
        batches.append(whole.cut(rank * groups, (rank + 1) * groups))
    return batches
