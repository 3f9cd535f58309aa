"""The examples for other languages, run as they stand in the docs: they get what a Python client gets."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import requests
from conftest import ENVIRONMENT, REPOSITORY
from rounding import FORMULA, assert_rounded
from safetensors.numpy import load, save

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node")
DEFAULT_URL = "http://127.0.0.1:59875"


@pytest.fixture
def right(server) -> np.ndarray:
    """Of the docs' request: completions 7 6 and 5 after 9 8."""
    numbers = {"input_ids": [9, 8, 7, 6, 9, 8, 5], "prompt_lengths": [2, 2], "completion_lengths": [2, 1]}
    body = save({name: np.array(values, np.int32) for name, values in numbers.items()})
    return load(requests.post(server.url + "/v1/logprobs", data=body, timeout=60).content)["logprobs"]


def run(command: list[str], folder=REPOSITORY, **environment: str) -> subprocess.CompletedProcess:
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env={**ENVIRONMENT, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def numbers(output: str) -> list[float]:
    return [float(word) for word in output.replace(",", " ").strip("[] \n").split()]


@needs_curl
def test_the_curl_example_in_the_docs_works(server, right, tmp_path):
    text = (REPOSITORY / "docs/protocol.md").read_text().split("```sh\n")[1].split("```")[0]
    assert text.count(DEFAULT_URL) == 1
    done = run(["sh", "-e", "-c", text.replace(DEFAULT_URL, server.url)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert_rounded(numbers(done.stdout), right, FORMULA)


@needs_node
def test_the_javascript_client_works(server, right):
    done = run(["node", "examples/client.mjs", server.url])
    assert done.returncode == 0, done.stderr
    assert_rounded(numbers(done.stdout), right, FORMULA)


@needs_node
def test_the_javascript_client_says_what_the_server_refuses(server):
    done = run(["node", "examples/client.mjs", server.url + "/elsewhere"])
    assert done.returncode == 1 and done.stderr.startswith("404 not_found: this server answers")
