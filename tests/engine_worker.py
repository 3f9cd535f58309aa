"""Run by test_precisions.py: one rank with an engine as the trainer starts it, in many settings one after the other.

python tests/engine_worker.py MODEL DATASET OUT
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from sharded import ON_CARDS, ON_HOST
from torch.overrides import TorchFunctionMode

import grpo.trainer.step
from grpo.algorithm.loss import grpo_loss
from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import PromptStream, load_examples
from grpo.data.records import Rollout, Sample
from grpo.model.load import load_model, load_tokenizer
from grpo.model.logprobs import token_logprobs
from grpo.model.sharded import copy_whole
from grpo.model.trial import make_batcher
from grpo.rewards.compute import load_reward_funcs, start_rewards
from grpo.run.metrics import PhaseClock
from grpo.sampling.self_check import make_sampler
from grpo.trainer.deepspeed_engine import engine_config, join_ranks, start_engine
from grpo.trainer.policy import make_trainable
from grpo.trainer.rewarding import Rewarder
from grpo.trainer.round import Rounds
from grpo.wire.tool_outcomes import Branch

SHIPPED = "ds_config.json", "configs/ds_offload.json", ON_CARDS, ON_HOST
DTYPES = "float32", "bfloat16"
# The functions that make Python wait for a GPU.
FETCHES = {"item", "tolist", "cpu", "nonzero", "bincount", "__bool__", "__int__", "__float__", "__index__"}


def settings(model: str, dataset: str, **changes) -> TrainerConfig:
    values = {"model_name_or_path": model, "dataset_name": dataset, "system_prompt": "", "beta": 0}
    values |= {"num_generations": 4, "prompts_per_step": 4, "max_completion_length": 24, "micro_batch_tokens": 60}
    values |= {"warmup_steps": 0, "learning_rate": 1e-3, "max_grad_norm": 0} | changes
    return parse_arguments(TrainerConfig, "", [f"--{name}={value}" for name, value in values.items()])


def engine_of(config: TrainerConfig):
    device = torch.device("cpu")
    model = load_model(config, device)
    reference = make_trainable(model, config)
    batcher = make_batcher(model, 0)
    engine, _ = start_engine(config, engine_config(config, 1, device), model)
    return engine, batcher, reference


def make_samples(prompts: int, seed: int) -> list[Sample]:
    """Make four samples of each prompt, with the reference's log-probs."""
    draw, made = random.Random(seed), []
    for _ in range(prompts):
        prompt = [draw.randrange(3, 60) for _ in range(draw.randrange(5, 20))]
        for _ in range(4):
            ids = [draw.randrange(3, 60) for _ in range(draw.randrange(1, 24))]
            made.append(
                Sample(
                    prompt_ids=prompt,
                    completion_ids=ids,
                    finished=True,
                    advantage=draw.gauss(0, 1),
                    ref_logprobs=np.full(len(ids), -4.0, np.float32),
                )
            )
    return made


def update(engine, batcher, samples: list[Sample], config: TrainerConfig):
    return grpo.trainer.step.update(engine, samples, config, batcher, PhaseClock(), beta=config.beta, entropy_coef=0.0)


def steps_with_every_file(make, folder: Path) -> dict:
    """Do four steps, the second not finite, with each shipped file and one more in each dtype."""
    results, mixed = {}, folder / "mixed.json"
    mixed.write_text(Path(SHIPPED[1]).read_text().replace('"grad_accum_dtype": "auto"', '"grad_accum_dtype": "fp32"'))
    for file in (*SHIPPED, mixed):
        for dtype in DTYPES:
            config = make(dtype=dtype, deepspeed=file)
            engine, batcher, _ = engine_of(config)
            applied = []
            for step in range(4):
                samples = make_samples(config.prompts_per_step, step)
                if step == 1:
                    samples[3].advantage = float("nan")
                update(engine, batcher, samples, config)
                applied.append(engine.was_step_applied())
            groups = dist.distributed_c10d._world.pg_map
            results[Path(file).name, dtype] = {
                "applied": applied,
                "weights": [*copy_whole(dict(engine.module.named_parameters())).values()],
                "fused": [group["fused"] for group in engine.basic_optimizer.param_groups],
                "offloaded": engine.zero_cpu_offload(),
                "summed in": engine.optimizer.gradient_accumulation_dtype,
                "time-outs": [group._get_backend(torch.device("cpu")).options._timeout for group in groups],
            }
            engine.destroy()
    return results


def gradients(make, folder: Path) -> dict:
    """Read a step's gradient from AdamW's first moment, in micro-batches of one completion or in one of all."""
    results = {}
    for kind, dtype in (("exact", "float32"), ("bf16", "bfloat16"), ("fp32", "bfloat16")):
        file = folder / f"{kind}.json"
        file.write_text(f'{{"data_types": {{"grad_accum_dtype": "{kind if dtype == "bfloat16" else "auto"}"}}}}')
        for budget in (1, 10**6):
            config = make(dtype=dtype, deepspeed=file, prompts_per_step=22, micro_batch_tokens=budget, adam_beta1=0.0)
            engine, batcher, _ = engine_of(config)
            update(engine, batcher, make_samples(22, 0), config)
            states = engine.basic_optimizer.state.values()
            results[kind, budget] = torch.cat([state["exp_avg"].double() for state in states])
            engine.destroy()
    return results


def with_answers(sample, *arguments, **named) -> list[list[Rollout]]:
    """Draw completions, and say of some of their tokens that they were answered."""
    return [
        [
            replace(rollout, drawn=[place % 5 != (2 + number) % 5 for place, _ in enumerate(rollout.completion_ids)])
            for number, rollout in enumerate(rollouts)
        ]
        for rollouts in sample(*arguments, **named)
    ]


def with_branches(sample, examples, *arguments, **named) -> list[list[Rollout]]:
    """Draw completions, and make episodes of them: of two branches of one prompt, of one of another, of none."""

    def branches(prompt: list[int], rollout: Rollout) -> list[Branch]:
        ids, logprobs, half = rollout.completion_ids, rollout.sampling_logprobs, len(rollout.completion_ids) // 2
        first = [place < half for place, _ in enumerate(ids)]
        later = [not mark for mark in first]
        sequences = [(prompt, ids, first), (prompt, ids, later), ([*prompt, *ids[:half]], ids[half:], later[half:])]
        return [
            Branch(prompt_ids=begin, completion_ids=end, sampling_logprobs=logprobs[-len(end) :], drawn=marks)
            for begin, end, marks in sequences
        ]

    chosen = slice(0, 2), slice(2, 3), slice(0), slice(0, 3)
    return [
        [
            replace(rollout, branches=branches(example.prompt_ids, rollout)[chosen[number % 4]])
            for number, rollout in enumerate(rollouts)
        ]
        for example, rollouts in zip(examples, sample(examples, *arguments, **named), strict=True)
    ]


def ratios(make, dataset: str) -> dict:
    """Count micro-batches, and find the largest |log ratio| of policy and old log-probs, and |log-probs - reference|,
    where no weight moves."""
    results = {}
    adapter = {"use_peft": True, "lora_target_modules": "all-linear"}
    kinds = {
        "plain": {},
        "activations kept": {"gradient_checkpointing": False},
        "cut ones left out": {"mask_truncated_completions": True, "max_completion_length": 60},
        "its own reference": {"ref": "adapter_off", "beta": 0.04, **adapter},
        "a copy as reference": {"ref": "local", "beta": 0.04},
        "with answers": {"loss_type": "dapo"},
        "with branches": {"importance_sampling_mode": "token_truncate"},
    }
    drawing = {"with answers": with_answers, "with branches": with_branches}
    tokenizer = load_tokenizer(make())
    examples = load_examples(make(), "train", tokenizer)
    for dtype in DTYPES:
        for kind, changes in kinds.items():
            sizes = {"prompts_per_step": 3, "steps_per_generation": 3, "num_iterations": 2, "micro_batch_tokens": 260}
            config = make(dtype=dtype, learning_rate=1e-30, **sizes | changes)
            engine, batcher, reference = engine_of(config)
            loaded = load_reward_funcs(config.reward_funcs)
            rewards = Rewarder(loaded, start_rewards(loaded, config, torch.device("cpu"))[0], config)
            stream = PromptStream(examples, config.prompts_per_step, config.seed)
            rows = config.sequences_per_generate
            sampler = make_sampler(engine.module, tokenizer, config.max_completion_length, rows=rows)
            if kind in drawing:
                sampler.sample = partial(drawing[kind], sampler.sample)
            rounds = Rounds(
                config=config,
                model=engine.module,
                sampler=sampler,
                batcher=batcher,
                stream=stream,
                rewarder=rewards,
                scorers=[],
                reference=reference,
            )
            apart, from_reference = [], []

            def watched(tokens, *arguments, apart=apart, from_reference=from_reference, **named):
                if tokens.old_logprobs is not None:
                    apart.append((tokens.logprobs - tokens.old_logprobs).abs().max().item())
                if tokens.ref_logprobs is not None:
                    from_reference.append((tokens.logprobs - tokens.ref_logprobs).abs().max().item())
                return grpo_loss(tokens, *arguments, **named)

            batches: list[tuple[int, ...]] = []

            def noted(model, batch, *arguments, batches=batches, **named):
                batches.append(tuple(batch.targets.tolist()))
                return token_logprobs(model, batch, *arguments, **named)

            grpo.trainer.step.token_logprobs, grpo.trainer.step.grpo_loss = noted, watched
            step_batches, _ = rounds.collect(0, updates=0, beta=config.beta, clock=PhaseClock())
            scored = {*batches}
            for step_batch in step_batches * config.num_iterations:
                begin = len(batches)
                update(engine, batcher, step_batch.samples, config)
                if step_batch is not step_batches[0]:
                    assert {*batches[begin:]} <= scored, (dtype, kind)
            grpo.trainer.step.token_logprobs, grpo.trainer.step.grpo_loss = token_logprobs, grpo_loss
            results[dtype, kind] = len(apart), max(apart), max(from_reference, default=0.0)
            engine.destroy()
    return results


class Fetches(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, arguments=(), named=None):
        self.count += getattr(function, "__name__", "") in FETCHES
        return function(*arguments, **(named or {}))


def fetches(make) -> dict:
    """Count how often a step of so many micro-batches asks a tensor for its numbers."""
    results = {}
    for kind, changes in {"plain": {}, "GSPO": {"importance_sampling_level": "sequence"}}.items():
        for prompts in (2, 16):
            config = make(prompts_per_step=prompts, micro_batch_tokens=1, num_iterations=2, beta=0.04, **changes)
            engine, batcher, _ = engine_of(config)
            update(engine, batcher, make_samples(prompts, 0), config)
            with Fetches() as mode:
                update(engine, batcher, make_samples(prompts, 1), config)
            results[kind, prompts] = mode.count
            engine.destroy()
    return results


def refusal(make, folder: Path) -> str:
    """Return how the start ends with a setting that DeepSpeed's check of the file lets through."""
    path = folder / "predivided.json"
    path.write_text('{"gradient_predivide_factor": 2.0}')
    try:
        engine_of(make(deepspeed=path))
    except ConfigError as error:
        return str(error)
    return ""


def main(model: str, dataset: str, out: str) -> None:
    make, folder = partial(settings, model, dataset), Path(out).parent
    join_ranks(make())
    results = {"steps": steps_with_every_file(make, folder), "gradients": gradients(make, folder)}
    results |= {"ratios": ratios(make, dataset), "fetches": fetches(make)}
    results["refusal"] = refusal(make, folder)
    torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
