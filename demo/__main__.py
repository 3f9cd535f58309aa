"""The demo: build a model, serve it as the reference, train it with GRPO, show what it learned.

    python -m demo               everything; exit code 0 only if the model learned
    python -m demo --pool        the same, but three workers draw while the trainer learns; one is killed
    python -m demo --vision      the same with pictures: a tiny model that can count shapes learns to look
    python -m demo --tools       the same with tools: a tiny model that mostly guesses learns to look things up
    python -m demo --agent       the same with a program of the OpenAI API, which has these tools itself
    python -m demo --real        the same with a model that others made: SmolLM2-135M-Instruct learns to add
    python -m demo --prepare     only the model and the data that configs/demo_cpu.yaml names, or another demo's file

It runs what a user would run, on two CPU cores: `grpo launch`, which starts the server and two trainer
processes. The model and the data are kept for the next time; the training starts anew. With GPU=1 in the environment
it runs on a CUDA card, server and one trainer process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from grpo.config.console import free_port
from grpo.config.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = "configs/demo_cpu.yaml"
KILLED_AFTER = 20  # steps, with --pool
SHOWN, WIDTH = 5, 58  # printed problems; characters of a column of completions
PICTURE = re.compile(r"<\|vision_start\|>.*<\|vision_end\|>")

# One thread for what builds the model (two with pictures), and each for two ranks and the server: more wait for each
# other on a loaded machine. On the CPU even where the machine has a GPU, unless GPU=1 asks for that.
ON_CARD = os.environ.get("GPU") == "1"
CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1"} | ({} if ON_CARD else CPU)
RANKS = 1 if ON_CARD else 2


@dataclass(frozen=True)
class Demo:
    """A demo: its places, the modules of its model and its data, and the held-out accuracy that it promises."""

    model: str  # what `builder` builds
    builder: str
    task: str
    before: tuple[float, float]
    after: float = 0.0
    rise: float = 0.0
    folder: str = "runs/demo"
    config: str = CONFIG
    shares_model: bool = False  # the model is the same for each seed
    width: int = 0  # of the layers of a model that is large enough for the faster dtype; the others stay in float32

    def model_folder(self, folder: Path) -> Path:
        return Path(self.folder if self.shares_model else folder) / "model"


def demo_of(kind: str, model: str, before: tuple[float, float], **others: object) -> Demo:
    """Return a demo whose modules, folder and settings are named by its kind, unless `others` name them."""
    modules = dict.fromkeys(("builder", "task"), f"demo.{kind}")
    places = {"folder": f"runs/demo-{kind}", "config": f"configs/demo_{kind}.yaml"}
    return Demo(model=model, before=before, **modules | places | others)


TEXT = Demo("a tiny model that can think but seldom does", "demo.model", "demo.task", (0.10, 0.40), after=0.90)
VISION = demo_of(
    "vision", "a tiny model that can look but mostly guesses", (0.20, 0.50), after=0.85, task="demo.pictures"
)
TOOLS = demo_of("tools", "a tiny model that can look up but mostly guesses", (0.10, 0.40), after=0.90)
AGENT = demo_of("agent", TOOLS.model, TOOLS.before, after=TOOLS.after, builder="demo.tools", task="demo.tools")
REAL = demo_of("real", "the folder of SmolLM2-135M-Instruct", (0.0, 0.30), rise=0.30, shares_model=True, width=576)
KINDS = {"vision": VISION, "tools": TOOLS, "agent": AGENT, "real": REAL}


class DemoError(RuntimeError):
    """A demo that broke its promise."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data and the training (default: 0)")
    parser.add_argument("--folder", type=Path, help="folder of model, data and run (default: runs/demo/seedN)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--vision", action="store_true", help="let a model count shapes in pictures")
    kinds.add_argument("--tools", action="store_true", help="let a model look up what only tools know")
    kinds.add_argument("--agent", action="store_true", help="let a program of the OpenAI API ask the model")
    kinds.add_argument("--real", action="store_true", help="let SmolLM2-135M-Instruct learn to add")
    kinds.add_argument("--pool", action="store_true", help="let three workers draw, and kill one on the way")
    parser.add_argument("--prepare", action="store_true", help="build model and data only")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the `finally` blocks end the child processes
    sys.stdout.reconfigure(line_buffering=True)  # in order with the output of the programs
    demo = next((KINDS[kind] for kind in KINDS if getattr(arguments, kind)), TEXT)
    folder = arguments.folder.absolute() if arguments.folder else Path(f"{demo.folder}/seed{arguments.seed}")
    os.chdir(REPOSITORY)
    os.environ |= ENVIRONMENT  # before `prepare` imports torch
    start = time.monotonic()
    try:
        check_place()
        prepare(folder, arguments.seed, demo)
        built = time.monotonic()
        if arguments.prepare:
            print(f"model and data are in {folder}")
            return 0
        if arguments.pool:
            train_with_workers(folder, arguments.seed)
        else:
            train(folder, arguments.seed, demo=demo)
        report(demo, folder, built - start, time.monotonic() - built)
    except DemoError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; run it again to start the training anew", file=sys.stderr)
        return 130
    return 0


def check_place() -> None:
    """Raise DemoError if a card is asked for and there is none."""
    if not ON_CARD:
        return
    from torch.cuda import is_available

    if not is_available():
        raise DemoError("GPU=1: torch finds no CUDA card: leave GPU=1 out, or install torch for CUDA")


def prepare(folder: Path, seed: int, demo: Demo = TEXT) -> None:
    """Build the model, unless it is there, and the data. Raises DemoError."""
    from grpo.run.folder import SaveError

    folder.mkdir(parents=True, exist_ok=True)
    model_folder = demo.model_folder(folder)
    is_built = model_folder.exists()
    print(f"using the model that is in {model_folder}" if is_built else f"building {demo.model}")
    if not is_built:
        try:
            import_module(demo.builder).build(model_folder, seed)
        except (ConfigError, SaveError) as error:
            raise DemoError(str(error)) from error
    import_module(demo.task).write_dataset(folder / "data", seed)


def train(
    folder: Path,
    seed: int,
    *options: str,
    meanwhile: Callable[[], None] = lambda: None,
    demo: Demo = TEXT,
    name: str = "run",
) -> None:
    """Run `grpo launch` with more options to its end, in the folder of this name; call `meanwhile` a few times a
    second. Raises DemoError."""
    shutil.rmtree(folder / name, ignore_errors=True)
    words = ["--nproc_per_node", RANKS, "--config", demo.config, "--seed", seed, "--port", free_port()]
    words += ["--model_name_or_path", demo.model_folder(folder), "--dataset_name", folder / "data"]
    words += dtype_words(demo.width) if demo.width else []
    words += ["--output_dir", folder / name, *options]
    run = subprocess.Popen([sys.executable, "-m", "grpo.launch", *map(str, words)], env=ENVIRONMENT)
    try:
        while run.poll() is None:
            meanwhile()
            time.sleep(0.2)
        if run.returncode != 0:
            raise DemoError(f"the training ended with code {run.returncode}; its messages are above")
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait()


def dtype_words(width: int) -> list[str]:
    """Return the option for bfloat16 if this CPU multiplies matrices of such a width faster in it, else for float32; on
    a card none: a model keeps its own."""
    if ON_CARD:
        return []
    import torch

    from grpo.model.load import product_seconds

    return ["--dtype", min(("bfloat16", "float32"), key=lambda dtype: product_seconds(width, getattr(torch, dtype)))]


def train_with_workers(folder: Path, seed: int) -> None:
    """Do as `train`, with completions of three workers, which draw a round while the one before is trained on."""
    with workers(folder, 3) as (url, processes):
        last = processes[-1]

        def kill_one() -> None:
            if last.poll() is None and count_steps(folder) >= KILLED_AFTER:
                last.kill()
                last.wait()
                print(f"worker-3 is killed after step {KILLED_AFTER}: the others draw what it was drawing")

        print(f"a pool and three workers run: {url}/ is its page, {folder}/pool.log and worker-N.log are their logs")
        train(folder, seed, "--sampler", "pool", "--pool", url, "--max_policy_lag", "1", meanwhile=kill_one)


@contextmanager
def workers(folder: Path, count: int, *options: str) -> Iterator[tuple[str, list[subprocess.Popen]]]:
    """Run a new pool and so many workers with these options that draw for it; give its address and the workers."""
    url, pool_file = f"http://127.0.0.1:{free_port()}", folder / "pool.sqlite"
    for old in folder.glob(f"{pool_file.name}*"):
        old.unlink()
    commands = {"pool": ["ref_server.py", "--task", "rollouts", "--pool_file", pool_file, "--port", url.split(":")[2]]}
    for number in range(1, count + 1):
        name = f"worker-{number}"
        commands[name] = ["generate.py", "--engine", "transformers", "--pool", url, "--name", name, *options]
    processes = []
    try:
        for name, words in commands.items():
            processes.append(start(words, folder / f"{name}.log"))
        yield url, processes[1:]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def places() -> dict[str, str]:
    """Return what a benchmark of a demo needs in its own environment: where it computes, no hub; not the threads."""
    return {name: ENVIRONMENT[name] for name in ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE") if name in ENVIRONMENT}


def start(words: list[object], log: Path, environment: dict[str, str] = ENVIRONMENT) -> subprocess.Popen:
    with open(log, "w", encoding="utf-8") as output:
        command = [sys.executable, *map(str, words)]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def count_steps(folder: Path) -> int:
    path = folder / "run/metrics.jsonl"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0  # the first line is the evaluation before


def report(demo: Demo, folder: Path, building: float, training: float) -> None:
    """Print completions and times. Raises DemoError where the promise was not kept."""
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    before, after = rows[0], rows[-1]
    pairs = pair_completions(folder, after["step"])
    print_completions(pairs[:SHOWN])
    if demo is TOOLS:
        calls = [f"{row['eval_rewards/right_call_reward/mean']:.3f}" for row in (before, after)]
        print(f"\nshare of held-out problems with the right call: {' -> '.join(calls)}")
    seconds = f"{building:.0f} for model and data, {training:.0f} for GRPO with server, start-up and evaluation"
    print(f"\nSeconds: {seconds}.")
    print(f"learning curves: {folder / 'run/curves.png'}")
    if demo is VISION:
        from demo.pictures import draw_gallery

        problems = [(question_of(old), old, new) for old, new in pairs]
        draw_gallery(folder / "run/pictures.png", folder / "run/pictures", problems)
        print(f"pictures with answers before and after: {folder / 'run/pictures.png'}")
    if demo is REAL:
        report_english(demo, folder)
    rise, error = rise_of(before, after)
    print(f"\nheld-out accuracy rose by {100 * rise:.1f} ± {100 * error:.1f} points (95 % interval)")
    low, high = demo.before
    is_kept = after["eval_accuracy"] >= demo.after and rise >= demo.rise and rise > error
    if not (low <= before["eval_accuracy"] <= high and is_kept):
        raise DemoError(
            f"held-out accuracy went from {before['eval_accuracy']:.3f} to {after['eval_accuracy']:.3f}: it should "
            f"begin between {low} and {high} and reach {demo.after}, and rise by at least {demo.rise}"
        )


def rise_of(before: dict, after: dict) -> tuple[float, float]:
    """Return by how much the accuracy rose, and half of the 95 % interval of two independent shares."""
    error = math.hypot(before["eval_accuracy_se"], after["eval_accuracy_se"])
    return after["eval_accuracy"] - before["eval_accuracy"], 1.96 * error


def report_english(demo: Demo, folder: Path) -> None:
    """Print some general answers before and after, write all to english.md, and print how far the model went."""
    from demo.english import QUESTIONS, compare

    answers, kl = compare(demo.model_folder(folder), folder / "run/model")
    texts = [[" ".join(answer.split()) for answer in pair] for pair in answers]
    rows = [f"| {question} | {old} | {new} |" for question, (old, new) in zip(QUESTIONS, texts, strict=True)]
    path = folder / "run/english.md"
    path.write_text("\n".join(["| asked | before | after |", "|---|---|---|", *rows, ""]), encoding="utf-8")
    print("\nGeneral questions, greedy:")
    for question, (old, new) in list(zip(QUESTIONS, texts, strict=True))[:SHOWN]:
        print(f"  {question}\n    before: {old}\n    after:  {new}")
    print(f"all {len(QUESTIONS)}: {path}")
    print(f"KL divergence of the next token in the answers before: {kl:.4f} nats a token")


def pair_completions(folder: Path, last_step: int) -> list[tuple[dict, dict]]:
    """Return the records of each held-out problem before the first step and after the last."""
    with open(folder / "run/completions.jsonl", "rb") as lines:  # in a text U+2028, too, ends a line of splitlines
        samples = [sample for sample in map(json.loads, lines) if sample["phase"] == "eval"]
    return list(zip(*([s for s in samples if s["step"] == step] for step in (0, last_step)), strict=True))


def question_of(sample: dict) -> str:
    return PICTURE.sub("", sample["prompt"].split("<|im_start|>user\n")[-1].split("<|im_end|>")[0])


def print_completions(pairs: list[tuple[dict, dict]]) -> None:
    for old, new in pairs:
        print(f"\n{question_of(old)}  (answer: {old['answer']})")
        columns = [lines_of(sample) or [""] for sample in (old, new)]
        heads = [f"{name}: {'right' if s['correct'] else 'wrong'}" for name, s in (("before", old), ("after", new))]
        print(f"  {heads[0]:<{WIDTH}}  {heads[1]}")
        for row in range(max(map(len, columns))):
            left, right = (column[row] if row < len(column) else "" for column in columns)
            print(f"  {left:<{WIDTH}}  {right}")


def lines_of(sample: dict) -> list[str]:
    """Return a completion in lines; of one with tools each turn begins a line, and so does each answer."""
    drawn = iter(sample["completion"].split("\n"))  # no turn of the demo with tools has a line end
    turns = [
        f"-> {message['content']}" if message["role"] == "tool" else next(drawn, "")
        for message in sample.get("messages", [])
        if message["role"] != "user"  # of an agent: the question, which stands above
    ]
    return [line for turn in turns or drawn for line in textwrap.wrap(turn, WIDTH)]


if __name__ == "__main__":
    sys.exit(main())
