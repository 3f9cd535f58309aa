"""DeepSpeed's file: "auto" is filled from Config, contradictions are refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.trainer import deepspeed_engine
from grpo.trainer.deepspeed_engine import engine_config, shard_weights

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def config(*options) -> TrainerConfig:
    return parse_arguments(TrainerConfig, "", list(options))


def test_the_shipped_file_is_filled():
    filled = engine_config(config(), 6, GPU)
    assert (filled["train_batch_size"], filled["train_micro_batch_size_per_gpu"]) == (48 * 8, 64)
    assert (filled["gradient_accumulation_steps"], filled["managed_gradient_accumulation"]) == (1, False)
    assert filled["gradient_clipping"] == 1.0 and filled["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert "auto" not in json.dumps(filled)
    assert engine_config(config(), 1, CPU)["bf16"]["enabled"] is False
    assert engine_config(config("--dtype", "bfloat16"), 1, CPU)["bf16"]["enabled"] is True


def test_moments_in_8_bits_are_allowed_and_not_offloaded(with_file):
    pytest.importorskip("bitsandbytes")
    assert "zero_allow_untested_optimizer" not in with_file({})
    eight = "--optim", "adamw_8bit"
    assert with_file({}, *eight)["zero_allow_untested_optimizer"] is True
    refused = "^optim='adamw_8bit': .* has zero_optimization.offload_optimizer, .* take one"
    with pytest.raises(ConfigError, match=refused):
        with_file(OFFLOADED, *eight)


def test_what_a_model_has_beside_weights_goes_to_the_card_with_their_shares(monkeypatch, model_folder):
    """As a vision tower's positions, or a router's biases, of a model that waited on the host."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    card = SimpleNamespace(current_device_name=lambda: "meta")
    monkeypatch.setattr(deepspeed_engine, "get_accelerator", lambda: card)
    monkeypatch.setattr("deepspeed.zero.Init", lambda **_: None)
    shard_weights(model, {})
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


@pytest.fixture
def with_file(tmp_path):
    def fill(settings, *options, ranks=2) -> dict:
        path = tmp_path / "ds.json"
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        return engine_config(config("--deepspeed", str(path), *options), ranks, CPU)

    return fill


def zero(**settings) -> dict:
    return {"zero_optimization": {"stage": 2, **settings}}


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"train_batch_size": 8}, "train_batch_size is 8, and this run makes it 384: write 'auto' there"),
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu is 1, .* makes it 192"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4, .* makes it 1"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, .* makes it 1.0"),
        ({"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow is False, .* makes it True"),
        (zero(compute_grad_norm=False), "zero_optimization.compute_grad_norm is False, .* makes it True"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is True, .* makes it False"),
        ({"optimizer": {"type": "Adam"}}, "optimizer is set there, .* take it out"),
        ({"scheduler": {}}, "scheduler is set there, .* take it out"),
        (zero(stage=1), "zero_optimization.stage is 1: use 2, or 3"),
        (zero(stage=3, offload_param={"device": "nvme"}), "offload_param.device is 'nvme': use 'cpu'"),
        (zero(stage=3, memory_efficient_linear=True), "memory_efficient_linear is True, .* makes it F"),
        (zero(stage=3, zero_quantized_weights=True), "zero_optimization.zero_quantized_weights is True, .* makes it F"),
        (zero(stage=3, zero_hpz_partition_size=8), "zero_optimization.zero_hpz_partition_size is 8, .* makes it 1"),
        (zero(offload_optimizer={"device": "nvme"}), "zero_optimization.offload_optimizer.device is 'nvme': use 'cpu'"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype is 'bf16': with torch.float32 use"),
        ("{", "not JSON"),
        ("[]", "write a JSON object"),
        ({"fp16": True}, "fp16 is True: write a JSON object"),
        (zero(offload_optimizer="cpu"), "zero_optimization.offload_optimizer is 'cpu'"),
        (zero(stge=2), "DeepSpeed refuses it: .* stge Extra inputs are not permitted"),
        ({"sparse_gradients": True}, "DeepSpeed refuses it: Sparse compression .* has been removed"),
    ],
)
def test_contradictions_are_refused(with_file, settings, expected):
    with pytest.raises(ConfigError, match=rf"deepspeed='.*ds.json': .*{expected}"):
        with_file(settings)


@pytest.mark.parametrize(
    "words, refused",
    [
        (["--quantization=4bit", "--use_peft"], "quantization='4bit': .* use none"),
        (["--optim=adamw_8bit"], "optim='adamw_8bit': .* use adamw_torch"),
        (["--use_peft", "--merge_on_save"], "merge_on_save=True: .* merge the saved adapter afterwards"),
        (["--ref=local"], "ref='local': .* use server, or with an adapter adapter_off"),
        (["--use_peft", "--ref_update_steps=2"], "ref_update_steps=2: .* use 0 with an adapter"),
    ],
)
def test_what_needs_a_ranks_weights_whole_is_refused_where_they_are_shared_out(with_file, words, refused):
    pytest.importorskip("peft")
    if words[0].startswith(("--quant", "--optim")):
        pytest.importorskip("bitsandbytes")
    with pytest.raises(ConfigError, match=refused):
        with_file(zero(stage=3), *words)


def test_what_agrees_and_what_is_not_ours_is_kept(with_file):
    filled = with_file({"gradient_clipping": 0.5} | zero(reduce_bucket_size=5), "--max_grad_norm", "0.5")
    assert filled["gradient_clipping"] == 0.5 and filled["zero_optimization"]["reduce_bucket_size"] == 5
    left = with_file(zero(reduce_bucket_size="auto"))["zero_optimization"]
    assert "reduce_bucket_size" not in left, "DeepSpeed has its own"


OFFLOADED = zero(offload_optimizer={"device": "cpu"})


@pytest.mark.parametrize(
    "settings, dtype, expected",
    [
        ({}, "bfloat16", "fp32"),
        ({"data_types": {"grad_accum_dtype": "auto"}}, "bfloat16", "fp32"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "bfloat16", "bf16"),
        (OFFLOADED, "bfloat16", "bf16"),
        (OFFLOADED, "float32", "fp32"),
        (zero(offload_optimizer={"device": "none"}), "bfloat16", "fp32"),
    ],
)
def test_gradients_are_summed_in_fp32_unless_they_are_offloaded(with_file, settings, dtype, expected):
    filled = with_file(settings, "--dtype", dtype)
    assert filled["data_types"]["grad_accum_dtype"] == expected


@pytest.mark.parametrize(
    "overlaps, alone, together", [("auto", False, True), (True, True, True), (False, False, False)]
)
def test_one_rank_overlaps_nothing_unless_it_is_told_to(with_file, overlaps, alone, together):
    for ranks, expected in ((1, alone), (7, together)):
        assert with_file(zero(overlap_comm=overlaps), ranks=ranks)["zero_optimization"]["overlap_comm"] is expected


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="deepspeed='nowhere.json': No such file"):
        engine_config(config("--deepspeed", "nowhere.json"), 1, CPU)
