"""Files of one JSON record a line: metrics.jsonl, completions.jsonl, bad_steps.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """One record and a line's end. A number that does not exist (NaN) or is infinite is null: JSON has neither."""

    def known(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    finite = {name: known(value) for name, value in record.items()}
    return json.dumps(finite, ensure_ascii=False, allow_nan=False, indent=indent) + "\n"


def some_of(numbers: list[int]) -> str:
    """Show the first of them, and how many there are."""
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "") + f" ({len(numbers)} in all)"


def read_record(raw: bytes) -> dict[str, Any] | None:
    """A line of a run's files; None where it is damaged or has no step."""
    try:
        record = json.loads(raw.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**53 else None
