"""The engine that draws as the trainer itself does: the same sampler, the same model, after the same trials.

It draws one group at a time. The last bits of log-probs depend on the other sequences of a batch; so they depend here
on the task alone, whichever worker draws it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from grpo.config.errors import ConfigError, RewardError, one_line
from grpo.config.programs import WorkerConfig
from grpo.config.sampling_settings import SharedConfig
from grpo.data.records import Example
from grpo.model.devices import is_out_of_memory, take_device
from grpo.model.load import eos_token_ids, load_model, load_tokenizer
from grpo.model.logprobs import token_logprobs
from grpo.model.lora import adapter_weights, load_adapter
from grpo.model.trial import make_batcher
from grpo.model.weights_file import named_weights
from grpo.pool.protocol import ADAPTER, GroupResult, Probe, RunInfo, Task
from grpo.sampling.self_check import make_sampler
from grpo.workers.engine import EngineError
from grpo.workers.weights_folder import dtype_of, versions_file
from grpo.workers.worker_tools import WorkerTools


class TransformersEngine:
    """An Engine (grpo/workers/engine.py) that holds the policy in this process."""

    capacity = 1
    loads_in_flight = False

    def __init__(self, config: WorkerConfig):
        """Raises ConfigError if the card cannot be used."""
        self._trust_remote_code, self._device = config.trust_remote_code, take_device(0)
        self.card = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        self._model = self._sampler = None

    def start(self, run: RunInfo, folder: Path, version: int, turns: WorkerTools | None = None) -> None:
        """Load the model and choose its sampler, after the trials that the trainer makes."""
        if (dtype := dtype_of(folder)) not in ("float32", "bfloat16"):
            raise EngineError(f"{folder}: weights of dtype {dtype}: this engine takes float32 and bfloat16")
        config = SharedConfig(model_name_or_path=str(folder), dtype=dtype, trust_remote_code=self._trust_remote_code)
        with _failures():
            tokenizer, model = load_tokenizer(config), load_model(config, self._device)
            if run.base_weights is not None:
                load_adapter(model, str(folder / ADAPTER))
            if (ends := eos_token_ids(model, tokenizer)) != sorted(run.eos_token_ids):
                raise EngineError(f"{folder}: completions end with {ends}, those of the run with {run.eos_token_ids}")
            self._batcher = make_batcher(model, tokenizer.pad_token_id)
            sizes = run.max_completion_length, run.num_generations, self._batcher.longest_packed
            self._sampler = make_sampler(model, tokenizer, *sizes, turns=turns)
        self._run, self._turns, self._model, self._version = run, turns, model, version

    def load(self, folder: Path, version: int) -> None:
        """Copy the weights into the loaded model. Tied weights stay tied."""
        path, has_adapter = versions_file(self._run, folder), self._run.base_weights is not None
        weights = adapter_weights(self._model) if has_adapter else named_weights(self._model)
        with _failures(), safe_open(path, framework="pt") as file:
            for name, tensor in weights.items():
                tensor.copy_(file.get_tensor(name))
        self._version = version

    def logprobs(self, probe: Probe) -> list[float]:
        batch = self._batcher.make([(probe.prompt_ids, probe.completion_ids)], self._device)
        with _failures(), torch.no_grad():
            return token_logprobs(self._model, batch, 1.0)[0].tolist()

    def draw(self, task: Task) -> GroupResult:
        run, turns = self._run, self._turns
        example = Example(task.group, "", task.prompt_ids, {}) if turns is None else turns.make_example(task)
        seed = run.seed + (task.attempt << 32)
        with _failures():
            (rollouts,) = self._sampler.sample([example], run.num_generations, run.temperature, seed, ids=[task.group])
        ids = [rollout.completion_ids for rollout in rollouts]
        logprobs = [rollout.sampling_logprobs for rollout in rollouts]
        versions = [[self._version] * len(row) for row in ids]
        if turns is None:
            return GroupResult(*task.key, ids, logprobs, versions)
        drawn = [rollout.drawn or [True] * len(rollout.completion_ids) for rollout in rollouts]
        return GroupResult(*task.key, ids, logprobs, versions, drawn, [rollout.outcome for rollout in rollouts])

    def close(self) -> None:
        """Free the memory. A group that is being drawn is drawn to its end."""
        self._model = self._sampler = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _failures() -> Iterator[None]:
    """Turn errors of a device, a model or a file into an EngineError."""
    try:
        yield
    except RewardError:  # the user's environment, not the engine
        raise
    except (ConfigError, FloatingPointError, SafetensorError, OSError) as error:
        raise EngineError(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        reason = one_line(error) or type(error).__name__
        if is_out_of_memory(error):
            reason = f"out of memory ({reason}): a group of the run is too large for this worker"
        raise EngineError(reason) from error
