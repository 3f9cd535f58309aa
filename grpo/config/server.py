"""Every setting of `ref_server.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from grpo.config.connection_settings import TOKEN_VARIABLE, ConnectionSection
from grpo.config.fields import option
from grpo.config.sampling_settings import SharedConfig


@dataclass
class ServerConfig(ConnectionSection, SharedConfig):
    """Every setting of `ref_server.py`."""

    HEADING = "server"

    task: Literal["logprobs", "reward", "rollouts"] = option(
        "logprobs",
        "what to serve: log-probs of a reference model, scores of a reward model (sequence classification, one "
        "output), or a pool of rollouts for trainer and workers (needs pool_file or pool_url, no model)",
        common=True,
    )
    pool_file: str | None = option(None, "file of one run's pool, made if missing", needs="task rollouts", common=True)
    pool_url: str | None = option(
        None,
        "instead of pool_file: postgresql://USER@HOST/DATABASE of one run, for several pools",
        needs="task rollouts",
    )
    pool_folder: str | None = option(
        None,
        "folder of a pool's files, weights above all, that its pools share: on a disk, or with pool_url also "
        "s3://BUCKET/PREFIX; unset: POOL_FILE.files",
        needs="task rollouts",
    )
    host: str = option("127.0.0.1", "address to listen on; any but this machine's own needs a token", common=True)
    max_length: int | None = option(None, "most tokens of a sequence; unset: the model's", above=0, common=True)
    max_batch_tokens: int | None = option(None, "tokens in a pass; unset: 16384, on a CPU 4096", above=0, common=True)
    device_map: Literal["auto"] | None = option(None, "spread it over all GPUs", needs="task logprobs", common=True)
    deterministic: bool = option(False, "compute prompts alone: the same bits whatever else waits", common=True)
    update_folder: str | None = option(None, "folder for trainers' new weights", needs="task logprobs", common=True)
    max_queue_tokens: int = option(4_000_000, "most tokens that may wait, of one request half; beyond: 503", at_least=2)
    body_timeout: float = option(120.0, "seconds a client may take to send a request's body", above=0)
    max_connections: int = option(1000, "most open connections; one more replaces an idle one, or gets 503", above=0)
    drain_timeout: float = option(60.0, "seconds to answer what waits after SIGTERM; then exit code 1", above=0)
    log_level: Literal["debug", "info", "warning"] = option("info", "debug logs requests, info a summary each minute")
    estimate: bool = option(False, "print the memory that it needs, and end", needs="task logprobs", common=True)

    SHORT: ClassVar = {"model": "model_name_or_path"}

    def __post_init__(self) -> None:
        super().__post_init__()
        is_whole = self.quantization == "none"
        self.check(self.task != "reward" or is_whole, quantization="not for task reward: leave it out")
        if self.task == "rollouts":
            self.check(self.pool_file or self.pool_url, pool_file="name one, such as run.sqlite, or a pool_url")
            self.check(not (self.pool_file and self.pool_url), pool_url="leave out pool_file, or this")
            is_known = self.pool_url is None or self.pool_url.startswith(("postgresql://", "postgres://"))
            self.check(is_known, pool_url="write it as postgresql://USER@HOST/DATABASE")
            self.check(
                self.pool_url is None or self.pool_folder is not None, pool_folder="name one that its pools share"
            )
            is_bucket = (self.pool_folder or "").startswith("s3://")
            self.check(self.pool_url or not is_bucket, pool_folder="a bucket needs a pool_url: name a folder on a disk")
        self.check(self.update_folder is None or is_whole, update_folder="quantized weights cannot be replaced")
        if self.token is None and self.host not in ("127.0.0.1", "localhost", "::1"):
            self.refuse("host", f"others could reach it there: give --token_file or {TOKEN_VARIABLE}, or use 127.0.0.1")

    @property
    def max_request_tokens(self) -> int:
        """Return the most tokens of a request, and the most that a client may have waiting."""
        return self.max_queue_tokens // 2

    def batch_tokens(self, device_type: str) -> int:
        """Return the tokens of a forward pass on a device of this type ("cuda" or "cpu")."""
        return self.max_batch_tokens or (16384 if device_type == "cuda" else 4096)
