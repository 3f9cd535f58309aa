"""A run with tools and an environment, server and trainer, and what evaluates and talks to its model after it."""

import json
import re
import signal

import callers
import pytest
from altered_trainer import killed_at
from conftest import run_python, running_server
from pools import Worker, draw_by_workers
from recorded import write_rows
from rounding import NO_KL
from trainer_runs import check_alike, check_weights, finish, lines, options, timeless, training, went_on

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with a model that calls tools, tools.py, and data."""
    folder = callers.write(tmp_path_factory.mktemp("shop"))
    for split, count in (("train", 24), ("test", 10)):
        rows = [{"question": f"{n}: how much is a pen?", "answer": "7" * (n % 3 + 1)} for n in range(count)]
        write_rows(folder / f"data/{split}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def run(shop, tmp_path_factory):
    """`run(name, **changes)`: the options of a run of that name. `run.of(name)` is its folder."""
    folder = tmp_path_factory.mktemp("runs")

    def words(name: str, **changes) -> list[str]:
        settings = {"max_steps": 4, "save_steps": 1, "eval_steps": 4, "steps_per_generation": 2, "report_to": "none"}
        settings |= {"max_completion_length": 160, "max_prompt_length": 400, "sequences_per_generate": 6}
        settings |= {"reward_funcs": f"{shop}/tools.py:cheap", "max_tool_calling_iterations": 3}
        settings |= {"resume_from_checkpoint": "last", "ref_deadline": 120}
        return options(shop / "model", shop / "data", folder / name, **settings | changes)

    words.of = folder.joinpath
    return words


def test_killed_between_two_steps_of_a_round_it_goes_on_bit_for_bit(shop, run, tmp_path):
    with running_server(shop / "model", tmp_path, "--deterministic", "true") as server:
        changes = {"environment": f"{shop}/tools.py:Shop", "beta": 0.1, "ref_servers": server.url}
        undisturbed, killed = run("undisturbed", **changes), run("killed", **changes)
        finish(1, undisturbed)
        with training(1, killed, *killed_at("grpo.trainer.step:update:after:4")) as process:
            process.communicate(timeout=120)
        assert went_on(finish(1, killed)) == 3
    rows = timeless(run.of("undisturbed"))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert 0 <= rows[1]["kl"] < NO_KL and rows[2]["kl"] > 1e-8
    check_alike(run.of("killed"), run.of("undisturbed"))
    for row in rows[1:]:
        assert row["tools/call_frequency"] > 0.5 and 0 < row["tools/failure_frequency"] < 1
        assert row["rewards/Shop/mean"] > 0 and row["completions/mean_turns"] > 1
    # What is recorded fits: calls, answers and rewards of each completion.
    records = lines(run.of("undisturbed", "completions.jsonl"))
    assert all("The till has" in record["prompt"] for record in records)
    assert any(len(record["messages"]) > 3 for record in records)
    for record in records:
        answers = [message for message in record["messages"] if message["role"] == "tool"]
        assert all(answer["content"] in ("7", "12") or "error" in answer["content"] for answer in answers)


def test_a_tool_that_always_raises_is_shown_and_warned_of_once(shop, run, tmp_path):
    (tmp_path / "broken.py").write_text(callers.TOOLS.replace("return PRICES[item]", "return {}[item]"))
    output = finish(1, run("broken", tools=f"{tmp_path}/broken.py:price", beta=0, eval_steps=0, max_steps=2))
    assert [row["tools/failure_frequency"] for row in timeless(run.of("broken"))] == [1.0, 1.0]
    for words in ("tool 'price' raised KeyError: the run continues", "in price\n    return {}["):
        assert output.count(words) == 1
    warned = re.findall(r"step (\d): 100 % of the calls of tools failed: .*/broken/completions.jsonl, and", output)
    assert warned == ["1"]


def test_workers_with_the_runs_environment_draw_what_the_trainer_draws(shop, run, tmp_path):
    """One ends in the middle of a round; one without the environment says so, and ends."""
    shared = {"beta": 0, "eval_steps": 0, "save_steps": 0, "importance_sampling_mode": "none"}
    shared |= {"environment": f"{shop}/tools.py:Shop"}
    finish(1, run("own", **shared))
    mine = "--environment", shared["environment"]

    def end_worker(worker: Worker) -> None:
        assert worker.end(signal.SIGTERM) == 0

    written = draw_by_workers(lambda url: run("drawn", sampler="pool", pool=url, **shared), tmp_path, mine, end_worker)
    assert "environment=None: that of run drawn is Shop: name its file" in written
    check_weights(run.of("drawn", "model"), run.of("own", "model"))
    assert lines(run.of("drawn", "completions.jsonl")) == lines(run.of("own", "completions.jsonl"))
    rows = timeless(run.of("drawn"))
    for row, expected in zip(rows, timeless(run.of("own")), strict=True):
        assert {name for name in row if row[name] != expected[name]} <= {name for name in row if "logp_diff" in name}
    assert rows[-1]["completions/mean_turns"] > 1


def test_evaluation_and_chat_use_the_tools_as_the_run_did(shop, run):
    tools = f"{shop}/tools.py:price"
    finish(2, run("two ranks", tools=tools, beta=0))
    model = run.of("two ranks", "model")
    evaluated = lines(run.of("two ranks", "metrics.jsonl"))[-1]

    output = run.of("evaluation")
    words = ["--model", model, "--tools", tools, "--reward_funcs", f"{shop}/tools.py:cheap", "--output", output]
    done = run_python("-m", "grpo.evaluate", *words)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((output / "metrics.json").read_text())
    assert f"calls of tools, greedy         {metrics['eval_tools/call_frequency']:.3f}\n" in done.stdout
    again = {name: value for name, value in metrics.items() if name != "eval_runtime"}
    assert again == {name: evaluated[name] for name in again}
    assert metrics["eval_tools/call_frequency"] > 0

    asked = json.loads((shop / "data/test.jsonl").read_text().splitlines()[0])["question"]
    words = ["--model", model, "--tools", tools, "--temperature", "0"]
    talked = run_python("-m", "grpo.chat", *words, input=asked + "\n")
    assert talked.returncode == 0, talked.stderr
    record = next(record for record in lines(output / "completions.jsonl") if record["prompt"].count(asked))
    printed = talked.stdout.splitlines()
    assert "\n".join(line for line in printed if line[0] != "[") == record["completion"]
    answers = [message["content"] for message in record["messages"] if message["role"] == "tool"]
    shown = [line for line in printed if line[0] == "["]
    assert answers and shown == [f"[price: {answer}]" for answer in answers]
