"""A run that ssh, SLURM, Ray and Kubernetes start on two simulated nodes, and take from them on the way, has the
numbers of two ranks that nothing disturbs. `make test-clusters` installs Ray; Debian's packages have the others. Of
Kubernetes there are only its schemas: the test starts what examples/kubernetes.yaml says."""

import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from conftest import ENVIRONMENT, REPOSITORY, free_port, run_python, running_server
from machines import machines
from pools import running_pool
from servers import wait_until
from trainer_runs import OPTIONS, check_weights, options

pytestmark = [pytest.mark.rare, pytest.mark.timeout(600)]
STEPS = 60
ON_CPUS = ENVIRONMENT | {"PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
CONFIG = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=3 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=3 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def settings(model_folder, data_folder, letters, tmp_path_factory) -> Path:
    """A file of settings for the server and the trainer."""
    words = options(model_folder, data_folder, "", **OPTIONS | {"max_steps": STEPS, "eval_steps": STEPS})
    pairs = (word.removeprefix("--").partition("=") for word in words if word != "--no_gradient_checkpointing")
    values = {name: yaml.safe_load(value) if value else True for name, _, value in pairs if name != "output_dir"}
    values |= {"reward_funcs": letters[1:], "gradient_checkpointing": False, "deterministic": True}
    values |= {"importance_sampling_mode": "none"}  # workers then draw what the trainer would draw itself
    path = tmp_path_factory.mktemp("settings") / "settings.yaml"
    path.write_text(yaml.safe_dump(values | {"ref_startup_timeout": 120}))
    return path


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    words = ["--nproc_per_node", "2", "--config", settings, "--port", free_port(), "--output_dir", run]
    done = run_python("-m", "grpo.launch", *words, environment=ON_CPUS)
    assert done.returncode == 0, done.stderr
    return run


def steps_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.fixture
def pool(tmp_path) -> Iterator[str]:
    """The URL of a pool, somewhere that all nodes reach."""
    with running_pool(tmp_path) as served:
        yield served.url


def from_pool(url: str) -> list[str]:
    return ["--sampler=pool", f"--pool={url}", "--max_policy_lag=0"]


def check_same(run: Path, undisturbed: Path) -> None:
    """Compare a run whose workers drew with one that drew itself."""
    # The trainer's own sampler is as near to its log-probs as rounding lets it be, and workers' likewise.
    assert (run / "completions.jsonl").read_text() == (undisturbed / "completions.jsonl").read_text()
    check_weights(run / "model", undisturbed / "model")


@pytest.fixture
def slurm(tmp_path) -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands reach a cluster of two nodes."""
    if shutil.which("slurmctld") is None:
        pytest.skip("SLURM is not installed: apt-get install slurm-wlm")
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    names = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder}
    (folder / "slurm.conf").write_text(CONFIG.format(port=free_port(), ports=(free_port(), free_port()), **names))
    environment = ON_CPUS | {"SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as stack, open(folder / "log", "w") as log:
        for words in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        wait_until(lambda: subprocess.run(["srun", "-N2", "true"], env=environment, timeout=60).returncode == 0)
        yield environment
        subprocess.run(["scancel", "--user", getpass.getuser()], env=environment, check=True)


@pytest.fixture
def ssh(tmp_path) -> Iterator[dict[str, str]]:
    """The environment in which `deepspeed` reaches 127.0.0.1 and 127.0.0.2 by ssh, two machines that are this one."""
    if shutil.which("pdsh") is None or not Path("/usr/sbin/sshd").exists():
        pytest.skip("pdsh or sshd is not installed: apt-get install pdsh openssh-server")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "sshd_config").write_text(
        f"Port {(port := free_port())}\nHostKey {tmp_path}/host\nStrictModes no\nAuthorizedKeysFile {tmp_path}/user.pub"
    )
    (tmp_path / "exported").write_text("GLOO_SOCKET_IFNAME=lo\nOMP_NUM_THREADS=1\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", tmp_path / "sshd_config"])
    client = f"-p {port} -i {tmp_path}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    yield ON_CPUS | {"PDSH_SSH_ARGS_APPEND": client, "DS_ENV_FILE": str(tmp_path / "exported")}
    daemon.terminate()
    daemon.wait()


def test_deepspeed_starts_it_over_ssh_and_ctrl_c_saves(ssh, settings, undisturbed, model_folder, tmp_path):
    run, hosts, log = tmp_path / "run", tmp_path / "hosts", tmp_path / "log"
    hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    words = [Path(sys.executable).with_name("deepspeed"), "--hostfile", hosts, "--no_ssh_check"]
    words += ["--master_addr", "127.0.0.1", "--master_port", free_port(), "grpo_ref_split.py", "--config", settings]
    words += ["--save_steps", 1000, "--output_dir", run, "--resume_from_checkpoint", "last"]
    with running_server(model_folder, tmp_path) as server, log.open("w") as output:
        piped = {"env": ssh, "cwd": REPOSITORY, "stdout": output, "stderr": subprocess.STDOUT}
        command = [*map(str, words), "--ref_servers", server.url]
        started = subprocess.Popen(command, **piped)
        wait_until(lambda: steps_of(run) > 4, 120, started)
        started.send_signal(signal.SIGINT)
        assert started.wait(60) != 0
        wait_until(lambda: any(run.glob("checkpoint-*")), 60)  # DeepSpeed waits for nobody
        assert subprocess.run(command, **piped, timeout=240).returncode == 0, log.read_text()
    check_same(run, undisturbed)


def test_slurm_takes_nodes_of_trainers_and_workers_away_and_gives_them_back(
    slurm, settings, undisturbed, pool, tmp_path
):
    def ask(*words: object) -> str:
        done = subprocess.run(map(str, words), env=slurm, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def state(job: str) -> str:
        return ask("scontrol", "show", "job", job).partition("JobState=")[2].split()[0]

    def take_away(job: str, *command: str) -> None:
        ask(*command)
        wait_until(lambda: state(job) == "PENDING", seconds=60)
        time.sleep(2)  # a start in the second of its end is refused: "Job already killed"
        ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    run, log = tmp_path / "run", tmp_path / "log"
    words = ["--parsable", "--nodes=2", f"--output={log}", "examples/slurm.sbatch", settings, "--output_dir", run]
    job = ask("sbatch", *words, *from_pool(pool), "--save_steps=1000")  # it saves when it is taken away
    wait_until(lambda: state(job) == "RUNNING", seconds=60)  # so that workers get the other cores
    draw = shlex.join([sys.executable, "generate.py", "--pool", pool])
    words = ["--parsable", "--array=0-1", "--requeue", f"--output={tmp_path}/worker-%a", f"--wrap=exec srun {draw}"]
    worker = f"{ask('sbatch', *words)}_0"
    wait_until(lambda: steps_of(run) > 4, seconds=120)
    take_away(worker, "scontrol", "requeue", worker)
    for command in (["scontrol", "requeue", job], ["scancel", "--signal=TERM", "--batch", job]):
        before = steps_of(run)
        wait_until(lambda before=before: steps_of(run) > before + 2, seconds=120)
        take_away(job, *command)
        assert any(run.glob("checkpoint-*")), log.read_text()
    wait_until(lambda: state(job) not in ("PENDING", "RUNNING", "COMPLETING"), seconds=180)
    assert state(job) == "COMPLETED", log.read_text()
    assert len((run / "starts.jsonl").read_text().splitlines()) == 3
    check_same(run, undisturbed)
    assert not list(REPOSITORY.glob(f"slurm-{job}-*"))


def test_ray_loses_a_node_of_trainers_and_workers_and_gets_another(settings, undisturbed, pool, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="pip install ray==2.60.0")
    from ray.cluster_utils import Cluster

    for name, value in ON_CPUS.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    environment = os.environ | {"RAY_ADDRESS": cluster.address}

    def start(program: str, *words: object) -> subprocess.Popen:
        command = [sys.executable, f"examples/{program}.py", *map(str, words)]
        with open(tmp_path / program, "w") as log:
            return subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)

    try:
        node, run = cluster.add_node(num_cpus=3), tmp_path / "run"
        driver = start("ray_launch", 2, settings, "--output_dir", run, *from_pool(pool))
        wait_until(lambda: "waiting for 3 times" in (tmp_path / "ray_launch").read_text(), 60, driver)
        drawing = start("ray_workers", 2, "--pool", pool)
        wait_until(lambda: steps_of(run) > 6, 120, driver)
        cluster.remove_node(node)
        cluster.add_node(num_cpus=3)
        assert driver.wait(240) == 0, (tmp_path / "ray_launch").read_text()
        assert "is lost" in (tmp_path / "ray_launch").read_text()
        assert len((run / "starts.jsonl").read_text().splitlines()) == 2
        check_same(run, undisturbed)
        assert not (tmp_path / "run.token").exists()
        drawing.send_signal(signal.SIGINT)
        assert drawing.wait(30) != 0
    finally:
        cluster.shutdown()


@pytest.fixture
def pods(tmp_path) -> Iterator[dict]:
    """Machines by the names that the others know them by, and two workers."""
    with ExitStack() as stack:
        try:
            names = "grpo-0.grpo", "grpo-1.grpo", "grpo-pool", "worker-0", "worker-1"
            made = stack.enter_context(machines(tmp_path, names))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield made


def test_kubernetes_drains_and_loses_nodes_of_trainers_pool_and_workers(pods, settings, undisturbed, tmp_path):
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate==1.37.0")
    manifests = {}
    for name in ("kubernetes", "kubernetes_workers"):
        for manifest in yaml.safe_load_all((REPOSITORY / f"examples/{name}.yaml").read_text()):
            schemas.validate(manifest, "1.37", strict=True)
            manifests[manifest["kind"], manifest["metadata"]["name"]] = manifest["spec"]
    (tmp_path / "token").write_text("secret")
    places = {"/run/secrets/grpo": tmp_path, "/runs": tmp_path, "/pool": tmp_path, "configs/two_nodes.yaml": settings}
    run, job = tmp_path / "first", manifests["Job", "grpo"]

    def start(stack: ExitStack, pod: str, kind: str, name: str, *more: str) -> subprocess.Popen:
        (container,) = manifests[kind, name]["template"]["spec"]["containers"]
        words = "\n".join([sys.executable, *container["args"], *more]).replace("$(JOB_COMPLETION_INDEX)", pod[5])
        for path, here in places.items():
            words = words.replace(f"={path}", f"={here}")
        return stack.enter_context(pods[pod].running(words.splitlines(), tmp_path / f"{pod}.log"))

    def until(end: Callable[[list[subprocess.Popen]], object]) -> list[int]:
        """Start the Job's pods, let `end` do something to them, and return their exit codes."""
        pool = from_pool("http://grpo-pool:59877")
        with ExitStack() as stack:
            started = [start(stack, f"grpo-{index}.grpo", "Job", "grpo", *pool) for index in range(2)]
            end(started)
            return [pod.wait(180) for pod in started]

    with ExitStack() as stack:
        pool = start(stack, "grpo-pool", "Deployment", "grpo-pool")
        worker, _ = (start(stack, f"worker-{number}", "Deployment", "grpo-worker") for number in range(2))

        def drain(started: list[subprocess.Popen]) -> None:
            wait_until(lambda: steps_of(run) > 6, 120, started[0])
            worker.terminate()
            started[1].send_signal(signal.SIGTERM)

        def lose(started: list[subprocess.Popen]) -> None:
            wait_until(lambda: steps_of(run) > 16, 120, started[0])
            os.killpg(pool.pid, signal.SIGKILL)
            start(stack, "grpo-pool", "Deployment", "grpo-pool")
            wait_until(lambda: steps_of(run) > 24, 120, started[0])
            os.killpg(started[0].pid, signal.SIGKILL)

        created_again, fatal = ([*rule["onExitCodes"]["values"]] for rule in job["podFailurePolicy"]["rules"][1::-1])
        codes = until(drain)
        assert codes == [143, 143] and 143 in created_again, [log.read_text() for log in tmp_path.glob("*.log")]
        start(stack, "worker-0", "Deployment", "grpo-worker")
        assert 0 not in (codes := until(lose)) and not {*codes} & {*fatal}, codes
        assert until(lambda started: None) == [0, 0], [log.read_text() for log in tmp_path.glob("*.log")]
    assert len((run / "starts.jsonl").read_text().splitlines()) == 3
    check_same(run, undisturbed)
