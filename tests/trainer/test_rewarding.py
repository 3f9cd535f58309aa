"""A run's rewards: of functions, of an environment, and the punishment for length."""

import math

import numpy as np
import pytest
from told import sampled

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example, Outcome, Rollout
from grpo.rewards.functions import TrainerState
from grpo.trainer.rewarding import Rewarder, join_rewards


class Game:
    is_verdict = True
    full_reward = 3.0

    def weight(self, item: str): ...


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def config(*functions: str, **settings) -> TrainerConfig:
    changed = TrainerConfig(**settings)
    changed.reward_funcs, changed.reward_weights = [*functions], [0.5] * len(functions)
    return changed


def rollout(text: str, answers: int = 0, **rewards: float) -> Rollout:
    """A completion of two tokens, with those of answers between them."""
    outcome = Outcome(finished=True, messages=[{"role": "assistant", "content": text}], rewards=rewards)
    return sampled([1] * (answers + 2), text, drawn=[True, *[False] * answers, True], outcome=outcome)


ROLLOUTS = [
    rollout("abc", Game=3.0),
    rollout("de"),
    sampled([1, 2], "f"),
    rollout("g", Game=-1.0),
]


def compute(rewarder: Rewarder, rollouts=tuple(ROLLOUTS)) -> list[list[float]]:
    return rewarder.compute(
        [Example(index=0, prompt="p", prompt_ids=[1], columns={})] * len(rollouts), rollouts, TrainerState()
    ).tolist()


def test_an_environments_reward_follows_those_of_the_functions():
    functions = {"length": length}
    rewarder = Rewarder(join_rewards(functions, {"Game": Game}), functions, config("length"))
    assert (rewarder.names, rewarder.weights.tolist()) == (["length", "Game"], [0.5, 1.0])
    by_function = compute(rewarder)
    np.testing.assert_array_equal(by_function, [[3, 2, 1, 1], [3, math.nan, math.nan, -1]])
    assert rewarder.is_correct(np.array(by_function)).tolist() == [True, False, False, False]
    assert rewarder.has_format(np.array(by_function)).tolist() == [True, False, False, False]


def test_an_environment_alone_is_enough_and_the_punishment_counts_its_answers_too():
    settings = config(max_completion_length=10, soft_punish_cache=4)
    rewarder = Rewarder({"Game": Game}, {}, settings)
    assert (rewarder.names, rewarder.weights.tolist()) == (["Game", "soft_overlong_punishment"], [1.0, 1.0])
    assert rewarder.signal_weights.tolist() == [1.0, 0.0]  # DAPO's dynamic sampling looks at correctness
    rollouts = [rollout("a", answers, Game=1.0) for answers in (0, 4, 6, 8)]
    assert compute(rewarder, rollouts) == [[1.0] * 4, [0.0, 0.0, -0.5, -1.0]]
    # Where nothing else applies, it is no reward either.
    np.testing.assert_array_equal(compute(rewarder, [*rollouts[2:], rollout("a", 6)])[1], [-0.5, -1.0, math.nan])


def test_a_function_and_an_environment_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="^reward_funcs='Game': environment or agent gives a reward of this name too"):
        join_rewards({"Game": length}, {"Game": Game})
