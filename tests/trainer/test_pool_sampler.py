"""What a rank puts into a pool and makes of what comes back, with the pool's file in the place of a server; what is
said of a pool and its workers, and when a rank has waited too long."""

import datetime
import json
import threading

import pytest
import torch
from stored import WITH_TURNS, answered, damage

from grpo.client.server_errors import ServersLost
from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import PromptStream
from grpo.data.records import Example
from grpo.pool.client import Retrier
from grpo.pool.store import Store
from grpo.pool.task_tensors import decode_drawn
from grpo.trainer.deepspeed_engine import Ranks
from grpo.trainer.pool_sampler import PoolSampler, check_rows, describe_wait
from grpo.wire.tool_outcomes import LONGEST_COLUMNS


class Kept:
    """A source whose tasks and groups are in a pool's file; all of a run's tasks are drawn when they are put."""

    url, moved_at = "file", 0.0

    def __init__(self, path):
        self.store, self.sizes = Store(str(path), damage), []
        self.store.set_run(WITH_TURNS)

    def put_tasks(self, tasks):
        self.sizes.append(sum(len(task.columns) for task in tasks))
        self.store.put_tasks(tasks)
        self.store.add_results([(task, answered(task)) for task in tasks], "w")

    def take(self, keys, wait):
        return [decode_drawn(body)[0] for body in self.store.results(keys, 1 << 30)]

    def status(self):
        return {}


@pytest.fixture
def settings(tmp_path):
    """`settings(**changes)`: a configuration with a pool and an environment."""
    (tmp_path / "game.py").write_text("class Guess: ...\n")

    def make(**changes):
        changes = {"sampler": "pool", "pool": "http://box:1", "prompts_per_step": 3, "num_generations": 2} | changes
        changes |= {"environment": f"{tmp_path}/game.py:Guess"}
        return parse_arguments(TrainerConfig, "", [f"--{name}={value}" for name, value in changes.items()])

    return make


@pytest.fixture
def ranks(one_rank):
    return Ranks(rank=0, size=1, device=torch.device("cpu"), watchdog=None)


def example(index: int, **columns) -> Example:
    return Example(index=index, prompt="", prompt_ids=[7, index + 3], columns=columns)


@pytest.fixture
def draw(settings, ranks, tokenizer, tmp_path):
    """`draw(examples, **changes)`: the groups of a round, and the source that they came from."""

    sources = []

    def sample(examples, size=1, **changes):
        count, config = len(examples), settings(prompts_per_step=len(examples), **changes)
        source = Kept(tmp_path / "pool.sqlite")
        sources.append(source)
        ask, stream = Retrier(source, 900.0, threading.Event()), PromptStream(examples, count, seed=0)
        sampler = PoolSampler(
            config=config,
            source=source,
            ask=ask,
            policy=None,
            run=None,
            tokenizer=tokenizer,
            end_ids=[2],
            prompts=stream,
            ranks=Ranks(rank=0, size=size, device=ranks.device, watchdog=None),
        )
        sampler.update_weights(0)
        return sampler.sample(examples, 2, 1.0, config.seed, ids=range(count)), source

    yield sample
    for source in sources:
        source.store.close()


def test_a_task_has_its_row_and_a_rollout_its_segments(draw, tokenizer):
    text = "x" * (LONGEST_COLUMNS - 100)
    groups, source = draw([example(index, secret="é", text=text) for index in range(40)])
    for group, rollouts in enumerate(groups):
        task, is_drawn = source.store.find_task((group, 0))
        assert is_drawn and json.loads(task.columns) == {"secret": "é", "text": text}
        first, second = rollouts
        drawn = answered(task)
        of_first = drawn.completions[0], drawn.drawn[0], drawn.outcomes[0]
        assert (first.completion_ids, first.drawn, first.outcome) == of_first
        assert (first.finished, second.finished) == (True, False)
        segments = [first.completion_ids[:2], first.completion_ids[3:]]
        assert first.text == "\n".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in segments)
        assert str(first.sampling_logprobs) == str(drawn.logprobs[0]) and first.policy_version == task.version
    assert len(source.sizes) > 1 and max(source.sizes) <= 32 << 20  # a pool takes 64 MiB


def test_rows_that_no_environment_of_a_worker_can_have_are_refused_at_the_start(settings):
    day, config = datetime.date(2026, 11, 23), settings()
    check_rows(config, [example(0, text="é", numbers=[1, None, float("nan")], more={"a": True})])
    with pytest.raises(ConfigError, match=r"^environment='.*': .* row 1 \(from 0\) has what is no JSON \(.*date"):
        check_rows(config, [example(0), example(1, day=day)])
    with pytest.raises(ConfigError, match=r"of 1,048,576 bytes at most, and row 0 \(from 0\) has [\d,]* bytes: mend"):
        check_rows(config, [example(0, text="x" * LONGEST_COLUMNS)])
    check_rows(parse_arguments(TrainerConfig, "", ["--environment", config.environment]), [example(1, day=day)])


WORKER = {"card": "", "version": -1, "state": "waiting", "message": "", "last_seen": 2.4, "reason": ""}


def test_what_is_waited_for_and_what_each_worker_does():
    workers = [
        WORKER | {"name": "box #1", "card": "RTX 4090", "version": 40, "state": "drawing", "message": "fetching 41"},
        WORKER | {"name": "old #2", "state": "apart", "reason": "group 7: a log-prob is above 0"},
    ]
    rounds = [{"round": 6, "tasks": 8, "drawn": 0}, {"round": 5, "tasks": 8, "drawn": 3}]
    assert describe_wait({"workers": workers, "rounds": rounds}, "http://a:1", 5) == (
        "3 of 8 groups are drawn; box #1 on RTX 4090 is drawing (fetching 41), version 40, 2 s ago; "
        "old #2 is apart, version -1, 2 s ago, last refused: group 7: a log-prob is above 0"
    )
    many = [WORKER | {"name": f"box #{number}"} for number in range(10)]
    text = describe_wait({"workers": many}, "http://a:1", 5)
    assert text.count("is waiting") == 8 and text.endswith("box #7 is waiting, version -1, 2 s ago; and 2 more")
    assert describe_wait({"rounds": rounds, "workers": []}, "http://a:1", 7) == (
        "no worker asks this pool: start one with 'python generate.py --pool http://a:1', on any machine"
    )


def test_a_rank_waits_for_the_others_groups_where_no_time_is_limited(draw, monkeypatch):
    looks = [{"rounds": [{"round": 0, "tasks": 4, "drawn": drawn}]} for drawn in (4, 3, 2)]
    monkeypatch.setattr(Kept, "status", lambda _: looks.pop())
    groups, _ = draw([example(0)] * 2, size=2)
    assert len(groups) == 2 and looks == []


def test_a_group_of_any_rank_moves_the_deadline_on(draw, monkeypatch):
    now, looks = 1000.0, [(10, 4), (15, 4), (25, 4), (0, 3)]

    def status():
        nonlocal now
        seconds, drawn = looks.pop()
        now += seconds
        return {"rounds": [{"round": 0, "tasks": 9, "drawn": drawn}]}

    monkeypatch.setattr("grpo.trainer.pool_sampler.time.monotonic", lambda: now)
    monkeypatch.setattr(Kept, "take", lambda *_: [])
    monkeypatch.setattr(Kept, "status", lambda _: status())
    with pytest.raises(ServersLost, match="no group of round 0 for 20 s: no worker asks this pool"):
        draw([example(0)] * 3, pool_deadline=20)
    assert not looks
