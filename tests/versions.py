"""Run the fast tests and the demo with the lowest and with the newest versions that pyproject.toml allows.

    make test-versions                        both, in .venv-lowest and .venv-newest
    python tests/versions.py lowest

An environment is made anew: 3 to 6 GB where pip takes torch's CUDA build. The last lines say what held.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parent.parent
INSTALLED = ".[lora,quantization,gguf,math,postgres,dev]"
SHOWN = "torch", "transformers", "deepspeed", "datasets", "numpy", "peft"
VERSIONS = "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
CHECKS = {"fast tests": ["-m", "pytest", "-n", "2", "-q", "--thin"], "demo": ["-m", "demo"]}


def lowest_versions() -> list[str]:
    """Return `name==version` for the lower end of each range of what a user installs."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [text for name, texts in project["optional-dependencies"].items() if name != "dev" for text in texts]
    ranges = [Requirement(text) for text in (*project["dependencies"], *extras)]
    ends = [(each.name, part.version) for each in ranges for part in each.specifier if part.operator == ">="]
    return [f"{name}=={version}" for name, version in ends]


def try_versions(kind: str) -> tuple[str, bool]:
    """Make an environment, run the checks in it, and return what held, and whether all did."""
    folder = REPOSITORY / f".venv-{kind}"
    venv.create(folder, with_pip=True, clear=True)
    python, constraints = str(folder / "bin/python"), folder / "constraints.txt"
    constraints.write_text("\n".join(lowest_versions() if kind == "lowest" else []))
    install = [python, "-m", "pip", "install", "-q", "-c", str(constraints), "-e", INSTALLED]
    if subprocess.run(install, cwd=REPOSITORY).returncode != 0:
        return f"{kind}: cannot be installed", False
    codes = {name: subprocess.run([python, *words], cwd=REPOSITORY).returncode for name, words in CHECKS.items()}
    versions = subprocess.check_output([python, "-c", VERSIONS, *SHOWN], text=True).strip()
    held = ", ".join(f"{name} {'failed' if code else 'passed'}" for name, code in codes.items())
    return f"{kind}: {versions}: {held}", not any(codes.values())


if __name__ == "__main__":
    results = [try_versions(kind) for kind in sys.argv[1:] or ("lowest", "newest")]
    print(*(line for line, _ in results), sep="\n")
    sys.exit(not all(passed for _, passed in results))
