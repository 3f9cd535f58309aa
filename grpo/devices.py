"""The device that a process works on: which it is, and where none can be used."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from grpo.config import ConfigError

_OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED|ALLOCATION_FAILED|can't allocate memory", re.IGNORECASE)
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the memory of the host or of a card was too small.

    Only torch's own allocator has a class for it. cuBLAS, cuDNN, NCCL and CUDA itself take memory beside it, and their
    errors are RuntimeErrors, as a broken device's are.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def wants_card() -> bool:
    """Tell whether this process is to work on a card: one is there or named, and nothing asks for the CPU.

    Call it before CUDA starts: where DS_ACCELERATOR is cpu it hides the cards from all libraries.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # To ranks on a CPU DeepSpeed's launcher gives numbers too, which would be those of cards.
        os.environ[_VISIBLE] = ""
    return asks_for_card(os.environ, torch.cuda.is_available() or _cards_of_machine() > 0)


def asks_for_card(environment: Mapping[str, str], there: bool) -> bool:
    """As `wants_card`, on a machine where cards are `there` or not."""
    visible = environment.get(_VISIBLE)
    if visible is None:
        return there
    # CUDA reads up to the first name that it does not know.
    if not re.match(r"\s*\+?\d|GPU-|MIG-", visible):
        return False
    return there or "LOCAL_RANK" not in environment  # then the user wrote it, and not the launcher


def take_device(local_rank: int) -> torch.device:
    """Take the card of this rank of the machine, or the CPU where no card is wanted.

    Raises ConfigError where the card cannot be used: the CPU in its place would be many times slower, without a word.
    """
    if not wants_card():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(explain_unusable(os.environ, _reason()))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(explain_too_many(os.environ, torch.cuda.device_count()))
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def explain_too_many(environment: Mapping[str, str], cards: int) -> str:
    """Say that this rank has no card."""
    ranks = environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE", "more")
    return (
        f"LOCAL_RANK={environment['LOCAL_RANK']}: {ranks} ranks were started on this machine, and torch sees {cards} "
        f"cards ({_VISIBLE} is {environment.get(_VISIBLE, 'not set')}): start one a card, as 'deepspeed --num_gpus "
        f"{cards}' does"
    )


def explain_unusable(environment: Mapping[str, str], reason: str) -> str:
    """Say why torch can use no card, and what to do."""
    here = f"{reason}; {_VISIBLE} is {environment.get(_VISIBLE, 'not set')}"
    if torch.version.cuda is None and torch.version.hip is None:
        remedy = "install a torch that is built for CUDA (https://pytorch.org/get-started/locally)"
    elif _VISIBLE in environment and "No CUDA GPUs" in reason:
        remedy = f"set {_VISIBLE} to cards that 'nvidia-smi -L' lists"
    else:
        remedy = "update NVIDIA's driver, or install a torch that is built for the CUDA that nvidia-smi names"
    return f"torch={torch.__version__}: it can use no card ({here}): {remedy}, or set DS_ACCELERATOR=cpu to use the CPU"


def _reason() -> str:
    """Ask torch why it can use no card."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()).partition(". ")[0]
    return "it finds none"


def _cards_of_machine() -> int:
    """Count the cards that NVIDIA's driver offers to this process, whether torch can use them or not."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
