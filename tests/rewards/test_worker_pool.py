"""Reward functions that hang, end their process or wait: real worker processes, really killed."""

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY
from processes import is_alive, wait_until_dead
from servers import wait_until

from grpo.config.errors import RewardError
from grpo.config.trainer import TrainerConfig
from grpo.rewards.compute import compute_rewards, load_reward_funcs, start_rewards
from grpo.rewards.functions import RewardPool
from grpo.usercode import process as process_module
from grpo.usercode.prints import SHOWN_CHARACTERS

pytestmark = pytest.mark.slow

FUNCTIONS = r'''
import asyncio, contextlib, multiprocessing, os, random, re, signal, subprocess, sys, threading, time

def length(prompts, completions, **columns):
    """Return the length of each completion, after running the completion if it is a command."""
    for completion in completions:
        run(completion)
    return [float(len(completion)) for completion in completions]

def run(completion):
    match completion.split():
        case ["sleep"]: time.sleep(600)
        case ["exit"]: os.execlp("sh", "sh", "-c", "exit 7")
        case ["sys.exit"]: sys.exit()
        case ["orphan"]: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(600)
        case ["stop"]: os.kill(os.getppid(), signal.SIGSTOP) or time.sleep(600)
        case ["segfault"]: os.kill(os.getpid(), signal.SIGSEGV)
        case ["memory"]: raise MemoryError
        case ["terminate"]:
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            child.start(), child.terminate(), child.join()
        case ["regex"]: re.fullmatch("(a|a)*b", "a" * 60)  # 2^60 steps in C, with the GIL
        case ["child", file]: subprocess.run(["sh", "-c", 'echo $$ > "$0"; exec sleep 600', file])
        case ["daemon", then, file]:  # no parent, no environment, and a session of its own
            daemon = """setsid sh -c 'echo $$ > "$0"; exec sleep 600' "$0" & until [ -s "$0" ]; do sleep 0.01; done"""
            subprocess.run(["sh", "-c", daemon, file], env={})
            run(then)
        case ["print", count]:
            print("é" * int(count))
            subprocess.run(["echo", "a child's"])
        case ["close"]: os.closerange(3, 64) or time.sleep(600)
        case ["fork"]: os.fork()
        case ["forge"]:
            for descriptor in range(3, 64):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b'{"reward": 99.0}\n')
        case ["input"]: assert sys.stdin.read() == ""

def pid(prompts, completions, **columns):
    return [float(os.getpid()) for _ in completions]

def gold(prompts, completions, answer, level, **columns):
    return [None if a is None else float(a == c) + n for a, c, n in zip(answer, completions, level)]

def text(prompts, completions, **columns):
    return ["high" for _ in completions]

def logs(prompts, completions, log_extra, **columns):
    log_extra("long", ["x" * int(completion) for completion in completions])
    return [1.0 for _ in completions]

def chance(prompts, completions, **columns):
    return [random.random() for _ in completions]

async def judged(prompts, completions, **columns):
    if "never" in completions:
        await asyncio.Event().wait()
    if "timeout" in completions:
        raise TimeoutError("of its own")
    return [float(len(c)) for c in completions]
'''


@pytest.fixture(scope="session")
def functions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def pooled(functions):
    """`pooled(name, ..., timeout=...)`: the functions of these names in a pool of two processes."""
    pools = []

    def make(*names: str, timeout: float = 30.0) -> dict:
        pools.append(RewardPool([f"{functions}:{name}" for name in names], timeout, workers=2))
        return {name: pools[-1].make_function(f"{functions}:{name}") for name in names}

    yield make
    for pool in pools:
        pool.close()


def is_worker(process: psutil.Process) -> bool:
    """Tell whether a process is a guard or the worker below it."""
    try:
        return "usercode.child import run_worker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def rewards(functions: dict, completions: list[str], **columns: list) -> list[list[float]]:
    return compute_rewards(functions, ["p"] * len(completions), completions, columns).tolist()


def test_what_a_function_draws_is_the_same_in_whichever_process(pooled):
    def draws(key: tuple) -> list[float]:
        return compute_rewards(pooled("chance"), ["p"] * 8, ["a"] * 8, {}, key=key)[0].tolist()

    first, others = draws((7, 3)), draws((7, 4))
    assert draws((7, 3)) == first and len({*first, *others}) == 16


def test_a_function_ends_what_it_forks(pooled):
    assert rewards(pooled("length", timeout=20.0), ["terminate", "a"]) == [[9, 1]]


@pytest.mark.timed
@pytest.mark.parametrize("hang", ["sleep", "regex"])
def test_a_hang_costs_its_completion_and_no_other(pooled, caplog, hang):
    length = pooled("length", timeout=0.5)
    rewards(length, ["a", "b"])  # both processes have begun
    began = time.monotonic()
    assert rewards(length, ["a", "bb", "ccc", hang, "ddddd", "e", "ff", "ggg"]) == [[1, 2, 3, 0, 5, 1, 2, 3]]
    assert 0.5 <= time.monotonic() - began < 10
    (line,) = [record for record in caplog.records if record.name == "grpo.rewards.functions"]
    assert line.levelno == logging.ERROR
    assert line.getMessage() == (
        f"reward function 'length' gave no answer within 0.5 s on the completion '{hang}': that earns 0"
    )


def test_an_answer_that_came_in_time_counts_though_it_is_read_late(pooled, monkeypatch):
    length = pooled("length", timeout=1.0)
    rewards(length, ["a", "b"])  # both processes have begun
    looks = itertools.count()  # at the clock, of a process that is stopped for ten seconds between any two
    monkeypatch.setattr(process_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 10 * next(looks)))
    assert rewards(length, ["bb"]) == [[2]]


@pytest.mark.parametrize(
    "death, reason",
    [
        *[("exit", "lost its process (exit code 7)"), ("sys.exit", "lost its process (exit code 0)")],
        *[("segfault", "lost its process (SIGSEGV)"), ("memory", "lost its process (exit code 1)")],
        *[("orphan", "lost its process (SIGKILL)"), ("close", "lost its process (it closed its connection)")],
        ("forge", "wrote where its process replies"),
    ],
)
def test_a_death_costs_its_completion_and_no_other(pooled, caplog, death, reason):
    length = pooled("length")
    for _ in range(2):
        assert rewards(length, ["a", death, "ccc", "dddd"]) == [[1, 0, 3, 4]]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"reward function 'length' {reason} on the completion '{death}': that earns 0"] * 2


def test_code_that_stops_the_process_above_it_costs_its_completion_too(pooled, monkeypatch):
    monkeypatch.setattr(process_module, "END_SECONDS", 0.5)
    before = set(psutil.Process().children(recursive=True))  # of other tests' pools
    assert rewards(pooled("length", timeout=1), ["a", "stop", "ccc"]) == [[1, 0, 3]]
    below = set(psutil.Process().children(recursive=True)) - before
    assert 0 < sum(map(is_worker, below)) <= 4


def test_more_hangs_than_processes_are_all_survived(pooled):
    length = pooled("length", timeout=1)
    assert rewards(length, ["sleep"] * 3 + ["a"]) == [[0] * 3 + [1]]
    assert rewards(length, ["a", "bb"]) == [[1, 2]]


def test_processes_are_reused_and_only_a_lost_one_is_replaced(pooled):
    both = pooled("pid", "length", timeout=5)
    pids = lambda: set(rewards({"pid": both["pid"]}, ["x"] * 50)[0])  # noqa: E731
    first = pids() | pids()
    assert len(first) == 2 and os.getpid() not in first
    assert pids() <= first
    assert rewards({"length": both["length"]}, ["exit"]) == [[0]]
    assert len((pids() | pids()) & first) == 1
    assert sum(is_alive(int(pid)) for pid in first) == 1


def test_a_process_that_dies_between_two_calls_costs_no_reward(pooled, caplog):
    both = pooled("pid", "length")
    workers = {int(pid) for pid in rewards({"pid": both["pid"]}, ["x"] * 50)[0]}
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert all(wait_until_dead(pid, 10) for pid in workers)  # their guards may still live
    assert rewards({"length": both["length"]}, ["a"] * 8) == [[1] * 8]
    assert not caplog.records


def test_a_process_is_replaced_where_the_first_was_started(functions, monkeypatch):
    """Another function of the run may change the trainer's directory."""
    monkeypatch.chdir(functions.parent)
    pool = RewardPool(["functions.py:length"], 30.0, workers=1)
    monkeypatch.chdir("/")
    assert rewards({"length": pool.make_function("functions.py:length")}, ["exit", "a"]) == [[0, 1]]
    pool.close()


@pytest.mark.parametrize("then", ["sleep", "exit", "segfault"])
def test_what_a_lost_call_started_is_killed_wherever_it_hides(pooled, tmp_path, then):
    assert rewards(pooled("length", timeout=5), [f"daemon {then} {tmp_path / 'pid'}", "a"]) == [[0, 1]]
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_sigterm_to_all_below_the_trainer_costs_no_reward(pooled, tmp_path):
    length, file = pooled("length", timeout=20), tmp_path / "pid"
    assert rewards(length, ["a"]) == [[1]]

    def end_all() -> list[psutil.Process]:
        wait_until(lambda: file.exists() and file.read_text())
        ours = list(filter(is_worker, psutil.Process().children(recursive=True)))
        for process in ours:
            process.terminate()
        psutil.Process(int(file.read_text())).terminate()  # what the user's code started does not ignore it
        return ours

    with ThreadPoolExecutor() as threads:
        ended = threads.submit(end_all)
        asked = f"child {file}"
        assert rewards(length, [asked, "bb"]) == [[len(asked), 2]]
    assert len(ended.result()) >= 4  # two workers, each below its guard
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in ended.result())


def test_columns_none_and_a_batch_of_one_arrive_as_in_the_trainer(pooled):
    gold = pooled("gold")
    asked = dict(answer=["a", "x", None], level=[1, 2, 3])
    np.testing.assert_array_equal(rewards(gold, ["a", "b", "c"], **asked), [[2, 2, np.nan]])
    assert compute_rewards(gold, [], [], {"answer": [], "level": []}).shape == (1, 0)


def test_code_that_forks_is_answered_for_once_and_code_that_asks_for_input_gets_none(pooled):
    completions = ["a", "fork", "input", "fork", *("x" * n for n in range(20))]
    for _ in range(2):
        assert rewards(pooled("length", timeout=5), completions) == [[len(completion) for completion in completions]]


@pytest.mark.parametrize("where", ["worker", "trainer"])
def test_what_functions_print_is_shown_up_to_a_limit_for_each_batch(functions, pooled, capfd, caplog, where):
    length = pooled("length") if where == "worker" else load_reward_funcs([f"{functions}:length"])

    def left_out() -> int:
        return sum(record.args[0] for record in caplog.records)

    def shown(count: int) -> int:
        """Return how many arrive in time, of `count` that were printed less those that the log says are left out."""
        seen, end = 0, time.monotonic() + 20
        while seen + left_out() < count and time.monotonic() < end:
            seen += "".join(capfd.readouterr()).count("é")
            rewards(length, ["a"])  # prints that come too late for a batch count for the next one
        return seen

    for _ in range(2):
        rewards(length, ["print 10"] * 2)
        assert shown(20) == 20
    assert not caplog.records
    rewards(length, ["print 300000"] * 2)
    assert 65_000 < shown(600_000) <= SHOWN_CHARACTERS * (2 if where == "worker" else 1)
    assert 450_000 < left_out() < 600_000
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


@pytest.mark.timed
def test_a_reply_of_many_megabytes_comes_in_time(pooled):
    assert rewards(pooled("logs", timeout=4.0), ["50000000"]) == [[1]]


def test_what_is_no_reward_is_refused_as_in_the_trainer(pooled):
    with pytest.raises(RewardError, match="'text' returned 'high' for the completion 'a': a reward is a finite number"):
        rewards(pooled("text"), ["a"])


PARENT = """
import psutil, sys
from grpo.rewards.functions import RewardPool
from grpo.rewards.compute import compute_rewards
pool = RewardPool([sys.argv[1]], 600.0, workers=2)
function = {"f": pool.make_function(sys.argv[1])}
compute_rewards(function, ["p"] * 4, ["a"] * 4, {})
print(*(guard.pid for guard in psutil.Process().children()), flush=True)
compute_rewards(function, ["p"] * 2, ["regex", sys.argv[2]], {})
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("child", ["child", "daemon sleep"])
def test_nothing_is_left_of_a_trainer_that_is_killed(functions, tmp_path, end, child):
    command = [sys.executable, "-c", PARENT, f"{functions}:length", f"{child} {tmp_path / 'pid'}"]
    with subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as parent:
        guards = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
        pids = [process.pid for guard in guards for process in (guard, *guard.children())]
        assert len(pids) >= 4  # what the second batch starts may be there already
        file = tmp_path / "pid"
        wait_until(lambda: file.exists() and file.read_text())
        pids.append(int(file.read_text()))
        assert all(map(is_alive, pids))
        parent.send_signal(end)
        assert [pid for pid in pids if not wait_until_dead(pid, 10)] == []


def test_a_closed_pool_leaves_no_process(functions, tmp_path):
    others = {child.pid for child in psutil.Process().children(recursive=True)}  # of other tests
    pool = RewardPool([f"{functions}:length"], 600.0, workers=2)
    daemon = f"daemon return {tmp_path / 'pid'}"
    assert rewards({"f": pool.make_function(f"{functions}:length")}, [daemon]) == [[len(daemon)]]
    pids, until = [], time.monotonic() + 20
    while len(pids) < 5 and time.monotonic() < until:  # the second worker may still be starting
        pids = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in others]
    assert int((tmp_path / "pid").read_text()) in pids and len(pids) >= 5
    assert all(map(is_alive, pids))
    pool.close()
    assert not any(map(is_alive, pids))


# --- what is awaited


def test_async_functions_and_objects_are_awaited_together():
    begun = []

    async def waits(completions, **columns):
        begun.append(completions)
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        return [1.0]

    class Judge:
        async def __call__(self, **arguments):
            return await asyncio.wait_for(waits(**arguments), 20)

    assert rewards({"judge": Judge(), "function": waits}, ["x"]) == [[1], [1]]


def test_they_wait_while_the_others_compute_in_the_main_thread():
    begun, computed = threading.Event(), threading.Event()

    async def waits(prompts, completions, **columns):
        begun.set()
        while not computed.is_set():
            await asyncio.sleep(0.01)
        return [3.0]

    def computes(prompts, completions, **columns):
        assert threading.current_thread() is threading.main_thread()
        assert begun.wait(20)
        asyncio.run(asyncio.sleep(0))  # as many a function of TRL's users does: it is not in a loop
        computed.set()
        return [4.0]

    assert rewards({"computes": computes, "waits": waits}, ["x"]) == [[4], [3]]


def test_with_a_timeout_both_kinds_have_deadlines(functions, caplog):
    config = TrainerConfig(reward_funcs=[f"{functions}:length", f"{functions}:judged"], reward_timeout=1)
    both, pool = start_rewards(load_reward_funcs(config.reward_funcs), config, torch.device("cpu"))
    raised = r"'judged' failed on the completion 'timeout': TimeoutError\('of its own'\)"
    with closing(pool):
        assert rewards(both, ["a", "sleep", "never", "dddd"]) == [[1, 0, 5, 4], [1, 5, 0, 4]]
        with pytest.raises(RewardError, match=raised):
            rewards({"judged": both["judged"]}, ["a", "timeout"])
    errors = sorted(record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    shown = "gave no answer within 1 s on the completion"
    assert len(errors) == 2 and f"'judged' {shown} 'never'" in errors[0] and f"'length' {shown} 'sleep'" in errors[1]
