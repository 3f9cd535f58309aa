"""A run whose reward is a judge's verdict: killed and resumed, it pays nothing twice."""

import json
import signal

import pytest
from judges import judging, verdict
from trainer_runs import check_weights, finish, options, run_ranks, timeless, training, wait_for_steps

pytestmark = pytest.mark.slow


def letters(body: dict, number: int) -> tuple[int, dict, dict]:
    """Judge by the number of letters of the completion, the last text, and the vote."""
    text = body["messages"][1]["content"].rpartition("<data ")[2]
    return verdict(f"SCORE: {(sum(map(str.isalpha, text)) + body['seed']) % 11}")


def asked(server) -> list[str]:
    return [json.dumps(body, sort_keys=True) for _, _, body in server.asked]


def numbers(run) -> list[dict]:
    """What a run recorded of each step, but for what the judge cost."""
    paid = {f"judge/letters/{name}" for name in ("requests", "tokens", "latency")}
    return [{name: value for name, value in row.items() if name not in paid} for row in timeless(run)]


def test_a_killed_run_asks_its_judge_nothing_twice_and_ends_as_one_that_was_not(model_folder, data_folder, tmp_path):
    """Two ranks share what was answered."""

    def words(folder, url: str) -> list[str]:
        folder.mkdir()
        path = folder / "letters.yaml"
        fields = {"base_url": url, "model": "m", "prompt": "{prompt} {completion}", "verdict": r"SCORE: (\d+)"}
        path.write_text(json.dumps(fields | {"votes": 2, "temperature": 0.5}))
        settings = {"beta": 0, "eval_steps": 0, "save_steps": 1, "max_steps": 8, "report_to": "none"}
        settings |= {"reward_funcs": f"judge:{path}", "resume_from_checkpoint": "last"}
        return options(model_folder, data_folder, folder / "run", **settings)

    with judging(letters) as server:
        finish(2, words(tmp_path / "undisturbed", server.url))
        undisturbed, server.asked[:] = asked(server), []
        given = words(tmp_path / "killed", server.url)
        with training(2, given) as process:
            wait_for_steps(process, tmp_path / "killed/run", 3)
            process.send_signal(signal.SIGKILL)
        finish(2, given)
        questions = asked(server)
    check_weights(tmp_path / "killed/run/model", tmp_path / "undisturbed/run/model")
    assert numbers(tmp_path / "killed/run") == numbers(tmp_path / "undisturbed/run")
    # What was on its way in the moment of the kill may be asked again, and what both ranks draw at a time.
    assert {*questions} == {*undisturbed} and len(questions) <= len({*questions}) + 16
    rows = [json.loads(line) for line in (tmp_path / "killed/run/metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["rewards/letters/mean"] <= 1 and row["judge/letters/unread"] == 0 for row in rows)


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
