"""Turns a rank's lack of memory into one sentence: the phase, the size of the request, and the setting to lower."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from grpo.config.trainer import TrainerConfig
from grpo.model.devices import is_out_of_memory

START, EVALUATION = "the start", "evaluation"  # places outside of a step's phases

_GIB = 2**30


class OutOfMemory(Exception):
    """The memory of a rank was too small. The message says where, and which setting to lower."""


@contextmanager
def explain_shortage(
    place: Callable[[], tuple[str, str]], config: TrainerConfig, way_on: Callable[[], str]
) -> Iterator[None]:
    """Raise OutOfMemory for an error in the block that means it. `place` returns where it was, such as "update of step
    7", and the phase; `way_on` how to continue the run."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        where, phase = place()
        remedy = _remedy(error, phase, config)
        raise OutOfMemory(f"out of memory in {where}{_sizes(error)}: {remedy}; {way_on()}") from None


def _sizes(error: BaseException) -> str:
    request = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    parts = [f"{request[1]} more were asked for"] if request else []
    if torch.cuda.is_available():
        tensors, torchs = torch.cuda.memory_allocated() / _GIB, torch.cuda.memory_reserved() / _GIB
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / _GIB
        parts.append(f"of {whole:.1f} GiB torch has {torchs:.1f}, tensors {tensors:.1f}")
    return f" ({', '.join(parts)})" if parts else ""


def _remedy(error: BaseException, phase: str, config: TrainerConfig) -> str:
    if phase in ("generate", EVALUATION):
        # Generate draws a group whole.
        least = config.draws if config.sampler == "generate" and phase != EVALUATION else 1
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
    """Tell whether a hook of ZeRO failed, which autograd calls for each gradient: not the model's own backward pass."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    places = [file for file in files if "deepspeed/runtime/zero" in file or "torch/autograd" in file]
    return bool(places) and "deepspeed" in places[-1]
