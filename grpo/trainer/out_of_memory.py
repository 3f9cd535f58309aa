"""Turns a rank's lack of memory into one sentence: the phase, the size of the request, and the setting to lower."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from grpo.config.trainer import TrainerConfig
from grpo.model.devices import is_out_of_memory

START, EVALUATION = "the start", "evaluation"
"""the places outside of a step's phases where memory may be too small"""

_GIB = 2**30
_REQUEST = re.compile(r"ried to allocate ([\d.]+ \w+)")


class OutOfMemory(Exception):
    """The memory of a rank was too small. The message says where, and which setting to lower."""


def raise_if_short(error: BaseException, where: str, phase: str, config: TrainerConfig, way_on: str) -> None:
    """Raise OutOfMemory if the error means it.

    `where` is the place, such as "update of step 7"; `phase` is its kind; `way_on` says how to continue the run.
    """
    if is_out_of_memory(error):
        raise OutOfMemory(
            f"out of memory in {where}{_sizes(error)}: {_remedy(error, phase, config)}; {way_on}"
        ) from None


@contextmanager
def explain_shortage(where: str, phase: str, config: TrainerConfig, way_on: Callable[[], str]) -> Iterator[None]:
    """Raise OutOfMemory as raise_if_short does for an error in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise_if_short(error, where, phase, config, way_on())
        raise


def _sizes(error: BaseException) -> str:
    request = _REQUEST.search(str(error))
    parts = [f"{request[1]} more were asked for"] if request else []
    if torch.cuda.is_available():
        tensors, torchs = torch.cuda.memory_allocated() / _GIB, torch.cuda.memory_reserved() / _GIB
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / _GIB
        parts.append(f"of {whole:.1f} GiB torch has {torchs:.1f}, tensors {tensors:.1f}")
    return f" ({', '.join(parts)})" if parts else ""


def _remedy(error: BaseException, phase: str, config: TrainerConfig) -> str:
    if phase in ("generate", EVALUATION):
        # Generate draws a group whole.
        least = config.num_generations if config.sampler == "generate" and phase != EVALUATION else 1
        if config.sequences_per_generate > least:
            return f"lower sequences_per_generate={config.sequences_per_generate}"
        return f"lower max_completion_length={config.max_completion_length} in a new run"
    if phase == "update" and _of_gradients(error):
        return "lower reduce_bucket_size in the DeepSpeed file, use more ranks, or use_peft"
    if phase in ("update", "routers", "old_logprobs", "ref_logprobs"):
        if config.micro_batch_tokens > config.longest_sequence:
            return f"lower micro_batch_tokens={config.micro_batch_tokens}"
        if not config.gradient_checkpointing:
            return "set gradient_checkpointing"
        return f"lower max_completion_length={config.max_completion_length} in a new run, or use more ranks"
    if phase == "reward":
        return "serve reward models from another card (--task reward)"
    return "use more ranks, offload_optimizer in the DeepSpeed file, or use_peft"


def _of_gradients(error: BaseException) -> bool:
    """Tell whether a hook of ZeRO failed, which autograd calls for each gradient."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for place in ("deepspeed/runtime/zero", "torch/autograd"):
            if place in frame.filename:
                return place.startswith("deepspeed")
    return False
