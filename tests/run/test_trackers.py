"""What the services get that a run reports to. A file with the client's interface writes down its calls."""

import importlib.util
import json
import sys
from dataclasses import asdict

import pytest
from tracker_client import write_client

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.run.recorder import Recorder
from grpo.run.trackers import SERVICES, check_report_to, open_trackers


def test_a_service_must_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in SERVICES:
        with pytest.raises(ConfigError, match=f"report_to='{name}': it is not installed: 'pip install {name}'"):
            check_report_to(TrainerConfig(report_to=[name]))


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_a_run_that_goes_on_continues_under_its_id(name, tmp_path, monkeypatch):
    calls, run = tmp_path / "calls.jsonl", tmp_path / "run"
    run.mkdir()
    monkeypatch.syspath_prepend(write_client(tmp_path / "client", name, calls))
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    config = TrainerConfig(report_to=[name])
    check_report_to(config)
    sample = {"prompt": "2+2?", "completion": "4", "reward": 1.0}
    for after in (-1, 1, -1):
        recorder = Recorder(config, run, after=after)
        recorder.completions(51, "train", [sample])
        recorder.completions(52, "train", [sample])
        recorder.completions(52, "eval", [sample | {"correct": True}])
        recorder.metrics(52, {"reward": 0.5})
        recorder.close()
    monkeypatch.delitem(sys.modules, name)

    made = [json.loads(line) for line in calls.read_text().splitlines()]
    opened = [settings for call, settings in (each for each in made if each[0] == "init")]
    assert all(settings["project"] == "mine" and settings["resume"] == "allow" for settings in opened)
    assert all(settings["name"].startswith("run") for settings in opened)
    ids = [settings.get("id", settings["name"]) for settings in opened]
    assert ids[0] == ids[1] != ids[2]  # the third begins the run again
    _, (_, *train), (_, *evaluated), (_, *metrics), finish = made[:5]
    row, right = ["2+2?", "4", 1.0], ["2+2?", "4", 1.0, True]
    tables = [[["prompt", "completion", "reward"], [row]], [["prompt", "completion", "reward", "correct"], [right]]]
    if name == "swanlab":
        tables = [[["2+2?\n\n4", caption]] for caption in ("reward 1.0", "reward 1.0, correct True")]
    assert train == [51, {"completions/train": tables[0]}] and evaluated == [52, {"completions/eval": tables[1]}]
    assert metrics == [52, {"reward": 0.5}] and finish == ["finish"]


MLFLOW = """
import json
from types import SimpleNamespace

class MlflowException(Exception):
    pass

runs = []
lost = False

def note(*call):
    with open({calls!r}, "a") as file:
        file.write(json.dumps(call) + "\\n")

def get_tracking_uri():
    return "http://tracker"

def set_experiment(name):
    if name == "refused":
        raise MlflowException("no such\\nserver")
    note("experiment", name)

def search_runs(filter_string, output_format):
    assert output_format == "list"
    ids = [run for run, tags in runs if filter_string == f"tags.grpo_run_id = '{{tags['grpo_run_id']}}'"]
    return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in ids]

def start_run(run_id, run_name, tags):
    if run_id is None:
        run_id = len(runs)
        runs.append((run_id, tags))
    note("run", run_id, run_name)

def log_params(params):
    note("params", len(params))

def log_metrics(values, step, synchronous):
    note("metrics", step, values, synchronous)

def log_table(data, artifact_file):
    if lost:
        raise MlflowException("no answer")
    note("table", artifact_file, data)

def end_run():
    if lost:
        raise ConnectionError("no answer")
    note("end")
"""


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "mlflow.py").write_text(MLFLOW.format(calls=str(tmp_path / "calls.jsonl")))
    monkeypatch.syspath_prepend(tmp_path / "client")
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    yield importlib.import_module("mlflow")
    monkeypatch.delitem(sys.modules, "mlflow")


def test_mlflow_continues_the_run_that_has_the_id_as_its_tag(mlflow, tmp_path):
    config = TrainerConfig(report_to=["mlflow"])
    check_report_to(config)
    for after in (-1, 1, -1):
        recorder = Recorder(config, tmp_path / "run", after=after)
        recorder.completions(51, "train", [{"prompt": "2+2?", "reward": 1.0}, {"prompt": "1+2?"}])
        recorder.metrics(52, {"eval_pass@8": 0.5, "time/update": 1.0})
        recorder.close()
    made = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [call[1:] for call in made if call[0] == "run"] == [[0, "run"], [0, "run"], [1, "run"]]
    assert [call for call in made if call[0] == "params"] == [["params", len(asdict(config))]] * 2
    assert made[3:6] == [
        ["table", "completions/train-000051.json", {"prompt": ["2+2?", "1+2?"], "reward": [1.0, None]}],
        ["metrics", 52, {"eval_pass_8": 0.5, "time/update": 1.0}, False],
        ["end"],
    ]


def test_a_run_outlives_its_mlflow_server(mlflow, tmp_path, caplog):
    recorder = Recorder(TrainerConfig(report_to=["mlflow"]), tmp_path / "run", after=-1)
    mlflow.lost = True
    recorder.completions(1, "train", [{"prompt": "2+2?"}])
    recorder.close()
    assert caplog.messages == ["MLflow: no answer"] * 2
    assert "2+2?" in (tmp_path / "run" / "completions.jsonl").read_text()


def test_an_mlflow_store_that_cannot_be_used_is_refused(mlflow, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "refused")
    with pytest.raises(ConfigError, match=r"report_to='mlflow': http://tracker cannot be used \(no such server\)"):
        open_trackers(TrainerConfig(report_to=["mlflow"]), tmp_path, after=-1)
