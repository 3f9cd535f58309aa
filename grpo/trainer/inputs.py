"""All that a run, or its dry run, reads before a model is loaded: settings files, reward functions, tools, data."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo.agents.episodes import Agent, start_turns
from grpo.algorithm.advantages import try_estimator
from grpo.algorithm.loss import try_loss
from grpo.config.trainer import TrainerConfig
from grpo.config.user_code import load_function
from grpo.data.dataset import weights_of
from grpo.data.prompts import AdaptiveStream, PromptStream, check_reward_columns, load_examples, order_of
from grpo.data.records import Example
from grpo.model.answering import read_answering
from grpo.model.load import check_lengths, load_end_ids, load_settings, load_tokenizer
from grpo.model.lora import check_adapter
from grpo.model.pictures import PictureProcessor, load_processor, takes_pictures
from grpo.rewards.compute import load_reward_funcs
from grpo.run.recorder import check_report_to
from grpo.tools.dialogue import UserResponder
from grpo.trainer.deepspeed_engine import engine_config, make_schedule
from grpo.trainer.evaluation import best_metric, check_verdicts
from grpo.trainer.pool_sampler import check_rows
from grpo.trainer.rewarding import join_rewards, try_rewards
from grpo.trainer.servers import check_teachers
from grpo.wire.picture_files import PicturedPrompt, pictures_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    reward_funcs: dict[str, Callable | str]  # functions, or names of reward models, by name
    rewards: dict[str, Any]  # these, and the environment's class if it gives a reward (join_rewards)
    ds_config: dict[str, Any]  # ds_config.json, completed
    tokenizer: PreTrainedTokenizerBase
    processor: PictureProcessor | None  # the preparer of pictures; None for a model of text
    end_ids: list[int]  # the ids that end a completion
    turns: UserResponder | Agent | None  # tools and environment, or the agent; None without any
    examples: list[Example]
    stream: PromptStream
    held_out: list[Example]  # examples of each evaluation; empty if the run has none
    callback: Callable | None  # the user's, after each step
    best_by: str  # the evaluation's metric by which a checkpoint is the best; empty if the run has no evaluation

    def draws_here(self, config: TrainerConfig) -> bool:
        """Tell whether the trainer's ranks draw completions: to train on, or to evaluate."""
        return config.sampler != "pool" or bool(self.held_out)

    def begins_whole(self, config: TrainerConfig) -> bool:
        """Tell whether each rank's card has the whole model at the start. With ZeRO-3 it may be larger than a card,
        unless the ranks draw."""
        return self.draws_here(config) or self.zero_stage < 3

    @property
    def zero_stage(self) -> int:
        return self.ds_config["zero_optimization"]["stage"]

    @property
    def pictured(self) -> list[PicturedPrompt]:
        return [example.prompt_ids for example in self.examples if pictures_of(example.prompt_ids)]


def read_inputs(config: TrainerConfig, *, rank: int, world_size: int, device: torch.device) -> Inputs:
    """Read settings files, reward functions and data, and call each function and the environment once, as a dry run
    does too. With `num_train_epochs`, `config.max_steps` follows from the data. Raises ConfigError for a mistake in any
    of them, RewardError for a function or an environment that fails."""
    check_report_to(config)
    reward_funcs = load_reward_funcs(config.reward_funcs)
    callback = load_function("callback", config.callback) if config.callback else None
    try_loss(config)
    try_estimator(config.advantage_estimator, config.num_generations)
    ds_config = engine_config(config, world_size, device)
    tokenizer, settings = load_tokenizer(config), load_settings(config)
    processor = load_processor(config, settings, tokenizer)
    _check_model(config, settings, tokenizer)
    end_ids = load_end_ids(config, settings, tokenizer)
    turns = start_turns(config, tokenizer, end_ids)
    rewards = join_rewards(reward_funcs, {} if turns is None else turns.rewards)
    remedy = "the environment gives no reward: name a function"
    config.check(bool(rewards) or bool(config.teacher_servers), reward_funcs=remedy)
    best_by = ""
    if config.eval_steps:
        config.check(bool(rewards), eval_steps="without a reward nothing is measured: name one of weight 0, or use 0")
        check_verdicts(config, rewards)
        best_by = best_metric(config, rewards)
    if rank == 0:
        warn_of_other_question(config)
    load = partial(load_examples, config, tokenizer=tokenizer, progress=rank == 0, processor=processor, turns=turns)
    examples = load(config.dataset_train_split)
    held_out = load(config.dataset_test_split, limit=config.eval_samples) if config.eval_steps else []
    check_reward_columns(config, [*examples, *held_out], reward_funcs)
    check_rows(config, examples)
    check_teachers(config, examples)
    stream = _order_prompts(config, examples)
    if config.num_train_epochs is not None:
        config.max_steps = math.ceil(config.num_train_epochs * stream.steps_per_epoch) * config.num_iterations
        log.info("%g epochs of %d prompts are %d steps", config.num_train_epochs, len(examples), config.max_steps)
    if config.load_best_model_at_end and not config.callback:  # which may save after any step
        meet = math.lcm(config.save_steps, config.eval_steps)
        may_meet = meet <= max(config.max_steps, config.save_steps, config.eval_steps)
        remedy = f"no checkpoint of {config.max_steps} steps is evaluated: make save_steps a multiple of eval_steps"
        config.check(may_meet, load_best_model_at_end=remedy)
    make_schedule(torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate), config)
    try_rewards(config, reward_funcs, tokenizer, examples[0])
    if held_out and held_out[0].columns.keys() != examples[0].columns.keys():
        try_rewards(config, reward_funcs, tokenizer, held_out[0])
    if turns is not None:
        turns.try_on(examples[0])
    return Inputs(
        reward_funcs=reward_funcs,
        rewards=rewards,
        ds_config=ds_config,
        tokenizer=tokenizer,
        processor=processor,
        end_ids=end_ids,
        turns=turns,
        examples=examples,
        stream=stream,
        held_out=held_out,
        callback=callback,
        best_by=best_by,
    )


def _check_model(config: TrainerConfig, settings: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the model lacks what settings ask of it."""
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


def _order_prompts(config: TrainerConfig, examples: list[Example]) -> PromptStream:
    weights, seed = weights_of(config), config.seed if config.data_seed is None else config.data_seed
    if config.dataset_order == "adaptive":
        remedy = f"{config.dataset_name} has weights: leave them out, or use shuffled"
        config.check(weights is None, dataset_order=remedy)
        return AdaptiveStream(
            examples,
            config.prompts_per_step,
            seed,
            steps_per_round=config.steps_per_generation,
            max_lag=config.max_policy_lag,
        )
    return PromptStream(examples, config.prompts_per_step, seed, order=order_of(config, examples), weights=weights)


def warn_of_other_question(config: TrainerConfig) -> None:
    """Warn if the model was trained with another system prompt, or other arguments of its chat template."""
    path, before = read_answering(config.model_name_or_path)
    for name in ("system_prompt", "chat_template_kwargs") if path else ():
        if before.get(name) != (now := getattr(config, name)):
            log.warning("%s was %r when this model was trained (%s), and is %r", name, before.get(name), path, now)
