"""An advantage estimator of the user's own, `advantage_estimator: path/to/file.py:function`: found, tried, checked."""

from __future__ import annotations

import functools

import torch

from grpo.algorithm.estimators import ESTIMATORS, Estimator, Outcomes
from grpo.config.errors import ConfigError
from grpo.config.loss import LossSection
from grpo.config.user_code import modes_kept
from grpo.config.user_files import load_function


@functools.cache  # reward functions may change the directory that a path begins in
def find_estimator(name: str) -> Estimator:
    """Return a built-in estimator other than grpo, or the user's function with a check around it.

    Raises ConfigError where there is no such file or function, or the file cannot be imported.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    function = load_function("advantage_estimator", name)

    def checked(outcomes: Outcomes, settings: LossSection) -> torch.Tensor:
        rewards = outcomes.rewards
        with modes_kept():
            result = function(rewards.clone())
        if not isinstance(result, torch.Tensor) or result.shape != rewards.shape:
            raise ConfigError(
                f"advantage_estimator={name!r}: for rewards of shape {tuple(rewards.shape)} it returned "
                f"{_describe(result)}: return a tensor of that shape"
            )
        return result.detach().double()

    return Estimator(checked, None)


def try_estimator(name: str, num_generations: int) -> None:
    """Call an estimator of the user's own on the rewards of three groups, one of equals. Built-in ones are not called.

    Raises ConfigError as find_estimator, and where the function fails or returns something else than it must.
    """
    if ":" not in name:
        return
    estimator = find_estimator(name)
    rewards = torch.arange(3 * num_generations, dtype=torch.float64).view(3, num_generations)
    rewards[1] = 1.0
    try:
        advantages = estimator.advantages(Outcomes(rewards), LossSection(advantage_estimator=name))
    except ConfigError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(
            f"advantage_estimator={name!r}: it failed on the rewards of three groups ({error!r}): correct it"
        ) from error
    if not advantages.isfinite().all():
        raise ConfigError(
            f"advantage_estimator={name!r}: of the rewards {rewards.tolist()} it made the advantages "
            f"{advantages.tolist()}: return finite numbers, also for a group whose rewards are equal"
        )


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
