"""When no rank makes progress, a waiting rank logs which rank it waits for, its position, and since when: a collective
waits silently. So each rank reports its position every few seconds through torch's store in rank 0's process, on a
separate connection."""

import json
import logging
import os
import socket
import sys
import sysconfig
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import count

import torch.distributed as dist

from grpo.config.errors import first_here, ranks_here, say_once
from grpo.run.metrics import PhaseClock

log = logging.getLogger(__name__)

TIME_OUT = 1800.0  # seconds after which a collective ends the run, beyond the time that the reference may take
# Seconds without progress of any rank before a log line, half of them until a collective has worked; doubled each time.
PATIENCE = 120.0
BEAT = 5.0  # seconds between two reports of a rank
SHOWN = 8  # ranks that a log line names at most
PHASES = (  # of a step, in order
    *("generate", "reward", "old_logprobs", "ref_logprobs", "routers", "wait_teacher", "wait_ref"),
    *("update", "optimizer", "publish_ref"),
)

# Lines in these folders or in this file do not tell the position of a rank.
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


@dataclass(kw_only=True)
class Position:
    host: str
    process: int
    beat: int  # number of the report
    step: int
    after: float  # the place of the rank's outermost phase in PHASES; half a place more between phases
    phase: str  # the innermost phase that the rank is in; empty between phases
    line: str  # the innermost line of our code or the user's: "file:line in function"
    stack: list[str]  # every line of the thread that does the work
    waits: bool  # whether the rank is within a collective


@dataclass(kw_only=True)
class RankState:
    """The last position of a rank, with the time.monotonic() of its last changes."""

    position: Position
    reported: float  # when the rank sent its last report
    moved: float  # when its step, its phase or `waits` changed
    worked: float  # when its stack changed

    def update(self, position: Position, now: float) -> None:
        def changed(*names: str) -> bool:
            return any(getattr(position, name) != getattr(self.position, name) for name in names)

        self.reported = now if changed("beat") else self.reported
        self.moved = now if changed("step", "after", "phase", "waits") else self.moved
        self.worked = now if changed("stack") else self.worked
        self.position = position


class Watchdog:
    """Watch over the ranks of a run. Make it before the ranks join: they may hang there. Set `met` once a collective
    has worked."""

    def __init__(self, rank: int, world_size: int, hint: str = ""):
        """`hint` names a likely cause if the first collective hangs."""
        self.step, self.clock, self.met = 0, PhaseClock(), False
        self._rank, self._world_size, self._hint = rank, world_size, hint
        self._states: dict[int, RankState] = {}
        self._silent: list[int] = []  # ranks that have sent no report yet
        self._began = self._answered = time.monotonic()
        self._closed = threading.Event()
        # Two threads: a request to a process that is stopped waits for ever, whatever the store's time-out.
        threading.Thread(target=self._report, args=[threading.get_ident()], name="report", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def begin(self, step: int) -> PhaseClock:
        """Return the clock of a step that begins."""
        self.step, self.clock = step, PhaseClock()
        return self.clock

    def close(self) -> None:
        self._closed.set()

    def _report(self, worker: int) -> None:
        """Send this rank's position and fetch all others, until closed. `worker` is the thread that does the work."""
        keys = [f"stalls/{rank}" for rank in range(self._world_size)]
        store = None
        for beat in count():
            if self._closed.wait(BEAT if beat else 0.0):
                return
            try:
                host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                store = store or dist.TCPStore(host, port, wait_for_workers=False)
            except RuntimeError:  # rank 0 did not open the store within five minutes
                continue
            try:
                if not self.met and ranks_here(self._world_size) < self._world_size:
                    self._end_if_misplaced(store)
                store.set(keys[self._rank], json.dumps(asdict(self._position(worker, beat))))
                if not self._states:
                    self._silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
                    if self._silent:
                        continue
                reports = store.multi_get(keys)
            except RuntimeError:  # rank 0 has ended, which ends this one
                return
            self._answered = now = time.monotonic()
            states, all_now = {}, {"reported": now, "moved": now, "worked": now}
            for rank, report in enumerate(reports):
                position = Position(**json.loads(report))
                states[rank] = self._states.get(rank) or RankState(position=position, **all_now)
                states[rank].update(position, now)
            self._states = states

    def _end_if_misplaced(self, store: dist.TCPStore) -> None:
        """End this process if two machines count different numbers of ranks, or one rank was started on both: they
        would wait for each other until TIME_OUT."""
        ranks, place = str(self._world_size), socket.gethostname()
        if (other := store.compare_set("ranks", "", ranks).decode()) != ranks:
            message = f"one machine counts {other} ranks, another one {ranks}: all must see equally many GPUs"
            store.set("misplaced", f"{message}, and have the same nproc_per_node and nnodes")
        elif (other := store.compare_set(f"places/{self._rank}", "", place).decode()) != place:
            message = f"rank {self._rank} was started twice, on {other} and on {place}"
            store.set("misplaced", f"{message}: each machine has its own node_rank")
        if store.check(["misplaced"]):
            say_once(store.get("misplaced").decode())
            time.sleep(0 if self._rank else 2 * BEAT)  # rank 0 has the store, in which the others read it
            os._exit(1)

    def _watch(self) -> None:
        """Log every stall, each time after twice as long, until closed."""
        times = 1
        while not self._closed.wait(BEAT):
            now = time.monotonic()
            patience = PATIENCE if self.met else PATIENCE / 2  # the first collective takes seconds
            if (stall := self._find_stall(now, times * patience)) is not None:
                times *= 2
                text, is_mine = stall
                if is_mine:
                    log.error("%s", text)
            elif self._states and now - max(state.moved for state in self._states.values()) < patience:
                times = 1

    def _find_stall(self, now: float, patience: float) -> tuple[str, bool] | None:
        """Return the stall's description and whether this rank logs it; None without a stall."""
        if silent := self._silent:
            if now - self._began <= patience:
                return None
            heard = [rank for rank in range(self._world_size) if rank not in silent]
            waiting = f"{len(heard)} of {self._world_size} ranks wait since {_clock(self._began)}"
            return f"{waiting}: there is no word of rank {', '.join(map(str, silent))}", self._rank == heard[0]
        if self._states and now - self._answered > patience:
            text = (
                f"rank 0 on {os.environ['MASTER_ADDR']} has not answered since {_clock(self._answered)}, "
                f"{now - self._answered:.0f} s: it is stopped, or cannot be reached"
            )
            return text, self._rank == 1 or first_here()  # one rank of each machine: it may be the network
        behind = held_up_by(self._states, now, patience)
        if not behind:
            return None
        waiting = [rank for rank in self._states if rank not in behind] or behind
        hint = f"; {self._hint}" if self._hint and not self.met else ""
        return describe_stall(self._states, behind, now) + hint, self._rank == waiting[0]

    def _position(self, worker: int, beat: int) -> Position:
        frame, stack, line, waits = sys._current_frames().get(worker), [], "", False
        while frame is not None:
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            stack.append(f"{file}:{frame.f_lineno}")
            waits = waits or "/torch/distributed/" in file or "/deepspeed/comm/" in file
            if not line and not file.startswith((*_LIBRARIES, __file__, "<frozen")):
                line = f"{os.path.basename(file)}:{frame.f_lineno} in {function}"
            frame = frame.f_back
        phases, ended = [*self.clock.open], self.clock.ended
        after = PHASES.index(phases[0]) if phases else PHASES.index(ended) + 0.5 if ended else -0.5
        in_run = {"step": self.step, "after": after, "phase": phases[-1] if phases else ""}
        in_code = {"line": line, "stack": stack, "waits": waits}
        return Position(host=socket.gethostname(), process=os.getpid(), beat=beat, **in_run, **in_code)


def held_up_by(states: dict[int, RankState], now: float, patience: float) -> list[int]:
    """Return the ranks that the others wait for if no rank has moved for `patience` seconds; else an empty list.
    Returns all ranks if none waits for another and no stack has changed either."""
    if not states or now - max(state.moved for state in states.values()) <= patience:
        return []
    places = {rank: (state.position.step, state.position.after) for rank, state in states.items()}
    first = min(places.values())
    behind = [rank for rank, place in places.items() if place == first]
    if len(behind) < len(states):
        return behind
    # All are in the same phase. On a CPU a rank that waits in a collective can be told from one that computes.
    computing = [rank for rank, state in states.items() if not state.position.waits]
    if 0 < len(computing) < len(states):
        return computing
    if computing and first[0] == 0:
        return []  # each rank loads for itself, or waits for the reference, and logs that
    return behind if now - max(state.worked for state in states.values()) > patience else []


def describe_stall(states: dict[int, RankState], behind: list[int], now: float) -> str:
    """Say how many ranks wait, and the position of each rank `behind`, and since when."""

    def describe_rank(rank: int) -> str:
        state, position = states[rank], states[rank].position
        phase = f"in step {position.step}" if position.step else "before its first step"
        if position.phase:
            phase = f"in {position.phase} of step {position.step}"
        is_silent = now - state.reported > 3 * BEAT
        return (
            f"rank {rank} ({position.host}, process {position.process}) is {phase} since {_clock(state.moved)}, "
            f"{now - state.moved:.0f} s, at {position.line or 'a line of no file of ours'}"
            + (f", and has not answered since {_clock(state.reported)}" if is_silent else "")
        )

    named = "; ".join(map(describe_rank, behind[:SHOWN]))
    more = f"; and {len(behind) - SHOWN} more" if len(behind) > SHOWN else ""
    if len(behind) == len(states):
        return f"no rank gets on: {named}{more}"
    return f"{len(states) - len(behind)} of {len(states)} ranks wait: {named}{more}"


def _clock(moment: float) -> str:
    """Format a time.monotonic() as a time of day."""
    return (datetime.now() - timedelta(seconds=time.monotonic() - moment)).strftime("%H:%M:%S")
