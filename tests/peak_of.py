"""Runs grpo_ref_split.py and prints how far a function of ours took the process's memory. Arguments: FUNCTION OPTIONS.

FUNCTION is module:name, as in grpo.resume:Checkpoints.save; printed is "MEMORY before=MiB peak=MiB" for each call.
"""

import importlib
import runpy
import sys
from functools import reduce
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def mebibytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) // 1024


def measure(module: str, function: str) -> None:
    *path, name = function.split(".")
    owner = reduce(getattr, path, importlib.import_module(module))
    real = getattr(owner, name)

    def measured(*arguments, **options):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = mebibytes("VmRSS")
        value = real(*arguments, **options)
        print(f"MEMORY before={before} peak={mebibytes('VmHWM')}", flush=True)
        return value

    setattr(owner, name, measured)


if __name__ == "__main__":
    measure(*sys.argv[1].split(":"))
    sys.argv = ["grpo_ref_split.py", *sys.argv[2:]]
    runpy.run_path("grpo_ref_split.py", run_name="__main__")
