"""What reward functions are given of examples and rollouts: TRL's arguments, and TRL's own functions with them."""

import io
import logging
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pictured
import pytest
from careless import change_modes, draw, unchanged
from PIL import ExifTags, Image
from told import sampled

from grpo.config.errors import RewardError
from grpo.config.trainer import TrainerConfig
from grpo.data.examples import make_example
from grpo.data.records import Example, Outcome, Rollout
from grpo.rewards.compute import load_reward_funcs, start_functions
from grpo.rewards.functions import Logged, TrainerState, text_of
from grpo.trainer.rewarding import score_rollouts, try_rewards
from grpo.wire.picture_files import EncodedPicture
from reward import correctness_reward, format_reward

STATE = TrainerState(3, 60)
CONFIG = TrainerConfig(
    system_prompt="Be brief.", dataset_prompt_column="problem", dataset_answer_column="solution", eval_steps=0
)
CHAT = [{"role": "user", "content": "What is 1/3?"}]
RIGHT = "<think>\nA third.\n</think>\nIt is $\\boxed{\\frac{2}{6}}$."


def rollout(text: str) -> Rollout:
    return sampled(text.encode(), text)


@pytest.fixture(params=["text", "messages"])
def example(request, tokenizer) -> Example:
    """A problem whose prompt is a text, or a list of messages."""
    prompt = CHAT[0]["content"] if request.param == "text" else CHAT
    return make_example(CONFIG, tokenizer, 0, {"problem": prompt, "solution": r"$\frac{1}{3}$", "tests": [1, [2]]})


@pytest.mark.parametrize("raises", [False, True])
def test_torchs_modes_and_random_states_are_after_a_function_what_they_were_before(example, raises):
    def careless(completions, **columns):
        draw()
        change_modes()
        return [0.0 / (1 - raises)]

    with unchanged(), pytest.raises(RewardError) if raises else nullcontext():
        score_rollouts({"careless": careless}, [example], [rollout("ab")], STATE)


def test_what_a_function_draws_follows_from_the_key_alone(example):
    def draws(key: tuple) -> list[float]:
        functions = {"first": lambda **_: [draw()] * 2, "second": lambda **_: [draw()] * 2}
        return score_rollouts(functions, [example] * 2, [rollout("ab"), rollout("c")], STATE, key=key)[:, 0].tolist()

    first = draws((7, 3, 0))
    draw()
    assert draws((7, 3, 0)) == first
    assert len({*first, *draws((7, 3, 1)), *draws((7, 4, 0)), *draws((73, 0))}) == 8


def test_a_function_is_given_what_trl_gives_it(example):
    given = []

    def spy(**arguments):
        given.append(arguments)
        return [0.0, 1.0]

    rewards = score_rollouts({"spy": spy}, [example] * 2, [rollout("ab"), rollout("c")], STATE)
    assert rewards.tolist() == [[0.0, 1.0]]
    (arguments,) = given
    state = arguments.pop("trainer_state")
    assert (state.global_step, state.max_steps) == (3, 60)
    assert callable(arguments.pop("log_extra")) and callable(arguments.pop("log_metric"))
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1/3?<|im_end|>\n<|im_start|>assistant\n"
    )
    is_chat = example.conversation is not None
    assert arguments == {
        "prompts": [CHAT if is_chat else rendered] * 2,
        "completions": [[{"role": "assistant", "content": text}] for text in ("ab", "c")] if is_chat else ["ab", "c"],
        "completion_ids": [[97, 98], [99]],
        "prompt_texts": [rendered] * 2,
        "problem": [CHAT if is_chat else "What is 1/3?"] * 2,
        "solution": [r"$\frac{1}{3}$"] * 2,
        "answer": [r"$\frac{1}{3}$"] * 2,
        "tests": [[1, [2]]] * 2,
    }


class Listener:
    """A reward model that keeps what it is given."""

    def score(self, conversations):
        self.conversations = conversations
        return [1.0] * len(conversations)


QUESTION = {"role": "user", "content": "2+2?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALL_AS_TEXT = '{"name": "add", "arguments": {"a": 2, "b": 2}}'
ANSWERED = [
    {"role": "assistant", "content": "I add.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "name": "add", "content": "4"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "four"},
    {"role": "assistant", "content": "It is 4."},
]
AS_TEXT = [f"I add.\n{CALL_AS_TEXT}\n{CALL_AS_TEXT}", "4", CALL_AS_TEXT, "four", "It is 4."]


def test_a_reward_model_sees_the_completion_as_the_rest_of_what_the_assistant_had_begun():
    begun = [QUESTION, {"role": "assistant", "content": "It is"}]
    examples = [
        Example(index=0, prompt="p", prompt_ids=[1], columns={}, messages=messages) for messages in ([QUESTION], begun)
    ]
    listener = Listener()
    score_rollouts({"listener": listener}, examples, [rollout("4"), rollout(" 4")], STATE)
    seen = [[message["content"] for message in conversation] for conversation in listener.conversations]
    assert seen == [["2+2?", "4"], ["2+2?", "It is 4"]]
    assert begun[1]["content"] == "It is", "the example's own messages stay"


def test_to_a_reward_model_a_prompts_messages_have_role_and_content_alone():
    """As reward servers take them, whatever else a dataset's chat has."""
    chat = [QUESTION | {"name": "Ann"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}, QUESTION]
    listener = Listener()
    example = Example(index=0, prompt="p", prompt_ids=[1], columns={}, messages=chat)
    score_rollouts({"listener": listener}, [example], [rollout("4")], STATE)
    said = [("user", "2+2?"), ("assistant", CALL_AS_TEXT), ("user", "2+2?"), ("assistant", "4")]
    assert listener.conversations == [[{"role": role, "content": content} for role, content in said]]


def test_a_completion_with_answers_is_its_messages_and_to_a_text_what_the_model_wrote(example):
    """TRL gives functions the messages with the ids of all of them. A reward model reads the calls as text, in messages
    of role and content alone, as reward servers take them."""
    given, listener = [], Listener()

    def spy(completions, completion_ids, **columns):
        given.append((completions, completion_ids))
        return [0.0]

    outcome = Outcome(finished=True, messages=ANSWERED, tool_calls=3)
    answered = sampled([7, 8, 9], "<call>\nIt is 4.", drawn=[True, False, True], outcome=outcome)
    score_rollouts({"spy": spy, "listener": listener}, [example], [answered], STATE)
    assert given == [([ANSWERED if example.conversation else "<call>\nIt is 4."], [[7, 8, 9]])]
    expected = [{"role": was["role"], "content": text} for was, text in zip(ANSWERED, AS_TEXT, strict=True)]
    assert listener.conversations == [[*example.messages, *expected]]
    assert text_of(ANSWERED) == "I add.\n\nIt is 4."


def test_the_functions_of_reward_py_read_both_kinds(tokenizer):
    """A tag that the template opens counts for messages too: it is in no message."""
    answer = "2+2</think> <answer>4</answer>"
    for prompt in ("2+2?", [{"role": "user", "content": "2+2?"}]):
        example = make_example(CONFIG, tokenizer, 0, {"problem": prompt, "solution": "4"})
        opened = replace(example, prompt=example.prompt + "<think>\n")
        functions = {"correct": correctness_reward, "format": format_reward}
        rewards = score_rollouts(functions, [opened] * 2, [rollout(answer), rollout("<answer>4.0</answer>")], STATE)
        assert rewards.tolist() == [[2.0, 1.5], [0.8, 0.6]]
    chat, completion = ({"role": "assistant", "content": text} for text in ("<think>\n", answer))
    assert format_reward([[QUESTION, chat]], [[completion]]) == [0.8], "without prompt_texts, as in TRL"


def scored(path: Path, source: str, examples: list[Example], texts: list[str], timeout: float | None, *names: str):
    """Score these texts with functions of a file; return the rewards and what the functions logged."""
    path.write_text(source)
    config = TrainerConfig(reward_funcs=[f"{path}:{name}" for name in names], reward_timeout=timeout)
    functions, pool = start_functions(load_reward_funcs(config.reward_funcs), config, workers=2)
    logged = Logged()
    rewards = score_rollouts(functions, examples, [*map(rollout, texts)], STATE, logged=logged)
    if pool:
        pool.close()
    return rewards.tolist(), logged


TRLS = "from trl.rewards import accuracy_reward, think_format_reward\n"
LOGS = """
def logs(completions, completion_ids, level, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("first", [text[:1] for text in completions])
    for text, ids, n in zip(completions, completion_ids, level):
        log_metric("letters", len(text))
        assert len(ids) == len(text)
    return [trainer_state.global_step + n for n in level]
"""
SEES = """
from PIL import Image

def sees(completions, images, photo, **kwargs):
    assert all(isinstance(picture, Image.Image) for pictures in images for picture in pictures)
    widths = [picture.width if picture else 0.5 for picture in photo]
    return [pictures[0].getpixel((0, 0))[0] + width for pictures, width in zip(images, widths)]
"""


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_trls_own_functions_run_unchanged(tokenizer, timeout, tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("math_verify")
    example = make_example(CONFIG, tokenizer, 0, {"problem": CHAT, "solution": r"$\frac{1}{3}$"})
    texts, names = [RIGHT, r"It is $\boxed{\frac12}$.", "Hm."], ("accuracy_reward", "think_format_reward")
    rewards, logged = scored(tmp_path / "mine.py", TRLS, [example] * 3, texts, timeout, *names)
    assert rewards == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert logged.extra["solution"] == [r"$\frac{1}{3}$"] * 3
    assert logged.extra["answer_parsed"][2] == "[unparseable]"


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_functions_in_worker_processes_are_given_and_log_the_same(tmp_path, timeout):
    examples = [Example(index=0, prompt="p", prompt_ids=[1], columns={"level": 0.5})] * 2
    rewards, logged = scored(tmp_path / "mine.py", LOGS, examples, ["ab", "c"], timeout, "logs")
    assert (rewards, logged.extra, logged.metrics) == ([[3.5, 3.5]], {"first": ["a", "c"]}, {"letters": [2.0, 1.0]})


def test_functions_are_given_pil_images_in_the_shape_of_the_column(tmp_path):
    """Opened at the call, in worker processes too, turned as they were held, in the mode of the file."""
    files = [pictured.drawing(8, 6, 0), pictured.drawing(6, 8, 1, "JPEG")]
    with Image.open(io.BytesIO(files[0])) as shown:
        red, turned = shown.getpixel((0, 0))[0], io.BytesIO()
        exif = shown.getexif()
        exif[ExifTags.Base.Orientation] = 6
        shown.convert("L").save(turned, "PNG", exif=exif)
    pictures = [*map(EncodedPicture, files)]
    rows = [{"images": pictures, "photo": EncodedPicture(turned.getvalue())}, {"images": pictures[:1], "photo": None}]
    examples = [Example(index=0, prompt="p", prompt_ids=[1], columns=columns) for columns in rows]
    for timeout in (None, 20.0):
        rewards, _ = scored(tmp_path / "mine.py", SEES, examples, ["ab", "c"], timeout, "sees")
        assert rewards == [[red + 6, red + 0.5]], timeout

    given = []
    spy = {"spy": lambda **arguments: given.append(arguments) or [0.0, 0.0]}
    score_rollouts(spy, examples, [rollout("")] * 2, STATE)
    (first, second), (photo, nothing) = given[0]["images"], given[0]["photo"]
    assert [picture.format for picture in first] == ["PNG", "JPEG"] and second[0].size == (8, 6)
    assert photo.mode == "L" and nothing is None
    assert examples[0].columns["images"] == pictures, "as it was"


TRIED = """
import os, random
CALLS = []

def plain(prompts, completions, **kwargs):
    CALLS.append((prompts, completions, os.getpid()))
    return [0.5 if text == "4" else 9.0 for text in completions]

def no_value(completions, **kwargs):
    return [None for _ in completions]

async def later(completions, completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]

def broken(completions, solution, **kwargs):
    return [float(text) for text in solution]

def single(completions, **kwargs):
    return [1.0]

def careless(completions, **kwargs):
    return [text[0] == "4" for text in completions]
"""


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_each_function_is_called_once_before_the_run_on_two_completions(tokenizer, tmp_path, caplog, timeout):
    path = tmp_path / "mine.py"
    path.write_text(TRIED)
    names = [f"{path}:{name}" for name in ("plain", "no_value", "later")]
    judge = tmp_path / "judge"  # a reward model, of which the chat template alone is tried
    tokenizer.save_pretrained(judge)
    (judge / "config.json").write_text('{"model_type": "qwen2"}')
    functions = load_reward_funcs([*names, str(judge)])
    config = TrainerConfig(reward_funcs=[*names, str(judge)], reward_timeout=timeout)
    example = make_example(CONFIG, tokenizer, 0, {"problem": "2+2?", "solution": "2+2=4\n#### 4"})
    with unchanged(), caplog.at_level(logging.INFO):
        try_rewards(config, functions, tokenizer, example)
    given = {"plain": (0.5, 9.0), "no_value": (None, None), "later": (float(len(tokenizer("4")["input_ids"])), 1.0)}
    assert caplog.messages == [
        f"{name} gives {gold} for the gold answer of the first prompt, {empty} for an empty completion"
        for name, (gold, empty) in given.items()
    ]
    calls = functions["plain"].__globals__["CALLS"]
    assert calls == ([([example.prompt] * 2, ["4", ""], os.getpid())] if timeout is None else [])
    caplog.clear()
    prompt_alone = make_example(TrainerConfig(system_prompt=""), tokenizer, 0, {"question": "2+2?"})
    with caplog.at_level(logging.INFO):
        try_rewards(TrainerConfig(reward_funcs=names[1:2]), load_reward_funcs(names[1:2]), tokenizer, prompt_alone)
    assert caplog.messages == ["no_value gives None for the text of the first prompt, None for an empty completion"]


@pytest.mark.parametrize(
    "name, timeout, reason",
    [
        ("broken", 20.0, "'broken' failed.*: ValueError"),
        ("single", None, "returned 1 rewards for 2 completions"),
        ("careless", None, "IndexError"),  # which one completion would not show
    ],
)
def test_a_mistake_is_found_before_the_run(tokenizer, tmp_path, name, timeout, reason):
    path = tmp_path / "mine.py"
    path.write_text(TRIED)
    example = make_example(CONFIG, tokenizer, 0, {"problem": "2+2?", "solution": "2+2=4\n#### 4"})
    config = TrainerConfig(reward_funcs=[f"{path}:{name}"], reward_timeout=timeout)
    with pytest.raises(RewardError, match=reason) as caught:
        try_rewards(config, load_reward_funcs(config.reward_funcs), tokenizer, example)
    if name == "broken":
        assert f'File "{path}", line 16, in broken' in caught.value.traceback
