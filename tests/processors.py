"""Run the fast tests as other processors compute, and print the bounds that rounding came nearest to.

`make test-processors`, before a release or when a bound changes: each set of instructions that torch has here, MKL's
own choice and its common path, one thread and two. Options are pytest's, to run a part.
"""

import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

NEWEST = torch.backends.cpu.get_cpu_capability().lower()
SETS = ["default", "avx2", "avx512"]


def main(options: list[str]) -> int:
    failed, nearest = [], {}
    sets = SETS[: SETS.index(NEWEST) + 1] if NEWEST in SETS else [NEWEST]
    for instructions, mkl, threads in product(sets, ("", "COMPATIBLE"), "12"):
        name = f"ATEN_CPU_CAPABILITY={instructions} MKL_CBWR={mkl or 'unset'} threads={threads}"
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "rounding")
            log.touch()
            changes = {"ATEN_CPU_CAPABILITY": instructions, "TEST_THREADS": threads, "ROUNDING_LOG": str(log)}
            changes["OMP_WAIT_POLICY"] = "passive"  # spinning threads are twelve times as slow on few cores
            environment = {**os.environ, **changes, **({"MKL_CBWR": mkl} if mkl else {})}
            command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "--no-header", "--tb=short", *options]
            if subprocess.run(command, env=environment).returncode:
                failed.append(name)
            for line in log.read_text().splitlines():
                share, difference, test = json.loads(line)
                nearest[test] = max(nearest.get(test, (0.0,)), (share, difference, name))
    print("\nnearest to their bounds (difference / bound, difference):")
    for test, (share, difference, name) in sorted(nearest.items(), key=lambda entry: -entry[1][0])[:20]:
        print(f"  {share:.2f}  {difference:.1e}  {test}  ({name})")
    print(f"\nfailed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
