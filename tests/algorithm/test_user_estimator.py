"""An advantage estimator of the user's own: a copy of a built-in one equals it; what cannot be used is refused."""

import math
import re
from pathlib import Path

import pytest
import torch
from careless import unchanged
from conftest import REPOSITORY

from grpo.algorithm.advantages import advantages
from grpo.algorithm.estimators import try_estimator
from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.loss_settings import LossSection
from grpo.config.trainer import TrainerConfig
from grpo.run.preflight import describe_inputs


def documented(folder: Path) -> str:
    """Write the example of docs/recipes.md to a file; return its name as an estimator."""
    (example,) = re.findall(r"```python\n(# compare.py.*?)```", (REPOSITORY / "docs/recipes.md").read_text(), re.DOTALL)
    (folder / "compare.py").write_text(example)
    return f"{folder}/compare.py:{re.search(r'def (.*?)[(]', example)[1]}"


def test_a_copy_of_rloo_is_rloo(tmp_path):
    (tmp_path / "copy.py").write_text(
        "from careless import change_modes\n\n"
        "def rloo(rewards):\n    n = rewards.shape[1]\n    change_modes()\n"
        "    return rewards - (rewards.sum(dim=1, keepdim=True) - rewards) / (n - 1)\n"
    )
    by_function, weights = torch.randn(2, 6, 5, dtype=torch.float64), torch.tensor([1.0, 0.5], dtype=torch.float64)
    penalty = torch.rand(6, 5, dtype=torch.float64)
    built_in = advantages(by_function, weights, LossSection(advantage_estimator="rloo"), penalty)
    with unchanged():
        copied = advantages(by_function, weights, LossSection(advantage_estimator=f"{tmp_path}/copy.py:rloo"), penalty)
    torch.testing.assert_close(copied, built_in)


def test_the_documented_one_works_and_a_completion_without_a_reward_has_no_advantage(tmp_path):
    name = documented(tmp_path)
    try_estimator(name, 4)
    rewards = torch.tensor([[[0.0, 1.0, 2.0, 5.0], [1.0, math.nan, 2.0, 3.0]]], dtype=torch.float64)
    result = advantages(rewards, torch.ones(1, dtype=torch.float64), LossSection(advantage_estimator=name))
    assert result.dtype == torch.float64 and result.isfinite().all()
    assert result[1, 1] == 0 and result[0].tolist() == [-1.0, 0.0, 1.0, 4.0]


# What a file has, and how it is refused.
REFUSED = [
    ("def other(rewards): ...", "has no such function: define it there"),
    ("compare = 1", "has no such function: define it there"),
    ("def compare(rewards", r"cannot be imported \(SyntaxError"),
    ("import no_such_library", r"cannot be imported \(ModuleNotFoundError"),
    ("def compare(rewards, settings): ...", r"failed on the rewards of three groups \(TypeError"),
    ("def compare(rewards): ...", r"of shape \(3, 4\) it returned None: return a tensor of that shape"),
    ("def compare(rewards): return rewards.mean(dim=1)", r"it returned a tensor of shape \(3,\): return a tensor"),
    (
        "def compare(rewards): return (rewards - rewards.mean(1, True)) / rewards.std(1, keepdim=True)",
        "it made the advantages .*nan.*: return finite numbers, also for a group whose rewards are equal",
    ),
]


def test_what_cannot_be_used_is_refused_before_the_run(tmp_path):
    for place, (text, reason) in enumerate(REFUSED):
        file = tmp_path / f"compare{place}.py"
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"^advantage_estimator='{file}:compare': .*{reason}"):
            try_estimator(f"{file}:compare", 4)
    missing = tmp_path / "nowhere.py"
    with pytest.raises(ConfigError, match=f"^advantage_estimator='{missing}:compare': {missing} is not a Python file"):
        try_estimator(f"{missing}:compare", 4)


def test_its_file_must_be_the_same_on_every_machine(tmp_path):
    name = documented(tmp_path)
    config = parse_arguments(TrainerConfig, "", ["--advantage_estimator", name])
    first = describe_inputs(config, {}, {}, [[], []])
    (tmp_path / "compare.py").write_text("changed = True\n")
    second = describe_inputs(config, {}, {}, [[], []])
    assert {key for key in first if first[key] != second[key]} == {f"the fingerprint of the file of {name}"}
