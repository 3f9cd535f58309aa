"""Multiply-adds of scoring groups with a Qwen2-shaped model: the work that is needed, whatever the clock says."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from benchmarks.common import Group


@dataclass(frozen=True)
class Work:
    """What goes through the parts of the model."""

    rows: int
    """tokens through the linear layers"""
    pairs: int
    """query-key pairs of causal attention, of one head of one layer"""
    head_rows: int
    """tokens through the head"""

    def multiply_adds(self, config: PretrainedConfig) -> dict[str, int]:
        hidden, layers = config.hidden_size, config.num_hidden_layers
        head_size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        queries, keys = config.num_attention_heads * head_size, config.num_key_value_heads * head_size
        layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * config.intermediate_size
        return {
            "linear": self.rows * layer * layers,
            "attention": 2 * self.pairs * queries * layers,  # scores, then their weighted sum of values
            "head": self.head_rows * hidden * config.vocab_size,
        }


def prompt_once(groups: list[Group]) -> Work:
    """Every prompt once, every completion once without its last token, the head on what predicts a completion token."""
    fed = [(len(prompt), [len(one) - 1 for one in group]) for prompt, group in groups]
    return Work(
        rows=sum(prompt + sum(group) for prompt, group in fed),
        pairs=sum(_triangle(prompt) + sum(prompt * own + _triangle(own) for own in group) for prompt, group in fed),
        head_rows=completion_tokens(groups),
    )


def each_alone(groups: list[Group]) -> Work:
    """Every sequence with a prompt of its own, no padding, the rest as `prompt_once`."""
    lengths = [len(prompt) + len(one) - 1 for prompt, group in groups for one in group]
    return Work(rows=sum(lengths), pairs=sum(map(_triangle, lengths)), head_rows=completion_tokens(groups))


def padded(groups: list[Group]) -> Work:
    """Every group padded to its longest sequence, the head on all of it."""
    shapes = [(len(group), len(prompt) + max(map(len, group))) for prompt, group in groups]
    rows = sum(count * length for count, length in shapes)
    return Work(rows=rows, pairs=sum(count * _triangle(length) for count, length in shapes), head_rows=rows)


def completion_tokens(groups: list[Group]) -> int:
    return sum(len(one) for _, group in groups for one in group)


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
