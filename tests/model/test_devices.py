"""Which device a process takes, what it refuses, what an error of it means. No card is needed: what depends on one is
computed from its names and numbers."""

import os
import re
from pathlib import Path

import pytest
import torch
from conftest import run_python, running_server

from grpo.config.errors import ConfigError
from grpo.model.devices import describe_shared_cards, is_out_of_memory, p2p_hint, take_device, wants_card


def test_what_is_out_of_memory():
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("NCCL error ... Last error:\nCuda failure 2 'out of memory'"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ):
        assert is_out_of_memory(error), error
    recording = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
    recording.__context__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert is_out_of_memory(recording)
    recording.__context__ = RuntimeError("a model's own")
    assert not is_out_of_memory(recording)
    for error in (
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
        ValueError("out of memory"),
    ):
        assert not is_out_of_memory(error), error


@pytest.mark.parametrize(
    "visible, launched, there, expected",
    [
        (None, False, False, False),
        (None, False, True, True),
        # What the user names must be used, whether it is there or not.
        ("7", False, False, True),
        ("GPU-8d1f2ab4", False, False, True),
        ("MIG-8d1f2ab4", False, True, True),
        # How people and batch systems ask for none.
        ("", False, True, False),
        ("-1", False, True, False),
        ("NoDevFiles", False, True, False),
        # The launcher names cards to ranks on a CPU too.
        ("0,1", True, False, False),
        ("0,1", True, True, True),
    ],
)
def test_who_works_on_a_card(visible, launched, there, expected, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(Path, "glob", lambda *_: [])  # no device of NVIDIA's driver
    assert wants_card() == expected


def test_cudnns_attention_is_off_once_a_device_is_chosen():
    torch.backends.cuda.enable_cudnn_sdp(True)
    take_device(0)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_ranks_on_the_cpu_see_no_cards_whatever_the_launcher_names(monkeypatch):
    """DeepSpeed's launcher, started with CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu, sets the former for its ranks."""
    for name, value in {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert take_device(local_rank=1) == torch.device("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
def test_a_card_that_torch_cannot_use_is_refused_and_not_replaced_by_the_cpu(model_folder, tmp_path):
    """No machine has so many cards."""
    code, environment = "import os; del os.environ['DS_ACCELERATOR']", {"CUDA_VISIBLE_DEVICES": "9999"}
    with running_server(model_folder, tmp_path, code=code, environment=environment, awaited=False) as server:
        assert server.process.wait(60) == 2
    (line,) = [line for line in server.log.read_text().splitlines() if "error: " in line]
    assert line.startswith(f"ref_server.py: error: torch={torch.__version__}: it can use no card (")
    assert "; CUDA_VISIBLE_DEVICES is 9999): " in line and line.endswith(", or set DS_ACCELERATOR=cpu to use the CPU")


def test_more_ranks_than_cards_are_counted(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    remedy = "start a rank for each, as 'deepspeed --num_gpus 2' does"
    expected = f"LOCAL_RANK=2: torch sees 2 cards (CUDA_VISIBLE_DEVICES is 0,1): {remedy}"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        take_device(local_rank=2)


def test_a_card_that_this_torch_has_no_kernels_for_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)

    def ones(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    of_card = {"is_available": True, "device_count": 1, "set_device": None}
    of_card |= {"get_device_name": "Tesla V100", "get_device_capability": (7, 0)}
    for name, value in of_card.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(ConfigError, match=r"^torch=.*: it has no kernels for Tesla V100 \(compute capability 7.0\)"):
        take_device(local_rank=0)


def test_a_hint_is_given_for_geforce_cards_that_may_still_try(monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    for name in ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090"):
        assert f"({name})" in p2p_hint(["NVIDIA A100-SXM4-80GB", name])
    assert p2p_hint(["NVIDIA H100 80GB HBM3", "NVIDIA L40S"]) == "" == p2p_hint([])
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert p2p_hint(["NVIDIA GeForce RTX 4090"]) == ""


def test_cards_that_others_use_are_named():
    gib = 2**30
    assert describe_shared_cards([(0, 0), (0, 0)]) == ""  # the CPU
    assert describe_shared_cards([(gib // 2, 80 * gib), (gib, 24 * gib)]) == ""
    text = describe_shared_cards([(gib, 24 * gib), (int(3.5 * gib), 24 * gib)])
    assert "trainer's cards, 3.5 of 24.0 GiB of rank 1's: if that is the reference server" in text


@pytest.mark.rare
@pytest.mark.plain_start
def test_deepspeed_does_not_read_the_names_of_cards_as_numbers(tmp_path):
    """It does where a module pynvml can be imported. Without a card the question then ends in torch."""
    library = "NVMLError = RuntimeError\nnvmlInit = nvmlDeviceGetHandleByIndex = lambda *any: None\n"
    (tmp_path / "pynvml.py").write_text(library)
    ask = """
import grpo_ref_split
from deepspeed.accelerator import get_accelerator
try:
    get_accelerator().available_memory(0)
except Exception as error:
    print(type(error).__name__, error)
"""
    environment = {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "GPU-8d1f2ab4", "PYTHONPATH": str(tmp_path)}
    ended = run_python("-c", ask, environment=environment)
    assert ended.returncode == 0 and "Error" in ended.stdout
    assert "ValueError" not in ended.stdout and "GPU-8d1f2ab4" not in ended.stdout
