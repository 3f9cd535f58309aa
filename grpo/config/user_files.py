"""A Python file of the user's that a setting names as path/to/file.py:function."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from grpo.config.errors import ConfigError
from grpo.config.user_code import user_code


def check_file(field: str, name: str, path: str) -> None:
    """Raise ConfigError where the file of `name`, which stands in the setting `field`, is not there or no Python."""
    if not Path(path).is_file() or not path.endswith(".py"):
        raise ConfigError(
            f"{field}={name!r}: {path or name} is not a Python file: write path/to/file.py:function, with a path "
            "that exists from the current directory"
        )


def load_file(field: str, name: str, path: str) -> ModuleType:
    """Import the file of `name`, which stands in the setting `field`; the second time it is the module of the first.

    Raises ConfigError as check_file, and as imported.
    """
    check_file(field, name, path)
    name_of_module = module_name(path)
    if name_of_module not in sys.modules:
        spec = importlib.util.spec_from_file_location(name_of_module, path)
        module = importlib.util.module_from_spec(spec)
        with imported(field, name, path):
            sys.modules[name_of_module] = module  # before its code runs: pickle looks there
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name_of_module]
                raise
    return sys.modules[name_of_module]


@contextmanager
def imported(field: str, name: str, path: str) -> Iterator[None]:
    """Import the user's file `path` inside; `name` stands in the setting `field`.

    Raises ConfigError with the file's line where its code raises an exception.
    """
    try:
        with user_code("import"):
            yield
    except Exception as error:  # the user's file may raise anything
        reason = " ".join(traceback.format_exception_only(error)[-1].split())
        raise ConfigError(
            f"{field}={name!r}: {_find_line(error, path)} cannot be imported ({reason}): correct it"
        ) from error


def module_name(path: str) -> str:
    """Return the name of the module of a file: its path, with "//" for each dot, which no such path has.

    Of a name with dots pickle, and so multiprocessing, would first import what stands before the first dot.
    """
    return str(Path(path).resolve()).replace(".", "//")


def load_function(field: str, name: str, kind: str = "function") -> Callable:
    """Return the function that `name`, path/to/file.py:function in the setting `field`, stands for; `kind` is what a
    message calls it.

    Raises ConfigError where there is no such file or function, or the file cannot be imported.
    """
    path, _, function_name = name.rpartition(":")
    function = getattr(load_file(field, name, path), function_name, None)
    if not callable(function):
        raise ConfigError(f"{field}={name!r}: {path} has no such {kind}: define it there")
    return function


def _find_line(error: Exception, path: str) -> str:
    """Return FILE:LINE of what was raised as `path` was imported: a syntax error's, else the last line of that file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(path).name]
    return f"{path}:{lines[-1]}" if lines else path
