"""Folders that are written whole or not at all, even if the process or machine dies."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx
from jinja2 import Environment
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.chat_template import with_system_prompt
from grpo.model.answering import write_answering
from grpo.model.lora import merged
from grpo.model.pictures import PictureProcessor
from grpo.run.checkpoint_files import write_progress
from grpo.run.json_lines import read_record
from grpo.run.run_folder import nearest_existing

# The model card: README.md in a saved model's folder, with the front matter that the hub reads, from model_card.md.


_TEMPLATE = Path(__file__).with_name("model_card.md")
_SETTINGS = (
    *("loss_type", "beta", "learning_rate", "prompts_per_step", "num_generations", "temperature"),
    *("max_prompt_length", "max_completion_length", "reward_funcs", "reward_weights", "seed"),
)
_STARTED_IN = Path.cwd()  # a reward function may change the directory
_VLLM_RANK = 16
"""the largest rank of an adapter that vLLM takes without --max-lora-rank"""


def write_card(
    folder: Path,
    config: TrainerConfig,
    model: PreTrainedModel,
    has_template: bool,
    step: int,
    name: str = "MODEL",
    takes_pictures: bool = False,
) -> None:
    """Write the card of `model` as it was saved to `folder`, which is in the run's folder, after `step`.

    `has_template` tells whether its tokenizer has a chat template, and `name` is what commands call the model. Raises
    OSError.
    """
    run = folder.absolute().parent
    adapter = model.peft_config["default"] if hasattr(model, "peft_config") else None
    base, data = model.config._name_or_path, config.dataset_name
    facts = {
        **({"base_model": base} if _is_on_hub(base) else {}),
        **({"datasets": [data]} if _is_on_hub(data) else {}),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if takes_pictures else "text-generation",
        "tags": ["grpo", "generated_from_trainer", *(["lora"] if adapter else [])],
    }
    settings = {setting: getattr(config, setting) for setting in _SETTINGS}
    if adapter:
        settings |= {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha, "quantization": config.quantization}
    if takes_pictures:
        of_pictures = {name: getattr(config, name) for name in ("min_pixels", "max_pixels", "freeze_vision_tower")}
        settings |= {name: value for name, value in of_pictures.items() if value}
    # With save_system_prompt the chat template has it.
    system = "" if config.save_system_prompt else config.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    question: str | list[dict[str, str]] = "..."
    if takes_pictures:
        messages = [message | {"content": [{"type": "text", "text": system}]} for message in messages]
        question = [{"type": "image", "path": "picture.png"}, {"type": "text", "text": "..."}]
    options = [f"max_new_tokens={config.max_completion_length}", "do_sample=False"]
    if config.chat_template_kwargs:
        options.append(f"tokenizer_encode_kwargs={config.chat_template_kwargs!r}")
    columns, results = _results(run, step)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"json": partial(json.dumps, ensure_ascii=False), "shell": shlex.quote}
    card = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        front_matter=yaml.safe_dump(facts, sort_keys=False),
        title=run.name if name == "MODEL" else name.split("/")[-1],
        name=name,
        adapter=adapter,
        base=base if _is_on_hub(base) else Path(base).name,
        base_path=base,
        step=step,
        data=data if _is_on_hub(data) else Path(data).name,
        columns=columns,
        results=results,
        chat=has_template,
        pictures=takes_pictures,
        max_new_tokens=config.max_completion_length,
        system=system,
        messages=[*messages, {"role": "user", "content": question}],
        text=f"{system}\n\n...\n\n" if system else "...\n\n",
        options=options,
        max_rank=f" --max-lora-rank {adapter.r}" if adapter and adapter.r > _VLLM_RANK else "",
        settings=[
            (setting, " ".join(map(str, value)) if isinstance(value, list) else value)
            for setting, value in settings.items()
        ],
        versions=_versions(run),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _is_on_hub(name: str) -> bool:
    """Tell whether a model or dataset that was loaded came from the hub: a folder of that name goes first."""
    return not (_STARTED_IN / name).exists()


def _results(run: Path, step: int) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of a table of the first and last evaluation up to `step`; none if there is but one."""
    evaluated = [row for row in _records(run / "metrics.jsonl", b'"eval_n"') if row["step"] <= step]
    if len(evaluated) < 2:
        return [], []
    first, last = evaluated[0], evaluated[-1]
    heads = [f"step {row['step']} ({row['eval_n']} problems)" for row in (first, last)]
    rows = []
    for title in ("accuracy", "reward"):
        values = [(row.get(f"eval_{title}"), row.get(f"eval_{title}_se")) for row in (first, last)]
        if all(value is not None for value, _ in values):
            rows.append([title] + [f"{value:.3f}" + (f" ± {se:.3f}" if se is not None else "") for value, se in values])
    return heads, rows


def _versions(run: Path) -> list[str]:
    """Return what the run was last started with, of starts.jsonl."""
    started = _records(run / "starts.jsonl", b'"versions"')
    if not started:
        return []
    versions, commit = started[-1]["versions"], started[-1].get("commit")
    return [f"{name} {number}" for name, number in versions.items()] + (
        [f"commit {commit} of grpo-ref-split"] if commit else []
    )


def _records(path: Path, marker: bytes) -> list[dict[str, Any]]:
    """Return the records of a run's file whose lines have these bytes; none without the file."""
    if not path.exists():
        return []
    with open(path, "rb") as lines:
        return [record for line in lines if marker in line and (record := read_record(line)) is not None]


class SaveError(RuntimeError):
    """A failed write of what a run leaves. The message says where and why; nothing half written stays behind."""


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    config: TrainerConfig,
    step: int = 0,
    processor: PictureProcessor | None = None,
) -> None:
    """Write model, tokenizer and processor as `from_pretrained` reads them, how they were trained to answer, a model
    card, and the `step` of the run that they are of.

    Of a model with an adapter this writes the adapter alone, or with `merge_on_save` the whole model, merged. Raises
    SaveError; `folder` is then not there.
    """
    with whole_folder(folder, "model") as unfinished:
        write_model(model, tokenizer, unfinished, config, step, config.hub_model_id or "MODEL", processor)
        write_progress(unfinished, {"step": step})


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    config: TrainerConfig,
    step: int,
    name: str = "MODEL",
    processor: PictureProcessor | None = None,
) -> None:
    """Write as save_model does, but into a folder that may stay half written. Raises what the libraries raise.

    `name` is what the card calls the model.
    """
    if config.merge_on_save:
        model = merged(model)
    if hasattr(model, "peft_config"):
        model.save_pretrained(folder)
    else:
        # ZeRO keeps all weights in one storage, and transformers would copy each that shares its storage. DLPack gives
        # the same memory a storage of its own. Of weights on a GPU one shard at a time is in the host's memory.
        weights = {name: torch.from_dlpack(weight.detach()) for name, weight in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    if config.save_system_prompt:
        tokenizer = with_system_prompt(tokenizer, config.system_prompt)
    tokenizer.save_pretrained(folder)
    if processor is not None:
        processor.save(folder)
    write_answering(config, folder)
    has_template, takes_pictures = tokenizer.chat_template is not None, processor is not None
    write_card(folder, config, model, has_template, step, name, takes_pictures)


@contextmanager
def whole_folder(folder: Path, what: str) -> Iterator[Path]:
    """Yield a folder to write `what` into, and give it its name when all is written.

    Raises SaveError for whatever goes wrong inside; `folder` is then not there.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        put_in_place(unfinished, folder)
    # safetensors reports a full disk as an error of its own, and transformers as several: whatever it was, nothing half
    # written may stay behind.
    except Exception as error:
        reason = f"{error}{describe_room(folder)}"
        shutil.rmtree(unfinished, ignore_errors=True)
        raise SaveError(f"the {what} could not be saved to {folder}: {reason}: nothing was left there") from error


def describe_room(folder: Path) -> str:
    """Say how full the folder's disk is, for the end of a failed write's reason, which may not tell of a full disk."""
    try:
        return f" ({shutil.disk_usage(nearest_existing(folder)).free >> 20} MiB of its disk are free)"
    except OSError:  # the disk itself is gone, which the reason tells
        return ""


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Give a written folder its name. An older folder of that name stays readable until then."""
    to_disk(unfinished)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        os.replace(folder, old)
    os.replace(unfinished, folder)
    to_disk(folder.parent, deep=False)
    shutil.rmtree(old, ignore_errors=True)


def to_disk(top: Path, deep: bool = True) -> None:
    """Wait until a file, or the names in a folder and with `deep` all its content, would survive a power cut."""
    for path in [*(top.rglob("*") if deep else ()), top]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Pushes a run's model to the hub, and checks before the run that this will be possible.


log = logging.getLogger(__name__)


def check_login() -> None:
    """Raise ConfigError where the hub takes no token of this user, or one that may only read."""
    api = HfApi()
    try:
        user = api.whoami()
    except (OSError, httpx.HTTPError) as error:
        raise ConfigError(
            f"push_to_hub=True: {api.endpoint} does not log you in ({_reason(error)}): call 'hf auth login', or set "
            "HF_TOKEN"
        ) from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ConfigError(f"push_to_hub=True: your token of {api.endpoint} may only read: use one that may write")


def open_repo(config: TrainerConfig, folder: Path) -> str:
    """Make the repository that the model of the run in `folder` will be pushed to, if it is not there; return its name
    with its owner's. Raises ConfigError as check_login, and where it cannot be made."""
    check_login()
    name = config.hub_model_id or folder.name
    try:
        # None leaves it to the owner's settings.
        return HfApi().create_repo(name, private=config.hub_private_repo or None, exist_ok=True).repo_id
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        raise ConfigError(
            f"hub_model_id={name!r}: it cannot be made ({_reason(error)}): name a repository that your token may write"
        ) from error


def push_model(folder: Path, repo: str) -> None:
    """Upload a saved model. Raises SaveError; the folder stays."""
    try:
        url = HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message="End of training").repo_url
    # The client raises many kinds of errors; after any of them the user must know that the model is there.
    except Exception as error:
        command = shlex.join(["hf", "upload", repo, str(folder)])
        # The client's RuntimeError names the file alone.
        reason = _reason(error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error)
        raise SaveError(
            f"{folder} could not be pushed to {repo}: {reason}: the model is there, push it with: {command}"
        ) from error
    log.info("pushed to %s", url)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
