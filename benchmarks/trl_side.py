"""TRL's side of a comparison with a demo: GRPOTrainer with our settings, data and rewards, its steps timed."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common import REPOSITORY
from demo.__main__ import ENVIRONMENT, ON_CARD, Demo
from grpo.config.command_line import parse_arguments
from grpo.config.console import free_port
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import load_examples
from grpo.model.load import eos_token_ids, load_tokenizer
from grpo.rewards.compute import load_reward_funcs
from grpo.rewards.functions import TrainerState
from grpo.sampling.generate import LocalSampler
from grpo.trainer.evaluation import evaluate
from grpo.trainer.rewarding import Rewarder


def settings(demo: Demo, folder: Path, seed: int, *options: str) -> TrainerConfig:
    """Return a demo's settings, as demo/__main__.py gives them to the trainer."""
    names = {"model_name_or_path": demo.model_folder(folder), "dataset_name": folder / "data", "seed": seed}
    words = [str(word) for name, value in names.items() for word in (f"--{name}", value)]
    return parse_arguments(TrainerConfig, "", ["--config", str(REPOSITORY / demo.config), *words, *options])


def held_out_metrics(config: TrainerConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Return the metrics of our evaluation of either side's model."""
    held_out = load_examples(config, config.dataset_test_split, tokenizer, config.eval_samples, progress=False)
    sampler = LocalSampler(model, tokenizer, eos_token_ids(model, tokenizer), config.max_completion_length)
    functions = load_reward_funcs(config.reward_funcs)
    rewarder = Rewarder(functions, functions, config)
    metrics, _ = evaluate(sampler, held_out, rewarder, rank=0, world_size=1, state=TrainerState())
    return metrics


def start(module: str, output: Path, processes: int, words: list[object]) -> dict:
    """Run `python -m module words` in so many processes on two cores, and return what `train` measured in `output`."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--nproc_per_node", processes, "--master_port", free_port(), "-m"]
    # Two cores: one thread for each of two processes, or both for one.
    environment = ENVIRONMENT | ({} if ON_CARD else {"OMP_NUM_THREADS": str(2 // processes)})
    with open(output / "log", "w") as log:
        command = list(map(str, [*command, module, *words]))
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        sys.exit(f"TRL ended with code {done.returncode}: see {output / 'log'}")
    return json.loads((output / "measured.json").read_text())


def written_prompts(config: TrainerConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    """Return the rows of a demo's dataset whose prompts are text. Exits where TRL would make other ids of them."""
    examples = load_examples(config, config.dataset_train_split, tokenizer, progress=False)
    if tokenizer([example.prompt for example in examples])["input_ids"] != [example.prompt_ids for example in examples]:
        sys.exit("TRL would not see the same prompts")
    return [{"prompt": example.prompt, "answer": example.gold} for example in examples]


def train(
    config: TrainerConfig,
    reward_funcs: list[Callable],
    output: Path,
    evaluates: bool = False,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    rows: list[dict] | None = None,
    environment_factory: Callable | None = None,
    before: Callable | None = None,
    micro_batches: int = 1,
    most_seconds: float = math.inf,
    **more: object,
) -> None:
    """Train as `config` says, in one process of TRL's side; write the model and measured.json to `output`.

    Where it `evaluates`, it does so before the first step and after each `eval_steps`; that time does not count. `rows`
    are those of the dataset, if not `written_prompts`; `before` is given the trainer before it trains; after
    `most_seconds` in steps it ends. A process's share of a step is so many `micro_batches`. `more` are GRPOConfig's.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    sequences = config.prompts_per_step * config.num_generations
    share = sequences // processes
    tokenizer = tokenizer or load_tokenizer(config)
    measured: dict[str, list] = {"seconds": [], "tokens": [], "reward": [], "kl": [], "evaluations": []}

    class Clock(TrainerCallback):
        def evaluate(self, step: int, model) -> None:
            model.eval()
            measured["evaluations"].append({"step": step, **held_out_metrics(config, model, tokenizer)})
            model.train()

        def on_train_begin(self, args, state, control, model, **_):
            if evaluates:
                self.evaluate(0, model)

        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, model, **_):
            measured["seconds"].append(time.perf_counter() - self.start)
            control.should_training_stop |= sum(measured["seconds"]) >= most_seconds
            is_last = state.global_step == config.max_steps
            if evaluates and (is_last or state.global_step % config.eval_steps == 0):
                self.evaluate(state.global_step, model)

        def on_log(self, args, state, control, logs, **_):
            if "completions/mean_length" in logs:
                measured["tokens"].append(logs["completions/mean_length"] * sequences)
                measured["reward"].append(logs["reward"])
                measured["kl"].append(logs.get("kl", 0.0))

    trainer = GRPOTrainer(
        config.model_name_or_path,
        reward_funcs=reward_funcs,
        args=GRPOConfig(
            str(output),
            # The same step.
            loss_type=config.loss_type,
            scale_rewards=config.scale_rewards,
            beta=config.beta,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            use_bias_correction_kl=False,
            temperature=config.temperature,
            num_generations=config.num_generations,
            max_completion_length=config.max_completion_length,
            max_steps=config.max_steps,
            learning_rate=config.learning_rate,
            lr_scheduler_type=config.lr_scheduler_type,
            warmup_steps=config.warmup_steps,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            seed=config.seed,
            bf16=config.dtype == "bfloat16" or (ON_CARD and config.dtype != "float32"),
            # What makes it fast here: large micro-batches, nothing computed twice, and no search for parameters that
            # got no gradient.
            per_device_train_batch_size=share // micro_batches,
            gradient_accumulation_steps=micro_batches,
            gradient_checkpointing=False,
            ddp_find_unused_parameters=False,
            use_cpu=not ON_CARD,
            ddp_backend="gloo" if processes > 1 else None,
            dataloader_pin_memory=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **more,
        ),
        train_dataset=Dataset.from_list(rows or written_prompts(config, tokenizer)),
        processing_class=tokenizer,
        callbacks=[Clock()],
        environment_factory=environment_factory,
    )
    if before is not None:
        before(trainer)
    trainer.train()
    if trainer.accelerator.is_main_process:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(output / "model")
        tokenizer.save_pretrained(output / "model")
        (output / "measured.json").write_text(json.dumps(measured))
