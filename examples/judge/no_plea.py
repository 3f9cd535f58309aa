"""A reward to keep beside a judge, which a completion that talks to the judge does not earn."""

import re

from reward import text_of

PLEA = re.compile(r"\b(points?|score|judge|grade|rating|instructions?|10)\b", re.IGNORECASE)


def no_plea_reward(completions, **kwargs) -> list[float]:
    """Return 1.0 for a completion without a word of judging, else 0.0."""
    return [float(not PLEA.search(text_of(completion))) for completion in completions]
