"""The demo with tools: its task, its tools, its model's chat template, and that it learns to call."""

import json
import random
import re
import shutil
import subprocess
import sys
from itertools import islice

import pytest
from conftest import ENVIRONMENT, REPOSITORY
from rounding import assert_rounded

from demo import shop
from demo.__main__ import TOOLS as DEMO
from demo.__main__ import lines_of
from demo.model import build_model, demonstration_loss
from demo.tools import (
    HABITS,
    ITEMS,
    PIECES,
    TAGS,
    TOOLS,
    WORDINGS,
    Problem,
    build_tokenizer,
    garble,
    guess,
    habitual,
    look_up,
    mistake,
    problems,
    respond,
    write_dataset,
)
from grpo.tools.parse import TurnReader
from grpo.tools.template import AnswerTemplate

PROBLEM = Problem("want", "price", "mug", 37)
CALL = '<tool_call>{"name": "price", "arguments": {"item": "mug", "shop": 37}}</tool_call>'


def some(count: int, held_out: bool = False, seed: int = 1) -> list[Problem]:
    return list(islice(problems(random.Random(seed), held_out), count))


def read_records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(seed=0)


def test_the_right_call_of_a_question_gives_its_answer():
    assert PROBLEM.call == CALL
    for problem in some(300):
        assert problem.item in problem.question and str(problem.shop) in problem.question
        called = json.loads(problem.call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert problem.answer == str(getattr(shop, called["name"])(**called["arguments"]))
    assert {(p.wording, p.tool) for p in some(300)} == {(w, tool) for w in WORDINGS for tool in ("price", "stock")}
    assert HABITS.keys() == WORDINGS.keys()


def test_no_number_of_the_shops_follows_from_another():
    numbers = [tool(item, n) for tool in (shop.price, shop.stock) for item in ITEMS for n in range(10, 100)]
    assert set(numbers) == set(range(10, 100))
    assert all(abs(numbers.count(n) / len(numbers) - 1 / 90) < 0.01 for n in range(10, 100))


@pytest.mark.parametrize("item, number, reason", [("boat", 10, "no shop sells boat"), ("mug", 9, "there is no shop 9")])
def test_a_shop_says_what_it_has_not(item, number, reason):
    with pytest.raises(LookupError, match=reason):
        shop.price(item, number)


def test_demonstrations_call_as_they_should_and_teach_no_number_of_the_shops():
    told = []
    for problem in some(400):
        rng = random.Random(problem.question)
        text = re.fullmatch(r"(<tool_call>.*?</tool_call>)(.*)<answer>(\d\d)</answer>", look_up(problem, rng), re.S)
        called, answer, last = text.groups()
        assert called == problem.call and answer == respond(last)
        told.append(last == problem.answer)
        assert problem.call not in mistake(problem, rng) + garble(problem, rng) + guess(problem, rng)
    assert sum(told) < 20  # one in ninety


def test_the_habits_are_bad_but_for_one_wording():
    drawn = list(islice(habitual(random.Random(0)), 3000))
    for wording in WORDINGS:
        right = [problem.call in text for problem, text in drawn if problem.wording == wording]
        assert (sum(right) / len(right) > 0.8) == (wording == "look up")
        assert sum(right) / len(right) > 0.05


def test_tags_and_pieces_are_tokens_so_that_a_completion_is_short(tokenizer):
    assert len(tokenizer) <= 512
    assert all(len(tokenizer.encode(mark)) == 1 for mark in TAGS + PIECES)
    longest = max(len(tokenizer.encode(look_up(problem, random.Random(0)))) for problem in some(200))
    assert longest + 1 <= 34
    text = look_up(PROBLEM, random.Random(0))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_writes_what_the_demonstrations_have(tokenizer):
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": "mug", "shop": 37}}}
    messages = [
        {"role": "user", "content": PROBLEM.question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "price", "content": "52"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\n<tools>price(item, shop) stock(item, shop) </tools><|im_end|>\n"
        f"<|im_start|>user\n{PROBLEM.question}<|im_end|>\n<|im_start|>assistant\n{CALL}{respond('52')}"
    )


def test_the_trainer_reads_the_models_calls_and_answers_as_it_has_learned(tokenizer):
    ends, ids = [tokenizer.eos_token_id], tokenizer.encode(CALL + "<|im_end|>")
    (call,) = TurnReader(tokenizer, ends, TOOLS, "auto").read(ids, []).calls
    assert (call.name, call.arguments, call.error) == ("price", {"item": "mug", "shop": 37}, "")
    template = AnswerTemplate(tokenizer, ends, TOOLS, None, answers_as_user=False)
    answer = template.encode([{"role": "tool", "name": "price", "content": "52"}])
    assert [*ids, *answer] == tokenizer.encode(CALL + respond("52"))


def test_the_loss_leaves_out_what_the_tool_said(tokenizer):
    model, text = build_model(tokenizer), look_up(PROBLEM, random.Random(0))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROBLEM.question}], tools=TOOLS, add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    parts = re.fullmatch(r"(.*?<\|im_end\|>)(.*assistant\n)(.*)", text + "<|im_end|>", re.S).groups()
    call, said, answer = (tokenizer.encode(part) for part in parts)
    ids = prompt.new_tensor([prompt[0].tolist() + call + said + answer])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    first, second = prompt.shape[1] - 1, prompt.shape[1] - 1 + len(call) + len(said)
    expected = -(logprobs[first : first + len(call)].sum() + logprobs[second:].sum()) / (len(call) + len(answer))
    found = demonstration_loss(model, tokenizer, [(PROBLEM, text)], tools=TOOLS)
    assert_rounded(found, expected)


def test_right_calls_are_counted():
    texts = [f"{CALL}\n<answer>1</answer>", f"{CALL} {CALL}\n", "<answer>1</answer>", CALL]
    assert shop.right_call_reward(texts, [CALL] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_the_dataset_is_disjoint_and_made_by_its_seed(tmp_path):
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        write_dataset(tmp_path / name, seed, train_size=200, test_size=50)
    train, test = (read_records(tmp_path / f"a/{name}.jsonl") for name in ("train", "test"))
    assert (len(train), len(test)) == (200, 50) and all(row.keys() == {"question", "answer", "call"} for row in train)
    assert not {row["call"] for row in train} & {row["call"] for row in test}
    a, b, c = ((tmp_path / name / "train.jsonl").read_text() for name in "abc")
    assert a == b and a != c


def test_a_conversation_is_printed_turn_by_turn():
    messages = [{"role": "assistant"}, {"role": "tool", "content": "52"}, {"role": "assistant"}]
    sample = {"completion": "call\n<answer>52</answer>", "messages": messages}
    assert lines_of(sample) == ["call", "-> 52", "<answer>52</answer>"]
    assert lines_of({"completion": "<answer>52</answer>"}) == ["<answer>52</answer>"]


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.plain_start
@pytest.mark.parametrize("seed", range(6))
def test_the_demo_learns_to_call(tmp_path, seed):
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "demo", "--tools", "--folder", str(folder), "--seed", str(seed)]
    ended = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=550)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = read_records(folder / "run/metrics.jsonl")
    before, after = rows[0], rows[-1]
    assert DEMO.before[0] <= before["eval_accuracy"] <= DEMO.before[1] and after["eval_accuracy"] >= DEMO.after
    assert before["eval_rewards/right_call_reward/mean"] < 0.4 and after["eval_rewards/right_call_reward/mean"] > 0.9
    assert after["tools/failure_frequency"] < rows[1]["tools/failure_frequency"]
    assert "share of held-out problems with the right call: 0." in ended.stdout
    shutil.rmtree(folder)
