"""How the functions that `reward_funcs` names are found, called and checked."""

import asyncio
import copy
import functools
import importlib
import inspect
import math
import pickle
import re
import shutil
import signal
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from careless import unchanged
from conftest import REPOSITORY, UNKNOWN_HINT
from told import sampled

from grpo.config.errors import ConfigError, RewardError
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import check_reward_columns
from grpo.data.records import Example, Group, Outcome, StepBatch, make_samples
from grpo.rewards.compute import add_deadline, compute_rewards, load_reward_funcs, start_functions
from grpo.rewards.functions import RECORDED, Logged
from grpo.run.exit import exit_code
from grpo.run.run_folder import to_json
from grpo.wire.picture_files import PicturedPrompt
from reward import correctness_reward, format_reward

# --- finding the functions


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "LOADED = []\n"
        "def length(completions, **columns): return [float(len(c)) for c in completions]\n"
        "def other(prompts, completions, **columns): return [0.0 for _ in completions]\n"
        "def format_reward(completions, **columns): return [0.0 for _ in completions]\n"
        "def helper(text): return text\n"
        "CONSTANT = 3\n"
    )
    return path


def test_functions_of_another_file_are_keyed_by_function_name(user_file):
    functions = load_reward_funcs([f"{user_file}:length", "correctness_reward", f"{user_file}:other"])
    assert list(functions) == ["length", "correctness_reward", "other"]
    assert functions["length"](completions=["abc"]) == [3.0]
    assert functions["length"].__globals__ is functions["other"].__globals__
    assert pickle.loads(pickle.dumps(functions["length"])) is functions["length"]  # as multiprocessing does


def test_a_type_hint_may_name_what_only_a_type_checker_imports(tmp_path):
    (path := tmp_path / "hinted.py").write_text(
        f"def f(completions: {UNKNOWN_HINT}, answer, tags=('a',), **columns) -> {UNKNOWN_HINT}:\n"
        "    return [float(gold) for gold in answer]\n"
    )
    functions = load_reward_funcs([f"{path}:f(b)"])
    assert compute_rewards(functions, ["p"], ["a"], {"answer": ["2"]}).tolist() == [[2.0]]
    examples = [Example(index=0, prompt="x", prompt_ids=[1], columns={"problem": "x"})]
    with pytest.raises(ConfigError, match=r"reward_funcs='f': it asks for gold answers, and rows.jsonl has"):
        check_reward_columns(TrainerConfig(dataset_name="rows.jsonl"), examples, functions)


def test_words_in_brackets_are_a_functions_tags(user_file):
    functions = load_reward_funcs(["format_reward( reasoning, answer)", "correctness_reward"])
    assert list(functions) == ["format_reward", "correctness_reward"] and functions["format_reward"].full_reward == 0.8
    texts = ["<reasoning>a</reasoning><answer>1</answer>", "<think>a</think><answer>1</answer>"]
    config = TrainerConfig(reward_funcs=["format_reward(reasoning,answer)", "correctness_reward"], reward_timeout=20)
    for started, pool in (functions, None), start_functions(functions, config, workers=1):
        columns = {"answer": ["1", "2"], "tags": [["sums"], ["easy"]]}  # a dataset may have any column
        rewards = compute_rewards(started, ["?"] * 2, texts, columns)
        assert rewards.tolist() == [[0.8, 0.4], [2, 0]]
        if pool is not None:
            pool.close()
    plain = load_reward_funcs(["format_reward"])
    assert compute_rewards(plain, ["?"] * 2, texts, columns).tolist() == [[0.4, 0.8]]
    (user_file.parent / "copy (2)").mkdir()
    copied = shutil.copy(user_file, user_file.parent / "copy (2)")
    assert [*load_reward_funcs([f"{copied}:length"])] == ["length"]
    refused = dict.fromkeys(["correctness_reward(a, b)", f"{user_file}:length()"], "it has no argument `tags`")
    refused |= dict.fromkeys(["format_reward(think,)", "format_reward(a, b, c)"], "name its tags .*, as many as")
    for name, reason in refused.items():
        with pytest.raises(ConfigError, match=f"^reward_funcs={re.escape(repr(name))}: {reason}"):
            load_reward_funcs([name])


@pytest.mark.parametrize("name", ["no_such_reward", "TAGS", "", "mine.py", "{}:missing", "{}:CONSTANT", "{}:"])
def test_an_unknown_function_is_refused(user_file, name):
    with pytest.raises(ConfigError, match="^reward_funcs=.*: (reward|mine).py has no such function"):
        load_reward_funcs([name.format(user_file)])


@pytest.mark.parametrize("path", ["nowhere/mine.py", ".", "notes.txt"])
def test_a_missing_file_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").touch()
    with pytest.raises(ConfigError, match=f"^reward_funcs='{path}:f': {path} is not a Python file"):
        load_reward_funcs([f"{path}:f"])


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("\ndef f(", r":2 cannot be imported \(SyntaxError: '\(' was never closed\)"),
        ("\n\nimport nothing\n", r":3 cannot be imported \(ModuleNotFoundError: No module named 'nothing'\)"),
        ("\nwith open('nowhere'): pass", r":2 cannot be imported \(FileNotFoundError: .*'nowhere'\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_the_line(tmp_path, code, why):
    path = tmp_path / "mine.py"
    path.write_text(f"from careless import change_modes, draw; draw(); change_modes(){code}")
    for _ in range(2):
        with unchanged(), pytest.raises(ConfigError, match=rf"^reward_funcs='{path}:f': {path}{why}: correct it$"):
            load_reward_funcs([f"{path}:f"])


NEIGHBOURED = """
from utils import WHO, Judge
{imports}
def {name}(completions, **kwargs):
    import of_{name}
    return [WHO + of_{name}.TENTH for _ in completions]

judged_{name} = Judge()
"""
UTILS = """
WHO = {number}
class Judge:
    def __call__(self, completions, **kwargs): return [WHO for _ in completions]
"""


def test_a_file_imports_its_neighbours_as_a_script_does(tmp_path):
    """Of two folders each its own, also by a name that is a library's or ours, which the process keeps."""
    imports = {"one": "", "two": "from datasets import load\nfrom reward import own\nimport json, torch.nn"}
    for number, (name, lines) in enumerate(imports.items(), 1):
        write_files(
            tmp_path / name,
            {
                "mine.py": NEIGHBOURED.format(name=name, imports=lines),
                "utils.py": UTILS.format(number=number),
                f"of_{name}.py": "TENTH = 0.1\n",
            },
        )
    library = {"datasets.py": "load = 7\n", "reward.py": "own = 7\n", "json.py": "1 / 0\n", "torch/rows.txt": "1\n"}
    write_files(tmp_path / "two", library)
    names = [f"{tmp_path / name}/mine.py:{prefix}{name}" for name in imports for prefix in ("", "judged_")]
    config = TrainerConfig(reward_funcs=names, reward_timeout=20)
    functions = load_reward_funcs(config.reward_funcs)
    started, pool = start_functions(functions, config, workers=1)
    for called in functions, started:  # here, and in another process
        rewards = compute_rewards(called, ["p"], ["a"], {})
        assert rewards[:, 0].tolist() == [1.1, 1, 2.1, 2]
    pool.close()
    assert load_reward_funcs(["correctness_reward"]) == {"correctness_reward": correctness_reward}
    assert importlib.import_module("datasets").Dataset


def test_a_neighbour_that_cannot_be_imported_is_named_with_its_line(tmp_path):
    write_files(tmp_path, {"mine.py": "\nimport utils\n", "utils.py": "\n\nnothing\n"})
    with pytest.raises(ConfigError, match=rf": {tmp_path}/utils.py:3 cannot be imported \(NameError: name 'nothing'"):
        load_reward_funcs([f"{tmp_path}/mine.py:f"])


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("second", ["format_reward", "{}:format_reward", "org/format_reward"])
def test_two_of_one_name_are_refused(user_file, second):
    second = second.format(user_file)
    with pytest.raises(ConfigError, match=f"^reward_funcs='{second}': there is a 'format_reward' already"):
        load_reward_funcs(["format_reward", second])


# --- calling them


def test_rewards_are_a_row_for_each_function_with_nan_for_none():
    def only_short(prompts, completions, **columns):
        return [1 if len(completion) < 3 else None for completion in completions]

    def by_column(prompts, completions, level, **columns):
        return np.array(level) / 2

    functions = {"only_short": only_short, "by_column": by_column}
    rewards = compute_rewards(functions, ["p"] * 3, ["a", "long", "bc"], {"level": [1, 2, 3], "id": [7, 8, 9]})
    assert rewards.dtype == np.float64
    np.testing.assert_array_equal(rewards, [[1.0, np.nan, 1.0], [0.5, 1.0, 1.5]])


def test_no_functions_or_no_completions_give_an_empty_table():
    assert compute_rewards({}, ["p"], ["a"], {}).shape == (0, 1)
    assert compute_rewards({"format_reward": format_reward}, [], [], {}).shape == (1, 0)


FRAGILE = """
def fragile(completions, answer, **kwargs):
    with open({calls!r}, "a") as file: file.write("called ")
    rewards = []
    for gold in answer:
        rewards.append(value(gold))
    return rewards

def value(gold):
    return float(gold)
"""


@pytest.mark.parametrize("kind", ["blocking", "async", "async with a deadline", "in a process"])
def test_a_function_that_raises_is_called_once_and_shows_the_users_lines(kind, tmp_path):
    path, calls = tmp_path / "mine.py", tmp_path / "calls"
    source = FRAGILE.format(calls=str(calls))
    path.write_text(source.replace("def fragile", "async def fragile") if "async" in kind else source)
    timeout = 20.0 if kind in ("async with a deadline", "in a process") else None
    config = TrainerConfig(reward_funcs=[f"{path}:fragile"], reward_timeout=timeout)
    functions, pool = start_functions(load_reward_funcs(config.reward_funcs), config, workers=1)
    with pytest.raises(RewardError) as caught:
        compute_rewards(functions, ["p"] * 3, ["a", "b", "c"], {"answer": ["x", "1", "2"]})
    if pool:
        pool.close()
    place = " on the completion 'a'" if timeout else ""
    assert str(caught.value).startswith(f"Reward function 'fragile' failed{place}: ValueError(")
    lines = caught.value.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    places = [line for line in lines if line.startswith("  File")]
    assert places == [f'  File "{path}", line 6, in fragile', f'  File "{path}", line 10, in value']
    assert lines[-1] == "ValueError: could not convert string to float: 'x'"
    if not timeout:
        assert calls.read_text() == "called "


def test_the_traceback_stands_above_the_line_that_ends_a_program(capsys):
    def work():
        raise RewardError("Reward function 'f' failed: KeyError('x')", "Traceback ...\nKeyError: 'x'\n")

    assert exit_code(work, (RewardError,), "") == 1
    above, line = capsys.readouterr().err.split("\nKeyError: 'x'\n")
    assert above == "Traceback ..." and line.endswith(": error: Reward function 'f' failed: KeyError('x')\n")


def scaled(completions, scale, **kwargs):
    return [float(scale)] * len(completions)


def golds(completions, answer):
    return [float(gold) for gold in answer]


def decorated(function, call):
    @functools.wraps(function)
    def wrapper(**arguments):
        return call(**arguments)

    return wrapper


def only_golds(answer, **others):
    return golds(others["completions"], answer)


async def scaled_later(**arguments):
    return scaled(**arguments)


def of_fewer(*, completions, **_):
    return [2.0] * len(completions)


class Scaled:
    __signature__ = inspect.signature(golds)  # which it does not keep

    def __call__(self, completions, scale=2, **kwargs):
        return scaled(completions, scale)

    of_two = functools.partialmethod(__call__, scale=2)

    def score(self, text):  # of its own
        raise AssertionError


@pytest.mark.parametrize(
    "function",
    [
        functools.update_wrapper(partial(scaled, scale=2), scaled),
        decorated(scaled, partial(scaled, scale=2)),  # adds an argument
        decorated(golds, only_golds),  # leaves some out
        functools.update_wrapper(of_fewer, golds),
        decorated(decorated(golds, only_golds), only_golds),
        functools.update_wrapper(partial(scaled_later, scale=2), scaled),
        Scaled(),
        Scaled().of_two,
        partial(Scaled().__call__, scale=2),
    ],
)
def test_the_arguments_are_those_of_what_is_called(function):
    """functools.wraps and update_wrapper let inspect.signature show those of another function."""
    rewards = compute_rewards({"f": function}, ["p"] * 2, ["a", "b"], {"answer": ["2", "2"]})
    assert rewards.tolist() == [[2.0, 2.0]]


def test_a_class_and_a_function_without_a_signature_are_refused_in_a_sentence(tmp_path):
    (tmp_path / "mine.py").write_text("f = max\nclass Judge:\n    def __call__(self, **kwargs): return [0.0]\n")
    reasons = {"f(a, b)": "it has no argument `tags`", "Judge": "it is a class: make an object of it"}
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=rf"^reward_funcs='.*mine.py:{re.escape(name)}': {reason}"):
            load_reward_funcs([f"{tmp_path}/mine.py:{name}"])
    with pytest.raises(RewardError, match="^Reward function 'f' cannot be called: max.* expected at least 1 argument"):
        compute_rewards({"f": max}, ["p"], ["a"], {})


TWICE = [1.0] * 2
GIVEN = "prompts, completions, answer, trainer_state, log_extra, log_metric"
ASKED = f"cannot be called: it asks for {{}}, and is given {GIVEN}: "
ADAPT = "these are arguments of {}: call it from a function of three lines, as docs/rewards.md shows"
COLUMN = "give the dataset a column of that name, or the argument a default"
BY_PLACE = f"cannot be called: missing 1 required positional argument: 'completions': it is given {GIVEN}: argumen"
UNEXPECTED = f"cannot be called: got an unexpected keyword argument 'prompts': it is given {GIVEN}: end with **kwargs"


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda **_: None, "returned None: is a `return` missing?"),
        (lambda **_: 1.0, "returned 1.0: it must return a list with one reward for each completion"),
        (lambda **_: [1.0], "returned 1 rewards for 2 completions: return one for each"),
        (lambda log_extra, **_: log_extra("x", [1]) or TWICE, "gave log_extra 1 values of 'x' for 2 completions"),
        (lambda gold, **_: TWICE, ASKED.format("gold") + COLUMN),
        (lambda completions: TWICE, UNEXPECTED),
        (lambda completions, /, **_: TWICE, BY_PLACE),
        (functools.cache(lambda **_: TWICE), """failed: TypeError("unhashable type: 'list'")"""),
        (decorated(scaled_later, scaled_later), "returned a coroutine: let what is called be async def, its decorator"),
        (decorated(golds, golds), UNEXPECTED),
        (decorated(scaled, scaled), ASKED.format("scale") + COLUMN),
        (
            lambda data_source, solution_str, ground_truth, extra_info=None: 1.0,
            ASKED.format("data_source, solution_str, ground_truth") + ADAPT.format("verl"),
        ),
        (lambda reward_inputs: [], ASKED.format("reward_inputs") + ADAPT.format("EasyR1")),
        (lambda reward_input, **_: 1.0, ASKED.format("reward_input") + ADAPT.format("EasyR1")),
        (lambda queries, prompts, labels, **_: [], ASKED.format("queries, labels") + ADAPT.format("OpenRLHF")),
    ],
)
def test_a_function_that_is_no_reward_function_is_refused_in_a_sentence(function, reason):
    with pytest.raises(RewardError) as caught:
        compute_rewards({"f": function}, ["p"] * 2, ["a", "b"], {"answer": ["1", "2"]})
    assert str(caught.value).startswith(f"Reward function 'f' {reason}")
    assert caught.value.traceback == "" or "in wrapper" in caught.value.traceback


OF_MESSAGES = [[{"role": "assistant", "content": "a"}]] * 2
OF_TEXT = ["ab", "b"]
TEXT = "completions are text here, not messages, because the dataset's prompts are text"
LISTS = (
    "completions are lists of messages here, as the dataset's prompts are, or an agent's episode: "
    "the text is completion[-1]['content']"
)
DICTS = (
    "the gold answer is a dict of ground_truth, style: name the one to compare with, as in dataset_answer_column "
    "COLUMN.ground_truth"
)


@pytest.mark.parametrize(
    "completions, function, reason",
    [
        (OF_TEXT, lambda completions, **_: [len(each[0]["content"]) for each in completions], TEXT),
        (OF_TEXT, lambda completions, **_: [len(each.get("content")) for each in completions], TEXT),
        (OF_TEXT, lambda prompts, **_: [len(each[-1]["content"]) for each in prompts], TEXT),
        (OF_MESSAGES, lambda completions, **_: [len(each.strip()) for each in completions], LISTS),
        (OF_MESSAGES, lambda completions, **_: [bool(re.search("a", each)) for each in completions], LISTS),
        (OF_MESSAGES, lambda completions, **_: ["<answer>" + each for each in completions], LISTS),
        (OF_TEXT, lambda answer, **_: [gold.strip() for gold in answer], DICTS),
        (OF_TEXT, lambda completions, **_: [each.nothing for each in completions], ""),
        (OF_MESSAGES, lambda completions, **_: [1 / 0], ""),
    ],
)
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_function_for_the_other_kind_of_prompts_is_told_so(completions, function, reason, is_alone):
    """By the words of Python's errors, which may change with its versions."""

    async def later(**arguments):
        return function(**arguments)

    called = add_deadline("f", later, 20.0) if is_alone else function
    golds = [{"ground_truth": "1", "style": "rule"}] * 2
    with pytest.raises(RewardError) as caught:
        compute_rewards({"f": called}, completions, completions, {"answer": golds})
    error, _, found = str(caught.value).rpartition(")")
    assert error.startswith("Reward function 'f' failed") and found == (f": {reason}" if reason else "")


THEIRS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k" and extra_info["index"] < 2
    return {"score": float(solution_str == ground_truth), "acc": True}

def score_batch(reward_inputs: list[dict]):
    return [{"overall": float(row["response"] == row["ground_truth"]), "format": 1.0} for row in reward_inputs]

def reward_func(queries, prompts, labels):
    fits = [query == prompt + label for query, prompt, label in zip(queries, prompts, labels, strict=True)]
    return {"rewards": torch.tensor(fits).float(), "scores": None}

def reward_correct(item, answer):
    return 1 if answer == item["A"] else -1
"""


def test_three_lines_adapt_functions_of_other_trainers(tmp_path):
    """Those of the page, to functions with the arguments and results that the trainers document."""
    (code,) = re.findall(r"```python\n(from theirs .*?)```", (REPOSITORY / "docs/rewards.md").read_text(), re.DOTALL)
    write_files(tmp_path, {"mine.py": code, "theirs.py": f"import torch\n{THEIRS}"})
    columns = {"answer": ["1", "2"], "data_source": ["gsm8k"] * 2, "extra_info": [{"index": 0}, {"index": 1}]}
    for name, wrong in {"of_verl": 0, "of_easyr1": 0, "of_openrlhf": 0, "of_simple_grpo": -1}.items():
        is_chat = name == "of_verl"
        completions = [[{"role": "assistant", "content": text}] if is_chat else text for text in "13"]
        functions = load_reward_funcs([f"{tmp_path}/mine.py:{name}"])
        assert compute_rewards(functions, ["p", "q"], completions, columns).tolist() == [[1, wrong]]


# --- what they log


def logs(prompts, completions, log_extra, log_metric, **kwargs):
    log_extra("length", np.array([len(completion) for completion in completions]))
    log_extra("odd", [float("nan"), {"deep": [float("inf")]}, object][: len(completions)])
    for completion in completions:
        log_metric("letters", np.float32(len(completion)))
    return [0.0 for _ in completions]


async def logs_later(**arguments):
    return logs(**arguments)


@pytest.mark.parametrize("function", [logs, logs_later])
def test_what_functions_log_is_plain_data(function):
    logged = Logged()
    compute_rewards({"f": function}, ["p"] * 3, ["a", "bb", "ccc"], {}, logged=logged)
    assert logged.extra == {"length": [1, 2, 3], "odd": [None, {"deep": [None]}, "<class 'object'>"]}
    assert logged.metrics == {"letters": [1.0, 2.0, 3.0]}
    to_json(logged.extra)


ROWS = [
    {"overall": 0.9, "format": 0, "accuracy": 1.0, "why": "good"},
    {"overall": 0.1, "format": 1, "accuracy": None, "why": "long"},
]
COLUMNS = {"overall": np.array([0.9, 0.1]), "format": [0, 1], "accuracy": [1.0, None], "why": ["good", "long"]}


@pytest.mark.parametrize("returned", [ROWS, COLUMNS], ids=["list of dicts", "dict of lists"])
def test_of_rewards_in_parts_the_overall_trains_and_the_others_are_logged(returned):
    logged = Logged()
    rewards = compute_rewards({"f": lambda **_: returned}, ["p"] * 2, ["a", "b"], {}, logged=logged)
    assert rewards.tolist() == [[0.9, 0.1]]
    assert logged.extra == {"format": [0, 1], "accuracy": [1.0, None], "why": ["good", "long"]}
    assert "rewards/why/mean" not in logged.metrics
    assert logged.metrics["rewards/format/mean"] == [0.0, 1.0]
    assert logged.metrics["rewards/accuracy/mean"][0] == 1.0 and math.isnan(logged.metrics["rewards/accuracy/mean"][1])
    rest = [{"format": 1.0}] * 2 if isinstance(returned, list) else {"format": [1.0] * 2}
    with pytest.raises(RewardError, match="'f' returned format without 'overall', which is trained on: add it"):
        compute_rewards({"f": lambda **_: rest}, ["p"] * 2, ["a", "b"], {})


def test_parts_that_the_first_completion_lacks_are_those_of_the_others():
    logged = Logged()
    returned = [{"overall": 0.1}, {"overall": 0.9, "format": 1, "why": "good"}]
    compute_rewards({"f": lambda **_: returned}, ["p"] * 2, ["a", "b"], {}, logged=logged)
    assert logged.extra == {"format": [None, 1], "why": [None, "good"]}
    assert [*logged.metrics] == ["rewards/format/mean"] and logged.metrics["rewards/format/mean"][1] == 1.0


def test_what_calls_on_single_completions_log_is_that_of_the_batch():
    async def some(completions, log_extra, log_metric, **kwargs):
        if completions != ["bb"]:
            log_extra("length", [len(completions[0])])
            log_metric("letters", len(completions[0]))
        return [0.0]

    logged = Logged()
    compute_rewards({"f": add_deadline("f", some, 20.0)}, ["p"] * 3, ["a", "bb", "ccc"], {}, logged=logged)
    assert logged.extra == {"length": [1, None, 3]} and logged.metrics == {"letters": [1.0, 3.0]}


def test_the_later_of_two_functions_has_the_column_and_a_metric_is_of_both():
    def both(value, log_extra, log_metric, **kwargs):
        log_extra("which", [value])
        log_metric("which", value)
        return [0.0]

    logged = Logged()
    compute_rewards({"first": partial(both, 1), "second": partial(both, 2)}, ["p"], ["a"], {}, logged=logged)
    assert logged.extra == {"which": [2]} and logged.metrics == {"which": [1.0, 2.0]}


def test_a_column_of_the_record_is_not_replaced():
    prompt = PicturedPrompt([1], [b"a"])
    outcome = Outcome(finished=True, messages=[{"role": "assistant", "content": "a"}])
    example = Example(index=0, prompt="p", prompt_ids=prompt, columns={}, gold="4")
    group = Group(id=0, example=example, rollouts=[sampled([2], "a", sampling_logprobs=[0.0], outcome=outcome)])
    batch = StepBatch(
        groups=[group],
        by_function=torch.zeros(1, 1, 1),
        rewards=torch.zeros(1, 1),
        signal=torch.ones(1),
        samples=make_samples(group),
    )
    (line,) = batch.to_lines()
    assert {"step", "phase", *line} == RECORDED and line["messages"] == outcome.messages
    batch = replace(batch, by_function=torch.tensor([[[2.0]], [[math.nan]]]))
    (line,) = batch.to_lines(["right", "short"])
    assert line["rewards/right"] == 2.0 and math.isnan(line["rewards/short"])  # null in the file
    for name in RECORDED:
        with pytest.raises(ValueError, match=f"^log_extra: completions.jsonl has a field '{name}': choose another"):
            Logged().log_extra(name, ["x"])


@pytest.mark.parametrize(
    "bad",
    [
        *(float("nan"), float("inf"), -float("inf"), "1.0", [1.0], 1j, np.float32("nan")),
        *(10**309, -(10**309), Fraction(10**400, 3), np.longdouble("1e400"), 10**5000),  # beyond float64
        *(1e101, -1e300, 10**308),  # their squares would be
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_a_reward_that_is_no_finite_number_is_refused(bad):
    with pytest.raises(RewardError, match=r"'f' returned .* for the completion 'b': a reward is a finite number"):
        compute_rewards({"f": lambda **_: [1.0, bad]}, ["p"] * 2, ["a", "b"], {})


REAL = 2, True, 0.5, Fraction(1, 2), np.float32(0.5), np.int64(3), np.bool_(True), -(10**100)
TENSORS = torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(True)


@pytest.mark.parametrize("good", [*REAL, *TENSORS])
def test_any_real_number_is_a_reward(good):
    assert compute_rewards({"f": lambda **_: [good]}, ["p"], ["a"], {}) == [[float(good)]]


def test_an_interrupt_is_not_a_failure_of_the_function():
    def interrupted(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_rewards({"f": interrupted}, ["p"], ["a"], {})


@pytest.fixture
def quiet_interrupts():
    """As in a run, whose handler of Ctrl-C raises nothing."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


class NoException(BaseException):
    """As pytest.fail's and others', which `except Exception` does not catch."""


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, NoException])
@pytest.mark.parametrize("kind", ["blocking", "lazy", "async", "async in a task", "async with a deadline"])
def test_whatever_a_function_raises_is_its_failure(error, kind, quiet_interrupts):
    def fail(completions, **columns):
        for completion in completions:
            if completion == "bad":
                raise error
            yield 1.0

    async def fail_later(completions, **columns):
        return list(fail(completions))

    async def fail_in_a_task(completions, **columns):
        return await asyncio.create_task(fail_later(completions))

    functions = {"lazy": fail, "async": fail_later, "async in a task": fail_in_a_task}
    functions["blocking"] = lambda completions, **columns: list(fail(completions))
    functions["async with a deadline"] = add_deadline("f", fail_later, 20.0)
    for _ in range(2):  # the loop of async functions has outlived the first
        place = " on the completion 'bad'" if "deadline" in kind else ""
        with pytest.raises(RewardError, match=f"'f' failed{place}: {error.__name__}"):
            compute_rewards({"f": functions[kind]}, ["p"] * 2, ["good", "bad"], {})
    assert compute_rewards({"f": functions[kind]}, ["p"], ["good"], {}) == [[1.0]]


class Unshown(Exception):
    def __repr__(self):
        raise AttributeError


def test_what_cannot_be_shown_is_named_by_its_type():
    def fail(**_):
        raise Unshown

    with pytest.raises(RewardError, match="^Reward function 'f' failed: Unshown$") as caught:
        compute_rewards({"f": fail}, ["p"], ["a"], {})
    assert "in fail\n    raise Unshown" in caught.value.traceback
    with pytest.raises(RewardError, match="^Reward function 'f' returned Unshown for the completion 'a': a reward is"):
        compute_rewards({"f": lambda **_: [Unshown()]}, ["p"], ["a"], {})


def test_no_function_sees_what_another_has_changed():
    """Neither in its lists nor in the dataset's values, which later steps are given again."""
    seen = []

    def spoils(prompts, completions, tests, **columns):
        seen.append((list(prompts), list(completions), copy.deepcopy(tests)))
        tests[0]["hidden"].append("spoiled")
        prompts[:] = completions[:] = tests[:] = ["spoiled"] * len(prompts)
        return [0.0 for _ in prompts]

    async def spoils_too(**columns):
        return spoils(**columns)

    given = ["p", "q"], ["a", "b"], {"tests": [{"hidden": ["1"]}, {"hidden": ["2"]}]}
    before = copy.deepcopy(given)
    functions = {"spoils": spoils, "again": lambda **columns: spoils(**columns), "spoils_too": spoils_too}
    functions["late"] = add_deadline("late", spoils_too, 20.0)
    compute_rewards(functions, *given)
    assert given == before
    prompts, completions, columns = before
    assert seen.count((prompts, completions, columns["tests"])) == 3
    alone = [([prompts[i]], [completions[i]], [columns["tests"][i]]) for i in range(2)]
    assert len(seen) == 5 and all(call in seen for call in alone)
