"""What the services get that a run reports to. A file with the client's interface writes down its calls."""

import importlib.util
import json
import sys

import pytest

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.run.recorder import Recorder
from grpo.run.trackers import SERVICES, check_report_to

CLIENT = """
import json

def note(*call):
    with open({calls!r}, "a") as file:
        file.write(json.dumps(call) + "\\n")

class Table:
    def __init__(self, columns, data):
        self.content = [columns, data]

class Text:
    def __init__(self, text, caption):
        self.content = [text, caption]

def content(value):
    return [content(item) for item in value] if isinstance(value, list) else getattr(value, "content", value)

class Run:
    def log(self, values, step):
        note("log", step, {{name: content(value) for name, value in values.items()}})
    def finish(self):
        note("finish")

def init(config, **settings):
    note("init", settings)
    return Run()
"""


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_must_be_installed(name):
    if importlib.util.find_spec(name) is None:
        with pytest.raises(ConfigError, match=f"report_to='{name}': it is not installed: 'pip install {name}'"):
            check_report_to(TrainerConfig(report_to=[name]))


@pytest.mark.parametrize("name", SERVICES)
def test_a_run_that_goes_on_continues_under_its_id(name, tmp_path, monkeypatch):
    calls, run = tmp_path / "calls.jsonl", tmp_path / "run"
    run.mkdir()
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / f"{name}.py").write_text(CLIENT.format(calls=str(calls)))
    monkeypatch.syspath_prepend(tmp_path / "client")
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
