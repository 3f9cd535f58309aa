"""Compare the formula of `ref_server.py --estimate` with measured peaks: grpo/model/memory.py on a CPU, random weights.

    python -m benchmarks.memory              # all shapes, one after the other
    python -m benchmarks.memory --only gpt2
    python -m benchmarks.memory --cards      # what fits which card, for well-known models: computed, nothing measured

Each shape is measured in its own process, with the server's heap setting: the peak of resident memory above the weights
while it scores full batches of every kind twice (one long sequence, long prompts with short completions, groups of 8,
many small groups). The table goes to stdout, progress to stderr. Linux only.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from benchmarks.common import forget_peak, fresh, machine, peak_above, qwen, random_model, table
from grpo.model.logprobs import token_logprobs
from grpo.model.memory import CARDS, FORWARD, GIB, MIB, fit, server_memory, total, weights
from grpo.model.trial import make_batcher
from ref_server import keep_memory_flat

PAD = 0
Sequences = list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Case:
    config: Callable[[], PretrainedConfig]
    batch_tokens: int
    longest: int
    dtype: torch.dtype = torch.float32


def llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=16384,
    )


def gpt2() -> GPT2Config:
    return GPT2Config(n_embd=768, n_layer=2, n_head=12, n_positions=4096, vocab_size=50257)


def gemma2(window: int = 4096) -> Gemma2Config:
    return Gemma2Config(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=96,
        vocab_size=32000,
        sliding_window=window,
    )


CASES = {
    "qwen2 0.5B's widths": Case(lambda: qwen(2, 32768), 4096, 4096),
    "... half the tokens": Case(lambda: qwen(2, 32768), 2048, 2048),
    "... 8 layers": Case(lambda: qwen(8, 32768), 4096, 4096),
    "... all its vocabulary": Case(lambda: qwen(1), 4096, 4096),
    "... one long sequence": Case(lambda: qwen(1, 32768), 2048, 8192),
    "... bfloat16": Case(lambda: qwen(1, 32768), 2048, 2048, torch.bfloat16),
    "qwen2, all heads have keys": Case(
        lambda: qwen(2, 32768, hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=12),
        4096,
        4096,
    ),
    "llama": Case(llama, 4096, 4096),
    "gpt2": Case(gpt2, 2048, 2048),
    "gemma2": Case(gemma2, 2048, 2048),
    "gemma2 beyond its window": Case(lambda: gemma2(512), 2048, 1024),
}

# Hidden size, MLP, layers, heads, heads with keys, vocabulary, tied head, longest: of each model's config.json.
KNOWN = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True, 32768),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True, 32768),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True, 32768),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False, 32768),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256, False, 131072),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, False, 32768),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names that contain this")
    parser.add_argument("--cards", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        print(measure(CASES[options.measure]))
        return
    if options.cards:
        print(cards())
        return
    rows = []
    for name, case in CASES.items():
        if options.only and options.only not in name:
            continue
        predicted, measured = predict(case), int(fresh("-m", "benchmarks.memory", "--measure", name))
        rows.append(
            [name, case.batch_tokens, case.longest, predicted // MIB, measured // MIB, f"{predicted / measured:.2f}"]
        )
        print(*rows[-1], file=sys.stderr, flush=True)
    print(f"{machine()}\n")
    print(table(["model", "batch tokens", "longest", "predicted, MiB", "measured, MiB", "ratio"], rows))


def cards() -> str:
    """Return a table: the largest --max_batch_tokens for each card, a power of two."""
    rows = [card_row(name, quantization) for name in KNOWN for quantization in ("none", "8bit", "4bit")]
    return table(["model", "weights, GiB", *(f"{card} GB" for card in CARDS)], rows)


def card_row(name: str, quantization: str) -> list[str]:
    hidden, wide, layers, heads, keys, vocabulary, tied, longest = KNOWN[name]
    kind = LlamaConfig if name.startswith("Llama") else Qwen2Config
    config = kind(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=longest,
    )
    model = on_meta(config, torch.bfloat16)
    size = f"{weights(model, quantization) / GIB:.1f}"
    fits = [f"{tokens:,}" if tokens else "-" for tokens in fit(model, quantization, longest).values()]
    return [name if quantization == "none" else f"... {quantization}", size, *fits]


def on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def predict(case: Case) -> int:
    """Return the predicted bytes above the weights."""
    tokens = max(case.batch_tokens, case.longest)
    memory = server_memory(on_meta(case.config(), case.dtype), "none", tokens, longest=case.longest, device_type="cpu")
    return memory.peak(FORWARD) - total(memory.standing)


@torch.inference_mode()
def measure(case: Case) -> int:
    """Return the peak of this process in bytes above the weights."""
    keep_memory_flat()
    model = random_model(case.config(), case.dtype)
    batcher = make_batcher(model, PAD)
    draw = random.Random(0)
    start = forget_peak()
    for _ in range(2):
        for sequences in work(case, draw):
            for rows in batcher.cut(sequences, case.batch_tokens):
                token_logprobs(model, batcher.make([sequences[row] for row in rows], "cpu"), 1.0)
    return peak_above(start)


def work(case: Case, draw: random.Random) -> list[Sequences]:
    """Make a batch of each kind, as full as the budget allows, no sequence longer than the longest."""
    longest, budget = case.longest, case.batch_tokens
    many = max(1, budget // longest)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, 1000) for _ in range(count)]

    def groups(count: int, prompt: int, completions: list[int]) -> Sequences:
        made: Sequences = []
        for _ in range(count):
            shared = ids(prompt)
            made += [(shared, ids(length)) for length in completions]
        return made

    eighth = max(2, min(budget, longest) // 16)
    small: Sequences = []
    used = 0
    while used < budget - 256:
        sizes = [draw.randint(10, 30) for _ in range(9)]
        small += groups(1, sizes[0], sizes[1:])
        used += sum(sizes)
    return [
        groups(many, longest // 2, [longest - longest // 2]),
        groups(many, 16, [longest - 16]),
        groups(many, longest - 80, [10] * 8 if longest <= budget else [80]),
        groups(budget // (9 * eighth), eighth, [eighth] * 8),
        small,
    ]


if __name__ == "__main__":
    main()
