"""Settings that are none any more: a run of an earlier version may have one in its files with the value here, no other.

`config.yaml` and the checkpoints of such a run hold every setting of their time.
"""

from __future__ import annotations

FORMER = {
    "adam_epsilon": 1e-8,
    "kl_horizon": 10_000.0,
    "max_bad_steps": 5,
    "reward_fallback": 0.0,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
"""the only value by name"""
