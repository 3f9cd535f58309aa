"""A worker's own tools and environment: they must be like the run's, which one sentence says."""

from dataclasses import replace

import pytest
from stored import run_info

from grpo.config.errors import ConfigError
from grpo.config.programs import WorkerConfig
from grpo.pool.protocol import RunInfo
from grpo.wire.tool_outcomes import SETTINGS, RunTools
from grpo.workers.engine import check_found, check_given

PLAIN = run_info()
DEFAULTS = dict(zip(SETTINGS, (None, None, 2048, "auto", None), strict=True))


def run(names: list[str], environment: str | None = None, rewards=()) -> RunInfo:
    return replace(PLAIN, turns=RunTools.of([*map(schema, names)], environment, rewards, **DEFAULTS))


def schema(name: str, text: str = "Do it.") -> dict:
    return {"type": "function", "function": {"name": name, "description": text}}


@pytest.fixture
def worker(tmp_path):
    """`worker(**settings)`: its configuration; {file} in a setting is a file that is there."""
    file = tmp_path / "own.py"
    file.write_text("")

    def make(tools=(), environment=None, **settings):
        named = {"tools": [name.format(file=file) for name in tools]}
        named |= {"environment": environment and environment.format(file=file)}
        return WorkerConfig(pool="http://box:1", **named, **settings)

    return make


@pytest.mark.parametrize(
    ("served", "settings"),
    [
        (PLAIN, {}),
        (run(["add"]), {"tools": ["{file}:add"]}),
        (run(["add", "guess"], "a.py:Guess"), {"environment": "{file}:Guess"}),  # the tools are compared later
    ],
)
def test_a_worker_with_what_the_run_has_is_taken(worker, served, settings):
    check_given(worker(**settings), served)


@pytest.mark.parametrize(
    ("served", "settings", "says"),
    [
        (PLAIN, {"tools": ["{file}:add"]}, r"^tools=\['.*own.py:add'\]: run runs/a has none: name the files of"),
        (PLAIN, {"environment": "{file}:Guess"}, r"^environment='.*': that of run runs/a is None: leave it out$"),
        (run(["add", "mul"]), {}, r"^tools=\[\]: run runs/a has add, mul: name the files of its tools, as the"),
        (run([], "a.py:Guess"), {}, r"^environment=None: that of run runs/a is Guess: name its file, .*:Guess, as the"),
        (run([], "a.py:Guess"), {"environment": "{file}:Other"}, r"^environment='.*:Other': that of run runs/a is G"),
    ],
)
def test_a_worker_without_what_the_run_has_is_refused_before_anything_is_fetched(worker, served, settings, says):
    with pytest.raises(ConfigError, match=says):
        check_given(worker(**settings), served)


@pytest.mark.parametrize(
    "found",
    [
        RunTools.of([schema("mul")], None, [], **DEFAULTS),
        RunTools.of([schema("add", "Do that.")], None, [], **DEFAULTS),
        RunTools.of([schema("add")], None, ["Guess"], **DEFAULTS),
    ],
)
def test_functions_that_the_model_was_told_otherwise_of_are_refused(worker, found):
    config, served = worker(tools=["{file}:add"]), run(["add"])
    check_found(config, served, served.turns)
    with pytest.raises(ConfigError, match=r"^tools=\['.*'\]: .* in run runs/a .*: take the files that the trainer has"):
        check_found(config, served, found)


def test_a_time_limit_needs_something_that_it_limits(worker):
    with pytest.raises(ConfigError, match="^tool_timeout=5.0: it does nothing without tools or environment"):
        worker(tool_timeout=5.0)
    assert worker(tools=["{file}:add"], tool_timeout=5.0).tool_timeout == 5.0
