"""The settings of the objective: rewards, and the loss. grpo/algorithm has the formulas and their papers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo.config.errors import require
from grpo.config.fields import Section, option
from grpo.config.sampling_settings import AnsweringConfig
from grpo.config.user_code import check_file

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
UNUSED_BOUNDS = {
    "cispo": ("epsilon", "delta"),
    "sapo": ("epsilon", "epsilon_high", "delta"),
    "vespo": ("epsilon", "epsilon_high", "delta"),
}  # the bounds of the ratio that a loss type does not use
ADVANTAGE_ESTIMATORS = ("grpo", "rloo", "reinforce++", "reinforce++_baseline", "remax", "opo", "passk")


@dataclass
class LossSection(Section):
    HEADING = "loss"

    loss_type: str = option(
        "grpo",
        "grpo (a mean over sequences of token means), bnpo and dapo (one mean over all tokens), dr_grpo (divides by "
        "max_completion_length), cispo (clips the weights), sapo (a soft gate for the clip), luspo (a mean over "
        "sequences of token sums), vespo (weighs a sequence by a soft function of its probability ratio), or your "
        "function as path/to/file.py:function",
        common=True,
    )
    branch_weighting: Literal["tokens", "branches"] = option(
        "tokens",
        "whether a mean over sequences counts an agent's episode as one, or each of its branches",
        needs="agent",
    )
    importance_sampling_level: Literal["token", "sequence"] = option("token", "ratio of each token, or sequence (GSPO)")
    epsilon: float = option(0.2, "the probability ratio is clipped below at 1 - epsilon", at_least=0, below=1)
    epsilon_high: float | None = option(
        None, "it is clipped above at 1 + epsilon_high (cispo: epsilon_high); unset is epsilon (cispo: 5.0)", at_least=0
    )
    delta: float | None = option(None, "bound above 1 + epsilon_high where the advantage is negative (dual clip)")
    advantage_estimator: str = option(
        "grpo", f"{', '.join(ADVANTAGE_ESTIMATORS)} (docs/recipes.md), or your function as path/to/file.py:function"
    )
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group", "divide advantages by the std of their group, of the batch (grpo alone), or not (grpo and passk)"
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize", "several rewards are added and then compared within the group, or the reverse (GDPO)"
    )
    reward_tolerance: float = option(0.0, "a group whose rewards differ by no more has advantages of 0", at_least=0)
    beta: float = option(0.04, "weight of the KL to the reference; 0 needs no server", at_least=0, common=True)
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = option(
        "k3", "how single tokens estimate the KL; k3+ has the value of k3 and the gradient of k2", needs="beta above 0"
    )
    kl_in_reward: bool = option(False, "subtract beta x KL from a reward, in place of a KL term", needs="beta above 0")
    kl_target: float | None = option(None, "adapt beta to this KL, in nats a token", needs="beta above 0", above=0)
    use_bias_correction_kl: bool = option(False, "multiply the KL by the ratio (DeepSeek-V3.2)", needs="beta above 0")
    distillation_coef: float = option(
        1.0,
        "weight of the teacher: its log-prob of a token, less the policy's, is added to the token's advantage; with "
        "distillation_loss the weight of that",
        needs="teacher_servers",
        above=0,
    )
    distillation_loss: Literal["reverse_kl", "forward_kl", "jsd"] | None = option(
        None,
        "instead of the advantage, a divergence of policy and teacher over the teacher's likeliest tokens and the rest",
        needs="teacher_servers",
    )
    distillation_top_k: int = option(
        64, "how many of the likeliest tokens that compares", needs="distillation_loss", above=0, at_most=256
    )
    entropy_coef: float = option(0.0, "weight of a bonus for entropy; if adaptive, its first value", at_least=0)
    use_adaptive_entropy: bool = option(False, "adapt entropy_coef, and use it where entropy is at most entropy_target")
    entropy_coef_min: float = option(0.0, "lower bound of entropy_coef", needs="use_adaptive_entropy", at_least=0)
    entropy_coef_max: float = option(1.0, "upper bound of entropy_coef", needs="use_adaptive_entropy", at_least=0)
    entropy_coef_delta: float = option(0.005, "entropy_coef's change a step", needs="use_adaptive_entropy", at_least=0)
    entropy_target: float = option(0.2, "mean entropy to reach, in nats", needs="use_adaptive_entropy", at_least=0)
    router_aux_loss_coef: float = option(0.0, "weight of the loss that balances a mixture's experts", at_least=0)
    top_entropy_quantile: float = option(1.0, "share of tokens, by entropy, in the policy term", above=0, at_most=1)
    mask_truncated_completions: bool = option(False, "leave truncated completions out of the loss and its divisor")
    importance_sampling_mode: (
        Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = option(
        None,
        "weigh the loss by the ratio of policy and sampler, truncated or masked beyond the bounds. Unset is "
        "token_truncate with sampler pool, else none, or the value of the run to continue",
    )
    importance_sampling_clip_max: float | None = option(
        3.0, "upper bound of the ratio of policy and sampler", needs="importance_sampling_mode", above=0
    )
    importance_sampling_clip_min: float | None = option(
        None, "lower bound of the ratio of policy and sampler", needs="importance_sampling_mode", at_least=0
    )
    off_policy_mask_threshold: float | None = option(
        None, "drop sequences of negative advantage that the policy moved further from, in nats a token", above=0
    )

    @property
    def upper_clip(self) -> float:
        default = 5.0 if self.loss_type == "cispo" else self.epsilon
        return default if self.epsilon_high is None else self.epsilon_high

    @property
    def teacher_top_k(self) -> int:
        """how many of the likeliest tokens a teacher is asked for"""
        return 0 if self.distillation_loss is None else self.distillation_top_k

    @property
    def groups_have_signal(self) -> bool:
        """Tell whether a group's own rewards decide if it has signal. A function of the user's may look at more."""
        return self.advantage_estimator != "reinforce++" and ":" not in self.advantage_estimator

    @property
    def divided_by_group(self) -> bool:
        return self.scale_rewards == "group" and self.advantage_estimator in ("grpo", "passk")

    @property
    def has_entropy_bonus(self) -> bool:
        """Tell whether the loss has a bonus for entropy, now or in a later step."""
        return self.use_adaptive_entropy or self.entropy_coef > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_loss_type()
        self._check_estimator()
        bound = 1 + self.upper_clip
        self.check(self.delta is None or self.delta > bound, delta=f"the clip is tighter: use a number above {bound:g}")
        self.check(self.entropy_coef_min <= self.entropy_coef_max, entropy_coef_min="it is above entropy_coef_max")
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if None not in (low, high) and low > high:
            self.refuse("importance_sampling_clip_min", "it is above importance_sampling_clip_max")
        if self.kl_in_reward and self.multi_objective_aggregation == "normalize_then_sum":
            self.refuse("kl_in_reward", "it needs multi_objective_aggregation sum_then_normalize")
        if self.kl_in_reward and self.use_bias_correction_kl:
            self.refuse("use_bias_correction_kl", "it is for the loss's KL term, which kl_in_reward removes: use one")

    def _check_loss_type(self) -> None:
        loss_type, mode = self.loss_type, self.importance_sampling_mode or "none"
        if loss_type not in LOSS_TYPES and ":" not in loss_type:
            self.refuse("loss_type", f"use {', '.join(LOSS_TYPES)}, or your function as path/to/file.py:function")
        for name in UNUSED_BOUNDS.get(loss_type, ()):
            is_default = getattr(self, name) == getattr(LossSection, name)
            self.check(is_default, **{name: f"loss_type {loss_type} has no such clip: leave it out"})
        level = {"luspo": "sequence", "vespo": "token"}.get(loss_type, self.importance_sampling_level)
        self.check(self.importance_sampling_level == level, importance_sampling_level=f"{loss_type} needs {level}")
        if loss_type == "vespo" and getattr(self, "teacher_servers", None) and self.distillation_loss is None:
            self.refuse(
                "loss_type", "vespo has one weight for a sequence, and a teacher one for each token: use another"
            )
        if loss_type == "vespo" and mode.startswith("sequence"):
            self.refuse("importance_sampling_mode", "vespo weighs sequences itself: use token_truncate or token_mask")

    def _check_estimator(self) -> None:
        estimator = self.advantage_estimator
        if estimator not in ADVANTAGE_ESTIMATORS and ":" not in estimator:
            names = ", ".join(ADVANTAGE_ESTIMATORS)
            self.refuse("advantage_estimator", f"use {names}, or your function as path/to/file.py:function")
        if estimator != "grpo" and self.scale_rewards == "batch":
            self.refuse("scale_rewards", f"{estimator} does not divide by the batch's std: leave this out")
        if estimator.startswith("reinforce++") and self.scale_rewards != "group":
            self.refuse("scale_rewards", f"{estimator} always divides by the std over the round: leave this out")
        if estimator != "grpo" and self.multi_objective_aggregation != "sum_then_normalize":
            self.refuse("multi_objective_aggregation", f"{estimator} compares sums of rewards: use sum_then_normalize")
        if self.multi_objective_aggregation == "normalize_then_sum" and self.scale_rewards != "group":
            self.refuse("scale_rewards", "normalize_then_sum divides by stds of group and round: leave this out")
        if not self.groups_have_signal and self.reward_tolerance > 0:
            self.refuse("reward_tolerance", f"{estimator} may learn from a group of equal rewards: use 0")


JUDGE = "judge:"  # before the file of a judge, among reward functions


def is_users_own(name: str) -> bool:
    """Tell whether a reward is the user's code, model or server, not a function of reward.py."""
    return ":" in name or "/" in name


@dataclass
class RewardSection(Section):
    HEADING = "rewards"

    reward_funcs: list[str] | None = option(
        None,
        "functions of reward.py, path/to/file.py:function, reward models (org/model on the hub, ./folder), URLs of "
        "servers with --task reward, or judge:RUBRIC.yaml (docs/judges.md); may be empty with a teacher, or "
        "where an environment gives rewards; unset: "
        "correctness_reward and format_reward, with an agent none",
        common=True,
        may_be_empty=True,
    )
    reward_weights: list[float] | None = option(None, "weight of each, by default 1", common=True, may_be_empty=True)
    soft_punish_cache: int = option(0, "last tokens before the maximum, punished from 0 to -1 (DAPO)", at_least=0)
    reward_timeout: float | None = option(
        None, "seconds for a completion's reward: functions run in processes, killed if they hang", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_funcs is None:
            self.reward_funcs = [] if getattr(self, "agent", None) else ["correctness_reward", "format_reward"]
        for name in self.reward_funcs:
            if name.startswith(JUDGE):
                is_there = Path(name.removeprefix(JUDGE)).is_file()
                require(is_there, "reward_funcs", name, "no such file: write a rubric, as docs/judges.md shows")
            elif ":" in name and "://" not in name:
                check_file("reward_funcs", name)
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
        self.check(self.temperature > 0, temperature="training and evaluation draw samples: use a number above 0")
        givers = self.environment, self.agent, getattr(self, "teacher_servers", None)
        remedy = "name a reward function, an environment or agent that gives rewards, or a teacher"
        self.check(bool(self.reward_funcs) or any(givers), reward_funcs=remedy)
        longest = self.max_completion_length
        punishes_agent = self.agent is not None and self.soft_punish_cache > 0
        self.check(not punishes_agent, soft_punish_cache="an agent's episode has no largest length: leave it out")
        self.check(self.soft_punish_cache <= longest, soft_punish_cache=f"use max_completion_length={longest} or less")
