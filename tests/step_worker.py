"""Run under the launcher by test_update.py: one `update` on this rank's share of fixed sequences, with plain SGD, so
that the change of the weights is the gradient. Rank 0 writes it, and the step's metrics.

    step_worker.py MODEL OUT MICRO_BATCH_TOKENS BETA CHECKPOINTING SHARES MAX_GRAD_NORM
"""

import json
import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo_ref_split as trainer
from grpo.arguments import parse_arguments
from grpo.config import SharedConfig, TrainerConfig
from grpo.ds_config import engine_config
from grpo.metrics import PhaseClock, gather_stats
from grpo.model import checkpoint_activations, load_model, make_batcher
from grpo.records import Sequence

LEARNING_RATE = 1e3  # the change of a weight is then far above the rounding of the weight


def sequences() -> list[Sequence]:
    """Six groups of four, ragged; among them empty and one-token completions, and such as hold the pad token."""
    draw = random.Random(5)
    prompts = [[draw.randint(5, 200) for _ in range(length)] for length in (1, 20, 7, 3, 12, 9)]
    made = []
    for number in range(24):
        length = [0, 1, 30][number] if number < 3 else draw.randint(1, 25)
        completion = [draw.randint(0, 200) for _ in range(length)]
        reference = np.asarray([-draw.uniform(3, 8) for _ in completion], np.float32)
        made.append(Sequence(prompts[number // 4], completion, draw.gauss(0, 1), partial(np.copy, reference)))
    return made


def main(model, out, micro_batch_tokens, beta, checkpointing, shares, max_grad_norm) -> None:
    options = ["--prompts_per_step", "6", "--num_generations", "4", "--micro_batch_tokens", micro_batch_tokens]
    config = parse_arguments(
        TrainerConfig, "", [*options, "--beta", beta, "--max_grad_norm", max_grad_norm, "--temperature", "0.8"]
    )
    rank, world_size, device = trainer.join_ranks(config)
    policy = load_model(SharedConfig(model_name_or_path=model), device).train()
    batcher = make_batcher(policy, 0)
    if checkpointing == "yes":
        checkpoint_activations(policy)
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    settings = engine_config(config, world_size, device) | {"zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(policy.parameters(), lr=LEARNING_RATE)
    engine, *_ = trainer.deepspeed.initialize(model=policy, optimizer=optimizer, config=settings)

    ends = np.cumsum([0, *map(int, shares.split(","))])
    own = sequences()[ends[rank] : ends[rank + 1]]
    stats = gather_stats(trainer.update(engine, own, config, batcher, PhaseClock()))
    if rank == 0:
        torch.save(
            {name: (before[name] - weight.detach()) / LEARNING_RATE for name, weight in policy.named_parameters()}, out
        )
        numbers = {name: [one.count, one.total] for name, one in stats.items()}
        Path(out).with_suffix(".json").write_text(json.dumps(numbers | {"norm": float(engine.get_global_grad_norm())}))
    trainer.dist.barrier()
    trainer.dist.destroy_process_group()


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
