"""Draw what the demo with pictures shows: held-out pictures with the answers to them before and after the training."""

import re
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

COLUMNS, ROWS = 4, 3
RIGHT, WRONG = "#16976b", "#d8437f"
ANSWER = re.compile(r"<think>(.*)</think><answer>(.*)</answer>")


def draw_gallery(path: Path, pictures: Path, problems: list[tuple[str, dict, dict]]) -> None:
    """Write a PNG of the first problems: a question each, and its records in completions.jsonl before and after.
    `pictures` is the folder of the files that the records name."""
    figure = Figure(figsize=(3.4 * COLUMNS, 3.5 * ROWS))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.97, bottom=0.09, wspace=0.02, hspace=0.5)
    for place, (question, before, after) in enumerate(problems[: COLUMNS * ROWS], 1):
        axes = figure.add_subplot(ROWS, COLUMNS, place)
        axes.imshow(Image.open(pictures / before["pictures"][0]), interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_title(question, fontsize=11)
        for line, (name, sample) in enumerate((("before", before), ("after", after))):
            text = ANSWER.sub(r"\1\nanswer \2", sample["completion"])
            colour = RIGHT if sample["correct"] else WRONG
            style = dict(transform=axes.transAxes, ha="center", va="top", fontsize=9, color=colour)
            axes.text(0.5, -0.03 - 0.15 * line, f"{name}: {text}", **style)
    figure.savefig(path, dpi=110)
