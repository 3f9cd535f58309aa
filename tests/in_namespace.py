"""Becomes a process of another machine, then runs a program. Arguments: SPACE NAME HOSTS PROGRAM...

As `ip netns exec SPACE unshare --uts` does it, with NAME as the host's name and HOSTS as /etc/hosts; but a fork of the
server of forkserver.py stays one, and so do the programs that it starts.
"""

import ctypes
import os
import runpy
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000


def call(name: str, *arguments) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def become(space: str, name: str, hosts: str) -> None:
    with open(f"/run/netns/{space}") as network:
        call("setns", network.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS | CLONE_NEWUTS)
    call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
    call("sethostname", name.encode(), len(name))
    call("mount", hosts.encode(), b"/etc/hosts", None, MS_BIND, None)


if __name__ == "__main__":
    become(*sys.argv[1:4])
    sys.argv = sys.argv[4 + (sys.argv[4:5] == [sys.executable]) :]
    if sys.argv[:1] == ["-m"]:
        sys.path[0], module = os.getcwd(), sys.argv[1]
        sys.argv = sys.argv[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif sys.argv:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
