"""A training step of `make demo-agent` beside TRL's environment_factory: `python -m benchmarks.agents --part step`.

Ours is `grpo launch` with two ranks and the server, whose agent is demo/shop_agent.py. TRL's GRPOTrainer has an
environment with the same two tools as methods, and a reward function that compares as the agent does; it runs as
demo_step.py runs it, with its own reference model, in two processes (`--processes 1 2`: and in one). A third side is
`make demo-tools`: our trainer itself calls the tools, as TRL does, and the same model learns the same. Seconds are
those of demo_step.py, too.

Both sides first play held-out problems greedily with the model before training, and must come to the same ids, the same
mask of what was drawn, and the same rewards. What differs then:

- TRL's max_completion_length holds for all turns and the tools' answers, ours for a turn: TRL gets that of two turns,
  which no completion of the check comes near to.
- TRL draws turn by turn, all completions together, by transformers' generate, and calls tools in its process; our
  programs are processes, and ask by a client.
- TRL reads calls by its response template of Qwen2.5, ours by the chat template's form.
- What a call without an argument is answered is worded otherwise.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import trl_side
from benchmarks.demo_step import OURS, PROCESSES, WITH_TOOLS, Run, measure, of_metrics, report
from demo import shop
from demo.__main__ import AGENT, TOOLS, Demo, places, prepare, train
from demo.shop_agent import look_up
from grpo.agents.episodes import AgentSampler, start_turns
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import load_examples
from grpo.data.records import Rollout
from grpo.model.load import eos_token_ids, load_model, load_tokenizer
from grpo.model.trial import make_batcher

MODULE = "benchmarks.agents"  # what TRL's processes run
PLAYED = 64  # held-out problems of the check
GREEDY = 1e-6  # TRL's temperature there


class Shop:
    """The environment of TRL's side."""

    def reset(self, **columns) -> None:
        pass

    def price(self, item: str, shop: int) -> str:
        return _answer("price", item, shop)

    def stock(self, item: str, shop: int) -> str:
        return _answer("stock", item, shop)


Shop.price.__doc__, Shop.stock.__doc__ = shop.price.__doc__, shop.stock.__doc__


def _answer(name: str, item: str, shop: int) -> str:
    return look_up(SimpleNamespace(name=name, arguments=json.dumps({"item": item, "shop": shop})))


def answer_reward(completions: list[list[dict]], answer: list[str], **_) -> list[float]:
    last = [messages[-1] for messages in completions]
    right = [f"<answer>{each}</answer>" for each in answer]
    pairs = zip(last, right, strict=True)
    return [float(not each.get("tool_calls") and (each["content"] or "").strip() == text) for each, text in pairs]


def settings(folder: Path, seed: int, steps: int = 60) -> TrainerConfig:
    return trl_side.settings(AGENT, folder, seed, "--max_steps", str(steps))


@contextmanager
def playing(
    config: TrainerConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[AgentSampler]:
    """The sampler of a run with an agent."""
    ends, rows = eos_token_ids(model, tokenizer), config.sequences_per_generate
    agent = start_turns(config, tokenizer, ends)
    agent.start()
    make_batcher(model, tokenizer.pad_token_id)  # switches packed attention on
    try:
        yield AgentSampler(model, tokenizer, ends, config.max_completion_length, rows=rows, turns=agent)
    finally:
        agent.close()


def run_ours(folder: Path, seed: int, steps: int, demo: Demo = AGENT) -> Run:
    train(folder, seed, "--eval_steps", "0", "--max_steps", str(steps), demo=demo)
    seconds, tokens = of_metrics(folder, settings(folder, seed))
    return Run(seconds, tokens, accuracy(folder, seed, folder / "run/model"))


def run_tools(folder: Path, seed: int, steps: int) -> Run:
    inner = folder / "tools"
    inner.mkdir(exist_ok=True)
    for name in ("model", "data"):
        if not (inner / name).exists():
            (inner / name).symlink_to((folder / name).absolute())
    return run_ours(inner, seed, steps, TOOLS)


def run_theirs(folder: Path, seed: int, steps: int, processes: int) -> Run:
    output = folder / f"trl-{processes}"
    words = ["--worker", folder, output, "--seeds", seed, "--steps", steps]
    measured = trl_side.start(MODULE, output, processes, words)
    return Run(measured["seconds"], measured["tokens"], accuracy(folder, seed, output / "model"))


def worker(folder: Path, output: Path, seed: int, steps: int, split: str) -> None:
    """Do one process's part of TRL's side: train, or with the test split only play."""
    from trl.chat_template_utils import qwen3_template  # that of Qwen2.5, too

    config, plays = settings(folder, seed, steps), split == "test"
    config.max_completion_length *= 2
    if plays:
        config.temperature = GREEDY
    tokenizer = load_tokenizer(config)
    tokenizer.response_template = qwen3_template
    lines = (folder / f"data/{split}.jsonl").read_text().splitlines()
    rows = [{"prompt": [{"role": "user", "content": row["question"]}], **row} for row in map(json.loads, lines)]
    trl_side.train(
        config,
        [answer_reward],
        output,
        tokenizer=tokenizer,
        rows=rows,
        environment_factory=Shop,
        before=partial(play_theirs, rows[:PLAYED], output) if plays else None,
        max_tool_calling_iterations=2,
    )


def play_theirs(rows: list[dict], output: Path, trainer) -> None:
    """Write what TRL's loop comes to, and exit."""
    rewards: list[float] = []
    trainer.reward_funcs[0] = lambda **given: rewards.extend(answer_reward(**given)) or rewards
    trainer.model.train()
    made = trainer._generate_and_score_completions(rows)
    played = []
    for row, reward in enumerate(rewards):
        whole = made["completion_mask"][row].bool()
        ids, drawn = (made[name][row][whole].tolist() for name in ("completion_ids", "tool_mask"))
        prompt = made["prompt_ids"][row][made["prompt_mask"][row].bool()].tolist()
        played.append([prompt, ids, [*map(bool, drawn)], reward])
    (output / "measured.json").write_text(json.dumps(played))
    sys.exit()


def play_ours(folder: Path, seed: int, model_folder: Path, limit: int) -> list[Rollout]:
    """Play held-out problems greedily."""
    config = settings(folder, seed)
    config.model_name_or_path = str(model_folder)
    tokenizer, model = load_tokenizer(config), load_model(config, torch.device("cpu"))
    with playing(config, model, tokenizer) as sampler:
        examples = load_examples(config, config.dataset_test_split, tokenizer, limit, progress=False)
        return sampler.greedy(examples)


def accuracy(folder: Path, seed: int, model_folder: Path) -> float:
    played = play_ours(folder, seed, model_folder, settings(folder, seed).eval_samples)
    return statistics.mean(rollout.outcome.rewards["passed"] for rollout in played)


def check_sides(folder: Path, seed: int) -> None:
    """Exit where the sides play differently."""
    output = folder / "trl-check"
    theirs = trl_side.start(MODULE, output, 1, ["--worker", folder, output, "--seeds", seed, "--split", "test"])
    ours = []
    for rollout in play_ours(folder, seed, folder / "model", PLAYED):
        [branch] = rollout.branches
        ours.append([branch.prompt_ids, branch.completion_ids, branch.drawn, rollout.outcome.rewards["passed"]])
    if ours != theirs:
        alike = sum(one == other for one, other in zip(ours, theirs, strict=True))
        sys.exit(f"the sides play {len(ours) - alike} of {len(ours)} problems differently")
    print(f"both sides play {len(ours)} problems alike", file=sys.stderr)


def part_step(root: Path, seeds: list[int], steps: int, processes: list[int]) -> None:
    os.environ |= places()
    folders = {seed: root / f"seed{seed}" for seed in seeds}
    with redirect_stdout(sys.stderr):
        for seed, folder in folders.items():
            prepare(folder, seed, AGENT)
        check_sides(folders[seeds[0]], seeds[0])
        sides: dict[str, Callable[[Path, int], Run]] = {
            OURS: partial(run_ours, steps=steps),
            WITH_TOOLS: partial(run_tools, steps=steps),
        }
        for side, count in PROCESSES.items():
            if count in processes:
                sides[side] = partial(run_theirs, steps=steps, processes=count)
        runs, before = measure(root, seeds, sides, accuracy)
    config = settings(folders[seeds[0]], seeds[0])
    report(runs, before, config.prompts_per_step * config.num_generations)
