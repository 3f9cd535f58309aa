"""docs/troubleshooting.md has the stable part of every message (tests/messages.py), and no other."""

import dataclasses
import re

import pytest
from conftest import REPOSITORY
from messages import stable_part, stable_parts

from grpo.config.command_line import parse_arguments
from grpo.config.evaluate import EvaluateConfig
from grpo.config.generation import ChatConfig
from grpo.config.launch import LaunchConfig
from grpo.config.report import ReportConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig
from grpo.config.worker import WorkerConfig

PAGE = REPOSITORY / "docs/troubleshooting.md"
PROGRAMS = [
    *(REPOSITORY / name for name in ("grpo_ref_split.py", "ref_server.py", "generate.py", "reward.py")),
    *sorted((REPOSITORY / "grpo").rglob("*.py")),
    *sorted((REPOSITORY / "demo").glob("*.py")),
]
CONFIGS = (TrainerConfig, ServerConfig, EvaluateConfig, ChatConfig, ReportConfig, LaunchConfig, WorkerConfig)
SETTINGS = {field.name for config in CONFIGS for field in dataclasses.fields(config)}
# Where metrics get their names, of a run and of the reference server.
NAMING = [REPOSITORY / "grpo_ref_split.py"]
NAMED_BY = (
    "run/metrics",
    "run/phase_clock",
    "trainer/numbers",
    "trainer/round",
    "trainer/step",
    "trainer/numbers",
    "algorithm/loss",
    "algorithm/loss_types",
    "trainer/evaluation",
    "server/monitor",
)
NAMING += [REPOSITORY / f"grpo/{name}.py" for name in NAMED_BY]


def entries() -> list[str]:
    """Return what the page lists: whatever is in backticks in the first column of a table, or heads a point."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## Messages") : text.index("### What others say")]
    heads = re.findall(r"^(?:\| |- )(`.*?)(?: \||: )", section, re.MULTILINE)
    return [entry for head in heads for entry in re.findall("`([^`]*)`", head)]


def is_part_of(part: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}", text) is not None


def test_every_message_a_program_can_end_with_is_in_the_page():
    missing = {
        part: place
        for part, place in stable_parts(PROGRAMS).items()
        if not any(is_part_of(part, entry) for entry in entries())
    }
    assert not missing, f"not in docs/troubleshooting.md: {missing}"


def test_every_entry_of_the_page_is_a_setting_or_begins_a_message():
    parts = stable_parts(PROGRAMS)
    dead = [
        entry for entry in entries() if entry not in SETTINGS and not any(is_part_of(part, entry) for part in parts)
    ]
    assert not dead, f"in no program any more: {dead}"


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
        (EvaluateConfig, ["--temperature", "0"]),
        (ChatConfig, ["--temperature", "-1"]),
        (WorkerConfig, ["--pool", "http://box:1", "--engine", "vllm", "--vllm_args", "a 'b"]),
        (ReportConfig, []),
    ],
)
def test_what_a_program_has_said_is_found_in_the_page(config, options, capsys):
    """As its reader would: by the setting, or by words of the line itself."""
    with pytest.raises(SystemExit):
        parse_arguments(config, "", options)
    said = capsys.readouterr().err.splitlines()[-1].partition(": error: ")[2]
    assert stable_part(said) in entries() or any(" " in entry and entry in said for entry in entries())


def known_names() -> set[str]:
    """Settings, DeepSpeed's engine knobs, metrics where they get their names, and functions that a traceback shows."""
    names = SETTINGS | {*re.findall(r'"(\w+)":', (REPOSITORY / "ds_config.json").read_text(encoding="utf-8"))}
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
