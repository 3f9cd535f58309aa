"""The pool's file: what is stored stays, also over a SIGKILL and a full disk; another file is refused."""

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPOSITORY
from stored import (
    AGENT,
    FOLDER,
    PROBE,
    RUN,
    WITH_TURNS,
    answered,
    damage,
    drawn,
    put_file,
    put_version,
    sha,
    task_of,
    weights,
)

from grpo.client.server_errors import ServersLost
from grpo.config.errors import ConfigError
from grpo.pool import files as files_module
from grpo.pool.files import PIECE_BYTES, Files
from grpo.pool.protocol import GroupResult, Task, Version
from grpo.pool.store import Recording, Store
from grpo.pool.task_tensors import decode_drawn, encode_drawn
from grpo.trainer.pool_sampler import Replay
from grpo.wire.refusals import ProtocolError
from grpo.wire.tensors import FilePart


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "run.sqlite")


@pytest.fixture
def store(pool_config):
    made = Store(pool_config.pool_file or pool_config.pool_url, damage, pool_config.pool_folder)
    yield made
    made.close()


PAGE = 16 << 10


def found(store: Store, *key: int) -> tuple[Task | None, bool]:
    """A task, and whether it has a result."""
    task, result = store.find_task(key)
    return task, result is not None


def numbers(store: Store) -> list[int]:
    return [version.version for version in store.versions()]


def test_a_file_comes_in_pieces_in_any_rhythm_and_is_read_in_any(store):
    data = weights(1, 2 * PIECE_BYTES + 12345)

    def piece(start: int, end: int) -> int:
        return store.files.add(FilePart(sha256=sha(data), size=len(data), offset=start), data[start:end])

    assert piece(0, 0) == 0
    assert piece(0, 1000) == 1000 == piece(0, 500)
    assert store.files.size(sha(data)) is None
    with pytest.raises(ProtocolError, match="1000 bytes of this file are here") as refusal:
        piece(1001, 1002)
    assert refusal.value.code == "missing_piece"
    assert piece(500, PIECE_BYTES + 7) == PIECE_BYTES + 7
    assert piece(PIECE_BYTES + 7, len(data)) == len(data) == piece(0, 10) == piece(0, 0)
    assert store.files.size(sha(data)) == len(data)
    for start, end in [(0, 10), (999, 1001), (PIECE_BYTES - 1, PIECE_BYTES + 9), (len(data) - 3, len(data))]:
        assert store.files.read(sha(data), start, end) == data[start:end]
    assert store.files.read(sha(data), 0, len(data)) == data
    with pytest.raises(ProtocolError, match=f"this file has {len(data)} bytes"):
        store.files.add(FilePart(sha256=sha(data), size=len(data) + 1, offset=0), b"")
    with pytest.raises(ProtocolError, match="beyond"):
        store.files.add(FilePart(sha256=sha(data), size=10, offset=5), b"123456")


def test_a_file_goes_on_after_a_restart_and_a_damaged_one_is_dropped(path):
    data = weights(2)
    with closing(Store(path, damage)) as store:
        store.files.add(FilePart(sha256=sha(data), size=len(data), offset=0), data[:3000])
    with closing(Store(path, damage)) as store:
        assert store.files.add(FilePart(sha256=sha(data), size=len(data), offset=3000), data[3000:]) == len(data)
    kept = Path(f"{path}.files") / sha(data)
    kept.rename(f"{kept}.part")  # as of a pool that was killed behind the last piece
    with closing(Store(path, damage)) as store:
        assert store.files.size(sha(data)) is None
        assert store.files.add(FilePart(sha256=sha(data), size=len(data), offset=0), b"") == len(data)
        assert store.files.size(sha(data)) == len(data)
        other = weights(3)
        store.files.add(FilePart(sha256=sha(other), size=len(other), offset=0), other[:4000])
        with pytest.raises(ProtocolError, match="SHA-256 differs") as refusal:
            store.files.add(FilePart(sha256=sha(other), size=len(other), offset=4000), bytes(1000))
        assert refusal.value.code == "damaged"
        assert store.files.add(FilePart(sha256=sha(other), size=len(other), offset=0), b"") == 0
        put_file(store, other)


def test_the_run_stays_and_its_facts_are_those_of_its_last_start(store):
    with pytest.raises(ProtocolError, match="no trainer") as refusal:
        store.run()
    assert (refusal.value.status, refusal.value.code, refusal.value.retry_after) == (404, "no_run", 2)
    store.set_run(replace(RUN, name="runs/first", processor="e" * 16))
    store.set_run(replace(RUN, model_files="e" * 64))  # those that workers fetch stay
    assert store.known_run() == store.run() == RUN
    for changes in ({"run": "f" * 16}, {"base_weights": "f" * 64}, {"turns": WITH_TURNS.turns}):
        remedy = "start the pool with another --pool_file or --pool_url"
        with pytest.raises(ProtocolError, match=f"of run runs/a: {remedy}") as refusal:
            store.set_run(replace(RUN, **changes))
        assert refusal.value.code == "other_run" and store.run() == RUN


def test_a_group_whose_episodes_drew_nothing_is_kept(store):
    store.set_run(replace(RUN, agent=AGENT))
    put_version(store, 0)
    store.put_tasks([task_of(0)])
    nothing = {name: [[]] * RUN.num_generations for name in ("completions", "logprobs", "versions")}
    drawn = GroupResult(group=0, attempt=0, **nothing)
    assert store.add_results([(task_of(0), drawn)], "w") == {(0, 0)}
    assert len(store.results([(0, 0)], 10**6)) == 1


def test_another_agents_answers_are_not_in_the_journal_any_more(store):
    run, task = replace(RUN, agent=AGENT), task_of(0)
    store.set_run(run)
    sha256 = put_version(store, 0).sha256
    store.put_tasks([task])
    assert store.add_to_journal(task.key, sha256, b"{}\n")
    store.set_run(replace(run, name="runs/again"))
    assert store.journal(task.key, sha256) == b"{}\n"
    store.set_run(replace(run, agent=replace(AGENT, program=["f" * 16])))
    assert store.journal(task.key, sha256) == b""


def test_a_folder_that_was_given_is_of_one_run(store, pool_config, tmp_path):
    store.set_run(RUN)
    with closing(Store(str(tmp_path / "other.sqlite"), damage, pool_config.pool_folder)) as other:
        with pytest.raises(ProtocolError, match="has the files of run runs/a: .* another --pool_folder") as refusal:
            other.set_run(replace(RUN, run="f" * 16, name="runs/b"))
        assert refusal.value.code == "other_run" and other.known_run() is None
    store.set_run(replace(RUN, name="runs/resumed"))


def test_a_version_needs_its_files(store):
    data, delta = weights(0), weights(9, 100)
    whole = Version(version=0, sha256=sha(data), size=len(data), whole=True, base=None, delta=None, probe=PROBE)
    with pytest.raises(ProtocolError, match="is not here") as refusal:
        store.add_version(whole)
    assert refusal.value.code == "missing_file"
    put_file(store, data)
    with pytest.raises(ProtocolError, match=f"has {len(data)} bytes"):
        store.add_version(replace(whole, size=7))
    put_file(store, delta)
    by_delta = Version(version=1, sha256=sha(b"1"), size=len(data), whole=False, base=0, delta=sha(delta), probe=PROBE)
    with pytest.raises(ProtocolError, match="leads from version 0, which is not here"):
        store.add_version(by_delta)
    store.add_version(whole)
    with pytest.raises(ProtocolError, match=f"file {sha(b'picture')} of version 1 is not here"):
        store.add_version(replace(by_delta, probe=replace(PROBE, pictures=(sha(b"picture"),))))
    store.add_version(by_delta)
    store.add_version(whole)
    assert store.versions() == [whole, by_delta]
    # A run that was started again may send whole what it sent as a delta before: then its base may go.
    made = put_version(store, 2, 0, whole=False)
    put_file(store, weights(2))
    store.add_version(replace(made, whole=True, base=None, delta=None))
    assert store.versions()[2] == replace(made, whole=True)
    store.drop_versions_below(2)
    assert numbers(store) == [2]


def test_old_versions_go_with_their_files_unless_a_chain_begins_with_them(store):
    store.set_run(RUN)
    put_file(store, FOLDER)
    made = [put_version(store, 0), put_version(store, 1, 0, False), put_version(store, 2, 1, False)]
    made += [put_version(store, 3, 2, True), put_version(store, 4, 3, False)]
    store.drop_versions_below(2)  # 2 is 0 with two deltas
    assert numbers(store) == [0, 1, 2, 3, 4]
    store.drop_versions_below(3)
    assert numbers(store) == [3, 4]
    assert [store.files.size(version.sha256) for version in made] == [None, None, None, 5000, None]
    assert [store.files.size(version.delta or "") for version in made] == [None, None, None, 100, 100]
    assert store.files.size(RUN.model_files) == len(FOLDER)
    store.drop_versions_below(10)
    assert numbers(store) == [] and store.files.size(made[4].delta) is None


def test_a_file_that_is_still_coming_in_stays_and_an_abandoned_one_goes(store, monkeypatch):
    data = weights(5)
    store.set_run(replace(RUN, base_weights=put_file(store, weights(7))))
    store.files.add(FilePart(sha256=sha(data), size=len(data), offset=0), data[:100])
    put_version(store, 0)
    store.drop_versions_below(1)
    assert store.files.add(FilePart(sha256=sha(data), size=len(data), offset=0), b"") == 100
    monkeypatch.setattr(files_module, "_ABANDONED_SECONDS", 0)
    store.drop_versions_below(1)
    assert store.files.add(FilePart(sha256=sha(data), size=len(data), offset=0), b"") == 0
    assert store.files.size(sha(weights(7))) == 5000  # the run names it


def test_tasks_are_open_by_version_group_and_attempt_until_they_have_a_result(store):
    store.set_run(RUN)
    tasks = [task_of(3, [9], version=1), task_of(1, [5, 6], attempt=1), task_of(1, [5, 6])]
    tasks += [task_of(0, version=1), task_of(8, [1], version=2)]
    store.put_tasks(tasks)
    store.put_tasks(tasks)
    assert store.free_tasks(10) == []  # no version is here
    put_version(store, 0)
    put_version(store, 1)
    right = [tasks[2], tasks[1], tasks[3], tasks[0]]
    assert store.free_tasks(10) == right and store.free_tasks(3) == right[:3]
    store.add_results([(tasks[1], drawn(tasks[1])), (tasks[2], drawn(tasks[2]))], "w")
    assert store.free_tasks(10) == right[2:] and store.count_open() == 3 and store.count_open(1) == 2
    assert found(store, 1, 0) == (tasks[2], True) and found(store, 3, 0) == (tasks[0], False)
    assert store.find_task((3, 1)) == (None, None)
    (first, second) = store.results([(3, 0), (1, 0), (77, 0), (1, 1)], 10**6)
    assert decode_drawn(first) == [drawn(tasks[2])] and decode_drawn(second) == [drawn(tasks[1])]
    assert store.results([(1, 0), (1, 1)], 1) == [first]
    store.drop_versions_below(9)
    assert found(store, 1, 0) == (tasks[2], True)  # for ever: the file can be replayed


def test_rounds_are_counted_from_the_newest(store):
    assert store.rounds(3) == []
    store.set_run(RUN)
    tasks = [task_of(group, version=group // 2) for group in range(9)]
    store.put_tasks([*tasks, task_of(6, attempt=1, version=3)])
    store.add_results([(task, drawn(task)) for task in tasks[:7]], "w")
    # round, the lowest and highest version of its tasks, tasks, drawn ones, their tokens
    rounds = [[4, 4, 4, 1, 0, 0], [3, 3, 3, 3, 1, 6], [2, 2, 2, 2, 2, 12]]
    assert [[*row.values()] for row in store.rounds(3)] == rounds


def test_the_pictures_of_tasks_must_be_there_and_stay(path, monkeypatch):
    monkeypatch.setattr(files_module, "_ABANDONED_SECONDS", 0)
    file, other = weights(11), weights(12)
    task, missing = task_of(1, pictures=(sha(file), sha(file))), task_of(2, pictures=(sha(other),))
    with closing(Store(path, damage)) as store:
        store.set_run(RUN)
        put_file(store, file)
        with pytest.raises(ProtocolError, match=f"picture {sha(other)} of group 2 is not here") as refusal:
            store.put_tasks([task, missing])
        assert refusal.value.code == "missing_file" and store.find_task(task.key) == (None, None)
        store.put_tasks([task])
        store.put_tasks([task])
        with pytest.raises(ProtocolError, match="group 1 has another prompt, row or version"):
            store.put_tasks([replace(task, pictures=())])
    with closing(Store(path, damage)) as store:
        put_version(store, 0)
        store.drop_versions_below(1)
        put_version(store, 1)
        assert found(store, *task.key) == (task, False) and store.files.size(sha(file)) == len(file)


@pytest.mark.parametrize("changes", [{"prompt_ids": [5]}, {"columns": "{}"}, {"version": 1}])
def test_a_task_with_other_content_is_refused(store, changes):
    store.set_run(RUN)
    task = task_of(1)
    store.put_tasks([task])
    store.add_results([(task, drawn(task))], "w")
    with pytest.raises(ProtocolError, match="group 1 has another prompt, row or version") as refusal:
        store.put_tasks([task_of(2), replace(task, **changes)])
    assert refusal.value.code == "other_run" and store.find_task((2, 0)) == (None, None)
    assert found(store, 1, 0) == (task, True)


def test_a_run_that_goes_on_from_an_earlier_checkpoint_with_other_weights_loses_what_the_later_ones_drew(store):
    store.set_run(RUN)
    for number in range(4):
        put_version(store, number)
    tasks = [task_of(number, attempt=attempt, version=number) for number in range(4) for attempt in range(2)]
    store.put_tasks(tasks)
    store.add_results([(task, drawn(task)) for task in tasks], "w")
    old = store.versions()
    store.add_version(old[2])
    assert store.versions() == old
    put_version(store, 2, salt=100)
    assert numbers(store) == [0, 1, 2]
    assert store.files.size(old[2].sha256) is None is store.files.size(old[3].sha256)
    assert found(store, 1, 1) == (tasks[3], True)
    assert store.find_task((2, 1)) == store.find_task((3, 0)) == (None, None)
    # The trainer may have put it just before: it stays, and is drawn by the new weights.
    assert found(store, 2, 0) == (tasks[4], False)


def test_what_a_dropped_version_drew_goes_where_the_version_comes_again_with_other_weights(store):
    store.set_run(replace(RUN, in_flight_weight_updates=True))
    made = [put_version(store, number) for number in range(4)]
    tasks = [task_of(group, version=version) for group, version in enumerate([0, 0, 1, 2, 3])]
    store.put_tasks(tasks)
    results = [(task, drawn(task)) for task in tasks]
    results[1] = (tasks[1], replace(results[1][1], versions=[[0, 0], [0, 0, 0, 2]]))  # of version 0 and later ones
    store.add_results(results, "w")
    store.drop_versions_below(3)
    put_version(store, 1)
    assert numbers(store) == [1, 3] and store.count_open() == 0  # the same weights drew the same
    store.drop_versions_below(3)
    assert store.find_version(2) == (made[2].sha256, None) and store.find_version(4) == (None, None)
    put_version(store, 2, salt=100)
    assert numbers(store) == [2] and store.find_version(3) == (None, None)
    have_results = [True, False, True, False]
    assert [found(store, *task.key) for task in tasks[:4]] == [*zip(tasks[:4], have_results, strict=True)]
    assert store.find_task(tasks[4].key) == (None, None)


def test_a_recording_reads_while_the_pool_writes_and_after_and_where_nothing_can_be_written(path, tmp_path):
    task = task_of(1)
    with closing(Store(path, damage)) as store:
        store.set_run(RUN)
        store.put_tasks([task])
        with closing(Recording(path)) as recording:
            assert recording.run == RUN and recording.find((1, 0)) == (task, None)
            store.add_results([(task, drawn(task))], "w")
            assert recording.find((1, 0)) == (task, drawn(task)) and recording.find((3, 0)) == (None, None)
    assert sorted(os.listdir(tmp_path)) == ["run.sqlite", "run.sqlite.files"]  # the first can be copied
    os.chmod(path, 0o444)
    os.chmod(tmp_path, 0o555)
    try:
        with closing(Recording(path)) as recording:
            assert recording.find((1, 0)) == (task, drawn(task))
        assert sorted(os.listdir(tmp_path)) == ["run.sqlite", "run.sqlite.files"]
    finally:
        os.chmod(tmp_path, 0o755)


def test_a_file_that_is_no_pools_is_refused_in_a_sentence(path, tmp_path):
    def check(words: str) -> None:
        for setting, opened in (("pool_file", lambda: Store(path, damage)), ("replay", lambda: Recording(path))):
            with pytest.raises(ConfigError, match=words) as refusal:
                opened()
            assert str(refusal.value).startswith(f"{setting}={path!r}: ") and "\n" not in str(refusal.value)

    with pytest.raises(ConfigError, match="there is no such file"):
        Recording(path)
    with pytest.raises(ConfigError, match="Is a directory: name a file to write to"):
        Store(str(tmp_path), damage)
    Path(path).write_bytes(b"notes " * 1000)
    check("no pool's file, or damaged")
    os.unlink(path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE notes (text)")
    check("another program")
    os.unlink(path)
    Store(path, damage).close()
    with pytest.raises(ConfigError, match="no trainer has used it"):
        Recording(path)
    with closing(sqlite3.connect(path)) as older:
        older.execute("PRAGMA user_version = 1")
    check("has schema 1, and this program reads 5: use the release that made it, or name another file")


def test_a_damaged_file_is_refused_at_the_start_or_ends_the_pool(path):
    with closing(Store(path, damage)) as store:
        store.set_run(RUN)
        store.put_tasks([task_of(group, [7] * 100) for group in range(500)])
        put_file(store, weights(0, 10**6))
    whole, faults = Path(path).read_bytes(), []
    for wrong in (whole[: len(whole) // 2], whole[:PAGE] + bytes(len(whole) - PAGE)):
        Path(path).write_bytes(wrong)
        for opened in (lambda: Store(path, faults.append), lambda: Recording(path)):
            with pytest.raises(ConfigError, match="damaged"):
                opened()
    # Where it is only met later on: an index.
    Path(path).write_bytes(whole)
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'open_tasks'").fetchone()
    Path(path).write_bytes(whole[: (page - 1) * PAGE] + b"\xff" * PAGE + whole[page * PAGE :])
    faults.clear()
    with closing(Store(path, faults.append)) as store, pytest.raises(ProtocolError) as refusal:
        store.count_open()
    assert refusal.value.status == 503
    assert str(faults[0]).startswith(f"pool_file={path!r}: no pool's file, or damaged (database disk image is mal")


def test_a_flipped_bit_is_never_read_as_something_else(path):
    with closing(Store(path, damage)) as store:
        store.set_run(WITH_TURNS)
        put_version(store, 0)
        tasks = [task_of(group, [7, 300 + group], columns='{"secret": "é"}') for group in range(6)]
        store.put_tasks(tasks)
        store.add_results([(task, answered(task)) for task in tasks[:5]], "wörker")
    whole, draw, refusals = Path(path).read_bytes(), random.Random(0), []

    def read() -> list[str]:
        with closing(Recording(path)) as recording:
            return [str(recording.run), *(str(part) for task in tasks for part in recording.find(task.key))]

    right = read()
    results = [str(answered(task)) for task in tasks[:5]] + ["None"]
    assert right == [str(WITH_TURNS), *(text for pair in zip(map(str, tasks), results, strict=True) for text in pair)]
    with closing(sqlite3.connect(path)) as connection:
        tables = "SELECT rootpage FROM sqlite_master WHERE name IN ('run', 'tasks', 'sqlite_autoindex_tasks_1')"
        pages = [page for (page,) in connection.execute(tables)]
    used = [place for page in pages for place in range((page - 1) * PAGE, page * PAGE) if whole[place]]
    for place in draw.sample(used, 400):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        Path(path).write_bytes(flipped)
        try:
            found = read()
        except ConfigError as error:
            refusals.append(str(error))
            continue
        # Where the index has another key nothing is found, and a replay says of which group.
        assert all(each in (expected, "None") for each, expected in zip(found, right, strict=True)), place
    assert len(refusals) > 300 and all(refusal.startswith(f"replay={path!r}: ") for refusal in refusals)
    Path(path).write_bytes(whole.replace(encode_drawn([answered(tasks[2])]), encode_drawn([answered(tasks[3])])))
    faults: list[ConfigError] = []
    with closing(Store(path, faults.append)) as store, pytest.raises(ProtocolError, match="is damaged or gone: the"):
        store.results([(2, 0)], 1)
    is_damaged = "group 2, attempt 0 is damaged (its checksum differs): name another file, or a copy of this one"
    assert str(faults[0]) == f"pool_file={path!r}: {is_damaged}"
    replay = Replay(path, WITH_TURNS.run)
    assert replay.take([(1, 0)], 0)
    with pytest.raises(ServersLost) as lost:
        replay.take([(1, 0), (2, 0)], 0)
    assert str(lost.value) == f"replay={path!r}: {is_damaged}"
    replay._recording.close()


@pytest.mark.parametrize("name", ["run.sqlite", "run.sqlite-wal"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_nothing_is_accepted_into_a_file_that_is_gone_or_replaced(path, tmp_path, name, is_replaced):
    faults: list[ConfigError] = []
    with closing(Store(path, faults.append)) as store:
        store.set_run(RUN)
        (tmp_path / name).rename(tmp_path / "moved")
        if is_replaced:
            (tmp_path / name).write_bytes((tmp_path / "moved").read_bytes())
        with pytest.raises(ProtocolError, match="run.sqlite' is damaged or gone: the pool is ending") as refusal:
            store.put_tasks([task_of(0)])
        assert refusal.value.status == 503 and store.count_open() == 0
    assert str(faults[0]).startswith(f"pool_file={path!r}: {tmp_path / name} was moved, replaced or deleted")


@pytest.fixture
def small_disk(tmp_path):
    """No file may have more than a megabyte, as on a full disk (Python ignores SIGXFSZ: a write fails)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("pool_config", ["file"], indirect=True)
def test_a_full_disk_stores_nothing_of_a_request_and_all_of_it_later(store, small_disk):
    store.set_run(RUN)
    store.put_tasks([task_of(0)])
    small_disk(1 << 20)
    data = weights(1, 3 << 20)
    tasks = [task_of(group, [7] * 1000) for group in range(1, 1000)]
    for attempt in (lambda: put_file(store, data), lambda: store.put_tasks(tasks)):
        with pytest.raises(ProtocolError, match="its disk may be full") as refusal:
            attempt()
        assert (refusal.value.status, refusal.value.code) == (503, "no_space") and refusal.value.retry_after
    assert store.files.add(FilePart(sha256=sha(data), size=len(data), offset=0), b"") == 0
    assert store.count_open() == 1 and store.find_task((1, 0)) == (None, None)
    small_disk(100 << 20)
    put_file(store, data)
    store.put_tasks(tasks)
    assert store.count_open() == 1000


def test_a_disk_that_is_full_when_a_folder_is_claimed_leaves_it_to_the_run(tmp_path, small_disk):
    files = Files(str(tmp_path / "given"))
    small_disk(5)
    with pytest.raises(ProtocolError, match="its disk may be full"), files.locked():
        files.claim("0123", "runs/a")
    small_disk(1 << 20)
    with files.locked():
        files.claim("0123", "runs/a")
    with pytest.raises(ProtocolError, match="runs/a"), files.locked():
        files.claim("4567", "runs/b")


KILLED = """
import sys
sys.path[:0] = [{repository!r}, {repository!r} + "/tests"]
from stored import *
store = Store(sys.argv[1], damage)
store.set_run(RUN)
put_version(store, 0)
first = int(sys.argv[2])
for group in range(first, first + 10**6):
    task = task_of(group)
    store.put_tasks([task])
    data = weights(group, 300_000)
    put_file(store, data)
    store.add_results([(task, drawn(task))], "w")
    print(group, flush=True)
"""


def test_what_was_stored_is_there_after_every_sigkill(path):
    """In a loop that puts tasks, files and results, killed after some ms of it: the next one opens the same file."""
    script = KILLED.format(repository=str(REPOSITORY))
    draw, done = random.Random(0), -1
    for _ in range(4):
        stop = done + draw.randint(1, 12)
        command = [sys.executable, "-c", script, path, str(done + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                done = int(line)
                if done == stop:
                    process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        with closing(Recording(path)) as recording:
            for group in range(done + 1):
                assert recording.find((group, 0))[1] == drawn(task_of(group))
    with closing(Store(path, damage)) as store:
        assert all(store.files.size(sha(weights(group, 300_000))) == 300_000 for group in range(done + 1)) and done > 3
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
