"""Draws the episodes of the user's program: the sampler of a run with `agent`, and what its inputs hold of it."""

from __future__ import annotations

import functools
import logging
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo.agents.agent_processes import HOST_LOST, AgentProgram, AgentPrograms, Ending
from grpo.agents.gateway import EpisodeLimits, Gateway, RunningEpisode
from grpo.agents.journal import Journal, RunJournal, read_program, sum_weights
from grpo.agents.tree import Episode, Formats
from grpo.config.sampling_settings import AnsweringConfig, AskedSections, label_of
from grpo.data.records import Example, Rollout
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.drawer import Drawer
from grpo.sampling.generate import policy_that_draws
from grpo.sampling.sampler import EVALUATION_SEED, Groups, Order
from grpo.tools.dialogue import UserResponder
from grpo.tools.dialogue import start_turns as start_user_turns
from grpo.usercode.prints import PRINTS
from grpo.wire.health import fingerprint
from grpo.wire.tool_outcomes import RunAgent

log = logging.getLogger(__name__)

PASSED = "passed"  # the name of the verdict beside an agent's reward
_FIRST_ROOM = 256  # tokens of a prompt that there is room for before one is longer


@dataclass(frozen=True, kw_only=True)
class Given:
    """A reward that the program itself gives."""

    is_verdict: bool
    weight: float


class AgentSampler(ContinuousSampler):
    """The sampler of a run whose completions are episodes of a program."""

    def _draw(self, order: Order) -> list[list[Rollout]]:
        agent = self._turns
        # Those of an evaluation are drawn anew: the same names are other problems' once its settings change.
        is_trained_on = order.names is not None and order.names[0][0] < EVALUATION_SEED
        journal = agent.journal if is_trained_on else None
        if journal is not None:
            journal.begin(self._policy_version, functools.partial(sum_weights, self._model))
        with policy_that_draws(self._model):
            rows = self._make_rows(
                order,
                rows=self._rows,
                slots=self._rows,
                copies=1,
                longest_prompt=min(_FIRST_ROOM, agent.context),
                longest=agent.context,
                has_scales=agent.config.agent_may_sample,
            )
            return draw_episodes(
                agent,
                order,
                Drawer(rows, agent.context, self._look_every),
                longest=self._max_new_tokens,
                version=self._policy_version,
                journal=journal,
            )


class Agent:
    """The user's program: in the place of tools and environment (grpo/tools/dialogue.py), which a run with it lacks."""

    tools = None
    sampler = AgentSampler

    def __init__(
        self,
        config: AskedSections,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        *,
        context: int,
        rows: int,
    ):
        """Start nothing yet. An assistant's turn ends with one of `eos_token_ids`; `context`: most tokens of a request
        with its answer; `rows`: the requests that are drawn at a time."""
        self.config, self.context, self._rows = config, context, rows
        self.label = label_of(config.agent)
        self.rewards = {self.label: Given(is_verdict=False, weight=1.0), PASSED: Given(is_verdict=True, weight=0.0)}
        self.formats = Formats(
            tokenizer, eos_token_ids, config.tool_call_parser, config.chat_template_kwargs, history=config.agent_history
        )
        self.gateway: Gateway | None = None
        self.programs: AgentPrograms | None = None
        self.journal: Journal | None = None  # of episodes that are trained on
        self._failures: Counter[str] = Counter()

    def describe(self) -> RunAgent:
        """Return what the workers of a pool must know, and must have."""
        config = self.config
        return RunAgent(
            name=self.label,
            program=read_program(config.agent),
            context=self.context,
            max_turns=config.most_turns,
            agent_history=config.agent_history,
            agent_failure_reward=config.agent_failure_reward,
            agent_may_sample=config.agent_may_sample,
            tool_call_parser=config.tool_call_parser,
            chat_template_kwargs=config.chat_template_kwargs,
            rewards=[*self.rewards],
        )

    def observe(self, columns: dict[str, Any]) -> str:
        """See Responder: the program has the row itself."""
        return ""

    def try_on(self, example: Example) -> None:
        """Start, and raise ConfigError, too, if programs cannot have such a row."""
        self.start()
        self.programs.make_plain(example.columns)

    def start(self) -> None:
        """Start the gateway and the process that imports the user's file. Raises ConfigError if that cannot be run."""
        config = self.config
        self.gateway = Gateway(config.max_concurrent_episodes, segments=self._rows)
        self.programs = AgentPrograms(
            config.agent,
            self.gateway.url,
            python=config.agent_python,
            timeout=config.agent_timeout,
            memory=config.agent_memory,
        )

    def keep_journal(self, folder: Path, rank: int, *, identity: str, oldest: Callable[[], int]) -> None:
        """Keep all that is drawn in a run's folder, and which episodes have ended. `identity` names model, data and
        settings; for `oldest` see Journal."""
        run = fingerprint(identity, read_program(self.config.agent))
        self.journal = RunJournal(folder / "journal", rank, run=run, oldest=oldest)

    def close(self) -> None:
        """End all programs, after all episodes."""
        if self.programs is not None:
            self.programs.close()
        if self.gateway is not None:
            self.gateway.shut_down()

    def begin(self, example: Example, session: RunningEpisode) -> tuple[str, AgentProgram]:
        """Let the program begin with a row; return the episode's key and its process."""
        key, name = self.gateway.open(session), session.episode.name
        # A program that begins again asks the same.
        seed = int(fingerprint(example.index if name is None else name)[:8], 16)
        with session.lock:  # before the program's first request
            program = self.programs.begin(example.columns, key, seed)
            session.on_wait = lambda waits: program.pause() if waits else program.resume()
        return key, program

    def make_rollout(self, session: RunningEpisode, ending: Ending) -> Rollout:
        """Make the record of an episode that is over."""
        episode, rewards, failure = session.episode, {}, ending.failure and (session.refusal or ending.failure)
        if failure:
            self._note(failure, ending.text)
            if (value := self.config.agent_failure_reward) is not None:
                rewards = {self.label: value, PASSED: 0.0}
        elif ending.answer is not None and ending.answer.reward is not None:
            answer = ending.answer
            passed = answer.reward > 0 if answer.passed is None else answer.passed
            rewards = {self.label: answer.reward, PASSED: float(passed)}
        record = episode.record(session.version)
        outcome = replace(
            record.outcome,
            finished=not failure and record.finished,
            messages=record.outcome.messages or [{"role": "assistant", "content": ""}],  # of one that asked nothing
            rewards=rewards,
            failure=failure,
            parts={} if ending.answer is None else ending.answer.parts,
        )
        return replace(record, finished=outcome.finished, outcome=outcome)

    def _note(self, failure: str, text: str) -> None:
        self._failures[failure] += 1
        if self._failures[failure] == 1:
            log.warning("%s\nan episode of the agent failed (%s): the others of its kind are counted", text, failure)


def start_turns(
    config: AnsweringConfig, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]
) -> UserResponder | Agent | None:
    """Return what answers the policy between its segments: tools and environment, a program of the user's, or None."""
    if config.agent is None:
        return start_user_turns(config, tokenizer, eos_token_ids)
    rows = config.sequences_per_generate
    return Agent(config, tokenizer, eos_token_ids, context=config.longest_sequence, rows=rows)


def draw_episodes(
    agent: Agent, order: Order, drawer: Drawer, *, longest: int, version: int, journal: Journal | None = None
) -> list[list[Rollout]]:
    """Run the programs of an order, whose answers of at most `longest` tokens the policy `version` draws with `drawer`.
    Raises the drawer's errors."""
    limits = EpisodeLimits(
        longest=longest,
        context=agent.context,
        turns=agent.config.most_turns,
        temperature=agent.config.temperature,
        draw_temperature=order.temperature,
        may_sample=agent.config.agent_may_sample,
    )
    open_session = functools.partial(RunningEpisode, drawer=drawer, limits=limits, version=version, journal=journal)
    return _Episodes(agent, order, drawer, open_session).run()


class _Episodes:
    """The episodes of one order."""

    def __init__(self, agent: Agent, order: Order, drawer: Drawer, open_session: Callable[..., RunningEpisode]):
        self._agent, self._order, self._drawer, self._open_session = agent, order, drawer, open_session
        self._groups = Groups(order)
        self._count = len(order.examples) * order.copies
        self._begun = 0
        self._begun_again: set[int] = set()  # episodes whose host was lost
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._running: dict[int, tuple[str, RunningEpisode, AgentProgram]] = {}

    def run(self) -> list[list[Rollout]]:
        try:
            self._drawer.run(self._is_over)
        finally:
            for key, _, program in self._running.values():
                self._agent.programs.kill(program, "the run ended")
                self._agent.gateway.close(key)
            PRINTS.end_batch()
        return self._groups.all

    def _is_over(self) -> bool:
        """Take in the episodes that have ended, and let others begin; tell whether all are over."""
        while not self._ended.empty():
            number = self._ended.get()
            key, session, program = self._running.pop(number)
            self._agent.gateway.close(key)
            ending = program.result.result()
            if ending.failure == HOST_LOST and number not in self._begun_again:  # it may be another program's fault
                self._begun_again.add(number)
                self._begin(number)
                continue
            rollout = self._agent.make_rollout(session, ending)
            if session.journal is not None:
                session.journal.end(session.episode.name, rollout)
            self._groups.add(number, rollout)
        while self._begun < self._count and len(self._running) < self._agent.config.max_concurrent_episodes:
            self._begin(self._begun)
            self._begun += 1
        self._groups.hand_over()
        return self._begun == self._count and not self._running

    def _begin(self, number: int) -> None:
        example, name = self._order.examples[number // self._order.copies], self._order.name(number)
        session = self._open_session(episode=Episode(self._agent.formats, name))
        if session.journal is not None and (rollout := session.journal.find_rollout(name)):
            self._groups.add(number, rollout)
            return
        key, program = self._agent.begin(example, session)
        self._running[number] = key, session, program

        def end(_: Any) -> None:
            self._ended.put(number)
            self._drawer.wake()

        program.result.add_done_callback(end)
