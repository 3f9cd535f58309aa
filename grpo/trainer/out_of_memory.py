"""Turns a rank's lack of memory into one sentence: the phase, the size of the request, and the setting to lower, which
it leaves in a file that `grpo launch` names, to continue by itself with a lower one."""

import json
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from grpo.config.errors import LOWERED
from grpo.config.fields import find_file
from grpo.config.trainer import TrainerConfig
from grpo.model.devices import is_out_of_memory

START, EVALUATION = "the start", "evaluation"  # places outside of a step's phases

_OF_BATCHES = "update", "routers", "old_logprobs", "ref_logprobs"
_GIB = 2**30


class OutOfMemory(Exception):
    """The memory of a rank was too small. The message says where, and which setting to lower."""


@contextmanager
def explain_shortage(
    place: Callable[[], tuple[str, str]],
    config: TrainerConfig,
    way_on: Callable[[], str],
    *,
    draws_whole_groups: bool = False,
) -> Iterator[None]:
    """Raise OutOfMemory for an error in the block that means it. `place` returns its place, such as "update of step
    7", and the phase; `way_on` how to continue the run."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        where, phase = place()
        if lowered := _lowered(error, phase, config, draws_whole_groups):
            (name,) = lowered
            remedy = f"lower {name}={getattr(config, name)}"
            if path := os.environ.get(LOWERED):
                Path(path).write_text(json.dumps(lowered), encoding="utf-8")
        else:
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


def _draws(phase: str, config: TrainerConfig) -> bool:
    """Tell whether this process draws in a phase: for a pool's workers it copies the policy there."""
    return phase == EVALUATION or (phase == "generate" and config.sampler != "pool")


def _lowered(error: BaseException, phase: str, config: TrainerConfig, draws_whole_groups: bool) -> dict[str, int]:
    """Return the setting that needs less memory with half of its value, but no less than it can have: the run's numbers
    do not depend on it. Empty at its least, or if it would not help."""
    if _draws(phase, config):
        name, least = "sequences_per_generate", config.draws if draws_whole_groups and phase != EVALUATION else 1
    elif phase in _OF_BATCHES and not (phase == "update" and _of_gradients(error)):
        # Of a row that ranks share each has its part.
        name, least = "micro_batch_tokens", -(-config.longest_sequence // config.sequence_parallel_size)
    else:
        return {}
    value = getattr(config, name)
    return {name: max(least, value // 2)} if value > least else {}


def _remedy(error: BaseException, phase: str, config: TrainerConfig) -> str:
    """Return what helps where no lower setting does."""
    if _draws(phase, config):
        return f"lower max_completion_length={config.max_completion_length} in a new run"
    if phase == "update" and _of_gradients(error):
        return "lower reduce_bucket_size in the DeepSpeed file, use more ranks, or use_peft"
    if phase in _OF_BATCHES:
        if not config.gradient_checkpointing:
            return "set gradient_checkpointing"
        lower = f"lower max_completion_length={config.max_completion_length} in a new run"
        unset = [name for name in ("activation_offloading", "tiled_mlp") if not getattr(config, name)]
        return f"set {' and '.join(unset)}, or {lower}" if unset else f"{lower}, or use more ranks"
    if phase == "reward":
        return "serve reward models from another card (--task reward)"
    file = find_file(config.deepspeed)  # not there where the user's code has changed the directory
    offloads = file.exists() and '"offload_optimizer"' in file.read_text(encoding="utf-8")
    return f"use more ranks, {'' if offloads else 'offload_optimizer in the DeepSpeed file, '}or use_peft"


def _of_gradients(error: BaseException) -> bool:
    """Tell whether a hook of ZeRO failed, which autograd calls for each gradient: not the model's own backward pass."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    places = [file for file in files if "deepspeed/runtime/zero" in file or "torch/autograd" in file]
    return bool(places) and "deepspeed" in places[-1]
