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


def progress_bar(run: Run) -> tqdm:
    """Return the run's remaining steps, from 1, as a bar on rank 0."""
    done, steps = run.progress.step, run.config.max_steps
    return tqdm(range(done + 1, steps + 1), desc="grpo", initial=done, total=steps, disable=run.rank != 0)


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
        tqdm.write(
            f"step {step}: held-out accuracy {metrics['eval_accuracy']:.3f} ± {metrics['eval_accuracy_se']:.3f} "
            f"(n={metrics['eval_n']}), format {metrics['eval_format']:.3f}"
            + "".join(f", pass@{k} {metrics[f'eval_pass@{k}']:.3f}" for k in run.config.ks),
            file=sys.stderr,
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
    bar.set_postfix_str(
        f"reward {metrics['reward']:.2f}, accuracy {'-' if accuracy is None else f'{accuracy:.4}'}, "
        f"kl {metrics.get('kl', 0.0):.3f}, {metrics['tokens_per_second']:.0f} tokens/s, "
        f"reference {metrics.get('time/wait_ref', 0.0):.2f} s",
        refresh=False,
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
