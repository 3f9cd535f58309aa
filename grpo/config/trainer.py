"""The configuration of `grpo_ref_split.py`, the checks that relate its sections, and the settings of earlier runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from grpo.config.command_line import load_yaml
from grpo.config.connection_settings import ReferenceConfig, read_urls
from grpo.config.errors import rank_count, require
from grpo.config.fields import Section, option
from grpo.config.loss_settings import LossSection, RewardedConfig
from grpo.config.other_names import INSTEAD
from grpo.config.sampling_settings import LOCAL_SAMPLERS, PolicyConfig, RolloutSection
from grpo.config.user_code import check_file


@dataclass
class PoolSection(Section):
    HEADING = "sampler and pool"

    sampler: Literal["continuous", "generate", "pool"] = option(
        "continuous",
        f"{LOCAL_SAMPLERS}. With pool, workers anywhere draw (generate.py), and continuous draws held-out answers",
    )
    pool: str | None = option(
        None,
        "URL of the pool: a server with --task rollouts; of several on one database, with commas: whichever answers",
        needs="sampler pool",
    )
    max_policy_lag: int = option(0, "rounds that workers draw ahead of the trainer", needs="sampler pool", at_least=0)
    in_flight_weight_updates: bool = option(False, "take new weights in mid-completion", needs="max_policy_lag above 0")
    pool_deadline: float = option(900.0, "seconds without a group that end the run", needs="sampler pool", above=0)
    replay: str | None = option(None, "pool_file of an earlier run, to train on its completions", needs="sampler pool")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler != "pool":
            return
        self.check((self.pool is None) != (self.replay is None), sampler="set pool to a URL, or replay to a file")
        if self.pool is not None:
            self.pool = read_urls("pool", self.pool)
        self.check(self.replay is None or Path(self.replay).is_file(), replay="there is no such file")


_RATE = 1e-6  # TRL's
_LORA_RATE = 1e-5  # LoRA wants ten times as much, or more (Schulman et al. 2025, "LoRA Without Regret")
_PROMPTS = 48  # 1, 2, 3, 4, 6 and 8 ranks share them equally


@dataclass
class TrainingSection(Section):
    HEADING = "training"

    max_steps: int = option(500, "number of optimizer updates", above=0, common=True)
    num_train_epochs: float | None = option(None, "passes over the prompts; sets max_steps", above=0)
    prompts_per_step: int | None = option(
        None,
        "prompts per update over all ranks, each with num_generations completions; unset is the multiple of the ranks "
        "nearest to 48, or the value of the run to continue",
        common=True,
        above=0,
    )
    data_seed: int | None = option(None, "decides the order of prompts alone; unset is seed", at_least=0, below=2**31)
    dataset_order: str = option(
        "shuffled",
        "order of the prompts: shuffled anew each epoch; adaptive, also leaves out what teaches nothing; as_is; or "
        "column:NAME, its lowest numbers first",
    )
    steps_per_generation: int = option(1, "updates that one round of generation feeds, each with new prompts", above=0)
    num_iterations: int = option(1, "times that each round's completions are trained on", above=0)
    micro_batch_tokens: int = option(16384, "tokens in a pass: lower it if memory runs out", above=0, common=True)
    sequence_parallel_size: int = option(1, "ranks that share each sequence: for answers too long for a card", above=0)
    learning_rate: float | None = option(
        None, "AdamW's peak rate; unset is 1e-6, with use_peft 1e-5, or that of a continued run", common=True, above=0
    )
    lr_scheduler_type: Literal[
        *("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr"),
        *("cosine_warmup_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay"),
    ] = option("constant_with_warmup", "course of the learning rate after its warm-up, by transformers' names")
    lr_scheduler_kwargs: dict | str | None = option(None, "arguments of the course: '{\"min_lr_rate\": 0.1}'")
    warmup_steps: float = option(10, "updates of a rising rate, none with constant; below 1: a share", at_least=0)
    optim: Literal["adamw_torch", "adamw_8bit"] = option("adamw_torch", "adamw_8bit (bitsandbytes) needs less memory")
    adam_beta1: float = option(0.9, "decay of AdamW's mean of the gradients", at_least=0, below=1)
    adam_beta2: float = option(0.99, "decay of AdamW's mean of the squared gradients", at_least=0, below=1)
    adam_epsilon: float = option(1e-8, "AdamW's term that keeps a division by a tiny gradient small", above=0)
    weight_decay: float = option(0.0, "AdamW's weight decay, of all weights but biases and those of norms", at_least=0)
    max_grad_norm: float = option(1.0, "larger gradients are scaled down to this norm; 0: no clipping", at_least=0)
    gradient_checkpointing: bool = option(
        True, "recompute activations: less memory, more time", off="keep activations: more memory, less time"
    )
    activation_offloading: bool = option(
        False, "keep in the machine's memory what activations are recomputed from", needs="gradient_checkpointing"
    )
    tiled_mlp: bool = option(False, "compute MLPs in blocks of 4096 tokens: less memory for long answers, more time")
    deepspeed: str = option("ds_config.json", "JSON file of DeepSpeed's settings; the trainer fills in what says auto")

    def __post_init__(self) -> None:
        if self.max_steps == -1 and self.num_train_epochs is not None:  # as TRL says that epochs decide
            self.max_steps = TrainingSection.max_steps
        super().__post_init__()
        is_known = self.dataset_order in ("shuffled", "adaptive", "as_is") or self.dataset_order.startswith("column:")
        self.check(is_known, dataset_order="use shuffled, adaptive, as_is or column:NAME")
        self.read_json("lr_scheduler_kwargs")
        is_constant = self.lr_scheduler_type.startswith("constant")
        self.check(not (is_constant and self.lr_scheduler_kwargs), lr_scheduler_kwargs="a constant rate takes none")
        has_warmup = self.warmup_steps not in (0, TrainingSection.warmup_steps)
        is_ignored = self.lr_scheduler_type == "constant" and has_warmup
        self.check(not is_ignored, warmup_steps="a constant rate has none: use constant_with_warmup, or 0")
        is_updates = self.warmup_steps < 1 or self.warmup_steps == int(self.warmup_steps)
        self.check(is_updates, warmup_steps="use a whole number of updates, or a share of all below 1")

    def fill_in_unset(self, recorded: Mapping[str, Any], world_size: int, is_lora: bool) -> None:
        """Give unset settings the value of the run to continue, or their default."""
        if self.prompts_per_step is None:
            nearest = max(1, round(_PROMPTS / world_size)) * world_size
            self.prompts_per_step = recorded.get("prompts_per_step", nearest)
        if self.learning_rate is None:
            self.learning_rate = float(recorded.get("learning_rate", _LORA_RATE if is_lora else _RATE))

    @property
    def updates_per_round(self) -> int:
        return self.steps_per_generation * self.num_iterations

    def steps_of_round(self, number: int) -> range:
        """Return the steps that first train on round `number`, both from 0."""
        first = number * self.steps_per_generation
        return range(first, first + self.steps_per_generation)

    def check_ranks(self, world_size: int) -> None:
        """Raise ConfigError if the ranks cannot share prompts_per_step equally, or sequences."""
        is_shared = world_size % self.sequence_parallel_size == 0
        self.check(is_shared, sequence_parallel_size=f"{world_size} ranks form no groups of so many: use another")
        if self.prompts_per_step is None:
            return  # it will fit
        rest = self.prompts_per_step % world_size
        lower, upper = self.prompts_per_step - rest, self.prompts_per_step - rest + world_size
        remedy = f"use {f'{lower} or ' if lower else ''}{upper}, or another number of ranks"
        self.check(rest == 0, prompts_per_step=f"{world_size} ranks cannot share it equally: {remedy}")


TRACKERS = ("tensorboard", "wandb", "trackio", "swanlab", "mlflow", "none")


@dataclass
class RecordSection(Section):
    """Settings of a run's folder: saving and evaluation, and how often."""

    HEADING = "evaluation and records"

    eval_steps: int = option(
        50, "updates between evaluations, beside first and last; 0: none", at_least=-1, common=True
    )
    log_eval_completions: int = option(32, "greedy answers of an evaluation in completions.jsonl", at_least=-1)
    eval_samples: int = option(256, "problems to ask, the first of the test split; 0 is all", at_least=-1)
    metric_for_best_model: str | None = option(
        None,
        "metric of the best checkpoint, the higher the better: accuracy, reward, rewards/NAME/mean and others; unset "
        "is accuracy, or reward without a verdict",
        needs="eval_steps above 0",
    )
    load_best_model_at_end: bool = option(
        False, "save the best checkpoint's model as the run's, if it beats the last step's", needs="eval_steps above 0"
    )
    save_steps: int = option(100, "updates between checkpoints; 0 is never", at_least=-1, common=True)
    save_total_limit: int = option(2, "newest checkpoints to keep, beside the best; 0 keeps all", at_least=-1)
    save_system_prompt: bool = option(False, "save system_prompt in the chat template too, for programs such as vLLM")
    push_to_hub: bool = option(False, "push the final model to the hub, with the token of 'hf auth login' or HF_TOKEN")
    hub_strategy: Literal["end", "every_save"] = option(
        "end", "every_save pushes the model of each checkpoint too", needs="push_to_hub"
    )
    hub_model_id: str | None = option(None, "repository to push to; unset: the run's name", needs="push_to_hub")
    hub_private_repo: bool = option(False, "make it private; unset: the owner's settings", needs="push_to_hub")
    resume_from_checkpoint: str | None = option(None, "folder checkpoint-STEP, or last, to continue from", common=True)
    output_dir: str | None = option(None, "folder of the run, made if missing; unset is runs/DATE-TIME", common=True)
    report_to: list[str] = option(["tensorboard"], f"where metrics go too: {', '.join(TRACKERS)}")
    callback: str | None = option(
        None, "function that is called after each step: path/to/file.py:function (docs/runs.md)"
    )
    dry_run: bool = option(False, "check all, print a step's shape and memory, load no weights, and end", common=True)

    def __post_init__(self) -> None:
        for field in fields(RecordSection):
            if getattr(self, field.name) == -1:  # other trainers' word for never, or for all
                setattr(self, field.name, 0)
        super().__post_init__()
        has_run = self.resume_from_checkpoint != "last" or self.output_dir is not None
        self.check(has_run, resume_from_checkpoint="of which run? set output_dir to its folder")
        has_checkpoints = self.save_steps > 0 or not self.load_best_model_at_end
        self.check(has_checkpoints, load_best_model_at_end="no checkpoint is saved: set save_steps above 0")
        for name in self.report_to:
            require(name in TRACKERS, "report_to", name, f"use {', '.join(TRACKERS)}")
        if self.callback is not None:
            check_file("callback", self.callback)


@dataclass
class TrainerConfig(
    RecordSection,
    ReferenceConfig,
    PolicyConfig,
    TrainingSection,
    LossSection,
    RolloutSection,
    PoolSection,
    RewardedConfig,
):
    """Every setting of `grpo_ref_split.py`."""

    SHORT: ClassVar = {"model": "model_name_or_path", "dataset": "dataset_name"}
    UNCOMMON: ClassVar = {"dataset_test_split", "num_generations_eval", "temperature", "port", "token_file"}
    """common settings of other programs that the short `--help` of this one leaves out"""
    INSTEAD: ClassVar = INSTEAD

    def __post_init__(self) -> None:
        name = self.resume_from_checkpoint
        continued = self.output_dir if name == "last" else name and Path(name).parent
        recorded = settings_in(Path(continued)) if continued else {}  # the checkpoint is compared with what was set
        if self.importance_sampling_mode is None:
            default = "token_truncate" if self.sampler == "pool" else "none"
            self.importance_sampling_mode = recorded.get("importance_sampling_mode", default)
        super().__post_init__()
        self.fill_in_unset(recorded, rank_count(), self.use_peft)
        self.check_ranks(rank_count())
        self.check(bool(self.system_prompt) or not self.save_system_prompt, save_system_prompt="system_prompt is empty")
        needs_adapter = self.ref == "adapter_off" and not self.use_peft
        self.check(not needs_adapter, ref="it needs an adapter: add use_peft, or use local")
        is_mixed = self.agent is not None and self.in_flight_weight_updates
        self.check(not is_mixed, in_flight_weight_updates="an agent's episode is drawn by one version: leave it out")
        estimator = self.advantage_estimator
        compares = estimator not in ("reinforce++", "remax") and ":" not in estimator and not self.is_taught_alone
        if self.num_generations == 1 and compares:
            self.refuse("num_generations", f"{estimator} compares a prompt's completions: use 2 or more")
        needs_rewards = {
            "max_resample": self.max_resample > 0,
            "dataset_order": self.dataset_order == "adaptive",
            "num_draws": self.draws > self.num_generations,
            "advantage_estimator": estimator in ("passk", "remax"),
            "multi_objective_aggregation": self.multi_objective_aggregation != "sum_then_normalize",
            "kl_in_reward": self.kl_in_reward,
            "soft_punish_cache": self.soft_punish_cache > 0 and not self.reward_funcs,
            "off_policy_mask_threshold": self.off_policy_mask_threshold is not None,
        }
        for name, is_needed in needs_rewards.items():
            remedy = "it needs rewards, and a teacher alone gives none: leave it out"
            self.check(not (is_needed and self.is_taught_alone), **{name: remedy})
        reason = "of one trained completion no rewards can differ: use num_generations 2 or more"
        self.check(self.num_generations > 1 or self.draws == 1, num_draws=reason)
        reason = "passk would judge other completions than it trains on: leave it out"
        self.check(estimator != "passk" or self.draws == self.num_generations, num_draws=reason)
        if self.max_resample > 0 and not self.groups_have_signal:
            self.refuse("max_resample", f"{estimator} may learn from a group of equal rewards: use 0")
        if self.dataset_order == "adaptive" and not self.groups_have_signal:
            self.refuse("dataset_order", f"{estimator} may learn from a group of equal rewards: use shuffled")
        if estimator == "remax" and self.sampler == "pool":
            self.refuse("advantage_estimator", "a pool draws no greedy completion: use sampler continuous, or rloo")
        if self.sequence_parallel_size > 1 and self.router_aux_loss_coef > 0:
            self.refuse("sequence_parallel_size", "router_aux_loss_coef needs whole sequences on each rank: use 1")
        needs_server = self.beta > 0 and self.ref == "server"
        self.check(self.port != 0 or not needs_server, port="the trainer cannot know the server's port: name it")
        if self.ref_update_steps > 0 and not needs_server:
            self.refuse("ref_update_steps", "there is no reference server: use 0, or a beta above 0 and ref server")
        if self.ref_update_steps % self.updates_per_round > 0:
            self.refuse("ref_update_steps", f"a round has one reference: use a multiple of {self.updates_per_round}")
        urls = {url for of_source in self.teachers.values() for url in of_source}
        if self.ref_update_steps > 0 and needs_server and urls & {*self.ref_servers}:
            self.refuse("teacher_servers", "ref_update_steps replaces the model of a reference server: use another")
        if self.ref_update_steps > 0 and self.quantization != "none":
            self.refuse("ref_update_steps", "4-bit weights cannot be replaced on a server: use 0")

    @property
    def is_taught_alone(self) -> bool:
        """whether a teacher alone judges: there are no rewards, or none has a weight"""
        has_rewards = any(self.reward_weights) or self.environment is not None or self.agent is not None
        return bool(self.teacher_servers) and not has_rewards

    def version_of_round(self, number: int) -> int:
        """Return the number of updates of the policy that draws round `number`, from 0."""
        return max(0, number - self.max_policy_lag) * self.updates_per_round


def settings_in(run: Path) -> dict[str, Any]:
    """Return the settings in the config.yaml of a run's folder; none if it is not there, or damaged."""
    try:
        settings = load_yaml((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}
