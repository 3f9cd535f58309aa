"""Finds models and datasets by name: what can only be a path is never asked of the hub, and a hub out of reach once."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import get_session, httpx
from safetensors import SafetensorError
from transformers.utils import cached_file, find_adapter_config_file

from grpo.config.errors import ConfigError, one_line, require

log = logging.getLogger(__name__)

logging.getLogger("huggingface_hub").handlers.clear()  # with its own handler and ours each line would be there twice
logging.getLogger(httpx.__name__).setLevel(logging.WARNING)  # it logs every request


def check_model_name(field: str, name: str) -> None:
    """Raise ConfigError if `name` is a folder without a model, a file, or a path that does not exist."""
    path = Path(name)
    if not path.exists():
        can_ask_hub(field, name)
        return
    remedy = f"it is a GGUF file: grpo import-gguf {name} FOLDER makes a folder of it, which you name instead"
    require(path.suffix != ".gguf" or path.is_dir(), field, name, remedy)
    is_model = any((path / file).is_file() for file in ("config.json", "adapter_config.json"))
    require(is_model, field, name, "it is no folder with config.json: name the folder of a model, such as RUN/model")


def can_ask_hub(field: str, name: str) -> bool:
    """Tell whether the hub can be asked for a name that is no file or folder. Raises ConfigError for a path."""
    is_file = "/" not in name and name.endswith((".json", ".jsonl", ".parquet", ".csv"))
    # `runs` is where runs go, also before the first one.
    is_path = is_file or name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1
    require(not is_path, field, name, "there is no such file or folder: correct the path, or give a hub id")
    return is_hub_reachable()


def find_file(name: str, *files: str) -> str | None:
    """Return the path of the first of these files that a model has, or None. Raises OSError for an unknown model."""
    missing_is_none = dict(_raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    return next((path for file in files if (path := cached_file(name, file, **missing_is_none))), None)


def base_of(name: str) -> str | None:
    """Return the model that an adapter was trained on; None if `name` is no adapter. Raises OSError and ConfigError."""
    path = find_adapter_config_file(name)
    if path is None:
        return None
    base = json.loads(Path(path).read_text(encoding="utf-8")).get("base_model_name_or_path")
    remedy = "its adapter_config.json does not say which model it belongs to: write base_model_name_or_path there"
    require(bool(base), "model_name_or_path", name, remedy)
    return base


@contextmanager
def refuse_unloadable(
    field: str, name: str, remedy: str = "give a local folder, or a hub id that this machine can reach"
) -> Iterator[None]:
    """Raise ConfigError if the block, which loads `name` or the base of such an adapter, fails."""
    try:
        yield
    except ConfigError:
        raise
    except SafetensorError as error:
        raise ConfigError(f"{field}={name!r}: its weights are damaged ({error}): copy or download it again") from error
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(f"{field}={name!r}: cannot be loaded ({one_line(error)}): {remedy}") from error


@cache
def is_hub_reachable() -> bool:
    """Ask the hub once. Without an answer this process uses the cache alone."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except httpx.TransportError as error:
        log.warning("%s cannot be reached (%s): only what its cache holds is used", constants.ENDPOINT, error)
        constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE
