"""The part of a vision-language model that makes tokens of pictures: trained with the language model, or frozen."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the vision tower, its projector too: all that are not the language model's.

    Empty for a model that takes text alone.
    """
    language = _language(model)
    return [parameter for parameter in model.parameters() if id(parameter) not in language]


def vision_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the outermost modules that have such parameters alone."""
    language = _language(model)

    def outermost(name: str, module: nn.Module) -> Iterator[str]:
        parameters = {id(parameter) for parameter in module.parameters()}
        if parameters and parameters.isdisjoint(language):
            yield name
        elif parameters:
            for child_name, child in module.named_children():
                yield from outermost(f"{name}.{child_name}".lstrip("."), child)

    return [*outermost("", model)]


def freeze_vision_tower(model: PreTrainedModel) -> None:
    """Train the language model alone: no gradient, no optimizer state and no kept activations for the vision tower."""
    parameters = vision_parameters(model)
    for parameter in parameters:
        parameter.requires_grad_(False)
    count = sum(parameter.numel() for parameter in parameters)
    log.info("the vision tower is frozen: %s parameters in %s", f"{count:,}", ", ".join(vision_modules(model)))


def _language(model: PreTrainedModel) -> set[int]:
    """Return the ids of the language model's parameters, embeddings and head included."""
    parts = model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()
    return {id(parameter) for part in parts for parameter in part.parameters()}
