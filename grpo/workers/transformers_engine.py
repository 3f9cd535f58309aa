"""The engine that draws as the trainer itself does: the same sampler, the same model, after the same trials.

The last bits of log-probs depend on the other sequences of a batch. On a CPU it draws one group at a time: there they
depend on the task alone, whichever worker draws it. A card draws 64 rows in the time of 8.
"""

import gc
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from grpo.config.errors import ConfigError, RewardError, one_line
from grpo.config.programs import WorkerConfig
from grpo.config.sampling_settings import SharedConfig
from grpo.data.records import Example, Rollout
from grpo.model.devices import is_out_of_memory, take_device
from grpo.model.load import eos_token_ids, load_model, load_settings, load_tokenizer
from grpo.model.logprobs import token_logprobs
from grpo.model.lora import adapter_weights, load_adapter
from grpo.model.pictures import load_processor
from grpo.model.trial import make_batcher
from grpo.model.weights_file import named_weights
from grpo.pool.protocol import ADAPTER, GroupResult, Probe, RunInfo, Task
from grpo.sampling.self_check import make_sampler
from grpo.wire.picture_files import PictureError
from grpo.workers.engine import EngineError, WorkerTools, check_processor, make_result
from grpo.workers.weights_folder import dtype_of, versions_file

_ROWS = 64  # at a time, on a card
_GATHER = 0.01  # seconds in which the groups come that were leased together


class TransformersEngine:
    """An Engine (grpo/workers/engine.py) that holds the policy in this process, and draws in a thread."""

    loads_in_flight = False

    def __init__(self, config: WorkerConfig):
        """Raises ConfigError if the card cannot be used."""
        self._trust_remote_code, self._device = config.trust_remote_code, take_device(0)
        self._rows = config.sequences_per_generate or (_ROWS if self._device.type == "cuda" else 1)
        self.capacity = 1
        self._waiting: deque[tuple[Task, Future[GroupResult]]] = deque()
        self._drawer = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.card = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        self._model = self._sampler = self._batcher = None

    def start(self, run: RunInfo, folder: Path, version: int, turns: WorkerTools | None = None) -> None:
        """Load the model and choose its sampler, after the trials that the trainer makes."""
        gc.collect()  # a failed draw's exception has frames that hold the model
        self.close()
        if (dtype := dtype_of(folder)) not in ("float32", "bfloat16"):
            raise EngineError(f"{folder}: weights of dtype {dtype}: this engine takes float32 and bfloat16")
        config = SharedConfig(model_name_or_path=str(folder), dtype=dtype, trust_remote_code=self._trust_remote_code)
        with _failures():
            tokenizer, model = load_tokenizer(config), load_model(config, self._device)
            if run.base_weights is not None:
                load_adapter(model, str(folder / ADAPTER))
            if (ends := eos_token_ids(model, tokenizer)) != sorted(run.eos_token_ids):
                raise EngineError(f"{folder}: completions end with {ends}, those of the run with {run.eos_token_ids}")
            processor = load_processor(config, load_settings(config), tokenizer)
            check_processor(run, "" if processor is None else processor.fingerprint)
            self._batcher = make_batcher(model, tokenizer.pad_token_id, processor)
            self.capacity = max(1, self._rows // run.num_generations)
            self._sampler = make_sampler(
                model,
                tokenizer,
                run.max_completion_length,
                rows=self.capacity * run.num_generations,
                packs=self._batcher.packs,
                vision=self._batcher.vision,
                turns=None if turns is None else turns.responder,
            )
        self._run, self._turns, self._model = run, turns, model
        self._sampler.update_weights(version)

    def load(self, folder: Path, version: int) -> None:
        """Copy the weights into the loaded model. Tied weights stay tied."""
        path, has_adapter = versions_file(self._run, folder), self._run.base_weights is not None
        weights = adapter_weights(self._model) if has_adapter else named_weights(self._model)
        with _failures(), safe_open(path, framework="pt") as file:
            for name, tensor in weights.items():
                tensor.copy_(file.get_tensor(name))
        self._sampler.update_weights(version)

    def logprobs(self, probe: Probe) -> list[float]:
        with _failures(), torch.no_grad():
            batch = self._batcher.make([(probe.prompt_ids, probe.completion_ids)], self._device)
            return token_logprobs(self._model, batch, 1.0)[0].tolist()

    def draw(self, task: Task) -> GroupResult:
        drawn: Future[GroupResult] = Future()
        self._waiting.append((task, drawn))
        self._drawer.submit(self._draw_waiting)
        return drawn.result()

    def _draw_waiting(self) -> None:
        """Draw all groups that wait, together."""
        if self.capacity > 1 and self._waiting:
            time.sleep(_GATHER)
        together = [self._waiting.popleft() for _ in range(min(self.capacity, len(self._waiting)))]
        for attempt in sorted({task.attempt for task, _ in together}):  # a part of the seed
            tasks, results = zip(*((task, drawn) for task, drawn in together if task.attempt == attempt), strict=True)
            try:
                self._sample(tasks, results, attempt)
            except BaseException as error:
                for drawn in results:
                    if not drawn.done():
                        drawn.set_exception(error)

    def _sample(self, tasks: tuple[Task, ...], results: tuple[Future[GroupResult], ...], attempt: int) -> None:
        """Draw groups, and give each one's result as soon as it has ended."""
        run, turns, sampler = self._run, self._turns, self._sampler
        if sampler is None:
            raise EngineError("it was closed")

        def hand_over(groups: dict[int, list[Rollout]]) -> None:
            for place, rollouts in groups.items():
                results[place].set_result(make_result(run, tasks[place], rollouts))

        if turns is None:
            examples = [Example(index=task.group, prompt="", prompt_ids=task.prompt_ids, columns={}) for task in tasks]
        else:
            examples = [turns.make_example(task) for task in tasks]
        seed, ids = run.seed_of(attempt), [task.group for task in tasks]
        with _failures():
            sampler.sample(examples, run.num_generations, run.temperature, seed=seed, on_groups=hand_over, ids=ids)

    def close(self) -> None:
        """Free the memory. A group that is being drawn is drawn to its end."""
        self._model = self._sampler = self._batcher = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _failures() -> Iterator[None]:
    """Turn errors of a device, a model or a file into an EngineError."""
    try:
        yield
    except RewardError:  # the user's environment, not the engine
        raise
    except PictureError as error:
        raise EngineError(f"a picture {error}") from error
    except (ConfigError, FloatingPointError, SafetensorError, OSError) as error:
        raise EngineError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        reason = one_line(error) or type(error).__name__
        if is_out_of_memory(error):
            reason = f"out of memory ({reason}): lower sequences_per_generate, down to one group of the run"
        raise EngineError(reason) from error
