"""The benchmarks run, at toy sizes, and count the work that is really fed."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY, run_python
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import vision
from benchmarks.arithmetic import each_alone, padded, prompt_once
from benchmarks.common import groups
from benchmarks.options import OPTIONS
from benchmarks.pool import stored_alone, throughput, written_alone
from benchmarks.real import BFLOAT16, GRPO
from benchmarks.real_tasks import TASKS, backwards_reward, sentence_reward
from benchmarks.results import PAGE, gsm8k_summary, page, read, summary
from demo.__main__ import CONFIG, REAL
from grpo.config.command_line import parse_arguments
from grpo.config.programs import LaunchConfig
from grpo.model.packing import Batcher


def test_the_counted_rows_are_those_that_are_fed():
    work = groups(3, 4, (5, 20), (2, 30), seed=1, vocabulary=50)
    sequences = [(prompt, completion) for prompt, completions in work for completion in completions]
    packed = Batcher(0, packs=True).make(sequences, "cpu")
    counted = prompt_once(work)
    assert counted.rows == packed.input_ids.numel() and counted.head_rows == len(packed.targets)
    seen = sum(keys - new for keys, new in zip(packed.tree.key_lengths, packed.tree.segments, strict=True))
    assert seen > 0
    pairs = 0
    for keys, new in zip(packed.tree.key_lengths, packed.tree.segments, strict=True):
        pairs += sum(keys - new + place + 1 for place in range(new))
    assert counted.pairs == pairs
    assert each_alone(work).rows == sum(len(prompt) + len(rest) - 1 for prompt, rest in sequences)
    widths = [len(prompt) + max(map(len, completions)) for prompt, completions in work]
    assert padded(work).rows == padded(work).head_rows == 4 * sum(widths)


def test_the_counted_multiply_adds_of_a_vision_tower_are_those_that_are_computed(tmp_path):
    """8 x 8 tokens: whole windows."""
    model, processor = vision.build(vision.make_folder(tmp_path))
    [pixels] = processor.inputs([vision.diagram(64)])
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.get_image_features(**pixels)
    assert counter.get_total_flops() == 2 * vision.of_tower(model.config, 64)


def test_every_benchmark_is_imported():
    for file in (REPOSITORY / "benchmarks").glob("*.py"):
        importlib.import_module(f"benchmarks.{file.stem}")


def test_every_group_goes_through_the_pool_that_is_measured():
    for row in (throughput(12, clients=2), stored_alone(12), written_alone(12)):
        assert float(row[1]) > 0


def test_every_option_of_the_options_benchmark_is_accepted(tmp_path):
    given = ["--config", str(REPOSITORY / CONFIG), "--update_folder", str(tmp_path)]
    for words in OPTIONS.values():
        parse_arguments(LaunchConfig, "", [*given, *words.split()]).check_ranks(2)


def test_readme_and_the_results_page_say_the_numbers_that_are_kept():
    readme = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    assert summary(read()["sums"][BFLOAT16]) in readme
    assert gsm8k_summary(read()["qwen"][GRPO]) in readme
    assert PAGE.read_text(encoding="utf-8") == page(read())


def test_the_tasks_of_a_real_model_are_held_out_and_rewarded(tmp_path):
    for name, task in TASKS.items():
        parse_arguments(LaunchConfig, "", ["--config", str(REPOSITORY / REAL.config), *task.options.split()])
        if "--dataset_name" in task.options:
            continue
        task.write_dataset(tmp_path / name, seed=0)
        sides = [(tmp_path / name / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test")]
        prompts = [{json.loads(line)["prompt"][-1]["content"] for line in side} for side in sides]
        assert all(prompts) and not prompts[0] & prompts[1]
    words = "cat, dog, pig"
    assert backwards_reward([words, "Cat dog pig.", "dog, cat, pig", ""], [words] * 4) == [1, 1, 0, 0]
    short, long = "Tea is a hot drink.", f"{'very ' * 10}long tea."
    assert sentence_reward([short, long, f"{short} {short}", "Tea is hot", "Is it?", ""]) == [1, 1, 0, 0, 0, 0]
    assert sentence_reward([f"very {long}"]) == [0]


SMALL = {
    "kernels": "",
    "ref_server": "--layers 1 --groups 4 --repeats 1 --vocabulary 1000",
    "soak": "--minutes 0.1 --first_minutes 0.05 --turns 2 --clients 4 --layers 1 --hidden 64",
    "tools": "--shapes demo --repeats 1 --latencies 0",
}
PRINTED = {
    "kernels": ("| written out | 38 | 101 |", "| fused | 9 | 11 |"),
    "ref_server": ("times as fast", "of the speed of the same calls", "times less", "added by HTTP"),
    "soak": ("| long | 0.1 |", "| none |", "over a fresh one's, 2 turns: "),
    "tools": ("all ways have the same ids and masks", "| 0 ms, sync, tool_timeout=60 |"),
}


@pytest.mark.rare
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(name):
    ended = run_python("-m", f"benchmarks.{name}", *SMALL[name].split(), timeout=500)
    assert ended.returncode == 0, ended.stderr
    assert all(words in ended.stdout for words in PRINTED[name])


@pytest.mark.rare
@pytest.mark.parametrize(
    ("script", "parts"),
    [
        ("gpu.sh", ["packed", "memory", "generate", "ranks", "train"]),
        ("gpu.sh first", ["tests", "demo", "kernels", "shapes"]),
        ("real.sh", ["sums", "fits", "shapes", "gsm8k"]),
    ],
)
def test_a_benchmark_for_cards_goes_through_all_its_parts_without_one(script, parts, tmp_path):
    """Everything that will run on a card runs here too, tiny."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = ENVIRONMENT | {"PYTHON": sys.executable, "PATH": path}
    out = tmp_path / "out.md"
    command = ["bash", *f"benchmarks/{script}".split(), "--tiny", "--out", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("failed", "not measured", "ended with code", "Traceback"):
        assert words not in out.read_text() + done.stderr
    measured = json.loads(out.with_suffix(".json").read_text())
    assert list(measured) == parts
    for name, part in measured.items():
        assert part["card"] == "no GPU" and all(table["rows"] for table in part["tables"]), name
        rows = ["| " + " | ".join(row) + " |" for table in part["tables"] for row in table["rows"]]
        assert rows and all(row in out.read_text() for row in rows)
