"""The rules of the house: imports only go down, entries stay light, --help answers before anything heavy is loaded."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, REPOSITORY

# From the bottom up; a module may import from lower levels, and from its own where that makes no circle.
LEVELS = [
    {"config", "loss_config", "server_config", "answer_config", "trainer_config", "records", "loss", "advantages"}
    | {"report_config"},
    {"protocol", "reward_protocol", "update_protocol", "tensor_header", "ref_wire", "weights"}
    | {
        "logprobs",
        "batch",
        "attention",
        "arguments",
        "ending",
        "devices",
        "ranks",
        "stopping",
        "run_files",
        "curves",
        "phases",
    }
    | {"checkpoint_list", "run_lock", "devices"},
    {"data", "model", "rollout", "ref_client", "ref_servers", "checkpoint", "metrics", "rewards", "plots", "ds_config"}
    | {"fair_queue", "scorer", "prompts", "trial"}
    | {"connection", "http_server", "monitor", "estimate", "estimate_report", "adapters", "updates", "ref_update"}
    | {"quantization", "activations", "train_estimate", "train_report", "optimizer", "out_of_memory"}
    | {"reward_functions", "reward_pool", "reward_model", "reward_client", "reward_worker", "reward_prints"},
    {"accuracy", "update", "stalls"},
    {"evaluate", "chat", "collect", "rearrange", "resume", "service", "report", "dry_run", "machines"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
ENTRIES = {
    "ref_server": {"deepspeed", "datasets", "reward"},
    "grpo_ref_split": {"bottle", "waitress", "prometheus_client"},
    "grpo/evaluate": {"bottle", "waitress", "prometheus_client", "deepspeed", "requests"},
    "grpo/chat": {"bottle", "waitress", "prometheus_client", "deepspeed", "requests"},
    "grpo/report": {"bottle", "waitress", "prometheus_client", "deepspeed", "requests", "torch", "datasets"},
}


def imports(path) -> set[str]:
    """Dotted names that a file imports anywhere in it, at its top or where they are used."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("grpo.") and name.split(".")[1] in LEVEL}


def outside(path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - {"grpo"}


def reached(path) -> set[str]:
    """The modules of ours that a file leads to."""
    todo, seen = own(path), set()
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= own(REPOSITORY / f"grpo/{name}.py") - seen
    return seen


def test_every_module_has_a_level():
    assert {path.stem for path in (REPOSITORY / "grpo").glob("*.py")} - {"__init__"} == set(LEVEL)


@pytest.mark.parametrize("name", sorted(LEVEL))
def test_imports_only_go_down(name):
    path = REPOSITORY / f"grpo/{name}.py"
    assert not [other for other in own(path) if LEVEL[other] > LEVEL[name]]
    assert name not in reached(path), "a circle"
    assert not outside(path) & {"ref_server", "grpo_ref_split", "reward", "demo", "deepspeed"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_leads_to_nothing_it_should_not_need(entry):
    path = REPOSITORY / f"{entry}.py"
    everything = outside(path).union(*(outside(REPOSITORY / f"grpo/{name}.py") for name in reached(path)))
    assert not everything & ENTRIES[entry]


def test_the_wire_knows_no_http_library_and_no_torch():
    assert not outside(REPOSITORY / "grpo/protocol.py") & {"bottle", "waitress", "requests", "torch"}


def test_reward_py_needs_nothing_of_ours_and_no_torch():
    assert not {name.split(".")[0] for name in imports(REPOSITORY / "reward.py")} & {"grpo", "torch", "numpy"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_help_answers_before_anything_heavy_is_loaded(entry):
    script = f"""
import runpy, sys
sys.argv = ["{entry}.py", "--help"]
try:
    runpy.run_path("{entry}.py", run_name="__main__")
except SystemExit as ended:
    print("exit", ended.code, sorted({{"torch", "deepspeed", "datasets", "matplotlib"}} & sys.modules.keys()))
"""
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines()[-1] == "exit 0 []"
    commands = (f"python {entry}.py", f"deepspeed {entry}.py", f"python -m {entry.replace('/', '.')}")
    assert "--config" in shown and any(command in shown for command in commands)


# What brings each program to its first import of torch.
TO_TORCH = {
    "ref_server": ["--estimate"],
    "grpo_ref_split": [],
    "grpo/evaluate": ["--model", ".", "--dataset", "."],
    "grpo/chat": ["--model", "."],
}


OWN = "max_split_size_mb:64"


@pytest.mark.parametrize(
    ("entry", "given", "expected"),
    [
        *((entry, {}, ["expandable_segments:True"] * 2) for entry in TO_TORCH),
        ("grpo_ref_split", {"PYTORCH_ALLOC_CONF": OWN}, [OWN, None]),
        ("grpo_ref_split", {"PYTORCH_CUDA_ALLOC_CONF": OWN}, [None, OWN]),
    ],
)
def test_the_allocator_is_set_before_torch_is_loaded(entry, given, expected):
    """torch reads these variables before CUDA is initialised, and some versions when they are loaded."""
    script = f"""
import os, runpy, sys
def on_event(event, arguments):
    if event == "import" and arguments[0] == "torch":
        print([os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")], flush=True)
        os._exit(0)
sys.addaudithook(on_event)
sys.argv = {[f"{entry}.py", *TO_TORCH[entry]]}
runpy.run_path("{entry}.py", run_name="__main__")
"""
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.endswith("ALLOC_CONF")} | given
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines()[-1] == str(expected)


def test_every_module_stands_in_the_map_for_contributors():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    known = {file for line in text.splitlines() if line.startswith("| `") for file in re.findall(r"`([a-z_.]+)`", line)}
    assert known >= {path.name for path in (REPOSITORY / "grpo").iterdir() if path.suffix in (".py", ".html")} - {
        "__init__.py"
    }
