"""What a pass keeps for its backward pass: recomputed, kept in the machine's memory, or made a block at a time."""

from collections.abc import Callable
from functools import partial
from inspect import signature

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from grpo.config.errors import ConfigError

MLP_BLOCK = 4096  # tokens


def checkpoint_activations(model: PreTrainedModel, offload: bool = False) -> None:
    """Let the model recompute activations where grpo/model/logprobs.py says so, with `offload` from inputs that wait in
    the machine's memory. Raises ConfigError if it cannot."""
    # Renamed in transformers 5.23; earlier versions have only the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        name = type(model).__name__
        raise ConfigError(f"gradient_checkpointing=True: {name} does not know how to: set it to false") from error
    if offload:
        for layer in model.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer._gradient_checkpointing_func = partial(_offloaded, layer._gradient_checkpointing_func)


def _offloaded(run_layer: Callable, *arguments, **named):
    with saved_tensors_hooks(_to_host, _from_host):
        return run_layer(*arguments, **named)


def _to_host(saved: Tensor) -> tuple[torch.device, Tensor]:
    if saved.is_meta:  # memory is counted: nothing of it stays
        return saved.device, saved.new_empty(1).expand(saved.shape)
    kept = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
    return saved.device, kept.copy_(saved, non_blocking=True)


def _from_host(kept: tuple[torch.device, Tensor]) -> Tensor:
    device, values = kept
    return values.to(device, non_blocking=True, copy=True)


def tile_mlps(model: PreTrainedModel) -> None:
    """Let each MLP take the tokens of long passes in blocks, whose inner activations are computed again in the backward
    pass, a block at a time. Raises ConfigError for a model whose MLPs are not known."""
    mlps = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    if not mlps or any(hasattr(mlp, "experts") or not _takes_tokens_alone(mlp) for mlp in mlps):
        reason = "has experts, or no part named mlp that takes tokens alone"
        raise ConfigError(f"tiled_mlp=True: {type(model).__name__} {reason}: leave it out")
    for mlp in mlps:
        mlp.forward = partial(_in_blocks, mlp.forward)


def _takes_tokens_alone(mlp: nn.Module) -> bool:
    """Tell whether an MLP needs no second argument, as BLOOM's does."""
    parameters = signature(mlp.forward).parameters.values()
    return sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters) == 1


def _in_blocks(forward: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    tokens = states.reshape(1, -1, states.shape[-1])
    if tokens.shape[1] <= MLP_BLOCK:
        return forward(states)
    run = partial(checkpoint, forward, use_reentrant=False) if torch.is_grad_enabled() else forward
    computed = torch.cat([run(block) for block in tokens.split(MLP_BLOCK, dim=1)], dim=1)
    return computed.view(*states.shape[:-1], -1)  # where pictures become tokens, an mlp changes the width
