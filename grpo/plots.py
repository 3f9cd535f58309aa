"""A run's learning curves as a picture."""

from __future__ import annotations

import json
from pathlib import Path

_PANELS = {
    "reward": [("reward", "mean reward")],
    "held-out problems": [("eval_accuracy", "accuracy"), ("eval_format", "format")],
    "KL to the reference": [("kl", "k3, per token")],
    "completion length": [("completions/mean_length", "tokens")],
}


def draw_curves(folder: Path) -> Path:
    """Draw `folder`/metrics.jsonl into `folder`/curves.png (four panels over steps) and return that path."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
        for name, label in curves:
            points = [(row["step"], row[name], row.get(f"{name}_se", 0.0)) for row in rows if row.get(name) is not None]
            if not points:
                continue
            steps, values, errors = zip(*points, strict=True)
            if any(errors):
                axes.errorbar(steps, values, errors, marker="o", capsize=3, label=f"{label} (± standard error)")
            else:
                axes.plot(steps, values, marker="o" if name.startswith("eval_") else None, label=label)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    path = folder / "curves.png"
    figure.savefig(path, dpi=120)
    return path
