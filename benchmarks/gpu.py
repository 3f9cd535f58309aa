"""What a single CUDA card does: packed batches, memory, sampling, and GRPO steps at simple_GRPO's settings.

    bash benchmarks/gpu.sh                      # every part with a time limit each, under 10 minutes together
    bash benchmarks/gpu.sh --tiny               # tiny shapes, without a GPU too: tries the script out
    python -m benchmarks.gpu --part generate    # one part

Random weights in the shapes of Qwen2.5-1.5B and 3B, bf16. Every time is taken between two synchronisations, after a
warm-up that is not counted. A part that runs out of time says what it left out.

packed      what the start-up trial chooses; packed batches, each prompt once, beside padded ones: how far log-probs and
            gradients differ; tokens a second of scoring and of an update, share of the card's peak, memory.
memory      peaks of sampling, backward pass and AdamW's step beside the formula of `--dry_run`.
generate    milliseconds a token of the trainer's samplers (its decode loop with CUDA graphs and without, transformers'
            generate), prompts of several lengths, beside reading the weights.
ranks       an all-reduce, what ZeRO-3 gathers and scatters, and an exchange of heads between two cards, where there are
            two.
train       ref_server.py and grpo_ref_split.py together on the card: simple_GRPO's 60 steps, its published time beside.

bash benchmarks/real.sh runs four more (benchmarks/gpu_real.py): sums, what make demo-real trains; fits, the settings
for cards of 24 GB with torch held to what such a card has; shapes, five steps of Qwen2.5-1.5B, 3B and 7B; gsm8k, 500
steps of SmolLM2-135M-Instruct. bash benchmarks/gpu.sh first asks what to know first of a card
(benchmarks/gpu_first.py): tests, the tests that need one; demo, make demo on it, killed and resumed; and kernels, the
kernels of a drawn token and its time, by both passes (benchmarks/kernels.py).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks import gpu_first, gpu_real
from benchmarks.arithmetic import Work, each_alone, prompt_once
from benchmarks.card import CUDA, DEVICE, Clock, Tables, bandwidth, card_peak, free, peak_of, synchronize, where
from benchmarks.common import LARGE_SHAPES, REPOSITORY, SHAPES, TINY, Group, groups, qwen, random_model, spread
from benchmarks.gpu_train import train
from benchmarks.train_memory import CARD_CASES, PHASES, TINY_CASES, phase_sizes
from demo.model import build_tokenizer
from grpo.algorithm.loss import grpo_loss
from grpo.algorithm.loss_types import StepSize, Tokens
from grpo.config.console import free_port
from grpo.config.loss_settings import LossSection
from grpo.data.records import Example
from grpo.model.activations import checkpoint_activations
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher
from grpo.model.tree_attention import VARIANTS, switch_off, switch_on, variants_for
from grpo.model.trial import make_batcher
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.generate import LocalSampler
from grpo.sampling.rows import StepGraphs

PAD = 0
BUDGET = 16384  # tokens of a batch, the default of server and trainer


def main() -> None:
    parts = {"packed": packed, "memory": memory, "generate": generate, "ranks": ranks, "train": train_both}
    for part in (gpu_real.sums, gpu_real.fits, gpu_real.shapes, gpu_real.gsm8k):
        parts[part.__name__] = partial(part, build)
    parts |= {"tests": gpu_first.tests, "demo": gpu_first.demo, "kernels": gpu_first.kernels}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=parts, required=True)
    parser.add_argument("--seconds", type=float, default=300.0, help="begin nothing new after so many")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in float32, for trying the script out")
    parser.add_argument("--json", type=Path, help="add the tables to this file")
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    if not CUDA:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns in the middle of a table
    if not (CUDA or options.tiny):
        sys.exit("benchmarks.gpu: needs CUDA; --tiny does without")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part that is ended ends its servers
    torch.backends.cuda.enable_cudnn_sdp(False)  # as take_device does
    print(f"\n## {options.part}\n\n{where()}", flush=True)
    tables = Tables(options.part)
    try:
        parts[options.part](options.tiny, Clock(options.seconds), tables)
    finally:
        if options.json:
            tables.save(options.json)


# Packed batches


def packed(tiny: bool, clock: Clock, tables: Tables) -> None:
    for shape in SHAPES:
        if clock.over(shape):
            return
        model = build(shape, tiny)
        start = time.perf_counter()
        batcher = make_batcher(model, PAD)
        synchronize()
        chosen = next((name for name in VARIANTS if f"_{name}_" in model.config._attn_implementation), "padded batches")
        print(f"\n{shape}: the start-up trial chooses {chosen}, in {time.perf_counter() - start:.1f} s")
        switch_off(model)
        work = workload(tiny, model.config)
        differences(model, sequences_of(work)[:32], tables)
        speeds(shape, model, batcher, work, chosen, clock, tables)
        free(model)


def differences(model: PreTrainedModel, sequences: list, tables: Tables) -> None:
    """Log-probs and gradients of each way beside those of padded batches; and of the same batch a second time."""
    padded, whole = Batcher(PAD, packs=False), Batcher(PAD, packs=True)
    wanted, slope = logprobs_and_gradient(model, padded, sequences)
    tables.head("attention", "beside padded batches: log-probs, mean", "largest", "gradient, relative")
    ways = {"padded, again": (padded, len(sequences)), "padded, 4 at a time": (padded, 4)}
    ways |= {name: (whole, len(sequences)) for name in variants_for(model)}
    for name, (batcher, count) in ways.items():
        if name in VARIANTS:
            switch_on(model, name)
        try:
            parts = [sequences[at : at + count] for at in range(0, len(sequences), count)]
            answers = [logprobs_and_gradient(model, batcher, part) for part in parts]
            difference = (torch.cat([logprobs for logprobs, _ in answers]) - wanted).abs()
            off = (sum(gradient for _, gradient in answers) - slope).norm() / slope.norm()
            tables.row(name, f"{difference.mean():.1e}", f"{difference.max():.1e}", f"{off:.1e}")
        # One that this card or this torch cannot run says so, and the others are still measured.
        except (RuntimeError, NotImplementedError, ImportError, TypeError) as error:
            tables.row(name, failure(error), "", "")
        finally:
            switch_off(model)


def logprobs_and_gradient(
    model: PreTrainedModel, batcher: Batcher, sequences: list
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all completion tokens, and the gradient of their sum by the first layer's query projection."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    batch = batcher.make(sequences, DEVICE)
    logprobs, _ = token_logprobs(model, batch, 1.0)
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    return logprobs.detach(), gradient.double()


def speeds(
    shape: str, model: PreTrainedModel, batcher: Batcher, work: list[Group], chosen: str, clock: Clock, tables: Tables
) -> None:
    sequences = sequences_of(work)
    tables.head(
        "shape",
        "pass",
        "batches",
        "completion tokens/s",
        "TFLOP/s needed",
        "of the card's peak",
        "peak above weights, GiB",
    )
    kinds = {name: (batcher, prompt_once(work)) for name in variants_for(model)}
    kinds = dict(sorted(kinds.items(), key=lambda item: item[0] != chosen))
    kinds["padded"] = (Batcher(PAD, packs=False), each_alone(work))
    for name, step in (("log-probs", score), ("log-probs, loss, backward", update)):
        if step is update:
            checkpoint_activations(model)
        for kind, (makes, needed) in kinds.items():
            if clock.over(f"{shape}, {name}, {kind}"):
                return
            if kind in VARIANTS:
                switch_on(model, kind)
            run = partial(step, model, makes, sequences)
            try:
                peak = peak_of(run)  # the warm-up
                times = clock.times(run)
            except (RuntimeError, NotImplementedError, ImportError, TypeError) as error:
                tables.row(shape, name, kind, failure(error), "", "", "")
                continue
            finally:
                switch_off(model)
            # A multiply-add is two operations; the backward pass does each product twice. What checkpointing computes
            # again is not counted as needed.
            operations = 2 * sum(needed.multiply_adds(model.config).values()) * (3 if step is update else 1)
            tables.row(shape, name, kind, *rates(needed, operations, times), f"{peak / 2**30:.2f}" if CUDA else "-")


def failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def rates(needed: Work, operations: float, times: list[float]) -> tuple[str, str, str]:
    """Tokens a second, TFLOP/s and the share of the card's peak."""
    flops = [operations / 1e12 / seconds for seconds in times]
    share = f"{100 * statistics.median(flops) / card_peak():.0f} %" if card_peak() else "unknown"
    return spread([needed.head_rows / seconds for seconds in times], 0), spread(flops, 1), share


def score(model: PreTrainedModel, batcher: Batcher, sequences: list) -> None:
    with torch.inference_mode():
        for rows in batcher.cut(sequences, BUDGET):
            token_logprobs(model, batcher.make([sequences[row] for row in rows], DEVICE), 1.0)


def update(model: PreTrainedModel, batcher: Batcher, sequences: list) -> None:
    """As in the trainer, without ranks; the gradients are dropped."""
    size = StepSize(sequences=len(sequences), tokens=sum(len(completion) for _, completion in sequences))
    for rows in batcher.cut(sequences, BUDGET):
        chosen = [sequences[row] for row in rows]
        lengths = torch.tensor([len(completion) for _, completion in chosen], device=DEVICE)
        batch = batcher.make(chosen, DEVICE)
        logprobs, entropy = token_logprobs(model, batch, 1.0, with_entropy=True)
        advantages = torch.tensor([1.0 if row % 2 else -1.0 for row in rows], device=DEVICE)
        tokens = Tokens(
            lengths=lengths,
            advantages=advantages,
            logprobs=logprobs,
            entropy=entropy,
            ref_logprobs=logprobs.detach() - 0.1,
        )
        loss, _ = grpo_loss(tokens, size, LossSection(), beta=0.04, entropy_coef=0.0, max_completion_length=512)
        loss.backward()
    model.zero_grad(set_to_none=True)


# Memory


def memory(tiny: bool, clock: Clock, tables: Tables) -> None:
    tables.head(
        "GiB", *(f"{phase}, {kind}" for phase in PHASES for kind in ("predicted", "measured")), "highest: ratio"
    )
    for name, case in (TINY_CASES if tiny else CARD_CASES).items():
        if clock.over(name):
            return
        try:
            predicted, measured = phase_sizes(name, case, clock.left() + 15)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            tables.row(name, f"failed: {' '.join(str(error).split())[-300:]}")
            continue
        cells = [f"{size / 2**30:.2f}" for phase in PHASES for size in (predicted[phase], measured[phase])]
        highest = max(predicted[phase] for phase in PHASES) / max(measured[phase] for phase in PHASES)
        tables.row(name, *cells, f"{highest:.2f}")


# Sampling


def generate(tiny: bool, clock: Clock, tables: Tables) -> None:
    """The trainer's samplers: groups of 8, prompts of 75 to 150 tokens; generate pads most of them on the left."""
    new = 8 if tiny else 64
    speed = bandwidth()
    print(f"\ngroups of 8, {new} tokens each after prompts of {'6 to 12' if tiny else '75 to 150'}, no end token.")
    tables.head("shape", "rows", "sampler", "tokens/s", "ms a token", "to read the weights once, ms")
    for shape in SHAPES:
        if clock.over(shape):
            return
        model = build(shape, tiny)
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        make_batcher(model, PAD)  # switches packed attention on
        draw = random.Random(0)
        for prompts in (1, 8, 32):
            if clock.over(f"{shape}, {8 * prompts} rows"):
                return
            lengths = [draw.randint(6, 12) if tiny else draw.randint(75, 150) for _ in range(prompts)]
            examples = [
                Example(index=place, prompt="", prompt_ids=[draw.randrange(3, 1000) for _ in range(length)], columns={})
                for place, length in enumerate(lengths)
            ]
            for name, sampler in samplers(model, new, 8 * prompts).items():
                draw_all = partial(sampler.sample, examples, 8, 1.0, seed=0, on_groups=lambda groups: None)
                draw_all()  # the warm-up
                seconds = clock.times(draw_all, most=3)
                tables.row(
                    shape,
                    8 * prompts,
                    name,
                    spread([8 * prompts * new / second for second in seconds], 0),
                    spread([1000 * second / new for second in seconds], 1),
                    f"{1000 * size / speed:.1f}" if speed else "-",
                )
        free(model)


def samplers(model: PreTrainedModel, new: int, rows: int) -> dict[str, LocalSampler]:
    def make(kind: type[LocalSampler], **options) -> LocalSampler:
        return kind(model, build_tokenizer(seed=0), [model.config.vocab_size], new, rows=rows, **options)

    on_card = {
        "fused, with graphs": make(ContinuousSampler, graphs=StepGraphs, fused=True),
        "with graphs": make(ContinuousSampler, graphs=StepGraphs),
    }
    return {**(on_card if CUDA else {}), "continuous": make(ContinuousSampler), "generate": make(LocalSampler)}


# Two cards


def ranks(tiny: bool, clock: Clock, tables: Tables) -> None:
    cards = torch.cuda.device_count()
    if cards < 2 and not tiny:
        print(f"\nnot measured: {cards} card")
        return
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TINY": str(int(tiny))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_ranks"],
            env=os.environ | place | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (times, _), _ = [process.communicate(timeout=max(10.0, clock.left())) for process in processes]
    except subprocess.TimeoutExpired:
        print("\nnot measured: the two ranks did not meet in time")
        return
    finally:
        for process in processes:  # ranks that wait for each other would keep the cards
            process.kill()
            process.wait()
    tables.head("2 ranks", "MB", "ms", "GB/s")
    for line in times.splitlines():
        tables.row(*line.split())


# Steps


def train_both(tiny: bool, clock: Clock, tables: Tables) -> None:
    # Weights, gradients, fp32 masters and Adam's moments are 20 bytes a parameter, and the reference 2 more.
    large = CUDA and torch.cuda.get_device_properties(0).total_memory > 76 * 2**30
    shape = "Qwen2.5-3B" if large or tiny else "Qwen2.5-1.5B"
    train(shape, partial(build, shape, tiny), tiny, clock, tables)


# Work


def build(shape: str, tiny: bool) -> PreTrainedModel:
    """Random weights whose logits spread as a trained model's do: with a norm of 1 they would differ by 0.8."""
    config = qwen(**(TINY if tiny else (SHAPES | LARGE_SHAPES)[shape]))
    model = random_model(config, torch.float32 if tiny else torch.bfloat16, DEVICE)
    model.model.norm.weight.data.fill_(4.0)
    return model


def workload(tiny: bool, config) -> list[Group]:
    count, prompts, completions = (4, (8, 16), (4, 24)) if tiny else (16, (100, 200), (50, 400))
    return groups(count, 8, prompts, completions, seed=0, vocabulary=config.vocab_size)


def sequences_of(work: list[Group]) -> list[tuple[list[int], list[int]]]:
    return [(prompt, completion) for prompt, completions in work for completion in completions]


if __name__ == "__main__":
    main()
