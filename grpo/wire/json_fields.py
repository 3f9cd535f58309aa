"""The fields of JSON bodies, each checked by its kind.

A wrong value is refused with ProtocolError, 400: the field's name, the value, and the remedy.
"""

import json
import sys
from dataclasses import MISSING, fields
from typing import Any

from grpo.wire.refusals import check_name, malformed, refuse_doubles

LARGEST_ID = 2**31 - 1  # largest int32: ids of tokens, groups and versions are sent as int32


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, in which no object has a name twice."""
    try:
        content = json.loads(body, object_pairs_hook=refuse_doubles)
    except (ValueError, RecursionError) as error:
        raise malformed(f"the body is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise malformed("the body is not a JSON object")
    return content


def read_fields(cls, content: object):
    """Make a dataclass of a JSON object that has its fields and no others; do not check their values."""
    if not isinstance(content, dict):
        raise malformed(f"{cls.__name__}: no object")
    if unknown := content.keys() - {field.name for field in fields(cls)}:
        raise malformed(f"unknown field {min(unknown)!r}")
    needed = {field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING}
    if missing := needed - content.keys():
        raise malformed(f"a field is missing: {min(missing)!r}")
    return cls(**content)


def check_text(name: str, value: object) -> None:
    """Refuse all but a text that is no longer than a name."""
    if not isinstance(value, str):
        raise malformed(f"{name}: send a text")
    check_name(name, value)


def check_texts(name: str, values: object, kind: str) -> None:
    """Refuse all but a list of texts that are no longer than names. `kind` names the texts in the message."""
    if not isinstance(values, list):
        raise malformed(f"{name}: send a list of {kind}")
    for value in values:
        check_text(name, value)


def check_int(name: str, value: object, least: int, most: int = LARGEST_ID) -> int:
    """Return the value; refuse all but an integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise malformed(f"{name} {shown(value)}: send an integer from {least} to {most}")
    return value


def check_amount(name: str, value: object) -> None:
    """Refuse all but a number from 0 to a billion."""
    if not (is_number(value) and 0 <= value < 1e9):
        raise malformed(f"{name} {shown(value)}: send a number of at least 0")


def check_hex(name: str, value: object, digits: int) -> str:
    """Return the value; refuse all but so many hex digits in lower case."""
    if not isinstance(value, str) or len(value) != digits or set(value) - set("0123456789abcdef"):
        raise malformed(f"{name} {shown(value)}: send {digits} hex digits")
    return value


def read_ints(name: str, value: object) -> list[int]:
    """Return a list of token ids, at least one."""
    if not isinstance(value, list) or not value:
        raise malformed(f"{name}: send a list of token ids")
    return [check_int(name, token, least=0) for token in value]


def find_unrecordable(value: Any, deepest: int) -> str:
    """Return the fault of a JSON value that no record of a run can hold; "" if there is none: Python cannot copy more
    than `deepest` lists and objects within each other, and other readers refuse values that Python's json takes."""
    depth, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        depth += 1
        if depth > deepest:
            return f"more than {deepest} lists and objects within each other"
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return "NaN, Infinity or half of a surrogate pair"
    return ""


def is_number(value: object) -> bool:
    """Tell whether a value is a finite number."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    # The text of nested lists may be as long as the body, and too deep for Python to make.
    return repr(str(value)[:80]) if isinstance(value, str | int | float | None) else f"({type(value).__name__})"
