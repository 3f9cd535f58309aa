"""What `--help` of each program shows."""

import re
from dataclasses import fields

import pytest
from conftest import run_python

from grpo.config.command_line import parse_arguments
from grpo.config.programs import EvaluateConfig, LaunchConfig, ReportConfig
from grpo.config.sampling_settings import ChatConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig

PROGRAMS = {
    TrainerConfig: ["grpo_ref_split.py"],
    LaunchConfig: ["-m", "grpo.launch"],
    ServerConfig: ["ref_server.py"],
    EvaluateConfig: ["-m", "grpo.evaluate"],
    ChatConfig: ["-m", "grpo.chat"],
    ReportConfig: ["-m", "grpo.report"],
}


@pytest.fixture
def help_of(capsys):
    def show(config_class, *topic) -> str:
        with pytest.raises(SystemExit) as ended:
            parse_arguments(config_class, "What it is.", ["--help", *topic])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return show


def shown(text: str) -> set[str]:
    """Return the settings that have an entry."""
    entries = re.findall(r"^  (?:--\w+, )?--(\w+)", text, re.MULTILINE)
    return {name for name in entries if not name.startswith("no_")} - {"help", "config"}


@pytest.mark.parametrize("config_class", PROGRAMS, ids=lambda config_class: config_class.__name__)
def test_the_short_help_has_what_most_people_touch_and_all_has_all(help_of, config_class):
    everything = {field.name for field in fields(config_class)}
    common = {field.name for field in fields(config_class) if field.metadata["common"]}
    common -= getattr(config_class, "UNCOMMON", set())
    assert shown(help_of(config_class, "all")) == everything
    assert shown(help_of(config_class)) == common
    assert 3 <= len(common) <= (35 if config_class is LaunchConfig else 25)  # the launcher has two programs' settings
    assert (f"{len(everything - common)} more: '--help all' shows" in help_of(config_class)) == (everything != common)


def test_a_switch_before_a_folder_is_a_switch():
    runs = ["runs/a", "runs/b"]
    for words in (["--serve", *runs], ["--serve", "true", *runs], [*runs, "--serve"]):
        config = parse_arguments(ReportConfig, "", words)
        assert (config.runs, config.serve) == (runs, True)


def test_a_topic_is_a_word_of_a_heading_or_a_setting(help_of):
    assert {"use_peft", "lora_r"} < shown(help_of(TrainerConfig, "lora"))
    assert "beta" not in shown(help_of(TrainerConfig, "lora"))
    assert shown(help_of(TrainerConfig, "adam_beta2")) == {"adam_beta2"}


def test_an_entry_says_kind_limits_default_and_what_no_does(help_of):
    text = " ".join(help_of(TrainerConfig, "all").split())
    for entry in (
        "--num_generations INT completions per prompt, whose rewards are compared (1 or more; default: 8)",
        "--reward_weights FLOAT [FLOAT ...] weight of each",
        "--dtype WORD type of the weights and of the forward pass; auto is bfloat16 on a GPU from Ampere on, else "
        "float32 (auto or bfloat16 or float32; default: auto)",
        "--model, --model_name_or_path TEXT hub id",
        "--no_gradient_checkpointing keep activations: more memory, less time",
    ):
        assert entry in text
    assert "None" not in text and "..." not in text.replace(" ...]", "")


def test_only_the_first_rank_prints_it(help_of, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert help_of(TrainerConfig) == ""


@pytest.mark.plain_start
@pytest.mark.parametrize("program", [*PROGRAMS.values(), ["generate.py"]], ids=" ".join)
def test_a_program_says_how_it_is_called_and_fits_the_terminal_before_anything_heavy_is_loaded(program):
    ended = run_python("-X", "importtime", *program, "--help", "all", environment={"COLUMNS": "80"})
    called = program[0] if len(program) == 1 else f"python -m {program[1]}"
    assert ended.returncode == 0 and ended.stdout.startswith(f"usage: {called} ")
    wrapped = re.sub(r"^ {4}\S.*", "", ended.stdout, flags=re.MULTILINE)  # all but commands
    assert max(map(len, wrapped.splitlines())) <= 80
    loaded = set(re.findall(r"^import time: .* (\S+)$", ended.stderr, re.MULTILINE))
    assert "argparse" in loaded and not loaded & {"torch", "deepspeed", "datasets", "matplotlib"}
