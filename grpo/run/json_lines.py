"""Files with one JSON record a line: metrics.jsonl, completions.jsonl, bad_steps.jsonl, starts.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Format one record and the line's end. NaN and infinite numbers become null: JSON has neither."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(finite, ensure_ascii=False, allow_nan=False, indent=indent) + "\n"


def some_of(numbers: list[int]) -> str:
    """Format the first five numbers, and how many there are."""
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "") + f" ({len(numbers)} in all)"


def read_record(raw: bytes) -> dict[str, Any] | None:
    """Parse a line of a run's files; return None where it is damaged or has no step."""
    try:
        record = json.loads(raw.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**53 else None
