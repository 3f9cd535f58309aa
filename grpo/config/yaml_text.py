"""Reads YAML, and refuses what PyYAML takes silently or answers with a traceback."""

from __future__ import annotations

from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """Return what the text says. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("too many brackets within each other") from error


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, which lets the last of two equal keys win, and its constructors raise whatever they meet."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):  # of a few hundred bytes they make gigabytes, and no setting needs one
            alias = self.peek_event()
            raise _error(alias, f"*{alias.anchor} stands for another place's value: write the value itself")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in names:
                raise _error(key, f"{key.value} stands twice: leave one of them out")
            names.add(str(key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            text = str(value)  # raises for an integer of more digits than Python writes
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _error(node, f"{node.value!r:.40} is no {kind}: correct it, or put a text in quotes") from error
        if "\0" in text:
            raise _error(node, "a text holds the character NUL: leave it out")
        return value


for _kind in ("binary", "set", "omap", "pairs"):  # no setting is one of these: each would become a text
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_undefined)


def _error(node: yaml.Node | yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
