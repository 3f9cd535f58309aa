"""What the README.md of a saved model says, and that its example runs."""

import contextlib
import copy
import io
import json
import re

import pictured
import pytest
import torch
from huggingface_hub import ModelCard

from grpo.config.trainer import TrainerConfig
from grpo.model.load import load_model, load_tokenizer
from grpo.model.lora import train_adapter
from grpo.model.pictures import load_processor
from grpo.run.folder import save_model

SYSTEM = 'Think "hard",\nthen <answer>42</answer>.'


@pytest.fixture
def run(tmp_path):
    rows = [
        {"step": 0, "eval_n": 8, "eval_accuracy": 0.25, "eval_accuracy_se": 0.1, "eval_reward": None},
        {"step": 3, "reward": 1.0},
        {"step": 5, "eval_n": 8, "eval_accuracy": 0.5, "eval_accuracy_se": 0.2, "eval_reward": 1.5},
        {"step": 9, "eval_n": 8, "eval_accuracy": 0.75, "eval_accuracy_se": 0.3, "eval_reward": 1.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 10, "eval_n')
    starts = [{"step": 0, "versions": {"torch": "1"}, "commit": "abc"}, {"step": 4, "versions": {"torch": "2"}}]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    return tmp_path


def card_of(model, tokenizer, folder, step=7, **settings) -> ModelCard:
    save_model(model, tokenizer, folder, TrainerConfig(**settings), step=step)
    return ModelCard.load(folder / "README.md")


def example(card: ModelCard) -> str:
    return re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1]


def names_of_example(card: ModelCard, folder) -> dict:
    """Run the card's example, which prints something, and return its names."""
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(example(card).replace('"MODEL"', repr(str(folder))), names)
    assert printed.getvalue().strip()
    return names


def test_the_card_of_a_model(model, tokenizer, data_folder, run):
    settings = {"dataset_name": str(data_folder), "reward_funcs": ["correctness_reward"], "system_prompt": SYSTEM}
    card = card_of(model, tokenizer, run / "model", **settings)
    facts = {"pipeline_tag": "text-generation", "tags": ["grpo", "generated_from_trainer"]}
    assert card.data.to_dict() == facts | {"library_name": "transformers"}
    paper = "[arXiv:2402.03300](https://arxiv.org/abs/2402.03300)"
    assert f"`tiny`, trained for 7 steps with GRPO ({paper}) on\n" in card.text
    assert f"`{data_folder.name}`" in card.text and str(data_folder) not in card.text
    assert "| step 0 (8 problems) | step 5 (8 problems) |" in card.text  # step 9 is of a later model
    assert "| accuracy | 0.250 ± 0.100 | 0.500 ± 0.200 |" in card.text and "| reward |" not in card.text
    assert "| reward_funcs | correctness_reward |" in card.text and "\ntorch 2.\n" in card.text
    assert "vllm serve MODEL" in card.text and f'FROM .\nSYSTEM """{SYSTEM}"""\n' in card.text


def test_a_model_of_the_hub_is_named_as_there(model, tokenizer, tmp_path):
    model = copy.copy(model)
    model.config = copy.copy(model.config)
    model.config.name_or_path = "Qwen/Qwen2.5-1.5B-Instruct"
    card = card_of(model, tokenizer, tmp_path / "model")
    assert card.data.base_model == "Qwen/Qwen2.5-1.5B-Instruct" and card.data.datasets == ["openai/gsm8k"]
    assert "held out" not in card.text and "torch" not in card.text.partition("## Training")[2]  # there is no record


@pytest.mark.parametrize("kind", ["template", "kept", "text"])
def test_its_example_asks_as_in_training(model, tokenizer, tmp_path, kind):
    tokenizer, settings = copy.copy(tokenizer), {"system_prompt": SYSTEM, "max_completion_length": 4}
    if kind == "text":
        tokenizer.chat_template = None
    card = card_of(model, tokenizer, tmp_path / "model", **settings, save_system_prompt=kind == "kept")
    assert (json.dumps(SYSTEM) in example(card)) == (kind == "template")
    assert ("FROM ." in card.text) == (kind != "text")
    names = names_of_example(card, tmp_path / "model")
    prompt = names["prompt"]
    seen = prompt if kind == "text" else names["ask"].tokenizer.apply_chat_template(prompt, tokenize=False)
    assert SYSTEM in seen


def test_the_example_of_a_model_with_pictures_asks_with_one(tmp_path, monkeypatch):
    """LLaVA: its processor needs no torchvision."""
    config = TrainerConfig(
        model_name_or_path=str(pictured.save("llava", tmp_path / "start")),
        system_prompt=SYSTEM,
        max_completion_length=4,
        freeze_vision_tower=True,
    )
    model, tokenizer = load_model(config, torch.device("cpu")), load_tokenizer(config)
    processor = load_processor(config, model.config, tokenizer)
    save_model(model, tokenizer, tmp_path / "model", config, step=7, processor=processor)
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.pipeline_tag == "image-text-to-text" and "FROM ." not in card.text
    assert "| freeze_vision_tower | True |" in card.text and "max_pixels" not in card.text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture.png").write_bytes(pictured.drawing(24, 24, 0))
    names = names_of_example(card, tmp_path / "model")
    assert SYSTEM in names["ask"].processor.apply_chat_template(names["prompt"], tokenize=False)


def test_the_card_of_an_adapter(model, tokenizer, tmp_path):
    config = TrainerConfig(use_peft=True, lora_r=32, lora_alpha=64)
    adapted = copy.deepcopy(model)
    train_adapter(adapted, config)
    card = card_of(adapted, tokenizer, tmp_path / "model")
    assert card.data.library_name == "peft" and "lora" in card.data.tags
    assert "A LoRA adapter of `tiny`" in card.text and "| lora_r | 32 |" in card.text and "FROM ." not in card.text
    served = f"--enable-lora --max-lora-rank 32 --lora-modules {tmp_path.name}=MODEL\n"
    assert f"vllm serve {model.config.name_or_path} {served}" in card.text
    merged = card_of(adapted, tokenizer, tmp_path / "merged", use_peft=True, merge_on_save=True)
    assert merged.data.library_name == "transformers" and "vllm serve MODEL" in merged.text


def test_data_that_the_hub_does_not_have_is_no_dataset_of_the_card(model, tokenizer, tmp_path, monkeypatch):
    """The hub refuses the whole push for a name that is no id."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").touch()
    for number, settings in enumerate(({"environment": "verifiers:wordle"}, {"dataset_name": "~/data"})):
        assert card_of(model, tokenizer, tmp_path / f"run/{number}", **settings).data.datasets is None
