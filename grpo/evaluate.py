"""Greedy accuracy on held-out problems, the work shared by all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from grpo.metrics import Stats, gather_stats
from grpo.records import Example
from grpo.rollout import Sampler

_KEPT = 32  # completions for the record


def evaluate(
    model: PreTrainedModel,
    sampler: Sampler,
    examples: Sequence[Example],
    is_correct: Callable[[str, str], bool],
    has_format: Callable[[str], bool],
    batch_size: int,
    rank: int,
    world_size: int,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics over all examples (the same on every rank), and this rank's first completions with their verdicts.

    `eval_accuracy_se` is the standard error of the accuracy over the problems, sqrt(p (1 - p) / n).
    """
    own = examples[rank::world_size]
    rollouts = []
    for start in tqdm(range(0, len(own), batch_size), desc="evaluate", disable=rank != 0, leave=False):
        rollouts += sampler.greedy(model, own[start : start + batch_size])
    correct = [
        is_correct(rollout.text, example.columns["answer"]) for rollout, example in zip(rollouts, own, strict=True)
    ]
    formatted = [has_format(rollout.text) for rollout in rollouts]
    stats = gather_stats(
        {
            "correct": Stats.of(correct),
            "format": Stats.of(formatted),
            "length": Stats.of([len(rollout.completion_ids) for rollout in rollouts]),
            "clipped": Stats.of([not rollout.finished for rollout in rollouts]),
        }
    )
    accuracy, count = stats["correct"].mean, stats["correct"].count
    metrics = {
        "eval_accuracy": accuracy,
        "eval_accuracy_se": math.sqrt(accuracy * (1 - accuracy) / count),
        "eval_n": count,
        "eval_format": stats["format"].mean,
        "eval_completions/mean_length": stats["length"].mean,
        "eval_completions/clipped_ratio": stats["clipped"].mean,
    }
    samples = [
        {
            "prompt": example.prompt,
            "completion": rollout.text,
            "answer": example.columns["answer"],
            "correct": right,
            "format": good,
        }
        for example, rollout, right, good in zip(own[:_KEPT], rollouts, correct, formatted, strict=False)
    ]
    return metrics, samples
