"""Two cards where there is none: tensors on the CPU that refuse what CUDA refuses of tensors on two devices.

Within `Cards()` the devices meta:0 and meta:1 hold values. torch knows their names without a driver, and runs backward
passes through them; that is all that they have of the device meta.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class OnCard(torch.Tensor):
    """A tensor whose values are on the CPU, and that says it is on a card."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device):
        layout = dict(strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype)
        tensor = torch.Tensor._make_wrapper_subclass(cls, values.shape, device=device, **layout)
        tensor.values = values
        return tensor

    def __repr__(self):
        return f"{self.values} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _compute(operation, args, kwargs or {})


class Cards(TorchDispatchMode):
    """Where tensors are made on meta:0 and meta:1 as on two cards, and `copied` counts bytes that came from the CPU."""

    def __init__(self):
        super().__init__()
        self.copied = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = _compute(operation, args, kwargs or {})
        if operation is torch.ops.aten._to_copy.default and isinstance(result, OnCard):
            self.copied += 0 if isinstance(args[0], OnCard) else args[0].nbytes
        return result


def _compute(operation, args, kwargs):
    """Raises RuntimeError where tensors of two devices meet, except in a copy; a CPU's scalar may meet any."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    devices = {tensor.device for tensor in tensors if tensor.ndim or isinstance(tensor, OnCard)}
    if len(devices) > 1 and operation is not torch.ops.aten.copy_.default:
        raise RuntimeError(f"{operation} of tensors on {', '.join(sorted(map(str, devices)))}")
    if (device := kwargs.get("device")) is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    elif placed := [tensor for tensor in tensors if isinstance(tensor, OnCard)]:
        device = placed[0].device
    args, kwargs = tree_map_only(OnCard, lambda tensor: tensor.values, (args, kwargs))
    result = operation(*args, **kwargs)
    if device is None or torch.device(device).type == "cpu":
        return result
    return tree_map_only(torch.Tensor, lambda values: OnCard(values, device), result)
