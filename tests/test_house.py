"""The rules of the house: imports only go down, entries stay light, files and functions stay small."""

import ast
import functools
import re
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, REPOSITORY

# What the files of a folder of grpo/ may import beside their own folder's. The programs may import anything.
MAY_IMPORT = {
    "config": set(),
    "wire": set(),
    "algorithm": {"config"},
    "usercode": {"config"},
    "client": {"config", "wire"},
    "model": {"config", "wire"},
    "data": {"config", "model", "wire"},
    "server": {"config", "model", "wire"},
    "pool": {"client", "config", "server", "wire"},
    "kernels": {"model"},
    "sampling": {"config", "data", "kernels", "model", "wire"},
    "rewards": {"client", "config", "model", "usercode", "wire"},
    "tools": {"config", "data", "rewards", "usercode", "wire"},
    "agents": {"config", "data", "sampling", "server", "tools", "usercode", "wire"},
    "run": {"config", "data", "model", "wire"},
    "trainer": {
        *("agents", "algorithm", "client", "config", "data", "model", "pool", "rewards", "run", "sampling", "tools"),
        "usercode",
        "wire",
    },
    "report": {"config", "run"},
    "clusters": {"config", "run"},
    "workers": {
        *("agents", "client", "config", "data", "model", "pool", "rewards", "sampling", "tools"),
        "usercode",
        "wire",
    },
}
LONGEST_FUNCTION, MOST_IMPORTS, MOST_UNNAMED = 60, 25, 5  # lines, modules of ours, values that a call gives by place
FILES = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "grpo").rglob("*.py"))
ANSWERS = "grpo/rewards/answers.py"
PROGRAMS = "generate.py", "grpo_ref_split.py", "ref_server.py", "reward.py"
ENTRIES = {
    "ref_server": {"deepspeed", "datasets", "reward"},
    "grpo_ref_split": {"prometheus_client"},
    "generate": {"prometheus_client", "deepspeed", "datasets"},
    "grpo/evaluate": {"prometheus_client", "deepspeed"},
    "grpo/chat": {"prometheus_client", "deepspeed", "requests"},
    "grpo/report/__main__": {"prometheus_client", "deepspeed", "requests", "torch", "datasets"},
}


@functools.cache
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


def ours(path) -> set[str]:
    """Paths of the files of ours that a file imports."""
    files = {f"{name.replace('.', '/')}.py" for name in imports(path) if name.startswith("grpo.")}
    return {file for file in files if (REPOSITORY / file).exists()}


def outside(path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - {"grpo"}


def reached(path) -> set[str]:
    """Paths of the files of ours that a file leads to."""
    todo, seen = ours(path), set()
    while todo:
        file = todo.pop()
        seen.add(file)
        todo |= ours(REPOSITORY / file) - seen
    return seen


def test_every_folder_has_a_rule():
    assert {path.name for path in (REPOSITORY / "grpo").iterdir() if (path / "__init__.py").exists()} == set(MAY_IMPORT)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_it_may(folder):
    wrong = {
        f"{file} imports {other}"
        for file in FILES
        if file.startswith(f"grpo/{folder}/")
        for other in ours(REPOSITORY / file)
        if other.split("/")[1] not in {folder} | MAY_IMPORT[folder]
    }
    assert not wrong


def test_no_imports_go_in_a_circle():
    assert not [file for file in FILES if file in reached(REPOSITORY / file)]


def test_no_module_imports_a_program():
    programs = {"ref_server", "grpo_ref_split", "reward", "demo"}
    assert not {f"{file} imports {name}" for file in FILES for name in outside(REPOSITORY / file) & programs}


def test_one_module_knows_deepspeed():
    assert [file for file in FILES if "deepspeed" in outside(REPOSITORY / file)] == ["grpo/trainer/deepspeed_engine.py"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_leads_to_nothing_it_should_not_need(entry):
    path = REPOSITORY / f"{entry}.py"
    everything = outside(path).union(*(outside(REPOSITORY / file) for file in reached(path)))
    assert not everything & ENTRIES[entry]


def test_the_page_installs_what_a_worker_imports():
    page = (REPOSITORY / "docs/samplers.md").read_text()
    installed = {word.partition("=")[0] for word in re.search(r"/pip install (torch.*)", page)[1].split()}
    files = {"generate.py"} | reached(REPOSITORY / "generate.py")
    imported = set().union(*(outside(REPOSITORY / file) for file in files)) - sys.stdlib_module_names
    # With transformers come huggingface_hub and tqdm, with torch jinja2 and, for a card, triton, with Python from 3.14
    # on annotationlib; the others are for adapters, weights in 4 bits, a card's name, and agents.
    left_out = {"huggingface_hub", "tqdm", "jinja2", "annotationlib", "peft", "bitsandbytes", "pynvml", "triton"}
    needed = imported - left_out - {"bottle", "waitress", "openai"}
    assert {{"PyYAML": "yaml", "pillow": "PIL"}.get(name, name) for name in installed} == needed


def test_the_server_does_not_know_the_trainers_settings():
    trainers = {f"grpo/config/{name}.py" for name in ("trainer", "loss_settings")}
    assert not reached(REPOSITORY / "ref_server.py") & trainers


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("grpo/wire/")])
def test_the_wire_knows_no_http_library_and_no_torch(file):
    assert not outside(REPOSITORY / file) & {"bottle", "waitress", "requests", "torch"}


def test_reward_py_needs_no_torch_and_of_ours_only_how_answers_are_compared():
    assert reached(REPOSITORY / "reward.py") == {ANSWERS} and not ours(REPOSITORY / ANSWERS)
    assert not (outside(REPOSITORY / "reward.py") | outside(REPOSITORY / ANSWERS)) & {"torch", "numpy"}


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
        os._exit(1)  # grpo/run/exit.py lets no 0 pass
sys.addaudithook(on_event)
sys.argv = {[f"{entry}.py", *TO_TORCH[entry]]}
runpy.run_path("{entry}.py", run_name="__main__")
"""
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.endswith("ALLOC_CONF")} | given
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    ).stdout
    assert shown.splitlines()[-1] == str(expected)


def test_the_tree_for_contributors_names_every_folder():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    tree = text.partition("```\nref_server.py ")[2].partition("```")[0]
    listed = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    assert listed == set(MAY_IMPORT)


# A name that many files have leads nobody anywhere, and nobody reads a function of two pages.
def test_names_of_files_are_their_own_and_what_a_reader_takes_at_once_is_small():
    modules = [path for path in (REPOSITORY / "grpo").rglob("*.py") if not path.name.startswith("__")]
    shared = [path for path in modules if sum(path.name == other.name for other in modules) > 1]
    assert len(shared) <= 2, shared
    nodes = [node for path in modules for node in ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    # Of a kernel only what it does: it has as many parameters, a line each, as a launch gives.
    long = {node.name for node in functions if node.end_lineno - first_line(node) >= LONGEST_FUNCTION}
    assert not long and max(len(ours(path)) for path in modules) <= MOST_IMPORTS


def first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    is_kernel = any("triton.jit" in ast.unparse(of) for of in function.decorator_list)
    return function.body[0].lineno if is_kernel else function.lineno


# Where a call gives six values by their places, or parts behind a star, two of one type can be swapped unseen.
def test_a_call_names_its_values():
    unnamed, packed = set(), set()
    for file in [*FILES, *PROGRAMS]:
        nodes = [*ast.walk(ast.parse((REPOSITORY / file).read_text()))]
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            if sum(not isinstance(value, ast.Starred) for value in call.args) > MOST_UNNAMED:
                unnamed.add(ast.unparse(call.func))
        for function in (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            inside = [*ast.walk(function)]
            made = [node.targets[0] for node in inside if isinstance(node, ast.Assign) and has_parts(node.value)]
            names = {name.id for name in made if isinstance(name, ast.Name)}
            for star in (value for node in inside if isinstance(node, ast.Call) for value in node.args):
                parts = star.value if isinstance(star, ast.Starred) else None
                if has_parts(parts) or (isinstance(parts, ast.Name) and parts.id in names):
                    packed.add(f"{file}:{star.lineno}")
    assert unnamed == {"_Logprobs.apply", "ctx.save_for_backward"}  # which torch takes by place alone
    assert not packed


def has_parts(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Tuple | ast.List) and len(value.elts) > 2
