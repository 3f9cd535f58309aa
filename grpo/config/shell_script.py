"""Reads the commands of a shell script, with the values that its own variables have. Runs nothing."""

from __future__ import annotations

import ast
import os
import re
from collections import ChainMap
from collections.abc import Mapping, MutableMapping

from grpo.config.python_script import Unknown, evaluate

_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_PIECE = rf"""'[^']*' | "(?:\\.|[^"\\])*" | \\. | \$\{{[^}}]*\}} | \${_PARENTHESES} | `[^`]*` | [^\s\\'"`;&|()]"""
_TOKEN = re.compile(
    rf"""\#[^\n]* | <<-?\s*(?P<quote>['"]?)(?P<end>\w+)(?P=quote).*?^\s*(?P=end)$ | (?P<stop>[\n;&|()])
    | (?P<word>(?:{_PIECE})+)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)  # a comment, a here-document, the end of a command, or a word
_VARIABLE = re.compile(r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?:(?P<unset>:?[-=])(?P<default>[^${}]*))?\})")
_HIDDEN = str.maketrans("$`", "\0\1")  # of a text that is no expression any more
_OPEN, _CLOSE = {"if", "for", "while", "until", "case", "select", "{"}, {"fi", "done", "esac", "}"}
_BEFORE_COMMAND = _OPEN | {"then", "do", "else", "elif", "!", "time", "export", "local", "declare", "readonly"}


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each command of a script, without comments and quotes. Plain assignments and the environment
    give the values of variables; a word with another variable is Unknown, and so is what a condition or loop assigns.
    """
    variables: ChainMap[str, str] = ChainMap({}, os.environ)
    commands: list[list[str]] = [[]]
    depth, stop, is_first, previous = 0, "", True, ""
    for token in _TOKEN.finditer(text):
        if token["stop"]:
            stop, is_first, previous = token["stop"], True, ""
            commands.append([])
        if not (raw := (token["word"] or "").replace("\\\n", "")):  # lines are continued
            continue
        word = _expanded(raw, variables)
        depth += is_first and (raw in _OPEN) - (raw in _CLOSE)
        if previous in ("for", "read", "select"):
            variables[raw] = Unknown(f"${raw}")
        assigned = re.fullmatch(r"([A-Za-z_]\w*)(\+?)=(.*)", word, re.DOTALL)
        if is_first and assigned:
            name, more, value = assigned.groups()
            may_be_skipped = depth > 0 or stop in ("&", "|")
            if more or (may_be_skipped and variables.get(name) != value):
                value = Unknown(f"${name}")
            variables[name] = Unknown(value) if isinstance(word, Unknown) else value
        else:
            is_first = is_first and raw in _BEFORE_COMMAND
        is_list = _VARIABLE.fullmatch(raw) and not isinstance(word, Unknown)
        commands[-1] += word.split() if is_list else [word]
        previous = raw
    return commands


def _expanded(word: str, variables: MutableMapping[str, str]) -> str:
    """Return what a shell makes of a word."""
    before, text, is_unknown = None, "", False
    for piece in re.findall(_PIECE, word, re.VERBOSE | re.DOTALL):
        if piece[0] == "'":
            text += piece[1:-1].translate(_HIDDEN)
        elif piece[0] == '"':
            text += re.sub(r'\\(["\\$`\n])', lambda match: match[1].strip("\n").translate(_HIDDEN), piece[1:-1])
        else:
            text += piece[1:].strip("\n").translate(_HIDDEN) if piece[0] == "\\" else piece

    def value_of(match: re.Match) -> str:
        nonlocal is_unknown
        name, unset = match["plain"] or match["name"], match["unset"] or ""
        value = variables.get(name)
        if unset and (value is None or (value == "" and ":" in unset)):
            value = match["default"].strip("'\"")
            if "=" in unset:
                variables[name] = value
        is_unknown |= value is None or isinstance(value, Unknown)
        return (match[0] if value is None else value).translate(_HIDDEN)

    while before != text:  # ${a:-${b}} has another inside
        before, text = text, _VARIABLE.sub(value_of, text)
    text = re.sub(rf"\$\({_PARENTHESES}\)", lambda match: _computed(match[0], variables), text)
    is_unknown |= "$" in text or "`" in text
    text = text.replace("\0", "$").replace("\1", "`")
    return Unknown(text) if is_unknown else text


def _computed(expression: str, variables: Mapping[str, str]) -> str:
    """Return the number of `$((a * 2))`, or the expression if it cannot be computed."""
    try:
        values = {name: ast.Constant(int(variables[name])) for name in re.findall(r"[A-Za-z_]\w*", expression)}
        return str(evaluate(ast.parse(expression[3:-2].strip().replace("/", "//"), mode="eval").body, values))
    except (KeyError, ValueError, SyntaxError):
        return expression
