"""A run's files read back: whole, half written, damaged, repeated, missing, far too many completions and pictures."""

import base64
import io
import itertools
import json
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import LAUGHS
from hypothesis import given, settings
from hypothesis import strategies as st
from pictured import drawing, encoded
from PIL import Image
from recorded import completion, write

from grpo.config.errors import ConfigError
from grpo.report.read import (
    LARGEST_FILE,
    LONGEST_SIDE,
    LONGEST_TEXT,
    STEP_COMPLETIONS,
    read_completions,
    read_pictures,
    read_run,
)

METRICS = [{"step": 1, "reward": 1}]


def recorded(folder, completions, pictures: dict[str, bytes] | None = None):
    """Return a run with pictures, and its blocks of completions, of which all have room."""
    write(folder, METRICS, completions)
    (folder / "pictures").mkdir()
    for name, data in (pictures or {}).items():
        (folder / "pictures" / name).write_bytes(data)
    run = read_run(folder)
    return run, read_completions(run, 10**6)


def test_numbers_come_back_by_step_and_what_is_no_finite_number_is_missing(tmp_path):
    second = {"step": 1, "reward": 1, "kl": None, "name": "x", "flag": True, "huge": 10**400}
    write(tmp_path, [{"step": 0, "eval_accuracy": 0.5}, second])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "reward": NaN, "kl": 1e999, "loss": -0.5}\n')
    run = read_run(tmp_path)
    assert run.rows == {0: {"eval_accuracy": 0.5}, 1: {"reward": 1.0}, 2: {"loss": -0.5}}
    assert run.names == ["eval_accuracy", "reward", "loss"] and run.settings == {"max_steps": 3} and run.notes == []


def test_damaged_and_half_written_lines_are_counted_and_left_out(tmp_path):
    write(tmp_path, [{"step": 1, "reward": 0.1}])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "rew\n[]\n{"step": -1}\n{"step": true}\n{"reward": 1}\n\xff\x00\n' + b"[" * 100_000)
        file.write(b'\n{"step": 3, "reward": 0.3}\n')
    half = b'{"step": 4, "reward": 0.4}'
    for size in range(len(half) + 1):
        with open(tmp_path / "metrics.jsonl", "ab") as file:
            file.write(half[:size][-1:])
        run, count = read_run(tmp_path), 7 + (0 < size < len(half))
        assert list(run.rows) == ([1, 3] if size < len(half) else [1, 3, 4])
        damaged = "damaged or half-written lines of metrics.jsonl are left out: 2, 3, 4, 5, 6, ..."
        assert run.notes == [f"{damaged} ({count} in all)"]


def test_of_a_step_that_is_there_twice_the_last_counts_and_half_a_completion_is_left_out(tmp_path):
    write(
        tmp_path,
        [{"step": step, "reward": reward} for step, reward in ((1, 1), (2, 2), (3, 3), (2, 20), (3, 30))],
        [completion(step, completion=text) for step, text in ((1, "a"), (2, "b"), (3, "c"), (2, "B"), (3, "C"))],
    )
    with open(tmp_path / "completions.jsonl", "a") as file:
        file.write('{"step": 4, "rew')
    run = read_run(tmp_path)
    assert {step: row["reward"] for step, row in run.rows.items()} == {1: 1, 2: 20, 3: 30}
    assert run.notes == ["steps that metrics.jsonl has more than once: 2; the last line of each is taken"]
    shown = [(block["step"], block["groups"][0]["completions"][0]["text"]) for block in read_completions(run, 10**6)]
    assert shown == [(1, "a"), (2, "B"), (3, "C")]
    assert run.notes[1:] == ["damaged or half-written lines of completions.jsonl are left out: 6 (1 in all)"]


def test_what_is_no_run_is_refused_and_what_is_missing_said(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "begun", [])
    reasons = dict.fromkeys(["nothing", "file", "empty"], "there is no metrics.jsonl of a run: name a folder that")
    for name, reason in (reasons | {"begun": "metrics.jsonl has no step yet"}).items():
        with pytest.raises(ConfigError, match=f"^runs='{tmp_path / name}': {reason}"):
            read_run(tmp_path / name)
    unknown = "config.yaml is missing or cannot be read: the settings are unknown"
    bare = read_run(write(tmp_path / "bare", METRICS, settings=None))
    assert read_completions(bare, 10**6) == [] and bare.settings == {}
    assert bare.notes == [unknown, "there is no completions.jsonl: no completions are shown"]
    for broken in ("a: [", "- 1", "\x00", "a: &a [*a]", "? [1]\n: 2", LAUGHS):
        assert read_run(write(tmp_path / "broken", METRICS, settings=broken)).notes == [unknown]


def test_completions_are_grouped_by_prompt_and_keep_their_facts(tmp_path):
    rows = [completion(0, "eval", prompt=f"q{place}", correct=place == 1, reward=None) for place in range(2)]
    logged = {"extracted": "x" * 300, "parts": [1, 2], "none": None}
    rows += [completion(1, advantage=sign * 0.5, completion={"not": "text"}, **logged) for sign in (1, -1)]
    _, blocks = recorded(tmp_path, rows)
    assert [(block["step"], block["phase"], block["left_out"]) for block in blocks] == [(0, "eval", 0), (1, "train", 0)]
    assert [group["prompt"] for group in blocks[0]["groups"]] == ["q0", "q1"]
    facts = [group["completions"][0]["facts"] for group in blocks[0]["groups"]]
    assert facts == [{"correct": False}, {"correct": True}]
    (group,) = blocks[1]["groups"]
    assert [shown["facts"] for shown in group["completions"]] == [
        {"reward": 1.0, "advantage": sign, "extracted": "x" * 200} for sign in (0.5, -0.5)
    ]
    assert group["completions"][0]["text"] == '{"not": "text"}'


def test_a_conversation_keeps_who_wrote_what(tmp_path):
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": "pen"}}}
    messages = [
        {"role": "assistant", "content": "I ask.", "tool_calls": [call]},
        {"role": "tool", "name": "price", "content": "7"},
        {"role": "assistant", "content": "It is 7." + "x" * LONGEST_TEXT},
    ]
    _, blocks = recorded(tmp_path, [completion(1, messages=messages), completion(1)])
    first, second = blocks[0]["groups"][0]["completions"]
    assert [segment["role"] for segment in first["segments"]] == ["assistant", "tool price", "assistant"]
    texts = [segment["text"] for segment in first["segments"]]
    assert texts[:2] == ['I ask.\nprice({"item": "pen"})', "7"]
    assert texts[2].startswith("It is 7.x") and "8 characters are left out" in texts[2]
    assert "segments" not in second and "messages" not in {**first["facts"], **second["facts"]}


def test_a_long_text_keeps_its_beginning_and_its_end(tmp_path):
    text = "".join(random.Random(0).choices("abcdefgh \n", k=3 * LONGEST_TEXT))
    _, blocks = recorded(tmp_path, [completion(1, completion=text)])
    shown = blocks[0]["groups"][0]["completions"][0]["text"]
    head, tail = shown.split(f"\n[… {2 * LONGEST_TEXT:,} characters are left out here …]\n")
    assert text.startswith(head) and text.endswith(tail) and len(head + tail) == LONGEST_TEXT


def test_a_step_shows_its_first_completions_and_counts_the_others(tmp_path):
    _, (block,) = recorded(tmp_path, [completion(1, completion=str(place)) for place in range(STEP_COMPLETIONS + 6)])
    texts = [shown["text"] for shown in block["groups"][0]["completions"]]
    assert texts == [str(number) for number in range(STEP_COMPLETIONS)] and block["left_out"] == 6


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1_000, 100_000), st.randoms(use_true_random=False))
def test_steps_are_left_out_evenly_but_never_the_first_and_the_last(steps, copies, size, chance):
    with tempfile.TemporaryDirectory() as folder:
        texts = {step: "x" * chance.randrange(2000) for step in range(1, steps + 1)}
        rows = [completion(step, completion=texts[step]) for step in texts for _ in range(copies)]
        run = read_run(write(Path(folder), METRICS, rows))
        blocks = read_completions(run, size)
    shown = [block["step"] for block in blocks]
    assert shown[0] == 1 and shown[-1] == steps and shown == sorted(set(shown))
    assert len(json.dumps(blocks)) <= max(size, 2 * copies * 2300) + 200 * len(blocks)
    assert all(len(block["groups"][0]["completions"]) == copies and block["left_out"] == 0 for block in blocks)
    if sum(len(json.dumps(row)) + 1 for row in rows) <= size:
        assert len(blocks) == steps and run.notes == []
    if len(blocks) < steps:
        assert run.notes == [f"completions of {len(blocks)} of {steps} training steps are shown, evenly chosen"]
        gaps = [after - before for before, after in itertools.pairwise(shown)]
        assert len({*gaps[:-1]}) <= 1 and gaps[-1] <= gaps[0]


def test_a_group_has_its_own_pictures(tmp_path):
    """Two problems of one text and one answer are told apart by them."""
    completions = [completion(1, pictures=[name]) for name in ("a.png", "a.png", "b.jpg")] + [completion(1)]
    files = {"a.png": drawing(24, 16, 0), "b.jpg": drawing(24, 16, 1, "JPEG")}
    run, blocks = recorded(tmp_path, completions, files)
    groups = [(group.get("pictures"), len(group["completions"])) for group in blocks[0]["groups"]]
    assert groups == [(["a.png"], 2), (["b.jpg"], 1), (None, 1)]
    kinds = {"a.png": "png", "b.jpg": "jpeg"}
    urls = {name: f"data:image/{kinds[name]};base64,{base64.b64encode(files[name]).decode()}" for name in files}
    assert read_pictures(run, blocks, 10**6) == urls
    assert run.notes == []


def test_a_large_picture_is_made_smaller(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (600, 1200, 3), np.uint8)
    file = encoded(Image.fromarray(noise).resize((2400, 1200)))
    run, blocks = recorded(tmp_path, [completion(1, pictures=["a.png"])], {"a.png": file})
    (url,) = read_pictures(run, blocks, 10**6).values()
    small = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert len(file) > LARGEST_FILE and small.size == (LONGEST_SIDE, LONGEST_SIDE // 2)


def test_what_is_not_there_or_no_picture_is_left_out_and_said(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(drawing(8, 8, 0))
    names = ["../../secret.png", str(secret), "config.yaml", 7, None]
    completions = [completion(1, pictures=names), completion(2, pictures=["gone.png", "bad.png"])]
    run, blocks = recorded(tmp_path / "run", completions, {"bad.png": b"x" * 2 * LARGEST_FILE})
    assert [block["groups"][0].get("pictures") for block in blocks] == [None, ["gone.png", "bad.png"]]
    assert read_pictures(run, blocks, 10**6) == {}
    assert run.notes == ["0 of 2 pictures are shown"]


def test_where_not_all_fit_those_of_training_are_left_out_evenly(tmp_path):
    files = {f"{place}.png": drawing(40, 40, place) for place in range(30)}
    completions = [completion(step, pictures=[f"{step}.png"]) for step in range(1, 25)]
    held_out = [completion(step, "eval", pictures=[f"{25 + place}.png"]) for step in (0, 9) for place in range(5)]
    run, blocks = recorded(tmp_path, completions + held_out, files)
    whole = sum(map(len, read_pictures(run, blocks, 10**6).values()))
    assert run.notes == []
    urls = read_pictures(run, blocks, whole // 2)
    assert sum(map(len, urls.values())) <= whole // 2 + 30 * 24
    assert {f"{25 + place}.png" for place in range(5)} < set(urls) and {"1.png", "24.png"} < set(urls)
    assert run.notes == [f"{len(urls)} of 29 pictures are shown"]
