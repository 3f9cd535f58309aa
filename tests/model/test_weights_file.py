"""A file of weights, against what safetensors itself reads and writes; and files that are not what they say."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file, save

from grpo.model import weights_file as module
from grpo.model.weights_file import WeightsFile, named_weights, sample, write_weights
from grpo.wire.tensors import HeaderError

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.half": torch.linspace(-1, 1, 7).bfloat16(),
    "empty": torch.empty(0, 5),
    "one": torch.tensor(2.5),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a tensor has several of them."""
    monkeypatch.setattr(module, "_BLOCK", 5)


def test_safetensors_reads_what_was_written_and_the_digest_is_the_files(tmp_path):
    digest = write_weights(tmp_path / "w", TENSORS)
    assert digest == hashlib.sha256((tmp_path / "w").read_bytes()).hexdigest()
    for name, tensor in load_file(tmp_path / "w").items():
        assert tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name])


def test_another_dtype_and_a_change_on_the_way(tmp_path):
    write_weights(
        tmp_path / "w", TENSORS, torch.float32, lambda name, part, values: values + len(values) * (name == "a")
    )
    read = load_file(tmp_path / "w")
    assert all(tensor.dtype == torch.float32 for tensor in read.values())
    assert torch.equal(read["b.half"], TENSORS["b.half"].float())
    added = torch.tensor([5.0] * 10 + [2.0] * 2).reshape(3, 4)
    assert torch.equal(read["a"], TENSORS["a"] + added)


def test_parts_are_read_as_slices_of_the_flat_tensor(tmp_path):
    (tmp_path / "w").write_bytes(save(TENSORS))
    with open(tmp_path / "w", "rb") as file:
        read = WeightsFile(file, (tmp_path / "w").stat().st_size)
        for name, tensor in TENSORS.items():
            assert read.entries[name].shape == tuple(tensor.shape)
            for part in (slice(None), slice(2, 6), slice(1, 100), slice(0, None, 3), sample(tensor.numel())):
                assert torch.equal(read.read(name, part), tensor.flatten()[part])


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 1000])
def test_a_sample_is_of_the_whole_tensor_and_64_at_most(count):
    picked = list(range(count)[sample(count)])
    assert len(picked) == min(count, 64) and picked[:1] == [0][:count]
    assert count == 0 or picked[-1] + 1 >= count // 2


def test_a_models_weights_are_what_save_pretrained_saves(model, tmp_path):
    model.save_pretrained(tmp_path)
    saved, named = load_file(tmp_path / "model.safetensors"), named_weights(model)
    assert saved.keys() == named.keys() and "lm_head.weight" not in named  # it is tied
    assert all(torch.equal(saved[name], tensor) for name, tensor in named.items())


def test_a_header_that_is_not_there_or_far_too_long_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    with open(tmp_path / "empty", "rb") as file, pytest.raises(HeaderError, match="shorter"):
        WeightsFile(file, 0)
    text = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    for length in (1000, 2**40):
        (tmp_path / "w").write_bytes(length.to_bytes(8, "little") + text + bytes(8))
        said = f"a header of {length} bytes; {len(text) + 8} are the most"
        with open(tmp_path / "w", "rb") as file, pytest.raises(HeaderError, match=said):
            WeightsFile(file, 8 + len(text) + 8)
