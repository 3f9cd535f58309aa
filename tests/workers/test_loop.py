"""A worker against a real pool: what it draws, with which weights, and what becomes of it when something fails."""

import gc
import json
import logging
import shutil
import threading
import weakref
from contextlib import contextmanager
from itertools import chain

import pytest
import torch
from plain_engine import PlainEngine
from pools import PROMPTS, Trainer, running_pool
from rounding import assert_rounded
from servers import wait_until
from stored import run_info, task_of
from transformers import GenerationConfig

from grpo.config.errors import ConfigError, RewardError
from grpo.config.programs import WorkerConfig, WorkerTurnsConfig
from grpo.data.records import Example, Rollout
from grpo.model.load import eos_token_ids
from grpo.model.trial import make_batcher
from grpo.pool.client import PoolClient
from grpo.pool.protocol import Lease, Task
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.self_check import make_sampler
from grpo.tools.dialogue import start_turns
from grpo.wire.tool_outcomes import SETTINGS, RunTools
from grpo.workers import loop, transformers_engine
from grpo.workers.engine import EngineError
from grpo.workers.loop import GenerationWorker, WorkerFailed
from grpo.workers.transformers_engine import TransformersEngine
from grpo.workers.weights_folder import ModelFolder

pytestmark = [pytest.mark.plain_start, pytest.mark.slow]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(loop, "POLL", 0.2)
    monkeypatch.setattr(loop, "RESTART_PAUSE", 0.01)


@pytest.fixture
def trainer(pool, model_folder, tmp_path):
    return Trainer(PoolClient(pool.url), model_folder, tmp_path / "trainer")


@contextmanager
def working(pool, folder, engine, **settings):
    """Run a worker; give it with the list of what it ended with."""
    folder.mkdir(exist_ok=True)
    worker, ended = GenerationWorker(WorkerConfig(pool=pool.url, **settings), engine, folder), []

    def run():
        try:
            worker.run()
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield worker, ended
    finally:
        worker.close()
        thread.join(timeout=10)
        assert not thread.is_alive()


def sampling(trainer: Trainer, turns=None):
    """Return what draws a task's rollouts in this process, as the trainer would."""
    run, batcher = trainer.run, make_batcher(trainer.model, trainer.tokenizer.pad_token_id)
    longest, packs = run.max_completion_length, batcher.packs
    sampler = make_sampler(trainer.model, trainer.tokenizer, longest, rows=64, packs=packs, turns=turns)

    def draw(task: Task) -> list[Rollout]:
        prompt, columns = trainer.tokenizer.decode(task.prompt_ids), json.loads(task.columns or "{}")
        example = Example(index=0, prompt=prompt, prompt_ids=task.prompt_ids, columns=columns)
        seed = run.seed + (task.attempt << 32)
        return sampler.sample([example], run.num_generations, run.temperature, seed, ids=[task.group])[0]

    return draw


def test_it_draws_to_the_last_bit_what_the_trainer_would_draw_group_by_group(pool, trainer, tmp_path):
    draw = sampling(trainer)
    with working(pool, tmp_path / "worker", TransformersEngine(WorkerConfig(pool=pool.url))):
        assert trainer.model.config.tie_word_embeddings  # the head must follow the weights that come as deltas too
        for version in range(3):
            trainer.learn(seed=version)
            trainer.publish(version, whole=version == 0, delta=version > 0)
            tasks = trainer.put_tasks(version, range(6 * version, 6 * version + 6))
            tasks += trainer.put_tasks(version, range(6 * version, 6 * version + 1), attempt=2)
            for task, drawn in zip(tasks, trainer.wait(tasks), strict=True):
                expected = [(rollout.completion_ids, rollout.sampling_logprobs) for rollout in draw(task)]
                assert [*zip(drawn.completions, drawn.logprobs, strict=True)] == expected
                assert {*chain(*drawn.versions)} == {version}


def test_groups_that_are_drawn_together_have_the_tokens_that_each_has_alone(pool, trainer, tmp_path, monkeypatch):
    draw, sample, sizes = sampling(trainer), ContinuousSampler.sample, []
    trainer.publish(0)
    tasks = trainer.put_tasks(0, range(7)) + trainer.put_tasks(0, range(2), attempt=2)
    config = WorkerConfig(pool=pool.url, sequences_per_generate=3 * trainer.run.num_generations + 1)

    def watched(sampler, examples, *arguments, **named):
        sizes.append(len(examples))
        return sample(sampler, examples, *arguments, **named)

    monkeypatch.setattr(transformers_engine, "_GATHER", 0.3)  # a busy machine's threads need longer to come together
    monkeypatch.setattr(ContinuousSampler, "sample", watched)
    with working(pool, tmp_path / "worker", TransformersEngine(config)):
        for task, drawn in zip(tasks, trainer.wait(tasks), strict=True):
            expected = draw(task)
            assert drawn.completions == [rollout.completion_ids for rollout in expected]
            for mine, rollout in zip(drawn.logprobs, expected, strict=True):
                assert_rounded(torch.tensor(mine), torch.tensor(rollout.sampling_logprobs))
    assert max(sizes) == 3


GAME = """
class Guess:
    def reset(self, columns):
        self.secret, self.turns = int(columns["secret"]), 0
        return ""

    def step(self, text):
        self.turns += 1
        return f"{self.secret + len(text)} after {self.turns}", 1 / self.turns, (self.secret + len(text)) % 3 == 0
"""


@pytest.fixture
def game(model_folder, tmp_path):
    """A model with so many ends that random weights find one soon, and an environment to play with."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    GenerationConfig(eos_token_id=[2, *range(100, 130)]).save_pretrained(folder)
    (tmp_path / "game.py").write_text(GAME)
    return folder, f"{tmp_path / 'game.py'}:Guess"


def test_what_its_own_environment_answers_is_answered_as_in_the_trainer(pool, game, tmp_path):
    """To the last bit. Another environment than the run's ends the worker, and so does one that fails."""
    folder, environment = game
    settings = WorkerTurnsConfig(environment=environment, max_turns=4)
    of_run = RunTools.of(None, environment, ["Guess"], **{name: getattr(settings, name) for name in SETTINGS})
    changes = {"turns": of_run, "max_completion_length": 80}
    trainer = Trainer(PoolClient(pool.url), folder, tmp_path / "trainer", **changes)
    trainer.publish(0)
    tasks = [task_of(group, prompt, columns=json.dumps({"secret": group})) for group, prompt in enumerate(PROMPTS)]
    trainer.client.put_tasks(tasks)
    with working(pool, tmp_path / "none", PlainEngine()) as (_, ended):
        wait_until(lambda: ended)
    assert isinstance(ended[0], ConfigError)
    assert str(ended[0]).startswith("environment=None: that of run runs/test is Guess: name its file")
    turns = start_turns(settings, trainer.tokenizer, trainer.run.eos_token_ids)
    draw = sampling(trainer, turns)
    config, answers = WorkerConfig(pool=pool.url, environment=environment), 0
    with working(pool, tmp_path / "worker", TransformersEngine(config), environment=environment) as (_, ended):
        for task, drawn in zip(tasks, trainer.wait(tasks), strict=True):
            for row, rollout in enumerate(draw(task)):
                assert (rollout.completion_ids, rollout.drawn) == (drawn.completions[row], drawn.drawn[row])
                assert str(rollout.sampling_logprobs) == str(drawn.logprobs[row])  # NaN differs from itself
                assert rollout.outcome == drawn.outcomes[row]
                answers += rollout.turns - 1
        assert answers > 10
        trainer.client.put_tasks([task_of(20, columns='{"secret": "none"}')])
        wait_until(lambda: ended)
    assert isinstance(ended[0], RewardError) and str(ended[0]).startswith(f"environment='{environment}': reset")
    turns.close()


def test_it_keeps_as_many_groups_in_work_as_the_engine_draws_at_a_time(pool, trainer, tmp_path, monkeypatch):
    """Also with a slow pool."""
    engine, send, is_quick = PlainEngine(capacity=3, holds=True), PoolClient.results, threading.Event()
    monkeypatch.setattr(PoolClient, "results", lambda *arguments: is_quick.wait() and send(*arguments))
    trainer.publish(0)
    tasks = trainer.put_tasks(0, range(20))
    with working(pool, tmp_path / "worker", engine):
        wait_until(lambda: engine.most_at_a_time == 3)
        assert trainer.client.status()["tasks"] == {"leased": 3, "waiting": 17}
        engine.go.set()
        wait_until(lambda: engine.draws == 20)  # while none is sent
        is_quick.set()
        trainer.wait(tasks)
    assert engine.most_at_a_time == 3


def test_a_version_is_its_number_and_its_bits(pool, trainer, tmp_path):
    engine = PlainEngine()
    with working(pool, tmp_path / "worker", engine):
        first = trainer.publish(0)
        trainer.wait(trainer.put_tasks(0, range(2)))
        trainer.learn(seed=1)
        second = trainer.publish(0)  # the run went back
        trainer.wait(trainer.put_tasks(0, range(2)))
        trainer.publish(1)  # a learning rate of 0: no update changes a weight, and the version has its own number
        (drawn,) = trainer.wait(trainer.put_tasks(1, range(2, 3)))
    assert engine.weights == [first.sha256, second.sha256, second.sha256]
    assert {*chain(*drawn.versions)} == {1}


def test_a_worker_that_joins_begins_with_the_version_that_is_drawn_with(pool, trainer, tmp_path):
    engine = PlainEngine()
    versions = [trainer.publish(0)]
    trainer.learn(seed=1)
    versions.append(trainer.publish(1, whole=False, delta=True))
    tasks = trainer.put_tasks(0, range(2)) + trainer.put_tasks(1, range(2, 4))
    with working(pool, tmp_path / "worker", engine):
        trainer.wait(tasks)
    assert engine.weights == [version.sha256 for version in versions]


def test_a_worker_that_joins_while_the_pool_has_no_weights_waits_for_the_next(
    pool, trainer, tmp_path, monkeypatch, caplog
):
    def late(folder, run):
        bring(folder, run)
        trainer.client.needed(1)  # the run has done a step meanwhile, and sends its weights

    bring = ModelFolder.bring_model
    monkeypatch.setattr(ModelFolder, "bring_model", late)
    trainer.publish(0)
    caplog.set_level(logging.INFO)
    with working(pool, tmp_path / "worker", PlainEngine()):
        wait_until(lambda: "has no weights now: waiting for the trainer" in caplog.text)
        trainer.publish(1)
        trainer.wait(trainer.put_tasks(1, range(1)))


def test_leases_live_while_the_engine_is_busy(pool, trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "RENEWALS", 100)  # of the pool's 30 s
    engine = PlainEngine(holds=True)
    trainer.publish(0)
    trainer.put_tasks(0, range(1))
    with working(pool, tmp_path / "worker", engine):
        wait_until(lambda: engine.most_at_a_time == 1)
        looks, renewals = trainer.client.status()["workers"], 0
        while renewals < 3:
            looks += trainer.client.status()["workers"]
            renewals += looks[-1]["last_seen"] < looks[-2]["last_seen"]
        assert {look["leases"] for look in looks} == {1}
        engine.go.set()


def test_a_worker_within_a_group_leaves_those_of_other_weights_to_others(pool, trainer, tmp_path, monkeypatch):
    def recorded(client: PoolClient, request: Lease):
        leased = lease(client, request)
        given.extend(task.group for task in leased.tasks)
        return leased

    lease, given = PoolClient.lease, []
    monkeypatch.setattr(PoolClient, "lease", recorded)
    monkeypatch.setattr(loop, "RENEWALS", 100)  # of the pool's 30 s
    busy = PlainEngine(capacity=2, holds=True)
    trainer.publish(0)
    old = trainer.put_tasks(0, range(1))
    with working(pool, tmp_path / "busy", busy):
        wait_until(lambda: busy.drawing == 1)
        trainer.learn(seed=1)
        trainer.publish(1, delta=True)
        new = trainer.put_tasks(1, range(1, 2))
        wait_until(lambda: 1 in given)
        with working(pool, tmp_path / "free", PlainEngine()):
            trainer.wait(new)
        assert busy.drawing == 1
        busy.go.set()
        trainer.wait(old)


def test_an_engine_that_fails_is_started_again_and_loses_no_group(pool, trainer, tmp_path, caplog):
    engine = PlainEngine(capacity=2)
    engine.failing = 2
    trainer.publish(0)
    tasks = trainer.put_tasks(0, range(6))
    with working(pool, tmp_path / "worker", engine):
        trainer.wait(tasks)
    assert engine.calls.count("start") in (2, 3) and "the card fell off the bus; starting it again" in caplog.text


def test_nothing_is_drawn_with_weights_that_the_engine_does_not_have(pool, trainer, tmp_path, caplog):
    engine = PlainEngine()
    trainer.publish(0)
    with working(pool, tmp_path / "worker", engine) as (_, ended):
        trainer.wait(trainer.put_tasks(0, range(2)))
        engine.wrong_logprobs = 1  # at the load
        trainer.learn(seed=1)
        trainer.publish(1, delta=True)
        trainer.wait(trainer.put_tasks(1, range(2, 4)))
        assert engine.calls == ["start", "load 1", "close", "start"]
        assert "version 1: the engine's log-probs are 1 nats a token from the trainer's" in caplog.text
        engine.wrong_logprobs = 10**9
        trainer.learn(seed=2)
        trainer.publish(2, delta=True)
        tasks = trainer.put_tasks(2, range(4, 6))
        wait_until(lambda: ended)
        assert isinstance(ended[0], WorkerFailed)
        assert str(ended[0]).startswith("the engine failed 4 times in a row: version 2: the engine's log-probs")
        assert trainer.client.take([task.key for task in tasks], 0) == []
    assert trainer.client.status()["tasks"]["leased"] == 0


@pytest.fixture
def rolling(pool, model_folder, tmp_path):
    """A trainer whose workers always take the newest version."""
    return Trainer(PoolClient(pool.url), model_folder, tmp_path / "trainer", in_flight_weight_updates=True)


def test_weights_are_loaded_while_it_draws_and_nothing_is_sent_before_their_proof(pool, rolling, tmp_path, caplog):
    engine = PlainEngine(capacity=2, loads_in_flight=True, holds=True)
    rolling.publish(0)
    tasks = rolling.put_tasks(0, range(2))  # the engine is full
    with working(pool, tmp_path / "worker", engine):
        wait_until(lambda: engine.most_at_a_time == 2)
        for version, is_wrong in ((1, False), (2, True)):
            engine.prove.clear()
            engine.wrong_logprobs = int(is_wrong)
            rolling.learn(seed=version)
            rolling.publish(version, delta=True)
            wait_until(lambda number=version: f"load {number}" in engine.calls)
            engine.go.set()
            wait_until(lambda: not engine.drawing)
            assert rolling.client.take([task.key for task in tasks], 0.3) == []
            engine.prove.set()
            drawn = rolling.wait(tasks)
            numbers = {number for group in drawn for row in group.versions for number in row}
            assert numbers == ({version} if is_wrong else {version - 1, version})
            engine.go.clear()
            if not is_wrong:
                assert engine.draws == 2 and engine.calls == ["start", "load 1"]
                tasks = rolling.put_tasks(0, range(2, 4))
                wait_until(lambda: engine.drawing == 2)
        assert engine.draws == 6 and engine.calls == ["start", "load 1", "load 2", "close", "start"]
        assert "version 2: the engine's log-probs are 1 nats a token from the trainer's" in caplog.text
        engine.go.set()


def test_groups_that_the_pool_refuses_end_the_worker_after_three(pool, trainer, tmp_path, caplog):
    engine = PlainEngine()
    engine.copies = 1
    trainer.publish(0)
    tasks = trainer.put_tasks(0, range(6))
    with working(pool, tmp_path / "worker", engine) as (_, ended):
        wait_until(lambda: ended)
    assert caplog.text.count("1 completions: the run has num_generations 4") >= 3
    assert "is suspended: 3 uploads in a row were refused" in str(ended[0])
    assert trainer.client.take([task.key for task in tasks], 0) == []


def test_a_pool_that_goes_and_comes_back_costs_time_only(model_folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    engine = PlainEngine()
    with running_pool(tmp_path) as pool:
        trainer = Trainer(PoolClient(pool.url), model_folder, tmp_path / "trainer")
        trainer.publish(0)
        with working(pool, tmp_path / "worker", engine) as (_, ended):
            trainer.wait(trainer.put_tasks(0, range(2)))
            engine.go.clear()
            tasks = trainer.put_tasks(0, range(2, 6))
            wait_until(lambda: engine.most_at_a_time and engine.drawing)
            pool.end()
            engine.go.set()  # what is drawn waits for the pool too
            wait_until(lambda: "asking again for 900 s" in caplog.text)
            with running_pool(tmp_path, port=pool.port):
                trainer.wait(tasks)
                wait_until(lambda: "answers again" in caplog.text)  # once every thread of the worker has its answer
                assert not ended
                lines = [record.getMessage() for record in caplog.records if record.name == "grpo.pool.client"]
    assert len(lines) == 2 and "asking again" in lines[0] and lines[1] == f"{pool.url} answers again"


def test_a_pool_with_another_run_ends_the_worker(trainer, pool, model_folder, tmp_path):
    trainer.publish(0)
    with working(pool, tmp_path / "worker", PlainEngine()) as (_, ended):
        trainer.wait(trainer.put_tasks(0, range(2)))
        pool.end()
        (tmp_path / "other").mkdir()
        with running_pool(tmp_path / "other", port=pool.port):
            Trainer(PoolClient(pool.url), model_folder, tmp_path / "other", run="f" * 16)
            wait_until(lambda: ended)
    assert str(ended[0]) == f"{pool.url} has another run now: start the worker again"


def test_a_worker_that_prepares_pictures_otherwise_than_the_run_ends(pool, model_folder, tmp_path):
    trainer = Trainer(PoolClient(pool.url), model_folder, tmp_path / "trainer", processor="ab12")
    trainer.publish(0)
    with working(pool, tmp_path / "worker", TransformersEngine(WorkerConfig(pool=pool.url))) as (_, ended):
        wait_until(lambda: ended)
    assert isinstance(ended[0], WorkerFailed)
    assert "pictures are prepared otherwise here (not at all) than in run" in str(ended[0])


def test_without_a_run_or_weights_it_waits_and_says_so(pool, model_folder, tmp_path, caplog):
    class LateFiles(PoolClient):
        """The pool has the run before the model's files, and an adapter's base."""

        def send_file(self, source, sha256):
            wait_until(lambda: f"{pool.url} has no weights yet: waiting for the trainer" in caplog.text)
            super().send_file(source, sha256)

    caplog.set_level(logging.INFO)
    with working(pool, tmp_path / "worker", PlainEngine()):
        wait_until(lambda: f"{pool.url} has no run yet: waiting for a trainer" in caplog.text)
        trainer = Trainer(LateFiles(pool.url), model_folder, tmp_path / "trainer")
        trainer.publish(0)
        trainer.wait(trainer.put_tasks(0, range(2)))


def test_a_worker_that_ends_gives_its_leases_back_at_once(pool, trainer, tmp_path):
    engine = PlainEngine(capacity=3, holds=True)
    trainer.publish(0)
    trainer.put_tasks(0, range(2))  # room for one more: the worker asks the pool for it as it ends
    with working(pool, tmp_path / "worker", engine) as (worker, _):
        wait_until(lambda: engine.most_at_a_time == 2)
        worker.close()
        leased = trainer.client.lease(Lease(worker="another", room=2, holds=[], wait=0.0))
        assert [task.group for task in leased.tasks] == [0, 1]
        engine.go.set()


def test_an_engine_that_starts_again_after_a_failed_draw_holds_one_model(model_folder, model, tokenizer):
    """The failure has frames, and they have the model: a card would have room for one."""
    run = run_info(eos_token_ids=sorted(eos_token_ids(model, tokenizer)))
    engine = TransformersEngine(WorkerConfig(pool="http://127.0.0.1:1"))
    engine.start(run, model_folder, 0)
    held = weakref.ref(engine._model)

    def sample(*_, **__):
        raise RuntimeError("CUDA out of memory")

    engine._sampler.sample = sample
    gc.disable()
    try:
        with pytest.raises(EngineError, match="out of memory"):
            engine.draw(task_of(0))
        engine.close()
        engine.start(run, model_folder, 0)
        assert held() is None
    finally:
        gc.enable()
