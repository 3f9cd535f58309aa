"""Compare the formula of `grpo_ref_split.py --dry_run` with measured peaks: on a CPU, with random weights.

    python -m benchmarks.train_memory                  # all cases, one after the other
    python -m benchmarks.train_memory --only LoRA
    python -m benchmarks.train_memory --heap           # with glibc's heap as it is by default

`python -m benchmarks.gpu --part memory` measures CARD_CASES on a CUDA card in the same way, by torch's own counters.

Each case is a rank (or two), each in its own process and set up as in the trainer: a model loaded from a folder,
DeepSpeed's engine, then an update, a round of sampling and an update, of prompts and completions of full length. The
table shows the peak of resident memory in each phase after the first update, above that of the process before a model
was loaded. Blocks of 1 MiB and more go back to the system when they are freed (MALLOC_MMAP_THRESHOLD_), so that
resident memory is the memory of tensors; with --heap they do not. The table goes to stdout, progress to stderr. Linux
only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from benchmarks.card import CUDA, DEVICE
from benchmarks.common import REPOSITORY, SHAPES, TINY, forget_peak, machine, peak_above, qwen, random_model, table
from benchmarks.memory import gpt2, on_meta
from grpo.config.console import free_port
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example, Sample
from grpo.model.activations import checkpoint_activations
from grpo.model.load import load_model, load_tokenizer
from grpo.model.lora import train_adapter
from grpo.model.memory import MIB, Memory
from grpo.model.trial import make_batcher
from grpo.run.metrics import PhaseClock
from grpo.sampling.self_check import make_sampler
from grpo.trainer.deepspeed_engine import engine_config
from grpo.trainer.rank_memory import BACKWARD, SAMPLING, STEP, RankWork, rank_memory
from grpo.trainer.step import update

PROMPT, COMPLETION, GENERATIONS = 64, 48, 8
SETTINGS = {
    "max_prompt_length": PROMPT,
    "max_completion_length": COMPLETION,
    "num_generations": GENERATIONS,
    "prompts_per_step": 4,
    "sequences_per_generate": 16,
    "micro_batch_tokens": 1024,
    "beta": 0.0,
    "eval_steps": 0,
}
NO_CHECKPOINTS = {"gradient_checkpointing": False}
LORA = {"use_peft": True, "lora_target_modules": ["all-linear"]}


@dataclass(frozen=True)
class Case:
    config: Callable[[], PretrainedConfig]
    settings: dict = field(default_factory=dict)
    ranks: int = 1

    def trainer(self, **more) -> TrainerConfig:
        return TrainerConfig(**(SETTINGS | self.settings | more))


def widths(layers: int = 4, vocabulary: int = 32768, **changes) -> Callable[[], PretrainedConfig]:
    return lambda: qwen(layers, vocabulary, **changes)


def shape(name: str) -> Callable[[], PretrainedConfig]:
    return lambda: qwen(**SHAPES[name])


def all_heads() -> PretrainedConfig:
    """A small body whose every head has keys: sampling is the highest point."""
    heads = dict(num_attention_heads=8, num_key_value_heads=8)
    return qwen(8, 4096, hidden_size=512, intermediate_size=1024, **heads)


CASES = {
    "qwen2 0.5B's widths, 4 layers": Case(widths()),
    "... no checkpointing": Case(widths(), NO_CHECKPOINTS),
    "... no checkpointing, 2,048 tokens": Case(widths(), NO_CHECKPOINTS | {"micro_batch_tokens": 2048}),
    "... no checkpointing, 2 layers": Case(widths(2), NO_CHECKPOINTS),
    "... 2 ranks": Case(widths(), ranks=2),
    "... 2 ranks, no checkpointing": Case(widths(), NO_CHECKPOINTS, ranks=2),
    "... LoRA": Case(widths(), LORA),
    "... LoRA, no checkpointing": Case(widths(), LORA | NO_CHECKPOINTS),
    "... 1 layer, all its vocabulary": Case(widths(1, 151936)),
    "... head of its own": Case(widths(2, tie_word_embeddings=False)),
    "gpt2, no checkpointing": Case(gpt2, NO_CHECKPOINTS),
    "many completions at once": Case(
        all_heads, {"sequences_per_generate": 64, "max_prompt_length": 128, "prompts_per_step": 8}
    ),
}

# The defaults of the trainer, with full-length completions: 8 prompts x 8 completions a step.
CARD = {
    "max_prompt_length": 256,
    "max_completion_length": 512,
    "prompts_per_step": 8,
    "sequences_per_generate": 64,
    "micro_batch_tokens": 16384,
}
CARD_CASES = {
    "Qwen2.5-1.5B's shape": Case(shape("Qwen2.5-1.5B"), CARD),
    "... no checkpointing, 4,096 tokens": Case(
        shape("Qwen2.5-1.5B"), CARD | NO_CHECKPOINTS | {"micro_batch_tokens": 4096}
    ),
    "... with LoRA": Case(shape("Qwen2.5-1.5B"), CARD | LORA),
    "Qwen2.5-3B's shape": Case(shape("Qwen2.5-3B"), CARD),
}
TINY_CASES = {"tiny": Case(lambda: qwen(**TINY))}
PHASES = SAMPLING, BACKWARD, STEP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names that contain this")
    parser.add_argument("--heap", action="store_true")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        name, folder = options.measure
        print(json.dumps(measure((CASES | CARD_CASES | TINY_CASES)[name], folder)), flush=True)
        os._exit(0)  # DeepSpeed has nothing left to do
    rows = []
    for name, case in CASES.items():
        if options.only and options.only not in name:
            continue
        row: list[object] = [name]
        expected = predict(case)
        measured = run("-m", "benchmarks.train_memory", "--measure", name, case=case, heap=options.heap)
        for phase in PHASES:
            peak, predicted = measured[phase], expected.peak(phase)
            row += [predicted // MIB, peak // MIB, f"{predicted / peak:.2f}"]
        predicted, peak = expected.peak(expected.highest), max(measured[phase] for phase in PHASES)
        rows.append([*row, f"{predicted / peak:.2f}"])
        print(*rows[-1], measured["process"] // MIB, file=sys.stderr, flush=True)
    print(f"{machine()}\n")
    head = [name for phase in PHASES for name in (f"{phase}, predicted", "measured", "ratio")]
    print(table(["MiB above the process", *head, "highest: ratio"], rows))


def predict(case: Case, device: str = "cpu") -> Memory:
    config = case.trainer()
    model = on_meta(case.config(), torch.bfloat16 if device == "cuda" else torch.float32).eval()
    if config.use_peft:
        train_adapter(model, config)
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    ds_config = engine_config(config, case.ranks, torch.device(device))
    return rank_memory(
        model,
        RankWork(config=config, ranks=case.ranks, longest_prompt=config.max_prompt_length, held_out=0),
        ds_config,
        device,
    )


def phase_sizes(name: str, case: Case, seconds: float) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of each phase on this machine's device, predicted and measured: tensors alone.

    Raises RuntimeError or subprocess.TimeoutExpired where the case's process fails or takes too long.
    """
    expected = predict(case, DEVICE)
    predicted = {phase: expected.tensors(phase) for phase in PHASES}
    measured = run("-m", "benchmarks.train_memory", "--measure", name, case=case, on_card=CUDA, seconds=seconds)
    return predicted, measured


def run(
    *command: str, case: Case, heap: bool = False, on_card: bool = False, seconds: float | None = None
) -> dict[str, int]:
    """Make the model, run a process for each rank, and return the largest peak of each phase over ranks, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        config = case.config()
        save_random(config, folder, on_card)
        words = {f"w{place}": place for place in range(config.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", pad_token="w0").save_pretrained(folder)
        ranks = {"WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        alone = {"HF_HUB_OFFLINE": "1"}
        if not on_card:
            alone |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if not heap:
            alone["MALLOC_MMAP_THRESHOLD_"] = str(MIB)
        processes = [
            subprocess.Popen(
                [sys.executable, *command, folder],
                cwd=REPOSITORY,
                env={**os.environ, **alone, **ranks, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(case.ranks)
        ]
        try:
            ended = [process.communicate(timeout=seconds) for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{errors[-3000:]}")
    peaks = [json.loads(output.strip().splitlines()[-1]) for output, _ in ended]
    return {phase: max(of_rank[phase] for of_rank in peaks) for phase in peaks[0]}


def save_random(config: PretrainedConfig, folder: str, on_card: bool) -> None:
    if on_card:
        random_model(config, torch.bfloat16, "cuda").save_pretrained(folder)
        torch.cuda.empty_cache()
    else:
        random_model(config).save_pretrained(folder)


def measure(case: Case, folder: str) -> dict[str, int]:
    """Return the bytes of this rank: of the process before a model was loaded, and in each phase above that."""
    from grpo.trainer.deepspeed_engine import join_ranks, start_engine

    config = case.trainer(model_name_or_path=str(Path(folder).resolve()))
    rank, world_size, device, _ = join_ranks(config)
    ds_config = engine_config(config, world_size, device)
    start = forget_peak()
    tokenizer, model = load_tokenizer(config), load_model(config, device)
    if config.use_peft:
        train_adapter(model, config)
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    batcher = make_batcher(model, tokenizer.pad_token_id)
    longest, rows = config.max_completion_length, config.sequences_per_generate
    sampler = make_sampler(model, tokenizer, longest, rows=rows, packs=batcher.packs)
    engine, _ = start_engine(config, ds_config, model)
    watched = Watched(engine)
    draw = random.Random(rank)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, 1000) for _ in range(count)]

    peaks = {"process": start}
    for turn in range(2):
        prompts = [ids(config.max_prompt_length) for _ in range(config.prompts_per_step // world_size)]
        examples = [
            Example(index=place, prompt="", prompt_ids=prompt, columns={}) for place, prompt in enumerate(prompts)
        ]
        if turn == 1:
            forget_peak()
            sampler.sample(examples, config.num_generations, 1.0, seed=turn)
            peaks[SAMPLING] = peak_above(start)
        sequences = [
            Sample(
                prompt_ids=prompt,
                completion_ids=ids(config.max_completion_length),
                finished=True,
                advantage=draw.gauss(0, 1),
            )
            for prompt in prompts
            for _ in range(config.num_generations)
        ]
        forget_peak()
        clock = PhaseClock()
        with clock("update"):
            update(watched, sequences, config, batcher, clock, beta=0.0, entropy_coef=0.0)
        peaks[BACKWARD], peaks[STEP] = watched.before_step - start, peak_above(start)
        if torch.cuda.is_available():  # the clock has read the peak of each phase, and begun a new one
            highest = clock.memory["memory/peak_update"], clock.memory["memory/peak_optimizer"]
            peaks[BACKWARD], peaks[STEP] = (int(peak * 2**30) - start for peak in highest)
    return peaks


class Watched:
    """A DeepSpeed engine that notes the peak before its step."""

    def __init__(self, engine):
        self._engine, self.before_step = engine, 0

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def step(self) -> None:
        self.before_step = peak_above(0)
        forget_peak()
        self._engine.step()


if __name__ == "__main__":
    main()
