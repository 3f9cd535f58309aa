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

from grpo.config.trainer import TrainerConfig
from grpo.data.records import StepBatch
from grpo.model.lora import LocalReference
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
from grpo.trainer.servers import Servers, stopped_together
from grpo.wire.health import ModelInfo, fingerprint

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is set up: all that the training loop works with."""

    config: TrainerConfig
    ranks: Ranks
    inputs: Inputs
    folder: Path
    engine: Any  # DeepSpeedEngine around the policy
    schedule: LRScheduler
    sampler: Sampler | None  # the ranks' own; None if they draw nothing
    rounds: Rounds
    publisher: WeightPublisher | None  # None without reference updates
    pool_run: PoolRun | None  # on rank 0 of a run with a pool
    checkpoints: Checkpoints
    progress: Progress
    recorder: Recorder | None  # on rank 0 only
    stop: StopSignals

    def batch_for(self, step: int, beta: float, clock: PhaseClock) -> StepBatch:
        """Return this rank's batch of a step; the first step of a round draws the round. All ranks call it together."""
        progress, (number, within) = self.progress, divmod(step - 1, self.config.updates_per_round)
        if progress.round != number:
            progress.batches, progress.resampled = self.rounds.collect(number, updates=step - 1, beta=beta, clock=clock)
            progress.round, progress.signals = number, self.inputs.stream.signals
        return progress.batches[within % self.config.steps_per_generation]

    def reference_is_due(self, step: int) -> bool:
        """Tell whether the policy becomes the reference after this step. After the last step no request follows."""
        config = self.config
        return self.publisher is not None and step < config.max_steps and step % config.ref_update_steps == 0

    def publish_reference(self, step: int) -> None:
        """Make the policy after this step the reference. All ranks call it together. Raises ServersLost."""
        self.progress.ref_step = step
        self.publisher.publish(step, needed=self.checkpoints.references())

    def is_last(self, step: int) -> bool:
        """Tell whether the run ends with this step, at max_steps or by its callback."""
        return step == self.config.max_steps or self.progress.stopped_of > 0

    def evaluation_is_due(self, step: int) -> bool:
        return bool(self.inputs.held_out) and (self.is_last(step) or step % self.config.eval_steps == 0)


def set_up(
    config: TrainerConfig, ranks: Ranks, inputs: Inputs, *, folder: Path, checkpoint: Path | None, launcher: Launcher
) -> Run:
    """Reach the servers, load the policy, start its engine, and continue from a checkpoint. Raises ConfigError."""
    description = _describe_run(config, inputs, ranks.size, checkpoint)
    any_version = config.ref_update_steps > 0 and (checkpoint is not None or has_begun(folder))
    servers = Servers.reach(config, folder.name, any_version)
    pool = connect(config) if config.pool else None
    started, _ = start_rewards(inputs.reward_funcs, config, ranks.device, folder.name)
    stopping = stopped_together([*servers.clients, *started.values()])

    model, policy_info = load_policy(config, inputs, ranks.device)
    servers.check(policy_info, has_pictures=bool(inputs.pictured))
    local_reference = _make_trainable(config, inputs, model)
    engine, schedule, batcher, sampler = _start_engine(config, inputs, ranks, folder, model, is_new=checkpoint is None)

    on_first(ranks.rank, partial(make_run_folder, config, folder))
    checkpoints = _checkpoints(inputs, ranks, folder, description, policy=policy_info, servers=servers)
    workers = _pool_sampler(inputs, ranks, checkpoints, pool, model=engine.module, batcher=batcher, stopping=stopping)
    rounds = Rounds(
        config=config,
        model=engine.module,
        sampler=sampler if workers is None else workers,
        batcher=share_rows(batcher, engine.module, config.sequence_parallel_size),
        stream=inputs.stream,
        rewarder=Rewarder(inputs.rewards, started, config),
        scorers=servers.make_scorers(),
        reference=local_reference,
        weights_to_draw=partial(whole_weights, engine) if workers is None else nullcontext,
    )
    publisher = _publisher(checkpoints, servers, model, policy_info)
    progress = _begin(
        checkpoints, checkpoint, engine=engine, rounds=rounds, publisher=publisher, reference=servers.reference
    )
    return Run(
        config=config,
        ranks=ranks,
        inputs=inputs,
        folder=folder,
        engine=engine,
        schedule=schedule,
        sampler=sampler,
        rounds=rounds,
        publisher=publisher,
        pool_run=None if workers is None else workers.run,
        checkpoints=checkpoints,
        progress=progress,
        stop=StopSignals(launcher, stopping, folder),
        recorder=_start_record(config, ranks, inputs, folder, progress, is_resumed=checkpoint is not None),
    )


def _make_trainable(config: TrainerConfig, inputs: Inputs, model: PreTrainedModel) -> LocalReference | None:
    reference = make_trainable(model, config)
    if inputs.zero_stage == 3 and reference is not None and reference.copies:
        config.refuse("ref", "the adapter has weights to begin with, of which stage 3 keeps no copy: use server")
    return reference


def _start_engine(
    config: TrainerConfig, inputs: Inputs, ranks: Ranks, folder: Path, model: PreTrainedModel, is_new: bool
) -> tuple[Any, LRScheduler, Batcher, Sampler | None]:
    """Start DeepSpeed's engine. Choose the batches and the sampler before it, if each rank has the whole model then."""
    begins_whole = inputs.begins_whole(config)
    if begins_whole:
        batcher, sampler = choose_sampler(config, inputs, model)
    space = on_first(ranks.rank, partial(check_space, config, folder, model))
    log.info("starting DeepSpeed on %d x %s; %s", ranks.size, ranks.device, space)
    engine, schedule = start_engine(config, inputs.ds_config, model, is_new=is_new)
    if not begins_whole:
        with torch.no_grad():  # DeepSpeed's hooks refuse the gradients of some weights: log-probs alone are tried
            batcher, sampler = choose_sampler(config, inputs, model)
    return engine, schedule, batcher, sampler


def _checkpoints(
    inputs: Inputs, ranks: Ranks, folder: Path, description: RunDescription, *, policy: ModelInfo, servers: Servers
) -> Checkpoints:
    """Return the keeper of checkpoints in the run's folder; beside them an agent keeps its journal."""
    checkpoints = Checkpoints(
        config=description.config,
        folder=folder,
        tokenizer=inputs.tokenizer,
        description=description,
        model=policy.fingerprint,
        reference=servers.reference.fingerprint if servers.reference is not None else "",
        teachers={source: teacher.fingerprint for source, teacher in servers.teachers.items()},
        rank=ranks.rank,
        best_by=inputs.best_by,
        processor=inputs.processor,
    )
    if description.config.agent is not None:
        identity = fingerprint(checkpoints.identity, description.fields["columns"])  # programs have the columns
        inputs.turns.keep_journal(folder, ranks.rank, identity=identity, oldest=checkpoints.oldest)
    return checkpoints


def _publisher(
    checkpoints: Checkpoints, servers: Servers, model: PreTrainedModel, policy: ModelInfo
) -> WeightPublisher | None:
    if not checkpoints.config.ref_update_steps:
        return None
    return WeightPublisher(
        config=checkpoints.config,
        client=servers.reference_client,
        model=model,
        tokenizer=checkpoints.tokenizer,
        policy=policy,
        folder=checkpoints.folder if checkpoints.rank == 0 else None,
        processor=checkpoints.processor,
    )


def _begin(
    checkpoints: Checkpoints,
    checkpoint: Path | None,
    *,
    engine: Any,
    rounds: Rounds,
    publisher: WeightPublisher | None,
    reference: ModelInfo | None,
) -> Progress:
    """Return the progress of a run that begins, or of the checkpoint, which is loaded. Put the reference in force that
    belongs to it; `reference` is the one that the servers have."""
    config = checkpoints.config
    if checkpoint is None:
        progress = Progress(beta=config.beta, entropy_coef=config.entropy_coef, reference=checkpoints.reference)
        if publisher is not None:
            progress.reference = publisher.begin(reference)
    else:
        progress = checkpoints.load(checkpoint, engine)
        if config.resume_from_checkpoint != "last":
            progress.stopped_of = 0  # a checkpoint that is named is trained from
        rounds.stream.signals = progress.signals
        if publisher is not None:
            publisher.resume(progress.ref_step, progress.reference)
    rounds.logged = progress.logged  # the same dict: a checkpoint has what no step has recorded yet
    for scorer in rounds.scorers:
        scorer.ask_again(progress.batches)
    return progress


def _describe_run(config: TrainerConfig, inputs: Inputs, world_size: int, checkpoint: Path | None) -> RunDescription:
    """Describe the run. Compare a checkpoint with it, and let DeepSpeed load one of another number of ranks."""
    description = RunDescription(config, inputs.examples, ranks=world_size, stage=inputs.zero_stage)
    if checkpoint is not None:
        saved = read_progress(checkpoint)
        description.check(checkpoint, saved)
        if saved["ranks"] != world_size:
            inputs.ds_config.setdefault("checkpoint", {}).update(LOAD_UNIVERSAL)
    return description


def _pool_sampler(
    inputs: Inputs,
    ranks: Ranks,
    checkpoints: Checkpoints,
    pool: PoolClient | None,
    *,
    model: PreTrainedModel,
    batcher: Batcher,
    stopping: threading.Event,
) -> PoolSampler | None:
    """Return the sampler of a run whose completions workers draw, or which replays another's: then there is no pool.
    None for a run that draws itself."""
    config, policy, run = checkpoints.config, None, None
    if config.sampler != "pool":
        return None
    source = pool or Replay(config.replay, checkpoints.identity)
    ask = Retrier(source, config.pool_deadline, stopping)
    if pool is not None and (ranks.rank == 0 or inputs.zero_stage == 3):  # all ranks copy shares together
        policy = PolicyCopy(model, batcher)
    if pool is not None and ranks.rank == 0:
        run = PoolRun(
            config=config,
            publisher=PolicyPublisher(
                client=pool, policy=policy, run_folder=checkpoints.folder, ask=ask, stop=stopping
            ),
            tokenizer=inputs.tokenizer,
            name=checkpoints.folder.name,
            checkpoints=checkpoints,
            turns=inputs.turns,
            processor=inputs.processor,
        )
    return PoolSampler(
        config=config,
        source=source,
        ask=ask,
        policy=policy,
        run=run,
        tokenizer=inputs.tokenizer,
        end_ids=inputs.end_ids,
        prompts=inputs.stream,
        ranks=ranks,
    )


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
