"""What tests fill a pool of rollouts with. It loads no torch: processes that are to be killed at once import it."""

import hashlib
import math
import random
from dataclasses import replace

from grpo.pool.protocol import GroupResult, Probe, RunInfo, Task, Version
from grpo.pool.store import Store
from grpo.wire.tensors import FilePart
from grpo.wire.tool_outcomes import Outcome, RunAgent, RunTools

PROBE = Probe(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5])
FOLDER = b"the model's folder"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def run_info(**others) -> RunInfo:
    """Return what a run tells the pool; `others` are fields of other values."""
    fields = {"run": "0123456789abcdef", "name": "runs/a", "vocab_size": 100, "eos_token_ids": [2]}
    fields |= {"num_generations": 2, "max_completion_length": 4, "temperature": 0.7}
    fields |= {"seed": 42, "model_files": "a" * 64}
    return RunInfo(**fields | others)


RUN = run_info(model_files=sha(FOLDER), groups_per_round=2)

TURNS = RunTools(
    tools=["add"],
    schemas="f" * 64,
    environment="Guess",
    rewards=["Guess"],
    max_turns=None,
    max_tool_calling_iterations=None,
    max_tool_response_length=2048,
    tool_call_parser="auto",
    chat_template_kwargs=None,
)
WITH_TURNS = replace(RUN, turns=TURNS)

AGENT = RunAgent(
    name="solve",
    program=["0123456789abcdef"],
    context=12,
    max_turns=3,
    agent_history="drawn",
    agent_failure_reward=None,
    agent_may_sample=False,
    tool_call_parser="auto",
    chat_template_kwargs=None,
    rewards=["solve", "passed"],
)


def damage(error):
    raise AssertionError(error)


def weights(number: int, size: int = 5000) -> bytes:
    return random.Random(number).randbytes(size)


def put_file(store: Store, data: bytes) -> str:
    assert store.files.add(FilePart(sha256=sha(data), size=len(data), offset=0), data) == len(data)
    return sha(data)


def put_version(store: Store, number: int, base: int | None = None, whole: bool = True, salt: int = 0) -> Version:
    """Store a version of random weights, whole or as a delta from another."""
    data, delta = weights(number + salt), weights(-number - salt - 1, 100)
    if whole:
        put_file(store, data)
    if base is not None:
        put_file(store, delta)
    version = Version(
        version=number,
        sha256=sha(data),
        size=len(data),
        whole=whole,
        base=base,
        delta=None if base is None else sha(delta),
        probe=PROBE,
    )
    store.add_version(version)
    return version


def task_of(group: int, prompt_ids: list[int] | None = None, **others) -> Task:
    """Return a task of version 0, at its first attempt; `others` are fields of other values."""
    return Task(**{"group": group, "attempt": 0, "version": 0, "prompt_ids": prompt_ids or [7]} | others)


def drawn(task: Task) -> GroupResult:
    ids = [[3 + (task.group + task.attempt) % 50, 2], [5, 6, 7, 8]]
    return GroupResult(
        group=task.group,
        attempt=task.attempt,
        completions=ids,
        logprobs=[[-0.5] * len(row) for row in ids],
        versions=[[task.version] * len(row) for row in ids],
    )


def answered(task: Task) -> GroupResult:
    """Completions of a run with turns: the first has an answer of one token."""
    made, segments = drawn(task), [[3 + task.group % 50, 2, 9, 2], [5, 6, 7, 8]]
    masks = [[True, True, False, True], [True] * 4]
    logprobs = [[-0.5 if is_drawn else math.nan for is_drawn in mask] for mask in masks]
    messages = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "é"}]
    outcomes = [
        Outcome(finished=True, messages=messages, tool_calls=1, tool_failures=0, rewards={"Guess": 1.0}),
        Outcome(finished=False, messages=messages[:1]),
    ]
    versions = [[task.version] * 4] * 2
    return replace(made, completions=segments, logprobs=logprobs, versions=versions, drawn=masks, outcomes=outcomes)
