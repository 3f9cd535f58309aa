"""The journal of a run: what was drawn for episodes to train on, on disk before their programs have it.

    RUN/journal/12-9f86d081884c7d65-rank-0.jsonl    what rank 0 drew after 12 updates
    {"episode": [seed, group, number], "request": name, "ids": [...], "logprobs": [...]}
    {"episode": [seed, group, number], "rollout": {...}}    the episode has ended

A run that resumes from a checkpoint draws again all rounds after it. An episode that had ended is taken from the
journal. The program of any other one begins anew, and gets the same answers as before to the requests that are here.
So the policy that had drawn them learns from them, and no other: the hex digits are those of its weights and of all
that a draw follows from (`sum_weights`, `Journal`).

A line is with the system before it is used, so that it survives a kill of any process. The last lines may be lost with
the machine: then no program is left that has seen them. A pool's workers keep the same lines in the pool
(grpo/workers/worker_episodes.py).
"""

from __future__ import annotations

import json
import logging
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from grpo.config.sampling_settings import is_adapted
from grpo.data.records import Rollout
from grpo.sampling.drawer import Drawn
from grpo.sampling.sampler import Name
from grpo.wire.health import fingerprint
from grpo.wire.tool_outcomes import Branch, Outcome

log = logging.getLogger(__name__)

DAMAGED = ValueError, TypeError, KeyError, RecursionError  # raised for a line that is none


class Journal(ABC):
    """The drawn answers and the ended episodes of programs, in memory and where they survive."""

    def __init__(self) -> None:
        self._requests: dict[Name, dict[str, Drawn]] = {}
        self._rollouts: dict[Name, Rollout] = {}

    @abstractmethod
    def begin(self, version: int, sum_weights: Callable[[], str]) -> None:
        """Be ready for answers of the policy after `version` updates. Raises OSError."""

    @abstractmethod
    def _keep(self, episode: Name, line: bytes, hand_over: Callable[[], None]) -> None:
        """Keep a line, and call `hand_over` afterwards."""

    def find(self, episode: Name, request: str) -> Drawn | None:
        """Return the tokens drawn for this request; None without any. From any thread."""
        return self._requests.get(episode, {}).get(request)

    def find_rollout(self, episode: Name) -> Rollout | None:
        """Return the record of an episode that has ended; None for any other."""
        return self._rollouts.get(episode)

    def add(self, episode: Name, request: str, drawn: Drawn, done: Future[Drawn]) -> None:
        """Keep the tokens drawn for a request, and then give them to `done`. Raises OSError, as `end` does. Of a run's
        journal one thread calls both."""

        def hand_over() -> None:
            self._requests.setdefault(episode, {})[request] = drawn
            done.set_result(drawn)

        self._keep(episode, _line({"episode": episode, "request": request, **vars(drawn)}), hand_over)

    def end(self, episode: Name, rollout: Rollout) -> None:
        """Keep the record of an episode that has ended."""
        self._rollouts[episode] = rollout
        self._keep(episode, _line({"episode": episode, "rollout": rollout}), lambda: None)

    def _read(self, line: bytes) -> None:
        """Take in a line. Raises one of DAMAGED."""
        record = json.loads(line)
        episode = tuple(record["episode"])
        if "rollout" in record:
            self._rollouts[episode] = _read_rollout(record["rollout"])
        else:
            drawn = Drawn(ids=record["ids"], logprobs=record["logprobs"])
            self._requests.setdefault(episode, {})[record["request"]] = drawn


class RunJournal(Journal):
    """What one rank wrote, and what all of them had written when it began, in a run's folder."""

    def __init__(self, folder: Path, rank: int, *, run: str, oldest: Callable[[], int]):
        """`run`: names the run's settings and data, and its program; `oldest`: returns the step of the oldest
        checkpoint from which the run may resume."""
        super().__init__()
        self._folder, self._rank, self._run, self._oldest = folder, rank, run, oldest
        self._version = -1  # the number of updates of the policy whose file is open
        self._path: Path | None = None

    def begin(self, version: int, sum_weights: Callable[[], str]) -> None:
        """Open the file of a version, and read all that was drawn before."""
        if version == self._version:
            return
        part = f"{version}-{fingerprint(sum_weights(), self._run)}"
        self._version, self._path = version, self._folder / f"{part}-rank-{self._rank}.jsonl"
        self._requests, self._rollouts = {}, {}
        self._folder.mkdir(exist_ok=True)
        self._drop_old()
        for written in sorted(self._folder.glob(f"{part}-rank-*.jsonl")):
            self._read_file(written)
        if self._requests or self._rollouts:
            log.info(
                "the journal has %d episodes of step %d that have ended, and %d answers: they are not drawn again",
                len(self._rollouts),
                version + 1,
                sum(map(len, self._requests.values())),
            )

    def _keep(self, episode: Name, line: bytes, hand_over: Callable[[], None]) -> None:
        try:
            with open(self._path, "ab", buffering=0) as file:
                while line:  # a disk that gets full takes a part
                    line = line[file.write(line) :]
        except OSError as error:
            how = f"the journal cannot be written ({error.strerror}): make room, and start the run again"
            raise OSError(error.errno, how, str(self._path)) from None
        hand_over()

    def _read_file(self, path: Path) -> None:
        """Take in a file. What was written last may be half a line."""
        for number, line in enumerate(_whole_lines(path), 1):
            try:
                self._read(line)
            except DAMAGED:  # a power cut may leave anything
                log.warning("line %d of %s is damaged: what it had is drawn again", number, path)
        if path == self._path:  # the next line is written after the last whole one
            with open(path, "rb+") as file:
                file.truncate(sum(map(len, _whole_lines(path))))

    def _drop_old(self) -> None:
        """Delete what no checkpoint leads to any more."""
        oldest = self._oldest()
        for path in self._folder.glob("*-rank-*.jsonl"):
            if int(path.name.partition("-")[0]) < oldest:
                path.unlink(missing_ok=True)  # other ranks do the same


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, default=vars).encode() + b"\n"  # asdict would copy each token


def _whole_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _read_rollout(content: dict[str, Any]) -> Rollout:
    """Make a rollout of the values of its fields."""
    branches = [Branch(**branch) for branch in content["branches"]]
    return replace(Rollout(**content), outcome=Outcome(**content["outcome"]), branches=branches)


def sum_weights(model: PreTrainedModel) -> str:
    """Return 16 hex digits of all bits of the weights that are trained: 0.4 s for 500 M weights on a core of a CPU. One
    update changes them, even where it changes few weights of 16 bits."""
    trained = (weight.detach() for weight in model.parameters() if weight.requires_grad)
    return fingerprint([torch.hash_tensor(weight).item() for weight in trained])


def read_program(agent: str) -> list[str]:
    """Return a fingerprint of each file that the setting `agent` names. What these import is not known."""
    kind, _, words = agent.partition(":")
    path = words if is_adapted(agent) else agent.rpartition(":")[0]
    names = shlex.split(words) if kind == "command" else [path]
    paths = (Path(name).expanduser() for name in names)
    return [fingerprint(path.read_bytes()) for path in paths if path.is_file()]
