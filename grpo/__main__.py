"""The command `grpo`: every program by one name, from any folder.

    grpo launch --config configs/lora_24gb.yaml      the same as python -m grpo.launch
    torchrun --nproc_per_node 2 -m grpo train        the same as torchrun --nproc_per_node 2 grpo_ref_split.py

A program runs in this process, as if its file had been started.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grpo import __version__
from grpo.config.fields import PACKAGE, PROGRAMS

# Of each command the file of its program, its purpose, and its first options.
COMMANDS = {
    "init": (PACKAGE / "init.py", "write a starting point: settings, rewards, data"),
    "launch": (
        PACKAGE / "launch.py",
        "train: reference server, workers, a trainer on each card, of one machine or more",
    ),
    "train": (PROGRAMS / "grpo_ref_split.py", "the trainer alone: one rank, or several under torchrun"),
    "server": (PROGRAMS / "ref_server.py", "the reference model, or a reward model, over HTTP"),
    "pool": (PROGRAMS / "ref_server.py", "hand a trainer's prompts to workers", "--task", "rollouts"),
    "worker": (PROGRAMS / "generate.py", "draw completions for a pool"),
    "eval": (PACKAGE / "evaluate.py", "what a model's answers earn"),
    "chat": (PACKAGE / "chat.py", "talk to a model"),
    "report": (PACKAGE / "report/__main__.py", "the page of a run, or of several"),
    "status": (PACKAGE / "report/status.py", "how runs stand, in a few lines"),
    "stop": (PACKAGE / "report/status.py", "let runs finish their step, save and end for good", "--stop"),
    "import-gguf": (PACKAGE / "import_gguf.py", "turn a GGUF file into a model's folder"),
}


def main() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        print("usage: grpo COMMAND [--help | options]\n       grpo --version\n")
        print("\n".join(f"  {command:<{width}}  {does}" for command, (_, does, *_) in COMMANDS.items()))
    elif name == "--version":
        print(versions())
    elif name in COMMANDS:
        file, _, *first = COMMANDS[name]
        become(f"grpo {name}", file, [*first, *rest])
    else:
        sys.exit(f"grpo: error: {name}: no such command: choose from {', '.join(COMMANDS)}")


def versions() -> str:
    """Return the versions of this package and of those below it, and the cards that torch can use."""
    lines = [f"grpo {__version__}"]
    for name in ("torch", "transformers", "deepspeed"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name}: not installed")
    from grpo.launch import visible_cards

    return "\n".join([*lines, f"cards: {', '.join(visible_cards()) or 'none'}"])


def become(name: str, program: Path, options: list[str]) -> None:
    """Run a program's file in this process, as if it were the one that was started; messages call it `name`."""
    main_module = sys.modules["__main__"]
    main_module.__spec__, main_module.__file__ = None, str(program)
    sys.argv = [name, *options]
    exec(compile(program.read_bytes(), program, "exec"), main_module.__dict__)


if __name__ == "__main__":
    main()
