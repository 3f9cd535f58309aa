"""docs/troubleshooting.md names real settings and metrics, and its links lead somewhere."""

import dataclasses
import re

from conftest import REPOSITORY

from grpo.config.programs import EvaluateConfig, LaunchConfig, ReportConfig, WorkerConfig
from grpo.config.sampling_settings import ChatConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig

PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()
PROGRAMS = [
    *(REPOSITORY / name for name in ("grpo_ref_split.py", "ref_server.py", "generate.py", "reward.py")),
    *sorted((REPOSITORY / "grpo").rglob("*.py")),
    *sorted((REPOSITORY / "demo").glob("*.py")),
]
CONFIGS = (TrainerConfig, ServerConfig, EvaluateConfig, ChatConfig, ReportConfig, LaunchConfig, WorkerConfig)
SETTINGS = {field.name for config in CONFIGS for field in dataclasses.fields(config)}
# Where metrics get their names, of a run and of the reference server.
NAMING = {REPOSITORY / "grpo_ref_split.py"} | {
    REPOSITORY / f"grpo/{folder}/{name}.py"
    for folder, names in {
        "run": ["metrics"],
        "trainer": ["step_result", "round", "step", "evaluation"],
        "algorithm": ["loss", "loss_types"],
        "server": ["monitor"],
    }.items()
    for name in names
}


def known_names() -> set[str]:
    """Settings, DeepSpeed's engine knobs, metrics where they get their names, and functions that a traceback shows."""
    names = SETTINGS | {*re.findall(r'"(\w+)":', (REPOSITORY / "ds_config.json").read_text())}
    rewards = ["soft_overlong_punishment"]
    for path in PROGRAMS:
        text = path.read_text()
        functions = re.findall(r"def (\w+)", text)
        names |= {*functions}
        rewards += functions if path.name == "reward.py" else []
        for word in re.findall(r'"([\w/]+)(?::\w+)?"', text) if path in NAMING else []:
            names |= {word, f"grpo_ref_{word}", f"time/{word}", f"memory/peak_{word}"}
    return names | {f"rewards/{name}/{what}" for name in rewards for what in ("mean", "std")}


def test_settings_and_metrics_of_the_page_are_real():
    prose = re.sub(r"```.*?```", "", PAGE[: PAGE.index("## Messages")], flags=re.DOTALL)
    named = {*re.findall(r"`-*([a-z0-9_]+(?:/[a-z_]+)*)`", prose)}
    assert len(named) > 60
    assert not named - known_names()


def test_links_within_the_page_lead_somewhere():
    heads = re.findall(r"^#+ (.*)", PAGE, re.MULTILINE)
    places = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
    assert len(places) == len(set(places))
    assert not {*re.findall(r"\]\(#([^)]*)\)", PAGE)} - {*places}
