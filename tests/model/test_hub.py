"""The defaults by their hub names, Qwen/Qwen2.5-1.5B-Instruct and openai/gsm8k, through the hub-loading code.

No network: a hub cache is laid out as the hub client leaves it after a download, with a tiny model and a few problems
in it, and a process loads them offline.
"""

import json
import shutil
from pathlib import Path

import pytest
from conftest import run_python, write_model

from demo.task import write_dataset

pytestmark = pytest.mark.slow

COMMIT = "0" * 40


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> dict[str, str]:
    """Environment with a hub cache that holds the default model and dataset."""
    home = tmp_path_factory.mktemp("huggingface")
    repository = home / "hub/models--Qwen--Qwen2.5-1.5B-Instruct"
    snapshot = write_model(repository / "snapshots" / COMMIT, seed=0)
    settings = json.loads((snapshot / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (snapshot / "config.json").write_text(json.dumps(settings))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    cache_gsm8k(home)
    return {"HF_HOME": str(home)}


def cache_gsm8k(home: Path) -> None:
    import datasets

    write_dataset(home / "made", seed=0, train_size=80, test_size=8)
    files = {split: str(home / f"made/{split}.jsonl") for split in ("train", "test")}
    datasets.load_dataset("json", data_files=files, cache_dir=str(home / "built"))
    (built,) = {path.parent for path in (home / "built").rglob("*.arrow")}
    prepared = home / "datasets/openai___gsm8k/main/0.0.0" / COMMIT
    prepared.mkdir(parents=True)
    for path in built.glob("*.arrow"):
        shutil.copy(path, prepared / path.name.replace("json-", "gsm8k-"))
    info = json.loads((built / "dataset_info.json").read_text()) | {"dataset_name": "gsm8k", "config_name": "main"}
    (prepared / "dataset_info.json").write_text(json.dumps(info))


SCRIPT = """
import json, sys
import torch
import grpo_ref_split
loaded = sorted({"peft", "bitsandbytes", "trl"} & sys.modules.keys())
try:
    import bitsandbytes
except ImportError:
    pass
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import load_examples
from grpo.model.load import load_reference, load_tokenizer

reference, config = load_reference(ServerConfig(), torch.device("cpu")), TrainerConfig()
train, test = (load_examples(config, split, load_tokenizer(config)) for split in ("train", "test"))
print(json.dumps([loaded, reference.config.name_or_path, len(train), len(test), train[0].prompt]))
"""


def test_the_defaults_of_both_programs_are_found_and_no_library_is_loaded_that_is_not_used(hub):
    ended = run_python("-c", SCRIPT, environment=hub, check=True)
    loaded, name, train, test, prompt = json.loads(ended.stdout.splitlines()[-1])
    assert (name, train, test) == ("Qwen/Qwen2.5-1.5B-Instruct", 80, 8)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful assistant.")
    assert loaded == []
    assert "gemm_4bit" not in ended.stderr  # bitsandbytes' warning where the processor has AVX512-BF16
