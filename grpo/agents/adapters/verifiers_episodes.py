"""Plays episodes of an environment of the package verifiers, as a program that a run trains.

    grpo launch --environment verifiers:PACKAGE        its tasks are the dataset
    grpo launch --environment verifiers:FILE.toml      PACKAGE's settings, as `vf-eval @ FILE.toml` takes them
    PYTHON verifiers_episodes.py NAME                  prints the tasks: a line of JSON each

It stands alone, as the interpreter is that of verifiers, and may be another than the run's (agent_python). Checked with
verifiers 0.4.0, whose environments are in verifiers.v1.
"""

import itertools
import json
import os
import sys
import tomllib
from pathlib import Path

from verifiers.v1 import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

NAME = "GRPO_VERIFIERS"  # the variable of what stands after "verifiers:"
_KEY = "GRPO_EPISODE_KEY"  # the variable of an episode's key
_SHELL = "bash"  # the harness of verifiers that lets the policy run commands
# An agent of verifiers runs in a paid sandbox, with a shell, unless its settings say otherwise: here in a process of
# this machine, and the policy gets a shell only where FILE.toml says so.
_RUNTIME, _WITHOUT_SHELL = {"type": "subprocess"}, {"id": "null"}
_MOST_TASKS = 10_000  # of a package whose tasks have no end


def open_environment(name):
    """Return the environment of a package, or of a file of settings. Raises ValueError if several agents play in it."""
    path = Path(name).expanduser()
    if path.suffix == ".toml":
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
        settings = settings.get("env", settings)
    else:
        agent = {"runtime": _RUNTIME}
        if default_harness_id(name) == _SHELL:
            agent["harness"] = _WITHOUT_SHELL
        settings = {"taskset": {"id": name}, "agent": agent}
    config = resolve_env_config(settings)
    if len(agents := agent_config_fields(config)) > 1:
        raise ValueError(f"{', '.join(agents)} play in {name}, and a run trains one agent")
    return load_environment(config)


def print_tasks(environment):
    """Print each task as a row of the run's dataset."""
    taskset = environment.taskset
    for task in taskset if taskset.bounded else itertools.islice(taskset, _MOST_TASKS):
        data = task.data.model_dump_json(exclude_none=True)
        print(json.dumps({"prompt": task.data.prompt_text or task.data.name or "", "task": data}))


async def solve(row, client):
    """Play an episode of a row's task; return its reward, that of the agent's trace, and its parts.

    Raises RuntimeError with what verifiers noted where the episode failed."""
    taskset = ENVIRONMENT.taskset
    kind = taskset.task_type()
    task = kind(kind.data_type().model_validate_json(row["task"]), taskset.config.task)
    os.environ[_KEY] = client.api_key
    policy = EvalClientConfig(base_url=str(client.base_url), api_key_var=_KEY)
    async with ENVIRONMENT.serving():
        episode = await ENVIRONMENT.run_episode(task, ModelContext(model="policy", client=policy))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("\n".join(error.traceback or f"{error.type}: {error.message}" for error in errors))
    [trace] = episode.traces
    parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward, "parts": metrics | parts}


if __name__ == "__main__":
    print_tasks(open_environment(sys.argv[1]))
else:
    ENVIRONMENT = open_environment(os.environ[NAME])
