"""The signals of one process: what asks, and what ends at once. Whole runs are stopped in test_resume.py."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from unittest.mock import Mock

import psutil
import pytest
from conftest import REPOSITORY
from servers import wait_until

from grpo.client.server_errors import ServersLost
from grpo.run.exit import _GRACE, FOR_GOOD, EndRun, code_of
from grpo.trainer import record

WORK = """
import sys, time
from pathlib import Path
from grpo.run.exit import Launcher, StopSignals
stop = StopSignals(Launcher(), folder=Path(sys.argv[1]) if sys.argv[1] else None)
print("ready", flush=True)
while not stop.asked:
    time.sleep(0.01)
print("asked", flush=True)
for _ in sys.stdin:
    print(stop.asked, flush=True)
"""
UNREAD = """
import sys
from grpo.run.exit import Launcher, StopSignals
stop = StopSignals(Launcher())
print("ready", flush=True)
sys.stdin.readline()
print("lost", flush=True)
print("lost too", file=sys.stderr, flush=True)
print("lost as well")
sys.exit(stop.asked)
"""


@contextmanager
def worker(work: str = WORK, folder: str = ""):
    """A process that catches signals by now, and `grpo stop` in a folder."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", work, folder]
    with subprocess.Popen(command, cwd=REPOSITORY, text=True, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def send(process, *numbers: int) -> None:
    """All at the same time, as far as the process can see."""
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        pass
    for number in numbers:
        process.send_signal(number)
    process.send_signal(signal.SIGCONT)


def next_line(process) -> str:
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM)]
)
def test_a_signal_and_what_the_launcher_makes_of_it_ask_once(numbers):
    with worker() as process:
        send(process, *numbers)
        assert process.stdout.readline() == "asked\n"
        send(process, signal.SIGTERM)
        assert next_line(process) == f"{min(numbers)}\n"
        _, errors = process.communicate("\n", timeout=20)
        assert process.returncode == 0 and errors.count("stopping after this step") == 1


@pytest.mark.parametrize(
    "number, pause", [(signal.SIGINT, 0.1), pytest.param(signal.SIGTERM, _GRACE + 0.5, marks=pytest.mark.slow)]
)
def test_a_second_signal_ends_at_once(number, pause):
    with worker() as process:
        send(process, number)
        assert process.stdout.readline() == "asked\n"
        time.sleep(pause)
        send(process, number)
        assert process.wait(timeout=20) == 128 + number


def test_the_alarm_of_a_reward_function_asks_nothing():
    handler = "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
    with worker(f"{handler}signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)\n{WORK}") as process:
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked\n" and next_line(process) == f"{signal.SIGINT}\n"
        assert process.poll() is None


FORKS = """
import multiprocessing, time
from grpo.run.exit import Launcher, StopSignals
stop = StopSignals(Launcher())
print("ready", flush=True)
for _ in range(20):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
print(stop.asked, flush=True)
"""


def test_what_a_reward_function_forks_ends_by_its_own_signals():
    with worker(FORKS) as process:
        assert process.stdout.readline() == "0\n"


def test_a_closed_terminal_asks_once_unless_nohup_has_it_ignored():
    with worker() as process:
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.1)
        assert process.stdout.readline() == "asked\n" and next_line(process) == f"{signal.SIGHUP}\n"
        process.communicate("\n", timeout=20)
        assert process.returncode == 0
    with worker("import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + WORK) as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked\n" and next_line(process) == f"{signal.SIGINT}\n"


def test_the_file_of_grpo_stop_asks_and_a_signal_then_ends_at_once(tmp_path):
    with worker(folder=str(tmp_path)) as process:
        time.sleep(1.2)
        (tmp_path / "stop").touch()
        assert process.stdout.readline() == "asked\n" and next_line(process) == f"{FOR_GOOD}\n"
        process.send_signal(signal.SIGHUP)  # a closed terminal does not end what saves
        time.sleep(0.1)
        assert process.poll() is None
        send(process, signal.SIGTERM)  # no launcher passes it on: it is the user's
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
        assert process.stderr.read() == "\ngrpo stop: stopping after this step; a signal ends it at once\n"


def test_after_a_signal_the_file_of_grpo_stop_makes_the_end_final(tmp_path):
    with worker(folder=str(tmp_path)) as process:
        send(process, signal.SIGTERM)
        assert process.stdout.readline() == "asked\n"
        (tmp_path / "stop").touch()
        wait_until(lambda: next_line(process) == f"{FOR_GOOD}\n")
        _, errors = process.communicate("\n", timeout=20)
        assert errors == "\nSIGTERM: stopping after this step; once more ends it at once\n"
    assert (code_of(FOR_GOOD), code_of(signal.SIGTERM)) == (0, 143) and max(signal.valid_signals()) < FOR_GOOD


@pytest.mark.parametrize(
    "by_rank, code, told",
    [
        ([0, FOR_GOOD], 0, "stopped by grpo stop"),
        ([FOR_GOOD, signal.SIGTERM, 0], 0, "stopped by grpo stop"),
        ([signal.SIGINT, signal.SIGTERM], 143, "stopped by signal 15"),
        ([0, 0], 1, ""),
    ],
)
def test_all_ranks_end_alike_whichever_of_them_were_asked(by_rank, code, told, monkeypatch):
    """After a step, and where what they wait for is lost."""
    monkeypatch.setattr(record, "gather", lambda _: by_rank)
    for asked in by_rank:
        run = Mock(stop=Mock(asked=asked), progress=Mock(bad_steps=[]), is_last=lambda step: step == 9)
        with pytest.raises(EndRun) as end, record.saved_at_the_end(run):
            raise ServersLost("the reference is away")
        assert end.value.code == code and run.checkpoints.leave.call_count == 1
        with pytest.raises(EndRun) if told else nullcontext() as end:
            record.raise_if_over(run, 8, Mock(clash=None), [])
        assert not told or (end.value.code, str(end.value)) == (code, told)
        record.raise_if_over(run, 9, Mock(clash=None), [])  # it is done


def test_a_screen_that_nobody_reads_any_more_asks_and_is_no_error():
    with worker(UNREAD) as process:
        process.stdout.close(), process.stderr.close()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(timeout=20) == signal.SIGTERM


# Three processes as DeepSpeed's launcher has them, each of which writes its number. The lower one waits for a file.
RANK = """
import os, pathlib, time
print("rank", os.getpid(), flush=True)
from grpo.run.exit import Launcher
while not pathlib.Path(os.environ["LOOK"]).exists():
    time.sleep(0.01)
Launcher()
time.sleep(600)
"""
LOWER = """
import os, pathlib, subprocess, sys, time
print("lower", os.getpid(), flush=True)
while not pathlib.Path(sys.argv[3]).exists():
    time.sleep(0.01)
sys.exit(subprocess.call([sys.executable, "-c", sys.argv[2]]))
"""
UPPER = "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


@pytest.mark.parametrize("whose, when", [("upper", "early"), ("upper", ""), ("lower", ""), ("lower", "unseen")])
def test_a_launcher_that_ends_while_its_ranks_start_ends_them(whose, when, tmp_path):
    """early: before the rank is there; unseen: before it looks for a launcher."""
    go, look, early = tmp_path / "go", tmp_path / "look", when == "early"
    if when != "unseen":
        look.touch()
    command = [sys.executable, "-c", UPPER, LOWER, "deepspeed.launcher.launch", RANK, str(go)]
    shared = {"cwd": REPOSITORY, "env": os.environ | {"CROSS_SIZE": "1", "LOOK": str(look)}, "start_new_session": True}
    upper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **shared)
    pids = {"upper": upper.pid}

    def read_number() -> None:
        name, number = upper.stdout.readline().split()
        pids[name] = int(number)

    with upper:
        try:
            read_number()
            if early:
                upper.kill(), upper.wait()
            go.touch()
            read_number()
            if not early:  # else the rank may have ended
                assert psutil.Process(pids["rank"]).ppid() == pids["lower"]
                time.sleep(0 if when == "unseen" else 1)
                assert psutil.pid_exists(pids["rank"])
                psutil.Process(pids[whose]).kill()
            if when == "unseen":
                upper.wait()
                look.touch()
            output = upper.stdout.read()  # until none has it open
            assert output.endswith("error: the launcher is gone, and no step was done: start it again\n")
        finally:
            for number in pids.values():
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(number).kill()
