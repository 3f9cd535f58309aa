"""The policy goes to a pool of rollouts, version by version: workers draw with it.

The weights, of an adapter its own alone, are copied, and the probe is scored, before an update changes them. A thread
beside the update writes the file into the run's folder, compares it with the version before, and sends it: whole with
every eighth version, and wherever the delta is not less than half of it. A worker that joins needs seven deltas at
most. The file stays until the pool has the version after it: with a lag the pool needs versions that a resumed run
cannot make any more, which `send_left` sends.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.numpy import save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.agents.episodes import Agent
from grpo.client.server_errors import RequestFailure, ServerError, ServersLost
from grpo.config.trainer import TrainerConfig
from grpo.model.load import eos_token_ids, longest_sequence
from grpo.model.logprobs import token_logprobs
from grpo.model.lora import NAME, adapter_weights, base_weights, quantization_of
from grpo.model.packing import Batcher
from grpo.model.pictures import PictureProcessor
from grpo.model.sharded import copy_whole, is_sharded, shape_of
from grpo.model.weights_file import named_weights, write_weights
from grpo.pool.client import PoolClient, Retrier
from grpo.pool.delta import make_delta, sha256_of
from grpo.pool.protocol import ADAPTER, MOST_TASKS, Probe, RunInfo, Version
from grpo.run.checkpoints import Checkpoints
from grpo.run.folder import SaveError
from grpo.tools.dialogue import UserResponder
from grpo.wire.picture_files import pictures_of
from grpo.wire.tool_outcomes import SETTINGS, RunAgent, RunTools

log = logging.getLogger(__name__)

_WHOLE_EVERY = 8  # versions
_PROBE = (8, 56)  # tokens of the prompt and of the completion


@dataclass
class PolicyCopy:
    """A copy of the policy's weights in rank 0's memory, and its log-probs of a probe. If the weights are sharded every
    rank has one."""

    model: PreTrainedModel
    batcher: Batcher
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    probe: Probe | None = None
    base: dict[str, torch.Tensor] | None = None  # what an adapter is on, until it is written

    def __post_init__(self) -> None:
        draw, self.vocab_size = random.Random(0), shape_of(self.model.get_input_embeddings().weight)[0]
        ids = [draw.randrange(self.vocab_size) for _ in range(sum(_PROBE))][: longest_sequence(self.model.config)]
        prompt = min(_PROBE[0], len(ids) - 1)
        self._ids = ids[:prompt], ids[prompt:]
        if self.batcher.vision is not None:  # text alone would not show which vision tower it was
            # An id that belongs to pictures would be taken for another one.
            special = {value for name, value in vars(self.model.config).items() if name.endswith("token_id")}
            of_prompt, of_completion = ([token for token in part if token not in special] for part in self._ids)
            self._ids = self.batcher.vision.trial_prompt(1, of_prompt, seed=0), of_completion
        self.pictures = {hashlib.sha256(file).hexdigest(): file for file in pictures_of(self._ids[0])}

    def take(self) -> None:
        """Copy the policy as it is: it may change then. All ranks that have one call it together."""
        has_adapter = hasattr(self.model, "peft_config")
        if has_adapter and self.probe is None and is_sharded(self.model):
            self.base = copy_whole(base_weights(self.model))
        copy_whole(adapter_weights(self.model) if has_adapter else named_weights(self.model), self.weights)
        self.probe = self._score()

    @torch.no_grad()
    def _score(self) -> Probe:
        prompt, completion = self._ids
        logprobs, _ = token_logprobs(self.model, self.batcher.make([self._ids], self.model.device), temperature=1.0)
        # Short numbers: every worker reads the probes of all versions, each time.
        rounded = [round(logprob, 6) for logprob in logprobs.tolist()]
        return Probe(prompt_ids=[*prompt], completion_ids=completion, logprobs=rounded, pictures=tuple(self.pictures))


@dataclass(kw_only=True)
class PolicyPublisher:
    """The versions of the policy that a pool gets, on rank 0. Raises ServerError if the pool refuses something or does
    not answer by the deadline, SaveError, and Stopped once `stop` is set."""

    client: PoolClient
    policy: PolicyCopy
    run_folder: Path
    ask: Retrier
    stop: threading.Event

    def __post_init__(self) -> None:
        self._folder = self.run_folder / "policy"
        self._last: Version | None = None
        self._published = 0
        self._thread = ThreadPoolExecutor(1, "publish the policy")
        self._written: Future[Version] | None = None
        self._publication: Future[None] | None = None

    def write_base(self) -> tuple[Path, str] | None:
        """Write an adapter's base; return the file, the caller's to remove, and its SHA-256. None without adapter."""
        if not hasattr(self.policy.model, "peft_config"):
            return None
        path, copied, self.policy.base = self._folder / "base.safetensors", self.policy.base, None
        with _saving(path):
            return path, self._write(path, copied or base_weights(self.policy.model))

    def send_left(self, first: int, end: int) -> None:
        """Send the versions from `first` to before `end` that an earlier start left unsent. Empties the folder."""
        for path in sorted(self._folder.glob("*.json"), key=lambda path: int(path.stem)):
            # Another than those of the checkpoint may be half a file, after a power cut.
            if first <= int(path.stem) < end and self._path(int(path.stem)).exists():
                left = Version.of_fields(json.loads(path.read_bytes()))
                self.ask(lambda left=left: self._upload(left))
        shutil.rmtree(self._folder, ignore_errors=True)

    def publish(self, version: int) -> None:
        """Publish the copy of the policy after `version` updates, once the publication before is over."""
        self.wait()
        self._written = self._thread.submit(self._write_version, version, self.policy.weights, self.policy.probe)
        self._publication = self._thread.submit(self._send, self._written)

    def wait(self) -> None:
        """Return when the pool has the version that was published last."""
        if self._publication is not None:
            self._publication.result()

    def wait_written(self) -> None:
        """Return when the version that was published last is in the run's folder, or could not be written: the copy
        may change then."""
        if self._written is not None:
            wait([self._written])

    def check_written(self) -> None:
        """Wait, and raise SaveError if the last version could not be written."""
        if self._written is not None:
            self._written.result()

    def close(self) -> None:
        """End. A publication that is not over is given up, and its file stays for `send_left`."""
        self.stop.set()
        self._thread.shutdown(wait=False)
        if self._publication is not None and self._publication.done() and not self._publication.exception():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write_version(self, number: int, weights: dict[str, torch.Tensor], probe: Probe) -> Version:
        path = self._path(number)
        with _saving(path):
            sha256 = self._write(path, weights)
            version = Version(
                version=number, sha256=sha256, size=path.stat().st_size, whole=True, base=None, delta=None, probe=probe
            )
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_bytes(version.to_json())
            os.replace(unfinished, path.with_suffix(".json"))
        return version

    def _send(self, written: Future[Version]) -> None:
        new, before = written.result(), self._last
        path, delta_bytes = self._path(new.version), None
        delta = path.with_suffix(".delta")
        with _saving(path):
            if before is not None:
                delta_bytes = make_delta(self._path(before.version), path, delta=delta, limit=new.size // 2)
            delta_sha256 = sha256_of(delta) if delta_bytes else None
        whole = not delta_bytes or self._published % _WHOLE_EVERY == 0
        sent_as = replace(new, whole=whole, base=before.version if delta_bytes else None, delta=delta_sha256)
        self.ask(lambda: self._upload(sent_as))
        self._last, self._published = new, self._published + 1
        delta.unlink(missing_ok=True)
        if before is not None:
            self._path(before.version).with_suffix(".json").unlink(missing_ok=True)
            self._path(before.version).unlink(missing_ok=True)

    def _path(self, version: int) -> Path:
        return self._folder / f"{version}.safetensors"

    def _write(self, path: Path, weights: dict[str, torch.Tensor]) -> str:
        """Write the weights' file whole or not at all; return its SHA-256."""
        unfinished = path.with_suffix(".unfinished")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            sha256 = write_weights(unfinished, weights)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        return sha256

    def _upload(self, version: Version) -> None:
        """Send a version, unless the pool has it. The pool keeps its parts if a request fails."""
        known = {other.version: other.sha256 for other in self.client.versions()}
        # A resumed run makes versions that it has published before, to the last bit.
        if known.get(version.version) == version.sha256:
            return
        # A pool that was started with an older copy of its file has not got the version before.
        if version.base is not None and known.get(version.base) != self._last.sha256:
            version = replace(version, whole=True, base=None, delta=None)
        for sha256, file in self.policy.pictures.items():
            self.client.send_file(file, sha256)
        if version.delta is not None:
            self.client.send_file(self._path(version.version).with_suffix(".delta"), version.delta)
        if version.whole:
            self.client.send_file(self._path(version.version), version.sha256)
        self.client.put_version(version)


@contextmanager
def _saving(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SaveError(f"the policy could not be saved to {path}: {error}: make room there") from error


def model_files(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, processor: PictureProcessor | None = None
) -> bytes:
    """Return the file with a model's folder but for its weights (RunInfo.model_files): of equal models equal bytes."""
    settings = copy.deepcopy(model.config)
    settings.architectures = [type(model).__name__]
    if quantization_of(model) == "4bit":
        del settings.quantization_config  # the base is published unpacked
    with TemporaryDirectory() as name:
        folder = Path(name)
        settings.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if processor is not None:
            processor.save(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        if hasattr(model, "peft_config"):
            adapter = copy.copy(model.peft_config[NAME])
            for field, value in vars(adapter).items():
                if isinstance(value, set):  # has another order in each process
                    setattr(adapter, field, sorted(value))
            adapter.save_pretrained(folder / ADAPTER)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return save({str(path.relative_to(folder)): np.frombuffer(path.read_bytes(), np.uint8) for path in paths})


@dataclass(kw_only=True)
class PoolRun:
    """The run as the pool knows it. Rank 0 alone has one."""

    config: TrainerConfig
    publisher: PolicyPublisher
    tokenizer: PreTrainedTokenizerBase
    name: str  # on pages and in logs
    checkpoints: Checkpoints
    turns: UserResponder | Agent | None  # the trainer's, which its workers' must be like
    processor: PictureProcessor | None = None

    def __post_init__(self) -> None:
        self._pool, self._ask, policy = self.publisher.client, self.publisher.ask, self.publisher.policy
        self._needed, self._is_begun = 0, False
        self._files, config = model_files(policy.model, self.tokenizer, self.processor), self.config
        of_config = "max_completion_length", "temperature", "seed", "in_flight_weight_updates"
        self._run = RunInfo(
            run=self.checkpoints.identity,
            name=self.name,
            vocab_size=policy.vocab_size,
            eos_token_ids=eos_token_ids(policy.model, self.tokenizer),
            model_files=hashlib.sha256(self._files).hexdigest(),
            groups_per_round=config.prompts_per_step * config.steps_per_generation,
            num_generations=config.draws,
            **self._describe_turns(),
            processor="" if self.processor is None else self.processor.fingerprint,
            **{setting: getattr(config, setting) for setting in of_config},
        )

    def _describe_turns(self) -> dict[str, RunTools | RunAgent]:
        config, turns = self.config, self.turns
        if turns is None:
            return {}
        if config.agent is not None:
            return {"agent": turns.describe()}
        settings = {setting: getattr(config, setting) for setting in SETTINGS}
        return {"turns": RunTools.of(turns.tools, config.environment, [*turns.rewards], **settings)}

    def publish(self, version: int, number: int) -> None:
        """Publish this version of the policy, with which round `number` begins. Returns when the pool has the version
        that draws that round, and has dropped the versions of an earlier start whose bits differ. Raises as
        PolicyPublisher, and if the pool lacks a version that only it had."""
        draws_this_round = self.config.version_of_round(number) == version
        if not self._is_begun:
            self._begin(version, number)
            if not (draws_this_round or self._run.in_flight_weight_updates):  # else this version can draw it too
                self._check_version(number)
            self._is_begun = True
        if not draws_this_round:
            self.publisher.wait()  # for the version that draws this round
        # Versions of an earlier start, from this one on, may have drawn tokens of this round: the pool drops them if
        # their bits differ.
        earlier = self._ask(self._pool.versions) if self._run.in_flight_weight_updates else []
        self.publisher.publish(version)
        if draws_this_round or any(known.version >= version for known in earlier):
            self.publisher.wait()
        self._release(version)  # the pool has what it needs, and had what the new version is a difference from

    def end_step(self, drifts: list[tuple[int, float, int]]) -> None:
        """Tell the pool how far workers' log-probs are from the policy's: StepResult.drifts. Returns when the last
        version is in the run's folder: a checkpoint of this step may need it. Raises SaveError if it is not."""
        self.publisher.check_written()
        try:
            for start in range(0, len(drifts), MOST_TASKS):
                self._pool.report_drift(drifts[start : start + MOST_TASKS])
        except (RequestFailure, ServerError) as error:  # the next round waits for the pool, or ends the run
            log.warning("the pool %s was not told of drift: %s", self._pool.url, error)

    def _begin(self, version: int, number: int) -> None:
        """Tell the pool the run, and send what all its versions share, and what an earlier start left to be sent."""
        base = self.publisher.write_base()
        if base is not None:
            self._run = replace(self._run, base_weights=base[1])
        # The run first: the file of another one stays as it is.
        self._ask(lambda: self._pool.put_run(self._run))
        self._ask(lambda: self._pool.send_file(self._files, self._run.model_files))
        if base is not None:
            self._ask(lambda: self._pool.send_file(*base))
            base[0].unlink()
        self.publisher.send_left(self.config.version_of_round(number), version)

    def _release(self, version: int) -> None:
        """Let the pool drop the versions that no start of the run will need."""
        config, needed = self.config, version  # without a lag each start makes those that it draws with
        if config.max_policy_lag > 0:
            needed = config.version_of_round(-(-self.checkpoints.oldest() // config.updates_per_round))
        if needed > self._needed:
            self._ask(lambda: self._pool.needed(needed))
            self._needed = needed

    def _check_version(self, number: int) -> None:
        """Raise ServersLost if the pool has neither the groups of this round nor the version that draws them."""
        version = self.config.version_of_round(number)
        known = {version.version for version in self._ask(self._pool.versions)}
        rows = self._ask(self._pool.status)["rounds"]
        is_drawn = any(row["round"] == number and row["drawn"] >= self._run.groups_per_round for row in rows)
        if not is_drawn and version not in known:
            raise ServersLost(
                f"{self._pool.url} lacks version {version} of the policy, which draws round {number} and which the run "
                "has no more: start the pool with the pool_file that it had, or begin again with a new one"
            )
