"""A rank whose memory is too small says so in one sentence, and ends the run on all ranks."""

import os
import re

import pytest
import torch
from trainer_runs import lines, options, run_ranks

from grpo.config.trainer import TrainerConfig
from grpo.trainer.out_of_memory import EVALUATION, START, OutOfMemory, explain_shortage

TORCHS = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 79 GiB")
CPUS = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000 bytes. Error code 12")
FACES = {
    TORCHS: " (2.25 GiB more were asked for)",
    CPUS: " (8000000 bytes more were asked for)",
    RuntimeError("CUDA error: out of memory"): "",
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"): "",
    MemoryError(): "",
}


def fail(error: BaseException, phase: str, whole: bool = False, **settings) -> None:
    place, config = lambda: (f"{phase} of step 7", phase), TrainerConfig(**settings)
    with explain_shortage(place, config, lambda: "begin again", draws_whole_groups=whole):
        raise error


def said(error: BaseException, phase: str, **settings) -> str:
    with pytest.raises(OutOfMemory) as raised:
        fail(error, phase, **settings)
    assert raised.value.__suppress_context__  # or a traceback would keep what the failed pass holds
    return str(raised.value)


@pytest.mark.parametrize("error", FACES, ids=lambda error: str(error)[:40])
def test_all_its_faces_are_known(error):
    text = said(error, "update")
    assert text == f"out of memory in update of step 7{FACES[error]}: lower micro_batch_tokens=16384; begin again"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), ValueError("out of memory")])
def test_another_failure_is_left_alone(error):
    with pytest.raises(type(error), match=str(error)):
        fail(error, "update")


LOW = {"micro_batch_tokens": 600, "max_prompt_length": 200, "max_completion_length": 400}
TILED = LOW | {"activation_offloading": True, "tiled_mlp": True}
SHORTER = "lower max_completion_length=400 in a new run"
MORE_CARDS = "use more ranks, offload_optimizer in the DeepSpeed file, or use_peft"


@pytest.mark.parametrize(
    ("phase", "settings", "remedy"),
    [
        ("update", LOW, f"set activation_offloading and tiled_mlp, or {SHORTER}"),
        ("update", TILED, f"{SHORTER}, or use more ranks"),
        ("update", LOW | {"gradient_checkpointing": False}, "set gradient_checkpointing"),
        ("update", LOW | {"sequence_parallel_size": 4}, "lower micro_batch_tokens=600"),
        ("ref_logprobs", {}, "lower micro_batch_tokens=16384"),
        ("generate", {"sequences_per_generate": 64}, "lower sequences_per_generate=64"),
        ("generate", LOW | {"sequences_per_generate": 8}, "lower sequences_per_generate=8"),
        ("generate", LOW | {"sequences_per_generate": 1}, SHORTER),
        ("generate", LOW | {"sequences_per_generate": 8, "whole": True}, SHORTER),
        (EVALUATION, {"sequences_per_generate": 8, "whole": True}, "lower sequences_per_generate=8"),
        ("generate", {"sampler": "pool", "pool": "http://a"}, MORE_CARDS),
        (EVALUATION, {"sequences_per_generate": 8}, "lower sequences_per_generate=8"),
        ("optimizer", {}, MORE_CARDS),
        (START, {}, MORE_CARDS),
        ("reward", {}, "serve reward models from another card (--task reward)"),
    ],
)
def test_the_setting_that_helps_is_named(phase, settings, remedy, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert said(TORCHS, phase, num_generations=8, **settings).endswith(f": {remedy}; begin again")


LIMIT = """
import ctypes, os, resource
from pathlib import Path

M_MMAP_THRESHOLD = -3
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # every tensor of 64 KiB and more is asked for by itself
calls = -1  # the first call is the one before the run

def grade(prompts, completions, **columns):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1" and Path(__file__).with_name("limit").exists():
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held, held))
    return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
def test_a_rank_without_memory_ends_all_in_one_sentence_and_the_run_goes_on(
    launch, model_folder, data_folder, tmp_path
):
    """Its address space ends where it stands after the rewards of step 3: ZeRO's bucket, 400 MB, does not fit in."""
    run, settings = tmp_path / "run", {"beta": 0.0, "eval_steps": 0, "max_steps": 4, "save_steps": 1}
    words = options(model_folder, data_folder, run, **settings, resume_from_checkpoint="last")
    (tmp_path / "own.py").write_text(LIMIT)
    (tmp_path / "limit").touch()
    words += ["--reward_funcs", f"{tmp_path / 'own.py'}:grade"]
    ended = launch(2, "grpo_ref_split.py", *words)
    assert ended.returncode != 0
    told = [line for line in ended.stdout.splitlines() if "out of memory" in line]
    assert len(told) == 1 and "Traceback" not in ended.stdout, ended.stdout
    way_on = f"--resume_from_checkpoint last --output_dir {run} goes on after step 2"
    place = (
        r"grpo_ref_split.py: error: rank 1: out of memory in update of step 3 \(400000000 bytes more were asked for\)"
    )
    remedy = "lower reduce_bucket_size in the DeepSpeed file, use more ranks, or use_peft"
    assert re.fullmatch(f"{place}: {remedy}; {re.escape(way_on)}", told[0]), told[0]

    os.remove(tmp_path / "limit")
    ended = run_ranks(2, "grpo_ref_split.py", *words, "--sequences_per_generate", "4")
    assert ended.returncode == 0, ended.stdout
    assert [row["step"] for row in lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
