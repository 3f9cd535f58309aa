"""A call of the user's code: what its random numbers follow from, and what it does not leave changed behind it.

Processes for the user's code import this, so it imports neither NumPy nor torch: one that is not loaded has no state.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

Key = tuple[int | str, ...]
"""what the random numbers of a call follow from"""

_lock = threading.Lock()
_running = 0
_restore: Callable[[], None]
"""gives back what the first of the running calls found"""


@contextmanager
def user_code(*key: int | str) -> Iterator[None]:
    """Run code of the user's, which is not async, inside: what it draws from `random`, NumPy and torch follows from
    `key`, and their random states and torch's modes are afterwards what they were."""
    with modes_kept(), _seeded(key, always=True):
        yield


@contextmanager
def async_user_code(*key: int | str) -> Iterator[None]:
    """Await code of the user's inside. Its random numbers follow from `key` where no other code of the user's runs,
    until it first waits: then others draw from the same states.

    Those states, and torch's modes, are what they were once no code of the user's runs any more.
    """
    with _seeded(key, always=False):
        yield


@contextmanager
def modes_kept() -> Iterator[None]:
    """Give torch back the modes that code of the user's leaves changed: what follows would fail in them, or be another.

    The random states are let alone: a loss draws from the trainer's own, which a checkpoint has.
    """
    restore = _keep_modes()
    try:
        yield
    finally:
        restore()


@contextmanager
def _seeded(key: Key, always: bool) -> Iterator[None]:
    """Seed the random states, unless another call runs; with `always` also then. The last of the calls that run at the
    same time gives back what the first has found."""
    global _running, _restore
    with _lock:
        if _running == 0:
            _restore = _keep_states()
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
                _restore()


def _keep_states() -> Callable[[], None]:
    """Return a function that gives back the random states of now, and torch's modes."""
    restore_modes, states = _keep_modes(), [(set_state, get()) for get, set_state, _ in _generators()]

    def restore() -> None:
        restore_modes()
        for set_state, state in states:
            set_state(state)

    return restore


def _generators() -> list[tuple[Callable, Callable, Callable]]:
    """Return (get the state, set it, seed) of the generators of each library that is loaded."""
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


def _keep_modes() -> Callable[[], None]:
    """Return a function that gives torch back the modes of now. What has not changed it does not set: setting the
    number of threads, even to what it is, changes how MKL computes."""
    if (torch := sys.modules.get("torch")) is None:
        return lambda: None

    def set_device(device: Any) -> None:
        torch.set_default_device(None if device.type == "cpu" else device)

    modes: list[tuple[Callable, Callable]] = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, set_device),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    ]
    for device in ("cpu", "cuda"):
        modes.append((partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)))
    before = [(get, set_mode, get()) for get, set_mode in modes]

    def restore() -> None:
        for get, set_mode, value in before:
            if get() != value:
                set_mode(value)

    return restore
