"""Loading, and what identifies a model."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import free_port, write_model
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, Qwen2Config

from grpo.config.errors import ConfigError
from grpo.config.sampling_settings import SharedConfig
from grpo.config.server import ServerConfig
from grpo.model import hub
from grpo.model.fingerprint import describe
from grpo.model.load import (
    SMALLEST_TO_ADVISE,
    advise_bfloat16,
    eos_token_ids,
    float32_weights,
    load_end_ids,
    load_model,
    load_reference,
    load_settings,
    load_tokenizer,
    resolve_dtype,
)
from grpo.model.logprobs import token_logprobs
from grpo.model.trial import make_batcher

CPU = torch.device("cpu")


def load(folder, **options):
    config = SharedConfig(model_name_or_path=str(folder), **options)
    return load_model(config, CPU), load_tokenizer(config)


def test_a_reference_is_frozen_and_in_evaluation_mode(model_folder):
    reference = load_reference(ServerConfig(model_name_or_path=str(model_folder)), CPU)
    assert not reference.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert reference.dtype == torch.float32 and load(model_folder, dtype="bfloat16")[0].dtype == torch.bfloat16


def test_no_bar_goes_into_a_log_file(model_folder, tmp_path, capsys):
    model, _ = load(model_folder)
    model.save_pretrained(tmp_path)
    assert "it/s" not in capsys.readouterr().err


def test_dropout_is_off_also_in_training(tmp_path, tokenizer):
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load(tmp_path)[0].train()
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "not a name!"])
def test_a_model_that_is_not_there_is_named(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"model_name_or_path=.* cannot be loaded .*: give a local folder, or a hub"):
        load_tokenizer(SharedConfig(model_name_or_path=name))


KERNEL = "its config.json names an attention kernel of the hub (someone/kernel), which is code that would run here: "


@pytest.mark.parametrize("inner", [False, True])
def test_an_attention_kernel_of_the_hub_is_remote_code(model_folder, tmp_path, inner):
    settings, kernel = json.loads((model_folder / "config.json").read_text()), "someone/kernel"
    if inner:  # of one part of a model that takes pictures
        settings, kernel = {"model_type": "qwen2_5_vl", "text_config": settings}, {"text_config": kernel}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"attn_implementation": kernel}))
    for read in (load_settings, lambda config: load_model(config, CPU)):
        with pytest.raises(ConfigError, match=f"^model_name_or_path='{tmp_path}': {re.escape(KERNEL)}take attn_impl"):
            read(SharedConfig(model_name_or_path=str(tmp_path)))
    load_settings(SharedConfig(model_name_or_path=str(tmp_path), trust_remote_code=True))


def test_a_weights_file_that_was_cut_short_is_refused(model_folder, tmp_path):
    load(model_folder)[0].save_pretrained(tmp_path, max_shard_size="300KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    os.truncate(shard, 1000)
    refused = re.escape(f"model_name_or_path='{tmp_path}': its weights are damaged (")
    with pytest.raises(ConfigError, match=rf"^{refused}.*\): copy or download it again$"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("./nope", "there is no such file or folder: correct the path, or give a hub id"),
        ("/no/such/folder", "there is no such file or folder"),
        ("runs/nope", "there is no such file or folder"),
        ("nobody/run/model", "there is no such file or folder"),
        ("made", "it is no folder with config.json: name the folder of a model, such as RUN/model"),
        ("made/file", "it is no folder with config.json: name the folder of a model"),
    ],
)
def test_a_path_is_never_looked_up_on_the_hub(monkeypatch, tmp_path, name, reason):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "made/file").touch()
    expected = f"model_name_or_path='{name}': {reason}"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        load_tokenizer(SharedConfig(model_name_or_path=name))


def test_a_hub_out_of_reach_is_tried_once(monkeypatch, caplog):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{free_port()}")
    hub.is_hub_reachable.cache_clear()
    for _ in range(2):
        with pytest.raises(ConfigError, match="model_name_or_path='nobody/model': cannot be loaded"):
            load_tokenizer(SharedConfig(model_name_or_path="nobody/model"))
    (message,) = caplog.messages
    assert re.fullmatch(r"http://127.*Connection refused\): only what its cache holds is used", message)
    hub.is_hub_reachable.cache_clear()


def test_a_model_too_large_for_the_memory_is_named(monkeypatch, model_folder):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.25 GiB")

    monkeypatch.setattr("transformers.PreTrainedModel.to", no_room)
    with pytest.raises(ConfigError, match="model_name_or_path='.*tiny': out of memory: free .*, or use dtype bfloat16"):
        load(model_folder)


def test_a_missing_pad_token_is_the_eos_and_a_tokenizer_without_eos_is_refused(tmp_path, model_folder):
    tokenizer, config = AutoTokenizer.from_pretrained(model_folder), SharedConfig(model_name_or_path=str(tmp_path))
    shutil.copy(model_folder / "config.json", tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(config)
    assert loaded.pad_token_id == loaded.eos_token_id
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no eos token"):
        load_tokenizer(config)


@pytest.mark.parametrize("ends", [[7], [7, 8], []])
@pytest.mark.parametrize("file", ["whole", "damaged", "none"])
def test_the_ids_that_end_a_completion_are_known_before_the_model_is_loaded(model_folder, tmp_path, ends, file):
    model, tokenizer = load(model_folder)
    model.generation_config.eos_token_id = model.config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    if file == "damaged":
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": ')
    elif file == "none":
        (tmp_path / "generation_config.json").unlink()
    model, tokenizer = load(tmp_path)
    config = SharedConfig(model_name_or_path=str(tmp_path))
    assert load_end_ids(config, load_settings(config), tokenizer) == eos_token_ids(model, tokenizer)
    assert eos_token_ids(model, tokenizer) == sorted({tokenizer.eos_token_id, *ends})


def test_fingerprints_follow_weights_and_tokenizer_not_names_and_dtypes(tmp_path, model_folder):
    here = describe(*load(model_folder), "here")
    copy = write_model(tmp_path / "copy", seed=0)
    assert describe(*load(copy), "there").fingerprint == here.fingerprint
    assert describe(*load(model_folder, dtype="bfloat16"), "x").fingerprint == here.fingerprint
    other = describe(*load(write_model(tmp_path / "other", seed=1)), "other")
    assert other.fingerprint != here.fingerprint
    assert other.tokenizer_fingerprint == here.tokenizer_fingerprint
    assert (here.vocab_size, here.max_length) == (load(model_folder)[0].config.vocab_size, 512)

    words = json.loads((copy / "tokenizer.json").read_text())
    first, second = list(words["model"]["vocab"])[50:52]
    ids = words["model"]["vocab"]
    ids[first], ids[second] = ids[second], ids[first]
    (copy / "tokenizer.json").write_text(json.dumps(words))
    assert describe(*load(copy), "x").tokenizer_fingerprint != here.tokenizer_fingerprint


def test_the_text_fingerprint_shows_what_an_equal_vocabulary_hides(model_folder):
    model, tokenizer = load(model_folder)
    here = describe(model, tokenizer, "here")
    assert describe(model, load(model_folder)[1], "there").text_fingerprint == here.text_fingerprint
    changed = [load(model_folder)[1] for _ in range(3)]
    changed[0].backend_tokenizer.normalizer = normalizers.Lowercase()
    changed[1].backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    changed[2].add_special_tokens({"additional_special_tokens": [next(iter(tokenizer.get_vocab()))]})
    for other in changed:
        there = describe(model, other, "there")
        assert there.tokenizer_fingerprint == here.tokenizer_fingerprint
        assert there.text_fingerprint != here.text_fingerprint
    renamed = load(model_folder)[1]
    renamed.eos_token = renamed.pad_token
    assert describe(model, renamed, "x").text_fingerprint == here.text_fingerprint, "a base model ends elsewhere"


def test_a_fingerprint_does_not_follow_what_changes_no_log_prob(tmp_path, model_folder):
    model, tokenizer = load(write_model(tmp_path / "copy", seed=0))
    here = describe(*load(model_folder), "here").fingerprint
    config = model.config
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 7, 8, [9, 10]
    assert describe(model, tokenizer, "x").fingerprint == here
    config.text_config = {"dtype": "float32", "pad_token_id": 1, "rope_theta": 5.0}  # as in models of images and text
    inner = describe(model, tokenizer, "x").fingerprint
    config.text_config = {"dtype": "bfloat16", "pad_token_id": 2, "rope_theta": 5.0}
    assert describe(model, tokenizer, "x").fingerprint == inner
    config.text_config["rope_theta"] = 6.0
    assert describe(model, tokenizer, "x").fingerprint != inner


SEQUENCES = [([5, 6, 7], [8, 9, 10, 11]), ([5, 6, 7], [12, 13])]


def scores(model) -> torch.Tensor:
    with torch.inference_mode():
        return token_logprobs(model, make_batcher(model, 0).make(SEQUENCES, model.device), 1.0)[0]


def test_device_map_auto_gives_the_same_logprobs(model_folder):
    pytest.importorskip("accelerate")
    spread = load_reference(ServerConfig(model_name_or_path=str(model_folder), device_map="auto"), CPU)
    torch.testing.assert_close(scores(spread), scores(load(model_folder)[0]))
    assert describe(spread, load(model_folder)[1], "x").device == "cpu"
    assert not any(parameter.requires_grad for parameter in spread.parameters())


def test_a_model_in_parts_that_wait_on_different_devices_is_packed_too(model_folder, tmp_path):
    """Each layer's weights come from disk when it is their turn: the hooks of a model over several devices."""
    accelerate = pytest.importorskip("accelerate")
    model = load(model_folder)[0]
    expected = scores(model)
    parts = {name: "cpu" for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")}
    parts |= {f"model.layers.{layer}": ("disk", "cpu")[layer % 2] for layer in range(len(model.model.layers))}
    spread = accelerate.dispatch_model(model, parts, main_device="cpu", offload_dir=str(tmp_path))
    assert make_batcher(spread, 0).packs
    torch.testing.assert_close(scores(spread), expected)


def test_weights_in_8_bits_give_nearly_the_same_logprobs(model_folder):
    pytest.importorskip("accelerate")
    pytest.importorskip("bitsandbytes")
    exact = scores(load(model_folder)[0])
    model = load_reference(ServerConfig(model_name_or_path=str(model_folder), quantization="8bit"), CPU)
    assert {"Linear8bitLt", "Linear"} <= {type(part).__name__ for part in model.modules()}  # the head stays as it is
    error = (scores(model) - exact).abs()
    assert 0 < error.mean() < 0.2 and make_batcher(model, 0).packs


@pytest.mark.parametrize(
    "options, package", [({"device_map": "auto"}, "accelerate"), ({"quantization": "4bit"}, "bits")]
)
def test_a_missing_package_is_named(model_folder, monkeypatch, options, package):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith(package) else found(name))
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*{package}.* is not installed: pip install"):
        load_reference(ServerConfig(model_name_or_path=str(model_folder), **options), CPU)


@pytest.mark.parametrize("major, expected", [(7, torch.float32), (8, torch.bfloat16), (None, torch.bfloat16)])
def test_bfloat16_is_chosen_where_a_gpu_has_units_for_it(monkeypatch, major, expected):
    """torch also counts an emulation. None is a machine without a GPU, that asks what one would need."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: major is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    assert resolve_dtype(SharedConfig(), torch.device("cuda")) == expected
    assert resolve_dtype(SharedConfig(), torch.device("cpu")) == torch.float32
    assert resolve_dtype(SharedConfig(dtype="bfloat16"), torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize("size, files", [("1GB", 1), ("50KB", 5)])
def test_weights_in_float32_are_found_in_one_file_and_in_several(model, tmp_path, size, files):
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert len([*tmp_path.glob("*.safetensors")]) >= files
    found = dict(float32_weights(str(tmp_path)))
    assert {*found} == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(found[name], weight) for name, weight in model.named_parameters())


def test_a_model_in_bfloat16_has_no_weights_in_float32(model_folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert not [*float32_weights(str(tmp_path))]


def test_bfloat16_is_advised_by_the_time_of_a_product_and_never_for_a_small_model(caplog):
    caplog.set_level("INFO")
    random_numbers = torch.get_rng_state()
    advise_bfloat16(Qwen2Config(hidden_size=SMALLEST_TO_ADVISE - 1))
    assert not caplog.messages
    advise_bfloat16(Qwen2Config(hidden_size=896))
    ratios = [float(re.search(r"([0-9.]+) times as fast in bfloat16", line)[1]) for line in caplog.messages]
    assert all(ratio >= 1.5 for ratio in ratios)
    assert len(ratios) <= 1  # on a CPU without instructions for bfloat16 none
    assert torch.equal(torch.get_rng_state(), random_numbers)
