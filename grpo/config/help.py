"""Prints `--help`: the settings that most people touch, those of one topic, or all."""

from __future__ import annotations

import argparse
import re
import textwrap
from typing import Any

from grpo.config.errors import ConfigError, is_first_rank

COMMON, ALL = "common", "all"


def is_shown(topic: str, heading: str, name: str, is_common: bool) -> bool:
    """Tell whether `--help TOPIC` shows a setting. A topic may be a word of a heading, or a setting's name."""
    if topic == COMMON:
        return is_common
    return topic in (ALL, name) or topic.lower() in re.findall(r"\w+", heading.lower())


def topic_names(headings: list[str]) -> str:
    """List the first word of each heading, by which `--help` finds it."""
    return ", ".join(re.findall(r"\w+", heading)[0] for heading in headings)


class HelpAction(argparse.Action):
    """The action of `--help [TOPIC]`: print on the first rank, and end."""

    def __init__(self, **options: Any):
        super().__init__(nargs="?", const=COMMON, **options)

    def __call__(self, parser: Any, namespace: Any, topic: Any, option: str | None = None) -> None:
        text = parser.make_help(topic)
        if is_first_rank():
            print(text, end="")
        raise SystemExit(0)


def check_topic(topic: str, count: int, headings: list[str]) -> None:
    """Raise ConfigError where a topic has no setting."""
    if count == 0:
        raise ConfigError(f"--help {topic}: no such topic: use all, a setting's name, or {topic_names(headings)}")


class HelpFormatter(argparse.HelpFormatter):
    """The format: `--name KIND`, then what it does; everything is wrapped at the terminal's width."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        return ", ".join(reversed(names)) + (f" {action.metavar}" if action.metavar else "")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap paragraphs. Indented lines are commands: they stay as they are, and a long one goes on in the next."""
        paragraphs = []
        for paragraph in text.strip().split("\n\n"):
            if paragraph.startswith(" "):
                paragraphs.append("\n".join(_fold(line, width) for line in paragraph.splitlines()))
            else:
                paragraphs.append(textwrap.fill(" ".join(paragraph.split()), width, break_on_hyphens=False))
        return "\n\n".join(paragraphs)


def _fold(command: str, width: int) -> str:
    """Fold a shell command with backslashes, an option together with its first word."""
    whole = re.sub(r"(--\w+) (?=[^-\s])", r"\1\0", command)
    parts = textwrap.wrap(whole, width - 2, subsequent_indent=" " * 8, break_on_hyphens=False)
    return " \\\n".join(parts).replace("\0", " ")
