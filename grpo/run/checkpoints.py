"""Checkpoints that a run continues from as if nothing had happened. Each is there whole or not at all.

`checkpoint-STEP` is a model that `from_pretrained` reads. The files beside it are for this run only: `engine/` has
DeepSpeed's weights, optimizer and schedule, `rank-K.pickle` a rank's random states and the completions that it has
drawn and not yet trained on, `progress.json` the rest. Unpickling runs code: resume only from checkpoints you trust.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import MISSING, asdict, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.model.lora import trained_alone
from grpo.model.pictures import PictureProcessor
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
from grpo.run.exit import how_to_go_on
from grpo.run.folder import SaveError, describe_room, put_in_place, to_disk, write_model
from grpo.run.progress import SHARED, Progress, random_states, set_random_states
from grpo.run.rearrange import put_steps, share_anew, to_universal
from grpo.wire.health import fingerprint
from grpo.wire.picture_files import EncodedPicture
from grpo.wire.pictures import key_of, pictures_of

log = logging.getLogger(__name__)

ENGINE = "engine"
LIBRARIES = "torch", "transformers", "deepspeed"

# The settings that may differ when a run goes on. They change no number, or (the second line) only its rounding.
FREE = {
    *("model_name_or_path", "dataset_name", "output_dir", "resume_from_checkpoint", "dry_run"),
    *("micro_batch_tokens", "gradient_checkpointing", "sequences_per_generate"),
    *("sampler", "pool", "pool_deadline", "replay"),
    *("save_steps", "save_total_limit", "report_to", "merge_on_save", "save_system_prompt", "deepspeed"),
    *("push_to_hub", "hub_model_id", "hub_private_repo"),
    *("eval_steps", "eval_samples", "num_generations_eval", "metric_for_best_model"),
    *("ref_servers", "host", "port", "token_file", "ref_ca_file", "allow_other_reference"),
    *("ref_startup_timeout", "ref_request_timeout", "ref_deadline", "reward_timeout", "tool_timeout"),
}

# The settings that may name a Python file of the user's, as path/to/file.py:function.
USER_FILES = {"reward_funcs", "tools", "environment", "loss_type", "advantage_estimator"}


class Checkpoints:
    """The writer and reader of a run's checkpoints. Every rank has one, and all ranks call it together."""

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
        best_by: str = "",
        processor: PictureProcessor | None = None,
    ):
        """`folder` is the run's. `model` is the fingerprint of the model that the policy begins as, `reference` that of
        the reference servers' model, empty where no server is asked. `best_by` is the metric of the evaluation by which
        a checkpoint is the best."""
        self._config, self._folder, self._tokenizer, self._reference = config, folder, tokenizer, reference
        self._rank, self._best_by, self._processor = rank, best_by, processor
        self._is_partly_frozen = config.use_peft or config.freeze_vision_tower
        for unfinished in [*folder.glob("*.unfinished"), *folder.glob("*.old")] if rank == 0 else []:
            shutil.rmtree(unfinished)
        # Two prompts of one text may have different pictures.
        prompts = [
            key_of(example.prompt_ids).hex() if pictures_of(example.prompt_ids) else example.prompt
            for example in examples
        ]
        in_few_bits = config.quantization != "none" or config.optim == "adamw_8bit"
        self._run_info = {
            "ranks": world_size,
            "model": model,
            "prompts": [len(prompts), fingerprint(prompts)],
            # What rewards and environments are given, the gold answers among it.
            "columns": {name: _sum_of_column(examples, name) for name in (examples[0].columns if examples else ())},
            "settings": {name: value for name, value in asdict(config).items() if name not in FREE},
            "directory": os.getcwd(),
            "versions": {name: version(name) for name in (*LIBRARIES, *(["bitsandbytes"] if in_few_bits else []))},
        }

    def identity(self) -> str:
        """Return 16 hex digits that are the same for every start of a run, and differ between runs whose completions
        do: of model, prompts and settings. Columns are not among it: with others the policy gets other bits, and what a
        pool has of a version with other bits is not used."""
        # A default is left out, so that a setting that is added later changes no run's.
        defaults = self._defaults()
        settings = {name: value for name, value in self._run_info["settings"].items() if value != defaults[name]}
        if self._longer_changes_nothing():
            settings.pop("max_steps", None)
        return fingerprint(self._run_info["model"], self._run_info["prompts"], settings)

    def oldest(self) -> int:
        """Return the step of the oldest checkpoint, 0 where there is none: nothing before it is needed any more."""
        return min((saved["step"] for saved in readable(self._folder).values()), default=0)

    def save(self, engine, progress: Progress) -> None:
        """Write `checkpoint-STEP`, then delete the older checkpoints that `save_total_limit` does not keep.

        Raises SaveError on every rank where one of them could not write; then nothing is left of the checkpoint.
        """
        final = self._folder / f"checkpoint-{progress.step}"
        unfinished = final.with_name(final.name + ".unfinished")
        sums: Sums = {}

        def save_weights() -> None:
            shutil.rmtree(unfinished, ignore_errors=True)
            write_model(
                engine.module,
                self._tokenizer,
                unfinished,
                self._config,
                progress.step,
                processor=self._processor,
            )

        def save_engine() -> None:
            try:
                with trained_alone(engine.module) if self._is_partly_frozen else nullcontext():
                    engine.save_checkpoint(
                        str(unfinished), tag=ENGINE, save_latest=False, exclude_frozen_parameters=self._is_partly_frozen
                    )
            except Exception:
                torch.distributed.barrier()  # save_checkpoint ends with one, in which the other ranks wait
                raise

        def save_rank() -> None:
            with open(unfinished / f"rank-{self._rank}.pickle", "wb") as file:
                pickle.dump({"random": random_states(), "batches": self._untrained(progress)}, file)
            names = [str(path.relative_to(unfinished)) for path in unfinished.rglob("*") if path.is_file()]
            sums.update(sum_files(unfinished, [name for name in names if _writer(name) == self._rank]))

        def put_together() -> None:
            content = self._run_info | {name: getattr(progress, name) for name in SHARED}
            write_progress(unfinished, content | {"files": dict(sorted(sums.items()))})
            # A run that goes on from here does not write the earlier records again.
            for records in self._folder.glob("*.jsonl"):
                to_disk(records, deep=False)
            put_in_place(unfinished, final)

        reason = (
            self._failure_of(save_weights, on_all=False)
            or self._failure_of(save_engine, on_all=True)
            or self._failure_of(save_rank, on_all=True)
        )
        if reason is None:
            # Each rank sums the files that it wrote: its own machine still has them in memory.
            sums = {name: file_sum for rank_sums in gather(sums) for name, file_sum in rank_sums.items()}
            reason = self._failure_of(put_together, on_all=False)
        if reason is not None:
            if self._rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            last = next(reversed(readable(self._folder)), None)
            size = _size(engine) >> 20
            remedy = (
                "A file has that name: move it away" if final.is_file() else f"It takes about {size} MiB: make room"
            )
            raise SaveError(
                f"{final} could not be saved: {reason}: nothing was left there. {remedy}, and "
                + (f"--resume_from_checkpoint last goes on from {last.name}" if last else "begin again")
            )
        if self._rank == 0:
            self._delete_old()
            log.info("saved %s", final)

    def leave(self, engine, progress: Progress) -> str:
        """Save where the run stands, if that is not done yet; return how to go on from there. Raises SaveError."""
        if progress.step == 0:
            return "nothing is lost: no step was done"
        saved = self._folder / f"checkpoint-{progress.step}"
        if not from_first((saved / PROGRESS).exists()):  # another machine may see it later
            self.save(engine, progress)
        return how_to_go_on(self._folder, progress.step)

    def way_on(self) -> str:
        """Return how to go on from the newest checkpoint, for a rank that fails alone and cannot save."""
        last = next(reversed(readable(self._folder).values()), None)
        if last is None:
            return "no checkpoint was saved: begin again"
        return how_to_go_on(self._folder, last["step"])

    def load(self, checkpoint: Path, engine) -> Progress:
        """Bring this rank and its engine to where the checkpoint is. Its requests to the reference are lost.

        Raises ConfigError, with the difference, for a checkpoint of another model, data or settings.
        """
        saved = read_progress(checkpoint)
        self._check(checkpoint, saved)
        for name, now in self._run_info["versions"].items():
            if (then := saved["versions"].get(name)) != now:
                log.warning("%s was %s when %s was saved, and is %s: numbers may differ", name, then, checkpoint, now)
        saved_ranks, ranks = saved["ranks"], self._run_info["ranks"]
        load = partial(engine.load_checkpoint, load_module_strict=not self._is_partly_frozen)
        if saved_ranks == ranks:
            load(str(checkpoint), tag=ENGINE)
        elif self._config.optim == "adamw_8bit":
            raise ConfigError(
                f"resume_from_checkpoint='{checkpoint}': it is of {saved_ranks} ranks, and AdamW's moments in 8 bits "
                f"cannot be rearranged for {ranks}: start it with {saved_ranks}"
            )
        else:
            log.info("%s is of %d ranks: DeepSpeed rearranges it for %d", checkpoint, saved_ranks, ranks)
            universal = checkpoint.with_name(checkpoint.name + ".universal.unfinished")

            def load_universal() -> None:
                load(str(universal), tag=ENGINE)
                put_steps(engine.basic_optimizer)

            failure = self._failure_of(partial(to_universal, checkpoint / ENGINE, universal / ENGINE), on_all=False)
            failure = failure or self._failure_of(load_universal, on_all=True)
            if self._rank == 0:
                shutil.rmtree(universal, ignore_errors=True)
            if failure:
                raise SaveError(
                    f"{checkpoint} could not be rearranged for {ranks} ranks: {failure}: this needs about as much room "
                    f"as the checkpoint has; or start it with {saved_ranks}"
                )
        needed = [self._rank] if saved_ranks == ranks else range(saved_ranks)
        states = {rank: _unpickled(checkpoint, rank) for rank in needed}
        if self._rank in states:
            set_random_states(states[self._rank]["random"])
        by_rank = [state["batches"] for state in states.values()]
        batches = by_rank[0] if saved_ranks == ranks else share_anew(by_rank, self._rank, ranks)
        return Progress(batches=batches, **{name: saved[name] for name in SHARED})

    def references(self) -> set[int]:
        """Return the steps after which the policy became a reference that a checkpoint needs.

        Without a checkpoint that is step 0: a run that is killed begins again with the first reference.
        """
        return {saved["ref_step"] for saved in readable(self._folder).values()} or {0}

    def _longer_changes_nothing(self) -> bool:
        """Tell whether the steps are the same with another max_steps: the learning rate does not depend on it."""
        return self._config.lr_scheduler_type.startswith("constant")

    def _untrained(self, progress: Progress) -> list[StepBatch]:
        """Return the round's batches, or none where all of them were trained on."""
        return progress.batches if progress.round == progress.step // self._config.updates_per_round else []

    def _failure_of(self, action: Callable[[], None], on_all: bool) -> str | None:
        """Do it, on every rank or on the first. Return on all ranks what went wrong on one of them, or None."""
        failure = None
        if on_all or self._rank == 0:
            try:
                action()
            # Whatever it was, on whichever rank: the other ranks must not go on as if the checkpoint were there.
            except Exception as error:
                reason = f"{getattr(error, 'strerror', None) or error}{describe_room(self._folder)}"
                failure = f"{reason} (rank {self._rank})"
        return next(filter(None, gather(failure)), None)

    def _delete_old(self) -> None:
        """Keep the newest save_total_limit checkpoints that can be read, and the one with the best evaluation."""
        limit, by_path = self._config.save_total_limit, readable(self._folder)
        if limit == 0:
            return
        keep = {
            *[*by_path][-limit:],
            best({path: saved["evaluated"].get(self._best_by) for path, saved in by_path.items()}),
        }
        for old in checkpoints(self._folder):
            if old not in keep:
                # A rename ends it as a checkpoint at once: a kill while files are deleted leaves no half of one.
                deleted = old.with_name(old.name + ".unfinished")
                os.replace(old, deleted)
                shutil.rmtree(deleted)

    def _defaults(self) -> dict[str, Any]:
        """Return each setting's default. That of a list is empty here: such lists alone are newer than a checkpoint."""
        return {field.name: [] if field.default is MISSING else field.default for field in fields(self._config)}

    def _check(self, checkpoint: Path, saved: dict[str, Any]) -> None:
        """Raise ConfigError where the checkpoint is of another model, data or settings."""

        def compare(what: str, before: Any, now: Any, remedy: str) -> None:
            if before != now:
                raise ConfigError(
                    f"resume_from_checkpoint='{checkpoint}': {what} is {before!r} there and {now!r} here: {remedy}"
                )

        run = self._run_info
        # First: some settings change the model, the reference or the prompts. One that is newer than the checkpoint had
        # its default.
        before = self._defaults() | saved["settings"]
        directory = saved.get("directory", run["directory"])  # an older checkpoint does not have it
        for name in sorted(saved["settings"].keys() | run["settings"].keys()):
            if name == "max_steps" and self._longer_changes_nothing():
                continue
            now = run["settings"].get(name)
            if name in USER_FILES and _absolute(before[name], directory) == _absolute(now, run["directory"]):
                continue
            compare(name, before[name], now, "leave it as it was")
        compare("the model's fingerprint", saved["model"], run["model"], "set model_name_or_path to the same model")
        if not self._config.ref_update_steps:
            remedy = "start the reference server with the model that it had"
            compare("the reference's fingerprint", saved["reference"], self._reference, remedy)
        compare("the prompts' count and sum", saved["prompts"], run["prompts"], "set dataset_name to the same data")
        columns = saved.get("columns", run["columns"])  # an older checkpoint has none
        for name in sorted(columns.keys() | run["columns"].keys()):
            remedy = "set dataset_name to the same data, or begin a new run"
            compare(f"the sum of the column {name!r}", columns.get(name), run["columns"].get(name), remedy)


def _absolute(names: str | list[str] | None, directory: str) -> str | list[str] | None:
    """Return a setting of USER_FILES with the files in it by their absolute paths."""
    if isinstance(names, list):
        return [_absolute(name, directory) for name in names]
    return os.path.realpath(os.path.join(directory, names)) if names and ".py:" in names else names


def _sum_of_column(examples: list[Example], name: str) -> str:
    """Return a fingerprint of a column's values that is the same in every process."""
    values = [example.columns.get(name) for example in examples]
    return fingerprint(json.dumps(values, sort_keys=True, default=_as_text).encode())


def _as_text(value: Any) -> str:
    """Return what stands for a value that JSON does not know."""
    if isinstance(value, EncodedPicture):
        value = value.file
    if hasattr(value, "tobytes"):  # an array of numpy, or a PIL image
        value = value.tobytes()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))  # an address differs between processes


def _size(engine) -> int:
    """Return a checkpoint's bytes: the trained weights, for others and for DeepSpeed, and in float32 with AdamW's two
    moments."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    return sum(2 * parameter.nbytes + 12 * parameter.numel() for parameter in trained)


def _writer(name: str) -> int:
    """Return the rank that writes this file of a checkpoint."""
    numbered = re.search(r"pp_rank_(\d+)_|^rank-(\d+)\.", name)
    return int(numbered[1] or numbered[2]) if numbered else 0


def _unpickled(checkpoint: Path, rank: int) -> dict[str, Any]:
    with open(checkpoint / f"rank-{rank}.pickle", "rb") as file:
        return pickle.load(file)
