"""`grpo init --from`: a setting of another trainer becomes ours with its meaning, or is listed with its value."""

import ast
import csv
import dataclasses
import json
import warnings
from pathlib import Path

import pytest
import yaml

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.programs import LaunchConfig
from grpo.init import starting_files

KEYS = Path(__file__).parent / "keys"
OURS = {field.name for field in dataclasses.fields(LaunchConfig)}


def default_settings(trainer) -> dict:
    """Return a trainer's own settings with their defaults, by names with dots."""
    if trainer == "trl":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TRL's imports, not ours
            from trl import GRPOConfig
        fields = dataclasses.fields(GRPOConfig)
        return {field.name: None if field.default is dataclasses.MISSING else field.default for field in fields}
    with (KEYS / f"{trainer}.tsv").open() as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    if trainer == "verl":
        return {name: text if "${" in text else yaml.safe_load(text) for name, text in rows}
    return {name: {} if text.startswith("field(") else ast.literal_eval(text) for name, text in rows}


def another(value):
    """Return a value of the same kind."""
    match value:
        case bool():
            return not value
        case int():
            return value + 3 if value >= 0 else 7
        case float():
            return value / 2 + 0.125
        case list() | tuple():
            return [*value[:-1], another(value[-1])] if value else ["another"]
        case dict():
            return {"one": 1}
    return "another"


def tree(settings) -> dict:
    result: dict = {}
    for name, value in settings.items():
        *above, last = name.split(".")
        place = result
        for step in above:
            place = place.setdefault(step, {})
        place[last] = list(value) if isinstance(value, tuple) else value
    return result


def translated(trainer, file) -> tuple[dict, str]:
    """Return the settings that are written, and the text of the list."""
    text = starting_files([trainer, str(file)])["config.yaml"]
    return yaml.safe_load(text), text.partition("# Without a counterpart here:\n")[2]


@pytest.fixture
def from_yaml(tmp_path):
    def translate(trainer, settings):
        file = tmp_path / "theirs.yaml"
        file.write_text(yaml.safe_dump(tree(settings)))
        return translated(trainer, file)

    return translate


def is_listed(name, value, listed) -> bool:
    """Tell whether the list has the setting with its value, a mapping by its entries."""
    pairs = [(f"{name}.{entry}", inner) for entry, inner in value.items()] if isinstance(value, dict) else []
    lines = [f"#   {one}: {inner}" for one, inner in [(name, value), *pairs]]
    return any(line == each or line.startswith(f"{each} (") for each in lines for line in listed.splitlines())


BASE = {
    "easyr1": {"worker.actor.model.model_path": "org/model"},
    "verl": {"actor_rollout_ref.model.path": "org/model"},
    "trl": {"model_name_or_path": "org/model"},
}
SAME = yaml.safe_load((KEYS / "same.yaml").read_text())
TRAINERS = ["easyr1", "verl", pytest.param("trl", marks=pytest.mark.slow)]  # TRL takes seconds to import


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_setting_of_another_value_is_written_or_listed_with_it(trainer, from_yaml):
    before, _ = from_yaml(trainer, BASE[trainer])
    defaults, lost = default_settings(trainer), []
    assert len(defaults) > 130 and defaults.keys() >= {name for name in SAME[trainer] if "." in name}
    for name, default in defaults.items():
        value = SAME[trainer].get(name, [another(default)])[0]
        assert value != default
        written, listed = from_yaml(trainer, BASE[trainer] | {name: value})
        if not is_listed(name, value, listed) and not (name == "hub_token" and "hub_token: (hidden)" in listed):
            is_same = written.get(name) == value if name in OURS - SAME[trainer].keys() else name in SAME[trainer]
            lost += [] if written != before and is_same else [name]
    assert not lost


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_is_written_is_the_same_setting(trainer, from_yaml):
    wrong = []
    for name, (value, expected, *more) in SAME[trainer].items():
        written, _ = from_yaml(trainer, BASE[trainer] | (more[0] if more else {}) | {name: value})
        found = {each: written.get(each) for each in expected}
        wrong += [] if found == expected else [(name, found)]
    assert not wrong


@pytest.mark.parametrize(
    ("trainer", "changed", "refusal"),
    [
        ("easyr1", {"worker.rollout.n": 5}, "num_generations=1: grpo compares a prompt's completions: use 2 or more"),
        (
            *("verl", {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 5}),
            "advantage_estimator='gae': use grpo, rloo,",
        ),
        pytest.param("trl", {}, None, marks=pytest.mark.slow),
    ],
)
def test_the_defaults_of_a_trainer_are_accepted_or_refused_in_a_sentence(
    trainer, changed, refusal, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, more in {"as they are": {}, "for GRPO": changed}.items():
        (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(tree(default_settings(trainer) | BASE[trainer] | more)))
        for path, text in starting_files([trainer, "theirs.yaml"]).items():
            Path(path).write_text(text)
        if refusal and name == "as they are":
            with pytest.raises(SystemExit):
                parse_arguments(LaunchConfig, "", ["--config", "config.yaml"])
            assert refusal in capsys.readouterr().err
        else:
            parse_arguments(LaunchConfig, "", ["--config", "config.yaml"])


EASYR1_YAML = """
data:
  train_files: hiyouga/math12k@train
  val_files: hiyouga/math12k@test
  prompt_key: problem
  image_key: images
  rollout_batch_size: 512
  format_prompt: ./examples/format_prompt/math.jinja
  filter_overlong_prompts: true
  system_prompt: Write $x$.
  seed: ${SEED}
algorithm: {adv_estimator: grpo, disable_kl: false, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 1e-2}
worker:
  actor:
    global_batch_size: 128
    model: {model_path: org/from-yaml, trust_remote_code: false}
    optim: {lr: 1e-6, strategy: adamw}
  rollout: {n: 5, top_p: 0.99, val_override_config: {temperature: 0.6, n: 1}}
  reward: {reward_function: "./examples/reward_function/math.py:compute_score"}
trainer: {total_episodes: 15, val_freq: 5, val_before_train: true, save_freq: -1, save_limit: 3,
  load_checkpoint_path: null}
"""
EASYR1_SCRIPT = r"""#!/bin/bash
set -x
MODEL_PATH=org/small  # replace it by worker.rollout.n=99

python3 -m verl.trainer.main \
    config=examples/config.yaml \
    data.train_files=hiyouga/math12k@train \
    worker.actor.model.model_path=${MODEL_PATH} \
    worker.actor.model.lora.rank=64 worker.actor.model.lora.alpha=32 \
    worker.actor.optim.strategy=adamw_bf16 \
    worker.reward.reward_function_kwargs='{"longest": 2048, "penalty": 1.0}' \
    algorithm.online_filtering=True \
    trainer.total_epochs=3 \
    trainer.total_epochs=10 \
    trainer.n_gpus_per_node=8\

"""
CISPO = r"""
python3 -m verl.trainer.main config=examples/config.yaml worker.actor.loss_type=cispo \
    worker.actor.clip_ratio_low=0 worker.actor.clip_ratio_high=4 worker.actor.loss_avg_mode=seq
"""
SAPO = (
    "python -m verl.trainer.main config=examples/config.yaml worker.actor.loss_type=sapo worker.actor.tau_negative=1.1"
)
GSPO = r"""python -m verl.trainer.main config=examples/config.yaml worker.actor.loss_type=gspo_token \
    worker.actor.loss_avg_mode=seq worker.actor.clip_ratio_low=3e-4 worker.actor.clip_ratio_high=4e-4 "$@"
"""
VERL_SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
# trainer.total_epochs=99 is a comment, and so is what's behind a word
cat <<EOF
It's for 8 GPUs; trainer.total_epochs=98 isn't read either.
EOF
train_path=/data/gsm8k/train.parquet
math_path=$HOME/math/train.parquet
train_files="['$train_path', '$math_path']"
export n_resp=16
max_response_length=$((1024 * 2))
max_tokens=$(((1024 + max_response_length) * 2))
offload=${OFFLOAD_OF_NOBODY:-True}
rate="${RATE_OF_NOBODY:-${LR_OF_NOBODY:-1e-6}}"
gpus=$(nvidia-smi -L | wc -l)
if [ "$gpus" -gt 8 ]; then
    bsz=1024
else
    bsz=512
fi
[ -n "$SLURM_JOB_ID" ] && epochs=7
DATA=(
    data.train_files="$train_files"
    data.val_files=/data/aime/aime-2024.parquet
    data.train_batch_size=${bsz}
    data.truncation='left'
    data.shuffle=False
    +data.apply_chat_template_kwargs.enable_thinking=False
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" \
    algorithm.adv_estimator=grpo \
    data.max_response_length=$max_response_length \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.actor.optim.lr=${rate} trainer.total_training_steps=null \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${max_tokens} \
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.n="$n_resp" \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
    reward_model.overlong_buffer.len=4096 \
    custom_reward_function.path=recipe/mine.py custom_reward_function.name=my_score \
    trainer.logger='["console","wandb"]' \
    trainer.val_before_train=False \
    trainer.save_freq=${SAVE_OF_NOBODY} \
    trainer.test_freq=5 trainer.total_epochs=$epochs $@ 2>&1 | tee run.log
"""
VERL_CISPO = r"""
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=~/data/gsm8k/train.parquet \
    actor_rollout_ref.model.path=org/model actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.policy_loss.loss_mode=cispo actor_rollout_ref.actor.clip_ratio_low=10 \
    actor_rollout_ref.actor.clip_ratio_high=0.2 actor_rollout_ref.actor.clip_ratio_c=10.0
"""
OPEN_R1 = """
model_name_or_path: org/model
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: org/math
dataset_prompt_column: problem
system_prompt: "You are a helpful AI.\\nThink first."
bf16: true
use_vllm: true
do_eval: false
eval_strategy: "no"
gradient_accumulation_steps: 4
gradient_checkpointing_kwargs: {use_reentrant: false}
hub_model_id: mine
hub_token: hf_secret
push_to_hub: false
learning_rate: 1.0e-06
log_level: info
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
max_steps: -1
num_generations: 16
num_train_epochs: 1
optim: adamw_torch_fused
per_device_train_batch_size: 16
reward_funcs: [accuracy, format]
reward_weights: [1.0, 0.5]
save_strategy: "epoch"
save_total_limit: 1
temperature: 0.7
use_liger_kernel: false
warmup_ratio: 0.1
"""
TRL_COMMAND = r"""
ACCELERATE_LOG_LEVEL=info accelerate launch --config_file recipes/zero3.yaml --num_processes=7 \
    src/open_r1/grpo.py --config recipes/config.yaml --learning_rate 3e-6 --use_peft \
    --reward_funcs accuracy mine --lora_target_modules q_proj v_proj --output_dir="out/$RUN_OF_NOBODY" \
    --save_strategy no --shuffle_dataset true 2>&1 | tee log
"""
TRL_SCRIPT = '''
import torch
import trl
SYSTEM_PROMPT = """
Respond with <answer>.
"""
learning_rate = 1e-4  # of another trainer
prompt_tokens = 256
settings = dict(beta=0.04, num_iterations=2)

def length(completions, **kwargs):
    return [0.0 for _ in completions]

training_args = trl.GRPOConfig(
    "out",
    learning_rate=5e-6,
    max_completion_length=1024 - prompt_tokens,
    use_vllm=True, sync_ref_model=False, scale_rewards=False, chat_template_kwargs={"enable_thinking": False},
    bf16=True,
    save_strategy="epoch",
    num_generations=args.n,
    **settings,
)
training_args.temperature = 0.9
rewards = [length, "org/judge"]
peft_config = LoraConfig(r=16, lora_alpha=64, lora_dropout=0.05, task_type="CAUSAL_LM", target_modules=("q_proj",))
model = AutoModelForCausalLM.from_pretrained("org/model", torch_dtype=torch.bfloat16, device_map=None)
sampling = SamplingParams(temperature=0.1, max_tokens=99)
trainer = trl.GRPOTrainer(model, rewards, training_args, train_dataset=dataset, peft_config=peft_config)
'''
QUICK_START = """
dataset = load_dataset("org/set", split="train[:99]")
trainer = GRPOTrainer(
    model="org/model", reward_funcs=length, train_dataset=dataset, callbacks=[LogThis()],
    peft_config=LoraConfig(target_modules="all-linear"),
)
"""
UNSLOTH = """
from unsloth import FastLanguageModel
max_seq_length = 1024
lora_rank = 8
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="org/model", max_seq_length=max_seq_length, load_in_4bit=True, fast_inference=True,
    gpu_memory_utilization=0.5,
)
model = FastLanguageModel.get_peft_model(
    model, r=lora_rank, target_modules=["q_proj", "o_proj"], lora_alpha=lora_rank * 2,
    use_gradient_checkpointing="unsloth", random_state=3407,
)
from trl import GRPOConfig, GRPOTrainer
training_args = GRPOConfig(
    learning_rate=5e-6, warmup_ratio=0.1, optim="paged_adamw_8bit", max_completion_length=max_seq_length - 256,
    per_device_train_batch_size=1, num_generations=6, max_steps=250, report_to="none", vllm_sampling_params=sampling,
)
trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[exact, short], args=training_args)
output = model.fast_generate("text", sampling_params=SamplingParams(temperature=0.8, top_p=0.95))
"""
NOTEBOOK = json.dumps(
    {
        "cells": [
            {"cell_type": "markdown", "source": ["# GRPO"]},
            {"cell_type": "code", "source": ["%%capture\n", "!pip install unsloth"]},
            {"cell_type": "code", "source": ["!nvidia-smi\n", *UNSLOTH.splitlines(keepends=True)]},
        ]
    }
)
OF_UNSLOTH = (
    {
        **{"model_name_or_path": "org/model", "quantization": "4bit", "use_peft": True, "lora_r": 8, "lora_alpha": 16},
        **{"lora_target_modules": ["q_proj", "o_proj"], "optim": "adamw_8bit", "max_completion_length": 768},
        **{"prompts_per_step": 1, "warmup_steps": 0.1, "max_steps": 250, "temperature": None, "report_to": "none"},
        **{"reward_funcs": ["rewards.py:exact", "rewards.py:short"], "learning_rate": 5e-6},
    },
    [
        "max_seq_length: 1024 (use max_prompt_length and max_completion_length)",
        *("fast_inference: True (use sampler pool", "random_state: 3407 (use data_seed", "gpu_memory_utilization: 0.5"),
        *("vllm_sampling_params: sampling", "use_gradient_checkpointing: unsloth (use gradient_checkpointing)"),
    ],
)
SEVERAL_COMMANDS = """
python prepare_data.py --dataset_name org/raw --seed 7
accelerate launch train_grpo.py --model_name_or_path org/m --dataset_name org/set --learning-rate 1e-5 \\
    --num-generations 16 --max-completion-length=1024 --temperature 0.9 --no_gradient_checkpointing \\
    --no-use-bias-correction-kl --max_steps 300
python evaluate.py --model_name_or_path out --dataset_name org/test --temperature 0.1 --max_completion_length 4096
"""
WRAPPED = """
lora_config = LoraConfig(r=64, lora_alpha=128, target_modules=["q_proj", "v_proj"])
model = AutoModelForCausalLM.from_pretrained("org/m")
model = get_peft_model(model, peft_config=lora_config)
trainer = GRPOTrainer(model=model, args=GRPOConfig(max_steps=9), reward_funcs=accuracy_reward)
"""
JUDGED = """
judge_model = AutoModelForCausalLM.from_pretrained("org/judge", load_in_4bit=True, dtype=torch.float16,
                                                   trust_remote_code=True)
trainer = GRPOTrainer(model="org/m", args=GRPOConfig(max_steps=9), reward_funcs=mine)
"""
SIMPLE_GRPO = """
model_path = "/data/Qwen2.5-7B"
beta = 0.04
all_steps = 1000
num_pre_Q = 8
train_batch_size = 8
gen_update_steps = 16
save_steps = 200
ds_config = {"gradient_accumulation_steps": 4, "optimizer": {"params": {"lr": 1e-6}}, "zero_optimization": {"stage": 2}}
def gen_worker():
    system_prompt = "Think."
    first = SamplingParams(n=num_pre_Q, temperature=0.9, max_tokens=700)
    second = SamplingParams(temperature=0, max_tokens=1)
"""
# The files of a user, the first of which is translated; what must be written (None: not), and listed.
FILES = {
    "EasyR1's script with its YAML": (
        *("easyr1", {"examples/run.sh": EASYR1_SCRIPT, "examples/config.yaml": EASYR1_YAML}),
        {
            **{"model_name_or_path": "org/small", "num_train_epochs": 10, "num_generations": 5, "beta": 0.01},
            **{"lora_r": 64, "lora_alpha": 32, "lora_target_modules": ["all-linear"], "use_peft": True},
            **{"kl_estimator": "k3", "kl_in_reward": None, "prompts_per_step": 128, "steps_per_generation": 4},
            **{"reward_funcs": ["rewards.py:compute_score"], "dataset_name": "hiyouga/math12k", "optim": None},
            **{"trust_remote_code": False, "save_total_limit": 3, "learning_rate": 1e-6, "save_steps": 0},
            **{"system_prompt": "Write $x$.", "eval_steps": 20, "weight_decay": 0.01, "warmup_steps": 0},
        },
        [
            "worker.actor.optim.strategy: adamw_bf16",
            "algorithm.online_filtering: True (use max_resample)",
            "data.format_prompt: ./examples/format_prompt/math",
            'worker.reward.reward_function_kwargs: {"longest": 2048, "penalty": 1.0}',
            "worker.reward.reward_function: ./examples/reward_function/math.py:compute_score (write it into rewards.py",
            "worker.rollout.val_override_config.temperature: 0.6 (use num_generations_eval and eval_temperature)",
            *("trainer.n_gpus_per_node: 8 (give grpo launch nproc_per_node)", "trainer.load_checkpoint_path: None\n"),
            *("worker.rollout.top_p: 0.99 (leave it out", "data.image_key: images (use dataset"),
            "data.seed: ${SEED} (only the script knows it: write its value)",
            "trainer.total_episodes: 15 (trainer.total_epochs counts)",
        ],
    ),
    "EasyR1's CISPO": (
        *("easyr1", {"cispo.sh": CISPO, "examples/config.yaml": EASYR1_YAML}),
        {"loss_type": "cispo", "epsilon": None, "epsilon_high": 5.0, "delta": None, "num_train_epochs": 15},
        [
            "worker.actor.clip_ratio_low: 0 (cispo has no bound below here)",
            "worker.actor.loss_avg_mode: seq (cispo is a mean over all tokens here)",
        ],
    ),
    "EasyR1's SAPO": (
        *("easyr1", {"sapo.sh": SAPO, "examples/config.yaml": EASYR1_YAML}),
        {"loss_type": "sapo", "epsilon": None, "epsilon_high": None, "delta": None},
        [
            "worker.actor.loss_avg_mode: token (sapo is a mean over sequences here)",
            "worker.actor.tau_negative: 1.1 (leave it out: the paper's numbers are fixed)",
        ],
    ),
    "EasyR1's GSPO": (
        *("easyr1", {"gspo.sh": GSPO, "examples/config.yaml": EASYR1_YAML}),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        [],
    ),
    "verl's script": (
        *("verl", {"run.sh": VERL_SCRIPT}),
        {
            **{"dataset_name": "datasets.yaml", "num_generations": 16, "max_completion_length": 2048},
            **{"micro_batch_tokens": 6144, "learning_rate": 1e-6, "beta": 0.0, "kl_estimator": None},
            **{"dataset_order": "as_is", "chat_template_kwargs": {"enable_thinking": False}},
            **{"steps_per_generation": None, "eval_steps": None, "save_steps": None, "num_train_epochs": None},
            **{"loss_type": "dapo", "epsilon_high": 0.2, "reward_funcs": ["rewards.py:my_score"], "max_steps": None},
            **{"dataset_answer_column": "reward_model.ground_truth", "prompts_per_step": 128, "delta": 3.0},
            **{"use_peft": True, "lora_r": 32, "lora_alpha": 16, "warmup_steps": 0},
        },
        [
            *("trainer.save_freq: ${SAVE_OF_NOBODY} (only the script knows", "trainer.total_epochs: $epochs (only the"),
            "data.train_batch_size: $bsz (only the script knows it: write its value)",
            "trainer.test_freq: 5 (only the script knows what it goes with)",
            "algorithm.filter_groups.metric: acc (use max_resample)",
            "reward_model.overlong_buffer.len: 4096 (use soft_punish_cache)",
            "actor_rollout_ref.actor.fsdp_config.param_offload: True (use deepspeed",
            "actor_rollout_ref.actor.kl_loss_coef: 0.001 (the loss has no KL)",
            "actor_rollout_ref.rollout.val_kwargs.do_sample: True (use num_generations_eval and",
            "custom_reward_function.path: recipe/mine.py (write it into rewards.py",
            "trainer.val_before_train: False (leave it out: a run with eval_steps is evaluated before",
            *("trainer.logger: ['console', 'wandb'] (use report_to)", "data.truncation: left (leave it out: longer"),
        ],
    ),
    "verl's CISPO": (
        *("verl", {"run_cispo.sh": VERL_CISPO}),
        {"loss_type": "cispo", "epsilon": None, "epsilon_high": 1.2, "delta": None, "prompts_per_step": 256},
        ["actor_rollout_ref.actor.clip_ratio_c: 10.0 (the loss has no such clip)"],
    ),
    "Open-R1's recipe": (
        *("trl", {"config_demo.yaml": OPEN_R1}),
        {
            **{"system_prompt": "You are a helpful AI.\nThink first.", "prompt_format": "chat", "save_steps": None},
            **{"dataset_prompt_column": "problem", "eval_steps": 0, "prompts_per_step": 4, "dtype": "bfloat16"},
            **{"warmup_steps": 0.1, "optim": "adamw_torch", "hub_model_id": None, "log_level": None},
            **{"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "reward_funcs": ["accuracy", "format"], "max_steps": None},
            "loss_type": "dapo",
        },
        [
            *("save_strategy: epoch (use save_steps", "use_liger_kernel: False\n", "do_eval: False\n"),
            "log_level: info\n",
            *("hub_model_id: mine (it does nothing without push_to_hub)", "hub_token: (hidden) (set the environment"),
            "per_device_train_batch_size: 16 (prompts_per_step is of one process: multiply it by their number)",
            "gradient_checkpointing_kwargs: {'use_reentrant': False}",
        ],
    ),
    "a command for Open-R1's script": (
        *("trl", {"slurm/train.sh": TRL_COMMAND, "recipes/config.yaml": OPEN_R1}),
        {
            **{"learning_rate": 3e-6, "use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]},
            **{"system_prompt": "You are a helpful AI.\nThink first.", "reward_funcs": ["accuracy", "mine"]},
            **{"lora_r": None, "lora_alpha": None, "output_dir": None, "save_steps": 0, "dataset_order": "shuffled"},
        },
        ["output_dir: out/$RUN_OF_NOBODY (only the script knows it: write its value)"],
    ),
    "TRL's script": (
        *("trl", {"train.py": TRL_SCRIPT}),
        {
            **{"system_prompt": "\nRespond with <answer>.\n", "prompt_format": "chat", "learning_rate": 5e-6},
            **{"max_completion_length": 768, "beta": 0.04, "num_iterations": 2, "temperature": 0.9, "lora_r": 16},
            **{"lora_alpha": 64, "model_name_or_path": "org/model", "dtype": "bfloat16", "prompts_per_step": None},
            **{"reward_funcs": ["rewards.py:length", "org/judge"], "output_dir": "out", "num_generations": None},
            **{"save_steps": None, "eval_steps": 0, "warmup_steps": 0, "dataset_answer_column": ""},
            **{"scale_rewards": "none", "lora_target_modules": ["q_proj"]},
            **{"chat_template_kwargs": {"enable_thinking": False}},
        },
        [
            *("use_vllm: True (use sampler pool", "sync_ref_model: False\n"),
            *("num_generations: args.n (only the script knows", "train_dataset: dataset (use dataset_name)"),
            *("lora_dropout: 0.05 (leave it out", "task_type: CAUSAL_LM\n", "save_strategy: epoch (use save_steps"),
        ],
    ),
    "TRL's quick start": (
        *("trl", {"first.py": QUICK_START}),
        {
            **{"model_name_or_path": "org/model", "dataset_name": "org/set", "dataset_train_split": "train[:99]"},
            **{"reward_funcs": ["rewards.py:length"], "prompt_format": "raw", "lora_r": 8, "lora_alpha": 8},
            **{"num_train_epochs": 3.0, "loss_type": "dapo", "save_steps": 500, "save_total_limit": 0},
            **{"prompts_per_step": 1, "dataset_prompt_column": "prompt"},
        },
        ["callbacks: [LogThis()]\n"],
    ),
    "simple_GRPO's script": (
        *("simple_grpo", {"grpo_vllm_one.py": SIMPLE_GRPO}),
        {
            **{"model_name_or_path": "/data/Qwen2.5-7B", "max_steps": 250, "prompts_per_step": 4, "temperature": 0.9},
            **{"steps_per_generation": 4, "warmup_steps": 0, "save_steps": 50, "system_prompt": "Think."},
            **{"adam_beta2": 0.999, "max_grad_norm": 0.0},
            **{"max_completion_length": 700, "learning_rate": 1e-6, "beta": 0.04},
        },
        [],
    ),
    "TRL's command between two others": (
        *("trl", {"run.sh": SEVERAL_COMMANDS}),
        {
            **{"model_name_or_path": "org/m", "dataset_name": "org/set", "learning_rate": 1e-5, "temperature": 0.9},
            **{"num_generations": 16, "max_completion_length": 1024, "gradient_checkpointing": False, "seed": None},
            **{"use_bias_correction_kl": False, "max_steps": 300},
        },
        [],
    ),
    "peft's own wrapper": (
        *("trl", {"train.py": WRAPPED}),
        {"lora_r": 64, "lora_alpha": 128, "lora_target_modules": ["q_proj", "v_proj"], "model_name_or_path": "org/m"},
        [],
    ),
    "a judge beside the model": (
        *("trl", {"train.py": JUDGED}),
        {"model_name_or_path": "org/m", "quantization": None, "dtype": None, "trust_remote_code": None},
        [],
    ),
    "unsloth's cells": ("trl", {"grpo.py": UNSLOTH}, *OF_UNSLOTH),
    "unsloth's notebook": ("trl", {"grpo.ipynb": NOTEBOOK}, *OF_UNSLOTH),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/user")
    return tmp_path


def save(folder, files) -> str:
    """Write files, and return the name of the first."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    return next(iter(files))


@pytest.mark.parametrize("name", FILES)
def test_files_of_users_are_translated_and_accepted(name, folder):
    trainer, files, expected, left = FILES[name]
    written, listed = translated(trainer, save(folder, files))
    assert {each: written.get(each) for each in expected} == expected
    assert [each for each in left if f"#   {each}" not in listed] == []
    assert not [each for each in ("hf_secret", "stage", "shuffle_dataset") if each in listed]
    save(folder, starting_files([trainer, next(iter(files))]))
    parse_arguments(LaunchConfig, "", ["--config", "config.yaml"])


SHELL = {
    "n=8\n{}$n": 8,
    "n=7; n=8; {}${n}": 8,
    'export n=8 && {}"$n"': 8,
    "  n='8' # of 9\n{}${n:-4}": 8,
    "{}${NOBODY:-8}": 8,
    "{}${NOBODY:-${NONE-8}}": 8,
    ": ${NOBODY:=8}\n{}$NOBODY": 8,
    "{}${1:-8}": 8,
    "k=2 n=$((k * 2)); {}$(((n + 4) / k * k))": 8,
    "{}$EIGHT": 8,
    "{}9 {}8": 8,
    "{}8 # {}9": 8,
    "{}8\\\n": 8,
    "LIST='a.b=c {}8'; run $LIST": 8,
    "{}'$n'": "$n",
    '{}"\\$n"': "$n",
    "n=8; {}a#$n": "a#8",
    "n=8; if test; then n=9; fi; {}$n": None,
    "n=8; test && n=9; {}$n": None,
    "for n in 8 9; do {}$n; done": None,
    "n=$(nproc); {}$n": None,
    "n=`nproc`; {}$n": None,
    "{}$1": None,
    "n=$NOBODY; {}$n": None,
}


@pytest.mark.parametrize("script", SHELL)
def test_what_a_shell_makes_of_plain_constants(script, folder, monkeypatch):
    monkeypatch.setenv("EIGHT", "8")
    text = f"data.max_prompt_length=9\n{script.replace('{}', 'actor_rollout_ref.model.path=')}"
    written, listed = translated("verl", save(folder, {"run.sh": text}))
    assert written.get("model_name_or_path") == SHELL[script]
    assert ("actor_rollout_ref.model.path: " in listed) is (SHELL[script] is None)


def test_several_datasets_become_a_file_that_names_them(folder):
    files = starting_files(["verl", save(folder, {"run.sh": VERL_SCRIPT})])
    assert yaml.safe_load(files["datasets.yaml"]) == [
        {"path": "/data/gsm8k", "split": "train", "test_split": "", "label": "gsm8k-train"},
        {"path": "/home/user/math", "split": "train", "test_split": "", "label": "math-train"},
        {"path": "/data/aime", "split": "", "test_split": "aime-2024", "label": "aime-aime-2024"},
    ]
    assert "data.val_files" not in files["config.yaml"]


def test_a_part_of_a_setting_without_effect_is_listed_and_a_launch_never_sees_it(folder):
    text = "trainer.max_steps=9 trainer.total_epochs=3 worker.actor.model.lora.alpha=32 algorithm.kl_target=0.2 "
    text += "algorithm.disable_kl=true algorithm.kl_coef=0.5 worker.actor.optim.min_lr_ratio=0.1 worker.rollout.n=4"
    written, listed = translated("easyr1", save(folder, {"run.sh": text}))
    assert written["max_steps"] == 18 and written["beta"] == 0 and "num_train_epochs" not in written
    for each in (
        *("total_epochs: 3 (the number of steps counts)", "lora.alpha: 32 (it does nothing without a LoRA rank)"),
        *("kl_target: 0.2 (no KL in a reward", "kl_coef: 0.5 (there is no KL", "min_lr_ratio: 0.1 (it is for a"),
    ):
        assert each in listed


def test_trls_batch_that_is_no_whole_number_of_groups_on_a_process_is_told_as_it_is(from_yaml):
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_generations": 8}
    _, listed = from_yaml("trl", batch)
    assert "prompts_per_step is 4 / 8 x the number of processes: write that" in listed
    written, listed = from_yaml("trl", batch | {"per_device_train_batch_size": 4})
    assert written["prompts_per_step"] == 2 and "is of one process: multiply it by their number" in listed


def test_trls_bound_of_cispo_is_epsilon_where_none_is_set(from_yaml):
    for given, bound in (({}, 0.2), ({"epsilon": 0.3}, 0.3), ({"epsilon": 0.3, "epsilon_high": 4.0}, 4.0)):
        written, listed = from_yaml("trl", {"loss_type": "cispo", "num_generations": 8} | given)
        assert written["epsilon_high"] == bound and "epsilon" not in written
        assert ("epsilon: 0.3 (loss_type cispo has no such clip)" in listed) == ("epsilon_high" in given)


def test_a_constant_rate_of_trl_has_no_warm_up(from_yaml):
    written, listed = from_yaml("trl", {"lr_scheduler_type": "constant", "warmup_steps": 7, "num_generations": 8})
    assert written["warmup_steps"] == 0 and "warmup_steps: 7 (a constant rate has no warm-up there, either)" in listed


def test_a_mistaken_word_is_left_to_the_launch_that_refuses_it(folder, capsys):
    for word, name in {"geo_mean": "actor.policy_loss.loss_mode", "abs": "actor.kl_loss_type"}.items():
        text = f"algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 actor_rollout_ref.{name}={word} "
        save(folder, {"run.sh": f"{text} actor_rollout_ref.actor.use_kl_loss=True"})
        save(folder, starting_files(["verl", "run.sh"]))
        with pytest.raises(SystemExit):
            parse_arguments(LaunchConfig, "", ["--config", "config.yaml"])
        assert f"'{word}': use " in capsys.readouterr().err


PARSED = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser
script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
trainer = GRPOTrainer(model=model_args.model_name_or_path, args=training_args)
"""
REFUSED = {
    "a parser": (
        *("trl", {"grpo.py": PARSED}),
        "from='grpo.py': its settings are on the command line (TrlParser): name the YAML file of its --config, or",
    ),
    "no YAML": (
        *("easyr1", {"run.sh": "python -m verl.trainer.main config=examples/config.yaml trainer.max_steps=1"}),
        "from='run.sh': config=examples/config.yaml: it is not beside the script, nor in a folder above it, nor here",
    ),
    "an unknown YAML": (
        *("easyr1", {"run.sh": "python -m verl.trainer.main config=$CONFIG_OF_NOBODY trainer.max_steps=1"}),
        "from='run.sh': config=$CONFIG_OF_NOBODY: only the script knows that file: write its path",
    ),
    "a mapping for a number": (
        *("trl", {"theirs.yaml": "num_iterations: {first: 2}"}),
        "from='theirs.yaml': num_iterations={'first': 2}: give a single value",
    ),
    "no end": (
        *("verl", {"theirs.yaml": "actor_rollout_ref: {actor: {optim: {lr_warmup_steps: .inf}}}"}),
        "from='theirs.yaml': actor_rollout_ref.actor.optim.lr_warmup_steps=inf: use a finite number: correct it",
    ),
    "no batch": (
        *("trl", {"theirs.yaml": "gradient_accumulation_steps: 0"}),
        "from='theirs.yaml': gradient_accumulation_steps=0: use 1 or more: correct it",
    ),
    "no mapping": (
        *("verl", {"theirs.yaml": "- data"}),
        "from='theirs.yaml': it cannot be read (it has no settings by name)",
    ),
    "no Python": ("trl", {"grpo.py": "def ("}, "from='grpo.py': it cannot be read ("),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_is_refused_in_one_sentence(case, folder):
    trainer, files, sentence = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        starting_files([trainer, save(folder, files)])
    assert str(caught.value).startswith(sentence) and str(caught.value).count("from=") == 1
