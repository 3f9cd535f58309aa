"""Weights of which each rank holds a share: those of ZeRO-3 (deepspeed 0.19, runtime/zero/partition_parameters.py).

Such a weight is whole only while its module computes. At any other time its shape is [0].
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(model: nn.Module) -> bool:
    return any(hasattr(weight, "ds_id") for weight in model.parameters())


def shape_of(weight: Tensor) -> torch.Size:
    return getattr(weight, "ds_shape", weight.shape)


def detached(weight: Tensor) -> Tensor:
    """Return the weight without gradient; a sharded one as it is, as only the parameter can be made whole."""
    return weight if hasattr(weight, "ds_id") else weight.detach()


@contextmanager
def whole(weight: Tensor) -> Iterator[None]:
    """Make a sharded weight whole inside; all ranks call it together."""
    if not hasattr(weight, "ds_id"):
        yield
        return
    weight.all_gather([weight])  # not deepspeed.zero.GatheredParameters: workers have no DeepSpeed to import
    try:
        yield
    finally:
        weight.partition([weight])


@torch.no_grad()
def copy_whole(weights: Mapping[str, Tensor], copies: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copy weights into the host's memory of rank 0, over `copies` of earlier ones; on other ranks return nothing. Of
    sharded weights a card holds one at a time, and all ranks call this together."""
    copies, keeps = {} if copies is None else copies, not dist.is_initialized() or dist.get_rank() == 0
    for name, weight in weights.items():
        with whole(weight):
            if keeps:
                if name not in copies:
                    copies[name] = torch.empty_like(weight, device="cpu")
                copies[name].copy_(weight)
    return copies


def weights_to_save(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a sharded model's weights for `save_pretrained`, as copy_whole does; None of a model that is whole."""
    if not is_sharded(model):
        return None
    has_adapter = hasattr(model, "peft_config")
    by_name = model.state_dict(keep_vars=True)
    once = {id(weight): name for name, weight in reversed(by_name.items())}  # a tied head is written once
    return copy_whole({name: by_name[name] for name in once.values() if not has_adapter or ".lora_" in name})
