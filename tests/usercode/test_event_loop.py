"""The one event loop of async code."""

import subprocess
import sys

from conftest import ENVIRONMENT, REPOSITORY

RACE = """
import asyncio, sys, threading
from grpo.usercode.process import run_in_loop

async def find_loop():
    return asyncio.get_running_loop()

def ask(loops=set(), begin=threading.Barrier(32)):
    begin.wait()
    loops.add(run_in_loop(find_loop()).result())
    return loops

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=ask) for _ in range(31)]
for thread in threads:
    thread.start()
loops = ask()
for thread in threads:
    thread.join()
print(len(loops))
"""


def test_threads_that_come_at_once_share_a_loop():
    command = [sys.executable, "-c", RACE]
    done = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
