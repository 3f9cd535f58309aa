"""Small real things to test with: a model folder, a dataset, a running reference server, a launched trainer."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# One thread a process, before torch reads it: the tests run several on few cores. torch.set_num_threads would leave a
# server's threads and those of backward passes as many as there are cores, which spin.
os.environ["OMP_NUM_THREADS"] = os.environ.get("TEST_THREADS", "1")
# Containers set it, and each program would compile all of ours anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run on a CPU

import forkserver
import pytest
import requests
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

# What these assert is shown as a test's own.
pytest.register_assert_rewrite(
    "trainer_runs", "models", "experts", "adapters", "servers", "recorded", "processes", "rounding"
)

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from bucket import Bucket, running_bucket  # noqa: E402
from postgres import Postgres, running_postgres  # noqa: E402
from processes import free_port  # noqa: E402

from demo.model import build_model, build_tokenizer  # noqa: E402
from demo.task import write_dataset  # noqa: E402
from grpo.config.server import ServerConfig  # noqa: E402

GSM8K = REPOSITORY.parent / "shared/data/gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GRPO_")},
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    # A launcher that a test kills leaves a folder, which goes with this one.
    "TMPDIR": f"{tempfile.gettempdir()}/grpo-tests-{os.getpid()}",
    "PYTHON_COLORS": "0",  # of help, which tests read, also where FORCE_COLOR is set
}


def run_python(*words, folder: Path = REPOSITORY, environment: dict | None = None, **options):
    """Run the interpreter with these words to its end; return what subprocess.run does, with what it printed."""
    settings = {"cwd": folder, "env": ENVIRONMENT | (environment or {}), "timeout": 240}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, **settings | options)


LAUGHS = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]\n" for i in range(1, 10))
"""a YAML file of a few hundred bytes whose aliases stand for 9 ** 9 values"""

UNKNOWN_HINT = "Unknown" if sys.version_info >= (3, 14) else "'Unknown'"
"""a type hint, as the user writes it, of what only a type checker imports: from Python 3.14 on without quotes"""


def pytest_addoption(parser):
    parser.addoption("--thin", action="store_true", help="run a part of long series, another part with each TEST_SEED")


def pytest_configure(config):
    # A shell that starts the tests in the background ignores the first, nohup the second, and so would every program
    # that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.setdefault("TEST_SEED", str(secrets.randbelow(10_000)))


def pytest_report_header(config):
    return f"TEST_SEED={os.environ['TEST_SEED']} chooses a part of long series" if config.option.thin else None


# Modules that take longest begin first, so that no worker is left alone with one at the end.
LONGEST = {"test_demo.py", "test_resume.py", "test_pool_runs.py", "test_survival.py", "test_two_nodes.py"}
LONGEST |= {"test_agent_run.py", "test_rearrange.py"}

# Fixtures, modules' own too, that start programs through the fork server: its imports take 11 s, so who uses them is
# slow, and the fast tests do without it.
PROGRAMS = {"server", "updated_server", "launch", "limited", "low", "locked", "watched", "served"}


def pytest_collection_modifyitems(config, items):
    """Put the longest modules first, and mark as slow what uses a fixture that starts a program.

    With --thin, leave so many cases of each test that is marked `sampled(count)`.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if PROGRAMS.intersection(item.fixturenames):
            item.add_marker("slow")
    if not config.option.thin:
        return
    series = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            series[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    left_out = set()
    for (name, count), cases in series.items():
        left_out |= set(cases) - set(_some(cases, count, name))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _some(values: Sequence, count: int, name: str) -> list:
    """Return `count` of the values, in their order."""
    places = random.Random(f"{os.environ['TEST_SEED']} {name}").sample(range(len(values)), min(count, len(values)))
    return [values[place] for place in sorted(places)]


Few = Callable[[Sequence, int], list]


@pytest.fixture
def few(request) -> Few:
    """`few(values, count)`: with --thin so many of the values, else all."""
    if request.config.option.thin:
        return lambda values, count: _some(values, count, request.node.nodeid)
    return lambda values, count: list(values)


@pytest.fixture(scope="session", autouse=True)
def forks(tmp_path_factory) -> Iterator[None]:
    """Programs are forks of one process that has imported what is heavy, unless a test is marked plain_start."""
    forkserver.use(ENVIRONMENT, tmp_path_factory.mktemp("forks"))
    Path(ENVIRONMENT["TMPDIR"]).mkdir()
    yield
    forkserver.end()
    shutil.rmtree(ENVIRONMENT["TMPDIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def plain_start(request, monkeypatch) -> None:
    if request.node.get_closest_marker("plain_start"):
        monkeypatch.setattr(subprocess, "Popen", forkserver.PlainPopen)


def write_model(folder: Path, seed: int) -> Path:
    """A Qwen2 of 0.1 M random weights with its tokenizer, as `from_pretrained` reads it."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(seed=0)
    build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", seed=0)


@pytest.fixture(scope="session")
def model(model_folder) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


def thinking_model(model_folder: Path, folder: Path) -> Path:
    """The model with a chat template that opens <think> itself, unless it is told `enable_thinking: false`."""
    from transformers import AutoTokenizer

    shutil.copytree(model_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    thinks = "add_generation_prompt and (enable_thinking is not defined or enable_thinking)"
    tokenizer.chat_template += f"{{% if {thinks} %}}{{{{ '<think>\\n' }}}}{{% endif %}}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "words"
    write_dataset(folder, seed=0, train_size=256)  # each rank tokenizes all of it
    return folder


class Server:
    """A `ref_server.py` process."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path):
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            with suppress(requests.ConnectionError):
                if requests.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"not ready after 120 s: {self.log.read_text()}")

    def resident(self) -> int:
        """MiB of memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) >> 10

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send the signal, wait for the end, return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def running_server(
    folder: Path,
    tmp_path: Path,
    *options: str,
    port: int | None = None,
    environment: dict | None = None,
    code: str = "",
    awaited: bool = True,
) -> Iterator[Server]:
    """Start `python ref_server.py`, on a model folder or its default, and wait until it is ready, if it is `awaited`.

    `code` runs before it, to break something.
    """
    port = port or free_port()
    script = ["ref_server.py"]
    if code:
        run = "runpy.run_path('ref_server.py', run_name='__main__')"
        script = ["-c", f"import runpy, sys\nsys.argv[0] = 'ref_server.py'\n{code}\n{run}"]
    model = ["--model_name_or_path", str(folder)] if folder else []
    command = [sys.executable, *script, *model, "--port", str(port), *options]
    variables, log = ENVIRONMENT | (environment or {}), tmp_path / f"server-{port}.log"
    with open(log, "a") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=output, stderr=subprocess.STDOUT)
    server = Server(process, port, log)
    try:
        if awaited:
            server.wait_ready()
        yield server
    finally:
        server.end()


@pytest.fixture(scope="session")
def server(model_folder, tmp_path_factory) -> Iterator[Server]:
    """A ready server, shared by all tests that do not end or overload it."""
    with running_server(model_folder, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def updated_server(model_folder, tmp_path_factory) -> Iterator[Server]:
    """A ready server whose weights the tests replace; it has those of whoever came last."""
    folder = tmp_path_factory.mktemp("updated")
    options = ["--update_folder", str(folder / "new"), "--deterministic", "true", "--max_batch_tokens", "64"]
    with running_server(model_folder, folder, *options, "--body_timeout", "1") as server:
        yield server


@pytest.fixture
def pool(tmp_path) -> Iterator[Server]:
    """A ready pool of rollouts with its file in `tmp_path`."""
    from pools import running_pool

    with running_pool(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory) -> Iterator[Bucket]:
    with running_bucket(tmp_path_factory.mktemp("bucket")) as bucket:
        yield bucket


@pytest.fixture
def bucket(bucket_server, monkeypatch) -> Bucket:
    """A bucket, to which this process is led, and the programs that it starts."""
    for name, value in bucket_server.environment.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(ENVIRONMENT, name, value)
    return bucket_server


@pytest.fixture(params=["file", "postgres", pytest.param("bucket", marks=pytest.mark.rare)])
def pool_config(request, tmp_path) -> ServerConfig:
    """Settings of a pool without a run, with its rows in a file, or in PostgreSQL where that is installed, there also
    with its files in a bucket."""
    kept = {"pool_file": str(tmp_path / "run.sqlite"), "pool_folder": str(tmp_path / "files")}
    if request.param != "file":
        kept = kept | {"pool_file": None, "pool_url": request.getfixturevalue("postgres").new_database()}
    if request.param == "bucket":
        kept["pool_folder"] = request.getfixturevalue("bucket").new_folder()
    return ServerConfig(task="rollouts", **kept)


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    """This process is the one rank of its group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def launcher(ranks: int) -> list[str]:
    """What stands before a script that the deepspeed launcher starts."""
    command = [str(Path(sys.executable).with_name("deepspeed")), "-q", "--num_gpus", str(ranks)]
    return [*command, "--master_port", str(free_port())]


Launch = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def launch() -> Launch:
    """`launch(ranks, script, *options)`: run a script under the deepspeed launcher to its end."""
    from trainer_runs import training

    def run(ranks: int, script: str, *options: str) -> subprocess.CompletedProcess:
        with training(ranks, [*options], script) as process:
            output, _ = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    return run


@pytest.fixture(scope="session")
def letters(tmp_path_factory) -> list[str]:
    """A third reward function that even the text of random weights earns something from, so that weights move."""
    path = tmp_path_factory.mktemp("rewards") / "own.py"
    path.write_text(
        "def letters(prompts, completions, log_metric, **columns):\n"
        "    for text in completions:\n        log_metric('characters', len(text))\n"
        "    return [len(text) / 100 for text in completions]\n"
    )
    return ["--reward_funcs", "correctness_reward", "format_reward", f"{path}:letters"]


@pytest.fixture(scope="session")
def setting(model_folder, data_folder, letters, tmp_path_factory):
    """`setting(run, kind, **changes)`: the trainer's options. One of the rewards draws a number, by step and rank: with
    `draws` False none does, so that runs on other numbers of ranks are the same."""
    from sharded import ON_CARDS, in_layers
    from trainer_runs import KINDS, OPTIONS, options

    path = tmp_path_factory.mktemp("rewards") / "chance.py"
    path.write_text(
        "import random\nimport numpy as np\nimport torch\n\n"
        "def chance(completions, **columns):\n"
        "    return [random.random() + np.random.random() + torch.rand(1).item() for _ in completions]\n"
    )

    sharded = KINDS["reference updates"] | {"deepspeed": in_layers(ON_CARDS, path.parent)}
    kinds = KINDS | {"sharded": sharded}

    def make(run: Path, kind: str, draws: bool = True, **changes) -> list[str]:
        rewards = [*letters, f"{path}:chance"] if draws else letters
        settings = {**OPTIONS, **kinds[kind], **changes}
        if "distillation_loss" in settings:
            settings["teacher_servers"] = settings["ref_servers"]
        return [*options(model_folder, data_folder, run, **settings), *rewards]

    return make
