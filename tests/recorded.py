"""A run's folder, written by hand."""

import json


def write(folder, metrics=None, completions=None, settings="max_steps: 3\n"):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("metrics.jsonl", metrics), ("completions.jsonl", completions)):
        if rows is not None:
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if settings is not None:
        (folder / "config.yaml").write_text(settings)
    return folder


def completion(step, phase="train", **changes):
    return {"step": step, "phase": phase, "prompt": "2+2?", "completion": "4", "answer": "4", "reward": 1.0} | changes
