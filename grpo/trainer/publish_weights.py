"""The trainer's side of a reference update: every so many steps the policy becomes the reference, or is mixed into it.

The new reference is a saved model in the run's folder first, `reference-STEP`; then its weights go to the servers. It
stays there until the next one: a server that was restarted is sent it again, or is started with it. `reference-0`,
which the servers began with, stays until there is a checkpoint that needs another one: a run that is killed before that
begins again with it, whatever the servers have by then.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.client.connection import WeightsToSend
from grpo.client.errors import ServerError, ServersLost
from grpo.client.reference import ReferenceClient
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.model.fingerprint import fingerprint_with
from grpo.model.lora import merged
from grpo.model.weights_file import WeightsFile, named_weights, write_weights
from grpo.run.collective import from_first
from grpo.run.folder import to_disk, whole_folder
from grpo.wire.health import ModelInfo

log = logging.getLogger(__name__)

_FILE = "model.safetensors"
_FIRST = "first.json"  # in reference-0: fingerprints of what the policy and the servers began with


def has_begun(folder: Path) -> bool:
    """Return whether a run in this folder has had servers before, which may have any of its references now."""
    return (folder / "reference-0" / _FIRST).is_file()


class WeightPublisher:
    """Knows which reference is in force. Every rank has one, and all call it together."""

    def __init__(
        self,
        config: TrainerConfig,
        client: ReferenceClient,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy: ModelInfo,
        folder: Path | None,
    ):
        """`policy` describes `model`. `folder` is the run's, on rank 0; else None."""
        self._client, self._model, self._tokenizer = client, model, tokenizer
        self._alpha, self._policy, self._folder = config.ref_mixup_alpha, policy, folder
        self.step = 0
        """after which the policy became part of the reference; 0 is what the servers began with"""
        self._current: Path | None = None

    def begin(self, reference: ModelInfo) -> None:
        """Keep what the servers begin with: for mixtures, and for a run that goes on from before the first update. In a
        run that begins again, make that the reference again.

        Raises ConfigError where a mixture needs it and it is not what the policy begins with, SaveError; as go_on.
        """
        first = from_first(self._read_first())
        if first.get("policy") == self._policy.fingerprint:
            self.go_on(0, first["reference"])
            return
        same = self._policy.fingerprint == reference.fingerprint
        if self._alpha < 1 and not same:
            raise ConfigError(
                f"ref_mixup_alpha={self._alpha}: the servers have other weights than the policy begins with, and the "
                "mixture needs them: start the servers with the policy's model, or use 1"
            )
        if self._folder is None:
            return
        folder = self._folder / "reference-0"
        if same:
            self._save(0)
        else:
            with whole_folder(folder, "reference"):
                pass  # nobody here has its weights
        fingerprints = {"policy": self._policy.fingerprint, "reference": reference.fingerprint}
        (folder / _FIRST).write_text(json.dumps(fingerprints), encoding="utf-8")
        to_disk(folder)

    def publish(self, step: int, needed: Iterable[int] = ()) -> None:
        """Make the policy, as it is after this step, the reference. Returns when no older one will be used any more.

        Of the older ones those of the steps in `needed` are kept. Raises ServersLost where no server can have it,
        SaveError.
        """
        self._announce(step, self._save(step) if self._folder is not None else None)
        if self._folder is not None:
            keep = {f"reference-{one}" for one in (step, *needed)}
            for old in self._folder.glob("reference-*"):
                if old.name not in keep:
                    shutil.rmtree(old)

    def go_on(self, step: int, first: str) -> None:
        """Make what was the reference after this step's update the reference again, whatever the servers have by now.

        `first` is the fingerprint of what they began with. Raises ServerError where no server can have it, ConfigError
        where it is not in the run's folder any more.
        """
        kept = None
        if self._folder is not None:
            self._current = self._folder / f"reference-{step}"
            if (self._current / _FILE).is_file():
                kept = self._kept(self._whole())
            elif step > 0:
                raise ConfigError(
                    f"resume_from_checkpoint: {self._current}, the reference of that checkpoint, is not there: put it "
                    "back, or resume from another checkpoint"
                )
        self._announce(step, kept, first)

    def _read_first(self) -> dict[str, str]:
        """Read what begin wrote; empty where it did not, or not to its end."""
        if self._folder is None or not has_begun(self._folder):
            return {}
        try:
            return json.loads((self._folder / "reference-0" / _FIRST).read_text(encoding="utf-8"))
        except ValueError:
            return {}

    def _announce(self, step: int, new: WeightsToSend | None, first: str = "") -> None:
        """Bring rank 0's reference to the servers; where it has none, they are to have the first."""
        fingerprint, lost = first, None
        if new is not None:
            fingerprint = new.fingerprint
            try:
                self._client.balancer.send_weights(new)
            except ServerError as error:
                lost = str(error)
        fingerprint, lost = from_first((fingerprint, lost))
        if lost:
            raise ServersLost(lost)
        if new is None:
            self._client.balancer.use_only(fingerprint)
        self.step = step
        log.info("the reference is the policy of step %d now (%s)", step, fingerprint)

    def _save(self, step: int) -> WeightsToSend:
        """Write the new reference as a model that the server, or anybody, can load."""
        folder = self._folder / f"reference-{step}"
        with whole_folder(folder, "reference") as unfinished:
            model = self._whole()
            sha256 = self._write(unfinished / _FILE, named_weights(model))
            settings = copy.deepcopy(model.config)
            settings.weights_sha256 = sha256  # part of its fingerprint
            settings.dtype = settings.dtype if self._alpha == 1 else torch.float32
            settings.architectures = [type(model).__name__]
            settings.save_pretrained(unfinished)
            self._tokenizer.save_pretrained(unfinished)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(unfinished)
        self._current = folder
        return self._kept(model)

    def _whole(self) -> PreTrainedModel:
        """The policy as a plain model, an adapter merged into it."""
        return merged(self._model) if hasattr(self._model, "peft_config") else self._model

    def _kept(self, model: PreTrainedModel) -> WeightsToSend:
        """The reference that is in `_current`: other weights of this plain model."""
        path = self._current / _FILE
        size, sha256 = path.stat().st_size, json.loads((self._current / "config.json").read_text())["weights_sha256"]
        with open(path, "rb") as file:
            fingerprint = fingerprint_with(model, self._policy.tokenizer_fingerprint, WeightsFile(file, size), sha256)
        return WeightsToSend(path, size, sha256, fingerprint)

    def _write(self, path: Path, weights: dict[str, torch.Tensor]) -> str:
        """alpha * policy + (1 - alpha) * old reference: TR-DPO's soft update (Gorbatovski et al., arXiv:2404.09656).

        A mixture is float32 whatever the policy is: with a small alpha a weight moves by less than bfloat16 can show.
        """
        alpha = self._alpha
        if alpha == 1:
            return write_weights(path, weights)
        if self._current is None:
            return write_weights(path, weights, torch.float32)
        with open(self._current / _FILE, "rb") as file:
            old = WeightsFile(file, (self._current / _FILE).stat().st_size)

            def mixed(name: str, part: slice, values: torch.Tensor) -> torch.Tensor:
                return alpha * values + (1 - alpha) * old.read(name, part)

            return write_weights(path, weights, torch.float32, mixed)
