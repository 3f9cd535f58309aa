"""A run whose completions are the episodes of a program that asks by the OpenAI API."""

import json
import signal
import sys

import callers
import pytest
from conftest import run_python, running_server
from recorded import write_rows
from servers import wait_until
from trainer_runs import finish, lines, options, start, timeless, went_on

pytestmark = pytest.mark.slow

AGENT = '''
import json
import os

SHOP = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS = [{"type": "function", "function": {"name": "price", "description": "Tell a price.", "parameters": SHOP}}]


async def solve(task, client):
    """Ask, answer calls, and ask a second opinion in a conversation of its own."""
    messages = [{"role": "user", "content": task["question"]}]
    calls = 0
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            calls += "pen" in call.function.arguments
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    second = [{"role": "user", "content": f"Is this right? {message.content}"}]
    await client.chat.completions.create(model="policy", messages=second, max_tokens=9)
    if task["question"].startswith("5:"):
        raise LookupError("this shop is closed")
    if task["question"].startswith("6:"):
        os.abort()
    if task["question"].startswith("7:"):
        return None
    return {"reward": float(calls), "passed": calls > 1, "parts": {"calls": calls}}


async def hang(task, client):
    await solve(task, client)
    while True:
        pass
'''
COMMAND = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
body = {"model": "policy", "messages": [{"role": "user", "content": task["question"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("asked", task["question"])
print(len(text) % 7)
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with a model that calls tools, agents, and data."""
    folder = callers.write(tmp_path_factory.mktemp("agents"))
    for split, count in (("train", 24), ("test", 10)):
        rows = [{"question": f"{n}: how much is a pen?", "answer": "7"} for n in range(count)]
        write_rows(folder / f"data/{split}.jsonl", rows)
    (folder / "agent.py").write_text(AGENT)
    (folder / "ask.py").write_text(COMMAND)
    return folder


@pytest.fixture(scope="module")
def run(shop, tmp_path_factory):
    """`run(name, **changes)`: the options of a run of that name. `run.of(name)` is its folder."""
    folder = tmp_path_factory.mktemp("runs")

    def words(name: str, **changes) -> list[str]:
        settings = {"max_steps": 3, "eval_steps": 3, "save_steps": 1, "report_to": "none", "dataset_order": "as_is"}
        settings |= {"max_completion_length": 30, "max_prompt_length": 480, "prompts_per_step": 8, "beta": 0}
        settings |= {"agent": f"{shop}/agent.py:solve", "resume_from_checkpoint": "last"}
        return options(shop / "model", shop / "data", folder / name, **settings | changes)

    words.of = folder.joinpath
    return words


def test_a_program_is_trained_with_its_branches_and_failures_are_counted(shop, run, tmp_path):
    with running_server(shop / "model", tmp_path, "--deterministic", "true") as server:
        changes = {"beta": 0.1, "ref_servers": server.url, "steps_per_generation": 3, "dataset_order": "shuffled"}
        output = finish(1, run("trained", **changes))
    first, *rows = timeless(run.of("trained"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4 or row["step"] > 1
        assert row["agent/branches"] > 1.5 and row["completions/mean_turns"] > 2
        assert row["grad_norm"] > 0 and row["kl"] >= 0
    assert 0 <= rows[0]["kl"] < 1e-8 < rows[2]["kl"]
    failed = sum(row.get(f"agent/failures/{kind}", 0) for row in rows for kind in ("LookupError", "SIGABRT"))
    assert failed == 8  # each of 24 rows is drawn four times
    assert sum(row["agent/failure_frequency"] for row in rows) == pytest.approx(8 / 32)
    assert output.count("LookupError: this shop is closed") == 1
    assert first["eval_accuracy"] <= first["eval_rewards/solve/mean"]
    records = lines(run.of("trained", "completions.jsonl"))
    of_training = [record for record in records if record["phase"] == "train"]
    silent = [record for record in of_training if record["prompt"].split("user\n")[-1][:2] in ("5:", "6:", "7:")]
    assert silent and all(record["rewards/solve"] is None for record in silent)
    assert all(record["advantage"] == 0 for record in silent)
    for record in of_training:
        calls = [call for message in record["messages"] for call in message.get("tool_calls", [])]
        told = [message for message in record["messages"] if message["role"] == "tool"]
        assert len(told) <= len(calls) and all(message["content"] == "7" for message in told)
    assert any(record["reward"] > 0 for record in of_training)


def test_a_run_that_is_killed_draws_its_round_again_and_leaves_no_program_behind(shop, run, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    (shop / "slow.py").write_text(
        "import asyncio, os, pathlib\nfrom agent import solve as ask\n\n\nasync def solve(task, client):\n"
        f"    mark = pathlib.Path({str(marks)!r}, str(os.getpid()))\n    mark.touch()\n"
        "    await asyncio.sleep(0.5)\n    return await ask(task, client)\n"
    )
    words = run("killed", agent=f"{shop}/slow.py:solve", eval_steps=0)
    process = start(*words)
    wait_until(lambda: (run.of("killed") / "checkpoint-1").exists(), seconds=90)
    seen = len([*marks.iterdir()])
    wait_until(lambda: len([*marks.iterdir()]) > seen, seconds=30)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    pids = [int(mark.name) for mark in marks.iterdir()]
    wait_until(lambda: not any(is_alive(pid) for pid in pids), seconds=10)
    assert went_on(finish(1, words)) >= 1
    assert [row["step"] for row in timeless(run.of("killed"))] == [1, 2, 3]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_evaluation_asks_as_the_run_did_and_two_ranks_share_the_episodes(shop, run):
    finish(2, run("two ranks", branch_weighting="branches", max_steps=1, eval_steps=1, save_steps=0))
    evaluated = timeless(run.of("two ranks"))[-1]
    output = run.of("evaluation")
    words = ["--model", run.of("two ranks", "model"), "--agent", f"{shop}/agent.py:solve", "--output", output]
    done = run_python("-m", "grpo.evaluate", *words)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((output / "metrics.json").read_text())
    for name in ("eval_accuracy", "eval_rewards/solve/mean", "eval_completions/mean_length"):
        assert metrics[name] == evaluated[name]


def test_an_episode_whose_context_is_full_says_so(shop, run):
    changes = {"max_prompt_length": 100, "eval_steps": 0, "max_steps": 1, "max_turns": 2}
    finish(1, run("full", **changes))
    [row] = timeless(run.of("full"))
    kinds = {name: value for name, value in row.items() if name.startswith("agent/failures/")}
    assert {*kinds} <= {"agent/failures/context_length_exceeded", "agent/failures/max_turns"}
    assert sum(kinds.values()) == 32 * row["agent/failure_frequency"] > 0


def test_a_command_of_any_language_is_an_agent(shop, run):

    finish(1, run("command", agent=f"command: {sys.executable} {shop}/ask.py", max_steps=1, eval_steps=0))
    [row] = timeless(run.of("command"))
    assert row["rewards/agent/mean"] > 0 and row["agent/failure_frequency"] == 0


def test_a_program_that_hangs_is_ended_and_its_group_is_completed(shop, run):
    changes = {"agent": f"{shop}/agent.py:hang", "agent_timeout": 0.7, "agent_failure_reward": -1}
    finish(1, run("hangs", max_steps=1, eval_steps=0, prompts_per_step=2, **changes))
    [row] = timeless(run.of("hangs"))
    assert row["agent/failures/timeout"] == 8 and row["rewards/hang/mean"] == -1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agent": "{shop}/agent.py:solv"}, "agent.py has no function 'solv': define it there"),
        ({"agent": "{shop}/none.py:solve"}, "none.py is not a Python file: write path/to/file.py:function"),
        ({"agent": "command: no-such-program"}, "there is no program 'no-such-program'"),
        ({"tools": "{shop}/tools.py:price"}, "the program has its own tools: leave out tools"),
        ({"system_prompt": "Be brief."}, "the agent writes its messages itself: leave it out"),
        ({"sampler": "generate"}, "an agent asks the trainer's own rows: use continuous"),
        ({"agent_python": "/no/python"}, "the interpreter /no/python cannot be started"),
    ],
)
def test_what_cannot_run_is_refused_at_the_start(shop, run, changes, words):
    changes = {name: value.format(shop=shop) for name, value in changes.items()}
    process = start(*run("refused", **changes))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert words in output.splitlines()[-1]
