"""Tools and environments that hang, end their process or return too much: real processes, really killed."""

import json
import logging
import os
import signal
from contextlib import ExitStack, closing

import pytest
from processes import wait_until_dead
from talks import Talks, answers_in, call, ids_of

from grpo.config.errors import RewardError

pytestmark = pytest.mark.slow

CODE = r'''
import asyncio, os, re, signal, time

def do(what: str) -> str:
    """Do something.

    Args:
        what: it"""
    return act(what)

async def wait(seconds: float) -> int:
    """Wait.

    Args:
        seconds: how long"""
    await asyncio.sleep(seconds)
    return os.getpid()

def act(what):
    match what:
        case "hang": time.sleep(600)
        case "regex": re.fullmatch("(a|a)*b", "a" * 60)  # 2^60 steps in C, with the GIL
        case "exit": os.execlp("sh", "sh", "-c", "exit 7")
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "raise": raise KeyError("a mistake")
        case "sys.exit": raise SystemExit(3)
        case "run": return str(asyncio.run(asyncio.sleep(0, "ran")))  # as many a tool of async code does
        case "long": return "x" * 10_000_000
    return f"{what} by {os.getpid()}"

class Game:
    made = 0

    def reset(self, columns):
        type(self).made += 1
        self.columns = columns
        act(columns.get("at_reset", ""))
        return columns.get("first", "")

    def step(self, text):
        act(text)
        return f"{os.getpid()} {self.made}", 1.0, text == "done"

    def get_reward(self):
        act(self.columns.get("at_reward", ""))
        return 5.0

    def close(self):
        act(self.columns.get("at_close", ""))
        if "closed" in self.columns:
            with open(self.columns["closed"], "a") as file:
                file.write("closed\n")

class Methods:
    def reset(self, start):
        self.value = start

    def increase(self, by: int) -> int:
        """Increase.

        Args:
            by: how much"""
        if by == 0:
            time.sleep(600)
        self.value += by
        return self.value

    async def show(self) -> str:
        """Show."""
        await asyncio.sleep(0)
        return f"{self.value} in {os.getpid()}"

    async def get_reward(self):
        return self.value
'''


@pytest.fixture
def talks(tmp_path):
    """`talks(settings...)`: the code above with a deadline of 20 seconds, or another."""
    with ExitStack() as stack:

        def make(tool_timeout: float = 20.0, **settings) -> Talks:
            return stack.enter_context(closing(Talks(tmp_path, CODE, tool_timeout=tool_timeout, **settings)))

        yield make


@pytest.mark.parametrize(
    ("what", "error"),
    [
        *[("hang", "do gave no answer within 1 s"), ("regex", "do gave no answer within 1 s")],
        *[("exit", "do lost its process (exit code 7)"), ("kill", "do lost its process (SIGKILL)")],
        *[("raise", "'a mistake'"), ("sys.exit", "3")],
    ],
)
def test_a_bad_tool_costs_its_answer_and_no_other(talks, what, error):
    bad = talks(tool_timeout=1.0 if error.endswith("within 1 s") else 20.0, tools=["do"])
    talk, other = bad.begin(), bad.begin()
    ids = ids_of(bad.tokenizer, call("do", what="fine"))
    assert answers_in(talk.say(call("do", what="fine")))  # a process has started
    pending = other.dialogue.answer(ids, 1000)
    answers = answers_in(talk.say(call("do", what="a") + call("do", what=what) + call("do", what="b")))
    assert [answers[0][:4], answers[2][:4]] == ["a by", "b by"]
    assert json.loads(answers[1]) == {"error": error}
    assert "fine by" in bad.tokenizer.decode(pending.result(60))
    assert talk.say("done") is None
    assert (talk.dialogue.outcome.tool_calls, talk.dialogue.outcome.tool_failures) == (4, 1)


def test_what_comes_back_is_cut_where_it_is_made(talks):
    many = talks(tools=["do"], max_tool_response_length=100)
    talk = many.begin(length=10**6)
    answers = answers_in(talk.say(call("do", what="long") + call("do", what="run")))
    assert answers == ["x" * 100 + "... (9999900 more characters)", "ran"]
    answers = answers_in(talk.say("".join(call("do", what="x") for _ in range(1000))))
    assert len(answers) == 1000 and len(set(answers)) <= 2 and str(os.getpid()) not in answers[0]
    talk.dialogue.close()


def test_async_tools_have_the_deadline_in_this_process(talks):
    talk = talks(tool_timeout=1.0, tools=["wait", "do"]).begin()
    answers = answers_in(talk.say(call("wait", seconds=0.0) + call("wait", seconds=60.0) + call("wait", seconds=0.0)))
    assert answers[0] == answers[2] == str(os.getpid())
    assert json.loads(answers[1]) == {"error": "wait gave no answer within 1 s"}


# --- environments


def test_an_instance_has_a_process_to_itself_which_is_used_again(talks):
    games = talks(environment="Game")
    pids = []
    for _ in range(2):
        running = [games.begin() for _ in range(4)]
        said = [[talk.say("go").split("user\n")[1].split("<")[0] for talk in running] for _ in range(2)]
        assert said[0] == said[1]
        pids.append({word.split()[0] for word in said[0]})
        assert len(pids[-1]) == 4
        for talk in running:
            assert talk.say("done") is None
            assert talk.dialogue.outcome.rewards == {"Game": 5.0}
            talk.dialogue.close()
    assert pids[0] == pids[1]
    # The second time it is the second instance of each process.
    assert {word.split()[1] for word in said[0]} == {"2"}


def test_methods_of_an_environment_run_in_its_process(talks):
    talk = talks(environment="Methods", tools=["do"]).begin(start=3)
    increased, shown, done = answers_in(talk.say(call("increase", by=2) + call("show") + call("do", what="x")))
    assert increased == "5" and shown.startswith("5 in ") and done.startswith("x by ")
    assert len({shown.split()[-1], done.split()[-1], str(os.getpid())}) == 3
    assert talk.say("done") is None and talk.dialogue.outcome.rewards == {"Methods": 5.0}


@pytest.mark.parametrize(
    ("text", "row", "task", "reason"),
    [
        ("hang", {}, "step", "gave no answer within 1 s"),
        ("exit", {}, "step", "lost its process (exit code 7)"),
        ("kill", {}, "step", "lost its process (SIGKILL)"),
        ("go", {"at_reset": "hang"}, "reset", "gave no answer within 1 s"),
        ("done", {"at_reward": "kill"}, "get_reward", "lost its process (SIGKILL)"),
    ],
)
def test_an_environment_that_is_lost_ends_its_completion_and_no_other(talks, caplog, tmp_path, text, row, task, reason):
    games = talks(tool_timeout=1.0 if reason.endswith("within 1 s") else 20.0, environment="Game")
    other = games.begin(closed=str(tmp_path / "closed"))
    talk = games.begin(**row)
    assert talk.say(text) is None
    outcome = talk.dialogue.outcome
    assert outcome.rewards == {"Game": 0.0} and len(outcome.messages) == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert f":Game': {task} {reason}: the completion ends with the reward 0" in record.getMessage()
    assert other.say("go") and other.say("done") is None
    assert other.dialogue.outcome.rewards == {"Game": 5.0}
    for each in (talk, other):
        each.dialogue.close()
        each.dialogue.close()
    assert (tmp_path / "closed").read_text() == "closed\n"
    assert games.begin().say("go")  # with the process that has taken the lost one's place


def test_a_death_between_two_calls_costs_the_completion_whose_instance_it_was(talks, caplog):
    games = talks(environment="Game")
    talk = games.begin()
    pid = int(talk.say("go").split("user\n")[1].split()[0])
    os.kill(pid, signal.SIGKILL)
    assert wait_until_dead(pid, 10)
    assert talk.say("go") is None and talk.dialogue.outcome.rewards == {"Game": 0.0}
    (record,) = caplog.records
    assert "step lost its process (SIGKILL): the completion ends" in record.getMessage()


def test_a_method_that_hangs_ends_the_completion(talks):
    talk = talks(tool_timeout=1.0, environment="Methods").begin(start=3)
    assert talk.say(call("increase", by=1)) is not None
    assert talk.say(call("increase", by=0)) is None
    outcome = talk.dialogue.outcome
    assert (outcome.finished, outcome.rewards) == (False, {"Methods": 0.0})
    assert (outcome.tool_calls, outcome.tool_failures) == (2, 1)


def test_a_close_that_hangs_is_said(talks, caplog):
    talk = talks(tool_timeout=1.0, environment="Game").begin(at_close="hang")
    assert talk.say("done") is None and talk.dialogue.outcome.rewards == {"Game": 5.0}
    (record,) = caplog.records
    assert "close gave no answer within 1 s" in record.getMessage()


def test_what_fails_in_a_process_ends_the_run_as_in_the_trainer(talks):
    games = talks(tool_timeout=1.0, environment="Game")
    talk = games.begin()
    with pytest.raises(RewardError, match=r"environment='.*:Game': step failed: KeyError\('a mistake'\)") as caught:
        talk.say("raise")
    assert 'case "raise": raise KeyError' in caught.value.traceback and "grpo/" not in caught.value.traceback
    talk.dialogue.close()
    with pytest.raises(RewardError, match="reset gave no answer within 1 s, as the data was read"):
        games.turns.observe({"at_reset": "hang"})
    assert games.turns.observe({"first": "Begin!"}) == "Begin!"


@pytest.mark.parametrize("which", [{"tools": ["tell"]}, {"environment": "Told"}])
def test_a_file_that_only_a_process_cannot_load_ends_the_run(tmp_path, which):
    code = "import sys\nassert 'pytest' in sys.modules, 'not here'\n"
    code += 'def tell():\n    """Tell."""\n'
    code += 'class Told:\n    def reset(self): pass\n    def tell(self):\n        """Tell."""\n'
    refused = pytest.raises(RewardError, match="a worker process could not load .*AssertionError.*not here")
    with closing(Talks(tmp_path, code, tool_timeout=5.0, **which)) as picky, refused:
        picky.begin().say(call("tell"))


def test_a_file_that_takes_too_long_to_load_is_said_to_and_not_to_have_died(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo.usercode.process._START_SECONDS", 3.0)
    code = "import sys, time\nif 'pytest' not in sys.modules: time.sleep(60)\n"
    code += 'def tell():\n    """Tell."""\n'
    slow = pytest.raises(RewardError, match="for .*tell was not ready in 3 s as it imported your files")
    with closing(Talks(tmp_path, code, tool_timeout=5.0, tools=["tell"])) as late, slow:
        late.begin().say(call("tell"))


def test_an_answer_that_is_given_up_does_not_reach_the_next_completion(talks):
    games = talks(environment="Game")
    talk = games.begin()
    ids = ids_of(games.tokenizer, "go")
    for _ in range(3):
        talk.dialogue.answer(ids, 1000).cancel()
    talk.dialogue.close()
    other = games.begin()
    assert other.say("go") and other.say("done") is None
