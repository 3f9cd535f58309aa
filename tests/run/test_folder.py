"""A run's folder is new; a model is saved whole or not at all."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.run.folder import SaveError, create_run, save_model


def config(*options) -> TrainerConfig:
    return parse_arguments(TrainerConfig, "", list(options))


def test_a_saved_model_loads_and_is_the_same(model, tokenizer, tmp_path):
    save_model(model, tokenizer, tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == tokenizer.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_an_interrupted_save_left_is_replaced(model, tokenizer, tmp_path):
    (tmp_path / "model.unfinished").mkdir()
    (tmp_path / "model.unfinished" / "rubbish").touch()
    save_model(model, tokenizer, tmp_path / "model")
    assert not (tmp_path / "model" / "rubbish").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_save_says_where_and_leaves_nothing(model, tokenizer, tmp_path):
    (tmp_path / "model").write_text("a file is in the way")
    with pytest.raises(SaveError, match=f"could not be saved to {tmp_path / 'model'}: .*nothing was left"):
        save_model(model, tokenizer, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_has_a_folder_of_its_own(tmp_path, monkeypatch):
    folder = create_run(config("--output_dir", str(tmp_path / "a" / "run")))
    assert folder == tmp_path / "a" / "run" and folder.is_dir()
    monkeypatch.chdir(tmp_path)
    assert create_run(config()).parent.name == "runs"


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="output_dir=.*holds a run or"):
        create_run(config("--output_dir", str(tmp_path)))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="output_dir=.*: Not a directory"):
        create_run(config("--output_dir", str(tmp_path / "file" / "run")))
