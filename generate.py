"""Draws completions for a run, on any machine that reaches the run's pool: tasks and weights come in over HTTP,
completions go out. It opens no port, and may come and go.

    python generate.py --pool http://box:59877 --token_file token

The pool is a server with --task rollouts; the trainer has --sampler pool. docs/samplers.md says how to set this up.

grpo/workers/loop.py does the work. Until the engine is chosen only requests, numpy, safetensors and PyYAML are
imported: an engine may need other versions than the trainer.
"""

import importlib.util
import logging
import os
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from grpo.config.errors import (
    ConfigError,
    RewardError,
    allow_open_files,
    end_at_ctrl_c,
    on_end_signals,
    reset_signals_in_forks,
    say_once,
)

if __name__ == "__main__":
    end_at_ctrl_c()  # before the imports that take long

from grpo.client.server_errors import RequestFailure, ServerError
from grpo.config.command_line import parse_arguments
from grpo.config.console import end_now, start_logging
from grpo.config.programs import WorkerConfig
from grpo.pool.client import PoolClient
from grpo.workers.engine import Engine, WorkerFailed
from grpo.workers.loop import GenerationWorker
from grpo.workers.weights_folder import open_folder

log = logging.getLogger("generate")


def make_engine(config: WorkerConfig) -> Engine:
    """Make the engine that the settings name. Raises ConfigError if this machine cannot have it."""
    if config.engine == "vllm":
        from grpo.workers.vllm_engine import SERVER, VllmEngine

        if importlib.util.find_spec("vllm") is None:
            remedy = "start generate.py with the python of an environment that has"
            raise ConfigError(f"engine='vllm': {sys.executable} has no vLLM: {remedy}")
        arguments = ["--trust-remote-code"] if config.trust_remote_code else []
        # Not in a temporary folder of weights, which is removed at the end.
        log_file = Path(config.weights_folder or tempfile.gettempdir()).expanduser() / f"vllm-{os.getpid()}.log"
        return VllmEngine([sys.executable, *SERVER], log_file, [*arguments, *shlex.split(config.vllm_args or "")])
    try:
        from grpo.workers.transformers_engine import TransformersEngine
    except ModuleNotFoundError as error:
        remedy = "install what docs/samplers.md names, or start generate.py with the python of another environment"
        raise ConfigError(f"engine='transformers': {sys.executable} has no {error.name}: {remedy}") from error
    return TransformersEngine(config)


def run(config: WorkerConfig) -> int:
    """Draw until a signal comes; return the exit code then. Raises what ends the worker."""
    stop, signals = threading.Event(), []
    on_end_signals(lambda number: (signals.append(number), stop.set()))
    reset_signals_in_forks()
    # Refuse a wrong token or address before an engine is imported. A pool that does not answer may do so later.
    with suppress(RequestFailure):
        PoolClient(config.pool, token=config.token, ref_ca_file=config.ref_ca_file, request_timeout=5.0).run()
    with open_folder(config.weights_folder) as folder:
        worker = GenerationWorker(config, make_engine(config), folder, stop)
        log.info("%s draws for %s with %s", worker.name, config.pool, config.engine)
        work = ThreadPoolExecutor(1, thread_name_prefix="worker").submit(worker.run)
        work.add_done_callback(lambda _: stop.set())
        stop.wait()  # this thread waits for signals
        worker.close()
    if work.done():
        work.result()  # raises what ended it
    return 130 if signals == [signal.SIGINT] else 0


def main() -> int:
    config = parse_arguments(WorkerConfig, __doc__)
    start_logging()
    try:
        allow_open_files()
        return run(config)
    except (ConfigError, RewardError, ServerError, WorkerFailed) as error:
        say_once(str(error), getattr(error, "traceback", ""))
        return 2 if isinstance(error, ConfigError) else 1
    except Exception:  # a defect of ours
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    end_now(main())  # also while a group is being drawn
