"""The demos' tasks: right answers, nothing of the held-out problems in training, and words that their models know."""

import json
import random
import re
from itertools import islice
from types import ModuleType

import datasets
import pytest
import torch
from conftest import write_model
from rounding import assert_rounded
from trainer_runs import lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import english, pictures, real, shop, task, tools, vision
from demo.model import TAGS, answer_of, build_tokenizer, save
from grpo.config.server import ServerConfig
from grpo.model.pictures import load_processor
from grpo.tools.turn_text import AnswerTemplate, TurnReader

TASKS = {"text": task, "tools": tools, "vision": pictures}
PROBLEM = tools.Problem("want", "price", "mug", 37)
CALL = '<tool_call>{"name": "price", "arguments": {"item": "mug", "shop": 37}}</tool_call>'


def some(module: ModuleType, count: int, held_out: bool = False) -> list:
    return list(islice(module.problems(random.Random(1), held_out), count))


@pytest.fixture(scope="module")
def tools_tokenizer():
    return tools.build_tokenizer(seed=0)


@pytest.mark.parametrize("kind", TASKS)
def test_a_dataset_is_made_by_its_seed_and_what_is_held_out_is_not_in_training(tmp_path, kind):
    module = TASKS[kind]
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        module.write_dataset(tmp_path / name, seed, train_size=200, test_size=50)
    ending = "parquet" if kind == "vision" else "jsonl"
    first, same, other = ((tmp_path / name / f"train.{ending}").read_bytes() for name in "abc")
    assert first == same != other
    assert all((tmp_path / name / f"test.{ending}").exists() for name in "abc")
    key = {"text": "calculation", "tools": "call", "vision": "arrangement"}[kind]
    train, test = ({getattr(problem, key) for problem in some(module, 3000, held_out)} for held_out in (False, True))
    assert not train & test
    if kind == "vision":
        return
    train, test = (lines(tmp_path / f"a/{name}.jsonl") for name in ("train", "test"))
    assert (len(train), len(test)) == (200, 50)
    assert len({row["question"] for row in train + test}) == 250
    assert all(row.keys() == {"question", "answer"} | ({"call"} if kind == "tools" else set()) for row in train + test)


def test_sums_are_held_out_by_their_text_and_rewarded_by_the_last_number(tmp_path):
    real.write_dataset(tmp_path, seed=0, train_size=300, test_size=60)
    train, test = (lines(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    questions = [{row["prompt"][-1]["content"] for row in rows} for rows in (train, test)]
    assert [len(side) for side in questions] == [300, 60] and not questions[0] & questions[1]
    for row in train + test:
        a, b = re.fullmatch(r"Answer with a number: (\d\d) \+ (\d\d) =", row["prompt"][-1]["content"]).groups()
        assert row["answer"] == str(int(a) + int(b)) and row["prompt"][:-1] == [{"role": "system", "content": ""}]
    completions = ["10 + 15 = 25", "25", "It is 25.", "25 + 1", "125", "none", ""]
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    assert real.sum_reward(messages, ["25"] * 7) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_dataset_of_pictures_has_the_columns_of_geometry3k(tmp_path):
    pictures.write_dataset(tmp_path, seed=0, train_size=20, test_size=5)
    data = datasets.load_dataset("parquet", data_files={"test": str(tmp_path / "test.parquet")})["test"]
    assert data.column_names == ["images", "problem", "answer"] and len(data) == 5
    assert data[0]["problem"].startswith("<image>") and [image.size for image in data[0]["images"]] == [(48, 48)]


def test_a_problem_reads_as_it_is_calculated():
    for problem in some(task, 500):
        assert tuple(int(n) for n in re.findall(r"\d+", problem.question)) == problem.numbers
        assert eval(problem.calculation) == int(problem.answer)
        assert answer_of(task.steps(problem)) == answer_of(task.blurt(problem)) == problem.answer
        assert answer_of(task.untagged(problem)) is None
    assert answer_of("<answer>1</answer> no, <answer> 2 </answer>") == "2"


def test_the_tokenizer_keeps_any_text_and_cuts_it_the_same_when_loaded(tokenizer):
    trained = build_tokenizer(seed=0)
    for text in (
        "Zoë's\n\n  naïve 日本 🙂\t½ x1y22",
        "it's 1234\n\n a-b (c)!?\r\n  Tom_2x  end",
        task.steps(some(task, 1)[0]),
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(text) == trained.encode(text)
    assert [token for token in tokenizer.tokenize("has 1234 and 56=") if token[-1].isdigit()] == list("123456")
    ids = tokenizer.encode("".join(TAGS) + "<|im_end|>")
    assert len(ids) == 5 and ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(TAGS)


def test_the_right_call_of_a_question_gives_its_answer():
    assert PROBLEM.call == CALL
    for problem in some(tools, 300):
        assert problem.item in problem.question and str(problem.shop) in problem.question
        call = json.loads(problem.call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert problem.answer == str(getattr(shop, call["name"])(**call["arguments"]))
    texts = [f"{CALL}\n<answer>1</answer>", f"{CALL} {CALL}\n", "<answer>1</answer>", CALL]
    assert shop.right_call_reward(texts, [CALL] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_no_number_of_the_shops_follows_from_another_or_is_taught():
    numbers = [tool(item, n) for tool in (shop.price, shop.stock) for item in tools.ITEMS for n in range(10, 100)]
    assert set(numbers) == set(range(10, 100))
    assert all(abs(numbers.count(n) / len(numbers) - 1 / 90) < 0.01 for n in range(10, 100))
    answers = [answer_of(tools.look_up(problem, random.Random(problem.question))) for problem in some(tools, 400)]
    pairs = zip(answers, some(tools, 400), strict=True)
    assert sum(answer == problem.answer for answer, problem in pairs) < 20  # one in ninety


def test_the_trainer_reads_and_writes_turns_as_the_model_has_learned_them(tools_tokenizer):
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": "mug", "shop": 37}}}
    answer = {"role": "tool", "name": "price", "content": "52"}
    messages = [{"role": "user", "content": PROBLEM.question}]
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, answer]
    text = tools_tokenizer.apply_chat_template(messages, tools=tools.TOOLS, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\n<tools>price(item, shop) stock(item, shop) </tools><|im_end|>\n"
        f"<|im_start|>user\n{PROBLEM.question}<|im_end|>\n<|im_start|>assistant\n{CALL}{tools.respond('52')}"
    )
    ends, ids = [tools_tokenizer.eos_token_id], tools_tokenizer.encode(CALL + "<|im_end|>")
    (parsed,) = TurnReader(tools_tokenizer, ends, tools.TOOLS, "auto").read(ids, []).calls
    assert (parsed.name, parsed.arguments, parsed.error) == ("price", {"item": "mug", "shop": 37}, "")
    template = AnswerTemplate(tools_tokenizer, ends, tools.TOOLS, None, answers_as_user=False)
    assert [*ids, *template.encode([answer])] == tools_tokenizer.encode(CALL + tools.respond("52"))


def test_an_answer_is_the_number_of_shapes_that_a_picture_shows():
    circle, square = (pictures.Shape(name, "red", (8, 8), 6) for name in ("circle", "square"))
    problem = pictures.Problem("are there", "circles", (circle, None, square, *[None] * 6))
    assert problem.text == "How many circles are there?" and problem.answer == "1"
    assert pictures.look(problem) == "<think>circles 1, squares 1, triangles 0: circles 1</think><answer>1</answer>"
    expected = {"circle": [False] * 4, "square": [True] * 4, "triangle": [False, False, True, True]}
    for problem in some(pictures, 50):
        image = problem.draw()
        for place, cell in enumerate(problem.cells):
            left, top = place % 3 * 16, place // 3 * 16
            shown = image.crop((left, top, left + 16, top + 16))
            assert len(shown.getcolors()) == (1 if cell is None else 2)
            if cell is not None:
                ends = (-cell.radius, cell.radius)
                places = [(cell.centre[0] + side, cell.centre[1] + end) for end in ends for side in ends]
                assert [shown.getpixel(place) != (255, 255, 255) for place in places] == expected[cell.name]


def test_the_trainer_shows_a_picture_as_the_model_has_learned_it(tmp_path):
    tokenizer = vision.build_tokenizer(seed=0)
    model = vision.build_model(tokenizer)
    save(tmp_path / "model", model, tokenizer, vision.build_processor())
    processor = load_processor(ServerConfig(model_name_or_path=str(tmp_path / "model")), model.config, tokenizer)
    (problem,) = some(pictures, 1)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": problem.text}]}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    prompt = processor.encode(text, [pictures.png(problem.draw())], add_special_tokens=False)
    shown = f"<|im_start|>user\n{pictures.PICTURE}{problem.text}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt) == shown


def test_the_kl_on_general_answers_is_that_of_each_alone(model_folder, tmp_path):
    folders = model_folder, write_model(tmp_path / "other", seed=1)
    answers, kl = english.compare(*folders)
    assert len(answers) == len(english.QUESTIONS) and any(old != new for old, new in answers)
    assert english.compare(model_folder, model_folder)[1] == 0
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    models, found = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders], []
    for question in english.QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            ids = models[0].generate(**prompt, max_new_tokens=english.MAX_NEW_TOKENS, do_sample=False)
            before, after = (model(ids).logits[0, :-1].double().log_softmax(-1) for model in models)
        found.append((before.exp() * (before - after)).sum(-1)[prompt["input_ids"].shape[1] - 1 :])
    assert_rounded(kl, torch.cat(found).mean())
