"""A run's files: its settings, a line for each step and each start, completions, and the pictures of their prompts."""

import math
import shutil
import socket
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from pictured import drawing
from trainer_runs import lines

from grpo.config.command_line import parse_arguments
from grpo.config.trainer import TrainerConfig
from grpo.run.folder import SaveError
from grpo.run.recorder import Recorder, commit_of, record_start

PNG, JPEG = drawing(8, 8, 0), drawing(8, 8, 1, "JPEG")


def test_the_record_is_appended_nan_is_null_and_each_picture_is_written_once(tmp_path):
    config = TrainerConfig(report_to=["none"])
    pictured = {"prompt": "ä", "pictures": (PNG, JPEG)}
    recorder = Recorder(config, tmp_path, after=-1)
    recorder.metrics(1, {"reward": 1.5, "completions/mean_terminated_length": math.nan, "loss": -math.inf})
    recorder.completions(1, "train", [pictured, pictured, {"prompt": "text", "reward": math.inf, "note": "NaN"}])
    recorder.bad_step(1, [{"prompt": "text", "advantage": math.nan}])
    recorder.close()
    recorder = Recorder(config, tmp_path, after=1)
    recorder.metrics(2, {"reward": 2.5})
    recorder.completions(2, "eval", [{"prompt": "p", "pictures": (JPEG,)}])
    recorder.bad_step(2, [pictured])
    recorder.close()
    first_row = {"step": 1, "reward": 1.5, "completions/mean_terminated_length": None, "loss": None}
    assert lines(tmp_path / "metrics.jsonl") == [first_row, {"step": 2, "reward": 2.5}]
    first, again, text, held_out = lines(tmp_path / "completions.jsonl")
    png, jpeg = first["pictures"]
    assert (png[-4:], jpeg[-4:]) == (".png", ".jpg")
    assert first == again == {"step": 1, "phase": "train", "prompt": "ä", "pictures": [png, jpeg]}
    assert text == {"step": 1, "phase": "train", "prompt": "text", "reward": None, "note": "NaN"}
    assert held_out["pictures"] == [jpeg]
    assert '"ä"' in (tmp_path / "completions.jsonl").read_text()
    bad = [{"step": 1, "prompt": "text", "advantage": None}, {"step": 2, "prompt": "ä", "pictures": [png, jpeg]}]
    assert lines(tmp_path / "bad_steps.jsonl") == bad
    Recorder(config, tmp_path, after=1).close()
    assert lines(tmp_path / "bad_steps.jsonl") == bad[:1]
    assert {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()} == {png: PNG, jpeg: JPEG}


def test_tensorboard_has_what_a_killed_run_has_recorded(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder, numbers = Recorder(TrainerConfig(report_to=["tensorboard"]), tmp_path, after=-1), range(200)
    for step in range(5):
        recorder.metrics(step, {f"number/{number}": step for number in numbers})
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()  # as after a kill: it is not closed
        assert all(events.Scalars(f"number/{number}")[-1].step == step for number in numbers)
    recorder.close()


@pytest.mark.parametrize("change", [shutil.rmtree, lambda run: run.rename(run.with_name("moved"))])
def test_a_folder_that_is_gone_ends_the_run_at_its_next_step(tmp_path, change):
    (run := tmp_path / "run").mkdir()
    recorder = Recorder(TrainerConfig(report_to=["none"]), run, after=-1)
    recorder.metrics(1, {})
    change(run)
    for again in (False, True):  # also where another one is in its place
        if again:
            run.mkdir()
            (run / "metrics.jsonl").touch()
        with pytest.raises(SaveError, match=f"^{run}/metrics.jsonl was moved, replaced or deleted while"):
            recorder.metrics(2, {})
    recorder.close()


def test_the_settings_of_a_run_are_those_it_went_on_with(tmp_path):
    for steps, name in ((10, None), (14, "last")):
        changes = {"max_steps": steps, "resume_from_checkpoint": name, "output_dir": str(tmp_path)}
        Recorder(TrainerConfig(**changes, report_to=["none"]), tmp_path, after=-1).close()
        written = parse_arguments(TrainerConfig, "", ["--config", str(tmp_path / "config.yaml")])
        assert written.max_steps == steps and written.resume_from_checkpoint is None


def test_a_start_is_a_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["grpo_ref_split.py", "--local_rank=0", "--system_prompt", "two words"])
    for step in (0, 7):
        record_start(tmp_path, step, torch.device("cpu"))
    first, second = lines(tmp_path / "starts.jsonl")
    assert (first["step"], second["step"]) == (0, 7)
    assert first["command"] == "grpo_ref_split.py --system_prompt 'two words'"
    assert (first["ranks"], first["hosts"]) == (1, {socket.gethostname(): ["cpu"]})
    versions = {name: version(name) for name in ("torch", "transformers", "deepspeed")}
    assert first["versions"].items() >= (versions | {"python": sys.version.split()[0]}).items()


def test_the_commit_says_whether_a_file_is_changed(tmp_path):
    def git(*words: str) -> str:
        options = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        shown = subprocess.run(["git", *options, "-C", tmp_path, *words], check=True, capture_output=True, text=True)
        return shown.stdout.strip()

    assert commit_of(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == commit + "-dirty"
    (tmp_path / "within").mkdir()
    assert commit_of(tmp_path / "within") is None  # a folder of another checkout, such as its .venv
