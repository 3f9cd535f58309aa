"""CUDA graphs on the CPU: a step's operations are recorded, and replayed without the Python that called them. What a
step keeps in Python (a length, a branch, a new tensor) shows as a wrong draw."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo.sampling.rows import StepGraphs


class Taped(StepGraphs):
    """What StepGraphs does on a card, with a Tape for each graph."""

    replayed = 0

    def run(self, step, shape):
        if shape not in self._graphs:
            step(shape)
            self._graphs[shape] = None
        else:
            self._graphs[shape] = self._graphs[shape] or Tape(step, shape)
            self._graphs[shape].replay()
            Taped.replayed += 1


class Tape(TorchDispatchMode):
    """The operations of a step. To record them has no effect, as with CUDA: what they write is put back."""

    def __init__(self, step, shape):
        super().__init__()
        self._calls, self._made, self._before = [], set(), {}
        with self:
            step(shape)
        for whole, values in self._before.values():
            whole.copy_(values)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = _tensors((args, kwargs))
        if operation._schema.is_mutable:
            for tensor in given:
                if _place(tensor) not in self._made | self._before.keys():
                    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                    self._before[_place(tensor)] = whole, whole.clone()
        result = operation(*args, **kwargs or {})
        places = {_place(tensor) for tensor in given}
        new = [tensor for tensor in _tensors(result) if _place(tensor) not in places]
        self._made |= {_place(tensor) for tensor in new}
        self._calls.append((operation, args, kwargs or {}, result if new else None))
        return result

    def replay(self):
        for operation, args, kwargs, result in self._calls:
            again = operation(*args, **kwargs)
            if result is not None:
                for kept, value in zip(_tensors(result), _tensors(again), strict=True):
                    kept.copy_(value)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
