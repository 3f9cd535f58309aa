"""generate.py as a program: what it imports, its signals, its exit codes."""

import signal
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, REPOSITORY
from pools import Trainer, running_pool
from processes import signal_another_thread
from servers import wait_until

from grpo.pool.client import PoolClient

LIGHT = """
import sys

sys.argv[0] = "generate.py"

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "deepspeed", "datasets", "bottle", "waitress"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Forbidden())
sys.path[:0] = ["tests"]
import generate
from plain_engine import PlainEngine

def make_engine(config):
    print("makes its engine", file=sys.stderr)
    return PlainEngine()

generate.make_engine = make_engine
code = generate.main()
from importlib.metadata import packages_distributions
ours = {"generate", "grpo", "plain_engine"}
outside = {name.split(".")[0] for name in sys.modules} & packages_distributions().keys() - ours
print(sorted({packages_distributions()[name][0] for name in outside}))
sys.exit(code)
"""


def start(*options: str, script: tuple[str, ...] = ("generate.py",), environment: dict | None = None):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = ENVIRONMENT | (environment or {})
    return subprocess.Popen([sys.executable, *script, *options], cwd=REPOSITORY, env=variables, **pipes)


@pytest.mark.slow
@pytest.mark.plain_start
def test_it_draws_without_the_imports_of_an_engine(pool, model_folder, tmp_path):
    trainer = Trainer(PoolClient(pool.url), model_folder, tmp_path / "trainer")
    trainer.publish(0)
    process = start("--pool", pool.url, script=("-c", LIGHT))
    trainer.wait(trainer.put_tasks(0, range(2)))
    trainer.learn(seed=1)
    trainer.publish(1, whole=False, delta=True)
    trainer.wait(trainer.put_tasks(1, range(2, 4)))
    process.terminate()
    shown, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    needed = {"requests", "urllib3", "certifi", "idna", "charset-normalizer", "numpy", "safetensors", "PyYAML"}
    assert {*eval(shown)} <= needed | {"setuptools"}


@pytest.mark.slow
def test_a_signal_in_the_middle_of_a_group_gives_it_back(pool, model_folder, tmp_path):
    sizes = {"num_generations": 64, "max_completion_length": 2000}  # no group is done in the time of the test
    trainer = Trainer(PoolClient(pool.url), model_folder, tmp_path / "trainer", **sizes)
    trainer.publish(0)
    trainer.put_tasks(0, range(2))
    workers = [start("--pool", pool.url, environment={"TMPDIR": str(tmp_path)}) for _ in range(2)]
    wait_until(lambda: trainer.client.status()["tasks"]["leased"] == 2, seconds=60)
    for worker in workers:  # a worker leases a group before its engine is up
        assert any("the engine draws on CPU, groups at a time: 1" in line for line in worker.stderr)
    signal_another_thread(workers[0], signal.SIGTERM)
    workers[1].send_signal(signal.SIGINT)
    for worker, code in zip(workers, (0, 130), strict=True):
        _, log = worker.communicate(timeout=60)
        assert worker.returncode == code, log
        assert "Traceback" not in log
    assert trainer.client.status()["tasks"] == {"leased": 0, "waiting": 2}
    assert not [*tmp_path.glob("grpo-worker-*")]


@pytest.mark.slow
@pytest.mark.plain_start
def test_what_ends_it_is_one_line_and_said_before_an_engine_is_made(tmp_path):
    (tmp_path / "token").write_text("secret")
    with running_pool(tmp_path, "--token_file", str(tmp_path / "token")) as pool:
        locked = start("--pool", pool.url, script=("-c", LIGHT))
        away = start("--pool", "http://127.0.0.1:9", "--pool_deadline", "0.3", script=("-c", LIGHT))
        logs = [process.communicate(timeout=60)[1] for process in (locked, away)]
    assert locked.returncode == away.returncode == 1
    same = "give pool, trainer and workers the same one, with --token_file FILE or GRPO_REF_TOKEN"
    assert logs[0] == f"generate.py: error: {pool.url} wants a token: {same}\n"
    says = "generate.py: error: no answer from http://127.0.0.1:9 for 0 s (it cannot be reached"
    assert logs[1].splitlines()[-1].startswith(says) and "Traceback" not in logs[1]


INTERRUPTED = """
import os, runpy, signal, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name in ("requests", "bottle", "yaml"):
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.plain_start
@pytest.mark.parametrize("program", ["generate.py", "ref_server.py", "grpo_ref_split.py"])
def test_ctrl_c_during_the_first_imports_is_one_line(program):
    process = start(program, script=("-c", INTERRUPTED))
    _, log = process.communicate(timeout=60)
    assert (process.returncode, log) == (130, f"{program}: error: interrupted before the start\n")
