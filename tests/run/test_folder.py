"""A run's folder is new; a model is saved whole or not at all."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.run.folder import SaveError, save_model
from grpo.run.run_folder import find_run_folder, make_run_folder


def test_a_saved_model_loads_and_is_the_same_whatever_an_interrupted_save_left(model, tokenizer, tmp_path):
    (tmp_path / "model.unfinished").mkdir()
    (tmp_path / "model.unfinished/rubbish").touch()
    save_model(model, tokenizer, tmp_path / "model", TrainerConfig())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == tokenizer.get_vocab()
    assert not (tmp_path / "model/rubbish").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_save_says_where_and_leaves_nothing(model, tokenizer, tmp_path):
    (tmp_path / "model").write_text("a file is in the way")
    reason = rf"could not be saved to {tmp_path / 'model'}: .* \(\d+ MiB of its disk are free\): nothing was left"
    with pytest.raises(SaveError, match=reason):
        save_model(model, tokenizer, tmp_path / "model", TrainerConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_has_a_folder_of_its_own(tmp_path, monkeypatch):
    settings = TrainerConfig(output_dir=str(tmp_path / "a/run"))
    make_run_folder(settings, folder := find_run_folder(settings))
    assert folder == tmp_path / "a" / "run" and folder.is_dir()
    monkeypatch.chdir(tmp_path)
    assert find_run_folder(TrainerConfig()).parent.name == "runs"


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    settings = TrainerConfig(output_dir=str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')  # a run that failed in its first step
    make_run_folder(settings, find_run_folder(settings))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    for refuse in (lambda: find_run_folder(settings), lambda: make_run_folder(settings, tmp_path)):
        with pytest.raises(ConfigError, match="output_dir=.*holds a run or"):
            refuse()


@pytest.mark.parametrize(
    "name, reason",
    [
        ("file/run", "Not a directory"),
        ("/proc/self/run", "No such file or directory"),
        (300 * "a", "File name too long"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_made(tmp_path, name, reason):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"output_dir='.*/{name.lstrip('/')}': {reason}: name a folder that can be"):
        find_run_folder(TrainerConfig(output_dir=str(tmp_path / name)))
    find_run_folder(TrainerConfig(output_dir=str(tmp_path / "a/run")))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
