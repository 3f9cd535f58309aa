"""The trainer's side of a reference update: every so many steps the policy becomes the reference, or is mixed into it.

The new reference is a saved model in the run's folder first, `reference-STEP`; then its weights go to the servers. It
stays there until the next one: a server that was restarted is sent it again, or is started with it.
"""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.adapters import merged
from grpo.checkpoint import whole_folder
from grpo.config import ConfigError
from grpo.model import fingerprint_with
from grpo.protocol import Health
from grpo.ref_client import RefClient
from grpo.ref_wire import Reference
from grpo.trainer_config import TrainerConfig
from grpo.weights import WeightsFile, named_weights, write_weights

log = logging.getLogger(__name__)

_FILE = "model.safetensors"


class RefUpdates:
    """Knows which reference is in force. Every rank has one, and all call it together."""

    def __init__(
        self,
        config: TrainerConfig,
        client: RefClient,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy: Health,
        reference: Health,
        folder: Path | None,
    ):
        """`policy` describes `model`, `reference` what the servers have. `folder` is the run's, on rank 0; else None.

        Raises ConfigError where the servers' first weights are needed for a mixture and are not those of the policy,
        SaveError.
        """
        self._client, self._model, self._tokenizer = client, model, tokenizer
        self._alpha, self._tokens, self._folder = config.ref_mixup_alpha, policy.tokenizer_fingerprint, folder
        self.step = 0
        """after which the policy became part of the reference; 0 is what the servers began with"""
        self._current: Path | None = None
        if self._alpha == 1:
            return
        if policy.model_fingerprint != reference.model_fingerprint:
            raise ConfigError(
                f"ref_mixup_alpha={self._alpha}: the servers have other weights than the policy begins with, and the "
                "mixture needs them: start the servers with the policy's model, or use 1"
            )
        if folder is not None:
            self._save(0)

    def publish(self, step: int) -> None:
        """Make the policy, as it is after this step, the reference. Returns when no older one will be used any more.

        Raises RefError where no server can have it, SaveError.
        """
        fingerprint: list[str | None] = [None]
        if self._folder is not None:
            before = self._current
            reference = self._save(step)
            self._client.publish(reference)
            fingerprint = [reference.fingerprint]
            if before is not None:
                shutil.rmtree(before)
        dist.broadcast_object_list(fingerprint)
        if self._folder is None:
            self._client.expect(fingerprint[0])
        self.step = step
        log.info("the reference is the policy of step %d now (%s)", step, fingerprint[0])

    def _save(self, step: int) -> Reference:
        """Write the new reference as a model that the server, or anybody, can load."""
        folder = self._folder / f"reference-{step}"
        with whole_folder(folder, "reference") as unfinished:
            model = merged(self._model) if hasattr(self._model, "peft_config") else self._model
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
        size = (folder / _FILE).stat().st_size
        with open(folder / _FILE, "rb") as file:
            fingerprint = fingerprint_with(model, self._tokens, WeightsFile(file, size), sha256)
        return Reference(folder / _FILE, size, sha256, fingerprint)

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
