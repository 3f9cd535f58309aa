"""Files of rows, and a run's folder, written by hand."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write a file of the type that its name says: .parquet, .json, or a JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    return path


def write(folder, metrics=None, completions=None, settings="max_steps: 3\n"):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("metrics.jsonl", metrics), ("completions.jsonl", completions)):
        if rows is not None:
            write_rows(folder / name, rows)
    if settings is not None:
        (folder / "config.yaml").write_text(settings)
    return folder


def completion(step, phase="train", **changes):
    return {"step": step, "phase": phase, "prompt": "2+2?", "completion": "4", "answer": "4", "reward": 1.0} | changes
