"""The adaptive coefficient of the entropy bonus: Skywork-OR1, He et al. 2025, arXiv:2505.22312."""

from __future__ import annotations

from grpo.config.loss import LossSection


def applied_entropy_coef(entropy_coef: float, last_entropy: float | None, settings: LossSection) -> float:
    """Return the coefficient of the entropy bonus in a step.

    An adaptive one acts only where the last step's entropy was at or below the target; before the first step that
    entropy is None.
    """
    if not settings.use_adaptive_entropy:
        return entropy_coef
    return entropy_coef if last_entropy is not None and last_entropy <= settings.entropy_target else 0.0


def adapt_entropy_coef(entropy_coef: float, entropy: float, settings: LossSection) -> float:
    """Return the coefficient for the next step: a delta more where the entropy was at or below the target, else a
    delta less, up to the bounds."""
    if entropy <= settings.entropy_target:
        return min(entropy_coef + settings.entropy_coef_delta, settings.entropy_coef_max)
    return max(entropy_coef - settings.entropy_coef_delta, settings.entropy_coef_min)
