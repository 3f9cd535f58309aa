"""The messages of trainer, pool and workers: a run, its tasks and versions, and their completions.

A task is a group: a prompt whose completions one worker draws. A version of the policy is named by the number of
updates that it has had. docs/protocol.md describes the requests; tasks and completions go as tensors
(grpo/pool/task_tensors.py), everything else as JSON.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

from grpo.wire import json_fields as fields
from grpo.wire.refusals import ProtocolError, check_number, malformed
from grpo.wire.tool_outcomes import EpisodeRecord, Outcome, RunAgent, RunTools, cut_segments

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpo.wire.picture_files import PicturedPrompt

MOST_TASKS = 4096  # most tasks or groups of one request
ADAPTER = "adapter"  # folder, in that of a model, with an adapter_config.json


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The facts that all tasks of a run share. A pool serves one run."""

    run: str  # the run's identity, in hex: model, data and the settings that change numbers
    name: str  # the run's name on pages and in logs
    vocab_size: int
    eos_token_ids: list[int]
    num_generations: int  # completions of each group
    max_completion_length: int
    temperature: float
    seed: int  # a completion's random numbers follow from `seed_of` its task's attempt, group and its number there
    model_files: str
    """SHA-256 of the file (POST files) with the model's folder but for its weights: a safetensors file, one uint8
    tensor for each file, named by its path"""
    groups_per_round: int = 1  # a group's id divided by it, rounded down, is the round: pages show it
    base_weights: str | None = None
    """SHA-256 of the file (POST files) with the frozen weights under an adapter: each version is the adapter alone,
    whose configuration is in the folder `adapter` of `model_files`; None if each version is all of the weights"""
    in_flight_weight_updates: bool = False
    """whether any newer version may draw a task, and each token another: workers always take the newest"""
    turns: RunTools | None = None  # the tools or environment that answer the policy; None for a run without
    agent: RunAgent | None = None  # the agent whose episodes are drawn; None for a run without
    processor: str = ""  # fingerprint of what prepares the model's pictures; empty for a model of text

    def seed_of(self, attempt: int) -> int:
        return self.seed + (attempt << 32)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, body: bytes) -> RunInfo:
        """Read a body. Raises ProtocolError, 400."""
        info = fields.read_fields(cls, fields.read_json(body))
        fields.check_text("name", info.name)
        fields.check_hex("run", info.run, 16)
        fields.check_hex("model_files", info.model_files, 64)
        if info.base_weights is not None:
            fields.check_hex("base_weights", info.base_weights, 64)
        for name in ("vocab_size", "num_generations", "max_completion_length", "seed", "groups_per_round"):
            fields.check_int(name, getattr(info, name), least=0 if name == "seed" else 1)
        for token in fields.read_ints("eos_token_ids", info.eos_token_ids):
            if token >= info.vocab_size:
                raise malformed(f"eos_token_ids has {token}: the vocabulary is 0 to {info.vocab_size - 1}")
        if not (fields.is_number(info.temperature) and info.temperature > 0):
            raise malformed(f"temperature {fields.shown(info.temperature)}: send a number above 0")
        if not isinstance(info.in_flight_weight_updates, bool):
            raise malformed("in_flight_weight_updates: send true or false")
        fields.check_text("processor", info.processor)
        if info.turns is not None and info.agent is not None:
            raise malformed("turns and agent: send one of them")
        turns = None if info.turns is None else RunTools.of_fields(info.turns)
        agent = None if info.agent is None else RunAgent.of_fields(info.agent)
        return replace(info, turns=turns, agent=agent)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A group to draw."""

    group: int  # the group's id: its place in the run
    attempt: int  # 0, or the number of the replacement of this group
    version: int  # the version of the policy that draws it; the oldest that may, with RunInfo.in_flight_weight_updates
    prompt_ids: list[int] | PicturedPrompt
    columns: str = ""  # the row's columns, a JSON object, for the run's environment or agent; "" without one
    pictures: tuple[str, ...] = ()  # SHA-256 of the prompt's pictures in their order, in hex: files (POST files)

    @property
    def key(self) -> tuple[int, int]:
        return self.group, self.attempt


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """The completions of a group."""

    group: int
    attempt: int
    completions: list[list[int]]
    """token ids, the eos included; each ends with its first eos, or at max_completion_length. With turns an answer may
    follow an eos, and then more drawn tokens. Of an agent's episode all drawn tokens, perhaps none"""
    logprobs: list[list[float]]  # in the distribution that an id was drawn from; float32, NaN at an answer's tokens
    versions: list[list[int]]  # the version that drew each id; of an answer's token that of the last one before it
    drawn: list[list[bool]] | None = None  # whether each id was drawn, or is an answer's; None in a run without turns
    outcomes: list[Outcome] | None = None  # how each completion ended; None in a run without turns and agent
    episodes: list[EpisodeRecord] | None = None  # what each became; None in a run without an agent

    @property
    def key(self) -> tuple[int, int]:
        return self.group, self.attempt

    @property
    def masks(self) -> list[list[bool]]:
        """`drawn`, all True if that is None"""
        return self.drawn or [[True] * len(ids) for ids in self.completions]

    @property
    def tokens(self) -> int:
        """the number of tokens that the policy drew"""
        return sum(map(len, self.completions)) if self.drawn is None else sum(map(sum, self.drawn))


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A sequence with the trainer's own log-probs, by which a worker proves that its engine has a version."""

    prompt_ids: list[int] | PicturedPrompt
    completion_ids: list[int]
    logprobs: list[float]  # of each completion id at temperature 1
    pictures: tuple[str, ...] = ()  # as of a Task


@dataclass(frozen=True, kw_only=True)
class Version:
    """The weights of a version of the policy, as files that the pool holds."""

    version: int
    sha256: str  # SHA-256 of the whole safetensors file, in hex
    size: int  # bytes of the whole file
    whole: bool  # whether the pool holds the whole file
    base: int | None  # the version to which `delta` leads from; None without a delta
    delta: str | None  # SHA-256 of the delta (grpo/pool/delta.py), a file that the pool holds
    probe: Probe

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_fields(cls, content: dict[str, Any]) -> Version:
        """Read a JSON object. Raises ProtocolError, 400."""
        version = fields.read_fields(cls, content)
        fields.check_int("version", version.version, least=0)
        fields.check_int("size", version.size, least=1, most=2**63 - 1)
        fields.check_hex("sha256", version.sha256, 64)
        if not isinstance(version.whole, bool):
            raise malformed("whole: send true or false")
        if version.base is not None:
            fields.check_int("base", version.base, least=0)
            fields.check_hex("delta", version.delta, 64)
        if (version.base is None) != (version.delta is None) or not (version.whole or version.delta):
            raise malformed("a version needs the whole file, or a base with its delta, or both")
        probe = fields.read_fields(Probe, version.probe)
        ids = [fields.read_ints(name, getattr(probe, name)) for name in ("prompt_ids", "completion_ids")]
        numbers = isinstance(probe.logprobs, list) and all(map(fields.is_number, probe.logprobs))
        if not numbers or len(probe.logprobs) != len(ids[1]):
            raise malformed("probe: send one finite log-prob for each of completion_ids")
        if not isinstance(probe.pictures, list | tuple):
            raise malformed("probe: send pictures as a list")
        for sha256 in probe.pictures:
            fields.check_hex("pictures", sha256, 64)
        return replace(version, probe=replace(probe, pictures=tuple(probe.pictures)))


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A worker's request for tasks, which is its heartbeat too."""

    worker: str  # the worker's name
    room: int  # tasks that it can take; 0 only keeps its leases
    holds: list[list[int]]  # [group, attempt] of each task that it is drawing
    wait: float  # seconds to wait if no task is free
    card: str = ""  # the name of its GPU, or CPU
    version: int = -1  # the version that it has; -1 is none
    message: str = ""  # its present work, for the pool's page
    tokens_per_second: float = 0.0

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, body: bytes) -> Lease:
        """Read a body. Raises ProtocolError, 400."""
        lease = fields.read_fields(cls, fields.read_json(body))
        for name in ("worker", "card", "message"):
            fields.check_text(name, getattr(lease, name))
        if not lease.worker:
            raise malformed("worker is empty: send the worker's name")
        fields.check_int("room", lease.room, least=0, most=MOST_TASKS)
        fields.check_int("version", lease.version, least=-1)
        keys_of("holds", lease.holds)
        for name in ("wait", "tokens_per_second"):
            fields.check_amount(name, getattr(lease, name))
        return lease


def keys_of(name: str, value: object) -> list[tuple[int, int]]:
    """Return the (group, attempt) pairs of a JSON list. Raises ProtocolError, 400, or 413 for too many."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise malformed(f"{name}: send a list of [group, attempt]")
    check_number("tasks", len(value), MOST_TASKS)
    for group, attempt in value:
        fields.check_int("group", group, least=0)
        fields.check_int("attempt", attempt, least=0)
    return [*map(tuple, value)]


def drifts_of(value: object) -> dict[int, tuple[float, int]]:
    """Read a JSON list of [group, drift, tokens], where drift is the mean distance of the trainer's log-probs from the
    sampler's, in nats a token. Raises ProtocolError, 400, or 413 for too many."""
    if not isinstance(value, list) or not all(isinstance(row, list) and len(row) == 3 for row in value):
        raise malformed("groups: send a list of [group, drift, tokens]")
    check_number("groups", len(value), MOST_TASKS)
    for group, drift, tokens in value:
        fields.check_int("group", group, least=0)
        fields.check_int("tokens", tokens, least=1)
        fields.check_amount("drift", drift)
    return {group: (float(drift), tokens) for group, drift, tokens in value}


def check_drawn(drawn: GroupResult, run: RunInfo, task: Task) -> None:
    """Raise ProtocolError, 422, if these cannot be completions of this task: a pool keeps none unchecked."""

    def check(is_right: bool, message: str) -> None:
        if not is_right:
            raise ProtocolError(422, "wrong_completions", f"group {drawn.group}: {message}")

    count, longest, eos = len(drawn.completions), run.max_completion_length, {*run.eos_token_ids}
    check(count == run.num_generations, f"{count} completions: the run has num_generations {run.num_generations}")
    has_outcomes = run.turns is not None or run.agent is not None
    check((drawn.outcomes is not None) == has_outcomes, "it has outcomes and the run no turns, or the run alone has")
    check((drawn.episodes is None) == (run.agent is None), "it has episodes and the run no agent, or the run alone has")
    if run.agent is not None:
        for row in range(count):
            _check_episode(drawn, row, run, task, check)
        return
    rows = zip(drawn.completions, drawn.masks, drawn.logprobs, drawn.versions, strict=True)
    for row, (ids, mask, logprobs, versions) in enumerate(rows):
        low, high, drew = min(ids), max(ids), sorted({*versions})
        is_known = low >= 0 and high < run.vocab_size
        check(is_known, f"token ids go from {low} to {high}: the vocabulary is 0 to {run.vocab_size - 1}")
        check(len(ids) <= longest, f"a completion has {len(ids)} tokens: max_completion_length is {longest}")
        segments = [segment for is_drawn, segment in cut_segments(ids, mask) if is_drawn]
        check(all(eos.isdisjoint(segment[:-1]) for segment in segments), "a completion continues after an eos")
        is_between = mask[0] and mask[-1] and all(segment[-1] in eos for segment in segments[:-1])
        check(is_between, "an answer is not between an eos and drawn tokens")
        is_finished = ids[-1] in eos
        is_whole = is_finished or len(ids) == longest
        check(is_whole, f"a completion of {len(ids)} tokens has neither an eos nor max_completion_length tokens")
        if run.turns:
            outcome, turns = drawn.outcomes[row], len(segments)
            check(is_finished or not outcome.finished, "a completion without an eos at its end is called finished")
            is_short = run.turns.max_turns is None or turns <= run.turns.max_turns
            check(is_short, f"a completion has {turns} turns: max_turns is {run.turns.max_turns}")
            unknown = outcome.rewards.keys() - {*run.turns.rewards}
            check(not unknown, f"rewards {str(unknown)[:80]}, which the run's environment does not give")
        is_number = all(math.isfinite(value) and value <= 0 for value in compress(logprobs, mask))
        check(is_number, "a log-prob is above 0 or not finite")
        is_nan = all(math.isnan(value) for value, is_drawn in zip(logprobs, mask, strict=True) if not is_drawn)
        check(is_nan, "an answer's token has a log-prob")
        if run.in_flight_weight_updates:
            is_right = drew[0] >= task.version and versions == sorted(versions)
            check(is_right, f"drawn by versions {drew[:5]}: the task takes {task.version} and later ones, in order")
        else:
            check(drew == [task.version], f"drawn by versions {drew[:5]}: the task is of version {task.version}")


def _check_episode(drawn: GroupResult, row: int, run: RunInfo, task: Task, check: Callable[[bool, str], None]) -> None:
    """Raise what `check` raises if this cannot be an episode of the run's agent."""
    agent, episode, ids, outcome = run.agent, drawn.episodes[row], drawn.completions[row], drawn.outcomes[row]
    logprobs: list[float] = []
    for branch in episode.branches:
        every = [*branch.prompt_ids, *branch.completion_ids]
        is_known = min(every) >= 0 and max(every) < run.vocab_size
        check(is_known, f"token ids go from {min(every)} to {max(every)}: the vocabulary is 0 to {run.vocab_size - 1}")
        check(len(every) <= agent.context, f"a branch has {len(every)} tokens: the most are {agent.context}")
        check(branch.drawn[0] and branch.drawn[-1], "a branch does not begin and end with drawn tokens")
        pairs = [*zip(branch.drawn, branch.sampling_logprobs, strict=True)]
        is_nan = all(is_drawn or math.isnan(value) for is_drawn, value in pairs)
        check(is_nan, "a token that is not drawn has a log-prob")
        logprobs += [value for is_drawn, value in pairs if is_drawn]
    check(sorted(logprobs) == sorted(drawn.logprobs[row]), "its branches have other log-probs than the drawn tokens")
    is_number = all(math.isfinite(value) and value <= 0 for value in logprobs)
    check(is_number, "a log-prob is above 0 or not finite")
    check(len(ids) == len(logprobs), f"its branches draw {len(logprobs)} tokens, and it has {len(ids)}")
    drew = sorted({*drawn.versions[row]})
    check(drew in ([], [task.version]), f"drawn by versions {drew[:5]}: the task is of version {task.version}")
    turns = sum(turn["seen"] for turn in episode.tree)
    check(turns <= agent.max_turns, f"an episode has {turns} turns: max_turns is {agent.max_turns}")
    unknown = outcome.rewards.keys() - {*agent.rewards}
    check(not unknown, f"rewards {str(unknown)[:80]}, which the run's agent does not give")
