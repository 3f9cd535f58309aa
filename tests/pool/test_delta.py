"""A delta leads from one weights file to another, to the bit, or is refused."""

import hashlib
import json
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from grpo.pool import delta as module
from grpo.pool.delta import DeltaError, apply_delta, make_delta, sha256_of

DTYPES = (np.float16, np.float32)


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
    length = make_delta(old_path, new_path, delta)
    assert length == delta.stat().st_size
    result = folder / "result"
    result.unlink(missing_ok=True)
    sha256 = apply_delta(old_path, delta, result)
    assert result.read_bytes() == new_path.read_bytes()
    assert sha256 == hashlib.sha256(new_path.read_bytes()).hexdigest()
    return length


words = st.integers(0, 400).flatmap(
    lambda count: st.tuples(
        st.sampled_from([1, 2, 10, 10_000, 65535]),  # how far a word may move
        st.sampled_from([0.0, 0.01, 0.3, 1.0]),  # share of changed words
        st.integers(0, 2**32 - 1),
        st.just(count * 2),
    )
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words, st.sampled_from(DTYPES))
def test_a_delta_leads_from_any_file_to_any_other(folder, small_blocks, case, dtype):
    most, share, seed, count = case
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 2**16, count, np.uint16)
    moves = rng.integers(0, most + 1, count).astype(np.uint16) * (rng.random(count) < share)
    new = np.where(rng.random(count) < 0.5, old + moves, old - moves).astype(np.uint16)
    goes_round(folder, old.view(dtype), new.view(dtype))


@pytest.mark.parametrize("gap", [0, 1, 65534, 65535, 65536, 131070, 200_000])
def test_gaps_of_any_length_come_back(folder, gap):
    old = np.zeros(gap + 300_001, np.uint16)
    new = old.copy()
    new[[100, 101 + gap]] = 1, 65535
    assert goes_round(folder, old, new) < 300
    goes_round(folder, old[: gap + 102], new[: gap + 102])  # the last word changes


def test_blocks_are_joined_where_they_meet(folder):
    old = np.zeros(2 * module._BLOCK + 3, np.uint16)
    for places in ([], [0], [len(old) - 1], [module._BLOCK - 1, module._BLOCK], [*range(2000)]):
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
    rng = np.random.default_rng(0)
    old, new = rng.integers(0, 2**16, (2, 10_000), np.uint16)
    paths = write(folder, old, new)
    length = make_delta(*paths)
    assert make_delta(*paths, limit=length) == length
    paths[2].unlink()
    assert make_delta(*paths, limit=length - 1) is None
    assert not paths[2].exists() and not [*folder.glob("*.unfinished")]


def test_files_of_other_tensors_have_no_delta(folder):
    numbers = np.arange(8, dtype=np.uint16)
    for new in (numbers[:4], numbers.reshape(2, 4)):
        with pytest.raises(DeltaError, match="has other tensors"):
            make_delta(*write(folder, numbers, new))
    with pytest.raises(DeltaError, match=" bytes are not 16-bit words"):
        make_delta(*write(folder, np.zeros(3, np.uint8), np.ones(3, np.uint8)))
    paths = write(folder, numbers, numbers)
    for path in paths[:2]:
        path.write_bytes(b"text")
    with pytest.raises(DeltaError, match="not safetensors"):
        make_delta(*paths)


def test_every_damaged_byte_is_refused_or_harmless(folder, small_blocks):
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 200, np.uint16)
    new = np.where(rng.random(200) < 0.2, old + 1, old).astype(np.uint16)
    old_path, new_path, delta = write(folder, old, new)
    make_delta(old_path, new_path, delta)
    good, damaged, result = delta.read_bytes(), folder / "damaged", folder / "untouched"
    sha256s, expected = [sha256_of(path) for path in (old_path, new_path)], new_path.read_bytes()
    places = range(len(good))
    wrongs = [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in places]
    wrongs += [good[:length] for length in places[::3]] + [good + b"\0", b"\xff" * 8, b"\5" + bytes(7) + b"[" * 5]
    refused = 0
    for wrong in wrongs:
        damaged.write_bytes(wrong)
        result.write_bytes(b"as it was")
        try:
            apply_delta(old_path, damaged, result, *sha256s)
        except DeltaError as error:
            refused += 1
            assert str(error).startswith(f"{damaged}: cannot be applied: ")
            assert result.read_bytes() == b"as it was"
        else:
            assert result.read_bytes() == expected
    assert refused > 0.95 * len(wrongs)
    assert not [*folder.glob("*.unfinished")]


def test_a_delta_from_or_to_another_file_is_refused(folder):
    paths = write(folder, np.zeros(100, np.uint16), np.ones(100, np.uint16))
    make_delta(*paths)
    old, new, delta = paths
    for arguments, says in (
        ((new, delta, folder / "none"), "leads from another file than"),
        ((old, delta, folder / "none", "a" * 64), "leads from another file than"),
        ((old, delta, folder / "none", None, "a" * 64), "leads to another file than .*aaaa"),
        ((new, delta, folder / "none", sha256_of(old)), "the result has another SHA-256"),
    ):
        with pytest.raises(DeltaError, match=says):
            apply_delta(*arguments)
    assert not (folder / "none").exists()


def forged(folder, paths, counts, data: bytes):
    """A delta with an honest header and one block of a stranger's."""
    make_delta(*paths)
    text = paths[2].read_bytes()
    head = text[: 8 + int.from_bytes(text[:8], "little")]
    paths[2].write_bytes(head + module._COUNTS.pack(len(data) if counts[0] is None else counts[0], *counts[1:]) + data)


@pytest.mark.parametrize(
    ("counts", "data", "says"),
    [
        ((None, 5, 5), zlib.compress(bytes(1 << 25)), "another length"),  # 32 MB out of 32 kB
        ((None, 5, 5), zlib.compress(bytes(19)), "another length"),
        ((None, 5, 5), zlib.compress(bytes(20)) + b"more", "another length"),
        ((None, 5, 5), zlib.compress(b"\xff" * 20), "has no place"),
        ((None, 1, 1), zlib.compress(b"\xff\xfe\0\0"), "has no place"),
        ((None, 0, 0), zlib.compress(b""), "another SHA-256"),
        ((None, 10**6, 10**6), b"", "too long"),
        ((2**32 - 1, 5, 5), b"", "too long"),
        ((100, 5, 5), b"", "ends early"),
    ],
)
def test_a_strangers_delta_fills_neither_memory_nor_disk(folder, counts, data, says):
    paths = write(folder, np.zeros(1000, np.uint16), np.ones(1000, np.uint16))
    forged(folder, paths, counts, data)
    tracemalloc.start()
    with pytest.raises(DeltaError, match=says):
        apply_delta(paths[0], paths[2], folder / "none")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert not (folder / "none").exists() and not [*folder.glob("*.unfinished")]


def test_a_header_of_another_format_is_refused(folder):
    paths = write(folder, np.zeros(10, np.uint16), np.ones(10, np.uint16))
    for changes, says in (
        ({"format": 2}, "format 2; this program reads 1"),
        ({"size": -1}, "leads from another file"),
        ({"more": 1}, "lacks fields"),
        ({"new": 5}, "another SHA-256"),
    ):
        make_delta(*paths)
        text = paths[2].read_bytes()
        length = int.from_bytes(text[:8], "little")
        head = json.dumps(json.loads(text[8 : 8 + length]) | changes).encode()
        paths[2].write_bytes(len(head).to_bytes(8, "little") + head + text[8 + length :])
        with pytest.raises(DeltaError, match=says):
            apply_delta(paths[0], paths[2], folder / "none")


def test_memory_does_not_grow_with_the_files(folder, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 1 << 14)
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 4 << 20, np.uint16)  # 8 MB
    paths = write(folder, old, old ^ (rng.random(len(old)) < 0.1))
    tracemalloc.start()
    make_delta(*paths)
    apply_delta(paths[0], paths[2], folder / "result")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert (folder / "result").read_bytes() == paths[1].read_bytes()
