"""What a model's layers keep for their backward pass, counted without any weights: in a forward pass on device meta."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from grpo.model.logprobs import body_of
from grpo.model.packing import Tree
from grpo.model.tree_attention import ROWS, segments


def kept_for_backward(model: PreTrainedModel, longest: int) -> int:
    """Bytes a token that the model's body keeps for its backward pass, counted in a forward pass on device meta.

    A fused attention keeps queries, keys, values, result; where no kernel knows the scores' softcap, also scores of
    `longest` tokens.

    Raises NotImplementedError where the model cannot run without numbers.
    """
    softcapped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    tokens = longest if softcapped else ROWS
    own = model.config._attn_implementation
    AttentionInterface.register("grpo_counted", _attend)
    AttentionMaskInterface.register("grpo_counted", ALL_MASK_ATTENTION_FUNCTIONS[own])
    parameters = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}  # by storage, alive so that no other gets its number

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[_storage(tensor)] = tensor
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    mask = torch.ones(
        1, 1, 1, 1, dtype=torch.bool, device="meta"
    )  # handed on as it is, as grpo/model/logprobs.py has it
    model.set_attn_implementation("grpo_counted")
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            body_of(model)(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    # A model's code may fail in any way where it meets tensors without numbers or a mask that it does not know.
    except Exception as error:
        raise NotImplementedError(f"{type(model).__name__} does not run without numbers: {error}") from error
    finally:
        model.set_attn_implementation(own)
    size = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in parameters)
    return -(-size // tokens)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **options
) -> tuple[torch.Tensor, None]:
    if (softcap := options.get("softcap")) is not None:
        tree = Tree([(query.shape[2], [])])
        return segments(query, key, value, tree, options.get("scaling") or 1.0, softcap), None
    # Laid out anew, as the segments' results are.
    return _Fused.apply(query, key, value).transpose(1, 2).clone(memory_format=torch.contiguous_format), None


class _Fused(torch.autograd.Function):
    """Keeps what flash attention keeps, and computes nothing."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("it is never asked for")
