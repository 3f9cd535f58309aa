"""A delta leads from one weights file to another, to the bit, or is refused."""

import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from grpo.pool import delta as module
from grpo.pool.delta import DeltaError, apply_delta, make_delta, sha256_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("delta")


@pytest.fixture
def small_blocks(monkeypatch):
    """A file of some hundred words has several blocks."""
    monkeypatch.setattr(module, "_BLOCK", 64)


def write(folder, old: np.ndarray, new: np.ndarray):
    """Save both as weights files; return their paths and the delta's."""
    for name, words in (("old", old), ("new", new)):
        save_file({"weight": words}, folder / name, {"format": "pt"})
    return folder / "old", folder / "new", folder / "delta"


def goes_round(folder, old: np.ndarray, new: np.ndarray) -> int:
    """Assert that the delta leads from old to new; return its bytes."""
    old_path, new_path, delta = write(folder, old, new)
    length = make_delta(old_path, new_path, delta=delta, limit=10**9)
    assert length == delta.stat().st_size
    result = folder / "result"
    apply_delta(old_path, delta, new=result, sha256=sha256_of(new_path))
    assert result.read_bytes() == new_path.read_bytes()
    return length


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 400),
    st.sampled_from([1, 2, 10, 10_000, 65535]),  # how far a word may move
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),  # share of changed words
    st.integers(0, 2**32 - 1),
    st.sampled_from([np.float16, np.float32]),
)
def test_a_delta_leads_from_any_file_to_any_other(folder, small_blocks, pairs, most, share, seed, dtype):
    rng, count = np.random.default_rng(seed), 2 * pairs
    old = rng.integers(0, 2**16, count, np.uint16)
    moves = rng.integers(0, most + 1, count).astype(np.uint16) * (rng.random(count) < share)
    new = np.where(rng.random(count) < 0.5, old + moves, old - moves).astype(np.uint16)
    goes_round(folder, old.view(dtype), new.view(dtype))


def test_blocks_are_joined_where_they_meet_and_gaps_have_any_length(folder):
    old = np.zeros(2 * module._BLOCK + 3, np.uint16)
    for places in ([], [0], [len(old) - 1], [module._BLOCK - 1, module._BLOCK], [100, 70_000], [*range(2000)]):
        new = old.copy()
        new[places] = 7
        assert goes_round(folder, old, new) < 1000


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_delta_is_small_where_weights_move_to_their_neighbours(folder, share):
    rng = np.random.default_rng(0)
    old = rng.normal(0, 0.02, 200_000).astype(np.float16)
    moved = rng.random(len(old)) < share
    new = np.where(moved, np.nextafter(old, np.where(rng.random(len(old)) < 0.5, np.inf, -np.inf)), old)
    length = goes_round(folder, old, new.astype(np.float16))
    assert length < old.nbytes * (1 / 60 if share == 0.01 else 0.3)


def test_a_delta_above_the_limit_is_not_made(folder):
    old, new = np.random.default_rng(0).integers(0, 2**16, (2, 10_000), np.uint16)
    length = goes_round(folder, old, new)
    old_path, new_path, delta = write(folder, old, new)
    assert make_delta(old_path, new_path, delta=delta, limit=length) == length
    delta.unlink()
    assert make_delta(old_path, new_path, delta=delta, limit=length - 1) is None
    assert not delta.exists() and not [*folder.glob("*.unfinished")]


def test_every_damaged_byte_is_refused_or_harmless(folder, small_blocks):
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 200, np.uint16)
    new = np.where(rng.random(200) < 0.2, old + 1, old).astype(np.uint16)
    old_path, new_path, delta = write(folder, old, new)
    make_delta(old_path, new_path, delta=delta, limit=10**9)
    good, damaged, result = delta.read_bytes(), folder / "damaged", folder / "untouched"
    sha256, expected = sha256_of(new_path), new_path.read_bytes()
    places = range(len(good))
    wrongs = [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in places]
    wrongs += [good[:length] for length in places[::3]] + [b"\xff" * 8]
    refused = 0
    for wrong in wrongs:
        damaged.write_bytes(wrong)
        result.write_bytes(b"as it was")
        try:
            apply_delta(old_path, damaged, new=result, sha256=sha256)
        except DeltaError as error:
            refused += 1
            assert str(error).startswith(f"{damaged}: ")
            assert result.read_bytes() == b"as it was"
        else:
            assert result.read_bytes() == expected
    assert refused > 0.95 * len(wrongs)
    assert not [*folder.glob("*.unfinished")]


def test_a_delta_from_or_to_another_file_or_of_another_format_is_refused(folder):
    old, new, delta = write(folder, np.zeros(100, np.uint16), np.ones(100, np.uint16))
    make_delta(old, new, delta=delta, limit=10**9)
    for start, sha256 in ((new, sha256_of(new)), (old, sha256_of(old))):
        with pytest.raises(DeltaError, match="damaged, or not from .*the result has another SHA-256"):
            apply_delta(start, delta, new=folder / "none", sha256=sha256)
    delta.write_bytes(delta.read_bytes().replace(b'"format": 2', b'"format": 1'))
    with pytest.raises(DeltaError, match="no delta of format 2, which this program reads"):
        apply_delta(old, delta, new=folder / "none", sha256=sha256_of(new))
    assert not (folder / "none").exists()


@pytest.mark.parametrize(
    ("length", "data"),
    [
        (None, zlib.compress(bytes(1 << 25))),  # 32 MB out of 32 kB
        (None, zlib.compress(bytes(19))),  # no whole number of words
        (None, zlib.compress(b"\xff" * 6)),  # a place beyond the block's end
        (None, b"no stream"),
        (2**32 - 1, b""),
    ],
)
def test_a_strangers_delta_fills_neither_memory_nor_disk(folder, length, data):
    old, new, delta = write(folder, np.zeros(1000, np.uint16), np.ones(1000, np.uint16))
    delta.write_bytes(module._HEADER + (length or len(data)).to_bytes(4, "little") + data)
    tracemalloc.start()
    with pytest.raises(DeltaError, match="damaged, or not from"):
        apply_delta(old, delta, new=folder / "none", sha256=sha256_of(new))
    assert tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()
    assert not (folder / "none").exists() and not [*folder.glob("*.unfinished")]


def test_memory_does_not_grow_with_the_files(folder, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 1 << 14)
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 4 << 20, np.uint16)  # 8 MB
    old_path, new_path, delta = write(folder, old, old ^ (rng.random(len(old)) < 0.1))
    tracemalloc.start()
    make_delta(old_path, new_path, delta=delta, limit=10**9)
    apply_delta(old_path, delta, new=folder / "result", sha256=sha256_of(new_path))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert (folder / "result").read_bytes() == new_path.read_bytes()
