"""What starts.jsonl says of a start."""

import json
import socket
import subprocess
import sys
from importlib.metadata import version

import torch

from grpo.run.recorder import commit_of, describe_start, record_start


def test_a_start_is_a_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["grpo_ref_split.py", "--local_rank=0", "--system_prompt", "two words"])
    for step in (0, 7):
        record_start(tmp_path, describe_start(step, torch.device("cpu")))
    first, second = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert (first["step"], second["step"]) == (0, 7)
    assert first["command"] == "grpo_ref_split.py --system_prompt 'two words'"
    assert (first["ranks"], first["hosts"]) == (1, {socket.gethostname(): ["cpu"]})
    versions = {name: version(name) for name in ("torch", "transformers", "deepspeed")}
    assert first["versions"].items() >= (versions | {"python": sys.version.split()[0]}).items()


def test_the_commit_says_whether_a_file_is_changed(tmp_path):
    def git(*words: str) -> str:
        options = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        told = subprocess.run(["git", *options, "-C", tmp_path, *words], check=True, capture_output=True, text=True)
        return told.stdout.strip()

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
