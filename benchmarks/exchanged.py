"""Count the bytes that a rank sends in an optimizer step, beside the formulas: on a CPU, with gloo.

    python -m benchmarks.exchanged          # 7 minutes

Bytes are those of the loopback interface, on which nothing else may talk meanwhile. The formulas, with W bytes of
weights and M micro-batches, each times (N-1)/N for N ranks: ZeRO-2 sums all gradients in each micro-batch and gathers
the weights once, (2 M + 1) W. ZeRO-3, as FSDP, gathers them twice in each micro-batch and scatters the sums of
gradients, 3 M W; gloo sums them everywhere, which makes 4 of the 3. Ranks that share rows send, of each token, the
queries, keys, values and results of each layer: forward, again (recomputation) and backward. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from benchmarks.common import REPOSITORY, machine, qwen, table
from benchmarks.train_memory import Case, run
from grpo.data.records import Sample
from grpo.model.activations import checkpoint_activations
from grpo.model.load import load_model
from grpo.model.trial import make_batcher, share_rows
from grpo.run.metrics import PhaseClock
from grpo.trainer.deepspeed_engine import engine_config, join_ranks, start_engine
from grpo.trainer.step import update

LAYERS, HEADS, KEY_HEADS, WIDTH, VOCABULARY = 4, 8, 4, 64, 4096
PROMPT, COMPLETION, GENERATIONS = 64, 192, 8
# As with a real model's sizes: no weight stays whole between two passes.
LET_GO = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 1_000_000,
    "stage3_prefetch_bucket_size": 100_000,
    "reduce_bucket_size": 1_000_000,
}


def config() -> PretrainedConfig:
    shape = dict(hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)
    return qwen(LAYERS, VOCABULARY, intermediate_size=1536, tie_word_embeddings=False, **shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help=argparse.SUPPRESS)
    torch.set_num_threads(1)
    if case := parser.parse_args().case:
        stage, sharing, micro_batches, folder = case
        print(json.dumps(measure(int(stage), int(sharing), int(micro_batches), Path(folder))), flush=True)
        os._exit(0)  # DeepSpeed has nothing left to do
    rows = []
    for ranks in (2, 4):
        for stage, sharing, micro_batches in (2, 1, 1), (2, 1, 4), (3, 1, 1), (3, 1, 4), (2, 2, 1), (3, 2, 1):
            settings = map(str, (stage, sharing, micro_batches))
            measured = run("-m", "benchmarks.exchanged", *settings, case=Case(config, ranks=ranks))
            weights, tokens = measured["weights"] * (ranks - 1) / ranks, micro_batches * fed()
            of_rows = 3 * tokens * LAYERS * (2 * HEADS + 2 * KEY_HEADS) * WIDTH * 4 * (sharing - 1) / sharing
            on_cards = (3 * micro_batches if stage == 3 else 2 * micro_batches + 1) * weights + of_rows
            on_gloo = on_cards + (micro_batches * weights if stage == 3 else 0)
            sent = measured["sent"]
            megabytes = (f"{size / 1e6:.1f}" for size in (sent, on_gloo, on_cards))
            a_token = f"{on_cards / tokens / 1e3:.1f}"
            rows.append([f"ZeRO-{stage}", ranks, sharing, micro_batches, *megabytes, f"{sent / on_gloo:.3f}", a_token])
            print(*rows[-1], file=sys.stderr, flush=True)
    print(f"{machine()}, {measured['weights'] / 1e6:.1f} MB of weights\n")
    head = ["", "ranks", "that share a row", "micro-batches", "MB sent", "formula", "with NCCL", "ratio", "kB a token"]
    print(table(head, rows))


def fed() -> int:
    """Return the tokens that a rank feeds to the model in a micro-batch: each prompt once, no completion's last."""
    return PROMPT + GENERATIONS * (COMPLETION - 1)


def measure(stage: int, sharing: int, micro_batches: int, folder: Path) -> dict[str, int]:
    """Return the bytes of the weights, and those that a rank sent in its second step."""
    settings = {
        "max_prompt_length": PROMPT,
        "max_completion_length": COMPLETION,
        "micro_batch_tokens": PROMPT + GENERATIONS * COMPLETION,
    }
    if stage == 3:
        changed = json.loads((REPOSITORY / "configs/ds_zero3.json").read_text())
        changed["zero_optimization"] |= LET_GO
        settings["deepspeed"] = str(folder / f"ds_{os.environ['RANK']}.json")
        Path(settings["deepspeed"]).write_text(json.dumps(changed))
    places = {"model_name_or_path": str(folder.resolve()), "sequence_parallel_size": sharing}
    trainer = Case(config).trainer(**settings, **places)
    rank, ranks, device, _ = join_ranks(trainer)
    model = load_model(trainer, device)
    weights = sum(weight.nbytes for weight in model.parameters())
    checkpoint_activations(model)
    batcher = make_batcher(model, 0)
    engine, _ = start_engine(trainer, engine_config(trainer, ranks, device), model)
    batcher = share_rows(batcher, engine.module, sharing)
    draw = random.Random(rank)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    for _ in range(2):  # in the first ZeRO-3 learns the order of the layers
        prompts = [ids(PROMPT) for _ in range(micro_batches)]
        samples = [
            Sample(prompt_ids=prompt, completion_ids=ids(COMPLETION), finished=True, advantage=1.0)
            for prompt in prompts
            for _ in range(GENERATIONS)
        ]
        dist.barrier()
        before = loopback()
        update(engine, samples, trainer, batcher, PhaseClock(), beta=0.0, entropy_coef=0.0, requests={})
        dist.barrier()
        sent = loopback() - before
    return {"sent": sent // ranks, "weights": weights}


def loopback() -> int:
    """Return the bytes that the machine has sent to itself."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


if __name__ == "__main__":
    main()
