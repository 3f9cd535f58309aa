"""Writes a starting point: settings, two rewards and 64 rows.

    grpo init my_run
    cd my_run && grpo launch --config config.yaml

Change the three into yours. `--from trl script.py` translates another trainer's settings instead, and lists in the
file what has no counterpart: of TRL a script, notebook or YAML, of verl and EasyR1 the command in a shell script or
YAML, of simple_GRPO the script.
"""

import argparse
import json
import random
import shlex
import sys
from pathlib import Path

import yaml

from grpo.config.command_line import to_yaml
from grpo.config.errors import ConfigError, program_name
from grpo.config.fields import PACKAGE
from grpo.config.other_names import TABLES
from grpo.config.translation import translate
from grpo.run.run_folder import check_writable

STARTER = {"config.yaml": PACKAGE / "starter/config.yaml", "rewards.py": PACKAGE / "starter/first_rewards.py"}
ROWS = {"train": 64, "test": 16}
DATASETS = "datasets.yaml"  # written if there are several


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=program_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."), help="folder to write into (default: here)")
    parser.add_argument("--from", nargs=2, metavar=("TRAINER", "FILE"), dest="source", help=", ".join(TABLES))
    arguments = parser.parse_args()
    try:
        write(arguments.folder, starting_files(arguments.source))
    except ConfigError as error:
        parser.error(str(error))
    print(f"next:  cd {shlex.quote(str(arguments.folder))} && grpo launch --config config.yaml --dry_run")
    return 0


def starting_files(source: list[str] | None) -> dict[str, str]:
    """Return the files by their paths, with settings translated from `source`, if any. Raises ConfigError."""
    files = {name: path.read_text(encoding="utf-8") for name, path in STARTER.items()}
    if source is None:
        return files | {f"data/{split}.jsonl": rows(split, count) for split, count in ROWS.items()}
    trainer, file = source
    if trainer not in TABLES:
        raise ConfigError(f"from={trainer!r}: use {', '.join(TABLES)}")
    translation = translate(trainer, Path(file))
    settings = translation.settings
    if isinstance(datasets := settings.get("dataset_name"), list):
        files[DATASETS] = yaml.safe_dump(datasets, sort_keys=False, allow_unicode=True)
        settings["dataset_name"] = DATASETS
    read = " and ".join(path.name for path in translation.files)
    lines = [f"# Translated from {read} of {trainer}."]
    updates = settings.get("steps_per_generation", 1) * settings.get("num_iterations", 1)
    if trainer in ("verl", "easyr1") and updates > 1:
        lines.append(f"# A step there is a round of {updates} updates; max_steps, eval_steps and others count updates.")
    lines += ["", to_yaml({name: value for name, value in settings.items() if value is not None})]
    if translation.lost:
        lines.append("# Without a counterpart here:")
    for name, (value, hint) in sorted(translation.lost.items(), key=lambda item: (not item[1][1], item[0])):
        lines.append(f"#   {name}: {value}{f' ({hint})' if hint else ''}")  # those with a hint come first
    return files | {"config.yaml": "\n".join([*lines, ""])}


def write(folder: Path, files: dict[str, str]) -> None:
    """Write the files into the folder, all or, if one is there already, none. Raises ConfigError."""
    check_writable("folder", folder)
    if there := [name for name in files if (folder / name).exists()]:
        raise ConfigError(f"folder='{folder}': it has {', '.join(there)} already: remove it, or name another folder")
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"folder='{folder}': {error.strerror}: name one that can be written") from error
        print(f"wrote {path}")


def rows(split: str, count: int) -> str:
    """Return lines of JSON with a `question` and its `answer`, both text."""
    draw = random.Random(split)
    lines = []
    for _ in range(count):
        red, blue, boxes = draw.randint(2, 99), draw.randint(2, 99), draw.randint(2, 9)
        question = f"A box holds {red} red and {blue} blue pens. How many pens are in {boxes} such boxes?"
        lines.append(json.dumps({"question": question, "answer": str((red + blue) * boxes)}) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
