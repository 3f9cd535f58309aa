"""Settings of the connection between trainer and reference servers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo.config.errors import ConfigError, require
from grpo.config.fields import Section, option

TOKEN_VARIABLE = "GRPO_REF_TOKEN"


@dataclass
class ConnectionSection(Section):
    """The settings by which server and trainer find and trust each other.

    `token` is no setting: everybody on the machine can read a command line.
    """

    HEADING = "connection (server and trainer)"

    port: int = option(
        59875, "the reference server's TCP port; 0 lets the system choose one", at_least=0, at_most=65535, common=True
    )
    token_file: str | None = option(
        None, f"file with the token that server and trainer share; unset is the variable {TOKEN_VARIABLE}", common=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.token = find_token(self.token_file)


def find_token(token_file: str | None) -> str | None:
    """Return the token of the file, else of the environment, or None. Raises ConfigError."""
    field, place, token = TOKEN_VARIABLE, "(hidden)", os.environ.get(TOKEN_VARIABLE) or None
    if token_file is not None:
        field, place = "token_file", token_file
        try:
            token = Path(token_file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"token_file={token_file!r}: cannot be read: {error}") from error
        require(token != "", field, place, "the file is empty: write the token into it")
    fits = token is None or (token.isascii() and token.isprintable() and " " not in token)
    require(fits, field, place, "the token travels in an HTTP header: use printable ASCII without spaces")
    return token


@dataclass
class ServersSection(Section):
    """The settings of a client of reference or reward servers."""

    HEADING = "waiting for servers"

    ref_ca_file: str | None = option(
        None, "PEM file of the authority that signed an https server's certificate; unset is the public ones"
    )
    ref_startup_timeout: float = option(
        300.0, "seconds to wait at the start for a server without an answer; six hours for one that loads", at_least=0
    )
    ref_request_timeout: float = option(120.0, "seconds without an answer after which a request is sent again", above=0)
    ref_deadline: float = option(900.0, "seconds after which a group without its log-probs ends the run", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ca_file(self)


def check_ca_file(config: Section) -> None:
    """Raise ConfigError if ref_ca_file does not exist."""
    config.check(
        config.ref_ca_file is None or Path(config.ref_ca_file).is_file(),
        ref_ca_file="no such file: name the PEM file of the authority that signed the server's certificate",
    )


@dataclass
class ClientConfig(ServersSection, ConnectionSection):
    """The settings of a client of reward servers."""


@dataclass
class ReferenceSection(Section):
    """The settings of the reference: who computes its log-probs, and its updates."""

    HEADING = "reference"

    ref: Literal["server", "adapter_off"] = option(
        "server", "who computes reference log-probs: a server, or the trainer with its (new) adapter off", common=True
    )

    ref_servers: list[str] | None = option(
        None, "URLs of reference servers with the same model; unset is http://127.0.0.1:PORT", common=True
    )
    allow_other_reference: bool = option(
        False, "accept a server with another model than the policy's first: the KL then does not begin at 0"
    )
    ref_update_steps: int = option(
        0, "updates between new references, on servers with update_folder; 0 is never", at_least=0
    )
    ref_mixup_alpha: float = option(
        1.0,
        "share of the policy in a new reference; 1 replaces it (TRL: 0.6)",
        needs="ref_update_steps above 0",
        above=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ref_servers is not None:
            self.ref_servers = [url.rstrip("/") for url in self.ref_servers]
            for url in self.ref_servers:
                require(url.startswith(("http://", "https://")), "ref_servers", url, "write it as http://HOST:PORT")
            twice = len(set(self.ref_servers)) < len(self.ref_servers)
            self.check(not twice, ref_servers="name each once")


@dataclass
class ReferenceConfig(ReferenceSection, ClientConfig):
    """The settings of a client of reference servers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ref_servers is None:
            self.ref_servers = [f"http://127.0.0.1:{self.port}"]
