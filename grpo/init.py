"""Writes a starting point: settings, two rewards and 64 rows.

    grpo init my_run
    cd my_run && grpo launch --config config.yaml

Change the three into yours. `--from trl script.py` translates another trainer's settings instead, and lists in the
file what has no counterpart: of TRL a script or YAML, of verl its command or YAML, of EasyR1 YAML, of simple_GRPO the
script.
"""

import argparse
import json
import random
import sys
from dataclasses import fields
from pathlib import Path

from grpo.config.command_line import to_yaml
from grpo.config.errors import ConfigError, program_name
from grpo.config.fields import PACKAGE
from grpo.config.programs import LaunchConfig
from grpo.config.translation import TABLES, translate

STARTER = {"config.yaml": PACKAGE / "starter/config.yaml", "rewards.py": PACKAGE / "starter/first_rewards.py"}
ROWS = {"train": 64, "test": 16}


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
    print(f"next:  cd {arguments.folder} && grpo launch --config config.yaml --dry_run")
    return 0


def starting_files(source: list[str] | None) -> dict[str, str]:
    """Return the files by their paths, with settings translated from `source`, if any. Raises ConfigError."""
    files = {name: path.read_text(encoding="utf-8") for name, path in STARTER.items()}
    if source is None:
        return files | {f"data/{split}.jsonl": rows(split, count) for split, count in ROWS.items()}
    trainer, file = source
    if trainer not in TABLES:
        raise ConfigError(f"from={trainer!r}: use {', '.join(TABLES)}")
    translated, left = translate(trainer, Path(file), {field.name for field in fields(LaunchConfig)})
    settings = {"reward_funcs": ["rewards.py:right_number"]} | translated
    lines = [f"# Translated from {Path(file).name} of {trainer}.", "", to_yaml(settings)]
    if left:
        lines += ["# Without a counterpart here:"]
        lines += [f"#   {name}{f' ({hint})' if hint else ''}" for name, hint in sorted(left.items())]
    return files | {"config.yaml": "\n".join([*lines, ""])}


def write(folder: Path, files: dict[str, str]) -> None:
    """Write the files into the folder, all or, if one is there already, none. Raises ConfigError."""
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
