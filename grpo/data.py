"""Datasets -> examples with tokenised prompts, and the order in which ranks train on them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from grpo.answer_config import AnsweringConfig
from grpo.config import ConfigError
from grpo.records import Example, Message

log = logging.getLogger(__name__)

_FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_DEFAULT_HUB_CONFIG = {"openai/gsm8k": "main"}


def load_examples(
    config: AnsweringConfig, split: str, tokenizer: PreTrainedTokenizerBase, limit: int = 0, progress: bool = True
) -> list[Example]:
    """The split's problems, the first `limit` of them unless 0, without those whose prompt is too long.

    Raises ConfigError where the dataset cannot be loaded, lacks a column, or keeps no example.
    """
    rows = _load(config, split)
    for field in ("dataset_prompt_column", "dataset_answer_column"):
        if getattr(config, field) not in rows.column_names:
            raise ConfigError(
                f"{field}={getattr(config, field)!r}: {config.dataset_name} has the columns "
                f"{', '.join(rows.column_names)}: name one of them"
            )
    if limit:
        rows = rows.select(range(min(limit, len(rows))))
    examples, dropped = [], 0
    for index, row in enumerate(tqdm(rows, desc=f"{split} prompts", unit="", disable=not progress, leave=False)):
        example = make_example(config, tokenizer, index, row)
        if len(example.prompt_ids) <= config.max_prompt_length:
            examples.append(example)
        else:
            dropped += 1
    if dropped:
        log.warning(
            "%s: %d of %d prompts dropped, longer than max_prompt_length=%d tokens",
            split,
            dropped,
            len(rows),
            config.max_prompt_length,
        )
    if not examples:
        raise ConfigError(
            f"max_prompt_length={config.max_prompt_length}: none of the {len(rows)} prompts of {config.dataset_name} "
            f"({split}) is that short: raise it"
        )
    return examples


def make_example(
    config: AnsweringConfig, tokenizer: PreTrainedTokenizerBase, index: int, row: Mapping[str, Any]
) -> Example:
    """One dataset row -> Example; its `answer` column holds the gold answer whatever the dataset calls it."""
    columns = {name: value for name, value in row.items() if name != config.dataset_prompt_column}
    columns["answer"] = gold_answer(columns.pop(config.dataset_answer_column))
    prompt = render_prompt(tokenizer, row[config.dataset_prompt_column], config.system_prompt)
    messages = chat_messages(row[config.dataset_prompt_column], config.system_prompt)
    return Example(index, prompt, tokenize_prompt(tokenizer, prompt), columns, messages)


def gold_answer(answer: Any) -> str:
    """GSM8K writes the solution, '####', and the answer; elsewhere the column is the answer."""
    return str(answer).rsplit("####", 1)[-1].strip()


def chat_messages(prompt: str | list[Message], system_prompt: str) -> list[Message]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[Message], system_prompt: str) -> str:
    """A prompt (text, or chat messages) -> the text the model continues. Without a chat template: plain text."""
    messages = chat_messages(prompt, system_prompt)
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in messages) + "\n\n"
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"system_prompt={system_prompt[:40]!r}: the model's chat template refuses these messages ({error}): if it "
            "knows no system message, set system_prompt to '' and put the instructions into the prompts"
        ) from error


def tokenize_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The ids of what `render_prompt` returned."""
    # A chat template has written every special token that belongs there.
    return tokenizer(prompt, add_special_tokens=tokenizer.chat_template is None)["input_ids"]


class PromptStream:
    """Which examples a rank trains on at a step: a seeded shuffle of the data, epoch after epoch.

    Step k takes the same `prompts_per_step` examples whatever the number of ranks, cut into equal consecutive shares,
    so ranks never overlap. An epoch's last examples that do not fill a step wait for the next shuffle. The step number
    is the whole state: resuming is starting at it.
    """

    def __init__(self, size: int, prompts_per_step: int, seed: int):
        if size < prompts_per_step:
            raise ConfigError(
                f"prompts_per_step={prompts_per_step}: the dataset has only {size} usable prompts: use {size}"
            )
        self._size, self._per_step, self._seed = size, prompts_per_step, seed

    def indices(self, step: int, rank: int = 0, world_size: int = 1) -> list[int]:
        """Places in the list of examples, [prompts_per_step / world_size], for this rank at this step (from 0)."""
        epoch, place = divmod(step, self._size // self._per_step)
        order = np.random.default_rng((self._seed, epoch)).permutation(self._size)
        share = self._per_step // world_size
        start = place * self._per_step + rank * share
        return order[start : start + share].tolist()

    def others(self, step: int, steps: int, attempt: int, places: Many[int]) -> list[int]:
        """Other examples for these places (from 0 over all ranks) of the batch of `steps` steps that begins at `step`.

        None of the batch's own, as far as the data has others. The same whatever the number of ranks.
        """
        own = [index for one in range(step, step + steps) for index in self.indices(one)]
        order = np.random.default_rng((self._seed, step, attempt)).permutation(self._size)
        order = order[~np.isin(order, own)] if len(own) < self._size else order
        return [int(order[place % len(order)]) for place in places]


def _load(config: AnsweringConfig, split: str):
    import datasets

    name, path = config.dataset_name, Path(config.dataset_name).expanduser()
    datasets.disable_progress_bars()
    try:
        if path.exists():
            files = _files(config, path, split)
            return datasets.load_dataset(_FILE_TYPES[files[0].suffix], data_files=[*map(str, files)], split="train")
        return datasets.load_dataset(name, config.dataset_config or _DEFAULT_HUB_CONFIG.get(name), split=split)
    except ConfigError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"dataset_name={name!r}: split {split!r} cannot be loaded ({reason}): give a local file or folder, or "
            "a hub id that this machine can reach, and dataset_config if it has several configurations"
        ) from error


def _files(config: AnsweringConfig, path: Path, split: str) -> list[Path]:
    """The files of a split: the file itself, or those in a folder called SPLIT.* or SPLIT-*.*, of one type.

    Not left to `datasets`, which takes every file for the test split if only the folder's path has "test" in it.
    """
    if path.is_file():
        if split != config.dataset_train_split:
            raise ConfigError(
                f"dataset_test_split={split!r}: {path} is a single file: give a folder with {split}{path.suffix} "
                f"beside {config.dataset_train_split}{path.suffix}, or set eval_steps to 0"
            )
        files = [path]
    else:
        files = sorted(file for pattern in (f"{split}.*", f"{split}-*.*") for file in path.rglob(pattern))
    if not files or len({file.suffix for file in files}) > 1 or files[0].suffix not in _FILE_TYPES:
        found = ", ".join(file.name for file in files) or "none"
        raise ConfigError(
            f"dataset_name='{path}': split {split!r} needs files of one type, {', '.join(_FILE_TYPES)}; found {found}"
        )
    return files
