"""Runs the programs of episodes, each in a process of its own: `PYTHON host.py URL AGENT [GIB]`.

It stands alone, as the interpreter may be the user's: the standard library, calls.py beside it, and usercode/guard.py.

    trainer -> host    a line of JSON: {"begin": number, "row": {...}, "key": "sk-...", "seed": 7}, or {"kill": number}
    host -> trainer    a line of JSON: {} when it is ready, or {"refused": reason}; then for each program that ended
                       {"number", "answer": text of JSON, "text"} or {"number", "failure": kind, "text"}

    guard              is started by the trainer, and runs no foreign code. When the host ends, or standard input
     |                 closes, it kills all that is below it
     +- host           imports the user's file, and forks for each episode
         +- program    its processes stay below it (prctl(2), PR_SET_CHILD_SUBREAPER), become the host's when it
                       ends, and are killed by the host
"""

import contextlib
import faulthandler
import gc
import json
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from collections import defaultdict
from urllib.parse import urlsplit

_HERE = os.path.dirname(os.path.realpath(__file__))
_OURS = [_HERE, os.path.join(os.path.dirname(_HERE), "usercode")]
sys.path[:0] = _OURS
from calls import CannotRun, load  # noqa: E402
from guard import adopt, end_with, find_children, fork_below_guard, kill_children, read_processes, yield_memory  # noqa: E402

# The user's code may import other modules of these names.
sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) not in _OURS]
del sys.modules["calls"], sys.modules["guard"]

_SHOWN, _LONGEST = 4000, 1 << 20  # characters of a failure's text, bytes of an answer
_LOOK_SECONDS = 0.5  # between two looks at the memory
_DEATH_SECONDS = 1.0  # for what was killed to be gone
_STACKS, _STACK_SECONDS = signal.SIGUSR2, 0.02  # shows where a function's threads are
_ENDS = (signal.SIGINT, signal.SIGTERM)


class HostedProgram:
    """A program that runs: the pipes that it writes to, and the last that came of each."""

    def __init__(self, number, prints, answers):
        self.number, self.prints, self.answers = number, prints, answers
        self.written = {prints: b"", answers: b""}
        self.failure = ""  # why the host killed it

    def read(self, pipe):
        """Read once, and show prints; tell whether more may come."""
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(pipe, _LONGEST)
            self.written[pipe] = (self.written[pipe] + chunk)[-_LONGEST:]
            if pipe == self.prints:
                write_all(2, chunk)
            return bool(chunk)
        return True

    def report(self, code, read_answer):
        """Return the answer, or how it failed."""
        prints, answer = (self.written[pipe].decode("utf-8", "replace") for pipe in (self.prints, self.answers))
        before, _, line = answer.rstrip().rpartition("\n")
        write_all(2, before.encode())
        signals = {-each: each.name for each in signal.Signals}
        if self.failure or code:
            report = {"failure": self.failure or signals.get(code, f"exit code {code}")}
        else:
            report = read_answer(line) or {"failure": "no reward"}
        return {"number": self.number, "text": prints[-_SHOWN:], **report}


class Host:
    """The programs that run, by their process ids."""

    def __init__(self, agent, reports, limit):
        """`agent`: what becomes a program, and what reads its answer; `reports`: a descriptor; `limit`: in bytes."""
        (self.run, self.read_answer), self.reports, self.limit = agent, reports, limit
        self.programs, self.unread, self.looked, self.pid = {}, [], 0.0, os.getpid()
        self.kept = find_children()  # processes of the user's file serve all episodes
        self.files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.files[1], self.files[1]))  # two pipes for each program
        self.selector = selectors.PollSelector()  # which a fork does not share
        wake, self.wake_end = os.pipe()
        os.set_blocking(self.wake_end, False)
        signal.set_wakeup_fd(self.wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))

    def serve(self, orders):
        """Obey until there are no more orders."""
        self.selector.register(orders, selectors.EVENT_READ, lambda: self.obey(os.read(orders, 65536)))
        self.say({})
        while True:
            for key, _ in self.selector.select(_LOOK_SECONDS if self.limit else None):
                key.data()
            if self.limit and time.monotonic() > self.looked + _LOOK_SECONDS:
                self.kill_large()
            self.end_programs()

    def say(self, report):
        write_all(self.reports, json.dumps(report).encode() + b"\n")

    def obey(self, chunk):
        if not chunk:
            os._exit(0)  # the guard kills what runs
        self.unread.append(chunk)
        if b"\n" not in chunk:  # a part of a large row
            return
        *lines, rest = b"".join(self.unread).split(b"\n")
        self.unread, killed = [rest], set()
        for order in map(json.loads, lines):
            if "begin" in order:
                self.begin(order["begin"], order)
            killed.add(order.get("kill"))
        self.kill([pid for pid, program in self.programs.items() if program.number in killed])

    def begin(self, number, order):
        try:
            (prints, prints_end), (answers, answers_end) = os.pipe(), os.pipe()
            pid = os.fork()
        except OSError as error:  # no more memory, processes or files
            self.say({"number": number, "failure": "not started", "text": str(error)})
            return
        if pid == 0:
            try:
                self.become_program(prints_end)
                self.run(order["row"], order["key"], order["seed"], answers_end)
            except BaseException:  # whatever it is, a fork never returns to the host's loop
                traceback.print_exc()
            os._exit(127)
        os.close(prints_end)
        os.close(answers_end)
        program = self.programs[pid] = HostedProgram(number, prints, answers)
        for pipe in program.written:
            os.set_blocking(pipe, False)
            self.selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: self.read(program, pipe))

    def become_program(self, prints_end):
        """Make a fork of this process a program's."""
        end_with(self.pid)
        adopt()
        os.setsid()
        os.dup2(prints_end, 2)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # SIGTERM ends a fork of the program itself: multiprocessing sends it. It waits where it comes before the fork
        # has its own handler: this process's would ignore it.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS),
            after_in_child=take_ends,
        )
        for descriptor in (self.reports, self.wake_end, *self.selector.get_map()):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.files)
        yield_memory()

    def read(self, program, pipe):
        if not program.read(pipe):
            self.selector.unregister(pipe)

    def kill(self, pids):
        for pid in pids:
            os.kill(pid, _STACKS)
        if pids:
            time.sleep(_STACK_SECONDS)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def kill_large(self):
        """Kill each program that takes more memory than the limit, with all below it."""
        self.looked, processes, children, large = time.monotonic(), read_processes(), defaultdict(list), []
        for pid, (parent, _) in processes.items():
            children[parent].append(pid)
        for pid, program in self.programs.items():
            below = [pid]
            for each in below:
                below += children[each]
            if sum(processes[each][1] for each in below if each in processes) > self.limit:
                program.failure = "memory"
                large.append(pid)
        self.kill(large)

    def end_programs(self):
        """Report the programs that ended, after what they started."""
        ended = []
        for pid in [*self.programs]:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                with contextlib.suppress(OSError):  # its group is empty, or of other users
                    os.killpg(pid, signal.SIGKILL)  # the group at once, before any of it can start more
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                ended.append((self.programs.pop(pid), code))
        if ended:
            self.kept |= kill_children({*self.programs, *self.kept}, _DEATH_SECONDS)
        for program, code in ended:
            for pipe in program.written:
                program.read(pipe)
                if pipe in self.selector.get_map():  # the program may have closed it
                    self.selector.unregister(pipe)
                os.close(pipe)
            self.say(program.report(code, self.read_answer))


def take_ends():
    """Let SIGINT and SIGTERM end this fork of a program, also those that came while it was made."""
    for number in _ENDS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)


def write_all(descriptor, data):
    while data:  # a signal, as of a program that ends, cuts a write short
        data = data[os.write(descriptor, data) :]


def main(url, name, limit="0"):
    for number in _ENDS:  # these are for the trainer. Handlers, not SIG_IGN, which commands would inherit
        signal.signal(number, lambda *_: None)
    fork_below_guard()
    adopt()
    orders, reports = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # a fork would write again all that is not yet written
    faulthandler.enable()
    faulthandler.register(_STACKS)
    for variable in ("no_proxy", "NO_PROXY"):
        os.environ[variable] = ",".join(filter(None, (os.environ.get(variable), urlsplit(url).hostname)))
    try:
        agent = load(name, url)
    except CannotRun as error:
        os.write(reports, json.dumps({"refused": str(error)}).encode() + b"\n")
        os._exit(0)
    sys.stdout.flush()
    gc.collect()
    gc.freeze()  # the collector of a program would copy the pages that it looks at
    Host(agent, reports, float(limit) * 2**30).serve(orders)


if __name__ == "__main__":
    main(*sys.argv[1:])
