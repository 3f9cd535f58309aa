"""The part of a vision-language model that makes tokens of pictures: trained with the language model, or frozen."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the vision tower, its projector too: all that are not the language model's.

    Empty for a model that takes text alone.
    """
    language = _language(model)
    return [parameter for parameter in model.parameters() if id(parameter) not in language]


def _language(model: PreTrainedModel) -> set[int]:
    """Return the ids of the language model's parameters, embeddings and head included."""
    parts = model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()
    return {id(parameter) for part in parts for parameter in part.parameters()}
