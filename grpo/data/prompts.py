"""Loads the examples of a dataset, and fixes the order in which ranks train on them."""

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from grpo.config.errors import cores_here, one_line, require
from grpo.config.sampling_settings import AnsweringConfig, DataSection
from grpo.config.trainer import TrainerConfig
from grpo.config.user_code import parameters_of
from grpo.data.chat_template import PictureCountError
from grpo.data.dataset import TRL_COLUMN, decoded, is_mixture, is_one_split, load_rows, parts_of
from grpo.data.dataset_pictures import PictureColumn, decoded_columns, find_column
from grpo.data.examples import GIVEN_TO_REWARDS, dotted_names, doubt_prompts, field_of, make_example
from grpo.data.records import Example, Responder
from grpo.model.pictures import PictureProcessor
from grpo.wire.picture_files import PictureError, pictures_of

log = logging.getLogger(__name__)

_Item, _Result = TypeVar("_Item"), TypeVar("_Result")
_GOLDEN = (5**0.5 - 1) / 2  # one over the golden ratio, the number worst approached by fractions


def load_examples(
    config: AnsweringConfig,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    limit: int = 0,
    progress: bool = True,
    processor: PictureProcessor | None = None,
    turns: Responder | None = None,
) -> list[Example]:
    """Load the split's problems, only the first `limit` of them unless that is 0: of each dataset of a mixture, whose
    examples then have the columns of all, None if their own lacks one, and `source`, its label. Rows without a prompt
    (null, or neither text nor picture), without a gold answer if there is a column of them, with too long a prompt or
    with unusable pictures are dropped and counted. Raises ConfigError if the dataset cannot be loaded, lacks a column
    or keeps no example, and what make_example raises."""
    make = partial(make_example, tokenizer=tokenizer, processor=processor, turns=turns)

    def load(config: AnsweringConfig, split: str) -> list[Example]:
        examples = _load_dataset(config, split, limit, progress, make)
        if doubt := doubt_prompts(config, tokenizer, examples):
            log.warning("%s: %s", split, doubt)
        return examples

    if not is_mixture(config):
        return load(config, split)
    examples: list[Example] = []
    columns = {"source": None}
    for part in parts_of(config):
        trained, tested = part.weight != 0 and part.config.dataset_train_split, part.config.dataset_test_split
        if name := trained if split == config.dataset_train_split else tested:
            loaded = load(part.config, name)
            examples += [replace(example, source=part.label) for example in loaded]
            columns |= dict.fromkeys(loaded[0].columns)
        elif trained or tested:  # a reward function of the run asks for its columns too
            there = trained or tested
            if is_one_split(part.config.dataset_name):  # which has no test split
                there = part.config.dataset_train_split
            rows = load_rows(part.config, there)
            has_gold = part.config.dataset_answer_column in dotted_names(rows.features)
            columns |= dict.fromkeys([*rows.column_names, *(["answer"] if has_gold else [])])
    config.check(bool(examples), dataset_name=f"no dataset has a split to take as {split!r}: name one as test_split")
    return [
        replace(example, index=index, columns={**columns, "source": example.source, **example.columns})
        for index, example in enumerate(examples)
    ]


def _load_dataset(
    config: AnsweringConfig, split: str, limit: int, progress: bool, make: Callable[..., Example | None]
) -> list[Example]:
    log.info("reading split %s of %s", split, config.dataset_name)
    rows = load_rows(config, split)
    is_of_trl = config.dataset_prompt_column == DataSection.dataset_prompt_column and TRL_COLUMN in rows.column_names
    if is_of_trl and config.dataset_prompt_column not in rows.column_names:
        config = copy.copy(config)
        config.dataset_prompt_column = TRL_COLUMN
    rows, has_gold, column, others = _open_rows(config, rows, split, limit)

    def try_row(numbered: tuple[int, Mapping[str, Any]]) -> Example | tuple[str, str]:
        """Return a row's example, or why it is dropped, and the fault in it."""
        index, row = numbered
        example = None
        try:
            if field_of(row, config.dataset_prompt_column) not in (None, []):
                row = {**row, **{other.name: other.read(row[other.name], index) for other in others}}
                example = make(config, index=index, row=row, column=column)
        except PictureError as error:
            return "with a picture that cannot be used", f": {error}"
        except PictureCountError as error:
            return "with more or fewer places for pictures than pictures", f": {error}"
        if example is None:
            return f"without a prompt in {config.dataset_prompt_column!r}", ""
        if has_gold and not example.gold:
            return f"without a gold answer in {config.dataset_answer_column!r}", ""
        count = len(pictures_of(example.prompt_ids))
        if config.max_pictures is not None and count > config.max_pictures:
            return f"with more pictures than max_pictures={config.max_pictures}", f": {count}"
        if (length := len(example.prompt_ids)) > config.max_prompt_length:
            return f"longer than max_prompt_length={config.max_prompt_length} tokens", f": {length} tokens"
        return example

    bar = tqdm(rows, desc=f"{split} prompts", unit="", disable=None if progress else True, leave=False)
    numbered = enumerate(decoded(config, split, bar))
    waits = column is not None or config.tool_timeout is not None  # for Pillow, or an environment in another process
    examples, counts, firsts = [], Counter(), {}
    for index, made in enumerate(_map_in_threads(try_row, numbered) if waits else map(try_row, numbered)):
        if isinstance(made, Example):
            examples.append(made)
        else:
            reason, fault = made
            counts[reason] += 1
            firsts.setdefault(reason, f"the first is row {index} from 0{fault}")
    dropped = [f"{count} of {len(rows)} rows dropped, {reason} ({firsts[reason]})" for reason, count in counts.items()]
    if not examples:
        remedy = "mend the rows, raise max_prompt_length, or name other columns (dataset_..._column)"
        config.refuse("dataset_name", f"no row of split {split!r} is left: {'; '.join(dropped)}: {remedy}")
    for reason in dropped:
        log.warning("%s: %s", split, reason)
    _log_examples(config, split, examples, column)
    return examples


def _open_rows(config: AnsweringConfig, rows, split: str, limit: int):
    """Return a split's rows, whether they have gold answers, their prompts' pictures, and their other pictures."""
    has_gold = _check_columns(config, rows)
    if not has_gold:
        log.info("%s: no column with gold answers: it has %s", split, ", ".join(dotted_names(rows.features)))
    name = find_column(config, rows.column_names)
    column = None if name is None else PictureColumn(name, config.dataset_name)
    others = [PictureColumn(other, config.dataset_name) for other in decoded_columns(rows) if other != name]
    for pictures in [column, *others] if column is not None else others:
        rows = pictures.without_decoding(rows)
    return rows.select(range(min(limit, len(rows)))) if limit else rows, has_gold, column, others


def _log_examples(config: AnsweringConfig, split: str, examples: list[Example], column: PictureColumn | None) -> None:
    firsts = [(example.messages[0], example.prompt) for example in examples]
    added = sum(first["content"] == config.system_prompt for first, _ in firsts if first["role"] == "system")
    if added and split == config.dataset_train_split:
        text = one_line(config.system_prompt, 60)
        log.info("the system prompt '%s...' stands before %d prompts: --system_prompt '' leaves it out", text, added)
    without_system = sum(first["role"] == "system" and first["content"].strip() not in text for first, text in firsts)
    if without_system:
        log.warning(
            "%s: the model's chat template leaves the system message out of %d of %d prompts: put the instructions "
            "into the prompts",
            split,
            without_system,
            len(examples),
        )
    if column is not None:
        pictured = sum(bool(pictures_of(example.prompt_ids)) for example in examples)
        log.info("%s: %d of %d prompts have pictures, by column %r", split, pictured, len(examples), column.name)


def check_reward_columns(
    config: AnsweringConfig, examples: Sequence[Example], rewards: Mapping[str, Callable | str]
) -> None:
    """Raise ConfigError if a reward function cannot be given the columns, or asks for gold answers that are missing."""
    # Training and held-out data may differ: those of an example without an answer come first.
    columns = min((example.columns for example in examples), key=lambda columns: "answer" in columns)
    reason = f"it asks for gold answers, and {config.dataset_name} has the columns {', '.join(dotted_names(columns))}"
    remedy = "name the one that holds them as dataset_answer_column, or leave this function out"
    for name, reward in rewards.items():
        argument = parameters_of(reward).get("answer")  # a reward model or server has none
        asks = argument is not None and argument.default is argument.empty
        require("answer" in columns or not asks, "reward_funcs", name, f"{reason}: {remedy}")
        gold, is_ours = field_of(columns, config.dataset_answer_column), getattr(reward, "__module__", "") == "reward"
        if asks and is_ours and isinstance(gold, dict):  # the user's functions may read dicts
            fields = [f"{config.dataset_answer_column}.{field}" for field in dotted_names(gold)]
            config.refuse("dataset_answer_column", f"{name} reads text, and this is a dict: name {' or '.join(fields)}")
    taken = ", ".join(sorted(GIVEN_TO_REWARDS & examples[0].columns.keys()))
    reason = f"reward functions are given something else as {taken}, the name of a column: rename it"
    require(not taken, "dataset_name", config.dataset_name, reason)


def order_of(config: TrainerConfig, examples: Sequence[Example]) -> np.ndarray | None:
    """Return the examples' places in dataset_order, int64; None for shuffled. Refuses a column without numbers."""
    if config.dataset_order == "shuffled":
        return None
    if config.dataset_order == "as_is":
        return np.arange(len(examples))
    name = config.dataset_order.removeprefix("column:")
    values = [field_of(example.columns, name) for example in examples]
    for value in values:
        is_number = isinstance(value, Real) and not math.isnan(value)
        config.check(is_number, dataset_order=f"that column of {config.dataset_name} has {value!r:.40}: use numbers")
    return np.argsort(np.asarray(values, dtype=np.float64), kind="stable")


class PromptStream:
    """The order in which ranks train on examples: a seeded shuffle of the data, epoch after epoch, or one given order.
    Step k takes the same `prompts_per_step` examples whatever the number of ranks, cut into equal consecutive shares.
    An epoch's last examples that do not fill a step wait for the next shuffle; in a given order (places, int64) the
    first ones follow them in the same step. With `weights` by source each source has its share of the prompts and its
    own epochs. The step number is the whole state."""

    signals = ""  # of each group so far, "1" if it had a signal, else "0": for an AdaptiveStream, the rest of its state

    def __init__(
        self,
        examples: Sequence[Example],
        prompts_per_step: int,
        seed: int,
        order: np.ndarray | None = None,
        weights: Mapping[str, float] | None = None,
    ):
        size = len(examples)
        reason = f"the dataset has only {size} usable prompts: use {size}"
        require(size >= prompts_per_step, "prompts_per_step", prompts_per_step, reason)
        self._examples, self._size, self._per_step, self._seed = examples, size, prompts_per_step, seed
        self._order = order
        self._parts: list[np.ndarray] = []  # each source's places, in order
        if weights is not None:
            places = np.arange(size) if order is None else order
            sources = np.array([examples[place].source for place in places])
            self._parts = [places[sources == source] for source in weights]
            self._ends = np.cumsum([*weights.values()]) / sum(weights.values())  # of each one's share of [0, 1)
            self._ends[-1] = 1.0

    @property
    def steps_per_epoch(self) -> float:
        """the steps that one pass over all prompts takes, on average over passes"""
        is_shuffled_whole = self._order is None and not self._parts
        return self._size // self._per_step if is_shuffled_whole else self._size / self._per_step

    def examples_of(self, step: int, rank: int = 0, world_size: int = 1) -> list[Example]:
        """Return this rank's [prompts_per_step / world_size] examples of a step (from 0)."""
        share = self._per_step // world_size
        return [self._examples[index] for index in self._indices(step)[rank * share : (rank + 1) * share]]

    def groups_of(self, steps: Iterable[int], rank: int, world_size: int) -> tuple[list[Example], list[int]]:
        """Return this rank's examples of these steps, and the ids of their groups."""
        share = self._per_step // world_size
        starts = {step: step * self._per_step + rank * share for step in steps}
        examples = [example for step in starts for example in self.examples_of(step, rank, world_size)]
        return examples, [group for start in starts.values() for group in range(start, start + share)]

    def replacements(self, first_step: int, steps: int, attempt: int, places: Sequence[int]) -> list[Example]:
        """Return other examples for these places (from 0 over all ranks) of the round of `steps` steps at `first_step`:
        of weighted sources those of the same source, of a given order the next ones. None is in the round, nor was
        given for an earlier attempt; when all others were, they come in a new order, or again in the given one."""
        in_round = np.concatenate([self._indices(step) for step in range(first_step, first_step + steps)])
        chosen = np.zeros_like(in_round)
        whole = np.arange(self._size) if self._order is None else self._order
        for number, part in enumerate(self._parts or [whole]):
            mine = np.flatnonzero(np.isin(in_round, part))
            if len(mine) == 0:
                continue
            if self._order is not None:  # begin behind the round's last one
                part = np.roll(part, -1 - np.flatnonzero(part == in_round[mine[-1]])[0])
            others = part[~np.isin(part, in_round)]
            others = others if len(others) else part
            shuffles, turn = divmod(attempt - 1, max(1, len(others) // len(mine)))
            if self._order is None:
                others = np.random.default_rng((self._seed, first_step, 1 + shuffles, number)).permutation(others)
            chosen[mine] = others[(turn * len(mine) + np.arange(len(mine))) % len(others)]
        return [self._examples[index] for index in chosen[places]]

    def _indices(self, step: int) -> np.ndarray:
        """Return the places of all ranks' examples in the dataset: int64 [prompts_per_step]."""
        if self._parts:
            return self._mixed(step * self._per_step, (step + 1) * self._per_step)
        if self._order is not None:
            return self._order[np.arange(step * self._per_step, (step + 1) * self._per_step) % self._size]
        epoch, place = divmod(step, self._size // self._per_step)
        order = np.random.default_rng((self._seed, epoch)).permutation(self._size)
        return order[place * self._per_step : (place + 1) * self._per_step]

    def _mixed(self, start: int, end: int) -> np.ndarray:
        """Return the places of the run's prompts from number `start` to before `end`: int64 [end - start]. Number n is
        of the source in whose share the fraction of (n + 1/2) / golden ratio lies: of any run of prompts each source
        has its share, to within a few (Weyl's equidistribution)."""
        numbers = np.searchsorted(self._ends, (np.arange(end) + 0.5) * _GOLDEN % 1.0, side="right")
        chosen = np.zeros(end - start, np.int64)
        for number, places in enumerate(self._parts):
            is_mine = numbers == number
            before, here = is_mine[:start].sum(), is_mine[start:]
            epochs, at = np.divmod(before + np.arange(here.sum()), len(places))
            orders = {
                epoch: np.random.default_rng((self._seed, epoch, number)).permutation(len(places))
                if self._order is None
                else np.arange(len(places))
                for epoch in {*epochs.tolist()}
            }
            chosen[here] = [places[orders[epoch][place]] for epoch, place in zip(epochs.tolist(), at, strict=True)]
        return chosen


class AdaptiveStream(PromptStream):
    """dataset_order adaptive: a seeded shuffle of the data, epoch after epoch, in which a prompt may be left out when
    its turn comes. A prompt is taken with the chance (1 + s) / (1 + n): s of its n groups so far had a signal,
    completions that earned different rewards. So a prompt that is always solved, or never, comes more and more seldom,
    but it comes. (DAPO, arXiv:2503.14476, section 3.2, draws such groups first and then replaces them.) The prompts of
    a round follow from the signals of the rounds before it, less `max_lag` for workers that draw ahead."""

    def __init__(
        self, examples: Sequence[Example], prompts_per_step: int, seed: int, steps_per_round: int = 1, max_lag: int = 0
    ):
        super().__init__(examples, prompts_per_step, seed)
        self._steps, self._lag = steps_per_round, max_lag
        self._rounds: list[np.ndarray] = []  # the places of each round's prompts: int64 [groups of a round]
        self._turn, self._epoch_of = 0, (-1, np.zeros(0, np.int64), np.zeros(0))
        self._groups, self._taught = np.zeros((2, self._size), np.int64)  # of each prompt, all and those with a signal
        self._recorded = 0  # rounds that these count

    def record(self, signals: Sequence[Mapping[int, bool]]) -> None:
        """Add a round's signals, by the id of its groups: what each rank has."""
        by_group = {group: signal for of_rank in signals for group, signal in of_rank.items()}
        self.signals += "".join("01"[by_group[group]] for group in sorted(by_group))

    def _indices(self, step: int) -> np.ndarray:
        number, place = divmod(step, self._steps)
        while len(self._rounds) <= number:
            self._rounds.append(self._choose(len(self._rounds) - self._lag))
        return self._rounds[number][place * self._per_step : (place + 1) * self._per_step]

    def _choose(self, before: int) -> np.ndarray:
        """Choose the prompts of the next round by the signals of the rounds before this one: int64 [groups]."""
        size = self._steps * self._per_step
        for number in range(self._recorded, before):
            signals = np.frombuffer(self.signals[number * size : (number + 1) * size].encode(), np.uint8) == ord("1")
            np.add.at(self._groups, self._rounds[number], 1)
            np.add.at(self._taught, self._rounds[number], signals)
        self._recorded = max(self._recorded, before)
        chosen: list[int] = []
        while len(chosen) < size:
            epoch, turn = divmod(self._turn, self._size)
            if self._epoch_of[0] != epoch:
                rng = np.random.default_rng((self._seed, epoch))
                self._epoch_of = epoch, rng.permutation(self._size), rng.random(self._size)
            place, number = self._epoch_of[1][turn], self._epoch_of[2][turn]
            in_step = chosen[len(chosen) // self._per_step * self._per_step :]
            if number * (1 + self._groups[place]) < 1 + self._taught[place] and place not in in_step:
                chosen.append(place)
            self._turn += 1
        return np.array(chosen)


def _map_in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Yield the function's results in the order of the items, computed by as many threads as this rank has cores."""
    threads = min(16, cores_here())
    items, pool = iter(items), ThreadPoolExecutor(threads, thread_name_prefix="examples")
    try:
        while batch := [*islice(items, 8 * threads)]:
            yield from pool.map(function, batch)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C a call may hang until its process is killed


def _check_columns(config: AnsweringConfig, rows) -> bool:
    """Tell whether there are gold answers. Raises ConfigError if a named column, or a dotted field, is missing."""
    prompt, answer, names = config.dataset_prompt_column, config.dataset_answer_column, dotted_names(rows.features)

    def is_there(name: str) -> bool:
        # Where dicts have other fields in each row, the features name none.
        column = name.partition(".")[0]
        return name in names or (
            column in names and any(field_of(row, name) is not None for row in rows.select_columns(column))
        )

    reason = f"{config.dataset_name} has the columns {', '.join(names)}: name one of them"
    config.check(is_there(prompt), dataset_prompt_column=reason)
    has_gold = bool(answer) and is_there(answer)
    config.check(has_gold or answer in ("", DataSection.dataset_answer_column), dataset_answer_column=reason)
    reason = "it is dataset_prompt_column too: name the column with the gold answers, or '' if no reward needs them"
    config.check(answer != prompt, dataset_answer_column=reason)
    return has_gold
