"""A run's files read back: whole, half written, damaged, repeated, missing, and far too many completions."""

import itertools
import json
import random
import tempfile
from pathlib import Path

import pytest
from conftest import LAUGHS
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import completion, write

from grpo.config.errors import ConfigError
from grpo.report.read import LONGEST_TEXT, STEP_COMPLETIONS, read_completions, read_run


def test_numbers_come_back_by_step_and_what_is_no_finite_number_is_missing(tmp_path):
    metrics = [
        {"step": 0, "eval_accuracy": 0.5},
        {"step": 1, "reward": 1, "kl": None, "name": "x", "flag": True, "huge": 10**400},
    ]
    write(tmp_path, metrics)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "reward": NaN, "kl": 1e999, "loss": -0.5}\n')
    run = read_run(tmp_path)
    assert run.rows == {0: {"eval_accuracy": 0.5}, 1: {"reward": 1.0}, 2: {"loss": -0.5}}
    assert run.names == ["eval_accuracy", "reward", "loss"] and run.settings == {"max_steps": 3} and run.notes == []


def test_a_line_that_was_cut_off_is_said_and_the_rest_is_read(tmp_path):
    write(tmp_path, [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}])
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for cut in range(1, len(whole)):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:cut])
        first, second = (len(line) for line in whole.splitlines())
        if cut < first:
            with pytest.raises(ConfigError, match="no step yet"):
                read_run(tmp_path)
            continue
        run = read_run(tmp_path)
        assert list(run.rows) == ([1, 2] if cut >= first + 1 + second else [1])
        half = first + 1 < cut < first + 1 + second
        assert ["half written" in note for note in run.notes] == ([True] if half else [])


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    write(tmp_path, [{"step": 1, "reward": 0.1}])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "rew\n[]\n{"step": -1}\n{"step": true}\n{"reward": 1}\n\xff\x00\n' + b"[" * 100_000)
        file.write(b'\n{"step": 3, "reward": 0.3}\n')
    run = read_run(tmp_path)
    assert list(run.rows) == [1, 3]
    assert run.notes == ["damaged lines of metrics.jsonl that are left out: 2, 3, 4, 5, 6, ... (7 in all)"]


def test_of_a_step_that_is_there_twice_the_last_counts(tmp_path):
    write(
        tmp_path,
        [{"step": step, "reward": reward} for step, reward in ((1, 1), (2, 2), (3, 3), (2, 20), (3, 30))],
        [completion(step, completion=text) for step, text in ((1, "a"), (2, "b"), (3, "c"), (2, "B"), (3, "C"))],
    )
    run = read_run(tmp_path)
    assert {step: row["reward"] for step, row in run.rows.items()} == {1: 1, 2: 20, 3: 30}
    assert run.notes == ["steps that metrics.jsonl has more than once: 2; the last line of each is taken"]
    shown = [(block["step"], block["groups"][0]["completions"][0]["text"]) for block in read_completions(run, 10**6)]
    assert shown == [(1, "a"), (2, "B"), (3, "C")]


def test_what_is_no_run_is_refused_and_what_is_missing_said(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    begun = write(tmp_path / "begun", [])
    cases = [
        (tmp_path / "nothing", "there is no such folder: name the folder of a run"),
        (tmp_path / "file", "it is a file: name the folder of a run"),
        (tmp_path / "empty", "it has no metrics.jsonl: name one that the trainer made"),
        (begun, "metrics.jsonl has no step yet"),
    ]
    for folder, message in cases:
        with pytest.raises(ConfigError, match=message) as raised:
            read_run(folder)
        assert str(raised.value).startswith(f"runs='{folder}': ")
    bare = read_run(write(tmp_path / "bare", [{"step": 1, "reward": 1}], settings=None))
    assert read_completions(bare, 10**6) == [] and bare.settings == {}
    assert bare.notes == [
        "there is no config.yaml: its settings are unknown",
        "there is no completions.jsonl: no completions are shown",
    ]
    for broken in ("a: [", "- 1", "\x00", "a: &a [*a]", "? [1]\n: 2", LAUGHS):
        run = read_run(write(tmp_path / "broken", [{"step": 1, "reward": 1}], settings=broken))
        assert run.notes == ["config.yaml cannot be read: its settings are unknown"]


def test_completions_are_grouped_by_prompt_and_keep_their_facts(tmp_path):
    rows = [completion(0, "eval", prompt=f"q{place}", correct=place == 1, reward=None) for place in range(2)]
    logged = {"extracted": "x" * 300, "parts": [1, 2], "none": None}
    rows += [completion(1, advantage=sign * 0.5, completion={"not": "text"}, **logged) for sign in (1, -1)]
    blocks = read_completions(read_run(write(tmp_path, [{"step": 1, "reward": 1}], rows)), 10**6)
    assert [(block["step"], block["phase"], block["left_out"]) for block in blocks] == [(0, "eval", 0), (1, "train", 0)]
    assert [group["prompt"] for group in blocks[0]["groups"]] == ["q0", "q1"]
    assert [group["completions"][0]["facts"] for group in blocks[0]["groups"]] == [
        {"correct": False},
        {"correct": True},
    ]
    (group,) = blocks[1]["groups"]
    assert [shown["facts"] for shown in group["completions"]] == [
        {"reward": 1.0, "advantage": sign, "extracted": "x" * 200} for sign in (0.5, -0.5)
    ]
    assert group["completions"][0]["text"] == '{"not": "text"}'


def test_a_conversation_keeps_who_wrote_what(tmp_path):
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": "pen"}}}
    messages = [
        {"role": "assistant", "content": "I ask.", "tool_calls": [call, "damaged", {"function": 3}]},
        {"role": "tool", "name": "price", "content": "7"},
        "damaged",
        {"role": "assistant", "content": "It is 7." + "x" * LONGEST_TEXT},
    ]
    rows = [completion(1, messages=messages), completion(1, messages="damaged")]
    ((first, second),) = (
        group["completions"]
        for block in read_completions(read_run(write(tmp_path, [{"step": 1, "reward": 1}], rows)), 10**6)
        for group in block["groups"]
    )
    assert [segment["role"] for segment in first["segments"]] == ["assistant", "tool price", "assistant"]
    texts = [segment["text"] for segment in first["segments"]]
    assert texts[:2] == ['I ask.\nprice({"item": "pen"})', "7"]
    assert texts[2].startswith("It is 7.x") and "8 characters are left out" in texts[2]
    assert "segments" not in second and "messages" not in {**first["facts"], **second["facts"]}


def test_a_long_text_keeps_its_beginning_and_its_end(tmp_path):
    text = "".join(random.Random(0).choices("abcdefgh \n", k=3 * LONGEST_TEXT))
    run = read_run(write(tmp_path, [{"step": 1, "reward": 1}], [completion(1, completion=text)]))
    shown = read_completions(run, 10**6)[0]["groups"][0]["completions"][0]["text"]
    head, tail = shown.split(f"\n[… {2 * LONGEST_TEXT:,} characters are left out here …]\n")
    assert text.startswith(head) and text.endswith(tail) and len(head + tail) == LONGEST_TEXT


def test_a_step_shows_its_first_completions_and_counts_the_others(tmp_path):
    rows = [completion(1, completion=str(number)) for number in range(STEP_COMPLETIONS + 6)]
    run = read_run(write(tmp_path, [{"step": 1, "reward": 1}], rows))
    (block,) = read_completions(run, 10**6)
    texts = [shown["text"] for shown in block["groups"][0]["completions"]]
    assert texts == [str(number) for number in range(STEP_COMPLETIONS)] and block["left_out"] == 6


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1_000, 100_000), st.randoms(use_true_random=False))
def test_steps_are_left_out_evenly_but_never_the_first_and_the_last(steps, copies, size, chance):
    with tempfile.TemporaryDirectory() as folder:
        texts = {step: "x" * chance.randrange(2000) for step in range(1, steps + 1)}
        rows = [completion(step, completion=texts[step]) for step in texts for _ in range(copies)]
        run = read_run(write(Path(folder), [{"step": 1, "reward": 1}], rows))
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
