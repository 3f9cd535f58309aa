"""A step's result: its metrics over all ranks, and the coefficients of the next step."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.algorithm.loss import adapt_beta, adapt_entropy_coef
from grpo.config.loss_settings import LossSection
from grpo.data.records import Rollout, StepBatch
from grpo.run.collective import gather
from grpo.run.metrics import PhaseClock, Stats, add_stats, step_metrics
from grpo.run.recorder import BAD_STEPS
from grpo.trainer.setup import Run
from grpo.trainer.step import DRIFT, split_masked

_LOGGED = "log_metric:"  # before the name of a metric that reward functions log, among a step's numbers
_FAILURES = "tool_failures"  # the calls of tools that failed, among a step's numbers


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a step, the same on every rank."""

    metrics: dict[str, float]  # by TRL's names
    applied: bool  # False if the loss or gradient was not finite: DeepSpeed left the weights as they were
    fault: str  # why the step taught the policy nothing, and what helps; empty if it taught something
    drifts: list[tuple[int, float, int]]  # group id, mean distance of sampler and policy, tokens; empty without a pool
    clash: str  # which metric of the user's has the name of another, and what helps; empty for none


def rates(run: Run) -> dict[str, float]:
    """Return the metrics of the coming step that its end changes: the learning rate, and the step after which the
    policy became the reference, 0 for none."""
    ref_step = {"ref_step": run.progress.ref_step} if run.publisher else {}
    return {"learning_rate": run.schedule.get_last_lr()[0], **ref_step}


def step_result(
    run: Run, step: int, batch: StepBatch, *, of_update: dict[str, Stats], applied: dict[str, float], clock: PhaseClock
) -> StepResult:
    """Gather the step's numbers from all ranks, and carry them into the run's progress. All ranks call it together."""
    numbers: dict[str, Stats] = {}
    add_stats(numbers, _numbers(run, step, batch, clock))
    by_rank = gather((of_update, numbers))
    of_updates: dict[str, Stats] = {}
    others: dict[str, Stats] = {}
    for of_rank, numbers_of_rank in by_rank:
        add_stats(of_updates, of_rank)
        add_stats(others, numbers_of_rank)
    everyone = of_updates | others
    masked = "loss" not in everyone
    is_applied = masked or run.engine.was_step_applied()
    rewarded = everyone["reward"].count > 0
    teaches = rewarded or bool(run.config.teacher_servers)
    completions = everyone["completions/mean_length"].count
    drew = everyone["completions/mean_length"].total > 0
    fault = _fault(run, completions, drew=drew, masked=masked, applied=is_applied, rewarded=teaches)
    learns, config, progress = is_applied and not masked, run.config, run.progress
    if (step - 1) % config.updates_per_round < config.steps_per_generation:  # the first time that they are trained on
        progress.num_tokens += int(everyone["tokens"].total)
    progress.masked_steps += masked
    is_flat = rewarded and everyone["frac_reward_zero_std"].mean == 1 and not run.config.teacher_servers
    progress.flat_steps = progress.flat_steps + 1 if is_flat else 0
    progress.bad_steps = [*progress.bad_steps, step] if fault else []
    own = _metrics(run, everyone, applied=applied, masked=masked) | _adapt(run, everyone, learns)
    taken = others | own
    clashes = [f"the loss returns {name!r}" for name in sorted(of_updates) if _is_taken(name, taken)]
    metrics = {"loss": 0.0, **step_metrics(everyone), **own}
    for name, numbers in _with_prefix(everyone, _LOGGED):
        if _is_taken(name, metrics):
            clashes.append(f"log_metric: a reward function logs {name!r}")
        else:
            metrics[name] = numbers.mean
    clash = f"{clashes[0]}, a metric that the run has: choose another name" if clashes else ""
    drifts = [
        (int(group), numbers.mean, numbers.count)
        for group, numbers in _with_prefix(everyone, DRIFT)
        if math.isfinite(numbers.mean)
    ]
    return StepResult(metrics=metrics, applied=is_applied, fault=fault, drifts=drifts, clash=clash)


def _fault(run: Run, completions: int, *, drew: bool, masked: bool, applied: bool, rewarded: bool) -> str:
    if masked and not (drew and run.config.mask_truncated_completions):
        return (
            f"does nothing: none of its {completions} completions has a token to train on: see what became of them in "
            f"{run.folder / 'completions.jsonl'}"
        )
    if masked:
        return (
            f"does nothing: all {completions} completions are cut, at max_completion_length="
            f"{run.config.max_completion_length} or at another limit of an episode, and mask_truncated_completions "
            "leaves them out: begin a new run with larger ones, or without mask_truncated_completions"
        )
    if not applied:
        return (
            f"is skipped: its loss or gradient is not finite; its {completions} completions are in "
            f"{run.folder / BAD_STEPS}: look for rewards out of scale there, or begin a new run with a lower "
            "learning_rate"
        )
    if not rewarded:
        return (
            f"has no reward: {', '.join(run.inputs.rewards)} returned None for every completion of "
            f"{run.folder / 'completions.jsonl'}: see 'Steps have no reward' in docs/troubleshooting.md"
        )
    return ""


def _is_taken(name: str, row: Mapping[str, Any]) -> bool:
    """Tell whether a row of metrics.jsonl has another value of this name, or may get one from an evaluation."""
    return name in row or name == "step" or name.startswith("eval_")


def _with_prefix(stats: Mapping[str, Stats], prefix: str) -> list[tuple[str, Stats]]:
    return [(name.removeprefix(prefix), numbers) for name, numbers in stats.items() if name.startswith(prefix)]


def _numbers(run: Run, step: int, batch: StepBatch, clock: PhaseClock) -> dict[str, Any]:
    """Return this rank's numbers of a step, for add_stats, and take what reward functions logged."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    by_name = dict(zip(run.rounds.rewarder.names, batch.by_function, strict=True))
    logged = {f"{_LOGGED}{name}:none": values for name, values in run.rounds.logged.items()}
    run.rounds.logged.clear()
    return {
        "reward": batch.rewards,
        "reward_std:std": batch.rewards,
        "reward_std_within_groups": [Stats.of(group).std for group in batch.rewards],
        "frac_reward_zero_std": ~batch.signal,
        **{f"rewards/{name}/mean": rewards for name, rewards in by_name.items()},
        **{f"rewards/{name}/std:std": rewards for name, rewards in by_name.items()},
        **_by_source(batch, by_name),
        **stats_of_completions(rollouts),
        **tokens_of_completions(batch, run.config),
        "sampling/policy_lag": [step - 1 - rollout.policy_version for rollout in rollouts],
        **clock.seconds,
        # The fullest card is the one that fails.
        **{f"{name}:max": peak for name, peak in clock.memory.items()},
        "step_time": clock.total(),
        **logged,
    }


def tokens_of_completions(batch: StepBatch, config: LossSection) -> dict[str, list[int]]:
    """Return the tokens of each completion with its prompt, an episode's with its branches' prompts, and those of each
    that is trained on, for add_stats."""
    prompts = [
        [group.example.prompt_ids] if rollout.branches is None else [branch.prompt_ids for branch in rollout.branches]
        for group in batch.groups
        for rollout in group.rollouts
    ]
    drawn = [rollout.drawn_tokens for group in batch.groups for rollout in group.rollouts]
    trained, _ = split_masked(batch.samples, config)
    return {
        "tokens:none": [sum(map(len, of)) + own for of, own in zip(prompts, drawn, strict=True)],
        "trained_on:none": [sample.completion_tokens for sample in trained if sample.is_first],
    }


def _by_source(batch: StepBatch, by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rewards of each dataset's groups, where several are mixed: [groups, num_generations] by name."""
    sources = [group.example.source for group in batch.groups]
    return {
        f"rewards/{source}/{name}/mean": rewards[[other == source for other in sources]]
        for source in sorted({*sources} - {""})
        for name, rewards in by_name.items()
    }


def _metrics(
    run: Run, everyone: Mapping[str, Stats], *, applied: Mapping[str, float], masked: bool
) -> dict[str, float]:
    """Return the step's numbers that are no statistics of ranks."""
    config, progress = run.config, run.progress
    return {
        **failure_frequency(everyone),
        "grad_norm": 0.0 if masked else float(run.engine.get_global_grad_norm()),
        **applied,
        "skipped_steps": run.engine.skipped_steps,
        "num_tokens": progress.num_tokens,
        "tokens_per_second": everyone["tokens"].total / everyone["step_time"].mean,
        **({"resampled_groups": progress.resampled} if config.max_resample else {}),
        **({"masked_steps": progress.masked_steps} if config.mask_truncated_completions else {}),
    }


def _adapt(run: Run, everyone: Mapping[str, Stats], learns: bool) -> dict[str, float]:
    """Move the coefficients that follow from a step's numbers, and return them as metrics."""
    config, progress, metrics = run.config, run.progress, {}
    if config.kl_target is not None and "kl" in everyone:
        metrics["beta"] = progress.beta
        if learns:
            # A completion counts once, however often it is trained on.
            count, kl = everyone["trained_on"].count / config.num_iterations, everyone["kl"].mean
            progress.beta = adapt_beta(progress.beta, kl, sequences=count, target=config.kl_target)
    if config.use_adaptive_entropy and learns:
        progress.entropy = everyone["entropy_acted_on"].mean
        progress.entropy_coef = adapt_entropy_coef(progress.entropy_coef, progress.entropy, config)
    if config.has_entropy_bonus:
        metrics["entropy_coef"] = progress.entropy_coef  # the next step's, as TRL has it
    return metrics


def stats_of_completions(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the numbers of a rank's completions, for add_stats. Lengths count the tokens that the policy drew."""
    lengths = [rollout.drawn_tokens for rollout in rollouts]
    terminated = [rollout.drawn_tokens for rollout in rollouts if rollout.finished]
    stats = {
        "completions/mean_length": lengths,
        "completions/min_length:min": lengths,
        "completions/max_length:max": lengths,
        "completions/mean_terminated_length": terminated,
        "completions/min_terminated_length:min": terminated,
        "completions/max_terminated_length:max": terminated,
        "completions/clipped_ratio": [not rollout.finished for rollout in rollouts],
    }
    if outcomes := [rollout.outcome for rollout in rollouts if rollout.outcome is not None]:
        stats |= {
            "completions/mean_turns": [rollout.turns for rollout in rollouts],
            "tools/mean_length": [rollout.answer_tokens for rollout in rollouts],
            "tools/call_frequency": [outcome.tool_calls for outcome in outcomes],
            f"{_FAILURES}:none": [outcome.tool_failures for outcome in outcomes],
        }
    if episodes := [rollout for rollout in rollouts if None not in (rollout.branches, rollout.outcome)]:
        stats |= _stats_of_episodes(episodes)
    return stats


def _stats_of_episodes(episodes: Sequence[Rollout]) -> dict[str, list[float]]:
    """Return the numbers of a rank's episodes of an agent: the means of its other numbers, too."""
    failures = Counter(episode.outcome.failure.replace(" ", "_") for episode in episodes if episode.outcome.failure)
    turns = [turn for episode in episodes for turn in episode.tree]
    begins = Counter(turn["begins"] for turn in turns if turn["begins"] is not None and turn["seen"])
    parts = defaultdict(list)
    for episode in episodes:
        for name, value in episode.outcome.parts.items():
            parts[f"agent/parts/{name}:mean"].append(value)  # whose own name may have a colon
    return {
        "agent/branches": [len(episode.branches) for episode in episodes],
        "agent/failure_frequency": [bool(episode.outcome.failure) for episode in episodes],
        **{f"agent/failures/{kind}:sum": [count] for kind, count in failures.items()},
        **{f"agent/begins/{reason}:sum": [count] for reason, count in begins.items()},
        "agent/other_temperature:sum": [sum(turn["seen"] and not turn["trained"] for turn in turns)],
        "agent/unseen:sum": [sum(turn["tokens"] > 0 and not turn["seen"] for turn in turns)],
        **parts,
    }


def failure_frequency(everyone: Mapping[str, Stats]) -> dict[str, float]:
    """Return the metric of a step's share of failed calls of tools: 0 without calls, no metric without tools."""
    if _FAILURES not in everyone:
        return {}
    return {"tools/failure_frequency": everyone[_FAILURES].total / max(1, everyone["tools/call_frequency"].total)}
