"""Chooses the device of a process, says why none can be used, and avoids known faults of some GPUs."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from grpo.config.errors import ConfigError

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED|ALLOCATION_FAILED|can(no|')t allocate memory", re.IGNORECASE)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NO_P2P = "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"
_GIB = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the memory of the host or of a card was too small.

    Only torch's own allocator has an exception class for it. cuBLAS, cuDNN, NCCL and CUDA itself allocate memory beside
    it, and raise RuntimeErrors, as a broken device does.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


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

    Must be called before CUDA starts: with DS_ACCELERATOR=cpu it hides the cards from all libraries.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # DeepSpeed's launcher gives numbers to ranks on a CPU too, which would be read as cards.
        os.environ[_VISIBLE] = ""
    # NVIDIA's driver may offer cards that torch cannot use.
    return asks_for_card(os.environ, torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*")))


def asks_for_card(environment: Mapping[str, str], has_cards: bool) -> bool:
    """Tell the same as `wants_card` from an environment, for a machine that has cards or not."""
    visible = environment.get(_VISIBLE)
    if visible is None:
        return has_cards
    # CUDA reads up to the first name that it does not know.
    if not re.match(r"\s*\+?\d|GPU-|MIG-", visible):
        return False
    return has_cards or "LOCAL_RANK" not in environment  # then the user set it, and not the launcher


def take_device(local_rank: int) -> torch.device:
    """Select the card of this rank of the machine, or the CPU if no card is wanted.

    Raises ConfigError if the card cannot be used: falling back to the CPU would silently be many times slower.
    """
    # torch's first choice on an H100 is cuDNN's attention, which makes a new plan for every shape and fails at some of
    # ours ("Expected mha_graph.execute(...) to be true"). Without it torch takes flash attention.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not wants_card():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(explain_unusable(os.environ, _reason()))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(explain_too_many(os.environ, torch.cuda.device_count()))
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def explain_too_many(environment: Mapping[str, str], cards: int) -> str:
    ranks = environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE", "more")
    return (
        f"LOCAL_RANK={environment['LOCAL_RANK']}: {ranks} ranks were started on this machine, and torch sees {cards} "
        f"cards ({_VISIBLE} is {environment.get(_VISIBLE, 'not set')}): start one a card, as 'deepspeed --num_gpus "
        f"{cards}' does"
    )


def explain_unusable(environment: Mapping[str, str], reason: str) -> str:
    """Say why torch can use no card, and what to do."""
    details = f"{reason}; {_VISIBLE} is {environment.get(_VISIBLE, 'not set')}"
    if torch.version.cuda is None and torch.version.hip is None:
        remedy = "install a torch that is built for CUDA (https://pytorch.org/get-started/locally)"
    elif _VISIBLE in environment and "No CUDA GPUs" in reason:
        remedy = f"set {_VISIBLE} to cards that 'nvidia-smi -L' lists"
    else:
        remedy = "update NVIDIA's driver, or install a torch that is built for the CUDA that nvidia-smi names"
    return (
        f"torch={torch.__version__}: it can use no card ({details}): {remedy}, or set DS_ACCELERATOR=cpu to use the CPU"
    )


def _reason() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()).partition(". ")[0]
    return "it finds none"


def prepare_nccl() -> str:
    """Switch off NCCL's transports that these cards lack, before it starts. Return a hint for a hanging collective."""
    names = [torch.cuda.get_device_name(card) for card in range(torch.cuda.device_count())]
    try:
        driver = find_driver_version(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        driver = None
    missing = [name for name in _NO_P2P if name not in os.environ]
    if missing and lacks_p2p(names, driver):
        os.environ |= dict.fromkeys(missing, "1")
        log.info("set %s=1: driver %s offers P2P, which these cards lack", "=1 ".join(missing), driver)
    return p2p_hint(names)


def find_driver_version(text: str) -> str | None:
    """Find the version, such as 550.54.14, in the text of NVIDIA's driver under /proc."""
    version = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text, re.MULTILINE)
    return version[1] if version else None


def lacks_p2p(names: list[str], driver: str | None) -> bool:
    """Tell whether NCCL must not use direct transports between these cards.

    Drivers before 550.40.07 offer P2P between GeForce cards of the 40 series, which have none: the first collective
    hangs. The same rule as accelerate.utils.check_cuda_p2p_ib_support.
    """
    if len(names) < 2 or driver is None or not any("GeForce RTX 40" in name for name in names):
        return False
    return tuple(map(int, driver.split("."))) < (550, 40, 7)


def p2p_hint(names: list[str]) -> str:
    """Return a remedy for a first collective of these cards that hangs; empty if none is known."""
    geforce = [name for name in names if "GeForce" in name]
    if not geforce or os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return ""
    return (
        f"if all ranks wait in a collective, the driver may offer P2P between these cards ({geforce[0]}) that does not "
        f"work: try {'=1 '.join(_NO_P2P)}=1"
    )


def memory_of_others(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a card that other programs hold, and its total. Call it before anything is on the card."""
    if device.type == "cpu":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def describe_shared_cards(held: list[tuple[int, int]]) -> str:
    """Name the ranks' cards that other programs use, from each rank's `memory_of_others`; empty without any.

    A desktop or a CUDA context takes less than a tenth of a card.
    """
    taken = [
        f"{others / _GIB:.1f} of {total / _GIB:.1f} GiB of rank {rank}'s"
        for rank, (others, total) in enumerate(held)
        if others > total / 10
    ]
    if not taken:
        return ""
    return (
        f"other programs hold memory of the trainer's cards, {', '.join(taken)}: if that is the reference server, and "
        f"there are other cards, give the trainer those: '{_VISIBLE}=0 deepspeed grpo_ref_split.py' (without "
        "--num_gpus)"
    )
