"""AgentPrograms of episodes, in real processes; the API that they call is a small server of the test."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import closing
from datetime import date
from decimal import Decimal

import numpy as np
import psutil
import pytest
from conftest import REPOSITORY
from judges import judging, verdict
from processes import is_alive, left_of
from servers import wait_until

from grpo.agents.agent_processes import AgentPrograms, Answer
from grpo.agents.episodes import Agent
from grpo.config.errors import ConfigError, RewardError
from grpo.config.sampling_settings import AskedSections

AGENT = """
import ctypes, multiprocessing, os, random, subprocess, sys, threading, time
import numpy
from decimal import Decimal
from helper import double

print("the file is imported")
COUNT = []

async def solve(task, client):
    COUNT.append(1)
    returned = globals()[task["do"]](task)
    return await returned(client) if callable(returned) else returned

def ask(task):
    async def ask(client):
        made = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2 + 3"}])
        return {"reward": double(float(made.choices[0].message.content)), "parts": {"count": len(COUNT)}}
    return ask

def value(task):
    return eval(task["value"])

def run(task):
    exec(task["code"], globals() | {"task": task})

def touch(path):
    open(path, "w").close()

def wait_for(condition):
    while not condition():
        time.sleep(0.01)

def wait(task):
    touch(f"{task['folder']}/{task['name']}")
    wait_for(lambda: len(os.listdir(task["folder"])) >= task["count"])
    return task["name"]

def daemon(task):
    # A fork of a fork in a session of its own: nobody waits for it, and its parent is not the program.
    start = "setsid sh -c 'echo $$ > $0.new; mv $0.new $0; exec sleep 600' " + task["file"] + " > /dev/null 2>&1 &"
    subprocess.run(["sh", "-c", start], start_new_session=True)
    wait_for(lambda: os.path.exists(task["file"]))
    if task.get("stays"):
        time.sleep(600)
    return 1

def plain(task, client):
    made = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2 + 3"}])
    return float(made.choices[0].message.content)
"""


@pytest.fixture(scope="module")
def api():
    """An API that answers each request with 5."""
    with judging(lambda body, number: verdict("5")) as server:
        yield server


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    (folder / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    # By this name there is a file beside host.py, too.
    (folder / "calls.py").write_text("")
    (folder / "my-agent.py").write_text(AGENT)
    return f"{folder}/my-agent.py"


def started(agent, url="http://127.0.0.1:9/v1", timeout=60, **options):
    return closing(AgentPrograms(agent, url, timeout=timeout, **options))


@pytest.fixture(scope="module")
def programs(agent, api):
    with started(f"{agent}:solve", api.url) as programs:
        yield programs


def questions(api):
    return {(path, key, body["messages"][0]["content"]) for path, key, body in api.asked}


def end_of(programs, row, key="sk-1"):
    return programs.begin(row, key, 7).result.result(60)


def run(programs, code, **row):
    return end_of(programs, {"do": "run", "code": code, **row})


def read_pid(file):
    while not file.exists():
        time.sleep(0.01)
    return int(file.read_text())


def host_of_this_process() -> int:
    """The process that was started last for programs."""
    hosts = [each for each in psutil.Process().children() if any("host.py" in word for word in each.cmdline())]
    return max(hosts, key=lambda each: each.create_time()).pid


def below(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_a_coroutine_asks_with_its_key(programs, api):
    running = [programs.begin({"do": "ask"}, f"sk-{i}", 7) for i in range(4)]
    answers = [program.result.result(60).answer for program in running]
    # Each runs in a process of its own: none sees the others' count.
    assert answers == 4 * [Answer(reward=10.0, passed=None, parts={"count": 1.0})]
    assert questions(api) == {("/v1/chat/completions", f"Bearer sk-{i}", "2 + 3") for i in range(4)}


def test_a_function_asks_past_the_proxy_of_the_machine(agent, api, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with started(f"{agent}:plain", api.url) as programs:
        assert end_of(programs, {}, "sk-plain").answer == Answer(reward=5.0)
    assert ("/v1/chat/completions", "Bearer sk-plain", "2 + 3") in questions(api)


COMMAND = """#!/bin/sh
echo "url=$OPENAI_BASE_URL key=$OPENAI_API_KEY row=$(head -c 500)" >&2
echo "a line of the log"
[ "$1" = fail ] && exit 3
echo '{"reward": 0.25, "passed": false, "parts": {"length": 3}}'
echo
"""


def test_a_command_gets_url_key_and_row_and_prints_its_reward(tmp_path, capfd):
    script = tmp_path / "an agent.sh"
    script.write_text(COMMAND)
    script.chmod(0o755)
    with started(f"command: '{script}'") as programs:
        row = {"question": "é" * 100_000}  # more than a pipe holds, and the script does not read it all
        assert end_of(programs, row).answer == Answer(reward=0.25, passed=False, parts={"length": 3.0})
    with started(f"command: sh '{script}' fail") as programs:
        ending = end_of(programs, {"question": "2 + 3"}, "sk-2")
    assert (ending.answer, ending.failure) == (None, "exit code 3")
    assert ending.text == 'url=http://127.0.0.1:9/v1 key=sk-2 row={"question": "2 + 3"}\n'


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("3", Answer(reward=3.0)),
        ("-0.5", Answer(reward=-0.5)),
        ("True", Answer(reward=1.0, passed=True)),
        ("False", Answer(reward=0.0, passed=False)),
        ("None", Answer(reward=None)),
        ("numpy.float32(0.5)", Answer(reward=0.5)),
        ("numpy.bool_(True)", Answer(reward=1.0, passed=True)),
        ("{'reward': None, 'passed': True}", Answer(reward=None, passed=True)),
        ("{'reward': True, 'parts': {'a': 1, 'b': False}}", Answer(reward=1.0, parts={"a": 1.0, "b": 0.0})),
        *(
            (value, None)
            for value in (
                *("'1.0'", "float('nan')", "float('inf')", "10 ** 400", "[1.0]", "object()", "{'reward': '1'}", "{}"),
                *("{'passed': True}", "{'reward': 1, 'score': 1}", "{'reward': 1, 'passed': 1}", "Decimal('1')"),
                *("{'reward': 1, 'parts': [1]}", "{'reward': 1, 'parts': {'a': float('nan')}}", "1 + 2j"),
                *("{'reward': 1, 'parts': {'a': None}}", "'x' * 5_000_000", "list(range(10 ** 6))"),
            )
        ),
    ],
)
def test_what_a_program_returns_is_read_or_refused(programs, value, answer):
    ending = end_of(programs, {"do": "value", "value": value})
    assert ending.answer == answer
    if answer is None:
        assert ending.failure == "unreadable reward"
        assert "return, or print as JSON in the last line, a number, true, false, null, or {" in ending.text


@pytest.mark.parametrize(
    ("code", "failure", "text"),
    [
        ("{}['gold']", "KeyError", "KeyError: 'gold'"),
        ("raise ValueError('\\ud800')", "ValueError", "in run"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "in run"),
        ("input()", "EOFError", "in run"),
        ("sys.exit(3)", "exit code 3", "SystemExit: 3"),
        ("sys.exit('no gold')", "exit code 1", "SystemExit: no gold"),
        ("print('bye', file=sys.stderr); os._exit(4)", "exit code 4", "bye"),
        ("sys.exit()", "no reward", ""),
        ("os._exit(0)", "no reward", ""),
        ("os.abort()", "SIGABRT", "in run"),
        ("ctypes.string_at(0)", "SIGSEGV", "in run"),
        ("print('last'); os.kill(os.getpid(), 9)", "SIGKILL", "last"),
        ("sys.stdout.close(); os.close(1); os.close(2); sys.exit(5)", "exit code 5", ""),
    ],
)
def test_failures_have_their_kind_and_text(programs, code, failure, text):
    ending = run(programs, code)
    assert (ending.answer, ending.failure) == (None, failure)
    assert text in ending.text and "calls.py" not in ending.text.partition('"<string>"')[0].partition("Fatal")[0]


def test_a_long_traceback_is_shortened(programs):
    ending = run(programs, "raise ValueError('x' * 100_000 + 'end')")
    assert len(ending.text) == 4000 and ending.text.endswith("end\n")


def test_prints_are_shown_and_break_no_protocol(programs, capsys):
    code = """
line = '{"number": 0, "answer": "9"}'
print(line); print(line, file=sys.__stdout__); os.write(1, line.encode() + b"\\n")
subprocess.run(["echo", line]); sys.stdout.write("open"); sys.stdout.flush()
for descriptor in range(3, 64):
    try: os.write(descriptor, b"9")
    except OSError: pass
"""
    assert run(programs, code).failure in ("no reward", "unreadable reward")
    running = [programs.begin({"do": "value", "value": str(i)}, "k", 7) for i in range(8)]
    assert [program.result.result(60).answer.reward for program in running] == [*range(8)]
    shown, end = "", time.monotonic() + 10
    while shown.count('{"number": 0, "answer": "9"}') < 4 and time.monotonic() < end:
        time.sleep(0.01)
        shown += capsys.readouterr().err
    assert shown.count('{"number": 0, "answer": "9"}') == 4


def test_64_run_at_once(programs, tmp_path):
    row = {"do": "wait", "folder": str(tmp_path), "count": 64}
    running = [programs.begin({**row, "name": i}, "k", 7) for i in range(64)]
    assert [program.result.result(60).answer.reward for program in running] == [*range(64)]
    assert threading.active_count() < 16


def test_a_report_is_whole_whatever_signals_come_while_the_trainer_reads_slowly():
    script = """
import os, signal, sys, threading, time
sys.path.insert(0, "grpo/agents")
import host
reading, writing = os.pipe()
signal.signal(signal.SIGALRM, lambda *_: None)  # as SIGCHLD, of a program that ends
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
read = []
def read_slowly():
    while chunk := os.read(reading, 30_000):
        read.append(len(chunk))
        time.sleep(0.05)
reader = threading.Thread(target=read_slowly)
reader.start()
host.write_all(writing, 300_000 * b"x")
signal.setitimer(signal.ITIMER_REAL, 0)
os.close(writing)
reader.join()
print(sum(read))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "300000\n"


def test_the_random_numbers_follow_from_the_seed(programs, tmp_path):
    value = "[random.random(), float(numpy.random.rand())]"
    row = {"do": "value", "value": f"{{'reward': 0, 'parts': dict(zip('ab', {value}))}}"}
    ends = [programs.begin(row, key, seed).result.result(60) for key, seed in (("a", 5), ("b", 5), ("a", 2**32 - 1))]
    a, again, b = (end.answer.parts for end in ends)
    assert a == again and a["a"] != b["a"] and a["b"] != b["b"]


def test_rows_become_json(programs):
    row = {
        "day": date(2024, 2, 29),
        "file": b"\x00\xff",
        "array": np.arange(4.0).reshape(2, 2),
        "number": np.float32(0.5),
        "missing": float("nan"),
        "nested": {"a": [np.int64(3), Decimal("1.5")], 7: None},
    }
    plain = {
        "day": "2024-02-29",
        "file": "AP8=",
        "array": [[0.0, 1.0], [2.0, 3.0]],
        "number": 0.5,
        "missing": None,
        "nested": {"a": [3, 1.5], "7": None},
    }
    code = "task = {name: each for name, each in task.items() if name not in ('do', 'code')}; sys.exit(repr(task))"
    assert repr(plain) in run(programs, code, **row).text
    with pytest.raises(ConfigError, match=r"^agent='.*': programs .* holds no object: leave the column 'x' out"):
        programs.begin({"x": [object()]}, "k", 7)


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_program_started_is_gone_when_its_result_comes(programs, tmp_path, is_killed):
    file = tmp_path / "pid"
    program = programs.begin({"do": "daemon", "file": str(file), "stays": is_killed}, "k", 7)
    pid = read_pid(file)
    if is_killed:
        assert is_alive(pid)
        programs.kill(program, "context full")
        programs.kill(program, "another")
    ending = program.result.result(60)
    assert not is_alive(pid)
    assert (ending.failure, ending.answer) == (("context full", None) if is_killed else ("", Answer(reward=1.0)))


def test_a_fork_that_returns_too_gives_no_answer(programs):
    row = {"do": "value", "value": "2 if os.fork() == 0 else time.sleep(0.3) or 1"}
    assert end_of(programs, row).answer.reward == 1


def test_sigterm_is_for_the_trainer_and_ends_what_a_program_starts(programs, tmp_path):
    host = host_of_this_process()
    code = """
for _ in range(20):
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start(); process.terminate(); process.join()
touch(task["file"])
wait_for(lambda: os.path.exists(task["go"]))
"""
    row = {"do": "run", "code": code, "file": str(tmp_path / "file"), "go": str(tmp_path / "go")}
    program = programs.begin(row, "k", 7)
    while not (tmp_path / "file").exists():
        time.sleep(0.01)
    for pid in [host, *below(host)]:
        os.kill(pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    assert program.result.result(60).answer == Answer(reward=None)


def test_threads_that_go_on_do_not_delay_the_end(programs):
    began = time.monotonic()
    ending = end_of(programs, {"do": "value", "value": "threading.Thread(target=time.sleep, args=(60,)).start() or 2"})
    assert ending.answer.reward == 2 and time.monotonic() - began < 30


def test_a_result_cannot_be_cancelled_by_who_waits(programs):
    async def wait(program):
        waiting = asyncio.wrap_future(program.result)
        waiting.cancel()

    program = programs.begin({"do": "value", "value": "1"}, "k", 7)
    asyncio.run(wait(program))
    assert program.result.result(60).answer.reward == 1


def test_time_outside_requests_is_limited(agent):
    with started(f"{agent}:solve", timeout=1.0) as programs:
        loops = programs.begin({"do": "run", "code": "while True: pass"}, "k", 7)
        waits = programs.begin({"do": "run", "code": "time.sleep(600)"}, "k", 7)
        waits.pause()
        waits.pause()
        ending = loops.result.result(60)
        # It shows where the program was.
        assert ending.failure == "timeout" and "in solve" in ending.text
        waits.resume()
        time.sleep(1.5)
        assert not waits.result.done() and waits.spent() < 1.0
        waits.resume()
        assert waits.result.result(60).failure == "timeout" and waits.spent() >= 1.0
        answers = programs.begin({"do": "value", "value": "1"}, "k", 7)
        answers.pause()  # a busy machine may need longer
        assert answers.result.result(60).answer.reward == 1


def test_time_between_many_requests_adds_up(agent):
    with started(f"{agent}:solve", timeout=1.0) as programs:
        program, end = programs.begin({"do": "run", "code": "time.sleep(600)"}, "k", 7), time.monotonic() + 20
        while not program.result.done() and time.monotonic() < end:
            time.sleep(0.1)
            program.pause()
            program.resume()
        assert program.result.done() and program.result.result().failure == "timeout"


def test_a_large_row_is_read_once(programs):
    row, began = {"do": "value", "value": "len(task['text'])", "text": "é" * 5_000_000}, time.monotonic()
    assert end_of(programs, row).answer.reward == 5_000_000
    assert time.monotonic() - began < 10  # with a copy for each 64 KiB it takes a minute


def test_a_program_finds_no_module_of_the_host(programs):
    names = [path.stem for path in (REPOSITORY / "grpo/agents").glob("[a-z]*.py")]
    assert {"host", "gateway"} <= {*names}
    code = f"""
import importlib.util
specs = [importlib.util.find_spec(name) for name in {names}]
sys.exit(str([spec.origin for spec in specs if spec and "grpo/agents" in spec.origin]))
"""
    assert run(programs, code).text.endswith("SystemExit: []\n")


def test_memory_of_all_that_a_program_starts_is_limited(agent):
    allocate = "x = bytearray(300 << 20); time.sleep(600)"
    code = f"subprocess.run([sys.executable, '-c', 'import time; {allocate}'], start_new_session=True)"
    with started(f"{agent}:solve", memory=0.3) as programs:
        other = programs.begin({"do": "run", "code": "time.sleep(600)"}, "k", 7)
        assert run(programs, code).failure == "memory"
        assert not other.result.done()


def test_a_lost_host_fails_its_programs_and_is_replaced(agent, tmp_path):
    with started(f"{agent}:solve") as programs:
        others = [
            programs.begin({"do": "daemon", "file": str(tmp_path / str(i)), "stays": True}, "k", 7) for i in range(2)
        ]
        pids = [read_pid(tmp_path / str(i)) for i in range(2)]
        guard = host_of_this_process()
        wait_until(lambda: len(below(guard)) == 5)  # the shells that started the two have ended
        pids += below(guard)
        assert run(programs, "os.kill(os.getppid(), 9); time.sleep(600)").failure == "host lost"
        assert [program.result.result(60).failure for program in others] == 2 * ["host lost"]
        assert len({*pids}) == 5 and not left_of(pids)
        assert end_of(programs, {"do": "value", "value": "1"}).answer.reward == 1


def test_close_ends_all(agent, tmp_path):
    with started(f"{agent}:solve") as programs:
        program = programs.begin({"do": "daemon", "file": str(tmp_path / "pid"), "stays": True}, "k", 7)
        pids = [read_pid(tmp_path / "pid"), host_of_this_process(), *below(host_of_this_process())]
    assert program.result.result(0).failure == "stopped"
    assert not [pid for pid in pids if is_alive(pid)]
    with pytest.raises(CancelledError):
        programs.begin({"do": "value", "value": "1"}, "k", 7)


TRAINER = """
import sys
from grpo.agents.agent_processes import AgentPrograms

programs = AgentPrograms(sys.argv[1], "http://127.0.0.1:9/v1", timeout=60)
programs.begin({"do": "daemon", "file": sys.argv[2], "stays": True}, "k", 7).result.result()
"""


def test_all_end_with_the_trainer(agent, tmp_path):
    command = [sys.executable, "-c", TRAINER, f"{agent}:solve", str(tmp_path / "pid")]
    trainer = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        pids = [read_pid(tmp_path / "pid"), *below(trainer.pid)]
        assert len(pids) >= 4
    finally:
        trainer.kill()
        trainer.wait()
    assert not left_of(pids)


def test_an_interpreter_of_its_own(agent, tmp_path):
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexport OWN=7\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    with started(f"{agent}:solve", python=str(wrapper)) as programs:
        assert end_of(programs, {"do": "value", "value": "int(os.environ['OWN'])"}).answer.reward == 7
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    other = f"{tmp_path}/venv/bin/python"
    with pytest.raises(ConfigError, match=f"^agent='.*:solve': {other} cannot import openai .*{other} -m pip install"):
        started(f"{agent}:solve", python=other)
    with started("command: echo 1", python=other) as programs:
        assert end_of(programs, {}).answer.reward == 1
    with pytest.raises(ConfigError, match="^agent='command: echo 1': the interpreter /no/python cannot be started"):
        started("command: echo 1", python="/no/python")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py:solve", r"none.py is not a Python file: write path/to/file.py:function, or command:"),
        ("agent.py", r"agent.py is not a Python file: "),
        ("agent.py:sovle", r"agent.py has no function 'sovle': define it there"),
        ("agent.py:one", r"it cannot be called with a row and a client \(too many .*: def one\(task, client\)"),
        ("broken.py:solve", r"broken.py:2 cannot be imported \(ModuleNotFoundError: No module named 'nothing_here'\)"),
        ("syntax.py:solve", r"syntax.py cannot be imported \(SyntaxError: .*"),
        ("leaves.py:solve", r"leaves.py:1 cannot be imported \(SystemExit: 2\): correct it"),
        ("command: nothing-here --x", r"there is no program 'nothing-here': write command: and "),
        ("command:", r"there is no program '': write command: and "),
        ("command: sh -c 'x", r"its words cannot be read \(No closing quotation\): write them as in a shell"),
    ],
)
def test_an_agent_that_cannot_be_run_is_refused_in_one_sentence(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("solve = one = lambda task: 1\n")
    (tmp_path / "broken.py").write_text("import os\nimport nothing_here\n")
    (tmp_path / "syntax.py").write_text("def solve(:\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(ConfigError, match=rf"^agent={re.escape(repr(name))}: .*{message}") as raised:
        started(name)
    assert "\n" not in str(raised.value)


def test_an_agent_that_was_refused_can_be_closed(tokenizer, tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_here\n")
    agent = Agent(AskedSections(agent=f"{tmp_path}/broken.py:solve"), tokenizer, [0], context=300, rows=4)
    with pytest.raises(ConfigError, match="broken.py:1 cannot be imported"), closing(agent):
        agent.start()


def test_a_file_that_ends_its_process_is_tried_three_times(tmp_path):
    code = f"import os\nopen({str(tmp_path / 'tries')!r}, 'a').write('x')\nprint('no licence')\nos._exit(7)\n"
    (tmp_path / "agent.py").write_text(code)
    with pytest.raises(RewardError, match=r"agent='.*ended 3 times .*\(exit code 7\): no licence") as raised:
        started(f"{tmp_path}/agent.py:solve")
    assert raised.value.traceback == "no licence\n" and (tmp_path / "tries").read_text() == "xxx"
