"""Completions of several turns in the trainer's process: answers, limits, counts, messages."""

import json
import logging
import re
import sys
import threading
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
from careless import draw, unchanged
from requested import spelled
from talks import Talks, answers_in, call, ids_of

from grpo.config.sampling_settings import ChatConfig
from grpo.config.trainer import TrainerConfig
from grpo.config.user_code import module_name
from grpo.data.conversation import Conversation, NotAsked
from grpo.data.records import Outcome, close_all
from grpo.tools.dialogue import PRINTS_TOGETHER, start_turns

CODE = r'''
import asyncio, sys, threading, time

THREADS, RUNNING = set(), []

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second"""
    THREADS.add(threading.get_ident())
    assert not RUNNING, "another call is running"
    RUNNING.append(a)
    time.sleep(0.0005)
    RUNNING.clear()
    return a + b

def odd(kind: str):
    """Return or raise something.

    Args:
        kind: what"""
    match kind:
        case "raise": raise KeyError("a mistake")
        case "empty": raise ValueError
        case "exit": sys.exit(3)
        case "stop": raise StopIteration
        case "cancel": raise asyncio.CancelledError
        case "memory": raise MemoryError
        case "nasty":
            class Nasty(Exception):
                def __str__(self): raise RuntimeError
            raise Nasty
        case "none": return None
        case "dict": return {"x": [1, "é"]}
        case "object": return {"x": threading}
        case "circle":
            x = []
            x.append(x)
            return x
        case "keys": return {(1, 2): 3}
        case "surrogate": return "a\ud800b"
        case "print": print("p" * 1_000_000)

async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long"""
    await asyncio.sleep(seconds)
    if seconds < 0:
        raise ValueError("no such time")
    return f"waited in {threading.current_thread().name}"
'''


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with closing(Talks(tmp_path_factory.mktemp("tools"), CODE, tools=["add", "odd", "wait"])) as talks:
        yield talks


@pytest.fixture
def talks(shared):
    yield shared
    shared.close_talks()


@pytest.fixture
def open_talks(tmp_path):
    """`open_talks(code, settings...)`: talks that are closed at the end."""
    with ExitStack() as stack:
        yield lambda code=CODE, **settings: stack.enter_context(closing(Talks(tmp_path, code, **settings)))


def test_a_call_is_answered_and_a_turn_without_one_ends_the_completion(talks):
    talk = talks.begin()
    first = "Let me add.\n" + call("add", a=12, b=3)
    assert talk.say(first) == (
        "\n<|im_start|>user\n<tool_response>\n15\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert talk.dialogue.outcome is None
    assert talk.say("It is 15.") is None
    outcome = talk.dialogue.outcome
    function = {"name": "add", "arguments": {"a": 12, "b": 3}}
    assert outcome.messages == [
        {"role": "assistant", "content": "Let me add.", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "add", "content": "15"},
        {"role": "assistant", "content": "It is 15."},
    ]
    assert (outcome.finished, outcome.tool_calls, outcome.tool_failures, outcome.rewards) == (True, 1, 0, {})
    talk.dialogue.close()
    # The template takes the messages: they are the conversation.
    whole = talks.tokenizer.apply_chat_template(outcome.messages, tokenize=False)
    assert first in whole and "It is 15." in whole
    assert json.loads(json.dumps(outcome.messages)) == outcome.messages


def test_a_chat_whose_template_wants_calls_otherwise_says_what_helps(open_talks):
    """Mistral's wants ids of nine characters, and calls of tools have none here."""
    talks = open_talks(template="mistral", tools=["add"])
    conversation = Conversation(ChatConfig(system_prompt=""), talks.tokenizer, None, 10_000, talks.turns)
    conversation.ask("What is 1 + 1?")
    talked = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]},
        {"role": "tool", "name": "add", "content": "2"},
    ]
    conversation.answered(SimpleNamespace(outcome=Outcome(finished=True, messages=talked)))
    with pytest.raises(NotAsked, match="nine characters.*; begin a new conversation with /new, or use --no"):
        conversation.ask("Again?")
    conversation.begin()
    conversation.ask("Again?")


def test_the_calls_of_a_turn_are_answered_in_their_order(talks):
    talk = talks.begin()
    asked = [call("add", a=1, b=1), call("wait", seconds=0.05), "<tool_call>{</tool_call>", call("add", a=2, b=2)]
    answers = answers_in(talk.say("\n".join([*asked, call("nothing", a=1)])))
    assert answers[0] == "2" and "waited in user's async code" in answers[1] and answers[3] == "4"
    assert "not JSON" in json.loads(answers[2])["error"]
    assert json.loads(answers[4])["error"] == "there is no tool 'nothing': there are add, odd, wait"
    talk.say("done")
    assert (talk.dialogue.outcome.tool_calls, talk.dialogue.outcome.tool_failures) == (5, 2)
    assert [m["name"] for m in talk.dialogue.outcome.messages if m["role"] == "tool"] == [
        *("add", "wait", "unknown", "add", "nothing")
    ]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        *[("raise", {"error": "'a mistake'"}), ("empty", {"error": "ValueError"}), ("exit", {"error": "3"})],
        *[("stop", {"error": "StopIteration"}), ("cancel", {"error": "CancelledError"})],
        *[("memory", {"error": "MemoryError"}), ("nasty", {"error": "Nasty"}), ("none", "null")],
        *[("dict", '{"x": [1, "é"]}'), ("object", '{"x": "<module \'threading\''), ("circle", "[[...]]")],
        *[("keys", "{(1, 2): 3}"), ("surrogate", "a?b"), ("print", "null")],
    ],
)
def test_whatever_a_tool_does_is_an_answer(talks, kind, answer):
    talk = talks.begin()
    (told,) = answers_in(talk.say(call("odd", kind=kind)))
    assert json.loads(told) == answer if isinstance(answer, dict) else told.startswith(answer)
    assert answers_in(talk.say(call("add", a=1, b=2))) == ["3"]
    assert talk.say("done") is None
    assert talk.dialogue.outcome.tool_failures == isinstance(answer, dict)


def test_sync_calls_of_all_completions_run_in_one_thread_one_at_a_time(talks):
    running = [talks.begin() for _ in range(8)]
    ids = ids_of(talks.tokenizer, call("add", a=1, b=1))
    futures = [talk.dialogue.answer(ids, 1000) for _ in range(20) for talk in running]
    assert all("2\n</tool_response>" in talks.tokenizer.decode(future.result(60)) for future in futures)
    module = sys.modules[module_name(talks.file)]
    assert len(module.THREADS) == 1 and threading.get_ident() not in module.THREADS


def test_async_calls_of_completions_wait_together(talks):
    running = [talks.begin() for _ in range(20)]
    ids = ids_of(talks.tokenizer, call("wait", seconds=0.3))
    began = time.monotonic()
    futures = [talk.dialogue.answer(ids, 1000) for talk in running]
    assert all(future.result(60) for future in futures)
    assert time.monotonic() - began < 20 * 0.3 / 2


CHANGING = '''
def sort(numbers: list[int]) -> list:
    """Sort.

    Args:
        numbers: some"""
    numbers.sort()
    numbers.append(float("nan"))
    return numbers

async def tag(row: dict) -> str:
    """Tag.

    Args:
        row: it"""
    row["cells"][0]["seen"] = {1, 2}
    return "tagged"

class Bag:
    def reset(self):
        self.things = []

    def keep(self, things: list[str]) -> str:
        """Keep.

        Args:
            things: some"""
        self.things = things
        things.append("more")
        return "kept"
'''


def test_what_a_tool_changes_in_its_arguments_is_not_what_the_policy_wrote(open_talks):
    talks = open_talks(CHANGING, tools=["sort", "tag"], environment="Bag")
    talk = talks.begin()
    wrote = {"sort": {"numbers": [3, 1]}, "tag": {"row": {"cells": [{}]}}, "keep": {"things": ["a"]}}
    answers = answers_in(talk.say("".join(call(name, **arguments) for name, arguments in wrote.items())))
    assert answers == ["[1, 3, NaN]", "tagged", "kept"]
    talk.say("done")
    called = [each["function"] for each in talk.dialogue.outcome.messages[0]["tool_calls"]]
    assert {function["name"]: function["arguments"] for function in called} == wrote


DRAWING = '''
from careless import change_modes, draw

def chance() -> float:
    """Draw."""
    drawn = draw()
    change_modes()
    return drawn

async def later() -> float:
    """Draw, too."""
    drawn = draw()
    change_modes()
    return drawn

class Casino:
    def reset(self):
        self.luck = draw()

    def play(self) -> float:
        """Play."""
        drawn = draw()
        change_modes()
        return self.luck + drawn

    async def wait(self) -> float:
        """Wait."""
        return draw()
'''


@pytest.mark.parametrize("timeout", [None, pytest.param(20.0, marks=pytest.mark.rare)])
def test_what_user_code_draws_follows_from_the_completions_name_and_it_leaves_no_mode(open_talks, timeout):
    talks = open_talks(DRAWING, tools=["chance", "later"], environment="Casino", tool_timeout=timeout)

    def draws(*name: int) -> list[str]:
        talk = talks.begin(name=name or None)
        tools = [call(tool) for tool in ("chance", "chance", "later", "play", "play", "wait")]
        return [answer for text in tools for answer in answers_in(talk.say(text))]

    with unchanged():
        first = draws(7, 3, 1)
    draw()
    assert draws(7, 3, 1) == first
    others = draws(7, 3, 2), draws(7, 4, 1), draws(8, 3, 1), draws()
    assert len({*first, *(number for numbers in others for number in numbers)}) == 5 * len(first)


def test_a_tool_that_always_raises_is_shown_once_and_then_counted(open_talks, caplog):
    talks = open_talks(tools=["odd", "wait"])
    talk = talks.begin(length=10**6)
    calls = [call("odd", kind=kind) for kind in [*["raise"] * 105, "none", "empty"]]
    talk.say("\n".join([*calls, call("odd"), call("nothing"), call("wait", seconds=-1.0)]))
    shown = [record.getMessage() for record in caplog.records if record.name == "grpo.tools.runner"]
    assert "in odd\n" in shown[0] and "\nKeyError: 'a mistake'\ntool 'odd'" in shown[0] and "grpo/" not in shown[0]
    assert [message.splitlines()[-1] for message in shown] == [
        "tool 'odd' raised KeyError: the run continues, and counts more of these",
        "tool 'odd' raised KeyError, 10 times by now",
        "tool 'odd' raised KeyError, 100 times by now",
        "tool 'odd' raised ValueError: the run continues, and counts more of these",
        "tool 'wait' raised ValueError: the run continues, and counts more of these",
    ]


# --- limits


@pytest.mark.parametrize("less", [1, 0])
def test_an_answer_must_leave_room_for_a_token(talks, less):
    asked = call("add", a=1, b=1)
    free = talks.begin()
    free.say(asked)
    size = 10_000 - free.room
    talk = talks.begin(length=size + 1 - less)
    answered = talk.say(asked)
    assert (answered is None) == (less == 1)
    if less:
        outcome = talk.dialogue.outcome
        assert (outcome.finished, outcome.tool_calls, len(outcome.messages)) == (False, 1, 1)


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        ({"max_tool_calling_iterations": 2}, 3),
        ({"max_turns": 2}, 2),
        ({"max_turns": 1}, 1),
        ({"max_turns": 5, "max_tool_calling_iterations": 1}, 2),
    ],
)
def test_calls_are_answered_as_often_as_the_settings_allow(open_talks, limits, turns):
    talks = open_talks(tools=["add"], **limits)
    talk = talks.begin()
    while talk.say(call("add", a=1, b=1)) is not None:
        pass
    assert (len(talk.answers), talk.dialogue.outcome.finished) == (turns, False)
    assert talk.dialogue.outcome.tool_calls == turns - 1
    talk = talks.begin()
    while len(talk.answers) < turns - 1:
        talk.say(call("add", a=1, b=1))
    assert talk.say("the last turn, without a call") is None
    assert talk.dialogue.outcome.finished


def test_a_turn_that_calls_nothing_is_over_before_any_code_runs(talks):
    """So that its row in the sampler waits for nothing. A turn that was cut calls nothing."""
    for text, ends in (("no call", True), (call("add", a=1, b=1), False)):
        talk = talks.begin()
        assert talk.dialogue.answer(ids_of(talks.tokenizer, text, ends), 1000) is None
        assert talk.dialogue.outcome == Outcome(finished=ends, messages=[{"role": "assistant", "content": text}])


def test_ids_that_another_tokenisation_would_merge_stay_apart(talks):
    """The answer's ids follow those that were drawn: they do not depend on how these would be tokenised as text."""
    text = call("add", a=1, b=1)
    pieces, whole = spelled(talks.tokenizer, text), ids_of(talks.tokenizer, text)
    assert len(pieces) > len(whole) and talks.tokenizer.decode(pieces) == talks.tokenizer.decode(whole)
    answers = [talks.begin().dialogue.answer(drawn, 1000).result(60) for drawn in (pieces, whole)]
    assert answers[0] == answers[1] and answers[0] is not None


def test_a_completion_may_be_closed_at_any_time_and_twice(talks):
    talk = talks.begin()
    talk.dialogue.close()
    talk.dialogue.close()
    talk = talks.begin()
    future = talk.dialogue.answer(ids_of(talks.tokenizer, call("wait", seconds=0.3)), 1000)
    talk.dialogue.close()
    assert future.done()


def test_ctrl_c_ends_the_close_of_all():
    """It comes a second time: the first time it has ended the sampler, and each close waits for a call that hangs."""
    closed = []

    class Failing:
        def __init__(self, error):
            self.error = error

        def close(self):
            closed.append(self.error)
            raise self.error

    with pytest.raises(OSError, match="first"):
        close_all(map(Failing, [OSError("first"), OSError("second")]))
    assert len(closed) == 2
    with pytest.raises(KeyboardInterrupt):
        close_all(map(Failing, [KeyboardInterrupt(), OSError("after it")]))
    assert len(closed) == 3


def test_what_tools_print_is_limited_for_all_completions_together(talks, capfd, caplog):
    running = [talks.begin() for _ in range(2)]
    for talk in running:
        talk.say(call("odd", kind="print"))
    assert capfd.readouterr().out.count("p") == 65536
    for talk in running:
        assert not caplog.records
        talk.dialogue.close()
    (record,) = caplog.records
    # Each print ends with a line end.
    assert "printed 1934466 more characters" in record.getMessage()
    talk = talks.begin()
    talk.say(call("odd", kind="print"))
    assert capfd.readouterr().out.count("p") == 65536
    talk.dialogue.close()
    print("not the tools'" * 10_000)
    assert len(capfd.readouterr().out) == 140_001


def test_prints_are_shown_again_where_completions_overlap_without_a_pause(open_talks, capfd, caplog):
    talks = open_talks(tools=["odd"])
    last, shown = talks.begin(), []
    for n in range(2 * PRINTS_TOGETHER):
        following = talks.begin()
        if n % 50 == 0:
            last.say(call("odd", kind="print"))
            shown.append((n, capfd.readouterr().out.count("p")))
        last.dialogue.close()
        last = following
    assert shown == [(0, 65536), (50, 0), (100, 0), (150, 65536), (200, 0), (250, 0)]
    # Each print ends with a line end.
    counts = [record.getMessage().partition(" more")[0].rpartition(" ")[2] for record in caplog.records]
    assert counts == [str(3 * 1_000_001 - 65536)] * 2


@pytest.mark.parametrize(
    ("kind", "wait", "timeout"),
    [
        ("", "named.wait(20)", None),
        ("async ", "await asyncio.to_thread(named.wait, 20)", None),
        ("async ", "named.wait(20)", 0.1),
    ],
)
def test_a_call_that_does_not_end_is_named(open_talks, caplog, monkeypatch, kind, wait, timeout):
    def error(*arguments) -> None:
        logging.Logger.error(log, *arguments)
        named.set()

    log, named = logging.getLogger("grpo.tools.runner"), threading.Event()
    monkeypatch.setattr(log, "error", error)
    monkeypatch.setattr("grpo.tools.runner.PATIENCE", 0.2)
    code = f'import asyncio\n{kind}def slow():\n    """Wait."""\n    {wait}\n'
    talks = open_talks(code, tools=["slow"], tool_timeout=timeout)
    sys.modules[module_name(talks.file)].named = named
    talks.begin().say(call("slow"))
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) < 20 and re.search(r"yet: slow \(for \d s\) .*: set tool_timeout", lines[0])


def test_nothing_answers_where_nothing_is_set():
    assert start_turns(TrainerConfig(), None, []) is None
