"""Loads and calls the user's code, which settings name as path/to/file.py:function."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo.config.errors import ConfigError, did_you_mean, one_line
from grpo.config.fields import PACKAGE, PROGRAMS

if sys.version_info >= (3, 14):
    from annotationlib import Format

    # There a type hint is evaluated when it is asked for, and may name what only a type checker imports.
    signature_of = partial(inspect.signature, annotation_format=Format.FORWARDREF)
else:
    signature_of = inspect.signature

Key = tuple[int | str, ...]  # the seed of a call's random numbers

_lock = threading.Lock()
_running = 0
_kept = ExitStack()  # restores the states before the first of the running calls


def parameters_of(function: Callable, follow_wrapped: bool = False) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable; with `follow_wrapped`, of the function that a decorator wraps: what
    update_wrapper shows is the signature of another function. None of what has no signature, as some functions in C."""
    try:
        return signature_of(function, follow_wrapped=follow_wrapped).parameters
    except (TypeError, ValueError):
        return {}


@contextmanager
def user_code(*key: int | str) -> Iterator[None]:
    """Run sync code of the user's inside, with random numbers by `key`; then restore their states and torch's modes."""
    with modes_kept(), _seeded(key, always=True):
        yield


def async_user_code(*key: int | str) -> AbstractContextManager[None]:
    """Await code of the user's inside, as `user_code`; `key` seeds it only if no other runs, until it first waits."""
    return _seeded(key, always=False)


@contextmanager
def modes_kept() -> Iterator[None]:
    """Restore torch's modes after code of the user's, not the random states: a loss draws from the trainer's."""
    before = [(get, set_mode, get()) for get, set_mode in _modes()]
    try:
        yield
    finally:
        for get, set_mode, value in before:
            if get() != value:  # setting the number of threads, even to the present one, changes MKL's results
                set_mode(value)


@contextmanager
def _seeded(key: Key, always: bool) -> Iterator[None]:
    """Seed the random states if no other call runs, or `always`. The last of simultaneous calls restores them."""
    global _running
    with _lock:
        if _running == 0:
            for get, set_state, _ in _generators():
                _kept.callback(set_state, get())
            _kept.enter_context(modes_kept())
        if _running == 0 or always:
            seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "little")
            for _, _, seed_all in _generators():
                seed_all(seed)
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if _running == 0:
                _kept.close()


def _generators() -> list[tuple[Callable, Callable, Callable]]:
    """Return (get the state, set it, seed) of each loaded library's generators."""
    found = [(random.getstate, random.setstate, random.seed)]
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append((numpy.random.get_state, numpy.random.set_state, numpy.random.seed))
    if (torch := sys.modules.get("torch")) is not None:
        # torch.manual_seed takes 200 us: it formats the stack for devices that are not initialized yet.
        found.append((torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed))
        if torch.cuda.is_initialized():
            # Of all cards: another thread has another current one.
            found.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all, torch.cuda.manual_seed_all))
    return found


def _modes() -> list[tuple[Callable, Callable]]:
    """Return (get, set) of torch's modes, if it is loaded."""
    if (torch := sys.modules.get("torch")) is None:
        return []

    def set_device(device: Any) -> None:
        torch.set_default_device(None if device.type == "cpu" else device)

    return [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, set_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
        (partial(torch.is_autocast_enabled, "cuda"), partial(torch.set_autocast_enabled, "cuda")),
    ]


def check_file(field: str, name: str) -> str:
    """Return the file of `name` in the setting `field`. Raises ConfigError unless it is a Python file."""
    path = os.path.expanduser(name.rpartition(":")[0])
    if not Path(path).is_file() or not path.endswith(".py"):
        raise ConfigError(f"{field}={name!r}: {path or name} is not a Python file: write path/to/file.py:function")
    return path


def load_function(field: str, name: str, kind: str = "function") -> Callable:
    """Return the function of `name`, path/to/file.py:function in the setting `field`; messages call it `kind`. The file
    is imported once. Raises ConfigError if there is no such file or function, or the import fails."""
    path = check_file(field, name)
    name_of_module = module_name(path)
    if name_of_module not in sys.modules:
        spec = importlib.util.spec_from_file_location(name_of_module, path)
        module = importlib.util.module_from_spec(spec)
        with imported(field, name, path), _neighbours_first(Path(path).resolve().parent):
            sys.modules[name_of_module] = module  # before its code runs: pickle looks there
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name_of_module]
                raise
    return find_function(field, name, sys.modules[name_of_module], kind)


@contextmanager
def imported(field: str, name: str, path: str) -> Iterator[None]:
    """Import the user's file `path` inside, which may import reward.py. Raises ConfigError with its line, or that of a
    neighbour, if its code raises."""
    if str(PROGRAMS) not in sys.path:
        sys.path.append(str(PROGRAMS))  # no program's own folder is there if a module of the package was started
    before = os.getcwd()
    try:
        with user_code("import"):
            yield
    except Exception as error:  # the user's file may raise anything
        if isinstance(error, SyntaxError) and error.filename:
            place = f"{error.filename}:{error.lineno}"
        else:
            folder, stack = Path(path).resolve().parent, traceback.extract_tb(error.__traceback__)
            mine = [frame for frame in stack if folder in Path(frame.filename).resolve().parents]
            is_neighbour = mine and Path(mine[-1].filename).name != Path(path).name
            place = f"{mine[-1].filename if is_neighbour else path}:{mine[-1].lineno}" if mine else path
        reason = one_line(traceback.format_exception_only(error)[-1], None)
        raise ConfigError(f"{field}={name!r}: {place} cannot be imported ({reason}): correct it") from error
    finally:
        os.chdir(before)  # where the paths of other settings begin


@contextmanager
def _neighbours_first(folder: Path) -> Iterator[None]:
    """Let imports inside find the modules of a folder first, as those of a script do. Later imports find them last.

    Two folders may each have a utils.py, and one may have a datasets.py or a reward.py of its own. What this process
    had loaded by such a name, or finds without the folder, stays what it imports.
    """
    names = {inspect.getmodulename(entry.name) or entry.name for entry in folder.iterdir()}
    kept = {name: _take_out(name) for name in names if _hides_module(folder, name)}
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, loaded in kept.items():
            new = _take_out(name)
            is_known = bool(loaded) or (new and not _is_of(folder, importlib.util.find_spec(name)))
            sys.modules |= loaded if is_known else new


def _hides_module(folder: Path, name: str) -> bool:
    """Tell whether a folder has a module or package of this name, by which this process has loaded none, or another."""
    # The standard library is loaded in part, and this package is running.
    if not name.isidentifier() or name in {*sys.stdlib_module_names, PACKAGE.name}:
        return False
    spec, loaded = PathFinder.find_spec(name, [str(folder)]), getattr(sys.modules.get(name), "__spec__", None)
    if spec is None or _is_of(folder, loaded):
        return False
    # A folder without __init__.py, as one of data may be, hides only another such folder.
    return spec.origin is not None or loaded is None or loaded.origin is None


def _is_of(folder: Path, spec: ModuleSpec | None) -> bool:
    """Tell whether a module or package lies in the folder itself."""
    if spec is None:
        return False
    places = spec.submodule_search_locations or [spec.origin]
    return any(place is not None and Path(place).parent.resolve() == folder for place in places)


def _take_out(name: str) -> dict[str, ModuleType]:
    """Remove a module with its submodules from the loaded ones; return them by name."""
    names = [each for each in sys.modules if each == name or each.startswith(f"{name}.")]
    return {each: sys.modules.pop(each) for each in names}


def module_name(path: str) -> str:
    """Return a file's path with "//" for each dot: of a dotted name, pickle would import the first part."""
    return str(Path(path).resolve()).replace(".", "//")


def find_function(field: str, name: str, module: ModuleType, kind: str) -> Callable:
    """Return a module's function. Raises ConfigError if it has none of that name."""
    function_name = name.rpartition(":")[2]
    function = getattr(module, function_name, None)
    if not callable(function):
        hint = did_you_mean(function_name, [other for other, value in vars(module).items() if callable(value)])
        raise ConfigError(f"{field}={name!r}: {Path(module.__file__).name} has no such {kind}{hint}: define it there")
    return function
