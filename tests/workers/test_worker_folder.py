"""A worker's folder is its own, and none is left behind."""

import pytest
from conftest import run_python

from grpo.config.errors import ConfigError
from grpo.workers.weights_folder import open_folder


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The system's folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_serves_one_worker_at_a_time(tmp_path):
    folder = str(tmp_path / "new/weights")
    with open_folder(folder) as path, pytest.raises(ConfigError, match="another worker uses it: name another folder"):
        (path / "model").mkdir()
        open_folder(folder).__enter__()
    with open_folder(folder) as path:
        assert (path / "model").is_dir()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="^weights_folder='.*/file/weights': Not a directory: name a folder"):
        open_folder(str(tmp_path / "file/weights")).__enter__()


def test_temporary_folders_do_not_meet_and_go_at_the_end(temporary):
    with open_folder(None) as first, open_folder(None) as second:
        (first / "model").mkdir()
        assert first != second and {*temporary.iterdir()} == {first, second}
    assert not [*temporary.iterdir()]


def test_what_a_killed_worker_left_goes_with_the_next_one(temporary):
    script = """
import os
from grpo.workers.weights_folder import open_folder
manager = open_folder(None)
(manager.__enter__() / "model").mkdir()
os.kill(os.getpid(), 9)
"""
    run_python("-c", script, environment={"TMPDIR": str(temporary)})
    (left,) = temporary.iterdir()
    with open_folder(None) as folder:
        assert {*temporary.iterdir()} == {folder} != {left}
