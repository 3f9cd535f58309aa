"""Chooses the device of a process, says why none can be used, and knows some GPUs' faults."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from grpo.config.errors import ConfigError, one_line, require

_OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED|ALLOCATION_FAILED|can(no|')t allocate memory", re.IGNORECASE)
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the memory of the host or of a card was too small. Only torch's own allocator has an exception class
    for it; cuBLAS, cuDNN, NCCL and CUDA itself raise RuntimeErrors. Within the recording of a CUDA graph it is the
    context of the error by which the recording ends."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    context = error.__context__
    return _OUT_OF_MEMORY.search(str(error)) is not None or (context is not None and is_out_of_memory(context))


@contextmanager
def refuse_shortage(field: str, value: object, remedy: str) -> Iterator[None]:
    """Raise ConfigError, naming the setting, if an error in the block means that memory was too small."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise ConfigError(f"{field}={value!r}: out of memory: {remedy}") from None
        raise


def wants_card() -> bool:
    """Tell whether this process should use a card: the machine has one or one is named, and nothing asks for the CPU.
    Must be called before CUDA starts: with DS_ACCELERATOR=cpu it hides the cards from all libraries."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # DeepSpeed's launcher gives numbers to ranks on a CPU too, which would be read as cards.
        os.environ[_VISIBLE] = ""
    # CUDA reads up to the first name that it does not know.
    if _VISIBLE in os.environ and not re.match(r"\s*\+?\d|GPU-|MIG-", os.environ[_VISIBLE]):
        return False
    is_users = _VISIBLE in os.environ and "LOCAL_RANK" not in os.environ  # and not the launcher's
    # NVIDIA's driver may offer cards that torch cannot use.
    return is_users or torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*"))


def runs_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels run there."""
    return device.type == "cuda"


def take_device(local_rank: int) -> torch.device:
    """Select the card of this rank of the machine, or the CPU if no card is wanted. Raises ConfigError if the card
    cannot be used: falling back to the CPU would silently be many times slower."""
    # torch's first choice on an H100 is cuDNN's attention, which makes a new plan for every shape and fails at some of
    # ours ("Expected mha_graph.execute(...) to be true"). Without it torch takes flash attention.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not wants_card():
        return torch.device("cpu")
    visible, cards = os.environ.get(_VISIBLE, "not set"), torch.cuda.device_count()
    if not torch.cuda.is_available():
        raise ConfigError(
            f"torch={torch.__version__}: it can use no card ({_reason()}; {_VISIBLE} is {visible}): name cards that "
            "'nvidia-smi -L' lists, update NVIDIA's driver or install a torch for the CUDA that nvidia-smi names, or "
            "set DS_ACCELERATOR=cpu to use the CPU"
        )
    seen = f"torch sees {cards} cards ({_VISIBLE} is {visible})"
    remedy = f"{seen}: start a rank for each, as 'deepspeed --num_gpus {cards}' does"
    require(local_rank < cards, "LOCAL_RANK", local_rank, remedy)
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    try:
        torch.ones(1, device=device).add_(1)
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        old = f"it has no kernels for {name} (compute capability {major}.{minor})"
        remedy = "install one that has, such as that of https://download.pytorch.org/whl/cu126, or name another card"
        raise ConfigError(f"torch={torch.__version__}: {old}: {remedy} in {_VISIBLE}") from error
    return device


def _reason() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return one_line(error, None).partition(". ")[0]
    return "it finds none"


def p2p_hint(names: list[str]) -> str:
    """Return a remedy for a first collective of these cards that hangs; empty if none is known."""
    geforce = next((name for name in names if "GeForce" in name), None)
    if geforce is None or os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return ""
    return (
        f"if all ranks wait in a collective, the driver may offer P2P between these cards ({geforce}) that does not "
        "work: try NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1"
    )


def memory_of_others(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a card that other programs hold, and its total. Call it before anything is on the card."""
    if device.type == "cpu":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def describe_shared_cards(held: list[tuple[int, int]]) -> str:
    """Name the ranks' cards that other programs use, from each rank's `memory_of_others`; empty without any."""
    taken = [
        f"{others / 2**30:.1f} of {total / 2**30:.1f} GiB of rank {rank}'s"
        for rank, (others, total) in enumerate(held)
        if others > total / 10  # a desktop or a CUDA context takes less
    ]
    remedy = f"if that is the reference server, use other cards: '{_VISIBLE}=1 deepspeed ...' without --num_gpus"
    return f"other programs hold memory of the trainer's cards, {', '.join(taken)}: {remedy}" if taken else ""
