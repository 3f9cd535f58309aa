"""Runs grpo_ref_split.py and prints how often each round of sampling waited for the whole device. Arguments: OPTIONS.

Printed is "WAITS tokens=N device=N" for each call of the sampler, the tokens being those of its longest completion.
"""

import sys

from killed_at import run_trainer

from grpo.sampling.generate import LocalSampler


def count_waits() -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    synchronize, sample = accelerator.synchronize, LocalSampler.sample
    waits = 0

    def counted(*arguments, **options):
        nonlocal waits
        waits += 1
        return synchronize(*arguments, **options)

    def shown(*arguments, **options):
        before = waits
        groups = sample(*arguments, **options)
        tokens = max(len(rollout.completion_ids) for group in groups for rollout in group)
        print(f"WAITS tokens={tokens} device={waits - before}", flush=True)
        return groups

    accelerator.synchronize, LocalSampler.sample = counted, shown


if __name__ == "__main__":
    count_waits()
    run_trainer(sys.argv[1:])
