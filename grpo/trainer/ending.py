"""How a run ends: early, with a checkpoint and a sentence that says how to continue; or done, with a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from grpo.client.errors import ServersLost
from grpo.run.exit import EndRun
from grpo.run.folder import save_model
from grpo.run.recorder import BAD_STEPS
from grpo.trainer.numbers import StepResult
from grpo.trainer.out_of_memory import raise_if_short
from grpo.trainer.rewarding import RewardsLost
from grpo.trainer.setup import Run

MOST_BAD_STEPS = 5  # in a row: one or two may be a reward out of scale; five cost little, and nobody watches at night


@contextmanager
def saved_at_the_end(run: Run) -> Iterator[None]:
    """Save a checkpoint where the run ends early, and raise EndRun with its reason and how to continue.

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
        clock, step = run.watchdog.clock, f"step {run.watchdog.step}"
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
                f"in the last {', '.join(run.reward_names)} returned None for every completion: read some in "
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
            run.engine.module, run.tokenizer, run.folder / "model", run.config, run.config.max_steps, run.processor
        )
    run.watchdog.close()
    dist.barrier()  # nobody leaves while rank 0 may still need the others' sockets
    if run.client is not None:
        run.client.close()
