"""A run's record and screen: each step's metrics and completions, the progress bar, each evaluation, the end."""

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import itemgetter

import torch.distributed as dist
from tqdm import tqdm

from grpo.client.server_errors import ServersLost
from grpo.config.errors import RewardError
from grpo.config.user_code import user_code
from grpo.data.records import StepBatch
from grpo.model.sharded import weights_to_save
from grpo.rewards.functions import TrainerState, format_user_stack
from grpo.run.collective import from_first, gather
from grpo.run.exit import FOR_GOOD, EndRun, code_of
from grpo.run.folder import save_model, use_best
from grpo.run.run_folder import damage, with_error
from grpo.sampling.generate import LocalSampler
from grpo.trainer.deepspeed_engine import whole_weights
from grpo.trainer.evaluation import evaluate, with_pictures
from grpo.trainer.out_of_memory import EVALUATION, explain_shortage
from grpo.trainer.rewarding import RewardsLost, fail_together
from grpo.trainer.setup import Run
from grpo.trainer.step_result import StepResult

log = logging.getLogger(__name__)

FLAT_STEPS = 5  # steps in a row without signal after which a warning says so, once until a step has signal again
MOST_BAD_STEPS = 5  # steps in a row that teach nothing, after which the run ends: a few may be a reward out of scale
SAMPLE_STEPS = 50  # steps from one completion in the log to the next
ASKED = "save", "stop", None  # what a callback may ask for: a checkpoint, an end after this step, nothing
_HALF_SAMPLE = 300  # characters of a prompt's or completion's begin, and of its end, in the log


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


@contextmanager
def raised_later(lost: list[Exception]) -> Iterator[None]:
    """Put the error of lost servers or rewards into `lost`, for raise_if_over once the step is recorded."""
    try:
        yield
    except (ServersLost, RewardsLost) as error:
        lost.append(error)


def evaluate_policy(run: Run, step: int) -> dict[str, float]:
    """Evaluate after this step, record and return the metrics. All ranks call it. Raises OutOfMemory, RewardsLost."""
    config, examples, ranks = run.config, run.inputs.held_out, run.ranks
    with explain_shortage(lambda: (f"{EVALUATION} after step {step}", EVALUATION), config, run.checkpoints.way_on):
        log.info("step %d: evaluating %d held-out problems", step, len(examples))
        run.sampler.update_weights(step)
        state = TrainerState(step, config.max_steps)
        with whole_weights(run.engine):
            metrics, completions = evaluate(
                run.sampler, examples, run.rounds.rewarder, rank=ranks.rank, world_size=ranks.size, state=state
            )
    greedy = chain.from_iterable(gather([completion for completion in completions if completion["sample"] == 0]))
    if run.recorder:
        recorded = sorted(greedy, key=itemgetter("problem"))[: config.log_eval_completions]
        run.recorder.completions(step, "eval", with_pictures(recorded, examples))
        if step == 0:
            run.recorder.metrics(0, metrics)
        log.info("step %d: %s", step, describe_evaluation(metrics))
    return metrics


def evaluate_if_missing(run: Run) -> dict[str, float]:
    """Return the last step's evaluation. Make it if it is due and missing: the run begins, a reward failed in it and
    ended the run, or a callback has just made the step the last one."""
    step, evaluated = run.progress.step, run.progress.evaluated
    if evaluated or not run.evaluation_is_due(step):
        return evaluated
    evaluated = evaluate_policy(run, step)
    if step > 0:
        run.progress.evaluated = evaluated
        if run.recorder:
            run.recorder.complete(step, evaluated)
    return evaluated


def describe_evaluation(metrics: Mapping[str, float]) -> str:
    """Return the numbers of an evaluation in a line: accuracy if a reward function is a verdict, else rewards."""
    kind, others = ("accuracy", ()) if "eval_accuracy" in metrics else ("reward", ("eval_rewards/",))
    parts = [f"held-out {kind} {with_error(metrics, f'eval_{kind}')} (n={metrics['eval_n']})"]
    for name, value in metrics.items():
        if name.startswith(("eval_format", "eval_pass@", *others)) and not name.endswith("_se"):
            parts.append(f"{name.removeprefix('eval_').removeprefix('rewards/').removesuffix('/mean')} {value:.3f}")
    return ", ".join(parts)


def record_step(
    run: Run, bar: tqdm, step: int, batch: StepBatch, result: StepResult, *, evaluated: Mapping[str, float]
) -> None:
    """Write the step's metrics and a group of its completions, and say what went wrong in it. `evaluated` has the
    metrics of the last evaluation, for the bar. All ranks call it together."""
    names = run.rounds.rewarder.names
    skipped = [] if result.applied else list(chain.from_iterable(gather(batch.to_lines(names))))
    if run.recorder is None:
        return
    run.recorder.metrics(step, result.metrics)
    if run.pool_run is not None:
        run.pool_run.end_step(result.drifts)
    samples = batch.to_lines(names, count=1)
    run.recorder.completions(step, "train", samples)
    numbers = describe_step(result.metrics, evaluated)
    bar.set_postfix_str(numbers, refresh=False)
    if bar.disable:  # a file gets a line a step
        log.info("step %d of %d: %s", step, run.config.max_steps, numbers)
    if step % SAMPLE_STEPS == 1:
        texts = "\n".join(_shorten(samples[0][name]) for name in ("prompt", "completion"))
        reward = samples[0]["reward"]
        of_reward = "" if math.isnan(reward) else f", reward {reward:.2f} of this completion"
        log.info("step %d%s:\n%s", step, of_reward, texts)
    if skipped:
        run.recorder.bad_step(step, skipped)
    _warn(run, step, result)


def call_back(run: Run, step: int, batch: StepBatch, result: StepResult) -> str | None:
    """Return the request of the user's callback, called on rank 0 with the step's row of metrics.jsonl and all its
    completions; None without one. All ranks call this together. Raises RewardsLost if it raises, or asks for more."""
    if run.inputs.callback is None:
        return None
    completions = list(chain.from_iterable(gather(batch.to_lines(run.rounds.rewarder.names))))
    asked = None
    with fail_together():
        if run.recorder is not None:
            asked = _call(run.inputs.callback, step, result.metrics, completions)
    return from_first(asked)


def _call(callback: Callable, step: int, metrics: dict, completions: list[dict]) -> str | None:
    try:
        with user_code("callback", step):
            asked = callback(step=step, metrics=dict(metrics), completions=completions)
    except Exception as error:  # the user's code may raise anything
        message = f"callback raised {type(error).__name__} after step {step}: {error}"
        raise RewardError(message, format_user_stack(error)) from error
    if asked not in ASKED:
        raise RewardError(f"callback returned {asked!r} after step {step}: return 'save', 'stop' or None")
    return asked


def _warn(run: Run, step: int, result: StepResult) -> None:
    if result.fault:
        log.warning("step %d %s", step, result.fault)
    failed = result.metrics.get("tools/failure_frequency", 0.0)
    if failed > 0.5 and not run.progress.most_calls_failed:
        log.warning(
            "step %d: %.0f %% of the calls of tools failed: their answers are in %s, and the first failure of a tool "
            "that raised is above, or in the log of a pool's worker",
            step,
            100 * failed,
            run.folder / "completions.jsonl",
        )
    run.progress.most_calls_failed = failed > 0.5
    if run.progress.flat_steps == FLAT_STEPS:
        log.warning(
            "in steps %d to %d every completion had an advantage of 0 (mean reward %.3g), so they taught nothing: see "
            "'The reward is flat' in docs/troubleshooting.md",
            step - FLAT_STEPS + 1,
            step,
            result.metrics["reward"],
        )


def describe_step(metrics: Mapping[str, float], evaluated: Mapping[str, float]) -> str:
    """Return a step's most important numbers, and the last evaluation's as held-out, in some 60 characters."""
    words = [f"{metrics['step_time']:.1f} s"]
    if not math.isnan(metrics["reward"]):  # a teacher may be alone
        words.append(f"reward {metrics['reward']:.2f}")
    if "eval_accuracy" in evaluated:
        words.append(f"held-out {evaluated['eval_accuracy']:.1%}")
    elif evaluated:
        words.append(f"held-out {evaluated['eval_reward']:.2f}")
    if "kl" in metrics:
        words.append(f"kl {metrics['kl']:.3f}")
    if "distillation/reverse_kl" in metrics:
        words.append(f"from the teacher {metrics['distillation/reverse_kl']:.3f}")
    words.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
    for name, phase in (("reference", "wait_ref"), ("teacher", "wait_teacher")):
        if (waited := metrics.get(f"time/{phase}", 0.0)) > 0.05:
            words.append(f"{name} {waited:.1f} s")
    return ", ".join(words)


def _shorten(text: str) -> str:
    return text if len(text) <= 2 * _HALF_SAMPLE else f"{text[:_HALF_SAMPLE]} ... {text[-_HALF_SAMPLE:]}"


@contextmanager
def saved_at_the_end(run: Run) -> Iterator[None]:
    """Save a checkpoint if the run ends early, and raise EndRun with its reason and how to continue. EndRun,
    ServersLost and RewardsLost reach every rank after the same step, so all of them save together. Memory ends on one
    rank alone, which can save nothing: raises OutOfMemory. Weights that are not finite are not worth saving. However
    the run ends, its record is closed: a service that is not told of the end says that the run crashed."""
    have_all_ended = False
    # transformers' generate, also of a run with another setting whose model needs it.
    whole = type(run.sampler) is LocalSampler
    with explain_shortage(partial(_place, run), run.config, run.checkpoints.way_on, draws_whole_groups=whole):
        try:
            yield
        except (EndRun, ServersLost, RewardsLost) as end:
            # What a signal stops may be a wait. Some ranks may not have got it, or not seen the file, yet.
            asked = 0 if isinstance(end, EndRun) else max(gather(run.stop.asked))
            code = end.code if isinstance(end, EndRun) else code_of(asked) if asked else 1
            way_on = run.checkpoints.leave(run.engine, run.progress)
            have_all_ended = True
            raise EndRun(f"{end}; {way_on}", code, getattr(end, "traceback", "")) from end
        except FloatingPointError as error:
            raise EndRun(f"{error}: lower learning_rate; {run.checkpoints.way_on()}") from error
        finally:
            if run.pool_run is not None:
                run.pool_run.publisher.close()
            if run.recorder:
                run.recorder.close()
            if have_all_ended:
                gather(None)  # the launcher gives rank 0 no long time for its record once another rank is gone


def _place(run: Run) -> tuple[str, str]:
    """Return where the step in work is, and its phase; "" between phases."""
    phase = next(reversed(run.ranks.watchdog.clock.open), "")
    return f"{phase or 'between phases'} of step {run.ranks.watchdog.step}", phase


def raise_if_over(run: Run, step: int, result: StepResult, lost: list[Exception]) -> None:
    """Raise what raised_later kept, or EndRun if too many steps in a row taught nothing, names clash, or a signal or
    `grpo stop` asks to stop."""
    if lost:
        raise lost[-1]
    if result.clash:
        raise EndRun(result.clash)
    bad_steps = run.progress.bad_steps
    if bad_steps and len(bad_steps) % MOST_BAD_STEPS == 0:
        raise EndRun(f"steps {', '.join(map(str, bad_steps))} taught the policy nothing: the last {result.fault}")
    asked = max(gather(run.stop.asked))  # also what came in an evaluation, or while something was saved
    if asked and not run.is_last(step):
        by = "grpo stop" if asked == FOR_GOOD else f"signal {asked}"
        raise EndRun(f"stopped by {by}", code_of(asked))


def finish(run: Run) -> None:
    """Save the model of a run that is done, and leave the other ranks."""
    weights = weights_to_save(run.engine.module)
    if run.recorder:
        config, inputs, folder = run.config, run.inputs, run.folder / "model"
        best, value = run.checkpoints.best() if config.load_best_model_at_end else (None, -math.inf)
        is_better = best is not None and value > run.progress.evaluated.get(inputs.best_by, -math.inf)
        if is_better and (reason := damage(best)) is not None:
            log.warning("%s is damaged (%s): the run's model is that of its end, not the best", best, reason)
            is_better = False
        if is_better:
            log.info("the run's model is that of %s, the best by %s", best.name, inputs.best_by)
            use_best(best, folder, config)
        else:
            save_model(
                run.engine.module,
                inputs.tokenizer,
                folder,
                config,
                step=run.progress.step,
                processor=inputs.processor,
                weights=weights,
            )
    run.ranks.watchdog.close()
    dist.barrier()  # nobody leaves while rank 0 may still need the others' sockets
    for scorer in run.rounds.scorers:
        scorer.close()
