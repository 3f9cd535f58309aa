"""The defaults by their hub names, Qwen/Qwen2.5-1.5B-Instruct and openai/gsm8k, through the hub-loading code.

No network: a hub cache is laid out as the hub client leaves it after a download, with a tiny model and a few problems
in it, and the programs run offline on it.
"""

import json
import shutil
from pathlib import Path

import pytest
from conftest import running_server, write_model
from huggingface_hub import ModelCard
from rounding import NO_KL
from trainer_runs import lines, run_ranks

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


def test_both_programs_find_their_defaults(hub, tmp_path):
    run = tmp_path / "run"
    with running_server(None, tmp_path, environment=hub) as server:
        fewer = ["--max_steps", "1", "--max_completion_length", "16", "--ref_startup_timeout", "30"]
        where = ["--ref_servers", server.url, "--output_dir", str(run)]
        ended = run_ranks(2, "grpo_ref_split.py", *fewer, *where, environment=hub)
    assert ended.returncode == 0, ended.stdout
    assert "Qwen/Qwen2.5-1.5B-Instruct" in server.log.read_text()
    before, first = lines(run / "metrics.jsonl")
    assert before["eval_n"] == 8 and abs(first["kl"]) < NO_KL
    sample = lines(run / "completions.jsonl")[0]
    assert sample["prompt"].startswith("<|im_start|>system\nYou are a helpful assistant.")
    completions = 48 * 8
    assert first["num_tokens"] > completions * first["completions/mean_length"]
    facts = ModelCard.load(run / "model/README.md").data
    assert (facts.base_model, facts.datasets) == ("Qwen/Qwen2.5-1.5B-Instruct", ["openai/gsm8k"])
