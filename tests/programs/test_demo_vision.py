"""The demo with pictures: its task, its model, and that it learns to look where there is something to see."""

import json
import random
import shutil
import subprocess
import sys
from itertools import islice

import datasets
import pytest
from conftest import ENVIRONMENT, REPOSITORY
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from demo.__main__ import VISION, train
from demo.model import answer_of, save
from demo.pictures import KINDS, MOST, PICTURE, Problem, Shape, guess, look, png, problems, untagged, write_dataset
from demo.vision import build_model, build_processor, build_tokenizer
from grpo.config.server import ServerConfig
from grpo.model.pictures import load_processor


def some(count: int, held_out: bool = False, seed: int = 1) -> list[Problem]:
    return list(islice(problems(random.Random(seed), held_out), count))


def test_an_answer_is_the_number_of_shapes_and_as_frequent_as_any_other():
    cells = [Shape("circle", "red", (8, 8), 6), None, Shape("square", "red", (8, 8), 6), *[None] * 6]
    problem = Problem("are there", "circles", tuple(cells))
    assert problem.text == "How many circles are there?" and problem.answer == "1"
    assert look(problem) == "<think>circles 1, squares 1, triangles 0: circles 1</think><answer>1</answer>"
    answers = [problem.answer for problem in some(3000)]
    assert all(abs(answers.count(str(n)) / 3000 - 1 / (MOST + 1)) < 0.03 for n in range(MOST + 1))
    assert all(answer_of(look(p)) == p.answer for p in some(100))
    assert (
        answer_of(guess(random.Random(0))) in map(str, range(MOST + 1))
        and answer_of(untagged(random.Random(0))) is None
    )


def test_a_picture_shows_its_shapes():
    for problem in some(50):
        image = problem.draw()
        for place, cell in enumerate(problem.cells):
            corner = place % 3 * 16, place // 3 * 16
            shown = image.crop((*corner, corner[0] + 16, corner[1] + 16))
            colours = {colour for _, colour in shown.getcolors()}
            assert len(colours) == (1 if cell is None else 2)
            if cell is not None:
                corners = [
                    shown.getpixel((cell.centre[0] + side, cell.centre[1] + end)) != (255, 255, 255)
                    for end in (-cell.radius, cell.radius)
                    for side in (-cell.radius, cell.radius)
                ]
                expected = {"circle": [False] * 4, "square": [True] * 4, "triangle": [False, False, True, True]}
                assert corners == expected[cell.name]


def test_the_dataset_has_the_columns_of_geometry3k_and_a_disjoint_split(tmp_path):
    write_dataset(tmp_path, seed=0, train_size=300, test_size=50)
    files = {split: str(tmp_path / f"{split}.parquet") for split in ("train", "test")}
    data = datasets.load_dataset("parquet", data_files=files)
    assert data["train"].column_names == ["images", "problem", "answer"] and len(data["train"]) == 300
    row = data["test"][0]
    assert row["problem"].startswith("<image>") and [image.size for image in row["images"]] == [(48, 48)]
    held_out = {problem.arrangement for problem in some(2000, held_out=True)}
    assert not held_out & {problem.arrangement for problem in some(2000)}
    assert (
        png(next(problems(random.Random("test 0"), True)).draw())
        == data["test"].with_format("arrow")[0]["images"].to_pylist()[0][0]["bytes"]
    )


def test_the_model_is_tiny_and_reads_a_picture_as_the_trainer_gives_it(tmp_path):
    tokenizer = build_tokenizer(seed=0)
    save(tmp_path / "model", build_model(tokenizer), tokenizer, build_processor())
    model, tokenizer = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    assert model.num_parameters() < 300_000 and type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    processor = load_processor(ServerConfig(model_name_or_path=str(tmp_path / "model")), model.config, tokenizer)
    problem = some(1)[0]
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": problem.text}]}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    prompt = processor.encode(text, [png(problem.draw())], add_special_tokens=False)
    assert tokenizer.decode(prompt) == f"<|im_start|>user\n{PICTURE}{problem.text}<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer.tokenize(" ".join(KINDS))) == len(KINDS)


def run(folder, *options) -> str:
    command = [sys.executable, "-m", "demo", "--vision", "--folder", str(folder), *options]
    ended = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=580)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def check(folder, output) -> None:
    first, *_, last = lines(folder)
    assert VISION.before[0] <= first["eval_accuracy"] <= VISION.before[1]
    assert last["eval_accuracy"] >= VISION.after and last["eval_n"] == 256
    assert output.count("before: ") == 4 and str(folder / "run/pictures.png") in output
    with Image.open(folder / "run/pictures.png") as image:
        assert min(image.size) > 500


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo_vision") / "seed0"
    return folder, run(folder)


@pytest.mark.rare
def test_the_demo_learns_to_look_with_the_shipped_seed(built):
    check(*built)


@pytest.mark.rare
def test_with_blank_pictures_it_stays_at_chance(built, tmp_path, monkeypatch):
    """The same model and problems with blank pictures, for a third of the steps: in those it learns with pictures."""
    for split in ("train", "test"):
        rows = datasets.load_dataset("parquet", data_files=str(built[0] / f"data/{split}.parquet"), split="train")
        blank = [{"bytes": png(Image.new("RGB", (48, 48), "white")), "path": None}]
        columns = {"images": [blank] * len(rows), "problem": rows["problem"], "answer": rows["answer"]}
        (tmp_path / "data").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(columns, features=rows.features).to_parquet(tmp_path / f"data/{split}.parquet")
    shutil.copytree(built[0] / "model", tmp_path / "model")
    monkeypatch.chdir(REPOSITORY)
    train(tmp_path, 0, "--max_steps", "20", demo=VISION)
    last, same_step = lines(tmp_path)[-1], lines(built[0])[20]
    assert last["step"] == same_step["step"] == 20
    chance = 1 / (MOST + 1)
    assert last["eval_accuracy"] < chance + 0.1 < same_step["eval_accuracy"] - 0.2


@pytest.mark.rare
@pytest.mark.plain_start
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_the_demo_learns_to_look_with_other_seeds(tmp_path, seed):
    check(tmp_path / "demo", run(tmp_path / "demo", "--seed", str(seed)))
