"""Checkpoints: a run continues from one as if nothing had happened. Each is whole or does not exist.

`checkpoint-STEP` is a model that `from_pretrained` reads. The files beside it are for this run only: `engine/` has
DeepSpeed's weights, optimizer and schedule, `rank-K.pickle` a rank's random states, and the completions that it has
drawn and not yet trained on, with what functions logged, `progress.json` the rest. Unpickling runs code: resume only
from checkpoints you trust.
"""

import logging
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.trainer import TrainerConfig
from grpo.data.records import StepBatch
from grpo.model.lora import trained_alone
from grpo.model.pictures import PictureProcessor
from grpo.model.sharded import weights_to_save
from grpo.run.collective import from_first, gather
from grpo.run.exit import how_to_continue
from grpo.run.folder import (
    ENGINE,
    SaveError,
    describe_room,
    push_in_background,
    put_in_place,
    remove,
    tell_unpushed,
    to_disk,
    write_model,
)
from grpo.run.preflight import RunDescription, check_same
from grpo.run.run_folder import (
    PROGRESS,
    Sums,
    checkpoints,
    nearest_existing,
    read_progress,
    readable,
    sum_files,
    write_progress,
)

log = logging.getLogger(__name__)

LOAD_UNIVERSAL = {"load_universal": True}  # in DeepSpeed's section "checkpoint": it loads what `to_universal` wrote


@dataclass(kw_only=True)
class Progress:
    """A run's progress: numbers that all ranks share, and this rank's round of completions."""

    beta: float
    entropy_coef: float
    entropy: float | None = None  # mean of the last step's tokens, for an adaptive bonus; None before the first step
    step: int = 0  # the number of updates done
    num_tokens: int = 0  # the tokens that were trained on, over all ranks
    evaluated: dict[str, float] = field(default_factory=dict)  # the metrics of the last step's evaluation, or empty
    round: int = -1  # the round that `batches` belong to; -1 before the first is drawn
    batches: list[StepBatch] = field(default_factory=list)  # this rank's batch of each step of the round
    logged: dict[str, list[float]] = field(default_factory=dict)  # what no step has recorded yet, see Rounds
    reference: str = ""  # the fingerprint of the model that the reference servers began with; empty without servers
    ref_step: int = 0  # the last step after which the policy became part of the reference; 0: never
    bad_steps: list[int] = field(default_factory=list)  # the last steps in a row that taught the policy nothing
    flat_steps: int = 0  # the last steps in a row in which all completions of every prompt earned the same reward
    masked_steps: int = 0  # the number of updates that did nothing, as every completion was masked
    signals: str = ""  # of the groups so far, for AdaptiveStream
    resampled: int = 0  # the number of groups that were replaced in this round, on all ranks
    stopped_of: int = 0  # the max_steps of the run that a callback ended after this step; 0: it did not
    most_calls_failed: bool = False  # calls of tools in the last step; rank 0 alone knows it, no checkpoint has it


SHARED = [name for name in Progress.__dataclass_fields__ if name not in ("batches", "logged", "most_calls_failed")]
"""the fields that all ranks share, and that a checkpoint's progress.json holds"""


def check_space(config: TrainerConfig, folder: Path, model: PreTrainedModel) -> str:
    """Return how much a checkpoint takes, and is free. Raises ConfigError if that is too little for one, or for the
    model at the end: they would be written after hours."""
    weights = [*model.parameters()]
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    saved = trained if config.use_peft else sum(weight.numel() for weight in weights)
    of_optimizer = 6 if config.optim == "adamw_8bit" else 12
    of_model = model.dtype.itemsize * saved
    size = (of_optimizer + model.dtype.itemsize) * trained + of_model
    free = shutil.disk_usage(nearest_existing(folder)).free
    sizes = f"a checkpoint takes {size / 2**30:.1f} GiB of disk, and {free / 2**30:.1f} are free"
    if of_model > free:
        config.refuse("output_dir", f"{sizes}, and not the model's {of_model / 2**30:.1f}: make room, or name another")
    if size > free and config.save_steps > 0:
        config.refuse("output_dir", f"{sizes}: make room, name another, or set save_steps to 0")
    return sizes


def random_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@dataclass(kw_only=True)
class Checkpoints:
    """Write and read a run's checkpoints. Every rank has an instance, and all ranks call each method together."""

    config: TrainerConfig
    folder: Path  # the run's
    tokenizer: PreTrainedTokenizerBase
    description: RunDescription
    model: str  # the fingerprint of the initial policy
    reference: str  # the fingerprint of the reference servers' model; empty without servers
    rank: int
    teachers: dict[str, str] = field(default_factory=dict)  # the fingerprints of the teachers' models, by source
    best_by: str = ""  # the evaluation's metric whose highest value makes a checkpoint the best
    processor: PictureProcessor | None = None

    def __post_init__(self) -> None:
        self.identity = self.description.identity(self.model)
        self._is_partly_frozen = self.config.use_peft or self.config.freeze_vision_tower
        if self.rank == 0:
            # A run that has ended, and continues from an earlier checkpoint, is not done any more.
            (self.folder / "model" / PROGRESS).unlink(missing_ok=True)
            for name in ("model", "checkpoint-*", "reference-*"):
                for left in [*self.folder.glob(f"{name}.unfinished"), *self.folder.glob(f"{name}.old")]:
                    remove(left)

    def oldest(self) -> int:
        """Return the step of the oldest checkpoint, or 0: nothing before it is needed any more."""
        return min((saved["step"] for saved in readable(self.folder).values()), default=0)

    def save(self, engine, progress: Progress) -> None:
        """Write `checkpoint-STEP`, then delete the older checkpoints that `save_total_limit` does not keep. Raises
        SaveError on every rank if a rank could not write; then nothing is left of the checkpoint."""
        final = self.folder / f"checkpoint-{progress.step}"
        if self.rank == 0:
            log.info("saving %s", final)
        unfinished = final.with_name(final.name + ".unfinished")
        sums: Sums = {}
        weights = weights_to_save(engine.module)

        def save_weights() -> None:
            shutil.rmtree(unfinished, ignore_errors=True)
            options = {"step": progress.step, "processor": self.processor, "weights": weights}
            write_model(engine.module, self.tokenizer, unfinished, self.config, **options)

        def put_together() -> None:
            files = dict(sorted(item for of_rank in sums_by_rank for item in of_rank.items()))
            shared = {name: getattr(progress, name) for name in SHARED}
            of_models = {"model": self.model, "teachers": self.teachers}
            write_progress(unfinished, self.description.fields | of_models | shared | {"files": files})
            # A run that resumes from here does not write the earlier records again.
            for records in self.folder.glob("*.jsonl"):
                to_disk(records, deep=False)
            # It may need the last version of the policy; the others are deleted meanwhile.
            for version in self.folder.glob("policy/*"):
                with suppress(FileNotFoundError):
                    to_disk(version, deep=False)
            put_in_place(unfinished, final)

        failure = (
            self._failure_of(save_weights, on_all=False)
            or self._failure_of(partial(self._save_engine, engine, unfinished), on_all=True)
            or self._failure_of(partial(self._save_rank, unfinished, progress, sums), on_all=True)
        )
        if failure is None:
            sums_by_rank = gather(sums)
            failure = self._failure_of(put_together, on_all=False)
        if failure is not None:
            if self.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise SaveError(
                f"{final} could not be saved: {failure}: nothing was left there: make room; {self.way_on()}"
            )
        if self.rank == 0:
            self.delete_old()
            log.info("saved %s", final)
            if self.config.hub_strategy == "every_save":
                push_in_background(final, self.config.hub_model_id)

    def _save_rank(self, unfinished: Path, progress: Progress, sums: Sums) -> None:
        with open(unfinished / f"rank-{self.rank}.pickle", "wb") as file:
            is_trained_on = progress.round != progress.step // self.config.updates_per_round
            batches = [] if is_trained_on else progress.batches
            logged = {} if is_trained_on else progress.logged  # a round that is drawn again is logged again
            pickle.dump({"random": random_states(), "batches": batches, "logged": logged}, file)
        # Each rank sums the files that it wrote: its machine still has them in memory.
        names = [str(path.relative_to(unfinished)) for path in unfinished.rglob("*") if path.is_file()]
        sums.update(sum_files(unfinished, [name for name in names if _writer(name) == self.rank]))

    def _save_engine(self, engine, unfinished: Path) -> None:
        frozen = self._is_partly_frozen
        try:
            with trained_alone(engine.module) if frozen else nullcontext():
                engine.save_checkpoint(str(unfinished), tag=ENGINE, save_latest=False, exclude_frozen_parameters=frozen)
        except Exception:
            # save_checkpoint ends with these, in which the other ranks wait.
            if hasattr(engine.optimizer, "checkpoint_event_epilogue"):  # of ZeRO-3
                engine.optimizer.checkpoint_event_epilogue()
            torch.distributed.barrier()
            raise

    def leave(self, engine, progress: Progress) -> str:
        """Save a checkpoint of this step unless it exists; return how to continue from it. Raises SaveError."""
        if progress.step == 0:
            return "nothing is lost: no step was done"
        saved = self.folder / f"checkpoint-{progress.step}"
        if not from_first((saved / PROGRESS).exists()):  # another machine may see it later
            self.save(engine, progress)
        tell_unpushed()
        return how_to_continue(self.folder, progress.step)

    def way_on(self) -> str:
        """Return how to continue from the newest checkpoint, for a rank that fails alone and cannot save."""
        last = next(reversed(readable(self.folder).values()), None)
        return how_to_continue(self.folder, last["step"]) if last else "no checkpoint was saved: begin again"

    def load(self, checkpoint: Path, engine) -> Progress:
        """Restore this rank and its engine from the checkpoint. Its requests to the reference are lost. Raises
        ConfigError for another model or reference; RunDescription.check has compared the rest before."""
        saved, run = read_progress(checkpoint), self.description.fields
        remedy = "set model_name_or_path to the same model"
        check_same(checkpoint, "the model's fingerprint", before=saved["model"], now=self.model, remedy=remedy)
        if not self.config.ref_update_steps:
            remedy = "start the reference server with the model that it had"
            what = "the reference's fingerprint"
            check_same(checkpoint, what, before=saved["reference"], now=self.reference, remedy=remedy)
        what, remedy = "the teachers' fingerprints by source", "start the servers with the teachers that it had"
        check_same(checkpoint, what, before=saved.get("teachers", {}), now=self.teachers, remedy=remedy)
        for name, now in run["versions"].items():
            if (then := saved["versions"].get(name)) != now:
                log.warning("%s was %s when %s was saved, and is %s: numbers may differ", name, then, checkpoint, now)
        log.info("reading %s", checkpoint)
        saved_ranks, ranks = saved["ranks"], run["ranks"]
        load = partial(engine.load_checkpoint, tag=ENGINE, load_module_strict=not self._is_partly_frozen)
        if saved_ranks == ranks:
            load(str(checkpoint))
        else:
            log.info("%s is of %d ranks: DeepSpeed rearranges it for %d", checkpoint, saved_ranks, ranks)
            universal = checkpoint.with_name(checkpoint.name + ".universal.unfinished")

            def load_universal() -> None:
                with kept_decays(engine.basic_optimizer):
                    load(str(universal))
                put_steps(engine.basic_optimizer)

            rearrange = partial(to_universal, checkpoint / ENGINE, universal / ENGINE)
            failure = self._failure_of(rearrange, on_all=False) or self._failure_of(load_universal, on_all=True)
            if self.rank == 0:
                shutil.rmtree(universal, ignore_errors=True)
            if failure:
                raise SaveError(
                    f"{checkpoint} could not be rearranged for {ranks} ranks: {failure}: this needs about as much room "
                    f"as the checkpoint has; or start it with {saved_ranks}"
                )
        needed = [self.rank] if saved_ranks == ranks else range(saved_ranks)
        states: dict[int, dict[str, Any]] = {}
        for rank in needed:
            with open(checkpoint / f"rank-{rank}.pickle", "rb") as file:
                states[rank] = pickle.load(file)
        if self.rank in states:
            set_random_states(states[self.rank]["random"])
        by_rank = [*states.values()]
        drawn = [state["batches"] for state in by_rank]
        batches = drawn[0] if saved_ranks == ranks else share_anew(drawn, self.rank, ranks)
        logged: dict[str, list[float]] = {}
        for state in by_rank if saved_ranks == ranks else by_rank[self.rank :: ranks]:
            for name, values in state.get("logged", {}).items():  # an earlier version kept none
                logged.setdefault(name, []).extend(values)
        return Progress(batches=batches, logged=logged, **{name: saved[name] for name in SHARED if name in saved})

    def references(self) -> set[int]:
        """Return the steps after which the policy became a reference that a checkpoint needs; {0} without one."""
        return {saved["ref_step"] for saved in readable(self.folder).values()} or {0}

    def _failure_of(self, action: Callable[[], None], on_all: bool) -> str | None:
        """Run the action on every rank or on the first. Return the first failure of a rank, or None, on all ranks."""
        failure = None
        if on_all or self.rank == 0:
            try:
                action()
            # After any error of any rank the other ranks must not continue as if the checkpoint existed.
            except Exception as error:
                reason = getattr(error, "strerror", None) or error
                failure = f"{reason}{describe_room(self.folder)} (rank {self.rank})"
        return next(filter(None, gather(failure)), None)

    def best(self) -> tuple[Path | None, float]:
        """Return the checkpoint with the best evaluation, of equal ones the newest, and its value; else None, -inf."""
        best, highest = None, -math.inf
        for path, saved in readable(self.folder).items():
            value = saved["evaluated"].get(self.best_by)
            if value is not None and value >= highest:
                best, highest = path, value
        return best, highest

    def delete_old(self) -> None:
        """Keep the newest save_total_limit checkpoints that can be read, and the one with the best evaluation."""
        limit, by_path = self.config.save_total_limit, readable(self.folder)
        if limit == 0:
            return
        keep = {*[*by_path][-limit:], self.best()[0]}
        for old in checkpoints(self.folder):
            if old not in keep:
                # A rename ends it as a checkpoint at once: a kill while files are deleted leaves no half of one.
                deleted = old.with_name(old.name + ".unfinished")
                os.replace(old, deleted)
                remove(deleted)


def _writer(name: str) -> int:
    numbered = re.search(r"pp_rank_(\d+)_|^rank-(\d+)\.", name)
    return int(numbered[1] or numbered[2]) if numbered else 0


def to_universal(engine: Path, to: Path) -> None:
    """Join the parts of ZeRO-2's ranks into a tensor per parameter. Raises OSError with DeepSpeed's last line."""
    program = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(engine), "--output_folder", str(to)]
    ended = subprocess.run([*program, *folders], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        raise OSError(f"DeepSpeed's ds_to_universal: {(ended.stdout.splitlines() or ['it was killed'])[-1]}")


@contextmanager
def kept_decays(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep each group's weight decay: with ZeRO-3 DeepSpeed 0.19 gives all groups what the first one had."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    yield
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


def put_steps(optimizer: torch.optim.Optimizer) -> None:
    """Move each count of steps from the CPU, where DeepSpeed leaves it, to its parameter, as a fused AdamW needs it.
    Each is a copy: with ZeRO-3 all parameters have the same one, which would count a step once for each."""
    for parameter, state in optimizer.state.items():
        state["step"] = state["step"].to(parameter.device, copy=True)


def share_anew(by_rank: Sequence[list[StepBatch]], rank: int, world_size: int) -> list[StepBatch]:
    """Return this rank's share of a round among `world_size` ranks; `by_rank` has the saved shares."""
    batches = []
    for shares in zip(*by_rank, strict=True):
        whole = StepBatch(
            groups=[group for share in shares for group in share.groups],
            by_function=torch.cat([share.by_function for share in shares], dim=1),
            rewards=torch.cat([share.rewards for share in shares]),
            signal=torch.cat([share.signal for share in shares]),
            samples=[sample for share in shares for sample in share.samples],
        )
        groups = len(whole.groups) // world_size
        batches.append(whole.cut(rank * groups, (rank + 1) * groups))
    return batches
