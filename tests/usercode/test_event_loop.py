"""The one event loop of async code."""

from conftest import run_python

RACE = """
import asyncio, sys, threading
from concurrent.futures import ThreadPoolExecutor
from grpo.usercode.process import run_in_loop

async def find_loop():
    return asyncio.get_running_loop()

def ask(barrier):
    barrier.wait()
    return run_in_loop(find_loop()).result()

sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(32) as threads:
    print(len(set(threads.map(ask, [threading.Barrier(32)] * 32))))
"""


def test_threads_that_come_at_once_share_a_loop():
    assert run_python("-c", RACE, check=True).stdout == "1\n"
