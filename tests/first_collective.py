"""Run as two ranks by test_watchdog.py: the second comes late to the first collective, or to the meeting before it.

first_collective.py late-to-meet|late-to-collective SECONDS FILE

The first makes the file when it begins to wait.
"""

import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist

import grpo.run.watchdog
from grpo.model.devices import p2p_hint

if __name__ == "__main__":
    kind, seconds, waits = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    logging.basicConfig(format="%(message)s")
    grpo.run.watchdog.PATIENCE, grpo.run.watchdog.BEAT = 2.0, 0.25
    late = os.environ["RANK"] == "1"
    if late and kind == "late-to-meet":
        while not waits.exists():
            time.sleep(0.01)
        time.sleep(seconds)
    stalls = grpo.run.watchdog.Watchdog(int(os.environ["RANK"]), 2, p2p_hint(["NVIDIA GeForce RTX 3090"] * 2))
    waits.touch()
    dist.init_process_group("gloo")
    if late and kind == "late-to-collective":
        time.sleep(seconds)
    dist.barrier()
    stalls.met = True
    print("met", flush=True)
    time.sleep(1.0)
    stalls.close()
    dist.barrier()
