"""Every setting of all programs, with its default and its limits. grpo/arguments.py reads them.

Field names follow TRL's GRPOConfig and ScriptArguments where those have the same thing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Optional

import yaml

TOKEN_VARIABLE = "GRPO_REF_TOKEN"
REPOSITORY = Path(__file__).resolve().parent.parent


class ConfigError(ValueError):
    """A setting that cannot be used. The message names the field, the value and the remedy."""


def option(default: Any, help: str) -> Any:
    """A field with its line of `--help`."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass
class SharedConfig:
    """Which model, for every program."""

    _argument_group_name = "model"

    model_name_or_path: str = option(
        "Qwen/Qwen2.5-1.5B-Instruct",
        "hub id or local folder, of a model or a LoRA adapter: the trainer's first weights, the server's frozen ones, "
        "those to evaluate or talk to",
    )
    trust_remote_code: bool = option(False, "run model code that comes with the weights")
    dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto", "weights and forward pass; auto is bfloat16 on a GPU, float32 on a CPU"
    )


@dataclass
class ConnectionSection:
    """How the server and the trainer find and trust each other."""

    _argument_group_name = "connection (server and trainer)"

    port: int = option(
        59875, "the reference server's TCP port (0 lets the system choose one, and the server says which)"
    )
    token: Optional[str] = option(
        None,
        "shared secret of server and trainer. Others see it in ps: rather use token_file or the environment variable "
        f"{TOKEN_VARIABLE}",
    )
    token_file: Optional[str] = option(None, "file that holds the token, and nothing else")

    def __post_init__(self) -> None:
        if self.token_file is not None:
            token = _read_token(self.token_file)
            _require(self.token in (None, token), "token_file", self.token_file, "token says another one")
            self.token = token
        self.token = self.token or os.environ.get(TOKEN_VARIABLE) or None
        _require(0 <= self.port < 65536, "port", self.port, "use a number from 0 to 65535")
        _require(
            self.token is None or (self.token.isascii() and self.token.isprintable() and " " not in self.token),
            "token",
            "(hidden)",
            "it travels in an HTTP header: use printable ASCII without spaces",
        )


@dataclass
class ServingSection:
    _argument_group_name = "reference server"

    task: Literal["logprobs", "reward"] = option(
        "logprobs", "log-probs of a reference model, or scores of a reward model (sequence classification, one output)"
    )
    host: str = option("127.0.0.1", "address to listen on; anything but loopback needs a token")
    max_length: Optional[int] = option(
        None, "longest prompt plus completion, in tokens; unset is the model's own maximum"
    )
    max_batch_tokens: Optional[int] = option(
        None, "tokens in one forward pass, a shared prompt counted once; unset is 16384 on a GPU, 4096 on a CPU"
    )
    device_map: Optional[str] = option(
        None, "auto spreads the model over all visible GPUs, for one too big for a single card (needs accelerate)"
    )
    quantization: Literal["none", "8bit", "4bit"] = option(
        "none", "weights in 8 or 4 bits, by bitsandbytes: less memory, and log-probs of a slightly different model"
    )
    deterministic: bool = option(
        False, "compute each request by itself: bitwise the same answer whatever else waits, before and after a restart"
    )
    update_folder: Optional[str] = option(
        None,
        "let trainers replace the weights (their ref_update_steps): new ones lie in this folder until they are whole, "
        "so its disk needs room for a model; unset refuses them",
    )
    max_queue_tokens: int = option(
        4_000_000, "tokens that may wait, one client's at most as many as are left free; beyond it 503 with Retry-After"
    )
    max_request_tokens: Optional[int] = option(
        None, "tokens in one request; unset is half of max_queue_tokens, the most one client may have waiting"
    )
    max_request_sequences: int = option(4096, "sequences in one request")
    max_request_mb: int = option(64, "largest request body, in MiB")
    max_header_kb: int = option(16, "largest request line with all headers, in KiB")
    header_timeout: float = option(10.0, "seconds a client may take to send a request's headers")
    body_timeout: float = option(120.0, "seconds a client may take to send a request's body")
    max_connections: int = option(1000, "open connections; one more is told 503 and closed")
    drain_timeout: float = option(60.0, "seconds that SIGTERM gives to what is in hand; then the server ends with 1")
    log_level: Literal["debug", "info", "warning"] = option(
        "info", "debug is a line a request, info a summary each minute, warning only trouble"
    )
    estimate: bool = option(
        False, "print the memory that this model, these lengths and this dtype need, load no weights, and end"
    )


@dataclass
class DataSection:
    _argument_group_name = "data"

    dataset_name: str = option("openai/gsm8k", "hub id, or a local .json/.jsonl/.parquet file, or a folder of them")
    dataset_config: Optional[str] = option(
        None, "the hub dataset's configuration name; unset is 'main' for openai/gsm8k"
    )
    dataset_train_split: str = option("train", "split to train on")
    dataset_test_split: str = option("test", "split to evaluate on")
    dataset_prompt_column: str = option("question", "column with the prompt: text, or a list of chat messages")
    dataset_answer_column: str = option(
        "answer", "column with the gold answer; what follows '####' in it, if anything does"
    )
    max_prompt_length: int = option(512, "longer prompts, in tokens, are dropped when the data is loaded, and counted")


@dataclass
class AnswerSection:
    _argument_group_name = "answers"

    system_prompt: str = option(
        "You are a helpful assistant. First think about the problem step by step, then give the final answer. Write "
        "reasoning and answer within tags, like this: <think>reasoning here</think><answer>answer here</answer>",
        "system message put before every prompt; empty for none",
    )
    max_completion_length: int = option(512, "new tokens at most")
    temperature: float = option(1.0, "of the sampler, and of every log-prob")
    seed: int = option(42, "of the prompt order and of sampling")


@dataclass
class GenerationSection:
    _argument_group_name = "generation and evaluation"

    sequences_per_generate: int = option(64, "completions that one rank generates at a time")
    num_generations_eval: int = option(
        0, "samples of each held-out problem, for avg@k and pass@k beside the greedy accuracy; 0 is greedy only"
    )
    pass_at_k: Optional[list[int]] = option(None, "the k of pass@k; unset is 1, 2, 4, ... and num_generations_eval")


@dataclass
class AnsweringConfig(GenerationSection, AnswerSection, DataSection, SharedConfig):
    """What it takes to have a dataset's problems answered, in training and after it."""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest completion that there may be."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def ks(self) -> list[int]:
        """Every k of pass@k, ascending; none where nothing is sampled."""
        most = self.num_generations_eval
        powers = [1 << power for power in range(most.bit_length())]
        return sorted(set(self.pass_at_k or [*powers, most]) - {0})

    def _check_samples(self) -> None:
        most = self.num_generations_eval
        _require(most >= 0, "num_generations_eval", most, "use 0 or more")
        for k in self.pass_at_k or []:
            _require(k > 0, "pass_at_k", k, "use 1 or more")
            _require(k <= most, "pass_at_k", k, f"num_generations_eval={most} is too few for it: use {k} or more")


@dataclass
class RolloutSection:
    _argument_group_name = "rollouts and rewards"

    num_generations: int = option(8, "completions per prompt, the group whose rewards are compared")
    max_resample: int = option(
        0, "times that prompts whose groups are without signal are replaced by others before an update (DAPO); 0: never"
    )
    reward_funcs: list[str] = option(
        ["correctness_reward", "format_reward"],
        "functions of reward.py, path/to/file.py:function, reward models (org/model on the hub, ./folder), or URLs of "
        "servers with --task reward",
    )
    reward_weights: Optional[list[float]] = option(None, "one weight a reward function; unset weighs each 1")
    soft_punish_cache: int = option(
        0, "tokens before max_completion_length over which a reward falls from 0 to -1 (DAPO's overlong punishment)"
    )
    reward_timeout: Optional[float] = option(
        None,
        "seconds a reward function may take for a completion: it is called in other processes, on one completion at a "
        "time, and killed if it hangs; unset calls it in the trainer",
    )
    reward_fallback: float = option(0.0, "reward of a completion on which a function hangs or ends its process")


@dataclass
class LossSection:
    """grpo/loss.py has the formulas and their papers."""

    _argument_group_name = "loss"

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"] = option(
        "grpo",
        "grpo is a mean over sequences of token means; bnpo and dapo one mean over all tokens; dr_grpo divides by "
        "max_completion_length; cispo clips the weights; sapo has a soft gate for the clip",
    )
    importance_sampling_level: Literal["token", "sequence"] = option(
        "token", "the probability ratio of each token, or one of each sequence (GSPO)"
    )
    epsilon: float = option(0.2, "the probability ratio is clipped below at 1 - epsilon")
    epsilon_high: Optional[float] = option(
        None, "... and above at 1 + epsilon_high; unset is epsilon. For cispo the ratio's bound itself; unset is 5.0"
    )
    delta: Optional[float] = option(
        None, "two-sided (dual) clip: where the advantage is negative, the ratio is bounded by this; above 1 + epsilon"
    )
    sapo_temperature_pos: float = option(1.0, "sapo's gate where the advantage is positive")
    sapo_temperature_neg: float = option(1.05, "... and where it is not")
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group", "advantages are divided by the std of their group, of the whole batch, or not"
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize", "several rewards are added and then compared within the group, or the reverse (GDPO)"
    )
    reward_tolerance: float = option(
        0.0, "a group whose rewards differ by no more than this is without signal: its advantages are exactly 0"
    )
    beta: float = option(0.04, "weight of the KL to the reference; 0 needs no reference server")
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = option(
        "k3", "of the KL from single tokens; k3+ has the value of k3 and the gradient of k2"
    )
    kl_in_reward: bool = option(
        False, "take beta times a completion's summed KL off its reward, instead of adding a KL term to the loss"
    )
    kl_target: Optional[float] = option(
        None, "adapt beta so that the KL stays near this (nats a token); unset keeps beta as it is"
    )
    kl_horizon: float = option(10_000.0, "completions over which an adaptive beta follows")
    use_bias_correction_kl: bool = option(False, "multiply the KL term by the probability ratio (DeepSeek-V3.2)")
    entropy_coef: float = option(0.0, "weight of a bonus for the mean entropy of the tokens")
    top_entropy_quantile: float = option(
        1.0, "only this share of the step's tokens, those of highest entropy, is in the policy term; 1 is all"
    )
    mask_truncated_completions: bool = option(
        False, "leave completions cut at max_completion_length out of the loss, and out of what it is divided by"
    )
    importance_sampling_mode: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        option(
            "none",
            "weigh by policy / sampler, of tokens or sequences, truncated at the bounds or 0 beyond (TRL: vllm_...)",
        )
    )
    importance_sampling_clip_max: Optional[float] = option(3.0, "upper bound of that weight")
    importance_sampling_clip_min: Optional[float] = option(None, "lower bound of that weight")
    off_policy_mask_threshold: Optional[float] = option(
        None, "drop sequences of negative advantage from which the policy moved further than this (nats a token)"
    )

    @property
    def upper_clip(self) -> float:
        """What `epsilon_high` is where it was not given."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 5.0 if self.loss_type == "cispo" else self.epsilon


@dataclass
class TrainingSection:
    _argument_group_name = "training"

    max_steps: int = option(500, "optimizer updates")
    prompts_per_step: int = option(56, "prompts per update over all ranks; times num_generations completions")
    steps_per_generation: int = option(1, "updates that one round of generation feeds, each with prompts of its own")
    num_iterations: int = option(1, "times that each round's completions are trained on")
    micro_batch_tokens: int = option(
        16384, "tokens in one forward and backward, a shared prompt counted once: lower it if memory runs out"
    )
    learning_rate: float = option(1e-6, "AdamW's peak learning rate")
    lr_scheduler_type: Literal["constant_with_warmup", "linear", "cosine"] = option(
        "constant_with_warmup", "what follows the linear warm-up"
    )
    warmup_steps: int = option(10, "updates over which the learning rate rises linearly from 0")
    adam_beta1: float = option(0.9, "AdamW")
    adam_beta2: float = option(0.99, "AdamW")
    adam_epsilon: float = option(1e-8, "AdamW")
    weight_decay: float = option(0.0, "AdamW")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm; 0 switches clipping off")
    gradient_checkpointing: bool = option(True, "recompute activations in the backward pass: less memory, more time")
    deepspeed: str = option("ds_config.json", "DeepSpeed's engine knobs; 'auto' there is filled from these fields")


@dataclass
class AdapterSection:
    _argument_group_name = "LoRA (needs peft)"

    use_peft: bool = option(
        False, "train a LoRA adapter, not the whole model: a new one, or the one that model_name_or_path names"
    )
    lora_r: int = option(16, "rank of a new adapter; one that model_name_or_path names keeps its own settings")
    lora_alpha: int = option(32, "its product is scaled by lora_alpha / lora_r")
    lora_dropout: float = option(
        0.0, "only 0: with dropout, log-probs would be those of another distribution than was sampled from"
    )
    lora_target_modules: Optional[list[str]] = option(
        None, "names of the layers that get an adapter, or all-linear; unset is peft's choice for this kind of model"
    )
    use_rslora: bool = option(False, "scale by lora_alpha / sqrt(lora_r) instead")
    use_dora: bool = option(False, "DoRA: train a magnitude for each output of a layer beside LoRA's direction")
    merge_on_save: bool = option(False, "save whole models, the adapter merged into the base, instead of adapters")


@dataclass
class ReferenceSection:
    _argument_group_name = "the reference"

    ref: Literal["server", "adapter_off"] = option(
        "server",
        "who computes reference log-probs: a reference server, or the trainer with its adapter off (or, where it "
        "began with an adapter, with that one)",
    )

    ref_servers: Optional[list[str]] = option(
        None, "base URLs, all of the same model: work goes to each by its speed; unset is http://127.0.0.1:PORT"
    )
    ref_ca_file: Optional[str] = option(
        None, "PEM file of the authority that signed an https server's certificate; unset is the public ones"
    )
    ref_startup_timeout: float = option(300.0, "seconds to wait at the start for a server that is not ready")
    ref_request_timeout: float = option(120.0, "seconds without an answer after which a request is sent again")
    ref_deadline: float = option(900.0, "seconds after which a group without its log-probs ends the run")
    ref_update_steps: int = option(
        0, "the policy becomes the reference every so many updates, on servers with update_folder; 0 is never"
    )
    ref_mixup_alpha: float = option(
        1.0, "share of the policy in the new reference, the rest is the old one; 1 replaces it (TRL's default is 0.6)"
    )


@dataclass
class RecordSection:
    _argument_group_name = "evaluation and records"

    eval_steps: int = option(50, "evaluate every so many updates, and before the first and after the last; 0 is never")
    eval_samples: int = option(256, "held-out problems, the first of the test split; 0 is all")
    save_steps: int = option(100, "save the model every so many updates; 0 is only at the end")
    output_dir: Optional[str] = option(None, "folder of the run, made if missing; unset is runs/DATE-TIME")
    report_to: list[str] = option(
        ["tensorboard"], "any of tensorboard, wandb, or none; tensorboard is skipped where it is not installed"
    )


@dataclass
class ServerConfig(ServingSection, ConnectionSection, SharedConfig):
    """All that `ref_server.py` reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "max_length",
            "max_batch_tokens",
            "max_request_tokens",
            "max_request_sequences",
            "max_request_mb",
            "max_header_kb",
            "max_connections",
            "header_timeout",
            "body_timeout",
            "drain_timeout",
        ):
            value = getattr(self, name)
            _require(value is None or (math.isfinite(value) and value > 0), name, value, "use a number above 0")
        _require(self.max_queue_tokens >= 2, "max_queue_tokens", self.max_queue_tokens, "use 2 or more")
        if self.max_request_tokens is None:
            self.max_request_tokens = self.max_queue_tokens // 2
        _require(
            2 * self.max_request_tokens <= self.max_queue_tokens,
            "max_request_tokens",
            self.max_request_tokens,
            f"one client may have half of max_queue_tokens waiting: use {self.max_queue_tokens // 2} or less",
        )
        for name, off in (("device_map", None), ("quantization", "none"), ("estimate", False), ("update_folder", None)):
            value = getattr(self, name)
            _require(self.task == "logprobs" or value == off, name, value, "not for task reward: leave it out")
        _require(self.device_map in (None, "auto"), "device_map", self.device_map, "use auto, or leave it out")
        _require(
            self.update_folder is None or self.quantization == "none",
            "update_folder",
            self.update_folder,
            f"weights in {self.quantization} cannot be replaced: leave update_folder or quantization out",
        )
        _require(
            self.token is not None or self.host in ("127.0.0.1", "localhost", "::1"),
            "host",
            self.host,
            f"others could reach it there: set the environment variable {TOKEN_VARIABLE} (here and for the trainer), "
            "or listen on 127.0.0.1",
        )

    def batch_tokens(self, device_type: str) -> int:
        """Tokens of a forward pass on such a device ("cuda" or "cpu")."""
        return self.max_batch_tokens or (16384 if device_type == "cuda" else 4096)


@dataclass
class TrainerConfig(
    RecordSection,
    ReferenceSection,
    AdapterSection,
    ConnectionSection,
    TrainingSection,
    LossSection,
    RolloutSection,
    AnsweringConfig,
):
    """All that `grpo_ref_split.py` reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_weights is None:
            self.reward_weights = [1.0] * len(self.reward_funcs)
        if self.ref_servers is None:
            self.ref_servers = [f"http://127.0.0.1:{self.port}"]
        self.ref_servers = [url.rstrip("/") for url in self.ref_servers]
        self._check()

    def _check(self) -> None:
        _require_finite(self)
        self._check_samples()
        _require(
            self.num_generations >= 2,
            "num_generations",
            self.num_generations,
            "a group of one has no relative advantage: use 2 or more",
        )
        _require(
            self.temperature > 0,
            "temperature",
            self.temperature,
            "training needs sampling: use a number above 0, such as 1.0",
        )
        for name in (
            "max_prompt_length",
            "max_completion_length",
            "sequences_per_generate",
            "prompts_per_step",
            "steps_per_generation",
            "num_iterations",
            "micro_batch_tokens",
            "max_steps",
            "learning_rate",
            "adam_epsilon",
            "sapo_temperature_pos",
            "sapo_temperature_neg",
            "kl_target",
            "kl_horizon",
            "reward_timeout",
            "importance_sampling_clip_max",
            "off_policy_mask_threshold",
            "lora_r",
            "lora_alpha",
            "ref_request_timeout",
            "ref_deadline",
        ):
            value = getattr(self, name)
            _require(value is None or value > 0, name, value, "use a number above 0")
        for name in (
            "beta",
            "epsilon",
            "epsilon_high",
            "reward_tolerance",
            "entropy_coef",
            "importance_sampling_clip_min",
            "max_resample",
            "soft_punish_cache",
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "eval_steps",
            "eval_samples",
            "save_steps",
            "seed",
            "ref_startup_timeout",
            "ref_update_steps",
        ):
            value = getattr(self, name)
            _require(value is None or value >= 0, name, value, "use 0 or more")
        _require(self.seed < 2**31, "seed", self.seed, "use a number below 2147483648")
        _require(self.epsilon < 1, "epsilon", self.epsilon, "use a number below 1, such as 0.2")
        self._check_loss()
        for name in ("adam_beta1", "adam_beta2"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "use a number from 0 to below 1")
        _require(
            len(self.reward_weights) == len(self.reward_funcs),
            "reward_weights",
            self.reward_weights,
            f"give {len(self.reward_funcs)} weights, one for each of {' '.join(self.reward_funcs)}",
        )
        for url in self.ref_servers:
            _require(url.startswith(("http://", "https://")), "ref_servers", url, "write it as http://HOST:PORT")
        _require(len(set(self.ref_servers)) == len(self.ref_servers), "ref_servers", self.ref_servers, "name each once")
        _require(
            self.ref_ca_file is None or Path(self.ref_ca_file).is_file(),
            "ref_ca_file",
            self.ref_ca_file,
            "there is no such file: name the PEM file of the authority that signed the server's certificate",
        )
        _require(
            self.ref_update_steps == 0 or (self.beta > 0 and self.ref == "server"),
            "ref_update_steps",
            self.ref_update_steps,
            "there is no reference server to update: use 0, or a beta above 0 and ref server",
        )
        updates = self.steps_per_generation * self.num_iterations
        _require(
            self.ref_update_steps % updates == 0,
            "ref_update_steps",
            self.ref_update_steps,
            f"a round of generation feeds {updates} updates, all with the same reference: use a multiple of {updates}",
        )
        _require(
            0 < self.ref_mixup_alpha <= 1,
            "ref_mixup_alpha",
            self.ref_mixup_alpha,
            "use a number above 0, and 1 at most",
        )
        for name in self.report_to:
            _require(name in ("tensorboard", "wandb", "none"), "report_to", name, "use tensorboard, wandb or none")
        self._check_adapter()
        _require(
            self.port != 0 or self.beta == 0 or self.ref == "adapter_off",
            "port",
            self.port,
            "the trainer cannot know which port the server was given: name it",
        )

    def _check_loss(self) -> None:
        _require(
            self.delta is None or self.delta > 1 + self.upper_clip,
            "delta",
            self.delta,
            f"it bounds what the clip lets through: use a number above {1 + self.upper_clip:g}, such as 4",
        )
        _require(
            self.delta is None or self.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"),
            "delta",
            self.delta,
            f"{self.loss_type} has no clip to bound: leave it out",
        )
        _require(
            self.top_entropy_quantile <= 1 and self.top_entropy_quantile > 0,
            "top_entropy_quantile",
            self.top_entropy_quantile,
            "use a share above 0 and up to 1, such as 0.2",
        )
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        _require(
            low is None or high is None or low <= high,
            "importance_sampling_clip_min",
            low,
            f"it is above importance_sampling_clip_max={high}: lower it",
        )
        _require(
            self.soft_punish_cache <= self.max_completion_length,
            "soft_punish_cache",
            self.soft_punish_cache,
            f"use max_completion_length={self.max_completion_length} or less",
        )
        for name in ("kl_in_reward", "kl_target"):
            _require(
                self.beta > 0 or not getattr(self, name), name, getattr(self, name), "beta is 0: set beta, such as 0.04"
            )
        _require(
            not (self.kl_in_reward and self.multi_objective_aggregation == "normalize_then_sum"),
            "kl_in_reward",
            True,
            "the KL is taken off the sum of the rewards: use multi_objective_aggregation sum_then_normalize",
        )
        _require(
            not (self.kl_in_reward and self.use_bias_correction_kl),
            "use_bias_correction_kl",
            True,
            "it corrects the KL term of the loss, and with kl_in_reward there is none: use one of the two",
        )

    def _check_adapter(self) -> None:
        for name, idle in (
            ("ref", "server"),
            ("merge_on_save", False),
            ("use_rslora", False),
            ("use_dora", False),
            ("lora_target_modules", None),
        ):
            value = getattr(self, name)
            _require(
                self.use_peft or value == idle,
                name,
                value,
                "there is no adapter without use_peft: add it, or leave this out",
            )
        _require(
            self.lora_dropout == 0,
            "lora_dropout",
            self.lora_dropout,
            "log-probs would be those of another distribution than was sampled from: use 0, or leave it out",
        )

    def check_ranks(self, world_size: int) -> None:
        """Refuse a global batch that cannot be shared equally. Raises ConfigError."""
        rest = self.prompts_per_step % world_size
        lower, upper = self.prompts_per_step - rest, self.prompts_per_step - rest + world_size
        _require(
            rest == 0,
            "prompts_per_step",
            self.prompts_per_step,
            f"{world_size} ranks cannot share it equally: use {f'{lower} or ' if lower else ''}{upper}",
        )


@dataclass
class EvaluateSection:
    _argument_group_name = "extent and output"

    eval_samples: int = option(0, "problems, the first of the split; 0 is all")
    output: Optional[str] = option(
        None, "folder to make: every completion with its verdict, the metrics, and the settings they come from"
    )


@dataclass
class EvaluateConfig(EvaluateSection, AnsweringConfig):
    """All that `python -m grpo.evaluate` reads."""

    SHORT: ClassVar = {"model": "model_name_or_path", "dataset": "dataset_name", "split": "dataset_test_split"}

    def __post_init__(self) -> None:
        _require_finite(self)
        self._check_samples()
        for name in ("max_prompt_length", "max_completion_length", "sequences_per_generate", "temperature"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "use a number above 0")
        _require(self.eval_samples >= 0, "eval_samples", self.eval_samples, "use 0 or more")
        _require(0 <= self.seed < 2**31, "seed", self.seed, "use a number from 0 to below 2147483648")


@dataclass
class ChatSection:
    _argument_group_name = "conversation"

    keep_history: bool = option(True, "an answer sees all questions and answers before it")


@dataclass
class ChatConfig(ChatSection, AnswerSection, SharedConfig):
    """All that `python -m grpo.chat` reads. A temperature of 0 is greedy."""

    SHORT: ClassVar = {"model": "model_name_or_path"}

    def __post_init__(self) -> None:
        _require_finite(self)
        _require(self.max_completion_length > 0, "max_completion_length", self.max_completion_length, "use 1 or more")
        _require(self.temperature >= 0, "temperature", self.temperature, "use 0 or more")
        _require(0 <= self.seed < 2**31, "seed", self.seed, "use a number from 0 to below 2147483648")


def write_config(config: TrainerConfig | EvaluateConfig, path: Path) -> None:
    """Write the resolved settings as YAML that `--config` reads again. The token is left out."""
    settings = {
        name: value for name, value in dataclasses.asdict(config).items() if name != "token" and value is not None
    }
    path.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _read_token(path: str) -> str:
    try:
        token = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file={path!r}: cannot be read: {error}") from error
    _require(token != "", "token_file", path, "the file is empty: write the token into it")
    return token


def _require_finite(config: Any) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, list) else [value]:
            _require(not isinstance(number, float) or math.isfinite(number), field.name, value, "use a finite number")


def _require(ok: bool, field: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{field}={value!r}: {remedy}")
