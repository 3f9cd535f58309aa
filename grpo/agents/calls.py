"""What runs in the process of an episode: the user's function or command. host.py imports this file by its path.

So it has the standard library alone, and for functions the `openai` of its interpreter, which may be the user's.
"""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import traceback

_HERE = os.path.dirname(os.path.realpath(__file__))
_CLIENT_SECONDS = 7 * 24 * 3600
_SHOWN, _LONGEST = 4000, 1 << 19  # characters of a traceback, of an answer


class CannotRun(Exception):
    """An agent that cannot be run. The message follows its name in a sentence."""


def load(agent, url):
    """Return what runs the agent in a process of its own, with a row, a key, a seed and a descriptor for its answer;
    and what reads the last line there: "answer", a text of JSON, or "failure" and "text". Raises CannotRun."""
    kind, _, words = agent.partition(":")
    if kind == "command":
        return _load_command(words, url)
    if kind == "verifiers":
        os.environ["GRPO_VERIFIERS"] = words
        agent = f"{os.path.join(_HERE, 'adapters', 'verifiers_episodes.py')}:solve"
    return _load_function(agent, url)


def _load_command(text, url):
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CannotRun(f"its words cannot be read ({error}): write them as in a shell") from None
    if not words or shutil.which(words[0]) is None:
        raise CannotRun(f"there is no program {' '.join(words[:1])!r}: write command: and what a shell would run here")

    def run(row, key, seed, answers):
        with tempfile.TemporaryFile() as file:  # a pipe takes no more than 64 KiB before the program reads
            file.write(json.dumps(row).encode() + b"\n")
            file.seek(0)
            os.dup2(file.fileno(), 0)
        os.dup2(answers, 1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and so would the command
            signal.signal(number, signal.SIG_DFL)
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "GRPO_SEED": str(seed)}
        os.execvpe(words[0], words, os.environ | variables)

    return run, lambda line: {"answer": line} if line else {}


def _load_function(name, url):
    path, _, function_name = os.path.expanduser(name).rpartition(":")
    if not path.endswith(".py") or not os.path.isfile(path):
        raise CannotRun(
            f"{path or name} is not a Python file: write path/to/file.py:function, or command: and its words"
        )
    try:
        import openai
    except ImportError as error:
        remedy = f"install it: {sys.executable} -m pip install openai"
        raise CannotRun(f"{sys.executable} cannot import openai ({_describe(error)}): {remedy}") from None
    function = _import_function(path, function_name)
    called = inspect.unwrap(function)
    is_async = any(map(inspect.iscoroutinefunction, (called, type(called).__call__)))
    # A client takes 30 ms to load certificates. This one opens no connection before the fork.
    # Its own deadlines, 5 s for a connection, would fail episodes where the machine is busy: the run has one.
    make_client = openai.AsyncOpenAI if is_async else openai.OpenAI
    client = make_client(base_url=url, api_key="none", timeout=_CLIENT_SECONDS)
    _warm_up(make_client, is_async)

    def run(row, key, seed, answers):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        _call(function, (row, client.with_options(api_key=key)), answers)

    return run, _read_report


def _warm_up(make_client, is_async):
    """Ask where nobody listens, and close all: the first request imports modules, and its answer builds classes, 50 ms
    that each fork would take again. Where the package does otherwise nothing is lost."""
    client = make_client(base_url="http://127.0.0.1:9", api_key="none", max_retries=0, timeout=1)
    question = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}

    async def ask():
        async with client:
            await client.chat.completions.create(**question)

    with contextlib.suppress(Exception):
        from openai.types.chat import ChatCompletion

        ChatCompletion.construct(choices=[])
        if is_async:
            asyncio.run(ask())
        else:
            with client:
                client.chat.completions.create(**question)


def _import_function(path, name):
    """Return a function of a file, which may import its neighbours, as a script may."""
    sys.path[:0] = [os.path.dirname(os.path.realpath(path)), os.getcwd()]  # the latter, as of python -m
    stem = os.path.basename(path)[: -len(".py")]
    spec = importlib.util.spec_from_file_location(f"{stem}_" if stem in sys.modules else stem, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # before its code runs: pickle looks there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # the user's file may raise anything
        stack = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in stack if os.path.abspath(frame.filename) == os.path.abspath(path)]
        place = ":".join(map(str, [path, *lines[-1:]]))
        raise CannotRun(f"{place} cannot be imported ({_describe(error)}): correct it") from None
    if not callable(function := getattr(module, name, None)):
        raise CannotRun(f"{path} has no function {name!r}: define it there")
    try:
        inspect.signature(function).bind("task", "client")
    except TypeError as error:
        raise CannotRun(f"it cannot be called with a row and a client ({error}): def {name}(task, client)") from None
    except ValueError:  # one in C has no signature
        pass
    return function


def _describe(error):
    return " ".join(traceback.format_exception_only(type(error), error)[-1].split())


def _call(function, arguments, answers):
    """Call the function, write its result or error, and exit. Its threads and tasks end with it."""
    process = os.getpid()

    def end(report):
        if os.getpid() == process:  # and not a fork of it that returned, too
            os.write(answers, json.dumps(report).encode())
        with contextlib.suppress(Exception):  # the user's code may have closed it
            sys.stdout.flush()
        os._exit(0)

    async def wait(returned):
        end(_make_report(await returned))  # here, as asyncio.run waits for threads before it returns

    try:
        returned = function(*arguments)
        if inspect.isawaitable(returned):
            asyncio.run(wait(returned))
        end(_make_report(returned))
    except BaseException as error:
        kind = type(error).__name__
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code & 255 if isinstance(error.code, int) else 1
            if code == 0:
                os._exit(0)
            kind = f"exit code {code}"
        end({"failure": kind, "text": _format(error)})


def _format(error):
    """Format an error's traceback from the user's first line on."""
    stack, ours = error.__traceback__, (__file__, os.path.dirname(asyncio.__file__) + os.sep)
    while stack and stack.tb_frame.f_code.co_filename.startswith(ours):
        stack = stack.tb_next
    return "".join(traceback.format_exception(type(error), error, stack))[-_SHOWN:]


def _make_report(returned):
    try:
        text = json.dumps(returned, default=lambda value: value.item())  # a scalar of NumPy or torch
    except Exception:  # the user's object may have an item() of its own
        text = repr(returned)
    return {"answer": text[:_LONGEST]}  # the host reads no more, and a cut text is no JSON


def _read_report(line):
    """Return what `_call` wrote; {} if it is something else."""
    try:
        return {name: str(value) for name, value in json.loads(line).items() if name in ("answer", "failure", "text")}
    except (ValueError, AttributeError):
        return {}
