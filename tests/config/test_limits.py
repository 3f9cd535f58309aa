"""The limits of single settings: declared in the field, and held by every section, alone and in a program's whole."""

import dataclasses
import math
import re

import pytest

from grpo.config.connection_settings import ReferenceConfig
from grpo.config.errors import ConfigError
from grpo.config.fields import Limits, default_of
from grpo.config.programs import PROGRAMS, ReportConfig, WorkerConfig

ADDED: dict[type, list[dataclasses.Field]] = {}  # the fields that each section adds to those before it
for section in (base for program in PROGRAMS for base in reversed(program.__mro__) if "HEADING" in vars(base)):
    seen = [field for fields in ADDED.values() for field in fields]  # a subclass has the same objects
    ADDED.setdefault(section, [field for field in dataclasses.fields(section) if field not in seen])
NUMBERS = [
    (section, field)
    for section, fields in ADDED.items()
    for field in fields
    if re.search(r"\b(int|float)\b", field.type)
]
ANY_NUMBER = {"agent_failure_reward", "reward_weights"}
BY_OTHERS = {"delta"}  # its limit is another setting


def settings_with(section, field, number) -> dict:
    """Return arguments of the section that are right but for this number."""
    needed = {ReportConfig: {"runs": ["folder"]}, WorkerConfig: {"pool": "http://box:59877"}}.get(section, {})
    return needed | {field.name: [number] if "list" in field.type else number}


def test_every_number_has_limits():
    without = {field.name for _, field in NUMBERS if not field.metadata["limits"]}
    assert without == ANY_NUMBER | BY_OTHERS


@pytest.mark.parametrize(
    ("section", "field"), NUMBERS, ids=[f"{section.__name__}-{field.name}" for section, field in NUMBERS]
)
def test_a_section_alone_refuses_a_number_outside_its_limits(section, field):
    limits = field.metadata["limits"] or Limits()
    outside = [limits.at_least - 1, limits.above, limits.at_most + 1, limits.below]
    if "float" in field.type:
        outside.append(math.nan)
    for number in outside:
        if "int" in field.type and math.isinf(number):
            continue  # no bound there
        with pytest.raises(ConfigError, match=rf"^{field.name}=\[?{number}\]?: use "):
            section(**settings_with(section, field, number))


WITH_NEEDS = [(section, field) for section, fields in ADDED.items() for field in fields if field.metadata["needs"]]


@pytest.mark.parametrize(
    ("section", "field"), WITH_NEEDS, ids=[f"{section.__name__}-{field.name}" for section, field in WITH_NEEDS]
)
def test_a_section_refuses_a_setting_without_what_it_needs_unless_it_is_the_default(section, field):
    needs = field.metadata["needs"]
    needed = {need.split()[0] for need in needs.split(" or ")}
    whole = [section, *(program for program in PROGRAMS if issubclass(program, section))]
    section = next(each for each in whole if needed <= {other.name for other in dataclasses.fields(each)})
    # These are what is needed by default, and so not here.
    there = {"beta": 0, "eval_steps": 0, "task": "reward", "gradient_checkpointing": False}
    without = {name: value for name, value in there.items() if name in needed}
    words = [word for word in re.findall(r"'(.*?)'", field.type) if word != field.default]  # of a Literal
    value = {"bool": True, "int": 7, "float": 0.7}.get(field.type.split()[0], [*words, "x"][0])
    other = settings_with(section, field, value)
    with pytest.raises(ConfigError, match=rf"^{field.name}=.*: it does nothing without {needs}: add it, or leave"):
        section(**other | without)
    section(**other | without | {field.name: default_of(field)})


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "words"),
    [
        (Limits(above=0), (1e-9, 10**400), (0, -1), "a number above 0"),
        (Limits(at_least=2), (2, 3), (1, 1.99), "2 or more"),
        (Limits(above=0, at_most=1), (0.1, 1), (0, 1.01), "a number above 0, and 1 at most"),
        (Limits(at_least=0, below=1), (0, 0.99), (-0.1, 1), "a number from 0 to below 1"),
        (Limits(at_least=0, at_most=65535), (0, 65535), (-1, 65536), "a number from 0 to 65535"),
    ],
)
def test_limits_hold_and_say_their_bounds(limits, inside, outside, words):
    assert all(number in limits for number in inside) and not any(number in limits for number in outside)
    assert str(limits) == words


def test_a_client_needs_no_more_than_its_own_settings():
    assert ReferenceConfig(port=7).ref_servers == ["http://127.0.0.1:7"]
    assert ReferenceConfig(ref_servers=["http://a:1/"]).ref_servers == ["http://a:1"]
