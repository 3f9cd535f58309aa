"""Every setting of both programs, with its default and its limits. grpo/arguments.py reads them.

Field names follow TRL's GRPOConfig and ScriptArguments where those have the same thing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Optional

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
    """What the server and the trainer must agree on."""

    _argument_group_name = "model and connection (both programs)"

    model_name_or_path: str = option(
        "Qwen/Qwen2.5-1.5B-Instruct",
        "hub id or local folder: the policy's first weights for the trainer, the frozen weights for the server",
    )
    trust_remote_code: bool = option(False, "run model code that comes with the weights")
    dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto", "weights and forward pass; auto is bfloat16 on a GPU, float32 on a CPU"
    )
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
    system_prompt: str = option(
        "You are a helpful assistant. First think about the problem step by step, then give the final answer. Write "
        "reasoning and answer within tags, like this: <think>reasoning here</think><answer>answer here</answer>",
        "system message put before every prompt; empty for none",
    )
    max_prompt_length: int = option(512, "longer prompts, in tokens, are dropped when the data is loaded, and counted")


@dataclass
class RolloutSection:
    _argument_group_name = "rollouts and rewards"

    num_generations: int = option(8, "completions per prompt, the group whose rewards are compared")
    max_completion_length: int = option(512, "new tokens at most")
    temperature: float = option(1.0, "of the sampler, and of every log-prob")
    sequences_per_generate: int = option(64, "completions that one rank generates at a time")
    reward_funcs: list[str] = option(
        ["correctness_reward", "format_reward"], "functions of reward.py, or path/to/file.py:function"
    )
    reward_weights: Optional[list[float]] = option(None, "one weight a reward function; unset weighs each 1")


@dataclass
class LossSection:
    _argument_group_name = "loss"

    beta: float = option(0.04, "weight of the KL to the reference; 0 needs no reference server")
    epsilon: float = option(0.2, "the probability ratio is clipped below at 1 - epsilon")
    epsilon_high: Optional[float] = option(None, "... and above at 1 + epsilon_high; unset is epsilon")


@dataclass
class TrainingSection:
    _argument_group_name = "training"

    max_steps: int = option(500, "optimizer updates")
    prompts_per_step: int = option(56, "prompts per update over all ranks; times num_generations completions")
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
    seed: int = option(42, "of the prompt order and of sampling")


@dataclass
class ReferenceSection:
    _argument_group_name = "reaching the reference server"

    ref_servers: Optional[list[str]] = option(
        None, "base URLs, all of the same model: work goes to each by its speed; unset is http://127.0.0.1:PORT"
    )
    ref_ca_file: Optional[str] = option(
        None, "PEM file of the authority that signed an https server's certificate; unset is the public ones"
    )
    ref_startup_timeout: float = option(300.0, "seconds to wait at the start for a server that is not ready")
    ref_request_timeout: float = option(120.0, "seconds without an answer after which a request is sent again")
    ref_deadline: float = option(900.0, "seconds after which a group without its log-probs ends the run")


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
class ServerConfig(ServingSection, SharedConfig):
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
        _require(self.device_map in (None, "auto"), "device_map", self.device_map, "use auto, or leave it out")
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
    RecordSection, ReferenceSection, TrainingSection, LossSection, RolloutSection, DataSection, SharedConfig
):
    """All that `grpo_ref_split.py` reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        if self.reward_weights is None:
            self.reward_weights = [1.0] * len(self.reward_funcs)
        if self.ref_servers is None:
            self.ref_servers = [f"http://127.0.0.1:{self.port}"]
        self.ref_servers = [url.rstrip("/") for url in self.ref_servers]
        self._check()

    def _check(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for number in value if isinstance(value, list) else [value]:
                _require(
                    not isinstance(number, float) or math.isfinite(number), field.name, value, "use a finite number"
                )
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
            "micro_batch_tokens",
            "max_steps",
            "learning_rate",
            "adam_epsilon",
            "ref_request_timeout",
            "ref_deadline",
        ):
            _require(getattr(self, name) > 0, name, getattr(self, name), "use a number above 0")
        for name in (
            "beta",
            "epsilon",
            "epsilon_high",
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "eval_steps",
            "eval_samples",
            "save_steps",
            "seed",
            "ref_startup_timeout",
        ):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "use 0 or more")
        _require(self.seed < 2**31, "seed", self.seed, "use a number below 2147483648")
        _require(self.epsilon < 1, "epsilon", self.epsilon, "use a number below 1, such as 0.2")
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
        for name in self.report_to:
            _require(name in ("tensorboard", "wandb", "none"), "report_to", name, "use tensorboard, wandb or none")
        _require(
            self.port != 0 or self.beta == 0,
            "port",
            self.port,
            "the trainer cannot know which port the server was given: name it",
        )

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest completion that a run may make."""
        return self.max_prompt_length + self.max_completion_length

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


def write_config(config: TrainerConfig, path: Path) -> None:
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


def _require(ok: bool, field: str, value: Any, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{field}={value!r}: {remedy}")
