"""The reward functions of reward.py, and the process in which they ask math-verify."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from conftest import GSM8K, REPOSITORY, needs_gsm8k
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import is_alive, wait_until_dead
from servers import wait_until

from grpo.rewards import answers
from grpo.rewards.answers import MathProcess, to_number
from reward import boxed_format_reward, correctness_reward, format_reward, last_number_reward

unhurried = settings(deadline=None)


def pairs(*cases):
    return pytest.mark.parametrize("text, gold", cases)


def graded(*cases):
    return pytest.mark.parametrize("completion, expected", cases)


def correctness(text: str, gold: str) -> float:
    return correctness_reward(["?"], [f"<answer>{text}</answer>"], answer=[gold])[0]


def formatting(completion: str, prompt: str = "?") -> float:
    return format_reward([prompt], [completion])[0]


# --- correctness: strings and numbers


@pairs(("18", "18"), (" 18\n", "18"), ("18", "\t18 "), ("Paris", "Paris"), ("x^2", "x^2"), ("3/0", "3/0"))
def test_the_gold_itself_earns_2(text, gold):
    assert correctness(text, gold) == 2.0


@pairs(
    *[("1080", "1,080"), ("$1,080.00", "1080"), ("1080.", "1080"), ("1,234,567", "1234567"), ("007", "7")],
    *[("-10.0", "-10"), ("\N{MINUS SIGN}10", "-10"), ("\N{EN DASH}10", "-10"), ("- 10", "-10"), ("-$10", "-10")],
    *[("$-10", "-10"), ("-€ 10", "-10"), ("+5", "5"), (".5", "0.5"), ("0.5", "1/2"), ("3 / 4", "0.75")],
    *[("6/8", "3/4"), ("1,000/4", "250"), ("-2 1/2", "-2.5"), ("2 1/2 cups", "2.5"), ("1e3", "1000")],
    *[("2.5E-1", "0.25"), ("50%", "50"), ("50 %", "50"), ("50", "50%"), ("50% of the class", "50")],
    *[("18 apples.", "18"), ("5km", "5"), ("60 km/h", "60"), ("$12/hour", "12"), ("12 dollars per hour", "12")],
    *[("20 cm\N{SUPERSCRIPT TWO}", "20"), ("20 cm^2", "20"), ("25 °C", "25"), ("18 €", "18"), ("18th", "18")],
    *[("18 feet squared", "18"), ("18 cups of tea", "18"), ("18 apples left over", "18"), ("18 stallions", "18")],
    *[("**17**", "17"), ("`17`", "17"), ("**$17$**", "17"), ("$18 = 18.00 dollars", "18"), ("$18$", "18")],
    *[(r"\$18", "18"), (r"50\%", "50"), ("1\N{NO-BREAK SPACE}1/2", "1.5")],
)
def test_the_same_number_earns_1_5(text, gold):
    assert correctness(text, gold) == 1.5


@pairs(
    *[("10", "-10"), ("-10", "10"), ("--10", "10"), ("+-10", "-10"), ("-$-10", "10"), ("18 or 20", "18")],
    *[("18 or twenty", "18"), ("18 18", "36"), ("2 1", "3"), ("18 = 20", "18"), ("18 =", "18"), ("7+3=11", "10")],
    *[("7+3=11", "11"), ("3\N{EN DASH}4", "3"), ("3*3", "3"), ("2^2", "2"), ("5\N{SUPERSCRIPT TWO}", "5")],
    *[("2 x", "2"), ("2x\N{SUPERSCRIPT TWO}", "2"), ("1\N{VULGAR FRACTION ONE HALF} cups", "1"), ("2i", "2")],
    *[("2\N{GREEK SMALL LETTER PI}", "2"), ("3 Quadrillion", "3"), ("5k", "5"), ("$5M", "5"), ("$5 m", "5")],
    *[("**2** **3**", "23"), ("2**3", "23"), ("1,2,3", "123"), ("1,08", "108"), ("1,0800", "10800")],
    *[("0,500", "500"), ("1.080,50", "1080.50"), ("1 080", "1080"), ("1_080", "1080"), ("12:30", "12")],
    *[("2 1/2", "10.5"), ("2 1/2", "1"), ("3/4/5", "3/4"), ("3/x", "3"), ("3/0", "3"), ("3/0", "0"), ("0/0", "1")],
    *[("0.333", "1/3"), ("0x10", "16"), ("inf", "1e999"), ("not 18", "18"), ("less than 18", "18")],
    *[("\N{ARABIC-INDIC DIGIT ONE}\N{ARABIC-INDIC DIGIT EIGHT}", "18"), ("18 apples and 3 pears", "18")],
    *[("", "18"), ("100000000000000000000000000000000000001", "100000000000000000000000000000000000000")],
    # A gold that is no number wants the same string.
    *[("2", "2xy"), ("seat", "east"), ("paris", "Paris"), ("5", ""), ("", ""), ("", " "), ("0", "3/0")],
)
def test_anything_else_earns_nothing(text, gold):
    assert correctness(text, gold) == 0.0


@pytest.mark.parametrize(
    "completion, gold, expected",
    [
        ("<think>10</think><answer>18</answer>", "18", 2.0),
        ("<answer>7</answer> no, <answer>18</answer>", "18", 2.0),
        *[("<answer>18</answer> no, <answer>7</answer>", "18", 0.0), ("<answer>18</answer> or <answer>7", "18", 2.0)],
        *[("<answer>7 <answer>18</answer>", "18", 2.0), ("<answer>7 <answer>18</answer> 20</answer>", "18", 2.0)],
        *[("<answer>18</answer></answer>", "18", 2.0), ("<answer>\n$18\n</answer><|im_end|>", "18", 1.5)],
        *[("18", "18", 0.0), ("<answer>18", "18", 0.0), ("18</answer>", "18", 0.0), ("</answer>18<answer>", "18", 0.0)],
        *[("<ANSWER>18</ANSWER>", "18", 0.0), ("<answer></answer>", "18", 0.0), ("", "18", 0.0)],
    ],
)
def test_the_last_closed_answer_is_the_one_that_counts(completion, gold, expected):
    assert correctness_reward(["?"], [completion], answer=[gold]) == [expected]


@pytest.mark.parametrize(
    "completion, gold, expected",
    [
        *[(r"So it is \boxed{18}.", "18", 2.0), (r"\boxed{18}", "18.0", 1.5), (r"\boxed {$18$}", "18", 1.5)],
        *[(r"First \boxed{17}, no: \boxed{ 18 }", "18", 2.0), (r"\boxed{18}, no: \boxed{17}", "18", 0.0)],
        *[(r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 2.0), (r"\boxed{\boxed{18}}", "18", 2.0)],
        *[(r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right.", 2.0), (r"so\\\boxed{18}", "18", 2.0)],
        *[(r"} \boxed{18} {", "18", 2.0), (r"\boxed{18} then \boxed{17", "18", 2.0), (r"\boxed{18\}", "18", 0.0)],
        *[(r"\boxed{}", "18", 0.0), (r"\boxed{18} <answer>17</answer>", "18", 0.0)],
        (r"\boxed{18}<answer>18", "18", 0.0),
        *[(r"<answer>18</answer> \boxed{17}", "18", 2.0), (r"\boxed{18}", r"\boxed{18}", 2.0)],
        *[("<answer>18</answer>", r"\boxed{17}, or \boxed{18}.", 2.0), ("<answer></answer>", r"\boxed{}", 0.0)],
        *[("<answer>18.0</answer>", "So it is 18. " * 200 + r"\boxed{18}", 1.5)],
        *[(r"So it is \boxed 5.", "5", 2.0), (r"So it is $\boxed 5$", "5", 2.0), (r"\fbox{5}", "5", 2.0)],
        *[(r"\boxed{4} \fbox{ 5 }", "5", 2.0), (r"\boxed \frac{1}{2}, so", r"\frac{1}{2}", 2.0)],
        *[(r"\boxed 1,234.5 in all", "1234.5", 1.5), (r"\boxed -3", "-3", 2.0), (r"\boxed 4, no: \boxed 5", "5", 2.0)],
        *[(r"\fbox 5", "5", 2.0), (r"\boxed{5}", r"it is \boxed 5.", 2.0), ("\\boxed\n5", "5", 2.0)],
        *[(r"\boxed 4", "5", 0.0), (r"\boxed5 or \boxed4", "5", 0.0), (r"\fbox{5} \boxed{4}", "5", 0.0)],
        *[(r"\boxedfive 5", "5", 0.0), (r"\boxed ", "", 0.0)],
    ],
)
def test_a_box_is_an_answer_where_there_is_no_tag_and_in_a_gold(completion, gold, expected):
    assert correctness_reward(["?"], [completion], answer=[gold]) == [expected]


def test_boxes_are_found_in_one_pass():  # several would take hours
    for text in ("\\boxed{" * 100_000, "\\boxed{" * 100_000 + "}" * 100_000, "{" * 400_000):
        assert correctness_reward(["?"], [text], answer=["18"]) == [0.0]


def test_rewards_are_in_the_order_of_the_completions_and_other_columns_are_ignored():
    completions = ["<answer>1</answer>", "<answer>$2</answer>", "<answer>4</answer>"]
    assert correctness_reward(["?"] * 3, completions, answer=["1", "2", "3"], level=[1, 2, 3]) == [2.0, 1.5, 0.0]
    assert format_reward(["?"] * 3, completions, answer=["1", "2", "3"]) == [0.4, 0.4, 0.4]


@pytest.mark.parametrize("gold", [["14"], 14])
def test_a_gold_that_is_no_text_is_named(gold):
    with pytest.raises(TypeError, match=f"the gold answer {re.escape(repr(gold))} is no text: change the dataset"):
        correctness_reward(None, ["<answer>14</answer>"], [gold])


def test_a_gold_for_each_completion_is_demanded():
    with pytest.raises(ValueError):
        correctness_reward(["?"], ["<answer>1</answer>"], answer=["1", "2"])


INTEGERS = st.integers(-(10**30), 10**30)
STYLES = ["{}", "{:,}", "${:,}", "{:,}.00", "{} %", "{:,} apples", " {}.", "{0} = {0:,}", "{}/1"]


@unhurried
@given(INTEGERS, st.sampled_from(STYLES), st.sampled_from(["{}", "{:,}", "${}", "{}%"]))
def test_an_integer_matches_however_it_is_written(number, style, gold_style):
    assert correctness(style.format(number), gold_style.format(number)) >= 1.5


@unhurried
@given(INTEGERS, INTEGERS, st.sampled_from(STYLES), st.sampled_from(STYLES))
def test_a_different_integer_never_matches(number, other, style, other_style):
    if number != other:
        assert correctness(style.format(number), str(other)) == 0.0
        assert correctness(f"{style.format(number)} or {other_style.format(other)}", str(number)) == 0.0


@unhurried
@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6))
def test_fractions_are_exact(top, bottom):
    assert to_number(f"{top}/{bottom}") == Fraction(top, bottom)


@unhurried
@given(st.decimals(allow_nan=False, allow_infinity=False, places=6))
def test_decimals_are_exact(number):
    assert to_number(f"{number:f}") == Fraction(number)


@unhurried
@given(st.lists(st.integers(0, 999), min_size=2, max_size=5))
def test_a_list_is_no_number_unless_its_commas_are_thousands_separators(numbers):
    text = ",".join(str(number) for number in numbers)
    grouped = numbers[0] > 0 and all(number >= 100 for number in numbers[1:])
    assert (to_number(text) is not None) == grouped


@unhurried
@given(
    st.text() | st.text(alphabet="0123456789.,/-+=%$eE x\\", max_size=40),
    st.sampled_from(["18", "-1,080", "3/4", "Paris", "", "3/0"]),
)
def test_no_text_crashes_the_rewards_or_leaves_their_values(text, gold):
    assert correctness(text, gold) in {0.0, 1.5, 2.0}
    assert formatting(text) in {0.0, 0.2, 0.4, 0.6, 0.8}
    assert to_number(text, allow_unit=False) in {None, to_number(text)}


@pytest.mark.timed
@pytest.mark.parametrize(
    "text",
    [
        *["9" * 5000, "9" * 1_000_000, "1e999999999", "1e-999999999/1e999999999", "1," * 100_000, "1,111" * 199],
        *["1=" * 499 + "1", "- " * 100_000, " " * 1_000_000 + "x", "1 " + "a " * 490 + "9", "1 " + "illi" * 240 + "9"],
        *["<answer>" * 100_000, "</answer>" + "<|im_end|> " * 50_000 + "x", "a" * 499 + "1 = 5", "\\" * 490 + "1 = 5"],
        *["(" * 499 + "=" + ")" * 499, "1,000" * 190 + "\\", "\\text{" * 160, "<think>" * 100_000],
        *["\\boxed{" * 120 + "}" * 120, "$" * 999, "\\(" * 499, "\\[" + "\\[x" * 300, "_{" * 400 + "=\\"],
    ],
)
def test_long_or_huge_text_neither_crashes_nor_hangs(text):
    start = time.monotonic()
    assert correctness(text, "18") == 0.0
    assert formatting(text) < 0.8
    assert time.monotonic() - start < 2


@needs_gsm8k
@pytest.mark.parametrize("split, size", [("train", 7473), ("test", 1319)])
def test_every_gold_of_gsm8k_earns_full_marks(split, size):
    lines = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    golds = [json.loads(line)["answer"].split("####")[1].strip() for line in lines]
    assert len(golds) == size
    for gold in golds:
        bare = gold.replace(",", "")
        assert correctness(gold, gold) == 2.0
        assert correctness(f"{int(bare):,}.00", gold) == 1.5
        assert correctness(bare, gold) == (2.0 if bare == gold else 1.5)
        assert correctness(str(int(bare) + 1), gold) == correctness(str(-int(bare) or 1), gold) == 0.0


CHANGING_WORDS = re.split(
    "[|]",
    "Millionen|Milliarden|millones|milhões|milioni|tausend|hundert|Mio|Mrd|Dutzend"
    "|squared|cubed|square|factorial|tenths|halves|half|quarters|hundredth|millionths|dozens of eggs|thousand miles"
    "|million people|billion|zillion|grand|lakh|gross|score|pair|mil|thou|mega|basis points|ppm|ten|fourteen|twenty"
    "|twomillion|twenty-two|doubled|triple|quadrupled|twice|tenfold|over two|times two|times|plus two|minus|minus two"
    "|by two|to two|divided by two|multiplied|mod five|base eight|hex|choose two|to the fourth|power|square root|log"
    "|sin x|pi|tau|xyz|x|i|repeating|remainder two|inverse|negative|below zero|less|loss|short|off|or more|or twenty"
    "|and a half|and|at least|minimum|odd|ish|approximately|not|but twenty|instead|apples and pears|cups squared"
    "|out of twenty|per dozen|percent of ninety|third graders|K|M|bn|mn|万|миллионов",
)


@pytest.mark.parametrize("form", ["18 {}", "18{}", "$18 {}", "$18$ {}", "18% {}", "18 cm {}"])
def test_a_word_that_may_change_the_value_is_no_unit(form):
    # These stand for a product, a date, an ordinal, an area: read as part of a unit, they change nothing.
    fine = {("18{}", "half"), ("18 cm {}", "squared"), ("18 cm {}", "cubed")}
    paid = [word for word in CHANGING_WORDS if correctness(form.format(word), "18") and (form, word) not in fine]
    assert paid == []


# --- format


@graded(
    *[("<think>2+2</think>\n<answer>4</answer>\n \n", 0.8), ("Well. <think></think> so <answer></answer>", 0.8)],
    *[("<think>2+2</think> <answer>4</answer> Done!", 0.6), ("<think>2+2 <answer>4</answer>", 0.6)],
    *[("2+2</think> <answer>4</answer>", 0.6), ("<think>2+2</think> <answer>4", 0.6)],
    *[("<think><think>2+2</think> <answer>4</answer>", 0.6), ("<think>2</think></think> <answer>4</answer>", 0.6)],
    *[("<think>2+2</think> <answer>5 <answer>4</answer>", 0.6), ("<answer>4</answer> <think>2+2</think>", 0.4)],
    *[("<think>2+2</think>", 0.4), ("<answer>4</answer>", 0.4), ("</think>2+2<think> </answer>4<answer>", 0.4)],
    *[("<think>2</think> <answer>4</answer>" * 2, 0.0), ("</answer><answer></think><think>", 0.2), ("4", 0.0)],
    *[("<think>", 0.2), ("<THINK>2+2</THINK> <ANSWER>4</ANSWER>", 0.0)],
)
def test_format(completion, expected):
    assert formatting(completion) == expected


@pytest.mark.parametrize("prompt", ["assistant\n<think>", "assistant\n<think>\n", "Write <think> first. <think>\n\n"])
@graded(
    *[("2+2</think> <answer>4</answer>", 0.8), ("\n2+2\n</think>\n\n<answer>4</answer><|im_end|>", 0.8)],
    *[("<think>2+2</think> <answer>4</answer>", 0.6), ("2+2</think> <answer>4</answer> Done!", 0.6)],
    *[("2+2 <answer>4</answer>", 0.6), ("<answer>4</answer> 2+2</think>", 0.4), ("", 0.2)],
)
def test_a_tag_that_the_prompt_opens_is_there(prompt, completion, expected):
    assert formatting(completion, prompt) == expected


def test_other_tags_that_the_prompt_opens_are_there():
    tags, completion = ("reasoning", "answer"), "2+2</reasoning><answer>4</answer>"
    for prompt, expected in (("assistant\n<reasoning>\n", 0.8), ("assistant\n<think>\n", 0.6)):
        assert format_reward([prompt], [completion], tags=tags) == [expected]


@pytest.mark.parametrize("begin", ["assistant\n", "<|Assistant|>", "[/INST]", "Write <think> first.\nassistant\n"])
@graded(
    *[("x</think><answer>4</answer>", 0.8), ("<think>x</think><answer>4</answer>", 0.6)],
    *[("<answer>4</answer>", 0.6), ("<answer>4</answer>x</think>", 0.4)],
)
def test_a_thought_that_the_prompt_begins_is_open(begin, completion, expected):
    for thought in ("<think>\nLet me", "<think>\nIf a < b\nthen "):
        assert formatting(completion, begin + thought) == expected


@pytest.mark.parametrize("begin", ["", "<|im_start|>assistant\n", "Use <think> tags.\nassistant\n"])
@graded(
    *[("<answer>4</answer>", 0.8), ("2+2 <answer>4</answer><|im_end|>", 0.8)],
    *[("<think>2+2</think> <answer>4</answer>", 0.8), ("2+2</think> <answer>4</answer>", 0.6)],
    *[("<think>2+2 <answer>4</answer>", 0.6), ("<answer>4</answer> Done!", 0.6), ("4", 0.4)],
)
def test_a_thought_that_the_prompt_opens_and_closes_is_there(begin, completion, expected):
    prompt = begin + "<think>\n\n</think>\n\n"
    assert formatting(completion, prompt) == expected


TEMPLATE = "<|im_start|>{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "prompt",
    [
        *["Write <think> first.", "", "<think>.", "Write in <think></think> first.", "Write in <think></think>"],
        *[TEMPLATE.format("user\n<think>\nWhat is that?"), TEMPLATE.format("user\nWhat is this?\n<think>")],
        TEMPLATE.format("user\n<think>\n\n</think>\n\n"),
        TEMPLATE.format("system\nWrite\n<think>\n...\n</think>\n<answer>\n...\n</answer>"),
        "[INST] Write\n<think>\nfirst. [/INST]",
        "<start_of_turn>user\n<think>\n2+2?<end_of_turn>\n<start_of_turn>model\n",
        *["<｜User｜>\n<think>\n2+2?<｜Assistant｜>", "Write\n<think>\nso\n</think>\n"],
    ],
)
def test_a_tag_that_stands_elsewhere_in_the_prompt_is_not(prompt):
    assert formatting("2+2</think> <answer>4</answer>", prompt) == 0.6
    assert formatting("<think>2+2</think> <answer>4</answer>", prompt) == 0.8


@pytest.mark.parametrize(
    "ending, ends",
    [
        *[("<|im_end|>", True), ("\n<|im_end|>\n<|endoftext|><|endoftext|>", True), ("</s>", True)],
        *[("<|eot_id|>", True), ("<end_of_turn>", True), ("<|im_start|>", False), ("<|im_end|>!", False), (".", False)],
        ("<think>", False),
    ],
)
def test_only_end_tokens_and_white_space_may_follow(ending, ends):
    assert (formatting("<think>2+2</think><answer>4</answer>" + ending) == 0.8) is ends


MARKS = "<think>", "</think>", "<answer>", "</answer>"
PIECES = st.lists(st.sampled_from([*MARKS, "4", " ", "<|im_end|>"]), max_size=8)


@unhurried
@given(PIECES)
def test_the_full_format_is_the_four_tags_once_in_order_with_nothing_behind(pieces):
    marks = tuple(piece for piece in pieces if piece in MARKS)
    behind = pieces[max((i for i, piece in enumerate(pieces) if piece in MARKS), default=0) + 1 :]
    assert (formatting("".join(pieces)) == format_reward.full_reward) is (marks == MARKS and "4" not in behind)


# --- mathematics beyond numbers


def fake_process(body: str, deadline: float = 1.0) -> MathProcess:
    """A `MathProcess` whose process runs `body` for each [text, gold]; what it sets `reply` to is the answer."""
    script = f"""
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    text, gold = json.loads(line)
    {body}
    print(json.dumps(reply), flush=True)
"""
    return MathProcess([sys.executable, "-c", script], deadline)


def test_without_math_verify_expressions_are_compared_as_strings(monkeypatch):
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    monkeypatch.setattr(answers, "math_process", None)  # it is not asked
    assert correctness(r"\frac{3}{4}", r"\frac{3}{4}") == 2.0
    assert correctness("1+x^2", "x^2+1") == correctness("0.75", r"\frac{3}{4}") == 0.0


@pairs(
    *[("14{,}400", "14400"), ("1{,}234{,}567.5", "1234567.5"), ("x = 5", "5"), ("n=18 apples", "18")],
    *[("x = 5 = 5.0", "5"), (r"\text{(B)}", "B"), (r"\textbf{(B)}", "B"), ("(B)", "B"), ("B", r"\text{(B)}")],
    *[(r"\text{east}", "east"), ("east", r"\text{east}"), (r"\text{Monday}", "Monday")],
    *[(r"\mathrm{ Monday }", "Monday"), (r"\text{18}", "18")],
)
def test_words_choices_and_variables_need_no_math_verify(monkeypatch, text, gold):
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    assert correctness(text, gold) == 1.5


@pairs(
    *[("14{,}40", "1440"), ("{,}", "0"), ("x = 5 = 6", "5"), ("x = 5 or 6", "5"), ("5 = x", "5"), ("x == 5", "5")],
    *[("x + 3 = 5", "5"), ("y = 5", "x = 5"), ("2^{10}", "10"), ("5!", "5"), (r"\text{(A)}", "B")],
    *[(r"\text{(B) or (C)}", "B"), ("(B)(C)", "B"), ("(b)", "B"), (r"\text{seat}", "east")],
    *[("seat", r"\text{east}"), (r"\text{east or west}", "east"), (r"\text{18 or 20}", "18"), (r"\text{}", "east")],
)
@pytest.mark.parametrize("installed", [False, True])
def test_other_words_choices_and_variables_earn_nothing(monkeypatch, text, gold, installed):
    if not installed:
        monkeypatch.setattr(answers, "find_spec", lambda name: None)
    assert correctness(text, gold) == 0.0


def test_the_process_starts_at_the_first_question_and_stays():
    process = fake_process("reply = text == gold", deadline=10)
    assert process.process is None
    assert process.equal("x", "x") is True
    pid = process.process.pid
    assert process.equal("x", "y") is False
    assert process.process.pid == pid
    process.stop()
    assert not is_alive(pid)


@pytest.mark.timed
def test_a_question_that_overruns_is_answered_no_and_its_process_killed():
    process = fake_process("reply = text == 'easy' or time.sleep(60)")
    assert process.equal("easy", "x")
    pid = process.process.pid
    start = time.monotonic()
    assert process.equal("hard", "x") is False
    assert 0.9 < time.monotonic() - start < 5
    assert not is_alive(pid)
    assert process.equal("easy", "x")
    process.stop()


@pytest.mark.parametrize("death", ["sys.exit(1)", "os.abort()"])
def test_a_question_that_ends_the_process_is_answered_no(death):
    process = fake_process(f"reply = text == 'easy' or {death}", deadline=10)
    assert process.equal("hard", "x") is False
    assert process.equal("easy", "x") is True
    process.process.kill()  # from outside
    process.process.wait()
    assert process.equal("easy", "x") is True
    process.stop()


def test_a_process_that_cannot_start_stops_the_run():
    process = MathProcess([sys.executable, "-c", "raise SystemExit(1)"], deadline=10)
    with pytest.raises(RuntimeError, match="math-verify is installed but does not start"):
        process.equal("x", "x")
    assert process.process is None


def test_an_interrupted_question_leaves_no_reply_to_the_next(tmp_path):
    asked = tmp_path / "asked"
    process = fake_process(f"reply = text == 'easy' or open({str(asked)!r}, 'w') and time.sleep(60)", deadline=30)
    assert process.equal("easy", "x")

    def interrupt() -> None:
        wait_until(asked.exists)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with ThreadPoolExecutor(1) as threads, pytest.raises(KeyboardInterrupt):
        threads.submit(interrupt)
        process.equal("x", "x")
    assert process.process is None


def test_threads_get_their_own_answers():
    process = fake_process("reply = text == gold", deadline=10)

    def is_right(name: str) -> bool:
        return all(process.equal(f"{name}{i}", f"{name}{i - i % 2}") is (i % 2 == 0) for i in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, "abcd"))
    process.stop()


def test_a_fork_asks_a_process_of_its_own():
    script = """
import os, sys
from grpo.rewards.answers import MathProcess
same = 'import json, sys; print("ready", flush=True)\\nfor line in sys.stdin:\\n  a, b = json.loads(line)'
process = MathProcess([sys.executable, "-c", same + "\\n  print(json.dumps(a == b), flush=True)"], 10)
assert process.equal("x", "x")
pid = process.process.pid
process.lock.acquire()  # as by a thread that asks meanwhile
if (child := os.fork()) == 0:
    is_right = process.equal("y", "y") and not process.equal("x", "y") and process.process.pid != pid
    process.stop()
    os._exit(not is_right)
process.lock.release()
assert process.equal("x", "x") and process.process.pid == pid
assert os.waitpid(child, 0)[1] == 0
assert process.equal("z", "z") and process.process.pid == pid
"""
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", script]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=60)


@pytest.fixture
def parent(tmp_path):
    """A running script that has asked a process its first question, and has printed the pid of that process."""
    script = tmp_path / "main.py"
    script.write_text("""
import sys
from grpo.rewards.answers import MathProcess
answer_yes = 'import sys; print("ready", flush=True); [print("true", flush=True) for line in sys.stdin]'
process = MathProcess([sys.executable, "-c", answer_yes], 10)
process.equal("x", "x")
try:
    print(process.process.pid, flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    print(process.equal("x", "x"), process.process.pid, flush=True)
""")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script], env=environment, start_new_session=True, **pipes) as parent:
        yield parent
        parent.kill()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_process_ends_with_its_parent(parent, end):
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    if end:
        parent.send_signal(end)
    else:
        parent.stdin.close()
    assert wait_until_dead(pid, 5)


def test_the_process_leaves_ctrl_c_to_its_parent(parent):
    pid = int(parent.stdout.readline())
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.stdout.readline() == f"True {pid}\n"


@pytest.fixture(scope="module")
def math_verify():
    pytest.importorskip("math_verify")
    yield answers.math_process
    answers.math_process.stop()


HEDGES = [
    *[r"$\frac13 = \frac12$", r"$\frac13$ = $\frac12$", r"\(\frac13 = \frac12\)", r"\boxed{\frac13 = \frac12}"],
    *[r"(\frac13 = \frac12)", r"{\frac13 = \frac12}", r"\frac13 = \frac12)", r"\frac13 \equiv \frac12"],
    *[r"\frac13 \text{ cups} = \frac12 \text{ cups}", r"\pi = \frac12", r"\sin(30) = \frac12", r"2^{3} = \frac12"],
    r"x = \frac13 = y = \frac12",
]


@pytest.mark.parametrize(
    "name, value",
    [
        *[("(x,y)", "(1,2)"), (r"(r,\theta)", r"\left(3,\frac{\pi}{2}\right)"), (r"\text{Area}", r"9\pi")],
        *[(r"A = \pi r^2", r"9\pi"), (r"A = \frac12 bh", r"6\sqrt2"), ("|z|", r"\sqrt5"), ("AB^2", r"2\sqrt3")],
        *[(r"\frac{a}{b}", r"\frac23"), ("a+b+c", r"\frac72"), ("a+2b", r"\frac72"), (r"x + \frac1x", r"\sqrt5")],
        *[("x_1 + x_2", r"\sqrt5"), (r"\overline{AB}", "5"), (r"\mathbf{v}", r"\begin{pmatrix}1\\2\end{pmatrix}")],
        *[(r"\sin^2 x", r"\frac34"), (r"\frac{dy}{dx}", "2x"), (r"f\left(\frac12\right)", r"\sqrt3")],
        *[("P(X=2)", r"\frac12"), (r"\sum_{i=1}^{n} i", r"\frac{n(n+1)}{2}"), (r"\log_2 8", "3")],
    ],
)
def test_the_left_side_of_an_equation_may_name_what_is_asked_for(math_verify, name, value):
    assert correctness(f"{name} = {value}", value) == 1.5


@pytest.mark.parametrize(
    "form",
    [r"18 \text{ {}}", r"18\text{{}}", r"18\,\mathrm{{}}", r"\frac{36}{2} {}", r"\frac{36}{2} \mbox{ {}}", r"18\ {}"],
)
def test_a_word_that_may_change_the_value_is_no_unit_in_latex(math_verify, form):
    assert [word for word in CHANGING_WORDS if correctness(form.replace("{}", word), "18")] == []


@pairs(
    *[("1+2", "3"), ("7+3=10", "10"), ("(1 + 2) * 3", "9"), ("1.1+2.2", "3.3"), ("10^6", "1,000,000")],
    *[(r"6.02 \times 10^{23}", "6.02e23"), (r"1.6 \cdot 10^{-19}", "1.6e-19")],
    *[(r"0.1\overline{6}", r"\frac{1}{6}")],
    *[(r"18 \text{ cm}^2", "18"), (r"\frac{1}{2}\text{ cup}", r"\frac12"), (r"9\pi cm", r"9\pi")],
    *[("10 cm", r"10\text{ cm}"), (r"18^{\circ}", "18"), ("1080", r"1,\!080"), ("0.75", r"\frac{3}{4}")],
    *[(r"\frac{3}{4}", "0.75"), (r"\dfrac{6}{8}", "3/4"), (r"\boxed{18}", "18"), (r"\(18\)", "18")],
    *[(r"$\frac{36}{2}$", "18"), ("$x^2 + 1$", "x^2+1"), (r"\sqrt{18}", r"3\sqrt{2}"), ("2yx", "2xy")],
    *[("(1, 2)", "(1,2)"), (r"\{2, 1\}", r"\{1,2\}"), ("[0, 1)", "[0,1)"), ("2^{10}", "1024"), ("-2^{2}", "-4")],
    *[("10!", "3628800"), (r"x = \frac12", r"\frac12"), (r"P(A) = \frac12", r"\frac12"), (r"\sqrt{4} = 2", "2")],
    *[(r"\angle ABC = \frac12", r"\frac12"), (r"f(x) = x^2+1", "x^2+1"), (r"(x-1)^2 = x^2-2x+1", "x^2-2x+1")],
    *[(r"\frac24 = \frac12", r"\frac12"), ("y = 2x+1", "y=2x+1"), ("5", "x = 5"), ("2,1", "1,2")],
    *[(r"1 \text{ and } 2", "1,2"), (r"x \in \{1,2\}", r"\{1,2\}"), ("x=1, y=2", "(1,2)"), (r"\{5\}", "5")],
    *[(r"\left(1,2\right)", "(1,2)"), ("(3,4),(1,2)", "(1,2),(3,4)"), ("(x+1)(x+2)", "(x+2)(x+1)")],
    # Delimiters around an equation.
    *[(r"$x = \frac{1}{2}$", r"\frac{1}{2}"), (r"\(x = 2\sqrt{3}\)", r"2\sqrt{3}"), (r"\(x=5\)", "5")],
    *[(r"\[x=2\]", "2"), (r"$$x=2$$", "2"), (r"\boxed{x=5}", "5"), (r"$\boxed{x=5}$", "5")],
    *[(r"\boxed{x=\frac12}", r"\frac12"), (r"x = \boxed{\frac12}", r"\frac12"), (r"\boxed{7+3=10}", "10")],
    *[(r"\(9+9\)", "18"), (r"9\cdot 120 = 1,080", "1080"), (r"$\frac24$ = $\frac12$", r"\frac12")],
    # Lists.
    *[("-2, 2", r"\pm 2"), (r"\sqrt2, -\sqrt2", r"\pm\sqrt2"), ("x = -2, 2", r"\pm 2"), (r"x = \pm 2", "-2,2")],
    *[(r"\{-2, 2\}", r"\pm 2"), (r"x=-2 \text{ or } x=2", "-2,2"), ("x=-2 or x=2", "-2,2")],
    *[("$x=1$, $y=2$", "1,2"), ("(1,2) and (3,4)", "(1,2), (3,4)")],
)
def test_math_verify_finds_expressions_equal(math_verify, text, gold):
    assert correctness(text, gold) == 1.5


DIFFERENT = {  # texts, with two spaces between, by gold
    r"\frac12": r"1/3 = 1/2  \frac12 = x  \frac13 = \frac12  \frac12 = \frac13  x = \frac13 = \frac12  "
    r"\frac13, \frac12  \boxed{\frac12} = \frac13  \frac13; \frac12  \frac13 \quad \frac12  \frac13 \\ \frac12  "
    r"\frac13 \neq \frac12  \frac13 \Rightarrow \frac12  \frac13 \approx \frac12  \frac13 \text{ or } \frac12",
    "18": r"20 \boxed{18}  2\cdot\boxed{18}  18 \text{ or more}  18 \text{ or } 20  \{18, 20\}  \$20 = \$18  "
    r"\$18 = \$20  20 \text{ km} = 18 \text{ km}  \boxed{18 \text{ or } 20}  x=18 \text{ or } x=20  "
    r"\boxed{18} \boxed{20}  \boxed{20} \boxed{18}  \begin{cases} 18 \\ 20 \end{cases}",
    r"\frac{3}{4}": "0.74  \\frac{3}{  }{}{}{}{}{  \n  \ud800",
    r"\pm 2": r"-2, 2, 2  2, -2, \pm 2  -2, 3  x = -2, 3",
    "(1,2)": r"(2,1)  x = (1,3) = (1,2)  (x,y) = (2,1)  \{1,2\}  \left\{1,2\right\}  [1,2]  (1,3) = (1,2)",
    "5": r"\boxed{x+3=5}  \frac{x}{2} = 5",
    "3": r"\pi = 3  \pm 3",
    "2x+3": "2x+3t  2x+3_2",
    "x^2+1": "x^2-1  x^2-1 = x^2+1",
    "1,2": "1{,}2  1,1,2  1,2,1",
    **{r"\frac13": "0.333333", r"\sqrt2": "1.414214", "38": r"20\ 18", "81": r"1\,080", "2h": "2", "x^1": "x'"},
    **{"-2,2": r"x=-2 \text{ or } x=3", r"\sqrt5": "|z| = 5", "2": r"\pm 2", "-3": r"\pm 3", "1,1,2": "1,2"},
    **{r"\{1,2\}": r"(1,2)  \{1,1,2\}", "[0,1]": "[0,1)", "9": "2^3", "10": "10!", "4": "-2^{2}", "east": "seat"},
    **{"1018": r"\$1,020 = \$1,018", r"\frac12, 2": r"\frac13 = \frac12, 2"},
}


@pytest.mark.parametrize(
    "text, gold",
    [(text, gold) for gold, texts in DIFFERENT.items() for text in texts.split("  ")]
    + [(text, r"\frac12") for text in (*HEDGES, "\\frac12\n\\frac13")],
)
def test_math_verify_finds_expressions_different(math_verify, text, gold):
    assert correctness(text, gold) == 0.0


@pytest.mark.slow
def test_math_verify_is_cut_short_by_the_time_that_it_computes(math_verify):
    assert correctness("1+x^2", "x^2+1") == 1.5
    process = math_verify.process
    assert correctness("9^{9^{9^9}}", r"5^{3^2}+x") == 0.0
    assert process.returncode == -signal.SIGPROF
    assert correctness("1+x^2", "x^2+1") == 1.5


def test_math_verify_is_not_asked_about_numbers_and_words(math_verify):
    math_verify.stop()
    assert correctness("18 apples", "18") == 1.5
    assert correctness("18 or 20", "18") == correctness("seat", "east") == correctness("9" * 1001, "x+1") == 0.0
    assert math_verify.process is None


@pytest.mark.slow
def test_math_verify_ends_with_its_parent_even_in_a_computation_and_never_runs_its_script(math_verify, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "import os, threading, time\n"
        "print('started', flush=True)\n"
        "from grpo.rewards.answers import math_process\n"
        "assert math_process.equal('1+x', 'x+1')\n"
        "print(math_process.process.pid, flush=True)\n"
        "threading.Thread(target=math_process.equal, args=('9^{9^{9^9}}', '5^{3^2}+x')).start()\n"
        "time.sleep(1)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment, timeout=60)
    started, pid = done.stdout.split()
    assert started == "started"
    assert wait_until_dead(int(pid), 10 * answers.CPU_SECONDS)


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet="0123x+-^{}\\frac()=, ", max_size=12), st.sampled_from([r"\frac{1}{2}", "x^2+1"]))
def test_math_verify_survives_any_text(text, gold):
    pytest.importorskip("math_verify")
    assert correctness(text, gold) in {0.0, 1.5, 2.0}


BOXED = {
    "<think>2+2</think> So \\boxed{4}.": 1.0,
    " <think>2\n+2</think>\n\\boxed{\\frac{1}{2}}": 1.0,
    "<think>2+2</think> 4": 0.0,
    "\\boxed{4} <think>2+2</think>": 0.0,
    "Well, <think>2+2</think> \\boxed{4}": 0.0,
}
OPENED = "2+2</think> \\boxed{4}"


@pytest.mark.parametrize("completion", BOXED)
def test_a_box_after_the_thought_is_the_form_of_easyr1(completion):
    assert boxed_format_reward([""], [completion]) == [BOXED[completion]]
    assert boxed_format_reward(["Add.", "<assistant>\n<think>\n"], [OPENED] * 2) == [0, 1]


@settings(max_examples=500)
@given(st.lists(st.sampled_from(["<think>", "</think>", "\\boxed{", "}", "\n", " ", "x"]), max_size=12).map("".join))
def test_the_form_is_that_of_easyr1s_expression(completion):
    """Whose time grows with the cube of the length."""
    theirs = re.fullmatch(r"\s*<think>.*</think>.*\\boxed\{.*\}.*", completion, re.DOTALL)
    assert boxed_format_reward([""], [completion]) == [float(bool(theirs))]


def test_the_last_number_of_a_text_is_its_answer():
    texts = ["It is 1,234.0 in all.", "3 or 4", "4 or 3.", "none", "minus -5", "x 2"]
    golds = ["1234", "3", "3", "3", "-5", None]
    assert last_number_reward(texts, golds) == [1.0, 0.0, 1.0, 0.0, 1.0, None]
    # What is no number earns nothing, though both sides are none, and ends no run.
    texts, golds = ["it is 0,123", "007,123", "1" * 5000, "1" * 5000], ["seat", "", "2 million", "1" * 5000]
    assert last_number_reward(texts, golds) == [0.0] * 4
    with pytest.raises(TypeError, match=r"^the gold answer \[5\] is no text"):
        last_number_reward(["5"], [[5]])
