"""What is recorded and shown of a run: a step's metrics and completions, the progress bar, each evaluation."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from itertools import chain
from operator import itemgetter

from tqdm import tqdm

from grpo.rollouts.records import StepBatch
from grpo.run.collective import gather
from grpo.run.recorder import BAD_STEPS
from grpo.trainer.evaluation import evaluate
from grpo.trainer.numbers import StepResult
from grpo.trainer.out_of_memory import EVALUATION, explain_shortage
from grpo.trainer.setup import Run

log = logging.getLogger(__name__)

EVAL_RECORDED = 32
"""held-out answers in the record of each evaluation"""
SAMPLE_STEPS = 50
"""steps from one completion in the log to the next"""
_LONGEST_SAMPLE = 600
"""characters of a prompt or completion in the log"""


def progress_bar(run: Run) -> tqdm:
    """Return the run's remaining steps, from 1, as a bar where rank 0 writes to a terminal."""
    done, steps = run.progress.step, run.config.max_steps
    return tqdm(
        range(done + 1, steps + 1),
        initial=done,
        total=steps,
        disable=run.rank != 0 or not sys.stderr.isatty(),
        bar_format="{n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}",  # with the numbers it fits 80 columns
    )


def evaluate_policy(
    run: Run, step: int, is_correct: Callable[[str, str], bool], has_format: Callable[[str, str], bool]
) -> dict[str, float]:
    """Return the metrics of an evaluation after this step, and record its first greedy answers.

    All ranks call it together. Raises OutOfMemory.
    """
    with explain_shortage(f"{EVALUATION} after step {step}", EVALUATION, run.config, run.checkpoints.way_on):
        run.sampler.update_weights(step)
        metrics, completions = evaluate(
            run.sampler,
            run.held_out,
            is_correct,
            has_format,
            run.config,
            run.rank,
            run.world_size,
        )
    greedy = chain.from_iterable(gather([completion for completion in completions if completion["sample"] == 0]))
    if run.recorder:
        run.recorder.completions(step, "eval", sorted(greedy, key=itemgetter("problem"))[:EVAL_RECORDED])
        log.info(
            "step %d: held-out accuracy %.3f ± %.3f (n=%d), format %.3f%s",
            *(step, metrics["eval_accuracy"], metrics["eval_accuracy_se"], metrics["eval_n"], metrics["eval_format"]),
            "".join(f", pass@{k} {metrics[f'eval_pass@{k}']:.3f}" for k in run.config.ks),
        )
    return metrics


def record_step(run: Run, bar: tqdm, step: int, batch: StepBatch, result: StepResult, accuracy: float | None) -> None:
    """Write the step's metrics and a group of its completions, and say what went wrong in it.

    All ranks call it together. `accuracy` is that of the last evaluation, for the bar.
    """
    skipped = [] if result.applied else list(chain.from_iterable(gather(batch.to_lines())))
    if run.recorder is None:
        return
    metrics = result.metrics
    run.recorder.metrics(step, metrics)
    run.recorder.completions(step, "train", batch.to_lines(1))
    numbers = _short(metrics, accuracy)
    bar.set_postfix_str(numbers, refresh=False)
    if bar.disable:  # a file gets a line a step
        log.info("step %d of %d: %s", step, run.config.max_steps, numbers)
    if step % SAMPLE_STEPS == 1:
        sample = batch.to_lines(1)[0]
        log.info(
            "step %d, reward %.2f of this completion:\n%s\n%s",
            *(step, sample["reward"], _shorten(sample["prompt"]), _shorten(sample["completion"])),
        )
    if skipped:
        run.recorder.bad_step(step, skipped)
        kept = f"its {len(skipped)} completions are in {run.folder / BAD_STEPS}"
        log.warning("step %d is skipped: its loss or gradient is not finite; %s", step, kept)
    if result.masked:
        cut = f"all {result.completions} completions are cut at max_completion_length"
        log.warning("step %d does nothing: %s, and mask_truncated_completions leaves them out", step, cut)
    if not result.rewarded:
        names = ", ".join(run.reward_names)
        log.warning("step %d has no reward: %s returned None for every completion", step, names)


def _short(metrics: dict[str, float], accuracy: float | None) -> str:
    """Return a step's most important numbers in some 50 characters."""
    words = [f"{metrics['step_time']:.1f} s", f"reward {metrics['reward']:.2f}"]
    if accuracy is not None:
        words.append(f"accuracy {accuracy:.1%}")
    if "kl" in metrics:
        words.append(f"kl {metrics['kl']:.3f}")
    words.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
    if (waited := metrics.get("time/wait_ref", 0.0)) > 0.05:
        words.append(f"reference {waited:.1f} s")
    return ", ".join(words)


def _shorten(text: str) -> str:
    half = _LONGEST_SAMPLE // 2
    return text if len(text) <= _LONGEST_SAMPLE else f"{text[:half]} ... {text[-half:]}"
