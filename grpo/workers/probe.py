"""The proof that an engine has a version of the policy: it gives a sequence the log-probs that the trainer gave it.

An engine may answer that it has new weights and have the old ones, or some of them.
"""

from __future__ import annotations

from grpo.wire.rollouts import Version
from grpo.workers.engine import Engine, EngineError

_MOST = {"F32": 1e-3}
_MOST_IN_16_BITS = 0.15
"""nats a token. Two programs that compute in bfloat16 differ by 0.04 on average; weights of another version by 0.6."""


def prove(engine: Engine, version: Version, dtype: str) -> float:
    """Return the mean difference of log-probs, in nats a token. Raises EngineError where it is too large, or NaN.

    `dtype` is that of the weights as their file names it: F32.
    """
    logprobs, expected = engine.logprobs(version.probe), version.probe.logprobs
    if len(logprobs) != len(expected):
        raise EngineError(f"version {version.version}: {len(logprobs)} log-probs for {len(expected)} tokens")
    difference = sum(abs(mine - theirs) for mine, theirs in zip(logprobs, expected, strict=True)) / len(expected)
    most = _MOST.get(dtype, _MOST_IN_16_BITS)
    if not difference <= most:
        raise EngineError(
            f"version {version.version}: the engine's log-probs are {difference:.2g} nats a token from the trainer's, "
            f"and {most:g} are the most: it does not have these weights"
        )
    return difference
