"""Every command in README and docs is one that its program accepts: read by the program's own parser."""

import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import REPOSITORY

from grpo.config.command_line import parse_arguments
from grpo.config.programs import EvaluateConfig, LaunchConfig, ReportConfig, WorkerConfig
from grpo.config.sampling_settings import ChatConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig

PROGRAMS = {
    "grpo launch": LaunchConfig,
    "grpo train": TrainerConfig,
    "grpo server": ServerConfig,
    "grpo worker": WorkerConfig,
    "grpo eval": EvaluateConfig,
    "grpo chat": ChatConfig,
    "grpo report": ReportConfig,
    "grpo_ref_split.py": TrainerConfig,
    "ref_server.py": ServerConfig,
    "generate.py": WorkerConfig,
    "grpo.launch": LaunchConfig,
    "grpo.evaluate": EvaluateConfig,
    "grpo.chat": ChatConfig,
    "grpo.report": ReportConfig,
}
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
NAMED = re.compile(r"[\w/.-]+\.(?:py|pem|sqlite)(?=$|:)|^token$")
"""files of the user's that a command names"""
MAKE = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def commands(page: Path) -> list[str]:
    """The commands in a page's blocks and tables: of a shell, or of no language."""
    text = page.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shell = [block.replace("\\\n", " ") for language, block in blocks if language in ("", "sh", "bash", "console")]
    lines = [line for block in shell for line in block.splitlines()]
    cells = [code for row in re.findall(r"^\|.*\|$", text, re.MULTILINE) for code in re.findall(r"`([^`]+)`", row)]
    first = r"(\$ )?([A-Z_]+=\S+ )*(grpo|deepspeed|torchrun|make|pip|(\S*/)?python) (?!-c)"
    return [line.removeprefix("$ ") for line in lines + cells if re.match(first, line)]


def parse(command: str) -> str:
    """Let the command's program read its options. Return the program, or an empty text for one that is not ours."""
    words = [word for word in shlex.split(command, comments=True) if word not in ("...", "…")]
    joined = [*words, *map(" ".join, pairwise(words))]
    program = next((name for name in PROGRAMS if name in joined), "")
    if not program:
        return ""
    for word in words:
        if (named := NAMED.search(word)) and not Path(named[0]).exists():
            Path(named[0]).parent.mkdir(parents=True, exist_ok=True)
            Path(named[0]).write_text("secret")
    place = max(words.index(word) for word in program.split())
    parse_arguments(PROGRAMS[program], "", [word for word in words[place + 1 :] if word != "|"])
    return program


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_programs_commands_are_accepted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    for command in commands(page):
        parsed = parse(command)
        if command.startswith("make "):
            assert command.split()[1] in MAKE
        elif "pip install" in command and "[" in command:
            assert {*re.search(r"\[(.*?)\]", command)[1].split(",")} <= {*EXTRAS}
        elif module := re.search(r"-m ((?:benchmarks|demo|examples)[\w.]*)(.*)", command.split("#")[0]):
            file = REPOSITORY / (module[1].replace(".", "/") + ".py")
            source = (file if file.exists() else file.with_suffix("") / "__main__.py").read_text()
            assert all(f'"{option}"' in source for option in re.findall(r"--\w+", module[2])), command
        else:
            assert parsed or not re.match(r"grpo |.*(grpo_ref_split|ref_server|generate)\.py", command), command


def test_pages_have_commands_and_a_wrong_one_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert sum(len(commands(page)) for page in PAGES) > 90
    assert len(commands(PAGES[0])) > 15
    with pytest.raises(SystemExit):
        parse("CUDA_VISIBLE_DEVICES=0 deepspeed -q grpo_ref_split.py --learning_rates 1")
    assert "did you mean learning_rate?" in capsys.readouterr().err
