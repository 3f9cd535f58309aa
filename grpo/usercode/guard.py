"""Guards a process that runs foreign code: however that ends, nothing that it started is left.

It has the standard library alone: grpo/agents/host.py loads it by its path in the user's interpreter.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import threading
import time

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_DEATH_SECONDS = 20.0  # for what was killed to be gone
_prctl = ctypes.CDLL(None).prctl


def fork_below_guard(*descriptors):
    """Fork. The parent closes these descriptors, which are the child's alone, guards the child, and never returns: when
    the child ends, or standard input closes, which nobody may read meanwhile, it kills all processes below it and exits
    with the child's code. The child returns."""
    adopt()
    parent = os.getpid()
    if child := os.fork():
        for descriptor in descriptors:
            os.close(descriptor)
        _guard(child)
    end_with(parent)


def end_with(parent):
    """End when the parent ends: foreign code may kill it."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def adopt():
    """Become the parent of what processes below leave behind."""
    _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _guard(child):
    def watch():
        poll = select.poll()
        poll.register(0, 0)  # its input is the child's to read
        poll.poll()
        os.kill(child, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid) != child:
        os.waitpid(ended, 0)
    with contextlib.suppress(ProcessLookupError):  # it leads no group
        os.killpg(child, signal.SIGKILL)  # the group at once, before any of it can start more
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kill_children(set(), _DEATH_SECONDS)
    os._exit(code if code >= 0 else 128 - code)


def kill_children(kept, seconds):
    """Kill all children but these, until there are no more: those of a killed process become children. Return those
    that are left after so many seconds, or at once if they may not be killed: another user's, as of a program with the
    set-user-ID bit."""
    end, others = time.monotonic() + seconds, set()
    while (children := find_children() - kept) - others and time.monotonic() < end:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except PermissionError:
                others.add(pid)
            except OSError:
                pass  # it has ended
        time.sleep(0.001)
    return children


def find_children():
    """Return the ids of this process's children."""
    try:
        files = [f"/proc/self/task/{thread}/children" for thread in os.listdir("/proc/self/task")]
        return {int(pid) for file in files for pid in open(file).read().split()}
    except FileNotFoundError:  # a kernel without them; reading all processes takes 5 ms
        return {pid for pid, (parent, _) in read_processes().items() if parent == os.getpid()}


def read_processes():
    """Return the parent and the bytes in memory of each process, by its id."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # the process may have ended
            fields = file.read().rpartition(b")")[2].split()
            found[int(name)] = int(fields[1]), int(fields[21]) * resource.getpagesize()
    return found


def yield_memory():
    """Let the system kill this process, and not the trainer, when memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
