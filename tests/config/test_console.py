"""The log as a user sees it: in a file, and on a terminal of 80 columns."""

import os
import pty
import subprocess
import sys

from conftest import REPOSITORY, run_python

CODE = """
import logging
from tqdm import tqdm
from grpo.config.console import start_logging
start_logging()
for step in tqdm(range(2)):
    logging.getLogger("grpo.x").info("hello")
    logging.getLogger("grpo.x").warning("careful")
"""


def test_a_file_has_levels_and_no_colour():
    ended = run_python("-c", CODE, check=True)
    lines = [line.split(" ", 1)[1] for line in ended.stderr.splitlines() if "grpo.x" in line]
    assert lines == ["grpo.x: hello", "WARNING: grpo.x: careful"] * 2


def test_a_terminal_has_colour_and_lines_of_their_own_above_the_bar():
    number, name = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", CODE], cwd=REPOSITORY, stderr=name)
    os.close(name)
    shown = b""
    while process.poll() is None or b"2/2" not in shown:
        try:
            shown += os.read(number, 4096)
        except OSError:  # Linux: the other end is closed
            break
    os.close(number)
    assert process.wait() == 0
    lines = [line.rpartition("\r")[2] for line in shown.decode().replace("\r\n", "\n").split("\n")]
    assert sum(line.endswith("grpo.x: hello") and "it/s" not in line for line in lines) == 2
    assert sum(line.startswith("\033[33m") and line.endswith("careful\033[0m") for line in lines) == 2


def test_too_few_open_files_are_said_at_the_start():
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from grpo.run.exit import exit_code
exit(exit_code(print, (), ""))
"""
    ended = run_python("-c", code)
    refused = "the system allows this process 64 open files, and it may need 256: raise the limit (ulimit -Hn)"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"-c: error: {refused}\n")
