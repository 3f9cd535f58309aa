"""Everything before the training loop: servers, model, engine, checkpoint."""

import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from grpo.client.reference import ReferenceClient, TaskClient, check_reference
from grpo.config.trainer import TrainerConfig
from grpo.data.records import StepBatch
from grpo.model.packing import Batcher
from grpo.model.trial import share_rows
from grpo.pool.client import PoolClient, Retrier
from grpo.rewards.compute import start_rewards
from grpo.run.checkpoints import LOAD_UNIVERSAL, Checkpoints, Progress, check_space
from grpo.run.collective import on_first
from grpo.run.exit import Launcher, StopSignals
from grpo.run.metrics import PhaseClock
from grpo.run.preflight import RunDescription
from grpo.run.recorder import Recorder, record_start
from grpo.run.run_folder import make_run_folder, read_progress
from grpo.sampling.sampler import Sampler
from grpo.trainer.deepspeed_engine import Ranks, start_engine, whole_weights
from grpo.trainer.inputs import Inputs
from grpo.trainer.policy import choose_sampler, load_policy, make_trainable
from grpo.trainer.pool_sampler import PoolSampler, Replay, connect
from grpo.trainer.publish_policy import PolicyCopy, PolicyPublisher, PoolRun
from grpo.trainer.publish_reference import WeightPublisher, has_begun
from grpo.trainer.rewarding import Rewarder
from grpo.trainer.round import Rounds
from grpo.wire.health import ModelInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run that is set up: all that the training loop works with."""

    config: TrainerConfig
    ranks: Ranks
    inputs: Inputs
    folder: Path
    engine: Any  # DeepSpeedEngine around the policy
    schedule: LRScheduler
    batcher: Batcher
    sampler: Sampler | None  # the ranks' own; None if they draw nothing
    rounds: Rounds
    client: ReferenceClient | None  # None without a reference server
    publisher: WeightPublisher | None  # None without reference updates
    pool_run: PoolRun | None  # on rank 0 of a run with a pool
    rewarder: Rewarder
    checkpoints: Checkpoints
    progress: Progress
    recorder: Recorder | None  # on rank 0 only
    stop: StopSignals

    def batch_for(self, step: int, beta: float, clock: PhaseClock) -> StepBatch:
        """Return this rank's batch of a step; the first step of a round draws the round. All ranks call it together."""
        progress, (number, within) = self.progress, divmod(step - 1, self.config.updates_per_round)
        if progress.round != number:
            progress.batches, progress.resampled = self.rounds.collect(number, step - 1, beta, clock)
            progress.round, progress.signals = number, self.inputs.stream.signals
        return progress.batches[within % self.config.steps_per_generation]

    def reference_is_due(self, step: int) -> bool:
        """Tell whether the policy becomes the reference after this step. After the last step no request follows."""
        config = self.config
        return self.publisher is not None and step < config.max_steps and step % config.ref_update_steps == 0

    def evaluation_is_due(self, step: int) -> bool:
        return bool(self.inputs.held_out) and (step == self.config.max_steps or step % self.config.eval_steps == 0)


def set_up(
    config: TrainerConfig, ranks: Ranks, inputs: Inputs, folder: Path, checkpoint: Path | None, launcher: Launcher
) -> Run:
    """Reach the servers, load the policy, start its engine, and continue from a checkpoint. Raises ConfigError."""
    rank, world_size, device, _ = ranks
    description = _describe_run(config, inputs, world_size, checkpoint)
    any_version = config.ref_update_steps > 0 and (checkpoint is not None or has_begun(folder))
    client, reference = _reach_reference(config, folder, any_version)
    pool = connect(config) if config.pool else None
    started, _ = start_rewards(inputs.reward_funcs, config, device, folder.name)
    rewarder = Rewarder(inputs.rewards, started, config)

    model, policy_info = load_policy(config, inputs, device)
    if client is not None:
        check_reference(config, policy_info, reference, any_version, bool(inputs.pictured))
    local_reference = make_trainable(model, config)
    if inputs.zero_stage == 3 and local_reference is not None and local_reference.copies:
        config.refuse("ref", "the adapter has weights to begin with, of which stage 3 keeps no copy: use server")
    if begins_whole := inputs.begins_whole(config):
        batcher, sampler = choose_sampler(config, inputs, model)
    publisher = _publisher(config, client, model, inputs, policy_info, folder if rank == 0 else None)
    space = on_first(rank, partial(check_space, config, folder, model))
    log.info("starting DeepSpeed on %d x %s; %s", world_size, device, space)
    engine, schedule = start_engine(config, inputs.ds_config, model, is_new=checkpoint is None)
    if not begins_whole:
        with torch.no_grad():  # DeepSpeed's hooks refuse the gradients of some weights: log-probs alone are tried
            batcher, sampler = choose_sampler(config, inputs, model)

    on_first(rank, partial(make_run_folder, config, folder))
    first_reference = reference.fingerprint if reference is not None else ""
    checkpoints = Checkpoints(
        *(config, folder, inputs.tokenizer, description, policy_info.fingerprint, first_reference, rank),
        best_by=inputs.best_by,
        processor=inputs.processor,
    )
    drawing, pool_run, stop_waiting = sampler, None, threading.Event()
    for asked in [each for each in (client, *started.values()) if isinstance(each, TaskClient)]:  # reward servers too
        asked.balancer.stopping = stop_waiting
    if config.sampler == "pool":
        drawing = _let_workers_draw(config, inputs, ranks, pool, engine.module, batcher, checkpoints, stop_waiting)
        pool_run = drawing.run
    weights_to_draw = nullcontext if config.sampler == "pool" else partial(whole_weights, engine)
    batcher = share_rows(batcher, engine.module, config.sequence_parallel_size)
    parts = drawing, batcher, inputs.stream, rewarder, client, local_reference
    rounds = Rounds(config, engine.module, *parts, weights_to_draw)
    progress = Progress(config.beta, config.entropy_coef, reference=first_reference)
    if checkpoint is not None:
        progress = checkpoints.load(checkpoint, engine)
        inputs.stream.signals = progress.signals
    if publisher and checkpoint is not None:
        publisher.resume(progress.ref_step, progress.reference)
    elif publisher:
        publisher.begin(reference)
    rounds.ask_again(progress.batches)
    stop = StopSignals(launcher, stop_waiting, folder)
    recorder = _start_record(config, ranks, inputs, folder, progress, is_resumed=checkpoint is not None)
    parts = engine, schedule, batcher, sampler, rounds, client, publisher, pool_run
    return Run(config, ranks, inputs, folder, *parts, rewarder, checkpoints, progress, recorder, stop)


def _publisher(
    config: TrainerConfig,
    client: ReferenceClient | None,
    model: PreTrainedModel,
    inputs: Inputs,
    policy_info: ModelInfo,
    folder: Path | None,
) -> WeightPublisher | None:
    if not config.ref_update_steps:
        return None
    return WeightPublisher(config, client, model, inputs.tokenizer, policy_info, folder, inputs.processor)


def _describe_run(config: TrainerConfig, inputs: Inputs, world_size: int, checkpoint: Path | None) -> RunDescription:
    """Describe the run. Compare a checkpoint with it, and let DeepSpeed load one of another number of ranks."""
    description = RunDescription(config, inputs.examples, world_size, inputs.zero_stage)
    if checkpoint is not None:
        saved = read_progress(checkpoint)
        description.check(checkpoint, saved)
        if saved["ranks"] != world_size:
            inputs.ds_config.setdefault("checkpoint", {}).update(LOAD_UNIVERSAL)
    return description


def _let_workers_draw(
    config: TrainerConfig,
    inputs: Inputs,
    ranks: Ranks,
    pool: PoolClient | None,
    model: PreTrainedModel,
    batcher: Batcher,
    checkpoints: Checkpoints,
    stop_waiting: threading.Event,
) -> PoolSampler:
    """Return the sampler of a run with a pool, or of one that replays another: then there is no pool."""
    source, folder, policy, run = pool or Replay(config.replay, checkpoints.identity), checkpoints.folder, None, None
    ask = Retrier(source, config.pool_deadline, stop_waiting)
    if pool is not None and (ranks.rank == 0 or inputs.zero_stage == 3):  # all ranks copy shares together
        policy = PolicyCopy(model, batcher)
    if pool is not None and ranks.rank == 0:
        publisher = PolicyPublisher(pool, policy, folder, ask, stop_waiting)
        run = PoolRun(config, publisher, inputs.tokenizer, folder.name, checkpoints, inputs.turns, inputs.processor)
    return PoolSampler(config, source, ask, policy, run, inputs.tokenizer, inputs.end_ids, inputs.stream, ranks)


def _reach_reference(
    config: TrainerConfig, folder: Path, any_version: bool
) -> tuple[ReferenceClient | None, ModelInfo | None]:
    """Return the client of the reference servers and their model, once they answer; None and None without servers."""
    if config.beta == 0 or config.ref != "server":
        log.info("%s no reference server", "beta is 0: no KL term," if config.beta == 0 else f"ref is {config.ref}:")
        return None, None
    # Every rank asks: each keeps the fingerprint that all later answers must bear.
    client = ReferenceClient(config, folder.name)
    return client, client.wait_ready(any_version)


def _start_record(
    config: TrainerConfig, ranks: Ranks, inputs: Inputs, folder: Path, progress: Progress, is_resumed: bool
) -> Recorder | None:
    """Open the run's files on rank 0, and log the run's sizes. All ranks call it together."""
    recorder = Recorder(config, folder, after=progress.step if is_resumed else -1) if ranks.rank == 0 else None
    record_start(folder if ranks.rank == 0 else None, progress.step, ranks.device)
    data = f"{len(inputs.examples)} prompts, {len(inputs.held_out)} held out; {ranks.size} x {ranks.device}"
    rate = f"{config.prompts_per_step} prompts a step; learning rate {config.learning_rate:g}"
    log.info("%s; %s; run folder %s", data, rate, folder)
    if is_resumed:
        log.info("the run goes on after step %d", progress.step)
    return recorder
