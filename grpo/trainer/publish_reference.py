"""The trainer's side of a reference update: after some steps the policy becomes the reference, or is mixed into it.

The new reference is saved in the run's folder, `reference-STEP`, and then sent to the servers. It stays until the next
update, for a server that starts again. `reference-0`, which the servers began with, stays until a checkpoint needs
another one: a run that is killed before that begins again with it, whatever the servers have by then.
"""

import copy
import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.client.connection import WeightsToSend
from grpo.client.reference import ReferenceClient
from grpo.client.server_errors import ServerError, ServersLost
from grpo.config.connection_settings import ReferenceConfig
from grpo.config.errors import ConfigError
from grpo.model.fingerprint import fingerprint_with
from grpo.model.lora import merged
from grpo.model.pictures import PictureProcessor
from grpo.model.sharded import weights_to_save
from grpo.model.weights_file import WeightsFile, named_weights, write_weights
from grpo.run.collective import from_first, raise_together
from grpo.run.folder import remove, to_disk, whole_folder
from grpo.wire.health import ModelInfo

log = logging.getLogger(__name__)

_FILE = "model.safetensors"
_FIRST = "first.json"  # in reference-0: the fingerprints that the policy and the servers began with


def has_begun(folder: Path) -> bool:
    """Return whether a run in this folder has begun before: then the servers may have any of its references."""
    return (folder / "reference-0" / _FIRST).is_file()


@dataclass(kw_only=True)
class WeightPublisher:
    """The reference that is in force, and the updates of it. Every rank has one, and all call it together."""

    config: ReferenceConfig
    client: ReferenceClient
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    policy: ModelInfo  # of `model`, before the run
    folder: Path | None  # the run's, on rank 0; else None
    processor: PictureProcessor | None = None
    _current: Path | None = None

    def begin(self, reference: ModelInfo) -> str:
        """Save the servers' first model, for mixtures and for a run that is resumed before the first update, or make it
        the reference again; return its fingerprint. `reference` is their present one. Raises ConfigError if a mixture
        needs the first one and the policy begins as another; as resume."""
        first: dict[str, str] = {}
        if self.folder is not None and has_begun(self.folder):
            with suppress(ValueError):  # a file that was being written when the run was killed
                first = json.loads((self.folder / "reference-0" / _FIRST).read_text(encoding="utf-8"))
        first = from_first(first)
        if first.get("policy") == self.policy.fingerprint:
            self.resume(0, first["reference"])
            return first["reference"]
        same = self.policy.fingerprint == reference.fingerprint
        if (alpha := self.config.ref_mixup_alpha) < 1 and not same:
            raise ConfigError(
                f"ref_mixup_alpha={alpha}: the servers have other weights than the policy begins with, and the "
                "mixture needs them: start the servers with the policy's model, or use 1"
            )
        weights = weights_to_save(self.model) if same else None
        if self.folder is not None:
            folder = self.folder / "reference-0"
            if same:
                self._save(0, weights)
            else:
                with whole_folder(folder, "reference"):
                    pass  # an empty folder: the trainer does not have these weights
            fingerprints = {"policy": self.policy.fingerprint, "reference": reference.fingerprint}
            (folder / _FIRST).write_text(json.dumps(fingerprints), encoding="utf-8")
            to_disk(folder)
        return reference.fingerprint

    def publish(self, step: int, needed: Iterable[int] = ()) -> None:
        """Make the policy after this step the reference. Returns when no older one is used any more, and deletes them
        but for those of the steps in `needed`. Raises ServersLost if no server takes the new one, SaveError."""
        weights = weights_to_save(self.model)
        self._announce(step, self._save(step, weights) if self.folder is not None else None)
        kept = {f"reference-{kept_step}" for kept_step in (step, *needed)}
        for folder in self.folder.glob("reference-*") if self.folder is not None else ():
            if folder.name not in kept:
                remove(folder)

    def resume(self, step: int, first: str) -> None:
        """Make the reference of this step's update the reference again, whatever the servers have by now. `first` is
        the fingerprint of their first model. Raises ServersLost if no server takes it, ConfigError if it is lost."""
        self.client.connection.outdated.add(first)  # a server that starts again has it
        weights = None
        if self.folder is not None:
            self._current = self.folder / f"reference-{step}"
            if (self._current / _FILE).is_file():
                weights = self._describe_saved(self._merge_adapter())
            elif step > 0:
                raise ConfigError(
                    f"resume_from_checkpoint: {self._current}, the reference of that checkpoint, is not there: put it "
                    "back, or resume from another checkpoint"
                )
        self._announce(step, weights, first)

    def _announce(self, step: int, weights: WeightsToSend | None, first: str = "") -> None:
        """Send rank 0's weights to the servers and accept only their answers; without weights, those of the first."""
        lost = None
        if weights is not None:
            try:
                self.client.balancer.send_weights(weights)
            except ServerError as error:
                lost = error
        raise_together(lost, ServersLost)
        fingerprint = from_first(first if weights is None else weights.fingerprint)
        if weights is None:
            self.client.balancer.use_only(fingerprint)
        log.info("the reference is now the policy of step %d (%s)", step, fingerprint)

    def _save(self, step: int, weights: dict[str, torch.Tensor] | None) -> WeightsToSend:
        """Write the new reference as a model that the server, or anybody, can load. `weights` are a sharded model's."""
        folder = self.folder / f"reference-{step}"
        with whole_folder(folder, "reference") as unfinished:
            model = self._merge_adapter()
            sha256 = self._write(unfinished / _FILE, weights or named_weights(model))
            settings = copy.deepcopy(model.config)
            settings.weights_sha256 = sha256  # part of its fingerprint
            settings.dtype = settings.dtype if self.config.ref_mixup_alpha == 1 else torch.float32
            settings.architectures = [type(model).__name__]
            settings.save_pretrained(unfinished)
            self.tokenizer.save_pretrained(unfinished)
            if self.processor is not None:
                self.processor.save(unfinished)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(unfinished)
        self._current = folder
        return self._describe_saved(model)

    def _merge_adapter(self) -> PreTrainedModel:
        return merged(self.model) if hasattr(self.model, "peft_config") else self.model

    def _describe_saved(self, model: PreTrainedModel) -> WeightsToSend:
        """Describe the weights saved in `_current`. `model` is a plain model of the same architecture."""
        path = self._current / _FILE
        size, sha256 = path.stat().st_size, json.loads((self._current / "config.json").read_text())["weights_sha256"]
        with open(path, "rb") as file:
            fingerprint = fingerprint_with(model, self.policy.inputs_fingerprint, WeightsFile(file, size), sha256)
        return WeightsToSend(file=path, size=size, sha256=sha256, fingerprint=fingerprint)

    def _write(self, path: Path, weights: dict[str, torch.Tensor]) -> str:
        """Write alpha * policy + (1 - alpha) * old reference; return the file's SHA-256. (TR-DPO's soft update,
        Gorbatovski et al., arXiv:2404.09656.) A mixture is float32: with a small alpha a weight moves by less than
        bfloat16 can show."""
        alpha = self.config.ref_mixup_alpha
        if alpha == 1 or self._current is None:
            return write_weights(path, weights, None if alpha == 1 else torch.float32)
        with open(self._current / _FILE, "rb") as file:
            old_reference = WeightsFile(file, (self._current / _FILE).stat().st_size)

            def mix(name: str, part: slice, values: torch.Tensor) -> torch.Tensor:
                return alpha * values + (1 - alpha) * old_reference.read(name, part)

            return write_weights(path, weights, torch.float32, mix)
