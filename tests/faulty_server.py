"""What tests change in a server before it starts: each function breaks or delays one thing in its process."""

import gc
import time
from pathlib import Path


def code_for(fault, *arguments) -> str:
    """Return the code with which a process calls a function of this file (`code` of conftest.running_server)."""
    folder = str(Path(__file__).resolve().parent)
    return f"sys.path.append({folder!r})\nimport faulty_server\nfaulty_server.{fault.__name__}(*{arguments!r})\n"


def _call_before(module, name: str, wait) -> None:
    """Let a function of a module call `wait` first."""
    function = getattr(module, name)

    def late(*arguments):
        wait()
        return function(*arguments)

    setattr(module, name, late)


def _wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.01)


def hold_passes(go: str) -> None:
    """Let each forward pass wait until the file `go` exists, so that the queue is as full as a test wants it."""
    from grpo.server import scorer

    _call_before(scorer, "token_logprobs", lambda: _wait_for(go))


def delay_passes(seconds: float) -> None:
    from grpo.server import scorer

    _call_before(scorer, "token_logprobs", lambda: time.sleep(seconds))


def break_passes() -> None:
    """Let a pass fail by what it scores: 400 an error, 401 the device, from then on, 402 the memory, 403 NaN."""
    import torch

    from grpo.server import scorer

    score, is_dead = scorer.token_logprobs, False

    def breaking(model, batch, *rest):
        nonlocal is_dead
        is_dead = is_dead or 401 in batch.targets
        if 400 in batch.targets:
            raise RuntimeError("token 400 hurts")
        if 402 in batch.targets:
            raise torch.OutOfMemoryError("no room")
        if 403 in batch.targets:
            return torch.full([len(batch.targets)], torch.nan), None
        if is_dead:
            raise RuntimeError("the device is gone")
        return score(model, batch, *rest)

    scorer.token_logprobs = breaking


def hold_loading(go: str) -> None:
    """Let the loading of the model wait until the file `go` exists."""
    from grpo.model import load

    _call_before(load, "load_reference", lambda: _wait_for(go))


def fail_half_way() -> None:
    """Let the copy of new weights fail at the last norm."""
    from grpo.server.weight_swap import WeightSwap

    install = WeightSwap._install

    def broken(self, contents):
        contents.entries.pop("model.norm.weight")
        install(self, contents)

    WeightSwap._install = broken


def shorten_header_deadline(seconds: float) -> None:
    from grpo.server import http

    http.HEADER_SECONDS = seconds


def shorten_leases(seconds: float) -> None:
    from grpo.pool import leases, pool_service

    leases.LEASE_SECONDS = pool_service.LEASE_SECONDS = seconds


def lower_limits(body_bytes: int = 64 << 20, sequences: int = 4096) -> None:
    from grpo.server import http, model_service

    http.BODY_BYTES = body_bytes
    model_service.MOST_SEQUENCES = sequences


def summarise_each_second() -> None:
    from grpo.server import monitor

    monitor.SUMMARY_SECONDS = monitor.SAMPLE_SECONDS = 1


def set_clock_back(when: str) -> None:
    """Set the wall clock back by an hour from the moment on that the file `when` exists."""
    wall_time = time.time
    time.time = lambda: wall_time() - 3600 * Path(when).exists()


def collect_no_garbage() -> None:
    gc.disable()
