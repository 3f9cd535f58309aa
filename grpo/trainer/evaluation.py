"""Evaluation: the rewards of a model's answers to held-out problems, and how many it solves; shared by all ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from grpo.algorithm.advantages import total_rewards
from grpo.config.errors import ConfigError
from grpo.config.loss_settings import RewardedConfig
from grpo.config.trainer import TrainerConfig
from grpo.data.dataset import parts_of
from grpo.data.records import Example, Rollout, rewards_by_name
from grpo.rewards.functions import TrainerState
from grpo.run.collective import gather
from grpo.run.metrics import Stats
from grpo.sampling.sampler import EVALUATION_SEED, Sampler
from grpo.trainer.rewarding import Rewarder, fail_together, full_rewards, reward_names, verdicts
from grpo.wire.picture_files import pictures_of


def evaluate(
    sampler: Sampler, examples: list[Example], rewarder: Rewarder, *, rank: int, world_size: int, state: TrainerState
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return metrics over all examples (the same on every rank), and this rank's completions with their verdicts.

    Each example is answered greedily, sample 0, and `num_generations_eval` times at `eval_temperature`, which avg@k and
    pass@k alone count. The completions are cut into calls of `sequences_per_generate` before ranks share them, and
    those of a call are drawn and rewarded together: so the number of ranks changes nothing, to the last bit. What
    reward functions log is not recorded. Raises RewardsLost.

    `eval_accuracy_se` is sqrt(p (1 - p) / n). The other standard errors are s / sqrt(n), where s is the standard
    deviation of the problems' estimates (both: Miller 2024, arXiv:2411.00640, section 2); NaN for a single problem.
    """
    config = rewarder.config
    samples, temperature = config.num_generations_eval, config.eval_temperature or config.temperature
    problems, size = range(len(examples)), config.sequences_per_generate
    greedy = [(problem, 0) for problem in problems]
    sampled = [(problem, sample) for problem in problems for sample in range(1, samples + 1)]
    calls = [cells[start : start + size] for cells in (greedy, sampled) for start in range(0, len(cells), size)]

    # This rank fills its own cells, the other ranks' cells stay 0: the sum over ranks is the whole.
    counts = np.zeros((4, len(examples), 1 + samples), np.int64)
    rewards = np.zeros((len(rewarder.names), len(examples), 1 + samples))
    completions: list[dict[str, Any]] = []
    bar = {"desc": "evaluate", "unit": "batch", "leave": False}
    with fail_together():
        for number, cells in tqdm([*enumerate(calls)][rank::world_size], **bar, disable=None if rank == 0 else True):
            batch = [examples[problem] for problem, _ in cells]
            if cells[0][1] == 0:
                rollouts = sampler.greedy(batch)
            else:
                ids = [problem * samples + sample for problem, sample in cells]
                drawn = sampler.sample(batch, 1, temperature, config.seed + EVALUATION_SEED, ids=ids)
                rollouts = [rollout for (rollout,) in drawn]
            by_function = rewarder.compute(batch, rollouts, state, key=("evaluation", number))
            judged = _judge(rewarder, by_function)
            for i, ((problem, sample), example, rollout) in enumerate(zip(cells, batch, rollouts, strict=True)):
                outcome = rollout.outcome
                called = (0, 0) if outcome is None else (outcome.tool_calls, outcome.tool_failures)
                counts[:, problem, sample] = rollout.drawn_tokens, not rollout.finished, *called
                rewards[:, problem, sample] = by_function[:, i]
                verdict = {name: values[i].item() for name, values in judged.items()}
                verdict |= rewards_by_name(rewarder.names, by_function[:, i].tolist())
                completions.append(_line(example, sample, rollout, verdict))
    rewards = sum(gather(rewards))
    by_source = _by_source(rewards[:, :, 0], [example.source for example in examples], rewarder)
    return _metrics(sum(gather(counts)), rewards, rewarder) | by_source, completions


def _by_source(greedy: np.ndarray, sources: list[str], rewarder: Rewarder) -> dict[str, float]:
    """Return accuracy and reward of each dataset's problems, where several are mixed: [functions, problems]."""
    metrics = {}
    for source in sorted({*sources} - {""}):
        rewards = greedy[:, [other == source for other in sources]]
        if rewarder.verdicts:
            metrics[f"eval_{source}_accuracy"] = rewarder.is_correct(rewards).mean().item()
        metrics[f"eval_{source}_reward"] = Stats.of(total_rewards(torch.from_numpy(rewards), rewarder.weights)).mean
    return metrics


def _line(example: Example, sample: int, rollout: Rollout, verdict: dict[str, Any]) -> dict[str, Any]:
    return {
        "problem": example.index,
        "sample": sample,
        "prompt": example.prompt,
        "completion": rollout.text,
        **rollout.conversation,
        "answer": example.gold,
        **verdict,
        "tokens": rollout.drawn_tokens,
        "finished": rollout.finished,
    }


def with_pictures(completions: Sequence[dict[str, Any]], examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Return completions of `evaluate` with the bytes of their prompts' pictures, which ranks do not exchange."""
    by_problem = {example.index: pictures_of(example.prompt_ids) for example in examples}
    pictures = {problem: {"pictures": found} for problem, found in by_problem.items() if found}
    return [completion | pictures.get(completion["problem"], {}) for completion in completions]


def check_verdicts(config: RewardedConfig, rewards: Mapping[str, Any]) -> None:
    """Raise ConfigError if samples for avg@k and pass@k are asked for and no reward of join_rewards is a verdict."""
    config.check(
        config.num_generations_eval == 0 or bool(verdicts(rewards)),
        num_generations_eval=(
            f"avg@k and pass@k count right answers, and none of {', '.join(rewards)} is a verdict: use 0, or set "
            "FUNCTION.is_verdict = True where a reward above 0 means right"
        ),
    )


def best_metric(config: TrainerConfig, rewards: Mapping[str, Any]) -> str:
    """Return the metric by which a checkpoint is the best. Raises ConfigError if the evaluation has no such metric."""
    kinds = ["accuracy", "reward"] if verdicts(rewards) else ["reward"]
    names = kinds + [f"rewards/{name}/mean" for name in reward_names(rewards, config)]
    names += ["format"] * bool(full_rewards(rewards))
    tested = [part.label for part in parts_of(config) if part.label and part.config.dataset_test_split]
    names += [f"{label}_{kind}" for label in tested for kind in kinds]
    if config.num_generations_eval:
        names += [f"avg@{config.num_generations_eval}", *(f"pass@{k}" for k in config.ks)]
    name = names[0] if config.metric_for_best_model is None else config.metric_for_best_model.removeprefix("eval_")
    if name not in names:
        raise ConfigError(
            f"metric_for_best_model={config.metric_for_best_model!r}: no number of the evaluation: use one of "
            f"{', '.join(names)}"
        )
    return f"eval_{name}"


def pass_at_k(correct: np.ndarray, n: int, k: int) -> np.ndarray:
    """Estimate each problem's chance that any of k samples is right, where `correct` [problems] of n samples were. The
    unbiased estimate 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1), its quotient as the
    product of (n - c - j) / (n - j) over j < k: k factors from 0 to 1, where factorials would overflow."""
    j = np.arange(k)
    return 1 - np.prod(np.maximum(n - correct[:, None] - j, 0) / (n - j), axis=1)


def _judge(rewarder: Rewarder, by_function: torch.Tensor) -> dict[str, np.ndarray]:
    """Return verdicts, or without any rewards: [functions, completions] -> [completions] by name."""
    rewards = by_function.numpy()
    if rewarder.verdicts:
        judged = {"correct": rewarder.is_correct(rewards)}
    else:
        judged = {"reward": total_rewards(by_function, rewarder.weights).numpy()}
    return judged | ({"format": rewarder.has_format(rewards)} if rewarder.full_rewards else {})


def _metrics(counts: np.ndarray, rewards: np.ndarray, rewarder: Rewarder) -> dict[str, float]:
    """Compute the metrics from [length, clipped, calls, failed calls] and [functions], both x problems x (greedy,
    samples)."""
    length, clipped, calls, failures = counts[:, :, 0]
    greedy, count, config, metrics = rewards[:, :, 0], len(length), rewarder.config, {}
    if rewarder.verdicts:
        accuracy = rewarder.is_correct(greedy).mean().item()
        metrics |= {"eval_accuracy": accuracy, "eval_accuracy_se": math.sqrt(accuracy * (1 - accuracy) / count)}
    metrics["eval_n"] = count
    if rewarder.full_rewards:
        metrics["eval_format"] = rewarder.has_format(greedy).mean().item()
    metrics |= {
        "eval_completions/mean_length": length.mean().item(),
        "eval_completions/clipped_ratio": clipped.mean().item(),
        "eval_num_tokens": counts[0].sum().item(),
    }
    if config.has_turns:
        metrics["eval_tools/call_frequency"] = calls.mean().item()
        metrics["eval_tools/failure_frequency"] = failures.sum().item() / max(calls.sum().item(), 1)
    if samples := counts.shape[2] - 1:
        solved = rewarder.is_correct(rewards[:, :, 1:]).sum(axis=1)
        estimates = {f"avg@{samples}": solved / samples}
        estimates |= {f"pass@{k}": pass_at_k(solved, samples, k) for k in config.ks}
        for name, values in estimates.items():
            metrics[f"eval_{name}"] = values.mean().item()
            metrics[f"eval_{name}_se"] = values.std(ddof=1).item() / math.sqrt(count) if count > 1 else math.nan
    total = Stats.of(total_rewards(torch.from_numpy(greedy), rewarder.weights))
    metrics |= {"eval_reward": total.mean, "eval_reward_se": total.std / math.sqrt(max(1, total.count))}
    by_name = zip(rewarder.names, greedy, strict=True)
    return metrics | {f"eval_rewards/{name}/mean": Stats.of(values).mean for name, values in by_name}
