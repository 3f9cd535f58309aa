"""The stable part of each message in the programs' source: the setting or code that it names, or its first words.

Read are the texts that stand in a call: of an exception (built in, or a class of ours), of
`require` and of `say_once`. A text that a variable brings is not followed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

GAP = "…"
_EXCEPTION = re.compile(r"(Error|Exception)$")
_ARGUMENT = {"require": 1, "ProtocolError": 1}
"""where a setting or a code is the stable part; elsewhere the first argument is the message"""


def stable_part(message: str) -> str:
    """Return the setting or code that a message begins with, else its first words; "" where these vary."""
    if name := re.match(r"\w+(?==)|[a-z]+(_[a-z]+)+", message):
        return name[0]
    varies = message.startswith((f"{GAP}=", f"{GAP} names "))
    pieces = re.split(rf"[{GAP}:;,(]", "" if varies else message)
    return next((" ".join(piece.split()[:3]) for piece in pieces if re.search(r"\w{4}", piece)), "")


def stable_parts(files: list[Path]) -> dict[str, str]:
    """Return {stable part: file:line} for the messages of these files."""
    nodes = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    classes = {node.name: [*map(ast.unparse, node.bases)] for _, node in nodes if isinstance(node, ast.ClassDef)}
    ours: set[str] = set()
    while (
        new := {
            name for name, bases in classes.items() if any(_EXCEPTION.search(base) or base in ours for base in bases)
        }
        - ours
    ):
        ours |= new
    places = {name: 0 for name in ("ValueError", "RuntimeError", "OSError", "say_once", *ours)} | _ARGUMENT
    parts: dict[str, str] = {}
    for path, node in nodes:
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name in places and len(node.args) > places[name]:
            text = _text(node.args[places[name]])
            part = text.replace(GAP, "") if name in _ARGUMENT else stable_part(text)
            parts.setdefault(part, f"{path.name}:{node.lineno}")
    return {part: place for part, place in parts.items() if part}


def _text(node: ast.expr) -> str:
    """Return the text with `…` for each part that only a run knows."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(_text, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
    return GAP
