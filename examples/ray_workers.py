"""Draw on a Ray cluster: Ray finds a card for each worker, and another one when it loses a node.

    python ref_server.py --task rollouts --pool_file run.sqlite --host 0.0.0.0 --port 59877 --token_file /shared/token
    python examples/ray_workers.py 8 --pool http://HOST:59877 --token_file /shared/token

starts 8 workers for that pool, with options of generate.py, from a node of the cluster or by `ray job submit -- python
...`. The trainer may be anywhere, with `--sampler pool --pool http://HOST:59877`. Repository and Python environment are
at the same path on each node. Ctrl-C ends the workers: others draw what they had begun. Without cards a worker gets a
CPU. It needs ray==2.60.0.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import ray

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from grpo.config.console import start_program  # noqa: E402


@ray.remote(num_cpus=1, max_retries=-1, retry_exceptions=True, scheduling_strategy="SPREAD")
def draw(options: list[str]) -> int:
    """Return the exit code of a worker that was stopped, or refuses its settings. After another Ray calls it again."""
    code = start_program(["generate.py", *options], os.environ, cwd=REPOSITORY).wait()
    if code not in (0, 2, 130):
        time.sleep(5)
        raise RuntimeError(f"a worker ended with code {code}")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", type=int, help="how many, each with a card")
    arguments, options = parser.parse_known_args()
    ray.init()
    cards = 1 if ray.cluster_resources().get("GPU") else 0
    running = [draw.options(num_gpus=cards).remote(options) for _ in range(arguments.workers)]
    return max(ray.get(running))


if __name__ == "__main__":
    sys.exit(main())
