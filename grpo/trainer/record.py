"""A run's record and screen: each step's metrics and completions, the progress bar, each evaluation, the end."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from grpo.client.server_errors import ServersLost
from grpo.data.records import StepBatch
from grpo.data.responder import show_answer
from grpo.rewards.functions import TrainerState
from grpo.run.collective import gather
from grpo.run.exit import EndRun
from grpo.run.folder import save_model
from grpo.run.recorder import BAD_STEPS
from grpo.trainer.evaluation import evaluate, with_pictures
from grpo.trainer.out_of_memory import EVALUATION, explain_shortage, raise_if_short
from grpo.trainer.rewarding import RewardsLost
from grpo.trainer.setup import Run
from grpo.trainer.step_result import StepResult

log = logging.getLogger(__name__)

FLAT_STEPS = 5
"""steps in a row without signal after which a warning says so, once until a step has signal again"""
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
        disable=run.ranks.rank != 0 or not sys.stderr.isatty(),
        bar_format="{n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}",  # with the numbers it fits 80 columns
    )


def evaluate_first(run: Run) -> dict[str, float]:
    """Evaluate the policy before the first step of a run that begins, and record the metrics; else return none."""
    if run.progress.step > 0 or not run.evaluation_is_due(0):
        return {}
    evaluated = evaluate_policy(run, 0)
    if run.recorder:
        run.recorder.metrics(0, evaluated)
    return evaluated


@contextmanager
def raised_later(lost: list[Exception]) -> Iterator[None]:
    """Put the error of lost servers or rewards into `lost`: the loop raises it once the step is recorded."""
    try:
        yield
    except (ServersLost, RewardsLost) as error:
        lost.append(error)


def evaluate_policy(run: Run, step: int) -> dict[str, float]:
    """Return the metrics of an evaluation after this step, and record its first greedy answers.

    All ranks call it together. Raises OutOfMemory, RewardsLost.
    """
    with explain_shortage(f"{EVALUATION} after step {step}", EVALUATION, run.config, run.checkpoints.way_on):
        log.info("step %d: evaluating %d held-out problems", step, len(run.inputs.held_out))
        run.sampler.update_weights(step)
        state = TrainerState(step, run.config.max_steps)
        metrics, completions = evaluate(
            run.sampler, run.inputs.held_out, run.rewarder, run.config, run.ranks.rank, run.ranks.size, state
        )
    greedy = chain.from_iterable(gather([completion for completion in completions if completion["sample"] == 0]))
    if run.recorder:
        recorded = sorted(greedy, key=itemgetter("problem"))[:EVAL_RECORDED]
        run.recorder.completions(step, "eval", with_pictures(recorded, run.inputs.held_out))
        log.info("step %d: %s", step, describe_evaluation(metrics))
    return metrics


def describe_evaluation(metrics: Mapping[str, float]) -> str:
    """Return the numbers of an evaluation in a line: accuracy if a reward function is a verdict, else rewards."""

    def pair(name: str) -> str:
        return f"{metrics[name]:.3f} ± {metrics[f'{name}_se']:.3f} (n={metrics['eval_n']})"

    if "eval_accuracy" in metrics:
        parts = [f"held-out accuracy {pair('eval_accuracy')}"]
    else:
        parts = [f"held-out reward {pair('eval_reward')}"]
        by_function = [name for name in metrics if name.startswith("eval_rewards/")]
        if len(by_function) > 1:
            parts += [f"{name.split('/', 1)[1].removesuffix('/mean')} {metrics[name]:.3f}" for name in by_function]
    if "eval_format" in metrics:
        parts.append(f"format {metrics['eval_format']:.3f}")
    passed = [name for name in metrics if name.startswith("eval_pass@") and not name.endswith("_se")]
    return ", ".join(parts + [f"{name.removeprefix('eval_')} {metrics[name]:.3f}" for name in passed])


def record_step(
    run: Run, bar: tqdm, step: int, batch: StepBatch, result: StepResult, evaluated: Mapping[str, float]
) -> None:
    """Write the step's metrics and a group of its completions, and say what went wrong in it.

    All ranks call it together. `evaluated` has the metrics of the last evaluation, for the bar; empty before the first.
    """
    skipped = [] if result.applied else list(chain.from_iterable(gather(batch.to_lines())))
    if run.recorder is None:
        return
    metrics = result.metrics
    run.recorder.metrics(step, metrics)
    if run.pool_run is not None:
        run.pool_run.end_step(result.drifts)
    samples = batch.to_lines(1)
    run.recorder.completions(step, "train", samples)
    numbers = _short(metrics, evaluated)
    bar.set_postfix_str(numbers, refresh=False)
    if bar.disable:  # a file gets a line a step
        log.info("step %d of %d: %s", step, run.config.max_steps, numbers)
    if step % SAMPLE_STEPS == 1:
        log.info(
            "step %d, reward %.2f of this completion:\n%s\n%s",
            *(step, samples[0]["reward"], _shorten(samples[0]["prompt"]), _shorten(transcript(samples[0]))),
        )
    if skipped:
        run.recorder.bad_step(step, skipped)
        kept = f"its {len(skipped)} completions are in {run.folder / BAD_STEPS}"
        log.warning("step %d is skipped: its loss or gradient is not finite; %s", step, kept)
    if result.masked:
        cut = f"all {result.completions} completions are cut at max_completion_length"
        log.warning("step %d does nothing: %s, and mask_truncated_completions leaves them out", step, cut)
    if not result.rewarded:
        names = ", ".join(run.inputs.rewards)
        where = "see 'Steps have no reward' in docs/troubleshooting.md"
        log.warning("step %d has no reward: %s returned None for every completion: %s", step, names, where)
    failed = metrics.get("tools/failure_frequency", 0.0)
    if failed > 0.5 and not run.progress.most_calls_failed:
        log.warning(
            "step %d: %.0f %% of the calls of tools failed: their answers are in %s, and the first failure of a tool "
            "that raised is above, or in the log of a pool's worker",
            *(step, 100 * failed, run.folder / "completions.jsonl"),
        )
    run.progress.most_calls_failed = failed > 0.5
    if run.progress.flat_steps == FLAT_STEPS:
        estimator, reason = run.config.advantage_estimator, "all completions of each prompt earned the same reward"
        if estimator != "grpo":
            reason = f"every completion had an advantage of 0 by {estimator}"
        log.warning(
            "in steps %d to %d %s (mean %.3g), so they taught nothing: see 'The reward is flat' in "
            "docs/troubleshooting.md",
            *(step - FLAT_STEPS + 1, step, reason, metrics["reward"]),
        )


def transcript(sample: Mapping[str, Any]) -> str:
    """Return a sample's completion; with tools or an environment turn by turn, answers in brackets."""
    if "messages" not in sample:
        return sample["completion"]
    lines: list[str] = []
    for message in sample["messages"]:
        if message["role"] != "assistant":
            lines.append(show_answer(message))
            continue
        calls = [call["function"] for call in message.get("tool_calls", ())]
        lines += [message["content"]] * bool(message["content"])
        lines += [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n".join(lines)


def _short(metrics: Mapping[str, float], evaluated: Mapping[str, float]) -> str:
    """Return a step's most important numbers, and the last evaluation's as held-out, in some 60 characters."""
    words = [f"{metrics['step_time']:.1f} s", f"reward {metrics['reward']:.2f}"]
    if "eval_accuracy" in evaluated:
        words.append(f"held-out {evaluated['eval_accuracy']:.1%}")
    elif "eval_reward" in evaluated:
        words.append(f"held-out {evaluated['eval_reward']:.2f}")
    if "kl" in metrics:
        words.append(f"kl {metrics['kl']:.3f}")
    words.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
    if (waited := metrics.get("time/wait_ref", 0.0)) > 0.05:
        words.append(f"reference {waited:.1f} s")
    return ", ".join(words)


def _shorten(text: str) -> str:
    half = _LONGEST_SAMPLE // 2
    return text if len(text) <= _LONGEST_SAMPLE else f"{text[:half]} ... {text[-half:]}"


MOST_BAD_STEPS = 5  # in a row: one or two may be a reward out of scale; five cost little, and nobody watches at night


@contextmanager
def saved_at_the_end(run: Run) -> Iterator[None]:
    """Save a checkpoint if the run ends early, and raise EndRun with its reason and how to continue.

    EndRun, ServersLost and RewardsLost reach every rank after the same step, so all of them save together. Memory ends
    on one rank alone, which can save nothing: raises OutOfMemory. Weights that are not finite are not worth saving.
    However the run ends, its record is closed: a service that is not told of the end says that the run crashed.
    """
    try:
        yield
    except (EndRun, ServersLost, RewardsLost) as end:
        # What a signal stops may be a wait.
        code = end.code if isinstance(end, EndRun) else 128 + run.stop.asked if run.stop.asked else 1
        way_on = run.checkpoints.leave(run.engine, run.progress)
        raise EndRun(f"{end}; {way_on}", code, getattr(end, "traceback", "")) from end
    except FloatingPointError as error:
        raise EndRun(f"{error}: lower learning_rate; {run.checkpoints.way_on()}") from error
    except (RuntimeError, MemoryError) as error:
        clock, step = run.ranks.watchdog.clock, f"step {run.ranks.watchdog.step}"
        phase = clock.open[-1] if clock.open else ""
        where = f"{phase} of {step}" if phase else f"{step}, after {clock.ended or 'its begin'}"
        raise_if_short(error, where, phase, run.config, run.checkpoints.way_on())
        raise
    finally:
        if run.pool_run is not None:
            run.pool_run.close()
        if run.recorder:
            run.recorder.close()


def raise_if_over(run: Run, step: int, result: StepResult) -> None:
    """Raise EndRun if too many steps in a row taught the policy nothing, or a signal asks the run to stop."""
    config, bad_steps = run.config, run.progress.bad_steps
    if bad_steps and len(bad_steps) % MOST_BAD_STEPS == 0:
        if result.masked:
            reason = (
                f"every completion of the last was cut at max_completion_length={config.max_completion_length}: "
                "begin a new run with a larger one, or without mask_truncated_completions"
            )
        elif result.applied:
            reason = (
                f"in the last {', '.join(run.inputs.rewards)} returned None for every completion: read some in "
                f"{run.folder / 'completions.jsonl'}, and make sure that one of the functions applies to them"
            )
        else:
            reason = (
                "the loss or gradient of the last was not finite, so it was not applied: completions are in "
                f"{run.folder / BAD_STEPS}, look there for rewards out of scale, or begin a new run with a lower "
                "learning_rate"
            )
        raise EndRun(f"steps {', '.join(map(str, bad_steps))} taught the policy nothing: {reason}")
    if result.signal and step < config.max_steps:
        raise EndRun(f"stopped by signal {result.signal}", 128 + result.signal)


def finish(run: Run) -> None:
    """Save the model of a run that is done, and leave the other ranks."""
    if run.recorder:
        save_model(
            run.engine.module,
            run.inputs.tokenizer,
            run.folder / "model",
            run.config,
            run.config.max_steps,
            run.inputs.processor,
        )
    run.ranks.watchdog.close()
    dist.barrier()  # nobody leaves while rank 0 may still need the others' sockets
    if run.client is not None:
        run.client.close()
