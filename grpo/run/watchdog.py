"""Who holds up the others. A collective waits for its slowest rank without a word, and its time-out does not name it.

Each rank says every few seconds where it is, through torch's store in rank 0's process, on a connection of its own.
Where no rank gets on for long, one that waits names those that it waits for.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from grpo.config.errors import first_here
from grpo.run.phase_clock import PhaseClock

log = logging.getLogger(__name__)

TIME_OUT = 1800.0
"""seconds after which a collective ends the run, beyond what the reference may take"""
PATIENCE = 120.0
"""seconds in which no rank gets on, after which it is said, and half of them before a collective has worked; then again
after twice as many"""
BEAT = 5.0
"""seconds between two looks"""
SHOWN = 8
"""ranks that are named"""

# A step's phases as they follow each other. A rank that is between two has done the one and not begun the other.
_ORDER = (
    *("generate", "reward", "old_logprobs", "ref_logprobs", "routers", "wait_ref", "update", "optimizer"),
    "publish_ref",
)
# A line of these, or of this file, does not tell where a rank is.
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


@dataclass
class _Rank:
    """What is known of one, with the time.monotonic() of each last change."""

    said: dict[str, Any]
    heard: float
    """it said anything"""
    moved: float
    """it said another place"""
    worked: float
    """it was seen at another line"""

    def hear(self, said: dict[str, Any], now: float) -> None:
        if said["beat"] != self.said["beat"]:
            self.heard = now
        if _place(said) != _place(self.said):
            self.moved = now
        if said["lines"] != self.said["lines"]:
            self.worked = now
        self.said = said


class Watchdog:
    """Watches over a run. Make it before the ranks join: they may hang there. Set `met` once a collective has worked,
    and `step` and `clock` where a step begins."""

    def __init__(self, rank: int, world_size: int, hint: str = ""):
        """`hint` says what may be wrong where the first collective hangs."""
        self.step, self.clock, self.met = 0, PhaseClock(), False
        self._rank, self._world_size, self._hint = rank, world_size, hint
        self._ranks: dict[int, _Rank] = {}
        self._missing: list[int] = []  # ranks that have not begun to tell where they are
        self._began = self._answered = time.monotonic()
        self._over = threading.Event()
        worker = threading.get_ident()
        # Two: whoever asks a process that is stopped waits for ever, whatever the store's time-out.
        for name, work in (("tell", lambda: self._tell(worker)), ("watch", self._watch)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _tell(self, worker: int) -> None:
        names = [f"stalls/{rank}" for rank in range(self._world_size)]
        store = None
        for beat in count():
            if self._over.wait(BEAT if beat else 0.0):
                return
            try:
                store = store or dist.TCPStore(
                    os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False
                )
            except RuntimeError:  # rank 0 has not come in five minutes
                continue
            try:
                store.set(names[self._rank], json.dumps(self._own(worker, beat)))
                if not self._ranks:
                    self._missing = [rank for rank, name in enumerate(names) if not store.check([name])]
                    if self._missing:
                        continue
                said = store.multi_get(names)
            except RuntimeError:  # rank 0 has ended, which ends this one
                return
            self._answered = now = time.monotonic()
            every = dict(enumerate(map(json.loads, said)))
            self._ranks = self._ranks or {rank: _Rank(one, now, now, now) for rank, one in every.items()}
            for rank, one in every.items():
                self._ranks[rank].hear(one, now)

    def _watch(self) -> None:
        times = 1
        while not self._over.wait(BEAT):
            now = time.monotonic()
            # To meet takes seconds.
            patience = PATIENCE if self.met else PATIENCE / 2
            report = self._report(now, times * patience)
            if report is not None:
                times *= 2
                if report:
                    log.error("%s", report)
            elif self._ranks and min(now - one.moved for one in self._ranks.values()) < patience:
                times = 1

    def _report(self, now: float, patience: float) -> str | None:
        """What is wrong; None: nothing; empty: another rank says it."""
        if missing := self._missing:
            if now - self._began <= patience:
                return None
            first = next(rank for rank in range(self._world_size) if rank not in missing)
            shown = ", ".join(map(str, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
            came = f"{self._world_size - len(missing)} of {self._world_size} ranks wait since {_clock(self._began)}"
            return f"{came}: there is no word of rank {shown}" if self._rank == first else ""
        if self._ranks and now - self._answered > patience:
            # Of each machine one rank, as it may be the network.
            return (
                f"rank 0 on {os.environ['MASTER_ADDR']} has not answered since {_clock(self._answered)}, "
                f"{now - self._answered:.0f} s: it is stopped, or cannot be reached"
                if self._rank == 1 or first_here()
                else ""
            )
        if not (behind := held_up_by(self._ranks, now, patience)):
            return None
        waiting = [rank for rank in self._ranks if rank not in behind] or behind
        if self._rank != waiting[0]:
            return ""
        return describe_stall(self._ranks, behind, now) + (f"; {self._hint}" if self._hint and not self.met else "")

    def _own(self, worker: int, beat: int) -> dict[str, Any]:
        """Where this rank is now. `worker` is the thread that does the work."""
        phases = [*self.clock.open]
        frame, lines, where, waits = sys._current_frames().get(worker), [], "", False
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            lines.append(f"{file}:{frame.f_lineno}")
            waits = waits or "/torch/distributed/" in file or "/deepspeed/comm/" in file
            if not where and not file.startswith((*_LIBRARIES, __file__, "<frozen")):
                where = f"{os.path.basename(file)}:{frame.f_lineno} in {name}"
            frame = frame.f_back
        after = _ORDER.index(phases[0]) if phases else -0.5
        if not phases and self.clock.ended:
            after = _ORDER.index(self.clock.ended) + 0.5
        return {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "beat": beat,
            "step": self.step,
            "after": after,
            "phase": phases[-1] if phases else "",
            "where": where,
            "lines": lines,
            "waits": waits,
        }


def held_up_by(ranks: dict[int, _Rank], now: float, patience: float) -> list[int]:
    """The ranks that the others wait for, where none has got on for `patience` seconds; all of them, where none waits
    and none has been seen at another line. Empty where all is well."""
    if not ranks or min(now - one.moved for one in ranks.values()) <= patience:
        return []
    first = min(_place(one.said)[:2] for one in ranks.values())
    behind = [rank for rank, one in ranks.items() if _place(one.said)[:2] == first]
    if len(behind) < len(ranks):
        return behind
    # All are in the same phase. On a CPU those that wait in a collective can be told from those that do not.
    at_work = [rank for rank, one in ranks.items() if not one.said["waits"]]
    if 0 < len(at_work) < len(ranks):
        return at_work
    if at_work and first[0] == 0:
        return []  # each loads for itself, or waits for the reference, and says so
    return behind if min(now - one.worked for one in ranks.values()) > patience else []


def describe_stall(ranks: dict[int, _Rank], behind: list[int], now: float) -> str:
    def one_line(rank: int) -> str:
        one = ranks[rank]
        said = one.said
        phase = f"in step {said['step']}" if said["step"] else "before its first step"
        if said["phase"]:
            phase = f"in {said['phase']} of step {said['step']}"
        line = (
            f"rank {rank} ({said['host']}, process {said['process']}) is {phase} since {_clock(one.moved)}, "
            f"{now - one.moved:.0f} s, at {said['where'] or 'a line of no file of ours'}"
        )
        return line + (f", and has not answered since {_clock(one.heard)}" if now - one.heard > 3 * BEAT else "")

    shown = "; ".join(one_line(rank) for rank in behind[:SHOWN])
    others = f"; and {len(behind) - SHOWN} more" if len(behind) > SHOWN else ""
    if len(behind) == len(ranks):
        return f"no rank gets on: {shown}{others}"
    return f"{len(ranks) - len(behind)} of {len(ranks)} ranks wait: {shown}{others}"


def _place(said: dict[str, Any]) -> tuple[int, float, str, bool]:
    return said["step"], said["after"], said["phase"], said["waits"]


def _clock(then: float) -> str:
    """A time.monotonic() as people read it."""
    return (datetime.now() - timedelta(seconds=time.monotonic() - then)).strftime("%H:%M:%S")
