"""What a single CUDA card does: scoring, update, attention, generation, and GRPO steps at simple_GRPO's settings.

    bash benchmarks/gpu.sh                      # every part with a time limit each, under 8 minutes together
    bash benchmarks/gpu.sh --tiny               # tiny shapes, without a GPU too: tries the script out
    python -m benchmarks.gpu --part generate    # one part

Random weights in the shapes of Qwen2.5-1.5B and 3B, bf16. Every time is taken between two synchronisations, after a
warm-up that is not counted. A part that runs out of time says what it left out.

passes      log-probs alone, and with the GRPO loss and its backward pass under activation checkpointing: tokens a
            second, share of the card's peak, memory. Packed batches, each prompt once, against padded ones.
attention   the ways of grpo/attention.py on one packed batch, after their log-probs were held against a padded batch's.
generate    tokens a second of transformers' generate by cache and attention.
train       ref_server.py and grpo_ref_split.py together on the card: simple_GRPO's 60 steps, its published time beside.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen2Config

from benchmarks.arithmetic import Work, each_alone, prompt_once
from benchmarks.common import REPOSITORY, Group, groups, qwen, random_model, spread
from demo.__main__ import free_port, wait_ready
from demo.model import build_tokenizer
from demo.task import problems
from grpo.attention import VARIANTS, switch_on, variants_for
from grpo.batch import Batcher
from grpo.logprobs import token_logprobs
from grpo.loss import StepSize, Tokens, grpo_loss
from grpo.loss_config import LossSection
from grpo.model import checkpoint_activations, make_batcher

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PAD = 0
BUDGET = 16384  # tokens of a batch, the default of server and trainer
SHAPES = {
    "Qwen2.5-1.5B": dict(layers=28, hidden_size=1536, intermediate_size=8960, num_attention_heads=12),
    "Qwen2.5-3B": dict(layers=36, hidden_size=2048, intermediate_size=11008, num_attention_heads=16),
}
TINY = dict(layers=2, hidden_size=64, intermediate_size=192, num_attention_heads=4, vocabulary=1024)
# Dense bf16 TFLOP/s by what the card's name contains, the first that fits; the makers' data sheets.
PEAKS = {
    "H200 NVL": 835,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "4090": 165,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["passes", "attention", "generate", "train"], required=True)
    parser.add_argument("--seconds", type=float, default=300.0, help="begin nothing new after so many")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in float32, for trying the script out")
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    if not CUDA:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns in the middle of a table
    if not (CUDA or options.tiny):
        sys.exit("benchmarks.gpu: needs CUDA; --tiny does without")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part that is ended ends its servers
    clock = Clock(options.seconds)
    print(f"\n## {options.part}\n\n{where()}\n", flush=True)
    {"passes": passes, "attention": attention, "generate": generate, "train": train}[options.part](options.tiny, clock)


# Parts


def passes(tiny: bool, clock: Clock) -> None:
    head(
        "shape",
        "pass",
        "batches",
        "completion tokens/s",
        "TFLOP/s needed",
        "of the card's peak",
        "peak above weights, GiB",
    )
    for shape in SHAPES:
        if not clock.over(shape):
            passes_of(shape, tiny, clock)


def passes_of(shape: str, tiny: bool, clock: Clock) -> None:
    model = build(shape, tiny)
    work = workload(tiny, model.config)
    sequences = sequences_of(work)
    kinds = {
        "packed, prompts once": (make_batcher(model, PAD), prompt_once(work)),
        "padded": (Batcher(PAD, longest_packed=0), each_alone(work)),
    }
    for kind, (batcher, needed) in kinds.items():
        scoring = partial(score, model, batcher, sequences)
        measure_pass(shape, "log-probs", kind, scoring, model, needed, clock)
    checkpoint_activations(model)
    for kind, (batcher, needed) in kinds.items():
        updating = partial(update, model, batcher, sequences)
        measure_pass(shape, "log-probs, loss, backward", kind, updating, model, needed, clock, backward=True)
    free(model)


def measure_pass(
    shape: str,
    name: str,
    kind: str,
    work: Callable[[], object],
    model: PreTrainedModel,
    needed: Work,
    clock: Clock,
    backward: bool = False,
) -> None:
    if clock.over(f"{shape}, {name}, {kind}"):
        return
    peak = peak_of(work)  # the warm-up
    times = clock.times(work)
    # A multiply-add is two operations; the backward pass does each product twice. What checkpointing computes again is
    # not counted as needed.
    operations = 2 * sum(needed.multiply_adds(model.config).values()) * (3 if backward else 1)
    speeds = [operations / 1e12 / one for one in times]
    share = f"{100 * statistics.median(speeds) / card_peak():.0f} %" if card_peak() else "unknown"
    row(
        shape,
        name,
        kind,
        spread([needed.head_rows / one for one in times], 0),
        spread(speeds, 1),
        share,
        f"{peak / 2**30:.2f}" if CUDA else "needs CUDA",
    )


def attention(tiny: bool, clock: Clock) -> None:
    shape = next(iter(SHAPES))
    model = build(shape, tiny)
    checkpoint_activations(model)
    sequences = sequences_of(workload(tiny, model.config))
    packed, padded = Batcher(PAD, longest_packed=BUDGET), Batcher(PAD, longest_packed=0)
    sequences = [sequences[row] for row in packed.cut(sequences, BUDGET)[0]]
    wanted = logprobs_at_once(model, padded, sequences)
    print(f"{shape}, {len(sequences)} completions in one packed batch of {packed_tokens(packed, sequences)} tokens.\n")
    head(
        "attention", "log-probs against padded: mean, largest difference", "log-probs, ms", "with loss and backward, ms"
    )
    # 16 bit: another order of the same sums moves a log-prob by some thousandths.
    allowed = 1e-4 if tiny else 0.02
    for name in ("padded, transformers' own", *VARIANTS):
        if clock.over(name):
            return
        if name in VARIANTS and name not in variants_for(model):
            row(name, "needs CUDA", "", "")
            continue
        batcher = padded
        if name in VARIANTS:
            switch_on(model, name)
            batcher = packed
        try:
            difference = (logprobs_at_once(model, batcher, sequences) - wanted).abs()
            said = f"{difference.mean():.1e}, {difference.max():.1e}"
            if difference.mean() > allowed:
                row(name, said, "not timed: they differ", "")
                continue
            times = []
            for work, mode in ((score, model.eval), (update, model.train)):
                mode()
                work(model, batcher, sequences)  # the warm-up
                times.append([1000 * one for one in clock.times(partial(work, model, batcher, sequences))])
            row(name, said, *(spread(milliseconds, 1) for milliseconds in times))
        # One that this card or this torch cannot run says so, and the others are still measured.
        except (RuntimeError, NotImplementedError, ImportError) as error:
            row(name, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}", "", "")
    free(model)


def generate(tiny: bool, clock: Clock) -> None:
    """The compiled ones last: compiling takes long, and nothing is lost when time runs out there."""
    rows, prompt, new = (4, 8, 8) if tiny else (64, 150, 128)
    flash = importlib.util.find_spec("flash_attn") is not None
    print(f"{rows} rows, prompts of {prompt} tokens, {new} new tokens each, sampled, no end token.\n")
    head("shape", "cache", "attention", "new tokens/s", "ms a token")
    for shape in SHAPES:
        if clock.over(shape):
            return
        model = build(shape, tiny)
        input_ids = torch.randint(3, model.config.vocab_size, (rows, prompt), device=DEVICE)
        for cache in ("dynamic", "static"):
            for name in ("sdpa", "eager", "flash_attention_2"):
                if name == "flash_attention_2" and (cache == "static" or not (CUDA and flash)):
                    if cache == "dynamic":
                        row(shape, cache, name, "needs CUDA" if not CUDA else "not installed", "")
                    continue
                if clock.over(f"{shape}, {cache}, {name}"):
                    continue
                model.set_attn_implementation(name)
                settings = GenerationConfig(
                    do_sample=True, top_k=0, max_new_tokens=new, pad_token_id=PAD, cache_implementation=cache
                )
                # Anything unset would come from the model's own settings, its end token too.
                model.generation_config = settings
                mask = torch.ones_like(input_ids)
                draw = partial(model.generate, input_ids=input_ids, attention_mask=mask, generation_config=settings)
                # Of the same lengths as what is timed: a static cache is compiled for its size.
                assert draw().shape[1] == prompt + new
                times = clock.times(draw, most=2)
                row(
                    shape,
                    cache,
                    name,
                    spread([rows * new / one for one in times], 0),
                    f"{1000 * statistics.median(times) / new:.1f}",
                )
        free(model)


def train(tiny: bool, clock: Clock) -> None:
    missing = [name for name in ("deepspeed", "bottle", "waitress", "datasets") if not importlib.util.find_spec(name)]
    if missing:
        print(f"not measured: {' and '.join(missing)} must be installed")
        return
    # Weights, gradients, fp32 masters and Adam's moments are 20 bytes a parameter, and the reference 2 more.
    large = CUDA and torch.cuda.get_device_properties(0).total_memory > 76 * 2**30
    shape = "Qwen2.5-3B" if large or tiny else "Qwen2.5-1.5B"
    steps, new = (4, 8) if tiny else (60, 400)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer = build_tokenizer(seed=0)
        model = build(shape, tiny)
        model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=PAD)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        free(model)
        del model
        write_prompts(folder / "train.jsonl", tokenizer, (20, 40) if tiny else (100, 200))
        finished = run_both(folder, steps, new, clock)
    if len(finished) < 2:
        print("not measured: fewer than 2 steps were done in time; what the trainer said last is above")
        return
    measured = finished[1:]  # the first warms up
    head("phase", "seconds a step")
    for phase in ("time/generate", "time/reward", "time/wait_ref", "time/update", "step_time"):
        row(phase, spread([one[phase] for one in measured if phase in one]))
    step = statistics.mean(one["step_time"] for one in measured)
    length = statistics.mean(one["completions/mean_length"] for one in measured)
    print()
    head("", "model", "cards", f"{steps} steps", "what a step is")
    row(
        "ours",
        f"{shape}, random weights" + (" (tiny)" if tiny else ""),
        "1, the reference on it too",
        f"{steps * step / 60:.1f} min" + ("" if len(finished) == steps else f" (from {len(measured)} measured steps)"),
        f"8 completions of {length:.0f} tokens drawn, scored, one optimizer update",
    )
    row(
        "simple_GRPO, its README",
        "Qwen2.5-3B, trained weights",
        "2 A800 80 GB",
        "12 min 34 s",
        "8 completions scored and a backward pass; an update every 2 (grpo_ref_split.py) or 4 (grpo_vllm_one.py) steps",
    )
    print(
        "\nWhat differs: simple_GRPO's reference has a card of its own. Its samples come from weights up to 10 steps "
        "old (from vLLM: older), may have 512 (700) tokens and end when the model ends them; random weights go on to "
        "the limit. It throws away groups with equal rewards unscored. Its optimizer is offloaded to the CPU. It does "
        "not say which of its two scripts gave the time."
    )


def run_both(folder: Path, steps: int, new: int, clock: Clock) -> list[dict]:
    """The metrics of the steps that the real programs finish in time."""
    port = free_port()
    shared = ["--model_name_or_path", str(folder / "model"), "--port", str(port)]
    trainer_options = {
        "dataset_name": folder / "train.jsonl",
        "output_dir": folder / "run",
        "system_prompt": "",
        "num_generations": 8,
        "prompts_per_step": 1,
        "sequences_per_generate": 8,
        "max_completion_length": new,
        "temperature": 0.9,
        "beta": 0.04,
        "learning_rate": 1e-6,
        "max_steps": steps,
        "eval_steps": 0,
        "save_steps": 0,
        "report_to": "none",
    }
    pairs = [word for name, value in trainer_options.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    log = folder / "server.log"
    with open(log, "w") as output:
        server = subprocess.Popen(
            [sys.executable, "ref_server.py", *shared], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    trainer = None
    try:
        wait_ready(f"http://127.0.0.1:{port}", server, log)
        with open(folder / "trainer.log", "w") as output:
            trainer = subprocess.Popen(
                [sys.executable, "grpo_ref_split.py", *shared, *pairs],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        metrics = folder / "run/metrics.jsonl"
        while trainer.poll() is None and clock.left() > 0 and count_lines(metrics) < steps:
            time.sleep(0.5)
        if trainer.poll() not in (None, 0) or count_lines(metrics) < 2:
            print("\n".join((folder / "trainer.log").read_text().splitlines()[-30:]), file=sys.stderr)
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    finally:
        for process in (trainer, server):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


# Work


def score(model: PreTrainedModel, batcher: Batcher, sequences: list) -> list[torch.Tensor]:
    """Log-probs batch by batch, in the order of the sequences where all fit one batch."""
    with torch.inference_mode():
        return [
            token_logprobs(model, batcher.make([sequences[row] for row in rows], DEVICE), 1.0)[0]
            for rows in batcher.cut(sequences, BUDGET)
        ]


@torch.inference_mode()
def logprobs_at_once(model: PreTrainedModel, batcher: Batcher, sequences: list) -> torch.Tensor:
    return token_logprobs(model, batcher.make(sequences, DEVICE), 1.0)[0]


def packed_tokens(packed: Batcher, sequences: list) -> int:
    return packed.make(sequences, "cpu").input_ids.numel()


def sequences_of(work: list[Group]) -> list[tuple[list[int], list[int]]]:
    return [(prompt, completion) for prompt, completions in work for completion in completions]


def update(model: PreTrainedModel, batcher: Batcher, sequences: list) -> None:
    """As in the trainer, without ranks; the gradients are dropped."""
    size = StepSize(len(sequences), sum(len(completion) for _, completion in sequences))
    for rows in batcher.cut(sequences, BUDGET):
        chosen = [sequences[row] for row in rows]
        lengths = torch.tensor([len(completion) for _, completion in chosen], device=DEVICE)
        batch = batcher.make(chosen, DEVICE)
        logprobs, entropy = token_logprobs(model, batch, 1.0, with_entropy=True)
        advantages = torch.tensor([1.0 if row % 2 else -1.0 for row in rows], device=DEVICE)
        tokens = Tokens(lengths, advantages, logprobs, entropy, ref_logprobs=logprobs.detach() - 0.1)
        loss, _ = grpo_loss(tokens, size, LossSection(), beta=0.04, entropy_coef=0.0, max_completion_length=512)
        loss.backward()
    model.zero_grad(set_to_none=True)


def build(shape: str, tiny: bool) -> PreTrainedModel:
    return random_model(qwen(**(TINY if tiny else SHAPES[shape])), torch.float32 if tiny else torch.bfloat16, DEVICE)


def workload(tiny: bool, config: Qwen2Config) -> list[Group]:
    count, prompts, completions = (2, (8, 16), (4, 24)) if tiny else (16, (100, 200), (50, 400))
    return groups(count, 8, prompts, completions, seed=0, vocabulary=config.vocab_size)


def write_prompts(path: Path, tokenizer, lengths: tuple[int, int]) -> None:
    """Made-up problems, some to a prompt, of about as many tokens as GSM8K's with their system prompt have."""
    stories = problems(random.Random(0))
    draw = random.Random(1)
    with open(path, "w") as file:
        for _ in range(200):
            wanted, text = draw.randint(*lengths), ""
            while len(tokenizer(text)["input_ids"]) < wanted:
                text += next(stories).question + " "
            file.write(json.dumps({"question": text, "answer": "1"}) + "\n")


def count_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


# Time, memory, tables


class Clock:
    """What is left of a part's time."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds
        self._said = False

    def left(self) -> float:
        return self._end - time.monotonic()

    def over(self, next_thing: str) -> bool:
        """Says so, once, if there is no time left to begin it."""
        if self.left() > 0:
            return False
        if not self._said:
            print(f"\nNot measured, the part's time is over: {next_thing}, and what comes after it.", flush=True)
        self._said = True
        return True

    def times(self, work: Callable[[], object], most: int = 5) -> list[float]:
        """Seconds of up to `most` runs, at least one, as long as they take no more than 10 s together."""
        times: list[float] = []
        while not times or (len(times) < most and sum(times) + times[-1] < 10 and self.left() > 0):
            synchronize()
            start = time.perf_counter()
            work()
            synchronize()
            times.append(time.perf_counter() - start)
        return times


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def peak_of(work: Callable[[], object]) -> int:
    """Bytes above what was allocated before."""
    if not CUDA:
        work()
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def free(model: PreTrainedModel) -> None:
    model.to("meta")  # whoever else still holds the model holds no memory with it
    if CUDA:
        torch.cuda.empty_cache()


def card_peak() -> float | None:
    name = torch.cuda.get_device_name() if CUDA else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def where() -> str:
    name = torch.cuda.get_device_name() if CUDA else "no GPU"
    peak = f"{card_peak()} TFLOP/s dense bf16" if card_peak() else "peak unknown"
    return f"{name} ({peak}), torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"


def head(*names: str) -> None:
    row(*names)
    print("|" + "---|" * len(names), flush=True)


def row(*cells: object) -> None:
    """Row by row: a part that is stopped leaves what it has measured."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
