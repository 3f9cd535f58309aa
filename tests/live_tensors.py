"""Run by test_train_memory.py: the most bytes that live tensors hold in each phase of a rank, with each DeepSpeed
file of a list. Prints a JSON list of {"standing", "sampling", "backward", "step", "predicted": the formula's}.

    live_tensors.py CASES

CASES is a JSON list of {"deepspeed": {...}, ...}: what to add to ds_config.json, and the trainer's settings. What is
counted is each storage that an operation returns, until it is freed, as torch.cuda.max_memory_allocated() would.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import qwen, random_model
from benchmarks.memory import on_meta
from grpo.config.errors import rank_count
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example, Sample
from grpo.model.activations import checkpoint_activations
from grpo.model.memory import LiveTensors, total
from grpo.model.trial import make_batcher, share_rows
from grpo.run.metrics import PhaseClock
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.generate import LocalSampler
from grpo.trainer import deepspeed_engine
from grpo.trainer import rank_memory as formula
from grpo.trainer.deepspeed_engine import engine_config, join_ranks, start_engine, whole_weights
from grpo.trainer.rank_memory import BACKWARD, SAMPLING, STEP, RankWork, rank_memory
from grpo.trainer.step import update

REPOSITORY = Path(__file__).resolve().parent.parent
deepspeed_engine.NORM_BLOCK = formula.NORM_BLOCK = 2**14  # so that the gradients here have several
PROMPT, COMPLETION = 64, 48
SHAPE = dict(hidden_size=256, intermediate_size=1024, num_attention_heads=8, tie_word_embeddings=True)


class Live(LiveTensors):
    """Counts a model's own tensors too."""

    def __init__(self):
        super().__init__(nn.Module())

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":  # DeepSpeed has some
            super().count(storage)

    def forget(self) -> int:
        """Begin a new peak; returns the last one."""
        most, self.most = self.most, self.now
        return most


class Tokenizer:
    pad_token_id = 0

    def decode(self, ids, **options) -> str:
        return ""


class Watched:
    """A DeepSpeed engine that notes the peaks before its step and in it."""

    def __init__(self, engine, live: Live):
        self._engine, self._live, self.peaks = engine, live, {}

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def step(self) -> None:
        self.peaks["backward"] = self._live.forget()
        self._engine.step()
        self.peaks["step"] = self._live.forget()


def run(case: dict, folder: str) -> dict:
    settings = json.loads((REPOSITORY / "ds_config.json").read_text())
    more = case.pop("deepspeed")
    settings["zero_optimization"] |= {"reduce_bucket_size": 500_000} | more.pop("zero_optimization", {})
    path = Path(folder) / "ds_config.json"
    path.write_text(json.dumps(settings | more))
    sizes = dict(max_prompt_length=PROMPT, max_completion_length=COMPLETION, num_generations=8)
    sizes |= dict(sequences_per_generate=16, prompts_per_step=4 * rank_count())
    config = TrainerConfig(beta=0.0, eval_steps=0, deepspeed=str(path), **sizes, **case)
    _, ranks, device, _ = join_ranks(config)
    ds_config = engine_config(config, ranks, device)
    shape, dtype, draw = qwen(4, 512, **SHAPE), getattr(torch, config.dtype), random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, 512) for _ in range(count)]

    live = Live()
    with live:
        model = random_model(shape, dtype)
        for tensor in (*model.parameters(), *model.buffers()):
            live.count(tensor.untyped_storage())
        if config.gradient_checkpointing:
            checkpoint_activations(model)
        batcher = make_batcher(model, 0)
        engine, _ = start_engine(config, ds_config, model)
        batcher = share_rows(batcher, engine.module, config.sequence_parallel_size)
        kind = ContinuousSampler if config.sampler == "continuous" else LocalSampler
        sampler = kind(engine.module, Tokenizer(), [2], COMPLETION, rows=config.sequences_per_generate)
        watched, peaks = Watched(engine, live), {}
        for turn in range(2):
            prompts = [ids(PROMPT) for _ in range(4)]
            live.forget()
            examples = [
                Example(index=place, prompt="", prompt_ids=prompt, columns={})
                for place, prompt in enumerate(prompts[:2])
            ]
            with whole_weights(engine):
                sampler.sample(examples, 8, 1.0, seed=turn)
            peaks["sampling"] = live.forget()
            sequences = [
                Sample(prompt_ids=prompt, completion_ids=ids(COMPLETION), finished=True, advantage=1.0)
                for prompt in prompts
                for _ in range(8)
            ]
            update(watched, sequences, config, batcher, PhaseClock(), beta=0.0, entropy_coef=0.0)
        peaks |= {**watched.peaks, "standing": live.now}
    counted = on_meta(shape, dtype).eval()
    if config.gradient_checkpointing:
        checkpoint_activations(counted)
    memory = rank_memory(
        counted, RankWork(config=config, ranks=ranks, longest_prompt=PROMPT, held_out=0), ds_config, "cpu"
    )
    predicted = {"standing": total(memory.standing)}
    for name, phase in (("sampling", SAMPLING), ("backward", BACKWARD), ("step", STEP)):
        predicted[name] = memory.tensors(phase)
    return peaks | {"predicted": predicted}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([run(case, folder) for case in json.loads(sys.argv[1])]), flush=True)
