"""What tests/messages.py reads from source."""

from messages import Program


def test_whatever_can_be_said_is_found(tmp_path):
    """In all the ways in which the programs say something."""
    (tmp_path / "program.py").write_text(
        """
import sys

class OwnError(ValueError):
    def __init__(self, code, message):
        super().__init__(f"{code} says {message}")

class _Private(Exception):
    pass

def refuse(field, value, remedy="leave it out"):
    if value:
        raise OwnError(7, f"{field}={value!r}: {remedy}")

def name():
    return "the name of it"

def main(x):
    refuse("size", x, f"use {x} or more")
    refuse("place", x)
    for part, why in (("a", "it is too long"), ("b", "it is too short")):
        raise ValueError(f"{part}: {why}")
    reason = "it is red" if x else "it is green"
    raise RuntimeError(f"no go, {reason}: {name()}") from None
    raise _Private("not for others")
    print(f"program: {x} is wrong", file=sys.stderr)
    log.error("only in the log")
"""
    )
    found = {one.text: one.place for one in Program(tmp_path, [tmp_path / "program.py"]).messages()}
    assert found == {
        "… says size=…: use … or more": "program.py:19",
        "… says place=…: leave it out": "program.py:20",
        "…: it is too long": "program.py:22",
        "…: it is too short": "program.py:22",
        "no go, it is red: …": "program.py:24",
        "no go, it is green: …": "program.py:24",
        "the name of it": "program.py:16",
        "program: … is wrong": "program.py:26",
    }
