"""The typed records that pass between the stages of a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from grpo.wire.rewards import Message


@dataclass(frozen=True)
class Example:
    """One problem of a dataset, ready to be sampled from."""

    index: int
    """row in the dataset as loaded"""
    prompt: str
    """the text that was tokenised, chat template applied"""
    prompt_ids: list[int]
    columns: dict[str, Any]
    """the dataset's other columns, handed to the reward functions; the gold answer is `answer`"""
    messages: list[Message] = field(default_factory=list)
    """the chat that the prompt was made of, for reward models, which may have another chat template"""


@dataclass(frozen=True)
class Rollout:
    """One sampled completion. The ids are the truth; the text is decoded once, for rewards and logs only."""

    completion_ids: list[int]
    """what the sampler drew, its eos included"""
    finished: bool
    """the sampler drew an eos (False: it was cut at max_completion_length)"""
    text: str
    """without special tokens"""
    sampling_logprobs: list[float]
    """of each of the ids, as the sampler knew them; NaN where it did not"""
    policy_version: int
    """updates that the policy had had when it drew this"""


@dataclass(frozen=True)
class Group:
    """The completions of one prompt, which are compared with each other."""

    id: int
    """its place in the run: (step - 1) x prompts_per_step + place in the step"""
    example: Example
    rollouts: list[Rollout]
    reference: Future[list[np.ndarray]] | None
    """will hold the reference's float32 log-probs of each rollout; None where nobody is asked"""


@dataclass
class Sample:
    """One completion with all the loss needs."""

    prompt_ids: list[int]
    completion_ids: list[int]
    finished: bool
    """False: cut at max_completion_length"""
    advantage: float = 0.0
    ref_logprobs: Callable[[], np.ndarray] | None = None
    """waits for the reference's float32 [len(completion_ids)]; None where the loss has no KL term"""
    sampling_logprobs: np.ndarray | None = None
    """float32 [len(completion_ids)], NaN where unknown"""
    old_logprobs: np.ndarray | None = None
    """float32 [len(completion_ids)] of the policy before the first update on this; None: it is the policy of now"""


@dataclass(frozen=True)
class StepBatch:
    """What one step of a round trains on: this rank's share."""

    groups: list[Group]
    by_function: torch.Tensor
    """float64 [functions, groups, num_generations], NaN where a function does not apply"""
    rewards: torch.Tensor
    """float64 [groups, num_generations], their weighted sum"""
    signal: torch.Tensor
    """bool [groups]"""
    sequences: list[Sample]
    """groups x num_generations"""

    def cut(self, start: int, end: int) -> StepBatch:
        """Only these of its groups."""
        copies = len(self.sequences) // len(self.groups)
        return StepBatch(
            self.groups[start:end],
            self.by_function[:, start:end],
            self.rewards[start:end],
            self.signal[start:end],
            self.sequences[start * copies : end * copies],
        )

    def samples(self, most: int | None = None) -> list[dict[str, Any]]:
        """The completions of all groups, or of the first so many, with what they earned: to be recorded."""
        copies = self.rewards.shape[1]
        return [
            {
                "prompt": group.example.prompt,
                "completion": rollout.text,
                "answer": group.example.columns["answer"],
                "reward": self.rewards[row, column].item(),
                "advantage": self.sequences[row * copies + column].advantage,
            }
            for row, group in enumerate(self.groups[:most])
            for column, rollout in enumerate(group.rollouts)
        ]
