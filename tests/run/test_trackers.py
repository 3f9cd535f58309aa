"""What the services get that a run reports to: modules with the clients' interfaces write down their calls."""

import importlib.util
import json
import sys
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.run.recorder import SERVICES, Recorder, check_report_to, open_trackers


def test_a_service_must_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in SERVICES:
        with pytest.raises(ConfigError, match=f"report_to='{name}': it is not installed: 'pip install {name}'"):
            check_report_to(TrainerConfig(report_to=[name]))


@pytest.fixture
def client(monkeypatch):
    """`client(name)`: a module of that name in the place of a service's client."""

    def make(name: str) -> ModuleType:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def table(columns, data, allow_mixed_types=False):
    """A table as wandb's, which has typed columns: dicts of other keys are of another type."""
    for column in zip(*data, strict=True):
        kinds = {tuple(value) if isinstance(value, dict) else type(value) for value in column if value is not None}
        if len(kinds) > 1 and not allow_mixed_types:
            raise TypeError("Data row contained incompatible types")
    return [columns, data]


def record(config: TrainerConfig, folder) -> None:
    """Begin a run, resume it after step 1, and begin it again; record the same each time."""
    check_report_to(config)
    sample = {"prompt": "2+2?", "completion": "4", "reward": 1.0}
    for after in (-1, 1, -1):
        recorder = Recorder(config, folder, after=after)
        recorder.completions(51, "train", [sample | {"note": {"a": 1}}, sample | {"note": "n"}])
        recorder.completions(52, "train", [sample])
        recorder.completions(52, "eval", [sample | {"correct": True}])
        recorder.metrics(52, {"reward": 0.5, "eval_pass@8": 0.25})
        recorder.close()


@pytest.mark.parametrize("name", ["wandb", "trackio", "swanlab"])
def test_a_run_that_goes_on_continues_under_its_id(client, name, tmp_path, monkeypatch):
    calls, opened = [], []

    def init(config, **settings):
        opened.append(settings)
        return SimpleNamespace(
            log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
        )

    module = client(name)
    module.init = init
    module.Table, module.Text = table, lambda text, caption: [text, caption]
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    record(TrainerConfig(report_to=[name]), tmp_path)
    assert all(settings["project"] == "mine" and settings["resume"] == "allow" for settings in opened)
    assert all(settings["name"].startswith(tmp_path.name) for settings in opened)
    ids = [settings.get("id", settings["name"]) for settings in opened]
    assert ids[0] == ids[1] != ids[2]  # the third begins the run again
    columns, row = ["prompt", "completion", "reward"], ["2+2?", "4", 1.0]
    train, held_out = [[*columns, "note"], [[*row, {"a": 1}], [*row, "n"]]], [[*columns, "correct"], [[*row, True]]]
    if name == "swanlab":
        train, held_out = [["2+2?\n\n4", "reward 1.0"]] * 2, [["2+2?\n\n4", "reward 1.0, correct True"]]
    metrics = {"reward": 0.5, "eval_pass@8": 0.25}
    expected = [(51, {"completions/train": train}), (52, {"completions/eval": held_out}), (52, metrics), "finish"]
    assert calls == 3 * expected


def test_a_line_is_completed_and_no_other(tmp_path):
    recorder = Recorder(TrainerConfig(report_to=["none"]), tmp_path, after=-1)
    recorder.complete(1, {"eval_reward": 0.25})
    recorder.metrics(2, {"reward": 0.5})
    for value in (0.123456789, 1.0):
        recorder.complete(2, {"eval_reward": value})
    recorder.complete(3, {"eval_reward": 2.0})
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "eval_reward": 0.25},
        {"step": 2, "reward": 0.5, "eval_reward": 1.0},
        {"step": 3, "eval_reward": 2.0},
    ]


@pytest.fixture
def mlflow(client):
    """A stand-in for MLflow: `calls` has its calls, `runs` the tags of its runs by number."""
    module, calls, runs = client("mlflow"), [], []

    class MlflowException(Exception):
        pass

    def search_runs(filter_string, output_format):
        assert output_format == "list"
        filters = [f"tags.grpo_run_id = '{tags['grpo_run_id']}'" for tags in runs]
        found = [place for place, text in enumerate(filters) if text == filter_string]
        return [SimpleNamespace(info=SimpleNamespace(run_id=place)) for place in found]

    def start_run(run_id, run_name, tags):
        if run_id is None:
            run_id = len(runs)
            runs.append(tags)
        calls.append(("run", run_id, run_name))

    module.calls, module.MlflowException = calls, MlflowException
    module.get_tracking_uri = lambda: "http://tracker"
    module.set_experiment = lambda name: calls.append(("experiment", name))
    module.search_runs, module.start_run = search_runs, start_run
    module.log_params = lambda params: calls.append(("params", params))
    module.log_metrics = lambda values, step, synchronous: calls.append(("metrics", step, values, synchronous))
    tables: list[tuple[int, str]] = []  # each one's run and file

    def log_table(data, artifact_file):
        calls.append(("table", artifact_file, data))
        run = [call[1] for call in calls if call[0] == "run"][-1]
        tables.append((run, artifact_file))

    def list_artifacts(run_id, path):
        return [SimpleNamespace(path=file) for run, file in tables if run == run_id and file.startswith(f"{path}/")]

    module.tables, module.log_table = tables, log_table
    module.MlflowClient = lambda: SimpleNamespace(list_artifacts=list_artifacts)
    module.end_run = lambda: calls.append(("end",))
    return module


def refuse(error: Exception):
    def call(*_, **__):
        raise error

    return call


def test_mlflow_continues_the_run_that_has_the_id_as_its_tag(mlflow, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    config = TrainerConfig(report_to=["mlflow"])
    record(config, tmp_path)
    name = tmp_path.name
    assert [call for call in mlflow.calls if call[0] == "run"] == [("run", number, name) for number in (0, 0, 1)]
    assert [call for call in mlflow.calls if call[0] == "params"] == [("params", asdict(config))] * 2
    files = [f"completions/{name}.json" for name in ("train-000051", "eval-000052")]
    assert mlflow.tables == [(run, file) for run in (0, 1) for file in files]  # one that is there would be appended to
    columns = {"prompt": ["2+2?"], "completion": ["4"], "reward": [1.0]}
    train = {name: values * 2 for name, values in columns.items()} | {"note": [{"a": 1}, "n"]}
    assert mlflow.calls[0] == ("experiment", "mine")
    assert mlflow.calls[3:7] == [
        ("table", "completions/train-000051.json", train),
        ("table", "completions/eval-000052.json", columns | {"correct": [True]}),
        ("metrics", 52, {"reward": 0.5, "eval_pass_8": 0.25}, False),
        ("end",),
    ]


def test_a_run_outlives_its_mlflow_server(mlflow, tmp_path, caplog):
    recorder = Recorder(TrainerConfig(report_to=["mlflow"]), tmp_path, after=-1)
    mlflow.log_table, mlflow.end_run = refuse(mlflow.MlflowException("no answer")), refuse(ConnectionError("no answer"))
    recorder.completions(1, "train", [{"prompt": "2+2?"}])
    recorder.close()
    assert caplog.messages == ["MLflow: no answer"] * 2
    assert "2+2?" in (tmp_path / "completions.jsonl").read_text()


def test_an_mlflow_store_that_cannot_be_used_is_refused(mlflow, tmp_path):
    mlflow.set_experiment = refuse(mlflow.MlflowException("no such\nserver"))
    with pytest.raises(ConfigError, match=r"report_to='mlflow': http://tracker cannot be used \(no such server\)"):
        open_trackers(TrainerConfig(report_to=["mlflow"]), tmp_path, after=-1)
