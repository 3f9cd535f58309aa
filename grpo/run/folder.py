"""Saves a model with its card, and pushes it to the hub. Folders are written whole or not at all, even if the process
or machine dies."""

import json
import logging
import os
import shlex
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx
from jinja2 import Environment
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.errors import ConfigError, one_line
from grpo.config.sampling_settings import is_adapted
from grpo.config.trainer import TrainerConfig
from grpo.data.chat_template import with_system_prompt
from grpo.model.answering import write_answering
from grpo.model.lora import merged
from grpo.model.pictures import PictureProcessor
from grpo.run.run_folder import PROGRESS, nearest_existing, read_records, step_of, with_error, write_progress

log = logging.getLogger(__name__)

_TEMPLATE = Path(__file__).with_name("model_card.md")
_SETTINGS = (
    *("loss_type", "beta", "learning_rate", "prompts_per_step", "num_generations", "temperature"),
    *("max_prompt_length", "max_completion_length", "reward_funcs", "reward_weights", "seed"),
)
ENGINE = "engine"
_NOT_OF_MODEL = ENGINE, "rank-*.pickle", PROGRESS  # the files of a checkpoint that are not its model's
_NOT_PUSHED = [*_NOT_OF_MODEL, f"{ENGINE}/*"]
_STARTED_IN = Path.cwd()  # a reward function may change the directory
_VLLM_RANK = 16  # the largest rank of an adapter that vLLM takes without --max-lora-rank


class SaveError(RuntimeError):
    """A failed write of a model or checkpoint. The message says where and why; nothing half written stays behind."""


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, config: TrainerConfig, **options
) -> None:
    """Write a model as write_model does, with its `options`, and that the run is done. Raises SaveError; then `folder`
    does not exist."""
    with whole_folder(folder, "model") as unfinished:
        write_model(model, tokenizer, unfinished, config, name=config.hub_model_id or "MODEL", **options)
        write_progress(unfinished, {"step": config.max_steps})


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    config: TrainerConfig,
    *,
    step: int = 0,
    name: str = "MODEL",
    processor: PictureProcessor | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write model, tokenizer and processor for `from_pretrained`, grpo.yaml, and a model card of `step`, which calls
    the model `name`. `weights` are those of a sharded model (weights_to_save). Of a model with an adapter this writes
    the adapter alone, unless `merge_on_save` is set. The folder may stay half written."""
    if config.merge_on_save:
        model = merged(model)
    if hasattr(model, "peft_config"):
        model.save_pretrained(folder, state_dict=weights)
    else:
        # ZeRO-2 keeps all weights in one storage, and transformers would copy each that shares its storage. DLPack
        # gives the same memory a storage of its own. Of weights on a GPU one shard at a time is in the host's memory.
        weights = weights or {name: torch.from_dlpack(weight.detach()) for name, weight in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=weights, max_shard_size="5GB")
    if config.save_system_prompt:
        tokenizer = with_system_prompt(tokenizer, config.system_prompt)
    tokenizer.save_pretrained(folder)
    if processor is not None:
        processor.save(folder)
    write_answering(config, folder)
    has_chat, has_pictures = tokenizer.chat_template is not None, processor is not None
    write_card(folder, config, model, chat=has_chat, step=step, name=name, pictures=has_pictures)


@contextmanager
def whole_folder(folder: Path, what: str) -> Iterator[Path]:
    """Yield a folder to write `what` into, renamed to `folder` at the end. Raises SaveError, and leaves none."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        put_in_place(unfinished, folder)
    # safetensors and transformers report a full disk by errors of many types.
    except Exception as error:
        reason = f"{error}{describe_room(folder)}"
        shutil.rmtree(unfinished, ignore_errors=True)
        raise SaveError(f"the {what} could not be saved to {folder}: {reason}: nothing was left there") from error


def remove(folder: Path) -> None:
    """Delete a folder, or the link to one. What cannot be deleted stays, with a warning: nothing needs it gone."""
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:
        log.warning("%s cannot be deleted: %s", folder, error)


def describe_room(folder: Path) -> str:
    """Say how full the folder's disk is: the reason of a failed write may not tell it."""
    try:
        return f" ({shutil.disk_usage(nearest_existing(folder)).free >> 20} MiB of its disk are free)"
    except OSError:  # the disk itself is gone, which the reason tells
        return ""


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Rename a written folder. An older folder of that name stays readable until then."""
    to_disk(unfinished)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        os.replace(folder, old)
    os.replace(unfinished, folder)
    to_disk(folder.parent, deep=False)
    shutil.rmtree(old, ignore_errors=True)


def to_disk(top: Path, deep: bool = True) -> None:
    """Wait until a file, or a folder's names and with `deep` all its content, would survive a power cut."""
    for path in [*(top.rglob("*") if deep else ()), top]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_card(
    folder: Path, config: TrainerConfig, model: PreTrainedModel, *, chat: bool, step: int, name: str, pictures: bool
) -> None:
    """Write README.md into the folder of a saved model: front matter for the hub and model_card.md, filled in. The
    run's folder has `folder`. `name` is the model's name in commands. Raises OSError."""
    run = folder.absolute().parent
    adapter = model.peft_config["default"] if hasattr(model, "peft_config") else None
    base, data = model.config._name_or_path, config.dataset_name
    facts = {
        **({"base_model": base} if _is_on_hub(base) else {}),
        **({"datasets": [data]} if _is_on_hub(data) else {}),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if pictures else "text-generation",
        "tags": ["grpo", "generated_from_trainer", *(["lora"] if adapter else [])],
    }
    # With save_system_prompt the chat template has it.
    system = "" if config.save_system_prompt else config.system_prompt
    turns = {"system": system, "user": "..."} if system else {"user": "..."}
    messages = [{"role": role, "content": text} for role, text in turns.items()]
    if pictures:
        messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns.items()]
        messages[-1]["content"].insert(0, {"type": "image", "path": "picture.png"})
    options = [f"max_new_tokens={config.max_completion_length}", "do_sample=False"]
    if config.chat_template_kwargs:
        options.append(f"tokenizer_encode_kwargs={config.chat_template_kwargs!r}")
    columns, results = _results(run, step)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"json": partial(json.dumps, ensure_ascii=False), "shell": shlex.quote}
    values = dict(name=name, adapter=adapter, step=step, columns=columns, results=results, chat=chat, pictures=pictures)
    card = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        **values,
        front_matter=yaml.safe_dump(facts, sort_keys=False),
        title=run.name if name == "MODEL" else name.split("/")[-1],
        base=base if _is_on_hub(base) else Path(base).name,
        base_path=base,
        data=data if _is_on_hub(data) else Path(data).name,
        max_new_tokens=config.max_completion_length,
        system=system,
        messages=messages,
        text="\n\n".join([*turns.values(), ""]),
        options=options,
        max_rank=f" --max-lora-rank {adapter.r}" if adapter and adapter.r > _VLLM_RANK else "",
        settings=_settings(config, adapter, pictures),
        versions=_versions(run),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _settings(config: TrainerConfig, adapter: Any, takes_pictures: bool) -> dict[str, Any]:
    settings = {name: getattr(config, name) for name in _SETTINGS}
    if adapter:
        settings |= {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha, "quantization": config.quantization}
    if takes_pictures:
        names = "min_pixels", "max_pixels", "freeze_vision_tower"
        settings |= {name: getattr(config, name) for name in names if getattr(config, name)}
    return {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in settings.items()}


def _is_on_hub(name: str) -> bool:
    """Tell whether a loaded model or dataset came from the hub: a folder of that name takes precedence, and those of
    an environment's package are its own."""
    return not is_adapted(name) and not (_STARTED_IN / Path(name).expanduser()).exists()


def _results(run: Path, step: int) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table of the first and last evaluation up to `step`; empty if they are the same."""
    evaluated = [row for row in read_records(run / "metrics.jsonl", b'"eval_n"') if row["step"] <= step]
    if len(evaluated) < 2:
        return [], []
    ends = evaluated[0], evaluated[-1]
    titles = [title for title in ("accuracy", "reward") if all(row.get(f"eval_{title}") is not None for row in ends)]
    heads = [f"step {row['step']} ({row['eval_n']} problems)" for row in ends]
    return heads, [[title, *(with_error(row, f"eval_{title}") for row in ends)] for title in titles]


def _versions(run: Path) -> list[str]:
    """Return the versions and the commit of the last line of starts.jsonl."""
    started = read_records(run / "starts.jsonl", b'"versions"')
    last = started[-1] if started else {"versions": {}}
    versions = [f"{name} {number}" for name, number in last["versions"].items()]
    return versions + ([f"commit {last['commit']} of grpo-ref-split"] if last.get("commit") else [])


def check_login() -> None:
    """Raise ConfigError unless this user has a token with which the hub lets it write."""
    api = HfApi()
    try:
        user = api.whoami()
    except (OSError, httpx.HTTPError) as error:
        raise ConfigError(
            f"push_to_hub=True: {api.endpoint} does not log you in ({one_line(error)}): call 'hf auth login', or set "
            "HF_TOKEN"
        ) from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ConfigError(f"push_to_hub=True: your token of {api.endpoint} may only read: use one that may write")


def open_repo(config: TrainerConfig, folder: Path) -> str:
    """Make the hub's repository for the model of this run, unless it exists; return OWNER/NAME. Raises ConfigError."""
    check_login()
    name = config.hub_model_id or folder.name
    try:
        # None leaves it to the owner's settings.
        return HfApi().create_repo(name, private=config.hub_private_repo or None, exist_ok=True).repo_id
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        raise ConfigError(
            f"hub_model_id={name!r}: it cannot be made ({one_line(error)}): name a repository that your token may write"
        ) from error


def use_best(checkpoint: Path, folder: Path, config: TrainerConfig) -> None:
    """Copy a checkpoint's model to `folder`, as that of the run, which is done. Raises SaveError."""
    with whole_folder(folder, "model") as unfinished:
        shutil.copytree(checkpoint, unfinished, ignore=shutil.ignore_patterns(*_NOT_OF_MODEL), dirs_exist_ok=True)
        write_progress(unfinished, {"step": config.max_steps})


_uploads: dict[tuple[Path, str], Future] = {}  # of checkpoints, each with its repository
_uploader = cache(HfApi)  # by its endpoint: a client uploads one folder after the other


def _upload(folder: Path, repo: str, message: str) -> Future:
    """Begin to upload a model, after the uploads before it."""
    options = {"ignore_patterns": _NOT_PUSHED, "commit_message": message}
    return _uploader(HfApi().endpoint).upload_folder(repo_id=repo, folder_path=folder, run_as_future=True, **options)


def push_in_background(checkpoint: Path, repo: str) -> None:
    """Upload a checkpoint's model while training continues. A failure is a warning: the next one brings its own."""

    def tell(upload: Future) -> None:
        if error := upload.exception():
            log.warning("%s could not be pushed to %s: %s", checkpoint, repo, one_line(error))
        else:
            log.info("pushed %s to %s", checkpoint, upload.result().repo_url)

    upload = _uploads[checkpoint, repo] = _upload(checkpoint, repo, f"Training in progress, step {step_of(checkpoint)}")
    upload.add_done_callback(tell)


def tell_unpushed() -> None:
    """Warn of the checkpoints whose upload ends with this process."""
    for (checkpoint, repo), upload in _uploads.items():
        if not upload.done():
            command = shlex.join(["hf", "upload", repo, str(checkpoint), "--exclude", *_NOT_PUSHED])
            log.warning("%s is not pushed yet: push it with: %s", checkpoint, command)


def push_model(folder: Path, repo: str) -> None:
    """Upload a saved model. Raises SaveError; the folder stays."""
    try:
        url = _upload(folder, repo, "End of training").result().repo_url
    # The client raises many kinds of errors; after any of them the user must know that the model is there.
    except Exception as error:
        command = shlex.join(["hf", "upload", repo, str(folder)])
        # The client's RuntimeError names the file alone.
        reason = one_line(error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error)
        raise SaveError(
            f"{folder} could not be pushed to {repo}: {reason}: the model is there, push it with: {command}"
        ) from error
    log.info("pushed to %s", url)
