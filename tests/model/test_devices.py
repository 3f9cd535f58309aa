"""Which device a process takes, what it refuses, what an error of it means. No card is needed: what depends on one is
computed from its names and numbers."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ENVIRONMENT, REPOSITORY, running_server

from grpo.model.devices import (
    asks_for_card,
    describe_shared_cards,
    explain_too_many,
    explain_unusable,
    find_driver_version,
    is_out_of_memory,
    lacks_p2p,
    p2p_hint,
    take_device,
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("NCCL error ... Last error:\nCuda failure 2 'out of memory'"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_what_is_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        ValueError("out of memory"),
    ],
)
def test_what_is_another_failure(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "environment, there, expected",
    [
        ({}, False, False),
        ({}, True, True),
        # What the user names must be used, whether it is there or not.
        ({"CUDA_VISIBLE_DEVICES": "7"}, False, True),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8d1f2ab4"}, False, True),
        ({"CUDA_VISIBLE_DEVICES": "MIG-8d1f2ab4"}, True, True),
        # How people and batch systems ask for none.
        ({"CUDA_VISIBLE_DEVICES": ""}, True, False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, True, False),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, True, False),
        # The launcher names cards to ranks on a CPU too.
        ({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_RANK": "1"}, False, False),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_RANK": "1"}, True, True),
    ],
)
def test_who_works_on_a_card(environment, there, expected):
    assert asks_for_card(environment, there) == expected


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
    environment = {"CUDA_VISIBLE_DEVICES": "9999", "DS_ACCELERATOR": ""}
    with running_server(model_folder, tmp_path, environment=environment) as server:
        assert server.process.wait(60) == 2
    (line,) = [line for line in server.log.read_text().splitlines() if "error: " in line]
    assert line.startswith(f"ref_server.py: error: torch={torch.__version__}: it can use no card (")
    assert "; CUDA_VISIBLE_DEVICES is 9999): " in line and line.endswith(", or set DS_ACCELERATOR=cpu to use the CPU")


@pytest.mark.parametrize(
    "built_for, environment, reason, remedy",
    [
        (None, {}, "Torch not compiled with CUDA enabled", "install a torch that is built for CUDA"),
        ("13.0", {"CUDA_VISIBLE_DEVICES": "7"}, "No CUDA GPUs are available", "set CUDA_VISIBLE_DEVICES to cards that"),
        ("13.0", {}, "The NVIDIA driver on your system is too old (found version 12020)", "update NVIDIA's driver, or"),
    ],
)
def test_the_remedy_fits_the_reason(monkeypatch, built_for, environment, reason, remedy):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    text = explain_unusable(environment, reason)
    assert f"it can use no card ({reason}; CUDA_VISIBLE_DEVICES is " in text and f"): {remedy}" in text


def test_more_ranks_than_cards_are_counted():
    text = explain_too_many({"LOCAL_RANK": "2", "LOCAL_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0,1"}, cards=2)
    assert text == (
        "LOCAL_RANK=2: 4 ranks were started on this machine, and torch sees 2 cards (CUDA_VISIBLE_DEVICES is 0,1): "
        "start one a card, as 'deepspeed --num_gpus 2' does"
    )


OLD, NEW = "535.183.01", "550.54.14"


@pytest.mark.parametrize(
    "name, driver, lacks",
    [
        ("NVIDIA GeForce RTX 4090", OLD, True),
        ("NVIDIA GeForce RTX 4060 Ti", "550.40.06", True),
        ("NVIDIA GeForce RTX 4090", "550.40.07", False),
        ("NVIDIA GeForce RTX 4090", NEW, False),
        ("NVIDIA GeForce RTX 4090", None, False),
        ("NVIDIA GeForce RTX 3090", OLD, False),
        ("NVIDIA GeForce RTX 5090", NEW, False),
        ("NVIDIA RTX 6000 Ada Generation", OLD, False),
        ("NVIDIA RTX 4000 Ada Generation", OLD, False),
        ("NVIDIA L40S", OLD, False),
        ("NVIDIA A100-SXM4-80GB", OLD, False),
        ("NVIDIA H100 80GB HBM3", OLD, False),
    ],
)
def test_which_cards_nccl_is_kept_from_connecting(name, driver, lacks):
    assert lacks_p2p([name, name], driver) == lacks
    assert not lacks_p2p([name], driver)


def test_a_hint_is_given_for_geforce_cards_that_may_still_try(monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    for name in ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090"):
        assert f"({name})" in p2p_hint(["NVIDIA A100-SXM4-80GB", name])
    assert p2p_hint(["NVIDIA H100 80GB HBM3", "NVIDIA L40S"]) == "" == p2p_hint([])
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert p2p_hint(["NVIDIA GeForce RTX 4090"]) == ""


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC ...", OLD),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build  (builder)", NEW),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  555.58  Release Build  (portage)", "555.58"),
        ("", None),
    ],
)
def test_the_drivers_version_is_found(text, version):
    assert find_driver_version(text) == version


def test_cards_that_others_use_are_named():
    gib = 2**30
    assert describe_shared_cards([(0, 0), (0, 0)]) == ""  # the CPU
    assert describe_shared_cards([(gib // 2, 80 * gib), (gib, 24 * gib)]) == ""
    text = describe_shared_cards([(gib, 24 * gib), (int(3.5 * gib), 24 * gib)])
    assert "trainer's cards, 3.5 of 24.0 GiB of rank 1's: if that is the reference server" in text


@pytest.mark.slow
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
    process = subprocess.Popen(
        [sys.executable, "-c", ask], cwd=REPOSITORY, env=ENVIRONMENT | environment, stdout=subprocess.PIPE, text=True
    )
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "ValueError" not in said and "GPU-8d1f2ab4" not in said
