"""The update phase (log-probs, loss, backward) beside TRL's GRPOTrainer, and how ours grows. CPU, fp32, random weights.

    python -m benchmarks.logprobs --part update                 time and memory beside TRL, in pairs
    python -m benchmarks.logprobs --part update --layers 24     ... with all of Qwen2.5-0.5B's layers
    python -m benchmarks.logprobs --part memory                 ours alone: peaks as vocabulary and lengths double
    python -m benchmarks.logprobs --part settings               TRL alone: where its best settings come from
    python -m benchmarks.logprobs --part teacher --layers 24    the cost of the likeliest tokens

Needs trl (written for 1.16.0) and matplotlib. Tables go to stdout, progress to stderr. Both sides compute the same loss
and the same gradients: that is checked before anything is timed, and a difference ends the run.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.common import (
    BESIDE_TRL,
    VOCABULARY,
    beside_trl,
    forget_peak,
    fresh,
    in_turn,
    machine,
    peak_above,
    qwen,
    random_model,
    ratios,
    seconds,
    skewed,
    spread,
    table,
)
from grpo.algorithm.loss import grpo_loss
from grpo.algorithm.loss_types import StepSize, Tokens
from grpo.config.loss_settings import LossSection
from grpo.model.activations import checkpoint_activations
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher
from grpo.model.pictures import PictureProcessor
from grpo.model.trial import make_batcher
from grpo.server.scorer import completion_logprobs

PAD, EPSILON, BETA = 0, 0.2, 0.04
GROUP, PROMPT, COMPLETION = 8, 200, (50, 400)
ONE_BATCH = 10**9
"""tokens: one micro-batch whatever the lengths, so that the tables show what a token costs, not what a budget allows"""
TOLERANCE = 1e-5
MIB = 2**20


@dataclass(frozen=True)
class Work:
    """Sampled sequences with all that the loss needs, as they come from sampling, rewards and the reference."""

    sequences: list[tuple[list[int], list[int]]]
    advantages: torch.Tensor
    references: list[torch.Tensor]

    @property
    def packed_tokens(self) -> int:
        """Completions, and each prompt once."""
        return self.completion_tokens + sum(map(len, {tuple(prompt) for prompt, _ in self.sequences}))

    @property
    def completion_tokens(self) -> int:
        return sum(len(completion) for _, completion in self.sequences)


def make_work(vocabulary: int, groups: int = 1, scale: int = 1, seed: int = 0) -> Work:
    """Groups that differ in their tokens only, so that twice the groups is twice the work. Lengths times `scale`."""
    lengths = skewed(GROUP, *COMPLETION, random.Random(seed))
    draw = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(3, vocabulary, (length,), generator=draw).tolist()

    sequences = []
    for _ in range(groups):
        prompt = ids(PROMPT * scale)
        sequences += [(prompt, ids(length * scale)) for length in lengths]
    # Random weights give nearly uniform log-probs; a reference in their neighbourhood makes an ordinary KL.
    references = [-math.log(vocabulary) + 0.3 * torch.randn(len(c), generator=draw) for _, c in sequences]
    return Work(sequences, torch.randn(len(sequences), generator=draw), references)


class Ours:
    """The update of grpo_ref_split.py without ranks and optimizer."""

    def __init__(
        self, model: PreTrainedModel, checkpointing: bool, budget: int, processor: PictureProcessor | None = None
    ):
        self.model, self.budget = model, budget
        self.batcher = make_batcher(model, PAD, processor)
        if checkpointing:
            checkpoint_activations(model)

    def prepare(self, work: Work) -> Callable[[], float]:
        return lambda: self.update(work)

    def update(self, work: Work) -> float:
        total, settings = 0.0, LossSection(epsilon=EPSILON)
        size = StepSize(sequences=len(work.sequences), tokens=sum(len(completion) for _, completion in work.sequences))
        for rows in self.batcher.cut(work.sequences, self.budget):
            batch = self.batcher.make([work.sequences[row] for row in rows], "cpu")
            lengths = torch.tensor([len(work.sequences[row][1]) for row in rows])
            logprobs, entropy = token_logprobs(self.model, batch, 1.0, with_entropy=True)
            references = torch.cat([work.references[row] for row in rows])
            tokens = Tokens(
                lengths=lengths,
                advantages=work.advantages[rows],
                logprobs=logprobs,
                entropy=entropy,
                ref_logprobs=references,
            )
            loss, _ = grpo_loss(tokens, size, settings, beta=BETA, entropy_coef=0.0, max_completion_length=0)
            loss.backward()
            total += loss.item()
        return total

    @torch.no_grad()
    def score(self, work: Work) -> None:
        """Score as the reference server does."""
        for rows in self.batcher.cut(work.sequences, self.budget):
            token_logprobs(self.model, self.batcher.make([work.sequences[row] for row in rows], "cpu"), 1.0)


class Theirs:
    """TRL's own GRPOTrainer, its `compute_loss` called as its `training_step` calls it.

    `rows` is per_device_train_batch_size; gradient accumulation makes a group of 8 of it. `compact` scores completion
    positions only. TRL does that on a GPU; on a CPU it has no such setting and runs the head over prompts and padding
    too. So it is reported beside the settings that a user has, and never instead of them.
    """

    def __init__(self, model: PreTrainedModel, checkpointing: bool, rows: int = GROUP, compact: bool = False):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        from demo.model import build_tokenizer

        self.rows, self.compact = rows, compact
        self.model = model
        with tempfile.TemporaryDirectory() as folder:
            self.trainer = GRPOTrainer(
                self.model,
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=GRPOConfig(
                    folder,
                    use_cpu=True,
                    bf16=False,
                    report_to="none",
                    loss_type="grpo",
                    epsilon=EPSILON,
                    # The default multiplies the KL by the probability ratio: another gradient than the paper's.
                    use_bias_correction_kl=False,
                    num_generations=GROUP,
                    per_device_train_batch_size=rows,
                    gradient_accumulation_steps=GROUP // rows,
                    gradient_checkpointing=checkpointing,
                ),
                train_dataset=Dataset.from_dict({"prompt": ["a question"] * GROUP}),
                processing_class=build_tokenizer(0),
            )
        # Set here and not in the config: there it would load a reference model, which has no part in this phase.
        self.trainer.beta = BETA
        self.trainer.current_gradient_accumulation_steps = GROUP // rows  # as `train` sets it
        if checkpointing:  # as `train` does before its first step
            self.model.activation_checkpointing_enable()
        self.model.train()

    def prepare(self, work: Work) -> Callable[[], float]:
        inputs = self.inputs(work)

        def update() -> float:
            total = 0.0
            with patch("trl.trainer.utils._use_triton", return_value=self.compact):
                for micro_batch in inputs:
                    loss = self.trainer.compute_loss(self.model, micro_batch)
                    loss.backward()
                    total += loss.item()
            return total

        return update

    def inputs(self, work: Work) -> list[dict[str, torch.Tensor]]:
        """Build micro-batches as `_generate_and_score_completions` and `_prepare_inputs` do."""
        from trl.trainer.utils import pad, split_tensor_dict

        prompts = [torch.tensor(prompt) for prompt, _ in work.sequences]
        completions = [torch.tensor(completion) for _, completion in work.sequences]
        mask = pad([torch.ones_like(ids) for ids in completions], padding_value=0, padding_side="right")
        inputs = {
            "prompt_ids": pad(prompts, padding_value=PAD, padding_side="left"),
            "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"),
            "completion_ids": pad(completions, padding_value=PAD, padding_side="right"),
            "completion_mask": mask,
            "advantages": work.advantages,
            "num_items_in_batch": mask.sum(),
            "ref_per_token_logps": pad(work.references, padding_value=0.0, padding_side="right"),
        }
        return split_tensor_dict(inputs, GROUP // self.rows)


@dataclass(frozen=True)
class Setting:
    """One side of a comparison, as another process is told of it."""

    side: str
    layers: int
    vocabulary: int
    checkpointing: bool = True
    rows: int = 8
    compact: bool = False
    scale: int = 1
    phase: str = "update"

    def build(self) -> Ours | Theirs:
        model = random_model(qwen(self.layers, self.vocabulary))
        if self.side == "ours":
            return Ours(model, self.checkpointing, ONE_BATCH)
        return Theirs(model, self.checkpointing, self.rows, self.compact)


def peak_here(setting: Setting) -> int:
    """Bytes that one phase takes above weights and gradients. For a process that has done nothing else."""
    side = setting.build()
    work = make_work(setting.vocabulary, scale=setting.scale)
    tiny = Work([(p[:4], c[:4]) for p, c in work.sequences], work.advantages, [r[:4] for r in work.references])
    if setting.phase == "update":
        side.prepare(tiny)()  # from here on the gradients exist
        phase = side.prepare(work)
    else:
        side.score(tiny)

        def phase() -> None:
            side.score(work)

    start = forget_peak()
    phase()
    return peak_above(start)


def peak(setting: Setting) -> int:
    return int(fresh("-m", "benchmarks.logprobs", "--peak", json.dumps(asdict(setting))))


def check_sides(ours: Ours, theirs: Theirs, work: Work) -> None:
    """Refuse to go on where the two sides compute different losses or gradients."""
    losses, gradients = [], []
    for side in (ours, theirs):
        side.model.zero_grad()
        losses.append(side.prepare(work)())
        gradients.append({name: value.grad for name, value in side.model.named_parameters()})
    mine, other = gradients
    squares = sum((mine[name] - other[name]).double().square().sum().item() for name in other)
    norm = sum(gradient.double().square().sum().item() for gradient in other.values())
    loss_error, gradient_error = abs(losses[0] - losses[1]), math.sqrt(squares / norm)
    print(
        f"same work: loss {losses[0]:.7f} and {losses[1]:.7f}, gradients differ by {gradient_error:.1e} of their norm",
        file=sys.stderr,
    )
    if mine.keys() != other.keys() or not max(loss_error, gradient_error) <= TOLERANCE:
        sys.exit(f"not the same work: losses {losses}, relative difference of the gradients {gradient_error:.1e}")


def check_exactness(layers: int, vocabulary: int) -> None:
    """Packed, padded and the plain way must agree, or no time means anything."""
    model = random_model(qwen(layers, vocabulary))
    work = make_work(vocabulary)
    plain = []
    with torch.no_grad():
        for prompt, completion in work.sequences:
            logits = model(torch.tensor([prompt + completion[:-1]]), logits_to_keep=len(completion)).logits[0]
            plain.append(logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1))
        padded, _ = token_logprobs(model, Batcher(PAD, packs=False).make(work.sequences, "cpu"), 1.0)
        batch = make_batcher(model, PAD).make(work.sequences, "cpu")
        packed, _ = token_logprobs(model, batch, 1.0)
    if batch.tree is None:
        sys.exit("the model was not packed")
    plain = torch.cat(plain)
    pairs = {"padded, plain": (padded, plain), "packed, plain": (packed, plain), "packed, padded": (packed, padded)}
    differences = {name: (one - other).abs().max().item() for name, (one, other) in pairs.items()}
    print(f"\n### Largest difference of {len(plain):,} log-probs: {layers} layers\n")
    print(table(["between", "difference"], [[name, f"{value:.1e}"] for name, value in differences.items()]))
    if not max(differences.values()) <= TOLERANCE:
        sys.exit("packed, padded and plain log-probs differ: nothing is timed")


# Tried for TRL's best (--part settings measures the first two):
#   gradient_checkpointing off: faster, as everywhere, and larger.
#   per_device_train_batch_size 4, 2 or 1 with accumulation: smaller and slower. TRL pads every micro-batch to the
#     longest completion of the whole generation batch, so a smaller one saves no padding.
#   torch_compile: 3 % faster after 45 s of compiling, for one shape; every generation batch has another.
#   attn_implementation eager: 4 % slower than sdpa, which is the default.
#   Tiles of logits (4096 tokens x 32768 words, constants of the package, no setting): 512 x 4096 is slower.
#   use_liger_kernel, use_kernels: Triton kernels, not for a CPU. Padding-free and packing: SFT has them, GRPO does not.
#   bf16, cast_lm_head_to_fp32: another computation.
BEST_ROWS = 8


def part_update(layers: int, vocabulary: int, repeats: int) -> None:
    default = Setting("trl", layers, vocabulary)
    best = replace(default, checkpointing=False, rows=BEST_ROWS)
    comparisons = {
        "defaults of both": default,
        "best of both": best,
        "defaults, TRL's head on completions only": replace(default, compact=True),
        "best, TRL's head on completions only": replace(best, compact=True),
    }
    work = make_work(vocabulary)
    rows = []
    for name, setting in comparisons.items():
        own = replace(setting, side="ours")
        ours, theirs = own.build(), setting.build()
        check_sides(ours, theirs, work)
        # The check has been the warm-up too.
        times = in_turn({"ours": ours.prepare(work), "trl": theirs.prepare(work)}, repeats)
        del ours, theirs
        print(f"{name}: {times}", file=sys.stderr)
        peaks = {side: peak(one) for side, one in (("ours", own), ("trl", setting))}
        rows.append(beside_trl(name, times, peaks))
    print(f"\n### Update phase: {layers} layers, {describe(work, vocabulary)}, {repeats} pairs\n")
    print(table(["settings", *BESIDE_TRL], rows))
    print("\nMiB: peak above weights and gradients, each side in a process of its own. On a GPU TRL's head runs on")
    print("completions only; on a CPU it runs over prompts and padding too, without a setting: the last rows patch it.")


def part_settings(layers: int, vocabulary: int, repeats: int) -> None:
    work = make_work(vocabulary)
    rows = []
    for checkpointing in (True, False):
        for count in (8, 4, 2, 1):
            setting = Setting("trl", layers, vocabulary, checkpointing=checkpointing, rows=count)
            update = setting.build().prepare(work)
            update()
            times = [seconds(update) for _ in range(repeats)]
            del update
            rows.append([checkpointing, count, GROUP // count, spread(times), f"{peak(setting) / MIB:,.0f}"])
            print(rows[-1], file=sys.stderr)
    print(f"\n### TRL's settings: {layers} layers, {describe(work, vocabulary)}, {repeats} times\n")
    head = ["gradient_checkpointing", "per_device_train_batch_size", "gradient_accumulation_steps", "seconds", "MiB"]
    print(table(head, rows))


BODY = 1024
"""a vocabulary so small that the body of the model is measured, and hardly the head"""


def part_teacher(layers: int, vocabulary: int, repeats: int) -> None:
    """Score as a server does, without and with the likeliest tokens, in turn."""
    ours, work = Setting("ours", layers, vocabulary).build(), make_work(vocabulary)

    def score(top_k: int) -> None:
        with torch.inference_mode():
            completion_logprobs(ours.model, ours.batcher, work.sequences, 1.0, top_k, known_ids=vocabulary)

    score(64)
    times = in_turn({str(top_k): partial(score, top_k) for top_k in (0, 16, 64)}, repeats)
    print(f"\n### Likeliest tokens: {layers} layers, {describe(work, vocabulary)}, {repeats} in turn\n")
    rows = [
        [top_k, 4 + 8 * int(top_k), spread(values), spread(ratios(values, times["0"]))]
        for top_k, values in times.items()
    ]
    print(table(["top_k", "bytes a token", "seconds", "times that of 0"], rows))


def part_memory(layers: int, vocabulary: int) -> None:
    vocabularies = [BODY, *(vocabulary // part for part in (8, 4, 2, 1))]
    scales = [1, 2, 4, 8]
    sizes = dict.fromkeys(
        [(size, 1) for size in vocabularies] + [(s, scale) for scale in scales for s in (BODY, vocabulary)]
    )
    wanted = [(size, scale, phase) for size, scale in sizes for phase in ("score", "update")]
    peaks = {
        (size, scale, phase): peak(Setting("ours", layers, size, scale=scale, phase=phase)) / MIB
        for size, scale, phase in tqdm(wanted, desc="peaks", file=sys.stderr)
    }

    work = make_work(vocabulary)
    print(f"\n### Peak as the vocabulary doubles, MiB above weights and gradients: {layers} layers, {describe(work)}\n")
    rows = [
        [
            f"{size:,}" + (" (hardly a head)" if size == BODY else ""),
            f"{peaks[size, 1, 'score']:,.0f}",
            f"{peaks[size, 1, 'update']:,.0f}",
            f"{work.completion_tokens * size * 4 / MIB:,.0f}",
        ]
        for size in vocabularies
    ]
    print(table(["vocabulary", "scoring", "update", "fp32 logits of the completions alone would be"], rows))

    for phase, name in (("score", "scoring, forward only"), ("update", "update, gradient checkpointing")):
        print(f"\n### Peak as the lengths double, MiB above weights and gradients ({name}): {layers} layers\n")
        rows = []
        for scale in scales:
            work = make_work(vocabulary, scale=scale)
            whole, body = peaks[vocabulary, scale, phase], peaks[BODY, scale, phase]
            rows.append(
                [
                    f"{scale}x",
                    f"{work.completion_tokens:,}",
                    f"{whole:,.0f}",
                    f"{body:,.0f}",
                    f"{whole - body:,.0f}",
                    f"{body * 1024 / work.packed_tokens:,.0f}",
                    f"{work.completion_tokens * vocabulary * 4 / MIB:,.0f}",
                ]
            )
        head = ["lengths", "completion tokens", f"vocabulary {vocabulary:,}", f"vocabulary {BODY:,}: the body"]
        print(table([*head, "difference: the head", "body, KiB a packed token", "fp32 logits would be"], rows))
    print("\nEverything in one micro-batch. Packed tokens: completions, and the prompt once.")


def describe(work: Work, vocabulary: int = 0) -> str:
    lengths = [len(completion) for _, completion in work.sequences]
    text = (
        f"{len(lengths)} completions of {min(lengths)} to {max(lengths)} tokens ({sum(lengths):,} in all), prompts of "
    )
    return text + str(len(work.sequences[0][0])) + (f", vocabulary {vocabulary:,}" if vocabulary else "")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logprobs", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["update", "memory", "settings", "teacher", "all"], default="all")
    parser.add_argument("--layers", type=int, default=4, help="of 24 (default: 4)")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"(default: {VOCABULARY})")
    parser.add_argument("--repeats", type=int, default=5, help="of everything timed (default: 5)")
    parser.add_argument("--peak", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if arguments.peak:
        print(peak_here(Setting(**arguments.peak)))
        return
    chosen = ["update", "memory"] if arguments.part == "all" else [arguments.part]
    size = arguments.layers, arguments.vocabulary
    print(machine())
    if "teacher" in chosen:
        part_teacher(*size, arguments.repeats)
    if {"update", "memory"} & {*chosen}:
        check_exactness(*size)
    if "update" in chosen:
        part_update(*size, arguments.repeats)
    if "settings" in chosen:
        part_settings(*size, arguments.repeats)
    if "memory" in chosen:
        part_memory(*size)


if __name__ == "__main__":
    main()
