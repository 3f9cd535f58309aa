"""Pools and workers of real runs: their processes, and what a pool's file holds."""

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

from conftest import ENVIRONMENT, REPOSITORY, running_server


def pool(folder: Path, port: int | None = None):
    """A pool with its file in the folder."""
    return running_server("", folder, "--task", "rollouts", "--pool_file", str(folder / "pool.sqlite"), port=port)


class Worker:
    """A `generate.py` process that keeps its weights and its log in a folder."""

    def __init__(self, url: str, folder: Path, name: str, *options: str):
        self.url, self.folder, self.name, self.log = url, folder, name, folder / f"{name}.log"
        words = ["generate.py", "--engine", "transformers", "--pool", url, "--name", name, *options]
        with open(self.log, "a") as output:
            command = [sys.executable, "-u", *words, "--weights_folder", str(folder / name)]
            pipes = {"stdout": output, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, **pipes)

    def end(self, number: int = signal.SIGKILL) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def workers(url: str, folder: Path, *names: str):
    """Workers on their way, in a list: what is in it at the end is ended."""
    running = [Worker(url, folder, name) for name in names]
    try:
        yield running
    finally:
        for worker in running:
            worker.end()


def drawn(folder: Path) -> list[tuple]:
    """Every task with its completions, as the pool's file has them."""
    with closing(sqlite3.connect(folder / "pool.sqlite")) as file:
        columns = "group_id, attempt, version, prompt_ids, drawn"
        return file.execute(f"SELECT {columns} FROM tasks ORDER BY group_id, attempt").fetchall()
