"""Starts the programs under test without importing torch, transformers and DeepSpeed again each time.

Run as a script, this file imports them once and waits. `Popen` below, which conftest.py puts in the place of
subprocess.Popen, asks it for a fork. The fork gets the caller's arguments, environment, folder and files, becomes the
caller's child and runs the program as `__main__`. A forked program starts others in the same way: the deepspeed
launcher its ranks. They are real processes with signals, sockets and exit codes; at first they share the server's
memory. A test whose programs the interpreter itself must start is marked `plain_start`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
HEAVY = (
    *("torch", "transformers", "deepspeed", "datasets", "waitress", "bottle", "requests", "prometheus_client", "peft"),
    *("accelerate", "bitsandbytes", "matplotlib.pyplot", "torch.utils.tensorboard", "torch._dynamo", "yaml"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen2.tokenization_qwen2"),
    *("transformers.conversion_mapping", "deepspeed.runtime.engine", "deepspeed.launcher.multinode_runner"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer"),
    "deepspeed.runtime.zero.stage_1_and_2",
)
PROGRAMS = (
    *("ref_server.py", "grpo_ref_split.py", "generate.py", "deepspeed"),
    *("-m grpo.", "-m demo", "-m deepspeed.", "tests/"),
)
# The libraries and the interpreter read these when they start: a program that wants others is started plainly.
READ_ONCE = (
    *("PYTHON", "LD_", "OMP_", "MKL_", "HF_", "HOME", "XDG_", "TRITON_"),
    *("TRANSFORMERS_", "TORCH", "DS_", "MALLOC_", "GLIBC_", "MPL"),
)
ROOM = 16_384  # bytes for a program's arguments, as `ps` shows them

PlainPopen = subprocess.Popen
_address: str | None = None  # where the fork server listens; None in a process that it forked
imported_with: dict[str, str] = {}  # that the heavy libraries were imported with
_server: subprocess.Popen | None = None
_forked = False
_adopting = threading.Lock()


class Popen(subprocess.Popen):
    """As subprocess.Popen; a program of ours becomes a fork of a process that has imported everything."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
    ):
        words = [os.fspath(word) for word in args] if isinstance(args, list | tuple) else []
        environment = dict(os.environ if env is None else env)
        unusual = executable or pass_fds or shell or not close_fds or (preexec_fn and not _forked)
        if unusual or not _is_program(words) or not _may_fork(environment):
            parameters = (executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            return super()._execute_child(args, *parameters, *rest)
        ends = rest[:6]  # of the pipes: ours and theirs for input, theirs and ours for output and for errors
        files = [end if end != -1 else place for place, end in enumerate((ends[0], ends[3], ends[5]))]
        start = {"words": words, "cwd": os.fspath(cwd or os.getcwd()), "environment": environment}
        start["session"] = bool(rest[-2])
        self.pid = _fork_here(start, files, preexec_fn) if _forked else _ask(start, files)
        self._child_created = True
        self._close_pipe_fds(*ends)


def _is_program(words: list[str]) -> bool:
    """Whether these words start one of the programs that import what is heavy."""
    if not words or Path(words[0]).parent != Path(sys.executable).parent:
        return False
    rest = words[1:] if Path(words[0]).name.startswith("python") else [Path(words[0]).name]
    rest = [word for word in rest if word != "-u"]
    if rest[:1] == ["-c"]:
        return "run_path('ref_server.py'" in rest[1] or "grpo.run.exit" in rest[1]
    return " ".join(rest[:2]).removeprefix(f"{REPOSITORY}/").startswith(PROGRAMS)


def _may_fork(environment: dict[str, str]) -> bool:
    return not (_forked and _threads() > 1) and _read_once(environment) == _read_once(imported_with)


def _threads() -> int:
    """Threads that a fork would lose: it copies the calling one alone. Arrow's allocator starts its own again."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sum(name != "jemalloc_bg_thd" for name in names)


def _read_once(environment: dict[str, str]) -> dict[str, str]:
    names = (name for name in environment if name.startswith(READ_ONCE) and name != "PYTHONPATH")
    return {name: environment[name] for name in names}


def use(environment: dict[str, str], folder: Path) -> None:
    """Put `Popen` in the place of subprocess.Popen; the server starts at the first use, with this environment."""
    global _address, imported_with
    _address, imported_with = str(folder / "socket"), environment
    subprocess.Popen = Popen


def end() -> None:
    """Undo `use`; what was forked goes on."""
    subprocess.Popen = PlainPopen
    if _server is not None:
        _server.communicate()


def _ask(start: dict, files: list[int]) -> int:
    """Let the server fork. Returns the process's number; it is a child of this process."""
    global _server
    if _server is None:
        command = [sys.executable, str(Path(__file__).resolve()), _address, "." * ROOM]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _server = PlainPopen(command, cwd=REPOSITORY, env=imported_with, **pipes, start_new_session=True)
        assert _server.stdout.readline() == b"ready\n"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_address)
        socket.send_fds(connection, [b"."], files)
        with _adopting:
            _adopt(True)  # orphans below this process become its children, for this moment
            connection.sendall(json.dumps(start).encode() + b"\n")
            pid = int(connection.makefile("rb").readline())
            _adopt(False)
        connection.sendall(b".")
    return pid


def _adopt(yes: bool) -> None:
    pr_set_child_subreaper = 36
    if ctypes.CDLL(None).prctl(pr_set_child_subreaper, int(yes), 0, 0, 0):
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")


def _fork_here(start: dict, files: list[int], preexec_fn: Callable[[], None] | None) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        if preexec_fn:
            preexec_fn()
        _become(start, files)
    return pid


def serve(address: str) -> None:
    """Fork for whoever asks, until the other end of the standard input is closed."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        assert _threads() == 1, "fork() would lose threads"
        gc.collect()
        gc.freeze()
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                return
            connection, _ = listener.accept()
            _, files, _, _ = socket.recv_fds(connection, 1, 3)
            start = json.loads(connection.makefile("rb").readline())
            told, tell = os.pipe()
            between = os.fork()
            if between == 0:
                pid = os.fork()
                if pid:
                    os.write(tell, b"%d\n" % pid)
                    os._exit(0)
                if connection.recv(1) != b".":
                    os._exit(1)
                _become(start, files)
            os.waitpid(between, 0)  # its child is the caller's now
            connection.sendall(os.read(told, 32))
            for number in (*files, told, tell):
                os.close(number)
            connection.close()


def _become(start: dict, files: list[int]) -> None:
    """Be the program: never returns."""
    global _forked
    _forked = True
    if start["session"]:
        os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for place, number in enumerate([os.dup(number) for number in files]):
        os.dup2(number, place)
    # The objects behind these numbers live on in this stack, so none of them closes a number that is used anew.
    os.closerange(3, 65_536)
    os.chdir(start["cwd"])
    os.environ.clear()
    os.environ.update(start["environment"])
    tempfile.tempdir = None
    _show(start["words"])
    words = start["words"][Path(start["words"][0]).name.startswith("python") :]
    unbuffered = words[0] == "-u"
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=unbuffered, line_buffering=os.isatty(1))
    os._exit(_run(words[unbuffered:]))


def _show(words: list[str]) -> None:
    """Let `ps` show these words: they are written over the server's own."""
    begin, end = (int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"\0".join(map(os.fsencode, words))[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _run(words: list[str]) -> int:
    """Run the program as the interpreter would. Returns its exit code."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    code = 0
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
            runpy._run_module_as_main(words[1])
        else:
            if words[0] == "-c":
                sys.argv, sys.path[0], source = ["-c", *words[2:]], "", words[1]
            else:
                sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
                source, main.__file__ = Path(words[0]).read_text(), words[0]
            sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
            exec(compile(source, words[0], "exec"), main.__dict__)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this function's frame
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return code & 0xFF


if __name__ == "__main__":
    import forkserver  # this file again, under the name that a forked program's Popen belongs to

    for module in HEAVY:
        importlib.import_module(module)
    # What transformers and DeepSpeed compute once in each process, 0.3 s of it.
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("qwen2")
    assert sys.modules["deepspeed"].ops.__compatible_ops__
    forkserver.imported_with = dict(os.environ)
    subprocess.Popen = forkserver.Popen
    forkserver.serve(sys.argv[1])
