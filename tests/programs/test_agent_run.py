"""A run whose completions are the episodes of a program that asks by the OpenAI API."""

import json
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress

import callers
import psutil
import pytest
from conftest import ENVIRONMENT, REPOSITORY, free_port, run_python, running_server
from pools import Worker, draw_by_workers, drawn, running_pool
from processes import left_of, processes_below, ranks_of
from recorded import write_rows
from safetensors.torch import load_file
from servers import wait_until
from trainer_runs import finish, lines, options, start, timeless, training, went_on

import grpo
from grpo.pool.task_tensors import decode_drawn

pytestmark = pytest.mark.slow

TEXT = {"text": True, "capture_output": True, "timeout": 120}

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


async def advised(task, client):
    """Ask greedily first, what is not trained on."""
    question = [{"role": "user", "content": task["question"]}]
    await client.chat.completions.create(model="policy", messages=question, temperature=0, max_tokens=3)
    return await solve(task, client)


async def hang(task, client):
    while task["question"].startswith("3:"):
        pass
    return await solve(task, client)
'''


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with a model that calls tools, agents, and data."""
    folder = callers.write(tmp_path_factory.mktemp("agents"))
    for split, count in (("train", 24), ("test", 10)):
        rows = [{"question": f"{n}: how much is a pen?", "answer": "7"} for n in range(count)]
        write_rows(folder / f"data/{split}.jsonl", rows)
    (folder / "agent.py").write_text(AGENT)
    return folder


@pytest.fixture(scope="module")
def run(shop, tmp_path_factory):
    """`run(name, **changes)`: the options of a run of that name. `run.of(name)` is its folder."""
    folder = tmp_path_factory.mktemp("runs")

    def words(name: str, **changes) -> list[str]:
        settings = {"max_steps": 3, "eval_steps": 3, "save_steps": 1, "report_to": "none", "dataset_order": "as_is"}
        settings |= {"max_completion_length": 30, "max_prompt_length": 700, "prompts_per_step": 8, "beta": 0}
        settings |= {"agent": f"{shop}/agent.py:solve", "resume_from_checkpoint": "last"}
        return options(shop / "model", shop / "data", folder / name, **settings | changes)

    words.of = folder.joinpath
    return words


def test_a_program_is_trained_with_its_branches_and_failures_are_counted(shop, run, tmp_path):
    with running_server(shop / "model", tmp_path, "--deterministic", "true") as server:
        changes = {"beta": 0.1, "ref_servers": server.url, "steps_per_generation": 3, "dataset_order": "shuffled"}
        changes |= {"agent": f"{shop}/agent.py:advised", "agent_may_sample": "true", "num_generations_eval": 1}
        output = finish(1, run("trained", **changes))
    assert journal_of(run.of("trained"), 3) == ({}, {})  # what an evaluation draws is in none
    first, *rows = timeless(run.of("trained"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4 or row["step"] > 1
        assert row["agent/branches"] > 1.5 and row["completions/mean_turns"] > 2
        assert row["agent/other_temperature"] == 32
        assert row["grad_norm"] > 0 and row["kl"] >= 0
    assert 0 <= rows[0]["kl"] < 1e-8 < rows[2]["kl"]
    failed = sum(row.get(f"agent/failures/{kind}", 0) for row in rows for kind in ("LookupError", "SIGABRT"))
    assert failed == 8  # each of 24 rows is drawn four times
    assert sum(row["agent/failure_frequency"] for row in rows) == pytest.approx(8 / 32)
    assert output.count("LookupError: this shop is closed") == 1
    assert first["eval_accuracy"] <= first["eval_rewards/advised/mean"]
    records = lines(run.of("trained", "completions.jsonl"))
    of_training = [record for record in records if record["phase"] == "train"]
    silent = [record for record in of_training if record["prompt"].split("user\n")[-1][:2] in ("5:", "6:", "7:")]
    assert silent and all(record["rewards/advised"] is None for record in silent)
    assert all(record["advantage"] == 0 for record in silent)
    for record in of_training:
        calls = [call for message in record["messages"] for call in message.get("tool_calls", [])]
        told = [message for message in record["messages"] if message["role"] == "tool"]
        assert len(told) <= len(calls) and all(message["content"] == "7" for message in told)
    assert any(record["reward"] > 0 for record in of_training)


def in_pools_journal(folder) -> dict[tuple, list[int]]:
    """Read the drawn ids by episode and request that a pool keeps of tasks without completions."""
    with closing(sqlite3.connect(folder / "run.sqlite")) as file:
        bodies = file.execute("SELECT lines FROM journal").fetchall()
    records = [json.loads(line) for (body,) in bodies for line in body.splitlines()]
    return {(*record["episode"], record["request"]): record["ids"] for record in records if "ids" in record}


@pytest.fixture
def slow(shop, tmp_path):
    """An agent whose episodes take from 0 to 2 s, and a folder with a file for each that has begun, by its process."""
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "slow.py").write_text(
        f"import asyncio, os, pathlib, sys\nsys.path.append({str(shop)!r})\nfrom agent import solve as ask\n\n\n"
        f"async def solve(task, client):\n    pathlib.Path({str(marks)!r}, str(os.getpid())).touch()\n"
        "    given = await ask(task, client)\n"
        "    await asyncio.sleep(int(task['question'].split(':')[0]) % 8 * 0.3)\n    return given\n"
    )
    return f"{tmp_path}/slow.py:solve", marks


def journal_of(folder, version: int) -> tuple[dict[tuple, list[int]], dict[tuple, dict]]:
    """Read the drawn ids by episode and request, and the records of ended episodes; no one is there twice."""
    records = [record for path in folder.glob(f"journal/{version}-*.jsonl") for record in lines(path)]
    drawn = {(*record["episode"], record["request"]): record["ids"] for record in records if "ids" in record}
    ended = {tuple(record["episode"]): record["rollout"] for record in records if "rollout" in record}
    assert len(drawn) + len(ended) == len(records)
    return drawn, ended


def test_a_killed_run_draws_only_what_it_had_not_then_nothing_and_leaves_no_program_behind(run, slow):
    agent, marks = slow
    words, folder = run("killed", agent=agent, eval_steps=0, max_steps=2, save_total_limit=0), run.of("killed")
    process = start(*words)
    wait_until(lambda: len(journal_of(folder, 1)[1]) >= 6, 90, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    pids = [int(mark.name) for mark in marks.iterdir()]
    assert not left_of(pids, 10)
    drawn, ended = journal_of(folder, 1)
    assert 6 <= len(ended) < 32 and len({name[:3] for name in drawn} - {*ended}) > 0

    output = finish(1, words)
    assert (
        went_on(output) == 1 and f"has {len(ended)} episodes of step 2" in output and f"{len(drawn)} answers" in output
    )
    assert len([*marks.iterdir()]) - len(pids) == 32 - len(ended)
    all_drawn, all_ended = journal_of(folder, 1)
    assert drawn.items() <= all_drawn.items() and len(all_ended) == 32
    assert all(repr(all_ended[name]) == repr(rollout) for name, rollout in ended.items())
    for name, rollout in all_ended.items():  # what was drawn before is in it
        assert len(rollout["completion_ids"]) == sum(len(ids) for key, ids in all_drawn.items() if key[:3] == name)
    assert [row["step"] for row in timeless(folder)] == [1, 2]
    assert len(lines(folder / "completions.jsonl")) == len({*map(str, lines(folder / "completions.jsonl"))})

    weights, rows, count = trained_weights(folder), timeless(folder), len([*marks.iterdir()])
    for left in ("checkpoint-2", "model"):  # step 2 once more, of the journal alone
        shutil.rmtree(folder / left)
    finish(1, words)
    assert (len([*marks.iterdir()]), timeless(folder), trained_weights(folder)) == (count, rows, weights)


def trained_weights(folder) -> dict[str, bytes]:
    weights = load_file(folder / "model/model.safetensors")
    return {name: weight.numpy().tobytes() for name, weight in weights.items()}


@pytest.mark.rare
def test_episodes_whose_host_is_lost_begin_again(shop, run, tmp_path):
    (tmp_path / "kills.py").write_text(
        f"import os, pathlib, sys\nsys.path.append({str(shop)!r})\nfrom agent import solve as ask\n\n\n"
        "async def solve(task, client):\n    given = await ask(task, client)\n"
        f"    mark = pathlib.Path({str(tmp_path)!r}, 'killed')\n"
        "    if task['question'].startswith('3:') and not mark.exists():\n"
        "        mark.touch()\n        os.kill(os.getppid(), 9)\n    return given\n"
    )
    finish(1, run("host", agent=f"{tmp_path}/kills.py:solve", max_steps=1, eval_steps=0))
    [row] = timeless(run.of("host"))
    failed = {name for name in row if name.startswith("agent/failures/")}
    assert (tmp_path / "killed").exists() and failed == {"agent/failures/LookupError", "agent/failures/SIGABRT"}
    assert len(journal_of(run.of("host"), 0)[1]) == 32


@pytest.mark.rare
def test_after_twenty_kills_no_episode_is_missing_or_there_twice(run, slow):
    agent, marks = slow
    rng, folder, steps = random.Random(5), run.of("often killed"), 40
    words = run("often killed", agent=agent, eval_steps=0, max_steps=steps, save_total_limit=0)
    kills: Counter[str] = Counter()
    versions = range(1, steps)  # what was drawn before the first checkpoint is not needed after it
    kept: list[tuple[dict, dict]] = [({}, {})] * len(versions)
    while sum(kills.values()) < 20:
        begun = {*marks.iterdir()}
        with training(2, words) as process:
            wait_until(lambda begun=begun: {*marks.iterdir()} - begun, 90, process)
            what = ""
            while what != "rank" and sum(kills.values()) < 20:
                time.sleep(rng.uniform(0.2, 2.5))
                what = rng.choice(["rank", "host", "program", "program"])
                kills[what] += kill(ranks_of(process), what, rng)
            if what == "rank":
                assert process.wait(60) != 0
        now = [journal_of(folder, version) for version in versions]
        for before, after in zip(kept, now, strict=True):
            assert all(old.items() <= new.items() for old, new in zip(before, after, strict=True))
        kept = now
    assert min(kills[what] for what in ("rank", "host", "program")) >= 3
    finish(2, words)
    assert not left_of([int(mark.name) for mark in marks.iterdir()])
    assert [row["step"] for row in timeless(folder)] == [*range(1, steps + 1)]
    for version, before in zip(versions, kept, strict=True):
        now = journal_of(folder, version)
        assert len(now[1]) == 32
        assert all(old.items() <= new.items() for old, new in zip(before, now, strict=True))
    records = [record for record in lines(folder / "completions.jsonl") if record["step"] == steps]
    assert len(records) == len({json.dumps(record["tree"]) + record["prompt"] for record in records}) > 0


@pytest.mark.rare
def test_what_a_pool_has_for_programs_survives_twenty_kills(run, slow, tmp_path):
    """Of pool, trainer, workers and their programs, each after something was drawn; what was killed is started again
    at once."""
    agent, marks = slow
    rng, port, steps = random.Random(3), free_port(), 12
    url = f"http://127.0.0.1:{port}"
    changes = {"sampler": "pool", "pool": url, "max_steps": steps, "eval_steps": 0, "importance_sampling_mode": "none"}
    words, mine = run("pooled", agent=agent, **changes), ("--agent", agent)
    kept: dict[tuple, list[int]] = {}
    with ExitStack() as running:

        def begin(what: str) -> subprocess.Popen:
            if what == "pool":
                return running.enter_context(running_pool(tmp_path, port=port)).process
            process = start(*words) if what == "trainer" else Worker(url, tmp_path, what, *mine).process
            running.enter_context(process)  # waits, after the kill
            running.callback(process.kill)
            return process

        processes = {what: begin(what) for what in ("pool", "trainer", "worker a", "worker b")}
        for what in rng.sample([*processes, "program"] * 4, 20):
            before = {*in_pools_journal(tmp_path)}
            wait_until(lambda before=before: {*in_pools_journal(tmp_path)} - before, 120, processes["trainer"])
            time.sleep(rng.uniform(0, 1))
            if what == "program":
                workers = [process.pid for name, process in processes.items() if name.startswith("worker")]
                wait_until(lambda workers=workers: kill(workers, "program", rng), 60, processes["trainer"])
                continue
            processes[what].kill()
            processes[what].wait()
            kept |= in_pools_journal(tmp_path)
            processes[what] = begin(what)
        output, _ = processes["trainer"].communicate(timeout=300)
        assert processes["trainer"].returncode == 0, output
        assert not in_pools_journal(tmp_path)
    assert len(kept) > 100
    wait_until(lambda: not left_of([int(mark.name) for mark in marks.iterdir()]))
    assert [row["step"] for row in timeless(run.of("pooled"))] == [*range(1, steps + 1)]
    completions = {group: decode_drawn(body)[0].completions for group, *_, body in drawn(tmp_path)}
    assert [*completions] == [*range(8 * steps)]
    for (_, group, number, _), ids in kept.items():  # what was drawn before a kill is what is trained on
        assert f"{ids}"[1:-1] in f"{completions[group][number]}"


def kill(drawing: list[int], what: str, rng: random.Random) -> bool:
    """Kill one of these processes, as a rank, or a process of theirs that forks programs, or a program; tell whether
    there was one."""
    with suppress(psutil.Error):  # some end meanwhile
        ranks = [psutil.Process(pid) for pid in drawing]
        below = [process for rank in ranks for process in rank.children(recursive=True)]
        below = [process for process in below if any("host.py" in word for word in process.cmdline())]
        guards = [process for process in below if process.parent() in ranks]
        hosts = [process for process in below if process.parent() in guards]
        programs = [process for process in below if process.parent() in hosts]
        if found := {"rank": ranks, "host": guards + hosts, "program": programs}[what]:
            rng.choice(found).kill()
            return True
    return False


@pytest.mark.rare
def test_256_episodes_wait_at_once_and_hold_no_row(shop, run, tmp_path):
    """Each waits between its two requests until all others wait, too; 64 rows draw."""
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "waits.py").write_text(
        f"import asyncio, os, pathlib\n\nMARKS = pathlib.Path({str(marks)!r})\n\n\n"
        "async def solve(task, client):\n    messages = [{'role': 'user', 'content': task['question']}]\n"
        "    answer = await client.chat.completions.create(model='policy', messages=messages)\n"
        "    (MARKS / str(os.getpid())).touch()\n"
        "    while len(os.listdir(MARKS)) < 256:\n        await asyncio.sleep(0.5)\n"
        "    messages += [answer.choices[0].message, {'role': 'user', 'content': 'Sure?'}]\n"
        "    await client.chat.completions.create(model='policy', messages=messages)\n    return 1.0\n"
    )
    write_rows(tmp_path / "data/train.jsonl", [{"question": f"{n}: how much?", "answer": "7"} for n in range(64)])
    changes = {"prompts_per_step": 64, "max_completion_length": 8, "max_steps": 1, "eval_steps": 0}
    words = run("waits", agent=f"{tmp_path}/waits.py:solve", **changes)
    finish(1, [*words, f"--dataset_name={tmp_path}/data"])
    [row] = timeless(run.of("waits"))
    assert row["agent/failure_frequency"] == 0 and row["rewards/solve/mean"] == 1
    assert row["completions/mean_turns"] == 2 and len([*marks.iterdir()]) == 256


def test_workers_draw_the_episodes_and_one_that_is_killed_leaves_its_answers_to_the_next(shop, run, tmp_path):
    """A worker that has no agent says so, and ends."""
    shared = {"max_steps": 2, "eval_steps": 0, "save_steps": 0, "importance_sampling_mode": "none"}
    mine = "--agent", f"{shop}/agent.py:solve"
    finish(1, run("own", **shared))
    left: dict[tuple, list[int]] = {}

    def kill_worker(worker: Worker) -> None:
        below = processes_below(worker.process)
        wait_until(lambda: len(in_pools_journal(tmp_path)) > 5, 120, worker.process)
        worker.end()
        assert not left_of(below)
        left.update(in_pools_journal(tmp_path))

    written = draw_by_workers(lambda url: run("drawn", sampler="pool", pool=url, **shared), tmp_path, mine, kill_worker)
    assert "agent=None: that of run drawn is solve: name its program" in written
    [found] = re.findall(r"begins with (\d+) lines of the pool's journal", (tmp_path / "b.log").read_text())
    assert int(found) >= len(left) > 5 and not in_pools_journal(tmp_path)
    completions = {(group, attempt): decode_drawn(body)[0].completions for group, attempt, *_, body in drawn(tmp_path)}
    for (seed, group, number, _), ids in left.items():
        [completion] = [completions[key][number] for key in completions if key == (group, seed >> 32)]
        assert f"{ids}"[1:-1] in f"{completion}"
    rows, own_rows = timeless(run.of("drawn")), timeless(run.of("own"))
    assert rows[0]["sampling/sampling_logp_difference/max"] < 1e-4 and rows[1]["agent/branches"] > 1.5
    assert rows[0]["agent/failures/LookupError"] == own_rows[0]["agent/failures/LookupError"] == 4
    texts, own_texts = (
        [record["completion"] for record in lines(run.of(name, "completions.jsonl")) if record["step"] == 1]
        for name in ("drawn", "own")
    )
    # The same random numbers: but for one token in thousands the same ids, until the first update.
    assert sum(map(str.__eq__, texts, own_texts)) > 0.5 * len(texts) > 0


def test_evaluation_asks_as_the_run_did_and_two_ranks_share_the_episodes(shop, run):
    finish(2, run("two ranks", branch_weighting="branches", max_steps=1, eval_steps=1, save_steps=0))
    evaluated = timeless(run.of("two ranks"))[-1]
    output = run.of("evaluation")
    words = ["--model", run.of("two ranks", "model"), "--agent", f"{shop}/agent.py:solve", "--output", output]
    done = run_python("-m", "grpo.evaluate", *words)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((output / "metrics.json").read_text())
    asked = grpo.SavedRun(run.of("two ranks")).evaluate()
    for name in ("eval_accuracy", "eval_rewards/solve/mean", "eval_completions/mean_length"):
        assert metrics[name] == evaluated[name] == asked[name]


def test_a_line_of_a_chat_is_an_episode(shop):
    words = ["--model", shop / "model", "--agent", f"{shop}/agent.py:solve", "--max_completion_length", "30"]
    lines = ["1: a pen?", '{"question": "5: a pen?", "answer": "7"}', '{"question": 7}']
    command = [sys.executable, "-m", "grpo.chat", *map(str, words)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=REPOSITORY, input="\n".join(lines), **TEXT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("the row has no text as `question` or `prompt`: add it")
    ended = [line for line in done.stdout.splitlines() if line.startswith("(the episode")]
    assert re.fullmatch(
        r"\(the episode ended: \d+ turns, 2 branches, \d+ tokens, solve \d, passed [01], calls \d\)", ended[0]
    )
    assert ended[1].startswith("(the episode failed: LookupError: ")
    assert "LookupError: this shop is closed" in done.stderr


def test_episodes_that_hang_or_whose_context_is_full_say_so_and_earn_the_reward_of_failures(shop, run):
    changes = {"max_prompt_length": 100, "eval_steps": 0, "max_steps": 1, "max_turns": 2}
    changes |= {"agent": f"{shop}/agent.py:hang", "agent_timeout": 1, "agent_failure_reward": -1}
    finish(1, run("full", **changes))
    [row] = timeless(run.of("full"))
    kinds = {name.split("/")[2]: value for name, value in row.items() if name.startswith("agent/failures/")}
    assert {*kinds} <= {"timeout", "context_length_exceeded", "max_turns"} and kinds["timeout"] >= 4
    assert sum(kinds.values()) == 32 * row["agent/failure_frequency"]
    records = lines(run.of("full", "completions.jsonl"))
    assert records and all((record["rewards/hang"] == -1) == bool(record["failure"]) for record in records)


HARMS = """
import asyncio, subprocess, time


async def solve(task, client):
    \"\"\"Give no reward. Every fourth question is harmed by its own program.\"\"\"
    messages = [{"role": "user", "content": task["question"]}]
    create = client.with_options(max_retries=0).chat.completions.create
    harm = int(task["question"].split(":")[0]) % 8
    if harm == 1:  # as many requests as it can
        await asyncio.gather(*(create(model="policy", messages=messages, seed=seed) for seed in range(500)))
    if harm == 3:  # 10 MB
        await create(model="policy", messages=[{"role": "user", "content": "x" * 10_000_000}])
    if harm == 5:  # processes that stay
        for _ in range(20):
            subprocess.Popen(["sleep", "600"], start_new_session=True)
    if harm == 7:  # the keys of others
        other = client.with_options(api_key=client.api_key[:-1] + "x", max_retries=0)
        await other.chat.completions.create(model="policy", messages=messages)
    answer = await create(model="policy", messages=messages)


def judge(completions, **kwargs):
    return [float(len(messages[-1]["content"]) % 2) for messages in completions]
"""


def test_what_a_program_does_harms_no_other(shop, run, tmp_path):
    """An adapter is trained by reward functions alone, as the program gives no verdict."""
    (tmp_path / "harms.py").write_text(HARMS)
    words = {"agent": f"{tmp_path}/harms.py:solve", "reward_funcs": f"{tmp_path}/harms.py:judge", "max_turns": 5}
    finish(1, run("harmed", **words, max_steps=1, eval_steps=0, max_completion_length=8, use_peft=None))
    [row] = timeless(run.of("harmed"))
    failed = {name.rpartition("/")[2]: count for name, count in row.items() if name.startswith("agent/failures/")}
    # The server may close the connection of a body that is too large before the client has sent it, and takes 1,280
    # connections: of 2,000 one that is closed may end a program before a request of it is above the limit of turns.
    refused = failed.pop("APIStatusError", 0) + failed.pop("APIConnectionError", 0)
    many = failed.pop("max_turns")
    assert failed == {"AuthenticationError": 4} and 1 <= many <= 4 and many + refused == 8
    records = [record for record in lines(run.of("harmed", "completions.jsonl")) if record["phase"] == "train"]
    whole = [record for record in records if int(record["prompt"].split(":")[0].split()[-1]) % 8 not in (1, 3, 7)]
    assert whole and all(record["rewards/judge"] in (0, 1) and record["rewards/solve"] is None for record in whole)
    assert any(record["advantage"] for record in whole) and row["grad_norm"] > 0
