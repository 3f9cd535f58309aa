"""What a run has written so far, read back: its numbers, its settings, and some of its completions.

A run may have been killed in the middle of a line, may still be going, or may have been taken up again at an earlier
step. What cannot be read is left out and said in `Run.notes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import yaml

from grpo.config.errors import ConfigError
from grpo.run.json_lines import read_record, some_of

LONGEST_TEXT = 20_000
"""characters that are kept of a prompt, completion or answer: four fifths from its beginning, the rest from its end"""

_LARGEST = 1e300
"""numbers beyond, which only a damaged file has, are taken for missing: plots could not compute with them"""


@dataclass
class Run:
    """A run's folder as it was when it was read."""

    folder: Path
    rows: dict[int, dict[str, float]]
    """by step, ascending, each metric that was a finite number"""
    settings: dict[str, Any]
    """its config.yaml; empty where there is none"""
    notes: list[str] = field(default_factory=list)
    """what was missing or damaged, a sentence each"""

    @property
    def names(self) -> list[str]:
        """Every metric of any step, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))


def read_run(folder: Path) -> Run:
    """Read metrics and settings. Raises ConfigError where there is no run, or none with a step."""
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "there is no such folder"
        raise ConfigError(f"runs='{folder}': {what}: name the folder of a run")
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"runs='{folder}': no run's folder, as it has no metrics.jsonl: name one that the trainer made"
        )
    run = Run(folder, {}, {})
    repeated = 0
    for *_, line in _lines(path, run.notes):
        repeated += line["step"] in run.rows
        run.rows[line["step"]] = {
            name: float(value) for name, value in line.items() if name != "step" and _is_number(value)
        }
    if not run.rows:
        raise ConfigError(f"runs='{folder}': metrics.jsonl has no step yet: wait for the first, or name another run")
    if repeated:
        run.notes.append(f"steps that metrics.jsonl has more than once: {repeated}; the last line of each is taken")
    run.rows = dict(sorted(run.rows.items()))
    run.settings = _settings(folder / "config.yaml", run.notes)
    return run


@dataclass
class _Block:
    """Where the completions of one step and phase are in the file."""

    step: int
    phase: str
    places: list[tuple[int, int]] = field(default_factory=list)
    """(offset, size) of each line, in bytes; of the first ones only"""
    count: int = 0
    """how many there are"""

    @property
    def size(self) -> int:
        return sum(size for _, size in self.places)


def read_completions(run: Run, size: int, at_most: int = 64) -> list[dict[str, Any]]:
    """The run's completions as `{step, phase, groups, left_out}` by step, about `size` bytes of text at most in all.

    If there are more, steps are left out: as many as it takes, evenly, in training and in evaluation alike, but never
    the first and the last. A step has `at_most` completions; `left_out` counts the others. A group is `{prompt, answer,
    completions}`. The file may be far larger than the memory: it is read line by line, first to see what there is.
    """
    path = run.folder / "completions.jsonl"
    if not path.is_file():
        run.notes.append("there is no completions.jsonl: no completions are shown")
        return []
    blocks: dict[tuple[int, str], _Block] = {}
    before = None
    for offset, length, line in _lines(path, run.notes):
        key = (line["step"], str(line.get("phase", "")))
        if key != before:  # also where a step is there again: what was written last counts
            blocks[key] = _Block(*key)
        before = key
        blocks[key].count += 1
        if blocks[key].count <= at_most:
            blocks[key].places.append((offset, min(length, 3 * LONGEST_TEXT)))
    phases, chosen = sorted({phase for _, phase in blocks}), []
    for phase in phases:
        mine = sorted((block for block in blocks.values() if block.phase == phase), key=lambda block: block.step)
        kept = _evenly(mine, size // len(phases))
        if len(kept) < len(mine):
            name = {"train": "training", "eval": "evaluation"}.get(phase, phase)
            run.notes.append(f"completions of {len(kept)} of {len(mine)} {name} steps are shown, evenly chosen")
        chosen += kept
    with open(path, "rb") as file:
        return [_read_block(file, block) for block in sorted(chosen, key=lambda block: (block.step, block.phase))]


def _evenly(blocks: list[_Block], size: int) -> list[_Block]:
    """As many of the blocks as fit, first and last always, the others at equal distances."""
    for block in blocks:  # so that two always fit
        while len(block.places) > 1 and block.size > size // 2:
            block.places.pop()
    count = len(blocks)
    while True:
        kept = [blocks[place] for place in np.unique(np.linspace(0, len(blocks) - 1, count).round().astype(int))]
        total = sum(block.size for block in kept)
        if total <= size or count <= 2:
            return kept
        count = max(2, min(count - 1, int(count * size / total)))


def _read_block(file: BinaryIO, block: _Block) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    for offset, _ in block.places:
        file.seek(offset)
        line = json.loads(file.readline().decode("utf-8", "replace"))
        prompt, answer = (_text(line.get(name)) for name in ("prompt", "answer"))
        if not groups or (groups[-1]["prompt"], groups[-1]["answer"]) != (prompt, answer):
            groups.append({"prompt": prompt, "answer": answer, "completions": []})
        facts = {
            name: value
            for name, value in line.items()
            if name != "step" and (isinstance(value, bool) or _is_number(value))
        }
        groups[-1]["completions"].append({"text": _text(line.get("completion")), "facts": facts})
    left_out = block.count - len(block.places)
    return {"step": block.step, "phase": block.phase, "groups": groups, "left_out": left_out}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    gone = len(text) - LONGEST_TEXT
    if gone <= 0:
        return text
    head = LONGEST_TEXT * 4 // 5
    return f"{text[:head]}\n[… {gone:,} characters are left out here …]\n{text[head + gone :]}"


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(offset, size in bytes, record) of every line that is a record with a step; of the others a note at the end."""
    damaged, number, offset, raw = [], 0, 0, b"\n"
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            record = read_record(raw)
            if record is None:
                damaged.append(number)
            else:
                yield offset, len(raw), record
            offset += len(raw)
    if damaged and damaged[-1] == number and not raw.endswith(b"\n"):
        damaged.pop()
        notes.append(f"the last line of {path.name} is half written and left out: the run was killed or still goes on")
    if damaged:
        notes.append(f"damaged lines of {path.name} that are left out: {some_of(damaged)}")


def _settings(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        json.dumps(settings, default=str)  # YAML can say what nobody can show, such as a list within itself
    except FileNotFoundError:
        notes.append("there is no config.yaml: its settings are unknown")
        return {}
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        notes.append("config.yaml cannot be read: its settings are unknown")
        return {}
    return {str(name): value for name, value in settings.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
