"""Everything before the training loop: settings files, rewards, tools and data; servers, model, engine, checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.algorithm.advantages import try_estimator
from grpo.algorithm.loss import try_loss
from grpo.client.reference import ReferenceClient, check_reference
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import PromptStream, check_reward_columns, load_examples
from grpo.data.records import Example, StepBatch
from grpo.model.answering import read_answering
from grpo.model.fingerprint import describe
from grpo.model.hub import base_of
from grpo.model.load import (
    check_lengths,
    checkpoint_activations,
    enough_memory,
    load_end_ids,
    load_model,
    load_settings,
    load_tokenizer,
)
from grpo.model.logprobs import check_router
from grpo.model.lora import AdapterOffReference, check_adapter, put_adapter, train_adapter
from grpo.model.memory import on_meta
from grpo.model.packing import Batcher
from grpo.model.pictures import PictureProcessor, freeze_vision_tower, load_processor, takes_pictures
from grpo.model.trial import make_batcher
from grpo.pool.client import Retrier
from grpo.rewards.compute import load_reward_funcs, start_rewards
from grpo.run.checkpoints import LOAD_UNIVERSAL, Checkpoints, Progress
from grpo.run.collective import on_first
from grpo.run.exit import Launcher, StopSignals
from grpo.run.metrics import PhaseClock
from grpo.run.preflight import RunDescription, check_alike
from grpo.run.recorder import Recorder, check_report_to, record_start
from grpo.run.run_folder import make_run_folder, read_progress
from grpo.sampling.sampler import Sampler
from grpo.sampling.self_check import make_sampler
from grpo.tools.dialogue import UserResponder, start_turns
from grpo.trainer.deepspeed_engine import Ranks, engine_config, start_engine
from grpo.trainer.evaluation import best_metric, check_verdicts
from grpo.trainer.pool_sampler import PoolSampler, Replay, check_rows, connect
from grpo.trainer.publish_policy import PolicyPublisher, PoolRun
from grpo.trainer.publish_reference import WeightPublisher, has_begun
from grpo.trainer.rewarding import Rewarder, join_rewards, try_rewards
from grpo.trainer.round import Rounds
from grpo.wire.health import ModelInfo
from grpo.wire.picture_files import PicturedPrompt, pictures_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """All that a run reads before it loads a model."""

    reward_funcs: dict[str, Callable | str]  # functions, or names of reward models, by name
    rewards: dict[str, Any]  # these, and the environment's class if it gives a reward (join_rewards)
    ds_config: dict[str, Any]  # ds_config.json, completed
    tokenizer: PreTrainedTokenizerBase
    processor: PictureProcessor | None  # the preparer of pictures; None for a model of text
    end_ids: list[int]  # the ids that end a completion
    turns: UserResponder | None  # tools and environment; None without both
    examples: list[Example]
    stream: PromptStream
    held_out: list[Example]  # examples of each evaluation; empty if the run has none
    best_by: str  # the evaluation's metric by which a checkpoint is the best; empty if the run has no evaluation

    @property
    def pictured(self) -> list[PicturedPrompt]:
        return [example.prompt_ids for example in self.examples if pictures_of(example.prompt_ids)]


def read_inputs(config: TrainerConfig, rank: int, world_size: int, device: torch.device) -> Inputs:
    """Read settings files, reward functions and data, and call each function and the environment once, as a dry run
    does too. Raises ConfigError for a mistake in any of them, RewardError for a function or an environment that fails.
    """
    check_report_to(config)
    reward_funcs = load_reward_funcs(config.reward_funcs)
    try_loss(config)
    try_estimator(config.advantage_estimator, config.num_generations)
    ds_config = engine_config(config, world_size, device)
    tokenizer, settings = load_tokenizer(config), load_settings(config)
    processor = load_processor(config, settings, tokenizer)
    check_lengths(config, settings)
    check_adapter(config)
    config.check(
        takes_pictures(settings) or not config.freeze_vision_tower,
        freeze_vision_tower=f"{config.model_name_or_path} has no vision tower: leave it out",
    )
    config.check(
        tokenizer.chat_template is not None or not config.save_system_prompt,
        save_system_prompt="the model has no chat template to save it in: leave it out",
    )
    if tokenizer.chat_template is None:
        log.info("%s has no chat template: it is given prompts as plain text", config.model_name_or_path)
    end_ids = load_end_ids(config, settings, tokenizer)
    turns = start_turns(config, tokenizer, end_ids)
    rewards = join_rewards(reward_funcs, {} if turns is None else turns.rewards)
    config.check(bool(rewards), reward_funcs="the environment gives no reward: name a function")
    best_by = ""
    if config.eval_steps:
        check_verdicts(config, rewards)
        best_by = best_metric(config, rewards)
    if rank == 0:
        warn_of_other_question(config)
    examples = load_examples(config, config.dataset_train_split, tokenizer, 0, rank == 0, processor, turns)
    held_out = []
    if config.eval_steps:
        split, count = config.dataset_test_split, config.eval_samples
        held_out = load_examples(config, split, tokenizer, count, rank == 0, processor, turns)
    check_reward_columns(config, [*examples, *held_out], reward_funcs)
    config.check(
        config.sampler != "pool" or not any(pictures_of(example.prompt_ids) for example in examples),
        sampler="a pool brings workers no pictures, and the dataset has some: use continuous",
    )
    check_rows(config, examples)
    stream = PromptStream(examples, config.prompts_per_step, config.seed)
    try_rewards(config, reward_funcs, tokenizer, examples[0])
    if turns is not None:
        turns.try_on(examples[0])
    return Inputs(
        reward_funcs, rewards, ds_config, tokenizer, processor, end_ids, turns, examples, stream, held_out, best_by
    )


def warn_of_other_question(config: TrainerConfig) -> None:
    """Warn if the model was trained with another system prompt, or other arguments of its chat template."""
    path, before = read_answering(config.model_name_or_path)
    for name in ("system_prompt", "chat_template_kwargs") if path else ():
        if before.get(name) != (now := getattr(config, name)):
            log.warning("%s was %r when this model was trained (%s), and is %r", name, before.get(name), path, now)


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
    sampler: Sampler
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
            progress.round = number
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
    """Reach the servers, load the policy, start its engine, and continue from the checkpoint, if one is given. Raises
    ConfigError for a model, server or checkpoint that does not fit."""
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
    adapter_off = make_trainable(model, config)
    batcher, sampler = choose_sampler(config, inputs, model)
    publisher = None
    if config.ref_update_steps:
        run_folder = folder if rank == 0 else None
        publisher = WeightPublisher(config, client, model, inputs.tokenizer, policy_info, run_folder, inputs.processor)
    log.info("starting DeepSpeed on %d x %s", world_size, device)
    engine, schedule = start_engine(config, inputs.ds_config, model)

    on_first(rank, partial(make_run_folder, config, folder))
    first_reference = reference.fingerprint if reference is not None else ""
    checkpoints = Checkpoints(
        *(config, folder, inputs.tokenizer, description, policy_info.fingerprint, first_reference, rank),
        best_by=inputs.best_by,
        processor=inputs.processor,
    )
    drawing, pool_run, stop_waiting = sampler, None, threading.Event()
    if config.sampler == "pool":
        source = pool or Replay(config.replay, checkpoints.identity)
        ask = Retrier(source, config.pool_deadline, stop_waiting)
        if pool is not None and rank == 0:
            policy = PolicyPublisher(pool, engine.module, batcher, folder, ask, stop_waiting)
            pool_run = PoolRun(config, policy, inputs.tokenizer, folder.name, checkpoints, inputs.turns)
        for_rank = inputs.tokenizer, inputs.end_ids, inputs.stream, ranks
        drawing = PoolSampler(config, source, ask, pool_run, *for_rank)
    rounds = Rounds(config, engine.module, drawing, batcher, inputs.stream, rewarder, client, adapter_off)
    progress = Progress(config.beta, config.entropy_coef, reference=first_reference)
    if checkpoint is not None:
        progress = checkpoints.load(checkpoint, engine)
    if publisher and checkpoint is not None:
        publisher.resume(progress.ref_step, progress.reference)
    elif publisher:
        publisher.begin(reference)
    rounds.ask_again(progress.batches)
    stop = StopSignals(launcher, stop_waiting)
    recorder = _start_record(config, ranks, inputs, folder, progress, is_resumed=checkpoint is not None)
    parts = engine, schedule, batcher, sampler, rounds, client, publisher, pool_run
    return Run(config, ranks, inputs, folder, *parts, rewarder, checkpoints, progress, recorder, stop)


def _describe_run(config: TrainerConfig, inputs: Inputs, world_size: int, checkpoint: Path | None) -> RunDescription:
    """Describe the run. Compare a checkpoint with it, and let DeepSpeed load one of another number of ranks."""
    description = RunDescription(config, inputs.examples, world_size)
    if checkpoint is not None:
        saved = read_progress(checkpoint)
        description.check(checkpoint, saved)
        if saved["ranks"] != world_size:
            inputs.ds_config.setdefault("checkpoint", {}).update(LOAD_UNIVERSAL)
    return description


def _reach_reference(
    config: TrainerConfig, folder: Path, any_version: bool
) -> tuple[ReferenceClient | None, ModelInfo | None]:
    """Return the client of the reference servers and their model, once they answer; None and None without servers."""
    if config.beta == 0 or config.ref != "server":
        log.info("%s no reference server", "beta is 0: no KL term," if config.beta == 0 else "ref is adapter_off:")
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


def load_policy(config: TrainerConfig, inputs: Inputs, device: torch.device) -> tuple[PreTrainedModel, ModelInfo]:
    """Load the policy, and describe it before anything of it is changed."""
    log.info("loading %s", config.model_name_or_path)
    model = load_model(config, device)
    policy_info = describe(model, inputs.tokenizer, config.model_name_or_path, inputs.processor)
    if config.router_aux_loss_coef > 0:
        check_router(model, config.router_aux_loss_coef)
    check_alike({"the model's fingerprint": policy_info.fingerprint})
    return model, policy_info


def policy_on_meta(config: TrainerConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return what would be trained, without its weights. Raises ConfigError as a run would."""
    model = on_meta(config, dtype)
    if base_of(config.model_name_or_path) is not None:
        put_adapter(model, config.model_name_or_path)
    make_trainable(model, config)
    if config.router_aux_loss_coef > 0:
        check_router(model, config.router_aux_loss_coef)
    return model


def make_trainable(model: PreTrainedModel, config: TrainerConfig) -> AdapterOffReference | None:
    """Add the adapter, freeze what is not trained, and let activations be recomputed. Return the reference of a policy
    that is its own."""
    came_with_adapter = config.use_peft and train_adapter(model, config)
    if config.freeze_vision_tower:
        freeze_vision_tower(model)
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    return AdapterOffReference(model, came_with_adapter) if config.beta > 0 and config.ref == "adapter_off" else None


def choose_sampler(config: TrainerConfig, inputs: Inputs, model: PreTrainedModel) -> tuple[Batcher, Sampler]:
    """Try out which batches and which local sampler the model allows."""
    with enough_memory(config):
        batcher = make_batcher(model, inputs.tokenizer.pad_token_id, inputs.processor)
        longest_packed = batcher.longest_packed if config.sampler != "generate" else 0
        limits = config.max_completion_length, config.sequences_per_generate, longest_packed
        return batcher, make_sampler(model, inputs.tokenizer, *limits, batcher.vision, inputs.turns)
