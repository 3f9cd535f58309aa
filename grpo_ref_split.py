"""GRPO with the reference model in another process. Run it under the deepspeed launcher, ref_server.py beside it:

    CUDA_VISIBLE_DEVICES=7 python ref_server.py
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 deepspeed grpo_ref_split.py
    deepspeed --num_gpus 2 grpo_ref_split.py --config configs/demo_cpu.yaml

The last needs no GPU: it starts two CPU processes.

Read it from the top: `train` sets up, `optimize` is the training loop, in phase order. A step is one optimizer update,
from prompts_per_step prompts x num_generations completions over all ranks (grpo/trainer/step.py). A round
(grpo/trainer/round.py) samples, rewards and compares the completions of steps_per_generation steps, which each train on
them num_iterations times. By default a round is a step, and each completion is used once, by the policy that drew it:
the probability ratio is 1 and the clipping idle.
"""

import logging
from contextlib import closing
from functools import partial
from pathlib import Path

from grpo.config.errors import ConfigError, end_at_ctrl_c, is_first_rank

if __name__ == "__main__":
    end_at_ctrl_c()  # before the imports that take long

from grpo.config.command_line import parse_arguments
from grpo.config.console import start_logging
from grpo.config.trainer import TrainerConfig
from grpo.run.exit import Launcher

if __name__ == "__main__":
    LAUNCHER = Launcher()  # from the first moment on: a launcher may end while all this is imported
    CONFIG = parse_arguments(TrainerConfig, __doc__)  # before the heavy imports: --help and mistakes answer at once
    start_logging(logging.INFO if is_first_rank() else logging.ERROR)
    logging.getLogger("grpo_ref_split").info("importing torch, transformers and DeepSpeed")

import torch.distributed as dist

from grpo.algorithm.loss import applied_entropy_coef
from grpo.client.server_errors import ServerError
from grpo.config.errors import RewardError
from grpo.report.curves import draw_curves
from grpo.report.read import summary
from grpo.run.collective import on_first
from grpo.run.exit import run_to_the_end
from grpo.run.folder import SaveError, open_repo, push_model
from grpo.run.preflight import check_alike, describe_inputs, find_run
from grpo.run.run_folder import find_run_folder
from grpo.trainer import record
from grpo.trainer.deepspeed_engine import join_ranks
from grpo.trainer.dry_run import dry_run
from grpo.trainer.inputs import read_inputs
from grpo.trainer.out_of_memory import OutOfMemory
from grpo.trainer.setup import Run, set_up
from grpo.trainer.step import update
from grpo.trainer.step_result import rates, step_result

log = logging.getLogger("grpo_ref_split")


def train(config: TrainerConfig, launcher: Launcher) -> None:
    """Set up, loop, and save the model. Most mistakes raise ConfigError before a model is loaded."""
    ranks = join_ranks(config)
    with closing(ranks.watchdog):  # torch prints a traceback of its own if rank 0 cannot be reached any more
        on_first(ranks.rank, partial(find_run_folder, config))
        inputs = read_inputs(config, rank=ranks.rank, world_size=ranks.size, device=ranks.device)
        check_alike(describe_inputs(config, inputs.ds_config, inputs.reward_funcs, [inputs.examples, inputs.held_out]))
        checkpoint, folder, done = find_run(config, ranks.rank, ranks.size)
        if config.push_to_hub:
            config.hub_model_id = on_first(ranks.rank, partial(open_repo, config, folder))
        if not done:
            run = set_up(config, ranks, inputs, folder=folder, checkpoint=checkpoint, launcher=launcher)
            with record.saved_at_the_end(run):
                optimize(run)
            record.finish(run)
        dist.destroy_process_group()  # before a push, in which the others would hold their cards
        if ranks.rank == 0:
            show_end(config, folder)


def optimize(run: Run) -> None:
    """Do the steps that are left: the training loop."""
    config, progress = run.config, run.progress
    evaluated = record.evaluate_if_missing(run)
    if progress.stopped_of >= config.max_steps:  # a callback's stop holds until more steps are asked for
        return
    progress.stopped_of = 0
    if progress.ref_step < progress.step and run.reference_is_due(progress.step):  # it was the last one of fewer steps
        run.publish_reference(progress.step)
    for step in (bar := record.progress_bar(run)):
        clock, applied, lost = run.ranks.watchdog.begin(step), rates(run), []
        # Sample, reward while the reference is at work, and compare within each group.
        batch = run.batch_for(step, progress.beta, clock)
        # The reference's log-probs are fetched on the way, after the policy's own forward pass.
        with clock("update"):
            stats = update(
                run.engine,
                batch.samples,
                config,
                run.rounds.batcher,
                clock,
                beta=progress.beta,
                entropy_coef=applied_entropy_coef(progress.entropy_coef, progress.entropy, config),
                scorers=run.rounds.scorers,
            )
        if run.reference_is_due(step):
            with clock("publish_ref"), record.raised_later(lost):
                run.publish_reference(step)
        result = step_result(run, step, batch, of_update=stats, applied=applied, clock=clock)
        progress.step, progress.evaluated = step, {}
        if run.evaluation_is_due(step):
            with record.raised_later(lost):
                progress.evaluated = evaluated = record.evaluate_policy(run, step)
                result.metrics.update(evaluated)
        record.record_step(run, bar, step, batch, result, evaluated=evaluated)
        asked = record.call_back(run, step, batch, result)
        progress.stopped_of = config.max_steps if asked == "stop" else 0
        if asked == "save" or (config.save_steps and step % config.save_steps == 0):
            run.checkpoints.save(run.engine, progress)
        record.raise_if_over(run, step, result, lost)
        if asked == "stop":
            break
    record.evaluate_if_missing(run)  # after a callback's stop


def show_end(config: TrainerConfig, folder: Path) -> None:
    """Print the run's table, draw its curves, say where the model is, and push it."""
    try:
        print(summary(folder), flush=True)
        curves = f"curves in {draw_curves(folder)}"
    except (OSError, ConfigError) as error:  # the run has succeeded all the same
        curves = f"but no curves ({error}): 'grpo report {folder}' shows them"
    log.info("done: model in %s, %s", folder / "model", curves)
    if config.push_to_hub:
        push_model(folder / "model", config.hub_model_id)


if __name__ == "__main__":
    run_to_the_end(
        lambda: dry_run(CONFIG) if CONFIG.dry_run else train(CONFIG, LAUNCHER),
        (ServerError, RewardError, SaveError, OutOfMemory, OSError),
        "interrupted before the first step",
    )
