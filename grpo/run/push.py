"""Pushes a run's model to the hub, and checks before the run that this will be possible."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx

from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.run.folder import SaveError

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
