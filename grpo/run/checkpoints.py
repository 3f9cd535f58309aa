"""Checkpoints that a run continues from as if nothing had happened. Each is there whole or not at all.

`checkpoint-STEP` is a model that `from_pretrained` reads. Beside it lies what only this run can use: `engine/` has
DeepSpeed's weights, optimizer and schedule, `rank-K.pickle` a rank's random states and what it has drawn and not yet
trained on, `progress.json` the rest. To read pickles is to run what is in them: continue from checkpoints you trust.
"""

from __future__ import annotations

import logging
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.model.lora import trained_alone
from grpo.rollouts.records import Example, StepBatch
from grpo.run.checkpoint_files import (
    PROGRESS,
    Sums,
    best,
    checkpoints,
    read_progress,
    readable,
    sum_files,
    write_progress,
)
from grpo.run.collective import from_first, gather
from grpo.run.folder import SaveError, put_in_place, to_disk, write_model
from grpo.run.rearrange import put_steps, shared_anew, to_universal
from grpo.wire.health import fingerprint

log = logging.getLogger(__name__)

ENGINE = "engine"
LIBRARIES = "torch", "transformers", "deepspeed"

# What may be another when a run goes on: it changes no number, or (the second line) only its rounding, or (the third)
# which completions a seed draws from then on: where memory was too small for them, a run must go on with fewer at once.
FREE = {
    *("model_name_or_path", "dataset_name", "output_dir", "resume_from_checkpoint", "dry_run"),
    *("micro_batch_tokens", "gradient_checkpointing", "max_bad_steps"),
    "sequences_per_generate",
    *("save_steps", "save_total_limit", "report_to", "merge_on_save", "deepspeed"),
    *("eval_steps", "eval_samples", "num_generations_eval", "pass_at_k"),
    *("ref_servers", "host", "port", "token", "token_file", "ref_ca_file"),
    *("ref_startup_timeout", "ref_request_timeout", "ref_deadline", "reward_timeout"),
}


@dataclass
class Progress:
    """How far a run is: what all ranks know alike, and this rank's round of completions."""

    beta: float
    entropy_coef: float
    entropy: float | None = None
    """mean of the last step's tokens that an adaptive entropy bonus acts on; None before the first"""
    step: int = 0
    """updates done"""
    num_tokens: int = 0
    """that were trained on, over all ranks"""
    accuracy: float | None = None
    """of the evaluation after the last step; None where there was none"""
    round: int = -1
    """which `parts` are of; -1: none was drawn"""
    parts: list[StepBatch] = field(default_factory=list)
    reference: str = ""
    """fingerprint of what the reference servers began with; empty where nobody is asked"""
    ref_step: int = 0
    """after which the policy became part of the reference; 0: it never did"""
    bad_steps: list[int] = field(default_factory=list)
    """the last steps, in a row, that taught the policy nothing: not finite, all rewards None, or all masked"""
    masked_steps: int = 0
    """updates that did nothing, as every completion was masked"""
    resampled: int = 0
    """groups that were replaced in this round, on all ranks"""


class Checkpoints:
    """Saves a run's checkpoints and loads one. Every rank has one; all call it together."""

    def __init__(
        self,
        config: TrainerConfig,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        reference: str,
        examples: list[Example],
        rank: int,
        world_size: int,
    ):
        """`folder` is the run's. `model` and `reference` are fingerprints of what the policy begins as, and of what the
        reference servers have; empty is where nobody is asked."""
        self._config, self._folder, self._tokenizer, self._reference = config, folder, tokenizer, reference
        self._rank = rank
        for left in [*folder.glob("*.unfinished"), *folder.glob("*.old")] if rank == 0 else []:
            shutil.rmtree(left)
        prompts = [one.prompt for one in examples]
        in_few_bits = config.quantization != "none" or config.optim == "adamw_8bit"
        self._about = {
            "ranks": world_size,
            "model": model,
            "prompts": [len(prompts), fingerprint(prompts)],
            "settings": {name: value for name, value in asdict(config).items() if name not in FREE},
            "versions": {name: version(name) for name in (*LIBRARIES, *(["bitsandbytes"] if in_few_bits else []))},
        }

    def save(self, engine, progress: Progress) -> None:
        """Write `checkpoint-STEP`, then delete what `save_total_limit` leaves no room for.

        Raises SaveError on every rank where one of them could not write; nothing is left of it then.
        """
        final = self._folder / f"checkpoint-{progress.step}"
        unfinished = final.with_name(final.name + ".unfinished")
        sums: Sums = {}

        def begin() -> None:
            shutil.rmtree(unfinished, ignore_errors=True)
            write_model(engine.module, self._tokenizer, unfinished, self._config.merge_on_save)

        def save_engine() -> None:
            try:
                alone = trained_alone(engine.module) if self._config.use_peft else nullcontext()
                with alone:
                    engine.save_checkpoint(
                        str(unfinished), tag=ENGINE, save_latest=False, exclude_frozen_parameters=self._config.use_peft
                    )
            except Exception:
                torch.distributed.barrier()  # the others wait for this rank in the one at its end
                raise

        def save_own() -> None:
            with open(unfinished / f"rank-{self._rank}.pickle", "wb") as file:
                pickle.dump({"random": _random_states(), "parts": self._due(progress)}, file)
            names = [str(path.relative_to(unfinished)) for path in unfinished.rglob("*") if path.is_file()]
            sums.update(sum_files(unfinished, [name for name in names if _writer(name) == self._rank]))

        def finish() -> None:
            about = self._about | {name: getattr(progress, name) for name in _SHARED}
            write_progress(unfinished, about | {"files": dict(sorted(sums.items()))})
            # A run that goes on from here will not write again what comes before.
            for records in self._folder.glob("*.jsonl"):
                to_disk(records, deep=False)
            put_in_place(unfinished, final)

        reason = self._fails(begin, False) or self._fails(save_engine, True) or self._fails(save_own, True)
        if reason is None:
            # Each rank sums what it wrote: its own machine still has that in memory.
            sums = {name: its for of_rank in gather(sums) for name, its in of_rank.items()}
            reason = self._fails(finish, False)
        if reason is not None:
            if self._rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            last = next(reversed(readable(self._folder)), None)
            raise SaveError(
                f"{final} could not be saved: {reason}: nothing was left there. A checkpoint takes about "
                f"{_size(engine) >> 20} MiB: make room, and "
                + (f"--resume_from_checkpoint last goes on from {last.name}" if last else "begin again")
            )
        if self._rank == 0:
            self._delete_old()

    def leave(self, engine, progress: Progress) -> str:
        """Save where the run stands, if that is not done yet; says how to go on from there. Raises SaveError."""
        if progress.step == 0:
            return "nothing is lost: no step was done"
        saved = self._folder / f"checkpoint-{progress.step}"
        if not from_first((saved / PROGRESS).exists()):  # another machine may see it later
            self.save(engine, progress)
        return f"--resume_from_checkpoint last --output_dir {self._folder} goes on after step {progress.step}"

    def way_on(self) -> str:
        """Says how to go on from the newest checkpoint, for a rank that fails alone and can save nothing."""
        last = next(reversed(readable(self._folder).values()), None)
        if last is None:
            return "no checkpoint was saved: begin again"
        return f"--resume_from_checkpoint last --output_dir {self._folder} goes on after step {last['step']}"

    def load(self, checkpoint: Path, engine) -> Progress:
        """Bring this rank and its engine to where the checkpoint is. What it had asked the reference is lost.

        Raises ConfigError, with the difference, for a checkpoint of another model, data or settings.
        """
        said = read_progress(checkpoint)
        self._check(checkpoint, said)
        for name, now in self._about["versions"].items():
            if (then := said["versions"].get(name)) != now:
                log.warning("%s was %s when %s was saved, and is %s: numbers may differ", name, then, checkpoint, now)
        there, here = said["ranks"], self._about["ranks"]
        load = partial(engine.load_checkpoint, load_module_strict=not self._config.use_peft)
        if there == here:
            load(str(checkpoint), tag=ENGINE)
        elif self._config.optim == "adamw_8bit":
            raise ConfigError(
                f"resume_from_checkpoint='{checkpoint}': it is of {there} ranks, and AdamW's moments in 8 bits cannot "
                f"be rearranged for {here}: start it with {there}"
            )
        else:
            log.info("%s is of %d ranks: DeepSpeed rearranges it for %d", checkpoint, there, here)
            universal = checkpoint.with_name(checkpoint.name + ".universal.unfinished")

            def load_universal() -> None:
                load(str(universal), tag=ENGINE)
                put_steps(engine.basic_optimizer)

            failure = self._fails(partial(to_universal, checkpoint / ENGINE, universal / ENGINE), on_all=False)
            failure = failure or self._fails(load_universal, on_all=True)
            if self._rank == 0:
                shutil.rmtree(universal, ignore_errors=True)
            if failure:
                raise SaveError(
                    f"{checkpoint} could not be rearranged for {here} ranks: {failure}: this needs about as much room "
                    f"as the checkpoint has; or start it with {there}"
                )
        every = {rank: _unpickled(checkpoint, rank) for rank in ([self._rank] if there == here else range(there))}
        if self._rank in every:
            _set_random_states(every[self._rank]["random"])
        by_rank = [one["parts"] for one in every.values()]
        parts = by_rank[0] if there == here else shared_anew(by_rank, self._rank, here)
        return Progress(parts=parts, **{name: said[name] for name in _SHARED})

    def references(self) -> set[int]:
        """Return the steps after which the policy became a reference that a checkpoint needs.

        Without a checkpoint that is the first one: a run that is killed begins again with it.
        """
        return {about["ref_step"] for about in readable(self._folder).values()} or {0}

    def _due(self, progress: Progress) -> list[StepBatch]:
        """The round, where not all of it was trained on."""
        return progress.parts if progress.round == progress.step // self._config.updates_per_round else []

    def _fails(self, action: Callable[[], None], on_all: bool) -> str | None:
        """Do it, on every rank or on the first. What went wrong, on whichever rank, is known to all."""
        failure = None
        if on_all or self._rank == 0:
            try:
                action()
            # Whatever it was, on whichever rank: the others must not go on as if the checkpoint were there.
            except Exception as error:
                failure = f"{getattr(error, 'strerror', None) or error} (rank {self._rank})"
        return next((one for one in gather(failure) if one), None)

    def _delete_old(self) -> None:
        """Keep the newest save_total_limit that can be read, and the one whose evaluation was the best."""
        limit, known = self._config.save_total_limit, readable(self._folder)
        if limit == 0:
            return
        keep = {*[*known][-limit:], best({path: about["accuracy"] for path, about in known.items()})}
        for old in checkpoints(self._folder):
            if old not in keep:
                # Gone as a checkpoint in one step: a kill while it is deleted leaves none that is half there.
                rest = old.with_name(old.name + ".unfinished")
                os.replace(old, rest)
                shutil.rmtree(rest)

    def _check(self, checkpoint: Path, said: dict[str, Any]) -> None:
        def refuse(what: str, there: Any, here: Any, remedy: str) -> None:
            if there != here:
                raise ConfigError(
                    f"resume_from_checkpoint='{checkpoint}': {what} is {there!r} there and {here!r} here: {remedy}"
                )

        own = self._about
        refuse("the model's fingerprint", said["model"], own["model"], "set model_name_or_path to the same model")
        if not self._config.ref_update_steps:
            remedy = "start the reference server with the model that it had"
            refuse("the reference's fingerprint", said["reference"], self._reference, remedy)
        refuse("the prompts' count and sum", said["prompts"], own["prompts"], "set dataset_name to the same data")
        constant = self._config.lr_scheduler_type.startswith("constant")
        for name in sorted(said["settings"].keys() | own["settings"].keys()):
            if name == "max_steps" and constant:
                continue  # the learning rate does not depend on it
            refuse(name, said["settings"].get(name), own["settings"].get(name), "leave it as it was")


_SHARED = [name for name in Progress.__dataclass_fields__ if name != "parts"]


def _size(engine) -> int:
    """Bytes of a checkpoint: what is trained, for others and for DeepSpeed, and in float32 with AdamW's two moments."""
    return sum(2 * one.nbytes + 12 * one.numel() for one in engine.module.parameters() if one.requires_grad)


def _writer(name: str) -> int:
    """Return the rank that writes this file of a checkpoint."""
    numbered = re.search(r"pp_rank_(\d+)_|^rank-(\d+)\.", name)
    return int(numbered[1] or numbered[2]) if numbered else 0


def _unpickled(checkpoint: Path, rank: int) -> dict[str, Any]:
    with open(checkpoint / f"rank-{rank}.pickle", "rb") as file:
        return pickle.load(file)


def _random_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
