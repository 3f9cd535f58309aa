"""The trainer's sampler beside transformers' own ways to sample, and beside its floor, on the same prompts.

    python -m benchmarks.sampling                                        the demo's model after its training, 8 x 8 rows
    python -m benchmarks.sampling --layers 24 --completion 400 --repeats 1      Qwen2.5-0.5B's shape, random weights
    python -m benchmarks.sampling --layers 6 --vocabulary 37984 ...             a quarter of it, four times as fast

Set OMP_NUM_THREADS=1 where other programs run: a thread that waits for another one's share of a product spins, which
counts as CPU time.

Sides, in turn: `continuous` and `generate`, the two values of the setting `sampler`; transformers' generate as its
users call it (do_sample, no log-probs); transformers' continuous batching (`generate_batch`, with log-probs). A model
of random weights ends a completion at each token with a chance of 2 / completion, so that lengths differ.

The floor of a run of `continuous` is what no sampler of one token a row and pass can leave out: the products of the
model's matrices with as many rows as each pass had, and of each row's query with its keys and values, once for the
prompt of a group. The benchmark does them with random numbers, pass by pass.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from transformers import logging as transformers_logging

from benchmarks.common import VOCABULARY, machine, qwen, random_model, ratios, spread, table
from demo.model import prompt_text
from demo.task import problems
from grpo.data.records import Example
from grpo.model.shared_cache import SharedCache
from grpo.model.tree_attention import switch_off, switch_on
from grpo.model.trial import make_batcher
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.generate import LocalSampler

COPIES = 8
OURS, FLOOR = "sampler continuous", "floor"
Pass = tuple[int, int, int, int]
"""rows, prompts in the cache, tokens of the longest prompt, tokens of the longest row"""


class NoText:
    """A tokenizer for random tokens."""

    pad_token_id = 0

    def decode(self, ids, **options) -> str:
        return ""


@dataclass
class Work:
    """Prompts with COPIES completions each. Every way to draw them returns how many tokens they have."""

    model: nn.Module
    tokenizer: object
    prompts: list[list[int]]
    ends: list[int]
    completion: int
    """tokens at most"""
    rows: int
    passes: list[Pass] = field(default_factory=list)
    """of the last call of `continuous`"""

    def __post_init__(self):
        make_batcher(self.model, self.tokenizer.pad_token_id)  # switches packed attention on
        self.settings = GenerationConfig(
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.completion,
            eos_token_id=self.ends,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def ways(self) -> dict[str, Callable[[], int]]:
        return {
            OURS: self.continuous,
            "sampler generate": lambda: self._drawn(self._make(LocalSampler)),
            "transformers' generate": self.generate,
            "transformers' continuous batching": self.batching,
            FLOOR: self.floor,
        }

    def continuous(self) -> int:
        self.passes.clear()
        with noted(self.passes):
            return self._drawn(self._make(ContinuousSampler))

    @torch.inference_mode()
    def generate(self) -> int:
        tokens, each = 0, [prompt for prompt in self.prompts for _ in range(COPIES)]
        for start in range(0, len(each), self.rows):
            part = each[start : start + self.rows]
            width = max(map(len, part))
            padding = [width - len(prompt) for prompt in part]
            ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, part, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
            rows = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=self.settings)
            tokens += sum(map(self._length, rows[:, width:].tolist()))
        return tokens

    def batching(self) -> int:
        each = [prompt for prompt in self.prompts for _ in range(COPIES)]
        cache = ContinuousBatchingConfig(
            return_logprobs=True,
            num_blocks=4 * len(each),
            page_size=max(32, self.completion),
            max_batch_tokens=1024,
            max_requests_per_batch=self.rows,
        )
        switch_off(self.model)
        outputs = self.model.generate_batch(each, self.settings, cache)
        switch_on(self.model, "segments")
        return sum(self._length(output.generated_tokens) for output in outputs.values())

    @torch.inference_mode()
    def floor(self) -> int:
        """Do the products of the last call of `continuous`."""
        config, layers = self.model.config, [linears(layer) for layer in self.model.base_model.layers]
        heads, head = config.num_key_value_heads, self.model.get_output_embeddings().weight
        repeat, width = config.num_attention_heads // heads, config.hidden_size // config.num_attention_heads
        prompts = sum(map(len, self.prompts))
        inputs = {weight.shape[1]: torch.randn(prompts, weight.shape[1]) for weight in [head, *layers[0]]}
        rows, slots, prompt, own = map(max, zip(*self.passes, strict=True))
        of_prompts, of_rows = (torch.randn(n * heads, tokens, width) for n, tokens in ((slots, prompt), (rows, own)))
        for weight in (weight for weights in layers for weight in weights):
            F.linear(inputs[weight.shape[1]], weight)
        for rows, slots, prompt, own in self.passes:
            shared = torch.randn(slots * heads, -(-rows // slots) * repeat, width), of_prompts[: slots * heads, :prompt]
            alone = torch.randn(rows * heads, repeat, width), of_rows[: rows * heads, :own]
            for weights in layers:
                for weight in weights:
                    F.linear(inputs[weight.shape[1]][:rows], weight)
                for queries, cached in (shared, alone):
                    torch.bmm(torch.bmm(queries, cached.transpose(1, 2)), cached)
            F.linear(inputs[head.shape[1]][:rows], head)
        return sum(rows for rows, *_ in self.passes)

    def _make(self, kind: type[LocalSampler]) -> LocalSampler:
        return kind(self.model, self.tokenizer, self.ends, self.completion, rows=self.rows)

    def _drawn(self, sampler: LocalSampler) -> int:
        examples = [
            Example(index=place, prompt="", prompt_ids=prompt, columns={}) for place, prompt in enumerate(self.prompts)
        ]
        groups = sampler.sample(examples, COPIES, 1.0, seed=0)
        return sum(len(rollout.completion_ids) for rollouts in groups for rollout in rollouts)

    def _length(self, ids: list[int]) -> int:
        ends = set(self.ends)
        return next((place for place, token in enumerate(ids, start=1) if token in ends), len(ids))


@contextmanager
def noted(passes: list[Pass]):
    """Note the passes of the decode loop within."""
    step = SharedCache.step

    def step_noted(cache, shape, *state):
        passes.append(shape)
        step(cache, shape, *state)

    SharedCache.step = step_noted
    try:
        yield
    finally:
        SharedCache.step = step


def linears(layer: nn.Module) -> list[torch.Tensor]:
    return [part.weight for part in layer.modules() if isinstance(part, nn.Linear)]


def of_demo(folder: Path, *, prompts: int, completion: int, rows: int) -> Work:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [prompt_text(tokenizer, problem.question) for problem in islice(problems(random.Random(0)), prompts)]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    ends = [tokenizer.eos_token_id]
    return Work(model=model, tokenizer=tokenizer, prompts=ids, ends=ends, completion=completion, rows=rows)


def of_shape(*, layers: int, vocabulary: int, prompts: int, prompt: int, completion: int, rows: int) -> Work:
    model, draw = random_model(qwen(layers, vocabulary)), random.Random(0)
    ends = [*range(vocabulary - 2 * vocabulary // completion, vocabulary)]
    ids = [[draw.randrange(3, vocabulary) for _ in range(prompt)] for _ in range(prompts)]
    return Work(model=model, tokenizer=NoText(), prompts=ids, ends=ends, completion=completion, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/demo/seed0/run/model"), help="that `make demo` left")
    parser.add_argument("--layers", type=int, help="a random model of Qwen2.5-0.5B's shape with so many layers instead")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="of the random model")
    parser.add_argument("--prompts", type=int, default=8, help=f"with {COPIES} completions each")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt of the random model")
    parser.add_argument("--completion", type=int, default=40, help="tokens of a completion at most")
    parser.add_argument("--rows", type=int, default=64, help="completions that are drawn at a time")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--without", nargs="*", default=[], help="words of the names of ways to leave out")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    if arguments.layers:
        work = of_shape(
            layers=arguments.layers,
            vocabulary=arguments.vocabulary,
            prompts=arguments.prompts,
            prompt=arguments.prompt,
            completion=arguments.completion,
            rows=arguments.rows,
        )
    else:
        work = of_demo(arguments.model, prompts=arguments.prompts, completion=arguments.completion, rows=arguments.rows)
    ways = {name: way for name, way in work.ways().items() if not any(word in name for word in arguments.without)}
    microseconds = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        for name, way in ways.items():
            start = time.process_time()
            tokens = way()
            microseconds[name].append(1e6 * (time.process_time() - start) / tokens)
    print(machine())
    rows = [
        [name, spread(values, 0), spread(ratios(values, microseconds[OURS]))] for name, values in microseconds.items()
    ]
    print(table(["way", "CPU microseconds a token", f"times {OURS}'s"], rows))


if __name__ == "__main__":
    main()
