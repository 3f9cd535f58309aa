"""The task of the demo with pictures: count the shapes of a kind in a small drawing. A picture has nine cells, with a
shape or nothing in each. Every answer from 0 to 5 is as frequent as any other: without looking, one in six is right.
One arrangement in ten, chosen by a hash, is held out: no picture of the training split and no demonstration has it."""

import io
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, Features, Image, Value, disable_progress_bars
from matplotlib.figure import Figure
from PIL import Image as Pillow
from PIL import ImageDraw

from demo.task import in_test_split

KINDS = {"circles": "circle", "squares": "square", "triangles": "triangle"}
COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 119, 180)}
WORDINGS = {
    "count": "Count the {kind}.",
    "are there": "How many {kind} are there?",
    "do you see": "How many {kind} do you see?",
    "number": "Tell me the number of {kind}.",
    "what": "What is the number of {kind}?",
}
SIDE, CELL = 3, 16  # cells of a row; pixels of a cell's side, which are those of a token's
MOST, OTHERS = 5, 3  # shapes of the kind that is asked for, and of other kinds
# How Qwen writes a picture of this size into a prompt.
PICTURE = "<|vision_start|>" + "<|image_pad|>" * SIDE**2 + "<|vision_end|>"
WIDE, HIGH = 4, 3  # pictures of a gallery
RIGHT, WRONG = "#16976b", "#d8437f"
ANSWERED = re.compile(r"<think>(.*)</think><answer>(.*)</answer>")


@dataclass(frozen=True)
class Shape:
    """A shape in a cell; the centre counts from the cell's corner, in pixels."""

    name: str
    colour: str
    centre: tuple[int, int]
    radius: int


@dataclass(frozen=True)
class Problem:
    """A picture, its cells row by row, and a question about it."""

    wording: str
    kind: str
    cells: tuple[Shape | None, ...]

    @property
    def text(self) -> str:
        return WORDINGS[self.wording].format(kind=self.kind)

    @property
    def question(self) -> str:
        """The text after the picture, as the model reads them."""
        return PICTURE + self.text

    @property
    def answer(self) -> str:
        return str(self.count(self.kind))

    @property
    def arrangement(self) -> str:
        """The text that decides the split: what is in each cell, wherever in it."""
        return ",".join(f"{cell.colour} {cell.name}" if cell else "" for cell in self.cells)

    def count(self, kind: str) -> int:
        return sum(cell is not None and cell.name == KINDS[kind] for cell in self.cells)

    def draw(self) -> Pillow.Image:
        image = Pillow.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
        canvas = ImageDraw.Draw(image)
        for place, cell in enumerate(self.cells):
            if cell is None:
                continue
            x, y = place % SIDE * CELL + cell.centre[0], place // SIDE * CELL + cell.centre[1]
            left, top, right, bottom = box = x - cell.radius, y - cell.radius, x + cell.radius, y + cell.radius
            if cell.name == "circle":
                canvas.ellipse(box, COLOURS[cell.colour])
            elif cell.name == "square":
                canvas.rectangle(box, COLOURS[cell.colour])
            else:
                canvas.polygon([(left, bottom), (right, bottom), (x, top)], COLOURS[cell.colour])
        return image


def look(problem: Problem) -> str:
    """Return a completion that counts the shapes of every kind, and says again how many the asked kind has."""
    counts = ", ".join(f"{kind} {problem.count(kind)}" for kind in KINDS)
    return f"<think>{counts}: {problem.kind} {problem.answer}</think><answer>{problem.answer}</answer>"


def guess(rng: random.Random) -> str:
    """Return a completion with the tags that has nothing to do with the picture."""
    return f"<think>a glance</think><answer>{rng.randint(0, MOST)}</answer>"


def untagged(rng: random.Random) -> str:
    """Return a completion without the tags that has nothing to do with the picture."""
    return f"I see {rng.randint(0, MOST)}."


def problems(
    rng: random.Random, held_out: bool = False, wordings: Sequence[str] = tuple(WORDINGS)
) -> Iterator[Problem]:
    """Draw problems without end from one side of the split."""
    while True:
        wording, kind = rng.choice(wordings), rng.choice(list(KINDS))
        others = [KINDS[other] for other in KINDS if other != kind]
        names = [KINDS[kind]] * rng.randint(0, MOST) + rng.choices(others, k=rng.randint(1, OTHERS))
        names += [None] * (SIDE**2 - len(names))
        rng.shuffle(names)
        cells = [
            Shape(name, rng.choice(list(COLOURS)), (rng.randint(7, 8), rng.randint(7, 8)), rng.randint(5, 7))
            if name
            else None
            for name in names
        ]
        problem = Problem(wording, kind, tuple(cells))
        if in_test_split(problem.arrangement) == held_out:
            yield problem


def write_dataset(folder: Path, seed: int, train_size: int = 1024, test_size: int = 256) -> None:
    """Write train.parquet and test.parquet with the columns of geometry3k: `images`, `problem` and `answer`."""
    disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    columns = Features({"images": [Image()], "problem": Value("string"), "answer": Value("string")})
    for name, size, held_out in [("train", train_size, False), ("test", test_size, True)]:
        chosen: dict[str, Problem] = {}
        for problem in problems(random.Random(f"{name} {seed}"), held_out):
            chosen[problem.arrangement] = problem
            if len(chosen) == size:
                break
        rows = [
            {"images": [{"bytes": png(p.draw()), "path": None}], "problem": f"<image>{p.text}", "answer": p.answer}
            for p in chosen.values()
        ]
        Dataset.from_list(rows, features=columns).to_parquet(folder / f"{name}.parquet")


def png(image: Pillow.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def draw_gallery(path: Path, pictures: Path, problems: list[tuple[str, dict, dict]]) -> None:
    """Write a PNG of the first problems: a question each, and its records in completions.jsonl before and after.
    `pictures` is the folder of the files that the records name."""
    figure = Figure(figsize=(3.4 * WIDE, 3.5 * HIGH))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.97, bottom=0.09, wspace=0.02, hspace=0.5)
    for place, (question, before, after) in enumerate(problems[: WIDE * HIGH], 1):
        axes = figure.add_subplot(HIGH, WIDE, place)
        axes.imshow(Pillow.open(pictures / before["pictures"][0]), interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_title(question, fontsize=11)
        for line, (name, sample) in enumerate((("before", before), ("after", after))):
            text = ANSWERED.sub(r"\1\nanswer \2", sample["completion"])
            colour = RIGHT if sample["correct"] else WRONG
            style = dict(transform=axes.transAxes, ha="center", va="top", fontsize=9, color=colour)
            axes.text(0.5, -0.03 - 0.15 * line, f"{name}: {text}", **style)
    figure.savefig(path, dpi=110)
