"""A rank that holds up the others is named: who, where, since when."""

import ast
import os
import re
import signal
from pathlib import Path

import pytest
from altered_trainer import altered
from conftest import REPOSITORY
from processes import left_of, processes_below, ranks_of
from trainer_runs import options, reach, run_ranks, training

from grpo.run.watchdog import PHASES, SHOWN, Position, RankState, describe_stall, held_up_by


def at(**changes) -> Position:
    in_run = {"step": 3, "after": 5.0, "phase": "update"}
    in_code = {"line": "own.py:4 in own", "stack": ["own.py:4"], "waits": False}
    return Position(**{"host": "here", "process": 7, "beat": 1} | in_run | in_code | changes)


def ranks(*positions: Position, moved=100.0, worked=100.0) -> dict[int, RankState]:
    return {
        rank: RankState(position=position, reported=400.0, moved=moved, worked=worked)
        for rank, position in enumerate(positions)
    }


LOADING = {"step": 0, "after": -0.5, "phase": ""}


@pytest.mark.parametrize(
    "positions, expected",
    [
        ([at(), at(step=2), at()], [1]),
        ([at(), at(), at(after=1.0, phase="reward")], [2]),
        ([at(after=1.5, phase=""), at(after=0.0, phase="generate"), at(after=1.5, phase="")], [1]),
        ([at(waits=True), at(), at(waits=True), at(phase="wait_ref")], [1, 3]),
        ([at(waits=True), at(waits=True)], [0, 1]),
        ([at(), at()], [0, 1]),
        ([at(**LOADING), at(**LOADING)], []),  # for long before the first step
        ([at(**LOADING), at(**LOADING, waits=True)], [0]),
        ([at(**LOADING, waits=True), at(**LOADING, waits=True)], [0, 1]),
    ],
)
def test_who_is_behind(positions, expected):
    assert held_up_by(ranks(*positions), now=400.0, patience=200.0) == expected
    assert held_up_by(ranks(*positions), now=400.0, patience=301.0) == []
    last_moved = ranks(*positions)
    last_moved[len(positions) - 1].moved = 399.0
    assert held_up_by(last_moved, now=400.0, patience=200.0) == []
    working = held_up_by(ranks(*positions, worked=399.0), now=400.0, patience=200.0)
    assert working == ([] if len(expected) == len(positions) else expected)


def test_a_report_tells_alive_from_working_from_moving():
    state = RankState(position=at(), reported=1.0, moved=1.0, worked=1.0)
    for now, position, expected in (
        (2.0, at(), (1.0, 1.0, 1.0)),
        (3.0, at(beat=2), (3.0, 1.0, 1.0)),
        (4.0, at(beat=3, stack=["own.py:5"]), (4.0, 4.0, 1.0)),
        (5.0, at(beat=4, stack=["own.py:5"], waits=True), (5.0, 4.0, 5.0)),
    ):
        state.update(position, now)
        assert (state.reported, state.worked, state.moved) == expected


def test_many_are_counted():
    states = ranks(*[at() for _ in range(20)], at(step=4))
    text = describe_stall(states, held_up_by(states, 400.0, 200.0), 400.0)
    assert text.startswith("1 of 21 ranks wait: rank 0 (here, process 7) is in update of step 3 since ")
    assert "300 s, at own.py:4 in own; rank 1 (" in text and text.endswith(f"; and {20 - SHOWN} more")
    assert "has not answered" not in text and "has not answered since" in describe_stall(states, [0], 500.0)


def test_every_phase_has_its_place():
    files = [REPOSITORY / "grpo_ref_split.py", *(REPOSITORY / "grpo").rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    clocks = [call.args[0] for call in calls if re.search(r"\bclock$|\._clock$", ast.unparse(call.func))]
    named = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "phase"]  # of a scorer
    assert {node.value for node in clocks + named if isinstance(node, ast.Constant)} == set(PHASES)


# Not of a slow start, with so little patience.
REPORT = r"grpo\.run\.watchdog: (?!.*(before its first step|no word of))"
HANG = """
import os, time
from pathlib import Path

def own(prompts, completions, **columns):
    while Path(__file__).with_name("hang").exists() and os.environ["RANK"] == "1":
        time.sleep(1000)
    return [len(text) for text in completions]
"""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["a reward function hangs", "rank 1 is stopped", "rank 0 is stopped"])
def test_a_rank_that_stalls_is_named_before_the_run_ends(model_folder, data_folder, tmp_path, kind):
    run = tmp_path / "run"
    (tmp_path / "own.py").write_text(HANG)
    words = options(model_folder, data_folder, run, beta=0.0, eval_steps=0, max_steps=10**6, ref_deadline=1)
    words += ["--reward_funcs", f"{tmp_path / 'own.py'}:own"]
    hurry = ",".join(f"grpo.run.watchdog:{change}" for change in ("PATIENCE=3", "BEAT=0.5", "TIME_OUT=9"))
    with training(2, words, *altered("set_values", hurry)) as process:
        reach(process, run, 12)  # a rank tells its place twice a second: not before its first step any more
        alive = ranks_of(process)
        below = processes_below(process)
        if kind == "a reward function hangs":
            (tmp_path / "hang").touch()
            output, _ = process.communicate(timeout=60)
            assert process.returncode != 0 and not left_of(below), output
            assert "another rank has not come for too long" in output and "Traceback" not in output
        else:
            os.kill(alive[int(kind[5])], signal.SIGSTOP)
            output = ""
            while not re.search(rf"{REPORT}.*\n", output):
                line = process.stdout.readline()
                assert line, output
                output += line
    reports = [line for line in output.splitlines() if re.search(REPORT, line)]
    if kind == "rank 0 is stopped":
        assert re.search(
            r"rank 0 on 127.0.0.1 has not answered since (\d\d:){2}\d\d, [3-9] s: it is stopped", reports[0]
        )
        return
    place = r"1 of 2 ranks wait: rank 1 \((.*), process (\d+)\) is in (.*) since (\d\d:){2}\d\d, [3-9] s, at "
    found = re.search(place, reports[0])
    assert (found[1], int(found[2])) == (os.uname()[1], alive[1])
    if kind == "a reward function hangs":
        assert len(reports) in (1, 2), output  # after 3 and 6 s
        assert re.fullmatch(r"reward of step \d+", found[3]) and reports[0].endswith(", at own.py:7 in own")
    else:
        assert ", and has not answered since " in reports[0]


def two_ranks(kind: str, folder: Path) -> str:
    """What tests/first_collective.py says, in order."""
    ended = run_ranks(2, "tests/first_collective.py", kind, "4", str(folder / "waits"))
    assert ended.returncode == 0 and "met\n" in ended.stdout, ended.stdout
    return ended.stdout.replace("met\n", "", 1)


@pytest.mark.slow
def test_a_rank_that_is_late_to_the_first_collective_is_named_with_what_helps_the_cards(tmp_path):
    shown = two_ranks("late-to-collective", tmp_path).splitlines()
    late = (
        r"1 of 2 ranks wait: rank 1 \(.*, process \d+\) is before its first step since (\d\d:){2}\d\d, \d+ s, at "
        r"first_collective.py:\d+ in <module>; if all ranks wait in a collective, the driver may offer P2P between "
        r"these cards \(NVIDIA GeForce RTX 3090\) .*: try NCCL_P2P_DISABLE=1 NCCL_IB_DISABLE=1$"
    )
    assert any(re.match(late, line) for line in shown)  # one that starts slowly is named before as without a word
    assert shown[-1] == "met"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path):
    shown = two_ranks("late-to-meet", tmp_path).splitlines()
    assert re.fullmatch(r"1 of 2 ranks wait since (\d\d:){2}\d\d: there is no word of rank 1", shown[0])
    assert shown[-1] == "met"
