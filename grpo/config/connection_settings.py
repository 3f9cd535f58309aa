"""Settings of the connection between trainer and reference servers."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo.config.errors import ConfigError, require
from grpo.config.fields import Section, option

TOKEN_VARIABLE = "GRPO_REF_TOKEN"


@dataclass
class ConnectionSection(Section):
    """The settings by which server and trainer find and trust each other. `token` is no setting: everybody on the
    machine can read a command line."""

    HEADING = "connection (server and trainer)"

    port: int = option(59875, "the server's TCP port; 0: the system's choice", at_least=0, at_most=65535, common=True)
    token_file: str | None = option(None, f"file with the token; unset is the variable {TOKEN_VARIABLE}", common=True)

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
    fits = token is None or re.fullmatch("[!-~]+", token)
    require(bool(fits), field, place, "a token is printable ASCII without spaces, and not empty: write one")
    return token


def read_url(field: str, url: str) -> str:
    """Return a URL without a slash at its end. Raises ConfigError if it is none."""
    require(url.startswith(("http://", "https://")), field, url, "write it as http://HOST:PORT")
    return url.rstrip("/")


def read_urls(field: str, urls: str) -> str:
    """Return URLs that commas join, each as read_url does."""
    return ",".join(read_url(field, url) for url in urls.split(","))


@dataclass
class ClientConfig(ConnectionSection):
    """The settings of a client of reward servers."""

    HEADING = "waiting for servers"

    ref_ca_file: str | None = option(None, "PEM file of an https server's authority; unset is the public ones")
    ref_startup_timeout: float = option(300.0, "seconds to wait for a server; six hours while it loads", at_least=0)
    ref_request_timeout: float = option(120.0, "seconds without an answer after which a request is sent again", above=0)
    ref_deadline: float = option(900.0, "seconds after which a group without its log-probs ends the run", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ca_file(self)


def check_ca_file(config: Section) -> None:
    is_there = config.ref_ca_file is None or Path(config.ref_ca_file).is_file()
    config.check(is_there, ref_ca_file="no such file: name the authority's PEM file")


@dataclass
class ReferenceConfig(ClientConfig):
    """The settings of a client of reference servers and teachers."""

    HEADING = "reference and teachers"

    ref: Literal["server", "adapter_off", "local"] = option(
        "server",
        "who computes reference log-probs: a server, or the trainer, with its (new) adapter off or from a copy of the "
        "weights that it began with",
        common=True,
    )
    ref_servers: list[str] | None = option(
        None, "URLs of reference servers with the same model; unset is http://127.0.0.1:PORT", common=True
    )
    teacher_servers: list[str] | None = option(
        None,
        "URLs of servers whose model the policy learns from (ref_server.py --model BIG); as SOURCE=URL the teacher of "
        "one dataset's prompts, where several are mixed",
    )
    allow_other_reference: bool = option(False, "accept a reference of another model than the policy starts from")
    ref_update_steps: int = option(0, "updates between new references, if servers take them; 0 is never", at_least=0)
    ref_mixup_alpha: float = option(
        1.0, "share of the policy in a new reference (TRL: 0.6)", needs="ref_update_steps above 0", above=0, at_most=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ref_servers is None:
            self.ref_servers = [f"http://127.0.0.1:{self.port}"]
        self.ref_servers = [read_url("ref_servers", url) for url in self.ref_servers]
        self.check(len(set(self.ref_servers)) == len(self.ref_servers), ref_servers="name each once")
        for source, urls in self.teachers.items():
            self.check(
                len(set(urls)) == len(urls), teacher_servers=f"name each once{f' for {source}' if source else ''}"
            )

    @property
    def teachers(self) -> dict[str, list[str]]:
        """the URLs of each source's teacher; "" is the teacher of every other"""
        teachers: dict[str, list[str]] = {}
        for name in self.teacher_servers or []:
            source, separator, url = name.partition("=")
            labelled = bool(separator) and "://" not in source
            url = read_url("teacher_servers", url if labelled else name)
            teachers.setdefault(source if labelled else "", []).append(url)
        return teachers
