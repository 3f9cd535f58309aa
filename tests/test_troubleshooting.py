"""docs/troubleshooting.md names real settings and metrics, and its links lead somewhere."""

import dataclasses
import re

from conftest import REPOSITORY

from grpo.config.programs import EvaluateConfig, LaunchConfig, ReportConfig, WorkerConfig
from grpo.config.sampling_settings import ChatConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig

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
    "trainer/step_result",
    "trainer/round",
    "trainer/step",
    "algorithm/loss",
    "algorithm/loss_types",
    "trainer/evaluation",
    "server/monitor",
)
NAMING += [REPOSITORY / f"grpo/{name}.py" for name in NAMED_BY]


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
