"""How far a run is: what all ranks share, and each rank's completions and random states."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from grpo.rollouts.records import StepBatch


@dataclass
class Progress:
    """A run's progress: numbers that all ranks share, and this rank's round of completions."""

    beta: float
    entropy_coef: float
    entropy: float | None = None
    """the mean entropy of the last step's tokens that an adaptive bonus acts on; None before the first step"""
    step: int = 0
    """the number of updates done"""
    num_tokens: int = 0
    """the tokens that were trained on, over all ranks"""
    evaluated: dict[str, float] = field(default_factory=dict)
    """the metrics of the evaluation after the last step; empty where there was none"""
    round: int = -1
    """the round that `batches` belong to; -1 before the first is drawn"""
    batches: list[StepBatch] = field(default_factory=list)
    """this rank's batch of each step of the round"""
    reference: str = ""
    """the fingerprint of the model that the reference servers began with; empty where no server is asked"""
    ref_step: int = 0
    """the last step after which the policy became part of the reference; 0 where it never did"""
    bad_steps: list[int] = field(default_factory=list)
    """the last steps, in a row, that taught the policy nothing: not finite, all rewards None, or all masked"""
    flat_steps: int = 0
    """the number of last steps, in a row, in which all completions of every prompt earned the same reward"""
    masked_steps: int = 0
    """the number of updates that did nothing, as every completion was masked"""
    resampled: int = 0
    """the number of groups that were replaced in this round, on all ranks"""
    most_calls_failed: bool = False
    """whether most calls of tools failed in the last step; of rank 0 alone, and in no checkpoint"""


SHARED = [name for name in Progress.__dataclass_fields__ if name not in ("batches", "most_calls_failed")]
"""the fields that all ranks share, and that a checkpoint's progress.json holds"""


def random_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
