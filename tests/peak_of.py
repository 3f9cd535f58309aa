"""Runs grpo_ref_split.py and prints how far a function of ours took the process's memory. Arguments: FUNCTION OPTIONS.

FUNCTION is module:name, as in grpo.run.checkpoints:Checkpoints.save; printed is "MEMORY above=MiB" for each call.
"""

import sys

from killed_at import find, run_trainer

from benchmarks.common import forget_peak, peak_above


def measure(module: str, function: str) -> None:
    owner, name = find(module, function)
    real = getattr(owner, name)

    def measured(*arguments, **options):
        before = forget_peak()
        value = real(*arguments, **options)
        print(f"MEMORY above={peak_above(before) >> 20}", flush=True)
        return value

    setattr(owner, name, measured)


if __name__ == "__main__":
    measure(*sys.argv[1].split(":"))
    run_trainer(sys.argv[2:])
