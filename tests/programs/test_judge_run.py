"""A run whose reward is a judge's verdict: killed and resumed, it pays nothing twice."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager

import judges
import pytest
from conftest import ENVIRONMENT, free_port
from judges import judging, letters
from servers import wait_until
from trainer_runs import check_weights, finish, options, run_ranks, timeless, training, wait_for_steps

pytestmark = pytest.mark.slow


def asked(server) -> list[str]:
    return [json.dumps(body, sort_keys=True) for _, _, body in server.asked]


def numbers(run) -> list[dict]:
    """The record of each step, without the judge's costs."""
    paid = {f"judge/letters/{name}" for name in ("requests", "tokens", "latency")}
    return [{name: value for name, value in row.items() if name not in paid} for row in timeless(run)]


@pytest.fixture
def words_of(model_folder, data_folder):
    """`words_of(folder, url)`: the options of a run in this new folder, with the judge at the URL."""

    def words(folder, url: str) -> list[str]:
        folder.mkdir()
        path = folder / "letters.yaml"
        fields = {"base_url": url, "model": "m", "prompt": "{prompt} {completion}", "verdict": r"SCORE: (\d+)"}
        path.write_text(json.dumps(fields | {"votes": 2, "temperature": 0.5}))
        settings = {"beta": 0, "eval_steps": 0, "save_steps": 1, "max_steps": 8, "report_to": "none"}
        settings |= {"reward_funcs": f"judge:{path}", "resume_from_checkpoint": "last"}
        return options(model_folder, data_folder, folder / "run", **settings)

    return words


@contextmanager
def judge_that_dies(port: int, number: int):
    """A judge in a process of its own, that kills itself instead of the answer of this number."""
    process = subprocess.Popen([sys.executable, judges.__file__, str(port), str(number)], env=ENVIRONMENT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def check_equal(run, undisturbed) -> None:
    check_weights(run / "model", undisturbed / "model")
    assert numbers(run) == numbers(undisturbed)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["rewards/letters/mean"] <= 1 and row["judge/letters/unread"] == 0 for row in rows)


def test_whether_run_or_judge_is_killed_the_run_ends_the_same_and_asks_nothing_twice(words_of, tmp_path):
    """Two ranks share what was answered."""
    with judging(letters) as server:
        finish(2, words_of(tmp_path / "undisturbed", server.url))
        undisturbed, server.asked[:] = asked(server), []
        given = words_of(tmp_path / "killed", server.url)
        with training(2, given) as process:
            wait_for_steps(process, tmp_path / "killed/run", 3)
            process.send_signal(signal.SIGKILL)
        finish(2, given)
        questions = asked(server)
    check_equal(tmp_path / "killed/run", tmp_path / "undisturbed/run")
    # What was on its way in the moment of the kill may be asked again, and what both ranks draw at a time.
    assert {*questions} == {*undisturbed} and len(questions) <= len({*questions}) + 16

    port = free_port()
    words = words_of(tmp_path / "waits", f"http://127.0.0.1:{port}/v1")
    with judge_that_dies(port, len(undisturbed) // 2) as judge, training(2, words) as process:
        wait_until(lambda: judge.poll() is not None, 120, process)
        with judge_that_dies(port, -1):
            output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    check_equal(tmp_path / "waits/run", tmp_path / "undisturbed/run")


def test_an_evaluation_uses_the_same_judge(model_folder, data_folder, tmp_path):
    with judging(letters) as server:
        fields = {"base_url": server.url, "model": "m", "prompt": "{completion}", "verdict": r"SCORE: (\d+)"}
        (tmp_path / "letters.yaml").write_text(json.dumps(fields))
        words = ["--model", model_folder, "--dataset_name", data_folder]
        words += ["--reward_funcs", f"judge:{tmp_path}/letters.yaml", "--system_prompt", "", "--eval_samples", "6"]
        words += ["--max_prompt_length", "96", "--max_completion_length", "16"]
        ended = run_ranks(1, "-m", "grpo.evaluate", *map(str, words), "--output", str(tmp_path / "out"))
        assert ended.returncode == 0, ended.stdout
        assert 0 < len(server.asked) <= 8  # the first example is tried with its gold answer and an empty one
    found = json.loads((tmp_path / "out/metrics.json").read_text())
    assert 0 <= found["eval_rewards/letters/mean"] <= 1 and found["eval_n"] == 6
