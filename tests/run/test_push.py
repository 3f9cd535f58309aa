"""A model goes to a hub that is a server of this machine; what would prevent that is refused at the start."""

import importlib
import logging

import pytest
from hub_server import running_hub
from huggingface_hub import constants
from trainer_runs import one_line, options, run_ranks

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.run.folder import (
    SaveError,
    check_login,
    open_repo,
    push_in_background,
    push_model,
    save_model,
    tell_unpushed,
)

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the client's way without Xet


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "write")
    with running_hub(tmp_path / "hub") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub


def test_a_pushed_model_is_what_was_saved(hub, model, tokenizer, tmp_path):
    run = tmp_path / "my-run"
    config = TrainerConfig(push_to_hub=True, hub_private_repo=True)
    config.hub_model_id = open_repo(config, run)
    assert config.hub_model_id == "me/my-run" and hub.created == {"me/my-run": "private"}
    save_model(model, tokenizer, run / "model", config, step=7)
    push_model(run / "model", config.hub_model_id)
    saved = {path.name: path.read_bytes() for path in (run / "model").iterdir() if path.name != "progress.json"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "hub/me/my-run").iterdir()} == saved
    assert b'pipeline("text-generation", "me/my-run")' in saved["README.md"]


def test_a_checkpoints_model_is_pushed_while_training_goes_on(hub, model, tokenizer, tmp_path, caplog):
    checkpoint = tmp_path / "checkpoint-7"
    save_model(model, tokenizer, checkpoint, TrainerConfig())
    saved = {path.name for path in checkpoint.iterdir()} - {"progress.json"}
    (checkpoint / "engine").mkdir()
    for name in ("engine/weights.pt", "rank-0.pickle"):
        (checkpoint / name).write_text("not for others")
    with caplog.at_level("INFO"):
        push_in_background(checkpoint, "me/my-run")
        push_model(checkpoint, "me/my-run")  # after it: both are there
        assert {path.name for path in (tmp_path / "hub/me/my-run").iterdir()} == saved
        hub.fault = "commit"
        push_in_background(checkpoint, "me/my-run")
        with pytest.raises(SaveError):
            push_model(checkpoint, "me/my-run")
    assert f"pushed {checkpoint} to" in caplog.text
    assert f"{checkpoint} could not be pushed to me/my-run: " in caplog.text


def test_checkpoints_that_are_not_pushed_when_a_run_ends_are_named(hub, model, tokenizer, tmp_path, caplog):
    for step in (7, 8):
        save_model(model, tokenizer, tmp_path / f"checkpoint-{step}", TrainerConfig())
        push_in_background(tmp_path / f"checkpoint-{step}", "me/mine")
    tell_unpushed()  # the second waits for the first
    last = tmp_path / "checkpoint-8"
    command = f"hf upload me/mine {last} --exclude engine 'rank-*.pickle' progress.json 'engine/*'"
    assert f"{last} is not pushed yet: push it with: {command}" in caplog.text
    push_model(last, "me/mine")
    caplog.clear()
    tell_unpushed()
    assert not caplog.text


def test_a_repository_that_is_there_is_pushed_to(hub, tmp_path, caplog):
    importlib.import_module("grpo.model.hub")  # as every program does
    caplog.set_level(logging.INFO)
    for _ in range(2):
        config = TrainerConfig(push_to_hub=True, hub_model_id="other")
        assert open_repo(config, tmp_path) == "me/other"
    assert hub.created == {"me/other": None} and not caplog.messages


@pytest.mark.parametrize(
    ("token", "name", "reason"),
    [
        ("stranger", None, r"push_to_hub=True: http://127.0.0.1:\d+ does not log you in \(Invalid user token.*hf auth"),
        ("read", None, r"push_to_hub=True: your token of http://127.0.0.1:\d+ may only read"),
        ("write", "you/model", r"hub_model_id='you/model': it cannot be made \(.*You don't have the rights.*: name a"),
        ("write", "a/b/c", r"hub_model_id='a/b/c': it cannot be made"),
    ],
)
def test_what_cannot_be_pushed_to_is_refused(hub, tmp_path, monkeypatch, token, name, reason):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=reason):
        open_repo(TrainerConfig(push_to_hub=True, hub_model_id=name), tmp_path)
    assert not hub.created


def test_a_hub_out_of_reach_is_refused(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="http://127.0.0.1:9 does not log you in .*Connection refused"):
        check_login()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="does not log you in .*offline mode"):
        check_login()


@pytest.mark.parametrize("fault", ["large", "commit"])
def test_a_model_that_cannot_be_pushed_stays(hub, model, tokenizer, tmp_path, fault):
    save_model(model, tokenizer, folder := tmp_path / "a run", TrainerConfig(), step=7)
    hub.fault = fault
    with pytest.raises(SaveError) as failed:
        push_model(folder, "me/model")
    assert str(failed.value).startswith(f"{folder} could not be pushed to me/model: ")
    assert "Your storage is full" in str(failed.value)
    assert str(failed.value).endswith(f"push it with: hf upload me/model '{folder}'")
    assert (folder / "model.safetensors").exists()


@pytest.mark.rare
def test_a_run_that_is_done_is_pushed_when_it_is_repeated(model, tokenizer, model_folder, data_folder, tmp_path):
    run = tmp_path / "run"
    save_model(model, tokenizer, run / "model", TrainerConfig(), step=3)
    (run / "metrics.jsonl").write_text('{"step": 3, "reward": 1.0, "num_tokens": 9, "step_time": 1.0}\n')
    words = options(model_folder, data_folder, run, beta=0, resume_from_checkpoint="last", push_to_hub=None)
    with running_hub(tmp_path / "hub") as hub:
        hub.fault = "commit"
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "write", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        ended = run_ranks(1, "grpo_ref_split.py", *words, environment=environment)
    assert ended.returncode == 1 and hub.created == {"me/run": None}
    assert f"{run}/model could not be pushed to me/run: " in one_line(ended.stdout)
    assert "talk to it" in ended.stdout and (run / "model/model.safetensors").exists()
