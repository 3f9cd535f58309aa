"""Can these be the completions of a task? What a pool asks of each result before it keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress, groupby

from grpo.wire.errors import ProtocolError
from grpo.wire.rollouts import Drawn, RunInfo, Task
from grpo.wire.turns import Outcome, RunTurns, cut_segments


def check_drawn(drawn: Drawn, run: RunInfo, task: Task) -> None:
    """Raise ProtocolError, 422, where these cannot be completions of this task."""

    def wrong(message: str) -> ProtocolError:
        return ProtocolError(422, "wrong_completions", f"group {drawn.group}: {message}")

    if len(drawn.completions) != run.num_generations:
        raise wrong(f"{len(drawn.completions)} completions: the run has num_generations {run.num_generations}")
    if (drawn.outcomes is None) != (run.turns is None):
        raise wrong("the run has tools or an environment, and it was drawn without" if run.turns else "it has outcomes")
    eos = {*run.eos_token_ids}
    rows = zip(drawn.completions, drawn.masks, drawn.logprobs, drawn.versions, strict=True)
    for row, (ids, mask, logprobs, versions) in enumerate(rows):
        if min(ids) < 0 or max(ids) >= run.vocab_size:
            raise wrong(f"token ids go from {min(ids)} to {max(ids)}: the vocabulary is 0 to {run.vocab_size - 1}")
        if len(ids) > run.max_completion_length:
            raise wrong(f"a completion has {len(ids)} tokens: max_completion_length is {run.max_completion_length}")
        segments = cut_segments(ids, mask)
        if not all(eos.isdisjoint(segment[:-1]) for is_drawn, segment in segments if is_drawn):
            raise wrong("a completion goes on after an eos")
        if not (mask[0] and mask[-1] and all(segment[-1] in eos for is_drawn, segment in segments[:-1] if is_drawn)):
            raise wrong("an answer is not between an eos and what was drawn after it")
        if ids[-1] not in eos and len(ids) < run.max_completion_length:
            raise wrong(f"a completion of {len(ids)} tokens has neither an eos nor max_completion_length tokens")
        if run.turns:
            _check_outcome(drawn.outcomes[row], run.turns, len(segments) // 2 + 1, ids[-1] in eos, wrong)
        if not all(math.isfinite(value) and value <= 0 for value in compress(logprobs, mask)):
            raise wrong("a log-prob is above 0 or not finite")
        if not all(math.isnan(value) for value, is_drawn in zip(logprobs, mask, strict=True) if not is_drawn):
            raise wrong("an answer's token has a log-prob")
        if not run.in_flight_weight_updates:
            if {*versions} != {task.version}:
                raise wrong(f"drawn by version {versions[0]}: the task is of version {task.version}")
        elif versions != sorted(versions) or versions[0] < task.version:
            raise wrong(f"drawn by versions {_spans(versions)}: the task takes {task.version} and later ones, in order")


def _check_outcome(
    outcome: Outcome, turns: RunTurns, segments: int, ends_with_eos: bool, wrong: Callable[[str], ProtocolError]
) -> None:
    """Raise what `wrong` makes of a message where a completion of so many drawn segments cannot have ended so."""
    if outcome.finished and not ends_with_eos:
        raise wrong("a completion without an eos at its end is called finished")
    if turns.max_turns is not None and segments > turns.max_turns:
        raise wrong(f"a completion has {segments} turns: max_turns is {turns.max_turns}")
    if unknown := outcome.rewards.keys() - {*turns.rewards}:
        raise wrong(f"a reward {min(unknown)[:80]!r}, which the run's environment does not give")


def _spans(versions: Sequence[int]) -> str:
    """Return the versions of a completion's tokens as text, each span of equal ones once, of many the first."""
    numbers = [version for version, _ in groupby(versions)]
    return ", ".join(map(str, numbers[:5])) + ", ..." * (len(numbers) > 5)
