"""Tools and environments that hang, end their process or return too much: real processes, really killed."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing

import psutil
import pytest
from conftest import ENVIRONMENT, REPOSITORY
from processes import is_alive, wait_until_dead
from talks import Talks, answers_in, call

from grpo.config.errors import RewardError
from grpo.usercode.prints import SHOWN_CHARACTERS

pytestmark = pytest.mark.slow

CODE = r'''
import asyncio, os, re, signal, subprocess, time

def do(what: str) -> str:
    """Do something.

    Args:
        what: it
    """
    return act(what)

async def wait(seconds: float) -> int:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return os.getpid()

def act(what):
    if what == "hang":
        time.sleep(600)
    elif what == "regex":  # 2^60 steps in C, with the GIL
        re.fullmatch("(a|a)*b", "a" * 60)
    elif what == "exit":
        os._exit(7)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise KeyError("a mistake")
    elif what == "sys.exit":
        raise SystemExit(3)
    elif what == "run":  # as many a tool of async code does
        return str(asyncio.run(asyncio.sleep(0, "ran")))
    elif what == "long":
        return "x" * 10_000_000
    elif what == "print":
        print("p" * 10_000_000)
    elif what.startswith("child "):
        file = what[6:]
        code = 'setsid sh -c \'echo $$ > "$0"; exec sleep 600\' "$0" & until [ -s "$0" ]; do sleep 0.01; done'
        subprocess.run(["sh", "-c", code, file])
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
            by: how much
        """
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


def workers_below() -> list[psutil.Process]:
    """The guards and workers of all tests of this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "usercode.child import run_worker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


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
    ids = bad.tokenizer(call("do", what="fine"), add_special_tokens=False)["input_ids"] + [bad.tokenizer.eos_token_id]
    assert answers_in(talk.say(call("do", what="fine")))  # a process has started
    pending = other.dialogue.answer(ids, 1000)
    answers = answers_in(talk.say(call("do", what="a") + call("do", what=what) + call("do", what="b")))
    assert [answers[0][:4], answers[2][:4]] == ["a by", "b by"]
    assert json.loads(answers[1]) == {"error": error}
    assert "fine by" in bad.tokenizer.decode(pending.result(60))
    assert talk.say("done") is None
    assert (talk.dialogue.outcome.tool_calls, talk.dialogue.outcome.tool_failures) == (4, 1)


def test_what_comes_back_is_cut_where_it_is_made(talks, capfd, caplog):
    many = talks(tools=["do"], max_tool_response_length=100)
    talk = many.begin(length=10**6)
    answers = answers_in(talk.say(call("do", what="long") + call("do", what="run") + call("do", what="print")))
    assert answers[0] == "x" * 100 + "... (9999900 more characters)"
    assert answers[1] == "ran" and answers[2].startswith("print by")
    answers = answers_in(talk.say("".join(call("do", what="x") for _ in range(1000))))
    assert len(answers) == 1000 and len(set(answers)) <= 2 and str(os.getpid()) not in answers[0]
    talk.dialogue.close()
    shown, end = "", time.monotonic() + 20
    while "ppp" not in shown and time.monotonic() < end:
        shown += "".join(capfd.readouterr())
    assert shown.count("p") <= 2 * SHOWN_CHARACTERS
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("grpo")]
    assert all("more characters for this batch" in line for line in ours)


def test_async_tools_have_the_deadline_in_this_process(talks):
    talk = talks(tool_timeout=1.0, tools=["wait", "do"]).begin()
    answers = answers_in(talk.say(call("wait", seconds=0.0) + call("wait", seconds=60.0) + call("wait", seconds=0.0)))
    assert answers[0] == answers[2] == str(os.getpid())
    assert json.loads(answers[1]) == {"error": "wait gave no answer within 1 s"}


def test_what_tools_started_ends_with_their_processes(talks, tmp_path):
    forking = talks(tools=["do"])
    before = {process.pid for process in workers_below()}
    talk = forking.begin()
    talk.say(call("do", what=f"child {tmp_path / 'pid'}"))
    talk.dialogue.close()
    pid = int((tmp_path / "pid").read_text())
    own = {process.pid for process in workers_below()} - before
    assert is_alive(pid) and own
    forking.turns.close()
    assert wait_until_dead(pid, 10) and not [worker for worker in own if is_alive(worker)]


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


def test_a_death_between_two_calls_costs_only_the_completion_whose_instance_it_was(talks, caplog):
    games = talks(environment="Game")

    def kill_process_of(talk) -> None:
        pid = int(talk.say("go").split("user\n")[1].split()[0])
        os.kill(pid, signal.SIGKILL)
        assert wait_until_dead(pid, 10)

    talk = games.begin()
    kill_process_of(talk)
    assert talk.say("go") is None and talk.dialogue.outcome.rewards == {"Game": 0.0}
    talk.dialogue.close()
    (record,) = caplog.records
    assert "step lost its process (SIGKILL): the completion ends" in record.getMessage()

    caplog.clear()
    talk = games.begin()
    pid = int(talk.say("go").split("user\n")[1].split()[0])
    assert talk.say("done") is None and talk.dialogue.outcome.rewards == {"Game": 5.0}
    talk.dialogue.close()
    os.kill(pid, signal.SIGKILL)
    assert wait_until_dead(pid, 10)
    talk = games.begin()
    assert talk.say("done") is None and talk.dialogue.outcome.rewards == {"Game": 5.0}
    talk.dialogue.close()
    assert not caplog.records


def test_a_tool_whose_process_died_between_two_calls_is_answered(talks, caplog):
    talk = talks(tools=["do"]).begin()
    for _ in range(2):
        (answer,) = answers_in(talk.say(call("do", what="x")))
        pid = int(answer.removeprefix("x by "))
        os.kill(pid, signal.SIGKILL)
        assert wait_until_dead(pid, 10)
    talk.dialogue.close()
    assert not caplog.records


def test_a_method_that_hangs_ends_the_completion(talks):
    talk = talks(tool_timeout=1.0, environment="Methods").begin(start=3)
    assert talk.say(call("increase", by=1)) is not None
    assert talk.say(call("increase", by=0)) is None
    outcome = talk.dialogue.outcome
    assert (outcome.finished, outcome.rewards, outcome.tool_calls, outcome.tool_failures) == (
        *(False, {"Methods": 0.0}, 2, 1),
    )


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
    assert "in act\n    raise KeyError" in caught.value.traceback and "grpo/" not in caught.value.traceback
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


def test_an_answer_that_is_given_up_does_not_reach_the_next_completion(talks):
    games = talks(environment="Game")
    talk = games.begin()
    ids = games.tokenizer("go", add_special_tokens=False)["input_ids"] + [games.tokenizer.eos_token_id]
    for _ in range(3):
        talk.dialogue.answer(ids, 1000).cancel()
    talk.dialogue.close()
    other = games.begin()
    assert other.say("go") and other.say("done") is None


PARENT = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from talks import Talks, call, ids_of
import psutil
folder = Path(sys.argv[1])
folder.mkdir()
talks = Talks(folder, Path(sys.argv[2]).read_text(), environment="Game", tools=["do"], tool_timeout=600.0)
running = [talks.begin() for _ in range(3)]
for talk in running:
    talk.say("go")
running[0].say(call("do", what=f"child {folder / 'pid'}"))
pids = [child.pid for child in psutil.Process().children(recursive=True)]
print(*pids, flush=True)
running[0].say("hang")
"""


def test_nothing_is_left_of_a_trainer_that_is_killed(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "run"), str(tmp_path / "code.py")]
    with subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) >= 8 and int((tmp_path / "run/pid").read_text()) in pids
        parent.send_signal(signal.SIGKILL)
        assert [pid for pid in pids if not wait_until_dead(pid, 10)] == []
