"""Evaluation: how many held-out problems a model solves, greedily and over samples, shared by all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from grpo.config.generation import AnsweringConfig
from grpo.rollouts.records import Example
from grpo.rollouts.sampler import Sampler
from grpo.run.collective import gather


def evaluate(
    sampler: Sampler,
    examples: Sequence[Example],
    is_correct: Callable[[str, str], bool],
    has_format: Callable[[str, str], bool],
    config: AnsweringConfig,
    rank: int,
    world_size: int,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return metrics over all examples (the same on every rank), and this rank's completions with their verdicts.

    Each example is answered greedily, and `num_generations_eval` times at `temperature`. The completions are cut into
    calls of `sequences_per_generate` before ranks share them, and a call of samples has a seed of its own: so the
    number of ranks changes nothing, to the last bit. A completion's `sample` is 0 for the greedy one, else its number.

    `eval_accuracy_se` is sqrt(p (1 - p) / n). The other standard errors are s / sqrt(n), where s is the standard
    deviation of the problems' estimates (both: Miller 2024, arXiv:2411.00640, section 2); NaN for a single problem.
    """
    samples = config.num_generations_eval
    problems, size = range(len(examples)), config.sequences_per_generate
    greedy = [(problem, 0) for problem in problems]
    sampled = [(problem, sample) for problem in problems for sample in range(1, samples + 1)]
    calls = [cells[start : start + size] for cells in (greedy, sampled) for start in range(0, len(cells), size)]

    # This rank fills its own cells, the other ranks' cells stay 0: the sum over ranks is the whole.
    counts = np.zeros((4, len(examples), 1 + samples), np.int64)
    completions: list[dict[str, Any]] = []
    for cells in tqdm(calls[rank::world_size], desc="evaluate", unit="batch", disable=rank != 0, leave=False):
        batch = [examples[problem] for problem, _ in cells]
        problem, sample = cells[0]
        if sample == 0:
            rollouts = sampler.greedy(batch)
        else:
            seed = config.seed * 1_000_003 + problem * samples + sample  # another seed for each call
            rollouts = [rollout for (rollout,) in sampler.sample(batch, 1, config.temperature, seed)]
        for (problem, sample), example, rollout in zip(cells, batch, rollouts, strict=True):
            answer, length = example.gold, len(rollout.completion_ids)
            correct, formatted = is_correct(rollout.text, answer), has_format(rollout.text, example.prompt)
            counts[:, problem, sample] = correct, formatted, length, not rollout.finished
            completions.append(
                {
                    "problem": example.index,
                    "sample": sample,
                    "prompt": example.prompt,
                    "completion": rollout.text,
                    "answer": answer,
                    "correct": correct,
                    "format": formatted,
                    "tokens": length,
                    "finished": rollout.finished,
                }
            )
    return _metrics(sum(gather(counts)), config.ks), completions


def pass_at_k(correct: np.ndarray, n: int, k: int) -> np.ndarray:
    """Estimate each problem's chance that any of k samples is right, where `correct` [problems] of n samples were.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1), its quotient as
    the product of (n - c - j) / (n - j) over j < k: k factors from 0 to 1, where factorials would overflow.
    """
    j = np.arange(k)
    return 1 - np.prod(np.maximum(n - correct[:, None] - j, 0) / (n - j), axis=1)


def _metrics(counts: np.ndarray, ks: Sequence[int]) -> dict[str, float]:
    """Compute the metrics from [correct, formatted, length, clipped] x problems x (greedy, samples)."""
    correct, formatted, length, clipped = counts[:, :, 0]
    accuracy, count = correct.mean().item(), len(correct)
    metrics = {
        "eval_accuracy": accuracy,
        "eval_accuracy_se": math.sqrt(accuracy * (1 - accuracy) / count),
        "eval_n": count,
        "eval_format": formatted.mean().item(),
        "eval_completions/mean_length": length.mean().item(),
        "eval_completions/clipped_ratio": clipped.mean().item(),
        "eval_num_tokens": counts[2].sum().item(),
    }
    if samples := counts.shape[2] - 1:
        solved = counts[0, :, 1:].sum(axis=1)
        estimates = {f"avg@{samples}": solved / samples} | {f"pass@{k}": pass_at_k(solved, samples, k) for k in ks}
        for name, values in estimates.items():
            metrics[f"eval_{name}"] = values.mean().item()
            metrics[f"eval_{name}_se"] = values.std(ddof=1).item() / math.sqrt(count) if count > 1 else math.nan
    return metrics
