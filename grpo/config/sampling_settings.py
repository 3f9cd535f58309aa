"""Settings of model, data, tools, sampling and evaluation; every setting of grpo.chat."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from grpo.config.fields import Section, option
from grpo.config.user_code import check_file


@dataclass
class SharedConfig(Section):
    HEADING = "model"

    model_name_or_path: str = option("Qwen/Qwen2.5-1.5B-Instruct", "hub id or folder; a LoRA adapter too", common=True)
    trust_remote_code: bool = option(False, "run Python code that comes with the weights")
    dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto", "type of the weights and of the forward pass; auto is bfloat16 on a GPU from Ampere on, else float32"
    )
    min_pixels: int | None = option(None, "pictures of fewer pixels are enlarged; unset is the model's own", above=0)
    max_pixels: int | None = option(None, "pictures of more pixels are reduced; unset is the model's own", above=0)
    quantization: Literal["none", "8bit", "4bit"] = option(
        "none", "keep linear layers but the head in 8 or 4 bits (bitsandbytes); the trainer takes 4bit, with LoRA"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model_name_or_path = os.path.expanduser(self.model_name_or_path)


@dataclass
class VisionSection(Section):
    HEADING = "vision tower"

    freeze_vision_tower: bool = option(False, "train the language model alone, not vision tower and projector")


@dataclass
class AdapterSection(Section):
    HEADING = "LoRA (needs peft)"

    use_peft: bool = option(False, "train a LoRA adapter, a new one or a loaded one", common=True)
    lora_r: int = option(16, "rank of a new adapter; a loaded one keeps its settings", needs="use_peft", above=0)
    lora_alpha: int = option(32, "the adapter is scaled by lora_alpha / lora_r", needs="use_peft", above=0)
    lora_target_modules: list[str] | None = option(
        None, "layers that get an adapter, or all-linear; unset is peft's choice, else all-linear", needs="use_peft"
    )
    use_rslora: bool = option(False, "scale it by lora_alpha / sqrt(lora_r) instead (rsLoRA)", needs="use_peft")
    use_dora: bool = option(False, "DoRA: train a magnitude beside LoRA's direction", needs="use_peft")
    merge_on_save: bool = option(False, "save the adapter merged into the base, as a whole model", needs="use_peft")


ANSWERED = "tools or environment"
VERIFIERS = "verifiers:"  # begins the name of an environment of this package


@dataclass
class TurnsCodeSection(Section):
    """The user's code that answers the model. A pool's worker has its own values."""

    tools: list[str] = option([], "functions that the model may call: path/to/file.py:function", may_be_empty=True)
    environment: str | None = option(
        None, "class that answers the model: path/to/file.py:Class; or verifiers:PACKAGE, verifiers:FILE.toml"
    )
    tool_timeout: float | None = option(
        None, "seconds for a call: calls run in processes, killed if they hang", needs=ANSWERED, above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.tools:
            check_file("tools", name)
        if self.environment is not None:
            check_file("environment", self.environment)

    @property
    def has_turns(self) -> bool:
        return bool(self.tools) or self.environment is not None


@dataclass
class TurnsSection(TurnsCodeSection):
    HEADING = "tools and environments"

    max_tool_calling_iterations: int | None = option(None, "most turns with answered calls", needs=ANSWERED, above=0)
    max_turns: int | None = option(
        None, "most turns in a completion; unset: no limit, of an agent 100", needs=f"{ANSWERED} or agent", above=0
    )
    max_tool_response_length: int = option(2048, "characters after which an answer is cut", needs=ANSWERED, above=0)
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = option(
        "auto",
        "form of calls where the tokenizer has no response template; auto: the chat template's",
        needs=f"{ANSWERED} or agent",
    )


@dataclass
class AgentCodeSection(Section):
    """The user's program that asks the model. A pool's worker has its own values."""

    HEADING = "agent"

    agent: str | None = option(
        None, "program that asks the policy by the OpenAI API: path/to/file.py:function, or 'command: WORDS'"
    )
    agent_python: str | None = option(None, "its interpreter; unset is the run's own", needs="agent")
    agent_timeout: float = option(
        300.0, "seconds that an episode's program may take between its requests, in all", needs="agent", above=0
    )
    agent_memory: float | None = option(None, "GiB of an episode's processes; unset: no limit", needs="agent", above=0)
    max_concurrent_episodes: int = option(256, "episodes that run at a time on a rank", needs="agent", above=0)

    def __post_init__(self) -> None:
        environment = getattr(self, "environment", None)
        if is_adapted(environment):  # it owns its loop, as an agent does
            self.check(self.agent is None, agent=f"environment {environment} is one: name one of them")
            self.agent, self.environment = environment, None
        super().__post_init__()
        if self.agent is not None and not self.agent.startswith("command:") and not is_adapted(self.agent):
            check_file("agent", self.agent)


def is_adapted(name: str | None) -> bool:
    """Tell whether a setting names an environment of a package that grpo/agents/adapters plays."""
    return name is not None and name.startswith(VERIFIERS)


def label_of(agent: str) -> str:
    """Return the name of the setting `agent` in metrics: its function's name, or its package's."""
    if agent.startswith("command:"):
        return "agent"
    return Path(agent.partition(":")[2]).stem if is_adapted(agent) else agent.rpartition(":")[2]


@dataclass
class AgentSection(AgentCodeSection):
    HEADING = "agent"

    agent_failure_reward: float | None = option(
        None, "reward of an episode whose program failed; unset: none, it is compared with no other", needs="agent"
    )
    agent_may_sample: bool = option(
        False, "allow requests of another temperature: what they draw is not trained on", needs="agent"
    )
    agent_history: Literal["drawn", "rendered"] = option(
        "drawn",
        "where the chat template would write earlier turns otherwise, as Qwen3's leaves out thinking: continue the "
        "drawn ids, or begin a branch of what it writes, which a server shows a deployed model",
        needs="agent",
    )


@dataclass
class DataSection(Section):
    HEADING = "data"

    dataset_name: str = option(
        "openai/gsm8k",
        "hub id, .json, .jsonl, .csv or .parquet file, folder, or .yaml of several (docs/data.md)",
        common=True,
    )
    dataset_config: str | None = option(None, "name of the hub dataset's configuration; unset is main for openai/gsm8k")
    dataset_train_split: str = option("train", "split to train on, or a part of it: train[100:], train[:90%]")
    dataset_test_split: str = option("test", "split to evaluate on, or a part of it", common=True)
    eval_holdout: float = option(
        0,
        "rows of dataset_train_split to evaluate on and never train on, in place of a test split; below 1: a share",
        at_least=0,
    )
    dataset_prompt_column: str = option(
        "question", "column of the prompt, text or chat messages; the default also means prompt", common=True
    )
    dataset_answer_column: str = option("answer", "column of the gold answer (after any ####); '': none", common=True)
    dataset_image_column: str | None = option(None, "column of a prompt's pictures; unset: image or images; '': none")
    max_pictures: int | None = option(None, "prompts with more pictures are dropped at the start, and counted", above=0)
    prompt_format: Literal["chat", "raw"] = option(
        "chat", "raw continues a text prompt as it is, without chat template and system prompt; chats are never raw"
    )
    max_prompt_length: int = option(512, "prompts of more tokens are dropped at the start, and counted", above=0)


@dataclass
class AnswerSection(Section):
    HEADING = "answers"

    system_prompt: str = option(
        "You are a helpful assistant. First think about the problem step by step, then give the final answer. Write "
        "reasoning and answer within tags, like this: <think>reasoning here</think><answer>answer here</answer>",
        "system message of every prompt that has none; an empty text adds none",
        common=True,
    )
    chat_template_kwargs: dict | str | None = option(None, "arguments of the template: '{\"enable_thinking\": false}'")
    max_completion_length: int = option(512, "most tokens that a completion may have", above=0, common=True)
    temperature: float = option(1.0, "logits are divided by it; 0: greedy, chat only", at_least=0, common=True)
    seed: int = option(
        42, "decides all samples and, without data_seed, the order of prompts", at_least=0, below=2**31, common=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.read_json("chat_template_kwargs")
        for name in ("tokenize", "add_generation_prompt", "continue_final_message"):
            reason = f"the program itself sets {name}: leave it out"
            self.check(name not in (self.chat_template_kwargs or {}), chat_template_kwargs=reason)


LOCAL_SAMPLERS = (
    "continuous draws with rows that are always full, each prompt computed once; generate is transformers' own, its "
    "replacement where the model needs it"
)


@dataclass
class GenerationSection(Section):
    HEADING = "generation and evaluation"

    sequences_per_generate: int = option(64, "completions that one rank generates at a time", above=0, common=True)
    cuda_graphs: bool = option(True, "draw by CUDA graphs where the model can", off="draw without: slower, less memory")
    fused_kernels: bool = option(
        True, "draw by Triton kernels on a GPU, where the model can", off="draw by torch's own"
    )
    num_generations_eval: int = option(0, "samples for avg@k and pass@k; 0: greedy alone", common=True, at_least=0)
    eval_temperature: float | None = option(
        None, "temperature of these samples; unset is temperature", needs="num_generations_eval above 0", above=0
    )

    @property
    def ks(self) -> list[int]:
        """Return every k of pass@k, ascending: 1, 2, 4, ... and num_generations_eval."""
        samples = self.num_generations_eval
        return sorted({*(1 << power for power in range(samples.bit_length())), samples} - {0})


@dataclass
class RolloutSection(Section):
    HEADING = "rollouts"

    num_generations: int = option(8, "completions per prompt, whose rewards are compared", at_least=1, common=True)
    num_draws: int | None = option(
        None,
        "completions drawn per prompt, of which those num_generations are trained on whose rewards differ most",
        at_least=1,
    )
    max_resample: int = option(0, "most times a step replaces prompts of equal rewards (DAPO)", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.num_draws is None or self.num_draws >= self.num_generations
        self.check(fits, num_draws=f"use num_generations={self.num_generations} or more")

    @property
    def draws(self) -> int:
        """the completions that are drawn of a prompt"""
        return self.num_draws or self.num_generations


@dataclass
class AskedSections(AgentSection, TurnsSection, AnswerSection):
    """The settings of answers, with whatever answers the model in between."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.agent is None:
            return
        other = "tools" if self.tools else "environment"
        self.check(not super().has_turns, agent=f"the program has its own tools: leave out {other}")
        is_own = self.system_prompt not in ("", AnswerSection.system_prompt)
        self.check(not is_own, system_prompt="the agent writes its messages itself: leave it out")
        self.system_prompt = ""

    @property
    def has_turns(self) -> bool:
        return super().has_turns or self.agent is not None

    @property
    def most_turns(self) -> int:
        """the segments that an agent's episode may have"""
        return self.max_turns or 100


@dataclass
class AnsweringConfig(GenerationSection, AskedSections, DataSection, SharedConfig):
    """The settings of answers to a dataset's problems, in training and after it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_adapted(self.agent) and self.dataset_name == DataSection.dataset_name:
            self.dataset_name = self.agent  # its own tasks
        is_able = self.agent is None or self.sampler != "generate"
        self.check(is_able, sampler="an agent's requests join rows that are always full: use continuous, or pool")

    @property
    def longest_sequence(self) -> int:
        """Return the tokens of the longest prompt with the longest completion."""
        return self.max_prompt_length + self.max_completion_length


@dataclass
class PolicyConfig(AdapterSection, VisionSection, AnswerSection, SharedConfig):
    """The settings of the trained model: weights, adapter, answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.quantization != "8bit", quantization="a log-prob would depend on its batch: use 4bit")
        is_trainable = self.quantization == "none" or self.use_peft
        self.check(is_trainable, quantization="only an adapter on 4-bit weights can be trained: add use_peft")


@dataclass
class ChatConfig(AskedSections, SharedConfig):
    """Every setting of `grpo chat`."""

    HEADING = "conversation"

    keep_history: bool = option(True, "answers depend on those before", off="answer each by itself", common=True)

    SHORT: ClassVar = {"model": "model_name_or_path"}

    def __post_init__(self) -> None:
        super().__post_init__()
        has_lines = not is_adapted(self.agent)
        self.check(has_lines, agent="its tasks are its own, and no line of yours: ask the model by grpo eval")
