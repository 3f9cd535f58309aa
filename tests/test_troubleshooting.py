"""docs/troubleshooting.md: whatever a program ends with is found there, and nothing stands there that is no more."""

import dataclasses
import re

import pytest
from conftest import REPOSITORY
from messages import GAP, Program, tidy

from grpo.config.command_line import parse_arguments
from grpo.config.generation import ChatConfig, EvaluateConfig
from grpo.config.report import ReportConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig

PAGE = REPOSITORY / "docs/troubleshooting.md"
PROGRAMS = [
    *(REPOSITORY / name for name in ("grpo_ref_split.py", "ref_server.py", "reward.py")),
    *sorted((REPOSITORY / "grpo").rglob("*.py")),
    *sorted((REPOSITORY / "demo").glob("*.py")),
]
# Where metrics get their names, of a run and of the reference server.
NAMING = [REPOSITORY / "grpo_ref_split.py"]
NAMED_BY = (
    "run/metrics",
    "run/phase_clock",
    "trainer/round",
    "trainer/step",
    "algorithm/loss",
    "algorithm/loss_types",
    "trainer/evaluation",
    "server/monitor",
)
NAMING += [REPOSITORY / f"grpo/{name}.py" for name in NAMED_BY]


@pytest.fixture(scope="module")
def messages():
    return Program(REPOSITORY, PROGRAMS).messages()


def entries() -> list[tuple[int, str]]:
    """(line, text) of each message that the page lists: in its blocks, and at the head of a point."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin, end = lines.index("## Messages"), lines.index("### What others say")
    found, block = [], False
    for number, line in enumerate(lines[begin:end], begin + 1):
        if line.startswith("```"):
            block = not block
        elif block and line:
            found.append((number, tidy(line)))
        elif point := re.match(r"- `([^`]*)`", line):
            found.append((number, tidy(point[1])))
    return found


def pattern(entry: str) -> re.Pattern:
    """`…` stands for what varies from run to run, or for a single word."""
    return re.compile(rf"(?:{GAP}|[\w*]+)".join(map(re.escape, entry.split(GAP))))


def test_every_message_a_program_can_end_with_is_in_the_page(messages):
    listed = [pattern(text) for _, text in entries()]
    missing = [one for one in messages if not any(known.fullmatch(one.text) for known in listed)]
    assert not missing, "not in docs/troubleshooting.md:\n" + "\n".join(f"{one.place}: {one.text}" for one in missing)


def test_every_message_of_the_page_is_still_in_a_program(messages):
    texts = [one.text for one in messages]
    dead = [(line, text) for line, text in entries() if not any(map(pattern(text).fullmatch, texts))]
    assert not dead, "in no program any more:\n" + "\n".join(
        f"docs/troubleshooting.md:{line}: {text}" for line, text in dead
    )


def test_a_message_of_the_page_says_something():
    """One that is little but gaps would stand for any message."""
    assert all(len(re.findall(r"[a-zA-Z_]{2,}", text)) > 1 for _, text in entries())


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (TrainerConfig, ["--num_generations", "1"]),
        (TrainerConfig, ["--max_steps", "0"]),
        (TrainerConfig, ["--beta", "inf"]),
        (TrainerConfig, ["--nothing", "7"]),
        (TrainerConfig, ["--config", "nowhere.yaml"]),
        (TrainerConfig, ["--reward_weights", "1"]),
        (TrainerConfig, ["--ref_servers", "http://a", "http://a/"]),
        (TrainerConfig, ["--token_file", "/nowhere"]),
        (TrainerConfig, ["--delta", "1.1"]),
        (ServerConfig, ["--host", "0.0.0.0"]),
        (ServerConfig, ["--task", "reward", "--update_folder", "new"]),
        (EvaluateConfig, ["--pass_at_k", "4"]),
        (ChatConfig, ["--temperature", "-1"]),
        (ReportConfig, []),
    ],
)
def test_what_a_program_has_said_is_found_in_the_page(config, options, capsys):
    """As its reader would: the line itself, whatever stands in the gaps."""
    with pytest.raises(SystemExit):
        parse_arguments(config, "", options)
    said = capsys.readouterr().err.splitlines()[-1].partition(": error: ")[2]
    assert any(re.fullmatch(".*".join(map(re.escape, text.split(GAP))), tidy(said)) for _, text in entries())


def known_names() -> set[str]:
    """Settings, DeepSpeed's engine knobs, metrics where they get their names, and functions that a traceback shows."""
    configs = (TrainerConfig, ServerConfig, EvaluateConfig, ChatConfig, ReportConfig)
    names = {one.name for config in configs for one in dataclasses.fields(config)}
    names |= {*re.findall(r'"(\w+)":', (REPOSITORY / "ds_config.json").read_text(encoding="utf-8"))}
    rewards = ["soft_overlong_punishment"]
    for path in PROGRAMS:
        text = path.read_text(encoding="utf-8")
        functions = re.findall(r"def (\w+)", text)
        names |= {*functions}
        rewards += functions if path.name == "reward.py" else []
        if path in NAMING:
            for word in re.findall(r'"([\w/]+)(?::\w+)?"', text):
                names |= {word, f"grpo_ref_{word}", f"time/{word}", f"memory/peak_{word}"}
    return names | {f"rewards/{name}/{what}" for name in rewards for what in ("mean", "std")}


def test_settings_and_metrics_of_the_page_are_real():
    text = PAGE.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text[: text.index("## Messages")], flags=re.DOTALL)
    named = {*re.findall(r"`-*([a-z0-9_]+(?:/[a-z_]+)*)`", prose)}
    assert len(named) > 60
    unknown = named - known_names()
    assert not unknown


def test_links_within_the_page_lead_somewhere():
    text = PAGE.read_text(encoding="utf-8")
    heads = [
        re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)", text, re.MULTILINE)
    ]
    assert len(heads) == len(set(heads))
    lost = {*re.findall(r"\]\(#([^)]*)\)", text)} - {*heads}
    assert not lost
