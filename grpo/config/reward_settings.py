"""Settings of the rewards."""

from __future__ import annotations

from dataclasses import dataclass

from grpo.config.fields import Section, option
from grpo.config.sampling_settings import AnsweringConfig
from grpo.config.user_code import check_file


def is_users_own(name: str) -> bool:
    """Tell whether a reward is the user's code, model or server, not a function of reward.py."""
    return ":" in name or "/" in name


@dataclass
class RewardSection(Section):
    """The settings by which a completion gets its reward."""

    HEADING = "rewards"

    reward_funcs: list[str] = option(
        ["correctness_reward", "format_reward"],
        "functions of reward.py, path/to/file.py:function, reward models (org/model on the hub, ./folder), or URLs of "
        "servers with --task reward; may be empty where an environment gives rewards",
        common=True,
        may_be_empty=True,
    )
    reward_weights: list[float] | None = option(None, "weight of each; unset is 1", common=True, may_be_empty=True)
    soft_punish_cache: int = option(0, "last tokens of a completion, punished from 0 to -1 (DAPO)", at_least=0)
    reward_timeout: float | None = option(
        None, "seconds for a completion's reward: functions then run in processes, killed if they hang", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.reward_funcs:
            path, colon, _ = name.rpartition(":")
            if colon and "://" not in name:
                check_file("reward_funcs", name, path)
        if self.reward_weights is None:
            self.reward_weights = [1.0] * len(self.reward_funcs)
        names = " ".join(self.reward_funcs) or "--reward_funcs, which is empty"
        is_whole = len(self.reward_weights) == len(self.reward_funcs)
        self.check(is_whole, reward_weights=f"give {len(self.reward_funcs)} weights, one for each of {names}")


@dataclass
class RewardedConfig(RewardSection, AnsweringConfig):
    """The settings of answers and their rewards, in training and after it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        has_reward = bool(self.reward_funcs) or self.environment is not None
        self.check(has_reward, reward_funcs="name a reward function, or an environment that gives rewards")
        longest = self.max_completion_length
        self.check(self.soft_punish_cache <= longest, soft_punish_cache=f"use max_completion_length={longest} or less")
