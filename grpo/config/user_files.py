"""A Python file of the user's that a setting names as path/to/file.py:function."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from grpo.config.errors import ConfigError


def check_file(field: str, name: str, path: str) -> None:
    """Raise ConfigError where the file of `name`, which stands in the setting `field`, is not there or no Python."""
    if not Path(path).is_file() or not path.endswith(".py"):
        raise ConfigError(
            f"{field}={name!r}: {path or name} is not a Python file: write path/to/file.py:function, with a path "
            "that exists from the current directory"
        )


def load_file(field: str, name: str, path: str) -> ModuleType:
    """Import the file of `name`, which stands in the setting `field`; the second time it is the module of the first.

    Raises ConfigError as check_file, and whatever the file raises.
    """
    check_file(field, name, path)
    name_of_module = module_name(path)
    if name_of_module not in sys.modules:
        spec = importlib.util.spec_from_file_location(name_of_module, path)
        sys.modules[name_of_module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name_of_module])
    return sys.modules[name_of_module]


def module_name(path: str) -> str:
    """Return the name of the module of a file: its path, with "//" for each dot, which no such path has.

    Of a name with dots pickle, and so multiprocessing, would first import what stands before the first dot.
    """
    return str(Path(path).resolve()).replace(".", "//")


def load_function(field: str, name: str) -> Callable:
    """Return the function that `name`, path/to/file.py:function in the setting `field`, stands for.

    Raises ConfigError where there is no such file or function, or the file cannot be imported.
    """
    path, _, function_name = name.rpartition(":")
    try:
        module = load_file(field, name, path)
    except ConfigError:
        raise
    except Exception as error:  # the user's file may raise anything
        raise ConfigError(f"{field}={name!r}: {path} cannot be imported ({error!r}): correct it") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{field}={name!r}: {path} has no such function: define it there")
    return function
