"""What answers the policy between its segments, by the settings: tools and environment, or a program of the user's.

The parts of agents are imported only for a run that has one: they need the web server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from grpo.config.sampling_settings import AnsweringConfig
from grpo.sampling.continuous import ContinuousSampler
from grpo.tools.dialogue import UserResponder
from grpo.tools.dialogue import start_turns as start_user_turns

if TYPE_CHECKING:
    from grpo.agents.episodes import Agent


def start_turns(
    config: AnsweringConfig, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]
) -> UserResponder | Agent | None:
    """Return what answers the policy, or None; see grpo/tools/dialogue.py."""
    if config.agent is None:
        return start_user_turns(config, tokenizer, eos_token_ids)
    from grpo.agents.episodes import Agent

    rows = config.sequences_per_generate
    return Agent(config, tokenizer, eos_token_ids, context=config.longest_sequence, rows=rows)


def continuous_sampler(has_agent: bool) -> type[ContinuousSampler]:
    """Return the kind of the sampler that keeps its rows full."""
    if not has_agent:
        return ContinuousSampler
    from grpo.agents.episodes import AgentSampler

    return AgentSampler
