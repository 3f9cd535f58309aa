"""A loss type of the user's own, `loss_type: path/to/file.py:function`: found, and its results checked."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from grpo.algorithm.loss_types import LOSSES, LossFunction, LossInputs, LossTerms
from grpo.config.errors import ConfigError
from grpo.config.loss import LossSection
from grpo.config.user_code import modes_kept
from grpo.config.user_files import load_function


@functools.cache  # reward functions may change the directory that a path begins in
def find_loss(loss_type: str) -> LossFunction:
    """Return the function of a loss type: a built-in one, or the user's with a check around it.

    Raises ConfigError where there is no such file or function, or the file cannot be imported.
    """
    if loss_type in LOSSES:
        return LOSSES[loss_type]
    function = load_function("loss_type", loss_type)

    def checked(inputs: LossInputs, settings: LossSection) -> LossTerms:
        with modes_kept():
            terms = function(inputs, settings)
        if not _are_terms(terms, len(inputs.logprobs)):
            raise ConfigError(
                f"loss_type={loss_type!r}: for {len(inputs.logprobs)} tokens it returned {_describe(terms)}: return "
                "(policy, weights, metrics), two tensors with a value for each token and a dict of one-dimensional "
                "tensors by name"
            )
        if inputs.logprobs.requires_grad and not terms[0].requires_grad:
            raise ConfigError(
                f"loss_type={loss_type!r}: its policy term has no gradient: compute it from inputs.logprobs or "
                "inputs.ratio"
            )
        return terms

    return checked


def _are_terms(terms: Any, count: int) -> bool:
    if not isinstance(terms, tuple) or len(terms) != 3 or not isinstance(terms[2], Mapping):
        return False
    policy, weights, metrics = terms
    tensors = [policy, weights, *metrics.values()]
    return (
        all(isinstance(tensor, torch.Tensor) and tensor.dim() == 1 for tensor in tensors)
        and len(policy) == len(weights) == count
        and all(isinstance(name, str) for name in metrics)
    )


def _describe(value: Any) -> str:
    """Return the shapes of what a function returned, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_describe(inner)}' for name, inner in value.items())}}}"
    return repr(value)
