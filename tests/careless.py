"""Code as users write it, which draws random numbers and leaves torch's modes changed."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def draw() -> float:
    return random.random() + np.random.random() + torch.rand(1).item()


def change_modes() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(True)
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()


def modes() -> tuple:
    switches = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu")
    return *switches, torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()


@contextmanager
def unchanged() -> Iterator[None]:
    """Assert that the modes and the random states are afterwards what they were."""

    def states() -> tuple:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), modes()

    before = states()
    yield
    assert states() == before
