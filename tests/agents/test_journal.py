"""What a run drew for programs, and which episodes had ended, as the run that goes on finds it."""

import math
import resource
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import nn

from grpo.agents.journal import RunJournal, read_program, sum_weights
from grpo.data.records import Rollout
from grpo.sampling.drawer import Drawn
from grpo.wire.tool_outcomes import Branch, Outcome

DRAWN = Drawn(ids=[5, 7, 151643], logprobs=[-0.1, -1e-9, float(torch.tensor(-3.3, dtype=torch.float32))])
ROLLOUT = Rollout(
    completion_ids=[5, 7],
    finished=True,
    text='a "b"\n\ud83d',
    sampling_logprobs=[-0.25, -1 / 3],
    policy_version=4,
    outcome=Outcome(
        finished=True,
        messages=[{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
        tool_calls=1,
        rewards={"solve": 0.1, "passed": 1.0},
        parts={"tests": 3.0},
    ),
    branches=[
        Branch(
            prompt_ids=[1],
            completion_ids=[5, 9, 7],
            sampling_logprobs=[-0.25, math.nan, -1 / 3],
            drawn=[True, False, True],
        )
    ],
    tree=[{"turn": 0, "after": None, "begins": "new_conversation"}],
)


@pytest.fixture
def open_journal(tmp_path):
    """`open_journal(rank=0, run="run", oldest=0)`: a journal in the test's folder, after a start of the run."""

    def open_journal(rank: int = 0, run: str = "run", oldest: int = 0) -> RunJournal:
        return RunJournal(tmp_path / "journal", rank, run=run, oldest=lambda: oldest)

    return open_journal


def begun(journal: RunJournal, version: int = 4, weights: str = "0123") -> RunJournal:
    journal.begin(version, lambda: weights)
    return journal


def add(journal: RunJournal, episode: tuple[int, int, int], drawn: Drawn = DRAWN) -> None:
    done = Future()
    journal.add(episode, "first", drawn, done)
    assert done.result(timeout=0) == drawn


def test_what_any_rank_wrote_is_found_exactly_by_the_next_start(open_journal):
    for rank in range(3):
        journal = begun(open_journal(rank))
        add(journal, (9, rank, 0))
        journal.end((9, rank, 1), ROLLOUT)
        assert journal.find((9, rank, 0), "first") == DRAWN
    found = begun(open_journal(1))
    for rank in range(3):
        assert found.find((9, rank, 0), "first") == DRAWN
        rollout = found.find_rollout((9, rank, 1))
        assert math.isnan(rollout.branches[0].sampling_logprobs[1])
        assert repr(rollout) == repr(ROLLOUT)
    assert found.find((9, 0, 0), "other") is found.find((9, 0, 1), "first") is found.find_rollout((9, 0, 0)) is None


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_half_a_line_is_nothing_and_what_is_written_after_it_is_whole(open_journal, tmp_path, cut):
    journal = begun(open_journal())
    add(journal, (9, 0, 0))
    journal.end((9, 0, 1), ROLLOUT)
    [path] = (tmp_path / "journal").iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    again = begun(open_journal())
    assert again.find((9, 0, 0), "first") == DRAWN and again.find_rollout((9, 0, 1)) is None
    again.end((9, 0, 1), ROLLOUT)
    assert repr(begun(open_journal()).find_rollout((9, 0, 1))) == repr(ROLLOUT)


@pytest.mark.parametrize(
    "line", ["\0" * 40, "[]", '{"episode": 3}', '{"episode": [1, 2, 3], "ids": []}', "[" * 100_000]
)
def test_a_damaged_line_is_told_and_the_others_are_kept(open_journal, tmp_path, caplog, line):
    journal = begun(open_journal())
    add(journal, (9, 0, 0))
    [path] = (tmp_path / "journal").iterdir()
    path.write_text(line + "\n" + path.read_text())
    assert begun(open_journal()).find((9, 0, 0), "first") == DRAWN
    assert f"line 1 of {path} is damaged" in caplog.text


@pytest.mark.parametrize(
    ("others", "version", "weights"), [({"run": "other"}, 4, "0123"), ({}, 5, "0123"), ({}, 4, "0124")]
)
def test_another_policy_run_or_step_finds_nothing(open_journal, others, version, weights):
    add(begun(open_journal()), (9, 0, 0))
    assert begun(open_journal(**others), version, weights).find((9, 0, 0), "first") is None
    assert begun(open_journal()).find((9, 0, 0), "first") == DRAWN


def test_what_is_older_than_every_checkpoint_is_deleted(open_journal, tmp_path):
    for version in (8, 9, 10, 11):
        add(begun(open_journal(), version), (9, version, 0))
    begun(open_journal(rank=1, oldest=10), 12)
    left = {int(path.name.partition("-")[0]) for path in (tmp_path / "journal").iterdir()}
    assert left == {10, 11}


def test_a_full_disk_is_named_and_what_was_half_written_is_no_answer(open_journal):
    journal, before = begun(open_journal()), resource.getrlimit(resource.RLIMIT_FSIZE)
    add(journal, (9, 0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))  # Python ignores SIGXFSZ: a write fails
    try:
        with pytest.raises(OSError, match="the journal cannot be written .*: make room, and start the run again"):
            add(journal, (9, 0, 1), Drawn(ids=[7] * 1000, logprobs=[-0.5] * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert journal.find((9, 0, 1), "first") is None
    again = begun(open_journal())
    add(again, (9, 0, 2))
    last = begun(open_journal())
    assert last.find((9, 0, 0), "first") == last.find((9, 0, 2), "first") == DRAWN
    assert last.find((9, 0, 1), "first") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_bit_of_one_trained_weight_is_in_the_sum(dtype):
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 3)).to(dtype)
    model[0].bias.requires_grad = False
    before = sum_weights(model)
    with torch.no_grad():
        model[0].bias += 1
    assert sum_weights(model) == before
    with torch.no_grad():
        bits = model[0].weight.view(torch.int32 if dtype is torch.float32 else torch.int16)
        bits[17, 5] ^= 1
    changed = sum_weights(model)
    with torch.no_grad():
        bits[17, 5] ^= 1
    assert changed != before == sum_weights(model)


def test_a_changed_program_is_another_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text("one")
    Path("agent.mjs").write_text("one")
    names = "agent.py:solve", f"{tmp_path}/agent.py:solve", "command: node --flag agent.mjs", "command: curl"
    before = [read_program(name) for name in names]
    assert before[0] == before[1] == before[2] and before[3] == []
    Path("agent.py").write_text("two")
    assert [read_program(name) != old for name, old in zip(names, before, strict=True)] == [True, True, False, False]
