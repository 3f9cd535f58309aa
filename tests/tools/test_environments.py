"""Environments in both forms, in the trainer's process: what they are given, say and earn, and that they are closed."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from conftest import UNKNOWN_HINT
from talks import Talks, call

from grpo.config.errors import ConfigError, RewardError
from grpo.config.user_code import module_name

GAME = '''
import functools
import numpy

MADE, ALIVE, CLOSED, GIVEN = [], set(), [], []

class Guess:
    """Guess a number: up or down."""

    is_verdict = True
    def __init__(self):
        MADE.append(self)
        ALIVE.add(self)
    def reset(self, columns):
        GIVEN.append(columns)
        self.number, columns["number"] = columns["number"], None
        return columns.get("first", "Guess!")
    def step(self, text):
        if text == "raise":
            raise KeyError("a mistake")
        if text == "raise what cannot be shown":
            raise type("Unshown", (Exception,), {"__repr__": None})
        if text.startswith("return "):
            return eval(text[7:])
        guess = int(text)
        if guess == self.number:
            return "right", 1.0, True
        return ("higher" if guess < self.number else "lower"), -0.25, False
    def close(self):
        CLOSED.append(self)
        ALIVE.remove(self)

class Graded(Guess):
    def get_reward(self):
        given = {7: numpy.int64(5), 8: None, 9: "x", 10: 1 / (self.number - 10 or 1)}
        return given[self.number] if self.number < 20 else 1 / 0

class Endless:
    def reset(self, columns):
        ALIVE.add(self)
    def step(self, text):
        return "again", 0.5, False
    def close(self):
        ALIVE.remove(self)
        CLOSED.append(self)

class Careless(Guess):
    def close(self):
        super().close()
        raise ValueError("at the end")

class Count:
    """TRL's form."""

    shared = 0
    def reset(self, start: HINT, **kwargs):
        ALIVE.add(self)
        self.value = start
        self.asked = kwargs
        return kwargs.get("first")
    def increase(self, by: int) -> int:
        """Increase the value.

        Args:
            by: how much"""
        if by > 100:
            raise ValueError("too much")
        self.value += by
        return self.value
    async def double(self) -> int:
        """Double the value."""
        self.value *= 2
        return self.value
    @staticmethod
    def name(of: int) -> str:
        """Name a number.

        Args:
            of: which"""
        return "one" if of == 1 else "many"
    @classmethod
    def share(cls, more: int) -> int:
        """Share more.

        Args:
            more: how much"""
        cls.shared += more
        return cls.shared
    @property
    def late(self):
        raise AttributeError("it has no value yet")
    def _hidden(self):
        pass
    async def get_reward(self):
        return self.value / 2
    def close(self):
        CLOSED.append(self)
        ALIVE.remove(self)

class Silent:
    def reset(self, **kwargs):
        pass
    def look(self) -> dict:
        """Look."""
        return {"seen": numpy.bool_(True), "at": numpy.arange(2)}

class Narrow(Silent):
    def reset(self, start):
        pass

def take_start(reset):
    @functools.wraps(reset)
    def reset_at(self, **columns):
        return reset(self, columns["start"])
    return reset_at

class Widened(Silent):
    @take_start
    def reset(self, start):
        return f"from {start}"

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: first
        b: second"""
    return a + b

class Nothing:
    def reset(self): pass

class NoReset:
    def step(self, text): pass

class Undocumented:
    def reset(self): pass
    def look(self, at: int): pass
'''.replace("HINT", UNKNOWN_HINT)


@pytest.fixture
def begin(tmp_path):
    """`begin(class, row, settings...)`: a completion with that environment. At the end none of them is open."""
    started = []

    def make(name: str, row: dict, length: int = 10_000, messages: list | None = None, **settings):
        started.append(talks := Talks(tmp_path, GAME, environment=name, **settings))
        return talks.begin(length, messages, **row), sys.modules[module_name(talks.file)], talks.turns

    yield make
    for talks in started:
        talks.close()
        module = sys.modules[module_name(talks.file)]
        assert not module.ALIVE and len(module.CLOSED) == len(set(module.CLOSED))


def test_a_game_answers_each_turn_until_it_is_done(begin):
    talk, module, turns = begin("Guess", {"number": 7})
    assert talk.say("5 ") == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert "lower" in talk.say("9")
    assert module.ALIVE and talk.dialogue.outcome is None
    assert talk.say("7") is None
    assert not module.ALIVE  # as soon as the completion is over
    outcome = talk.dialogue.outcome
    assert outcome.rewards == {"Guess": 0.5} and outcome.finished
    assert outcome.messages == [
        *[{"role": "assistant", "content": "5 "}, {"role": "user", "content": "higher"}],
        *[{"role": "assistant", "content": "9"}, {"role": "user", "content": "lower"}],
        {"role": "assistant", "content": "7"},
    ]
    assert turns.tools is None and [*turns.rewards] == ["Guess"] and turns.rewards["Guess"].is_verdict


def test_methods_are_tools_of_the_instance_and_of_it_alone(begin):
    talk, module, turns = begin("Count", {"start": 3, "first": None, "more": [1]})
    assert [tool["function"]["name"] for tool in turns.tools] == ["double", "increase", "name", "share"]
    assert turns.tools[1]["function"]["parameters"]["properties"] == {
        "by": {"type": "integer", "description": "how much"}
    }
    other = begin("Count", {"start": 100})[0]
    assert "\n5\n" in talk.say(call("increase", by=2))
    assert "\n200\n" in other.say(call("double"))
    answer = talk.say(call("double") + call("name", of=1) + call("increase", by=101) + call("_hidden"))
    assert ["\n10\n" in answer, "\none\n" in answer, "too much" in answer, "no tool '_hidden'" in answer] == [True] * 4
    assert talk.say("done") is None and other.say("done") is None
    assert talk.dialogue.outcome.rewards == {"Count": 5.0} and other.dialogue.outcome.rewards == {"Count": 100.0}
    assert (talk.dialogue.outcome.tool_calls, talk.dialogue.outcome.tool_failures) == (5, 2)
    assert not module.ALIVE
    assert "\n4\n" in begin("Count", {"start": 3})[0].say(call("share", more=4))


def test_a_game_with_tools_is_played_in_the_turns_without_calls(begin):
    talk = begin("Guess", {"number": 7}, tools=["add"])[0]
    assert "<tool_response>\n7\n" in talk.say(call("add", a=3, b=4))
    assert "user\nhigher<|im_end|>" in talk.say("6")
    assert talk.say("7") is None
    assert talk.dialogue.outcome.rewards == {"Guess": 0.75} and talk.dialogue.outcome.tool_calls == 1


def test_a_class_without_a_reward_gives_none(begin):
    talk, _, turns = begin("Silent", {"start": 3})
    assert turns.rewards == {}
    assert '{"seen": true, "at": [0, 1]}' in talk.say(call("look"))
    assert talk.say("done") is None and talk.dialogue.outcome.rewards == {}


def test_a_row_is_the_environments_to_change(begin):
    row = {"number": 7}
    talk, module, _ = begin("Guess", row)
    assert talk.say("7") is None
    assert row == {"number": 7} and module.GIVEN == [{"number": None}]


# --- what it says first


def test_what_reset_says_is_the_same_when_the_data_is_read_and_later(begin):
    messages = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Well: up to 9?\n"}]
    talk, module, turns = begin("Guess", {"number": 7, "first": "up to 9?"}, messages=messages)
    assert turns.observe({"number": 7, "first": "up to 9?"}) == "up to 9?"
    assert len(module.CLOSED) == 1
    assert talk.say("7") is None
    talk = begin("Guess", {"number": 7, "first": "up to 10?"}, messages=messages)[0]
    with pytest.raises(RewardError, match=r"environment='.*:Guess': reset said 'up to 10\?' .* on the row alone"):
        talk.say("7")
    talk, _, turns = begin("Silent", {"start": 7}, messages=messages)
    assert turns.observe({"start": 7}) == ""
    assert talk.say("7") is None


# --- ends


@pytest.mark.parametrize("limit", [{"max_turns": 5}, {"length": 60}])
def test_an_environment_that_never_ends_is_ended(begin, limit):
    talk, module, _ = begin("Endless", {"number": 0}, **limit)
    while talk.say("go on"):
        assert module.ALIVE
    outcome, turns = talk.dialogue.outcome, len(talk.answers)
    # The last turn is a step too, and earns, also where its answer does not fit.
    assert turns == limit.get("max_turns", turns) > 1 and talk.room > 0
    assert (outcome.finished, outcome.rewards) == (False, {"Endless": turns / 2})
    assert len(module.CLOSED) == 1 and outcome.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize(("number", "reward"), [(7, {"Graded": 5.0}), (8, {})])
@pytest.mark.parametrize("cut", [True, False])
def test_get_reward_is_asked_at_every_end(begin, number, reward, cut):
    talk = begin("Graded", {"number": number})[0]
    talk.say("1")
    assert talk.say("2" if cut else str(number), ends=not cut) is None
    assert talk.dialogue.outcome.rewards == reward
    assert talk.dialogue.outcome.finished != cut


def test_a_completion_that_is_cut_takes_no_step(begin):
    talk = begin("Guess", {"number": 7})[0]
    talk.say("5")
    assert talk.say("7", ends=False) is None
    assert talk.dialogue.outcome.rewards == {"Guess": -0.25} and not talk.dialogue.outcome.finished


# --- mistakes


@pytest.mark.parametrize(
    "returned",
    [
        *["None", "'x'", "('x', 1.0)", "('x', None, True)", "('x', float('nan'), True)", "('x', 10**400, True)"],
        *["(3, 1.0, True)", "('x', 1.0, 2)"],
    ],
)
def test_what_is_no_step_ends_the_run(begin, returned):
    talk = begin("Guess", {"number": 7})[0]
    with pytest.raises(RewardError, match=r"environment='.*:Guess': step returned .*: step must return \(obs"):
        talk.say(f"return {returned}")


@pytest.mark.parametrize(
    "returned", ["('x', 1, 0)", "[None, True, True]", "('x', 1.0, False)", "[None, numpy.bool_(True), numpy.True_]"]
)
def test_what_means_a_step_is_one(begin, returned):
    talk = begin("Guess", {"number": 7})[0]
    assert (talk.say(f"return {returned}") is None) == returned.startswith("[")


def test_what_raises_ends_the_run_with_the_users_lines(begin):
    talk, module, _ = begin("Guess", {"number": 7})
    with pytest.raises(RewardError, match=r"step failed: KeyError\('a mistake'\)") as caught:
        talk.say("raise")
    assert "in step\n    raise KeyError" in caught.value.traceback and "grpo/tools" not in caught.value.traceback
    talk.dialogue.close()
    assert len(module.CLOSED) == 1
    talk = begin("Guess", {"number": 7})[0]
    with pytest.raises(RewardError, match="step failed: Unshown$"):
        talk.say("raise what cannot be shown")
    for number, match in ((9, "get_reward returned 'x': get_reward must return"), (20, "get_reward failed: ZeroDiv")):
        talk = begin("Graded", {"number": number})[0]
        with pytest.raises(RewardError, match=match):
            talk.say(str(number))


def test_a_reset_that_cannot_be_used_ends_the_run(begin):
    talk = begin("Narrow", {"start": 1, "answer": "2"})[0]
    with pytest.raises(RewardError, match="reset cannot be called: .*'answer': it is given start, answer: name some"):
        talk.say("x")
    assert begin("Widened", {"start": 1})[2].observe({"start": 2, "answer": "3"}) == "from 2"  # its decorator takes all
    talk, _, turns = begin("Guess", {})
    with pytest.raises(RewardError, match=r"reset failed: KeyError\('number'\)"):
        talk.say("7")
    with pytest.raises(RewardError, match="reset failed"):
        turns.observe({})
    with pytest.raises(RewardError, match=r"reset returned 3: reset must return a text, or None"):
        turns.observe({"number": 1, "first": 3})


def test_what_close_raises_is_said_once_then_counted_and_ends_nothing(begin, caplog):
    talk, module, turns = begin("Careless", {"number": 7})
    assert talk.say("7") is None and talk.dialogue.outcome.rewards == {"Careless": 1.0}
    for _ in range(98):
        turns.observe({"number": 7})
    first, tenth = (record.getMessage() for record in caplog.records)
    assert 'raise ValueError("at the end")\nValueError: at the end\nenvironment=' in first and len(module.CLOSED) == 99
    assert first.endswith(":Careless': close raised ValueError: the run continues, and counts more of these")
    assert tenth.endswith(":Careless': close raised ValueError, 10 times by now")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *[("Nowhere", "has no such class"), ("add", "it is no class with a method reset")],
        *[("NoReset", "it is no class with a method reset"), ("Nothing", "it has no method that answers")],
        ("Undocumented", "a model cannot be told what look does"),
    ],
)
def test_a_class_that_cannot_answer_is_refused(begin, name, reason):
    with pytest.raises(ConfigError, match=rf"environment='.*:{name}': .*{reason}"):
        begin(name, {})


def test_rows_may_be_observed_by_several_threads(tmp_path):
    rows = [{"number": number, "first": f"up to {number}"} for number in range(20)]
    with closing(Talks(tmp_path, GAME, environment="Guess")) as talks, ThreadPoolExecutor(20) as threads:
        assert [*threads.map(talks.turns.observe, rows)] == [row["first"] for row in rows]
