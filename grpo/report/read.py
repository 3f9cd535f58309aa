"""Reads a run's files: metrics, settings, starts, and a selection of completions and pictures. Makes the table at
the end of a run: its first and its last numbers, and the next commands.

The run may have been killed in the middle of a line, may be running, or may have been resumed from an earlier step.
`RecordedRun.notes` names everything that cannot be read and is left out.
"""

import base64
import functools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from grpo.config.errors import ConfigError
from grpo.config.loss_settings import is_users_own
from grpo.config.sampling_settings import is_adapted
from grpo.config.trainer import settings_in
from grpo.run.run_folder import PICTURES, read_record, with_error

LONGEST_TEXT = 20_000
"""characters that are kept of a prompt, completion or answer: four fifths from its beginning, the rest from its end"""
LONGEST_FACT = 200  # characters that are kept of a text that a reward function logged of a completion
STEP_COMPLETIONS = 64  # completions that are kept of one step
LARGEST_FILE = 40_000  # bytes of a picture's file that is shown unchanged; a larger one is made smaller
LONGEST_SIDE = 512  # pixels of the longer side of a picture that is made smaller
_PICTURE = re.compile(r"\w+\.(png|jpg)")
MOST_SEGMENTS = 200  # segments that are kept of a completion with tools or an environment
_NO_FACTS = {"step", "phase", "prompt", "completion", "messages", "answer"}
_LARGEST = 1e300  # a larger number, which only a damaged file has, is left out: plots could not compute with it
# The metric of each row of summary's table.
_HELD_OUT = {
    "accuracy": "eval_accuracy",
    "reward": "eval_reward",
    "format": "eval_format",
    "tokens per completion": "eval_completions/mean_length",
}
_TRAINING = {
    "mean reward": "reward",
    "KL to the reference": "kl",
    "tokens per completion": "completions/mean_length",
    "cut at max_completion_length": "completions/clipped_ratio",
}


@dataclass(kw_only=True)
class RecordedRun:
    """A run's folder as it was when it was read."""

    folder: Path
    rows: dict[int, dict[str, float]]  # the metrics of each step that are finite numbers; steps ascend
    settings: dict[str, Any]  # the content of config.yaml, or empty
    starts: list[dict[str, Any]] = field(default_factory=list)  # the content of starts.jsonl, by time, or empty
    notes: list[str] = field(default_factory=list)  # a sentence for each missing or damaged file

    @property
    def names(self) -> list[str]:
        """Return all metrics of the run, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))


@dataclass
class _Block:
    """The consecutive lines of completions.jsonl with the completions of one step and phase."""

    offset: int  # bytes before the first line
    count: int = 0  # completions in all
    size: int = 0  # bytes of the first STEP_COMPLETIONS, about as in the page


def read_run(folder: Path, may_be_empty: bool = False) -> RecordedRun:
    """Read metrics and settings. Raises ConfigError if there is no run, or no step (unless `may_be_empty`)."""
    path = folder / "metrics.jsonl"
    if not (folder.is_dir() if may_be_empty else path.is_file()):
        raise ConfigError(f"runs='{folder}': there is no {path.name} of a run: name a folder that the trainer made")
    run, repeated = RecordedRun(folder=folder, rows={}, settings={}), 0
    for *_, record in _read_lines(path, run.notes) if path.is_file() else ():
        repeated += record["step"] in run.rows
        run.rows[record["step"]] = {
            name: float(value) for name, value in record.items() if name != "step" and _is_number(value)
        }
    if not run.rows:
        if not may_be_empty:
            raise ConfigError(f"runs='{folder}': {path.name} has no step yet: wait for the first, or name another run")
        run.notes.append("there is no step yet")
    if repeated:
        run.notes.append(f"steps that metrics.jsonl has more than once: {repeated}; the last line of each is taken")
    run.rows = dict(sorted(run.rows.items()))
    run.settings = {str(name): value for name, value in settings_in(folder).items()}
    if not run.settings:
        run.notes.append("config.yaml is missing or cannot be read: the settings are unknown")
    if (starts := folder / "starts.jsonl").is_file():
        run.starts = [record for *_, record in _read_lines(starts, run.notes)]
    return run


def read_completions(run: RecordedRun, size: int) -> list[dict[str, Any]]:
    """Return the run's completions as `{step, phase, groups, left_out}` by step, in about `size` bytes of text.

    A group is `{prompt, answer, completions}`, with `pictures`, the names of their files, if its prompt has some;
    `left_out` counts the completions beyond STEP_COMPLETIONS. A completion is `{text, facts}`, with `segments`,
    `{role, text}` each, if tools, an environment or an agent answered, and with the `tree` of an agent's episode, as a
    Rollout's. If not all fit, steps are left out evenly, but never the first and the last. The file may be larger than
    the memory.
    """
    path = run.folder / "completions.jsonl"
    if not path.is_file():
        run.notes.append("there is no completions.jsonl: no completions are shown")
        return []
    blocks, previous = dict[tuple[int, str], _Block](), None
    for offset, length, record in _read_lines(path, run.notes):
        key = (record["step"], str(record.get("phase", "")))
        if key != previous:  # a run that was resumed writes a step again, and the last time counts
            blocks[key] = _Block(offset)
        previous, block = key, blocks[key]
        block.count += 1
        block.size += min(length, 3 * LONGEST_TEXT) if block.count <= STEP_COMPLETIONS else 0
    phases, kept = sorted({phase for _, phase in blocks}), []
    for phase in phases:
        recorded = sorted(key for key in blocks if key[1] == phase)
        shown = every_nth({key: blocks[key].size for key in recorded}, size // len(phases))
        if len(shown) < len(recorded):
            name = {"train": "training", "eval": "evaluation"}.get(phase, phase)
            run.notes.append(f"completions of {len(shown)} of {len(recorded)} {name} steps are shown, evenly chosen")
        kept += shown
    return [_read_block(path, *key, blocks[key]) for key in sorted(kept)]


def every_nth(sizes: dict[Any, int], room: int) -> list[Any]:
    """Return every n-th key and the last, for the smallest n whose sizes fit; the first and the last always."""
    keys, kept = list(sizes), []
    for stride in range(1, len(keys) + 1):
        kept = [*keys[:-1:stride], keys[-1]]
        if sum(map(sizes.get, kept)) <= room:
            break
    return kept


def _read_block(path: Path, step: int, phase: str, block: _Block) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    with open(path, "rb") as file:
        file.seek(block.offset)
        for record in islice(filter(None, map(read_record, file)), min(block.count, STEP_COMPLETIONS)):
            problem = {name: _shorten(record.get(name)) for name in ("prompt", "answer")}
            # Names of files in the folder of pictures, and no others.
            if names := [name for name in map(str, record.get("pictures", ())) if _PICTURE.fullmatch(name)]:
                problem["pictures"] = names
            if not groups or {name: value for name, value in groups[-1].items() if name != "completions"} != problem:
                groups.append({**problem, "completions": []})
            facts = {
                name: value[:LONGEST_FACT] if isinstance(value, str) else value
                for name, value in record.items()
                if name not in _NO_FACTS and value != "" and (isinstance(value, bool | str) or _is_number(value))
            }
            completion = {"text": _shorten(record.get("completion")), "facts": facts}
            if "messages" in record:
                completion["segments"] = [_segment(message) for message in record["messages"][:MOST_SEGMENTS]]
            if "tree" in record:
                completion["tree"] = record["tree"][:MOST_SEGMENTS]
            groups[-1]["completions"].append(completion)
    return {"step": step, "phase": phase, "groups": groups, "left_out": max(0, block.count - STEP_COMPLETIONS)}


def _segment(message: dict[str, Any]) -> dict[str, str]:
    """Return role and text of a message. A call is shown as name(arguments)."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [_shorten(message["content"]), *(f"{call['name']}({_shorten(call['arguments'])})" for call in calls)]
    role = f"{message['role']} {message.get('name', '')}".rstrip()
    return {"role": role, "text": "\n".join(filter(None, texts))}


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    excess, head = len(text) - LONGEST_TEXT, LONGEST_TEXT * 4 // 5
    if excess <= 0:
        return text
    return f"{text[:head]}\n[… {excess:,} characters are left out here …]\n{text[head + excess :]}"


def _read_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (offset, size in bytes, record) of every line that is a record with a step; add a note about the others."""
    damaged, offset = [], 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if (record := read_record(raw)) is None:
                damaged.append(number)
            else:
                yield offset, len(raw), record
            offset += len(raw)
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + ", ..." * (len(damaged) > 5)
        notes.append(f"damaged or half-written lines of {path.name} are left out: {shown} ({len(damaged)} in all)")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def read_pictures(run: RecordedRun, blocks: Sequence[dict[str, Any]], size: int) -> dict[str, str]:
    """Return the pictures that blocks of `read_completions` name, as data URLs by name, in about `size` bytes. If not
    all fit, those of training are left out evenly. A note of the run counts them."""
    folder, sizes, shown = run.folder / PICTURES, dict[str, int](), list[str]()
    for phase in ("eval", "train"):  # every evaluation has the same held-out problems, each step of training has others
        groups = [group for block in blocks if block["phase"] == phase for group in block["groups"]]
        names = dict.fromkeys(name for group in groups for name in group.get("pictures", ()) if name not in sizes)
        room = size - sum(sizes[name] for name in shown)
        there = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
        of_phase = {name: min(size, LARGEST_FILE) * 4 // 3 for name, size in there.items() if size > 0}
        sizes |= dict.fromkeys(names, 0) | of_phase
        shown += every_nth(of_phase, room)
    urls = {name: url for name in shown if (url := _data_url(folder / name))}
    if len(urls) < len(sizes):
        run.notes.append(f"{len(urls)} of {len(sizes)} pictures are shown")
    return urls


@functools.lru_cache(maxsize=1000)
def _data_url(path: Path) -> str:
    """Return a picture for a page, or "" if it cannot be read."""
    data, kind = path.read_bytes(), "png" if path.suffix == ".png" else "jpeg"
    if len(data) > LARGEST_FILE:
        try:
            with Image.open(path, formats=("PNG", "JPEG")) as picture:
                small = ImageOps.exif_transpose(picture).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # what Pillow raises of damaged files
            return ""
        small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        file = BytesIO()
        small.save(file, "JPEG", quality=80)
        data, kind = file.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def summary(folder: Path) -> str:
    """Return the table of the run in `folder`. Raises ConfigError if it has no step."""
    run = read_run(folder)
    evaluated = [row for row in run.rows.values() if "eval_n" in row]
    trained = [row for row in run.rows.values() if "num_tokens" in row]
    lines: list[str] = []
    if len(evaluated) > 1:
        title = f"{evaluated[0]['eval_n']:.0f} held-out problems, greedy"
        lines += _table(title, "before", "after", _HELD_OUT, evaluated)
    if trained:
        lines += _table("training, sampled", "first step", "last step", _TRAINING, trained)
    seconds = sum(row.get("step_time", 0.0) for row in run.rows.values())
    lines.append(f"{max(run.rows)} steps, {trained[-1]['num_tokens']:,.0f} tokens, {duration(seconds)} in steps.")
    return "\n".join(lines + _next_commands(run))


def _table(title: str, left: str, right: str, names: dict[str, str], rows: list[dict[str, float]]) -> list[str]:
    first, last = rows[0], rows[-1]
    return [f"{title:34} {left:>15} {right:>15}"] + [
        f"  {label:32} {with_error(first, name):>15} {with_error(last, name):>15}"
        for label, name in names.items()
        if name in first and name in last
    ]


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _next_commands(run: RecordedRun) -> list[str]:
    folder, code = shlex.quote(str(run.folder)), ""
    if tools := run.settings.get("tools"):
        code += f" --tools {shlex.join(map(str, tools))}"
    for name in ("environment", "agent", "agent_python"):
        if value := run.settings.get(name):
            code += f" --{name} {shlex.quote(str(value))}"
    rewards, names = "", list(map(str, run.settings.get("reward_funcs") or []))
    if any(map(is_users_own, names)):  # evaluation does not take these from the model's folder, nor then their weights
        rewards = f" --reward_funcs {shlex.join(names)}"
        if set(weights := run.settings.get("reward_weights") or []) - {1}:
            rewards += f" --reward_weights {shlex.join(map(str, weights))}"
    talk = f"talk to it:    grpo chat --model {folder}/model{code}"
    return [
        *([] if is_adapted(run.settings.get("agent")) else [talk]),  # its tasks are its own
        f"evaluate it:   grpo eval --model {folder}/model{code}{rewards}",
        f"serve it:      as {folder}/model/README.md says",
        f"see its page:  grpo report {folder}",
    ]
