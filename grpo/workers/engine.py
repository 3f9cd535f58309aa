"""The interface of every engine, which draws completions for grpo/workers/loop.py, and what engines share: completions
of several segments, each drawn in its own request, and the tools and environment that answer in between. Their code is
chosen at the worker's start; it must agree with the run.

For a run without them, neither the user's code nor a heavy library is imported.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from grpo.config.errors import ConfigError
from grpo.config.programs import WorkerConfig, WorkerTurnsConfig
from grpo.config.sampling_settings import AskedSections, SharedConfig, label_of
from grpo.pool.protocol import GroupResult, Probe, RunInfo, Task
from grpo.wire.tool_outcomes import SETTINGS, EpisodeRecord, RunTools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo.agents.episodes import Agent
    from grpo.data.records import Example, Rollout
    from grpo.tools.dialogue import UserResponder

log = logging.getLogger(__name__)

VLLM_ROWS = 256  # completions, or requests of an agent's programs, that vLLM draws at a time
Segment = tuple[list[int], list[float], list[int]]  # the ids drawn in one request, their log-probs and versions


class EngineError(Exception):
    """A failed engine. The message is one sentence; the worker starts the engine again."""


class WorkerFailed(Exception):
    """The end of a worker. The message says why in one sentence."""


class WorkerTools:
    """What answers the policy on this worker, tools and environment or an agent, for the tasks of a pool."""

    def __init__(self, responder: UserResponder | Agent, tokenizer: PreTrainedTokenizerBase):
        self.responder, self._tokenizer = responder, tokenizer

    def make_example(self, task: Task) -> Example:
        from grpo.data.records import Example

        prompt = self._tokenizer.decode([*task.prompt_ids], skip_special_tokens=False)
        columns = json.loads(task.columns or "{}")
        return Example(index=task.group, prompt=prompt, prompt_ids=task.prompt_ids, columns=columns)

    def close(self) -> None:
        self.responder.close()


class Engine(Protocol):
    """Draws completions of groups. Every method may raise EngineError."""

    card: str  # the name of its GPU, or CPU, for the pool's page; "" until it is known
    capacity: int  # groups that it draws at a time; known after `start`
    loads_in_flight: bool
    """whether `load` and `logprobs` may be called while it draws, and the rest is by the new weights; as `capacity`"""

    def start(self, run: RunInfo, folder: Path, version: int, turns: WorkerTools | None = None) -> None:
        """Load the model of a folder, the policy's `version`: its configuration, tokenizer and model.safetensors, and
        for a run with `base_weights` the adapter in folder/adapter. `turns` answer the policy in each completion.
        `close` comes before a second `start`, which may have another folder's weights but never another run."""

    def load(self, folder: Path, version: int) -> None:
        """Draw from now on with the weights of the folder's versions_file. No `draw` runs, but with loads_in_flight."""

    def logprobs(self, probe: Probe) -> list[float]:
        """Return the log-prob of each of the probe's completion ids, at temperature 1. `draw` as for `load`."""

    def draw(self, task: Task) -> GroupResult:
        """Draw a group's completions, and say which version drew each token. Up to `capacity` threads call it at a
        time. It raises RewardError too, if the run's environment fails."""

    def close(self) -> None:
        """End: any number of times, from any thread, before `start` too. A `draw` ends soon, perhaps by EngineError."""


def check_processor(run: RunInfo, fingerprint: str) -> None:
    """Raise WorkerFailed if what prepares pictures here would make other pixels, or ids, than the trainer's."""
    if run.processor != fingerprint:
        reason = f"pictures are prepared otherwise here ({fingerprint or 'not at all'}) than in run {run.name}"
        raise WorkerFailed(f"{reason} ({run.processor}): take the trainer's versions of transformers and Pillow")


def check_given(config: WorkerConfig, run: RunInfo) -> None:
    """Raise ConfigError if only the worker or only the run has tools, an environment or an agent."""
    wanted = None if run.agent is None else run.agent.name
    if (config.agent and label_of(config.agent)) != wanted:
        remedy = "leave it out" if wanted is None else "name its program, as the trainer does"
        raise ConfigError(f"agent={config.agent!r}: that of run {run.name} is {wanted}: {remedy}")
    wanted = None if run.turns is None else run.turns.environment
    if (config.environment and config.environment.rpartition(":")[2]) != wanted:
        remedy = "leave it out" if wanted is None else f"name its file, path/to/file.py:{wanted}, as the trainer does"
        raise ConfigError(f"environment={config.environment!r}: that of run {run.name} is {wanted}: {remedy}")
    names = run.turns.tools if run.turns else []
    if wanted is None and bool(config.tools) != bool(names):
        has = f"run {run.name} has {', '.join(names) or 'none'}"
        raise ConfigError(f"tools={config.tools!r}: {has}: name the files of its tools, as the trainer does")


def open_turns(config: WorkerConfig, run: RunInfo, folder: Path) -> WorkerTools | None:
    """Start the worker's tools and environment, or its agent, with the run's settings; None for a run without. `folder`
    has the run's tokenizer. Raises ConfigError if they cannot be used, or differ from the run's."""
    if run.turns is None and run.agent is None:
        return None
    from grpo.model.load import load_tokenizer
    from grpo.tools.dialogue import start_turns

    tokenizer = load_tokenizer(SharedConfig(model_name_or_path=str(folder), trust_remote_code=config.trust_remote_code))
    if run.agent is not None:
        return WorkerTools(_start_agent(config, run, tokenizer), tokenizer)
    settings = {name: getattr(run.turns, name) for name in SETTINGS}
    ours = {name: getattr(config, name) for name in ("tools", "environment", "tool_timeout")}
    turns = start_turns(WorkerTurnsConfig(**ours, **settings), tokenizer, run.eos_token_ids)
    check_found(config, run, RunTools.of(turns.tools, config.environment, [*turns.rewards], **settings))
    return WorkerTools(turns, tokenizer)


def _start_agent(config: WorkerConfig, run: RunInfo, tokenizer: PreTrainedTokenizerBase) -> Agent:
    from grpo.agents.episodes import Agent

    of_run = "max_turns", "agent_history", "agent_failure_reward", "agent_may_sample"
    of_run += "tool_call_parser", "chat_template_kwargs"
    ours = "agent", "agent_python", "agent_timeout", "agent_memory", "max_concurrent_episodes"
    settings = AskedSections(
        **{name: getattr(run.agent, name) for name in of_run},
        **{name: getattr(config, name) for name in ours},
        temperature=run.temperature,
    )
    rows = VLLM_ROWS if config.engine == "vllm" else config.sequences_per_generate or run.num_generations
    agent = Agent(settings, tokenizer, run.eos_token_ids, context=run.agent.context, rows=rows)
    if agent.describe().program != run.agent.program:
        log.warning("agent=%r: its file differs from the trainer's: take the file that the trainer has", config.agent)
    agent.start()
    return agent


def check_found(config: WorkerConfig, run: RunInfo, found: RunTools) -> None:
    """Raise ConfigError if a worker's tools and environment differ from the run's."""
    ours, runs = ((tools.tools, tools.schemas, tools.rewards) for tools in (found, run.turns))
    if ours != runs:
        field = "tools" if config.tools else "environment"
        kinds = "functions, SHA-256 of their schemas (type hints and docstrings) and rewards"
        difference = f"{kinds} are {ours}, and in run {run.name} {runs}"
        raise ConfigError(f"{field}={getattr(config, field)!r}: {difference}: take the files that the trainer has")


def make_result(run: RunInfo, task: Task, rollouts: list[Rollout]) -> GroupResult:
    """Return the group of these completions, each of which one version drew, for the run's pool."""
    result = GroupResult(
        group=task.group,
        attempt=task.attempt,
        completions=[rollout.completion_ids for rollout in rollouts],
        logprobs=[rollout.sampling_logprobs for rollout in rollouts],
        versions=[[rollout.policy_version] * len(rollout.completion_ids) for rollout in rollouts],
    )
    if run.turns is None and run.agent is None:
        return result
    masks = [rollout.drawn or [True] * len(rollout.completion_ids) for rollout in rollouts]
    result = replace(result, drawn=masks, outcomes=[rollout.outcome for rollout in rollouts])
    if run.agent is None:
        return result
    episodes = [EpisodeRecord(branches=rollout.branches, text=rollout.text, tree=rollout.tree) for rollout in rollouts]
    return replace(result, episodes=episodes)


def draw_in_turns(
    turns: WorkerTools, run: RunInfo, task: Task, draw_segment: Callable[[list[int], int], Segment]
) -> GroupResult:
    """Draw a group whose completions have several segments, each completion in a thread: none waits for another's.
    `draw_segment(ids, room)` draws at most `room` tokens after these ids, up to an eos, and returns their ids,
    log-probs and versions. Raises its errors, and RewardError if an environment fails."""
    from grpo.wire.picture_files import with_more  # needs Pillow, which not every engine brings

    example, failed = turns.make_example(task), threading.Event()

    def draw_completion(place: int) -> list:
        """Return the completion's place in each of the group's lists."""
        tokens: list[tuple[int, float, int, bool]] = []  # id, log-prob, version, whether it was drawn
        dialogue = turns.responder.begin(example, (run.seed_of(task.attempt), task.group, place))
        try:
            while not failed.is_set():  # else the group is lost
                prompt = with_more(task.prompt_ids, [token[0] for token in tokens])
                ids, logprobs, versions = draw_segment(prompt, run.max_completion_length - len(tokens))
                tokens += [(*token, True) for token in zip(ids, logprobs, versions, strict=True)]
                future = dialogue.answer(ids, run.max_completion_length - len(tokens))
                answer = None if future is None else future.result()
                if answer is None:
                    break
                tokens += [(token, math.nan, versions[-1], False) for token in answer]
        except BaseException:
            failed.set()
            raise
        finally:
            dialogue.close()
        return [*map(list, zip(*tokens, strict=True)), dialogue.outcome]

    with ThreadPoolExecutor(run.num_generations, thread_name_prefix="turns") as threads:
        rows = [*threads.map(draw_completion, range(run.num_generations))]
    completions, logprobs, versions, drawn, outcomes = map(list, zip(*rows, strict=True))
    return GroupResult(
        group=task.group,
        attempt=task.attempt,
        completions=completions,
        logprobs=logprobs,
        versions=versions,
        drawn=drawn,
        outcomes=outcomes,
    )
