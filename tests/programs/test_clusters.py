"""A run that `grpo launch` starts by ssh, SLURM, Ray and Kubernetes on two simulated nodes, and that loses nodes and
programs on the way, has the numbers of two ranks that nothing disturbs. `make test-clusters` installs Ray; Debian's
packages have the others. Of Kubernetes there are only its schemas: the test starts what the manifests say."""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import ENVIRONMENT, REPOSITORY, free_port, run_python
from machines import machines
from servers import wait_until
from trainer_runs import OPTIONS, check_drawn_alike, lines, options, weights

pytestmark = [pytest.mark.rare, pytest.mark.timeout(600)]
STEPS = 60
ON_CPUS = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
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
    """A run of two ranks on this machine, which draw themselves."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    words = ["--nproc_per_node", "2", "--config", settings, "--port", free_port(), "--output_dir", run]
    done = run_python("-m", "grpo.launch", *words, environment=ON_CPUS)
    assert done.returncode == 0, done.stderr
    return run


def steps_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def programs_of(run: Path, program: str = "") -> list[psutil.Process]:
    """The processes of a run: of one program, or all."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if program in words and str(run) in words + process.environ().get("GRPO_COMMAND", ""):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def starts_of(run: Path) -> int:
    return len(lines(run / "starts.jsonl"))


def launch_words(on: str, settings: Path, run: Path, *more: object) -> list[str]:
    words = ["-m", "grpo.launch", "--on", on, "--config", settings, "--output_dir", run, "--save_steps=1000", *more]
    return [sys.executable, *map(str, words)]


@contextmanager
def launched(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def refused(command: list[str], environment: dict[str, str] = ON_CPUS) -> str:
    """What a launcher says that starts nothing, within the time of its imports: one line."""
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return line


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


def test_slurm_requeues_the_job_and_a_worker_and_the_pool_are_killed(slurm, settings, undisturbed, tmp_path):
    def ask(*words: object) -> str:
        done = subprocess.run(map(str, words), env=slurm, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def state() -> str:
        return ask("scontrol", "show", "job", job).partition("JobState=")[2].split()[0]

    run, log = tmp_path / "run", tmp_path / "run.log"
    command = launch_words("slurm", settings, run, "--nnodes=2", "--gpus_per_node=0", "--workers=2")
    assert "on='slurm': sbatch: error: invalid partition specified: x" in refused([*command, "--on_args=-p x"], slurm)
    more = "--nnodes=9", "--prompts_per_step=9"
    assert "nnodes=9: the cluster has none such: allocation failure" in refused([*command, *more], slurm)
    done = subprocess.run(command, env=slurm, cwd=REPOSITORY, capture_output=True, text=True)
    (job,) = re.findall(r"job (\d+) is submitted", done.stderr)
    for program, steps in (("generate.py", 4), ("--task rollouts", 8)):
        wait_until(lambda steps=steps: steps_of(run) > steps, seconds=120)
        programs_of(run, program)[0].kill()
    for words in (["scontrol", "requeue", job], ["scancel", "--signal=TERM", "--batch", job]):
        before = steps_of(run)
        wait_until(lambda before=before: steps_of(run) > before + 2, seconds=120)
        ask(*words)
        wait_until(lambda: state() == "PENDING", seconds=60)
        time.sleep(2)  # a start in the second of its end is refused: "Job already killed"
        ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        assert any(run.glob("checkpoint-*")), log.read_text()
    wait_until(lambda: state() not in ("PENDING", "RUNNING", "COMPLETING"), seconds=180)
    assert state() == "COMPLETED", log.read_text()
    assert starts_of(run) == 3 and log.read_text().count("code -9 and starts again") == 2, log.read_text()
    check_drawn_alike(run, undisturbed)
    assert not list(tmp_path.glob("run-launch-*")) and not programs_of(run)


@pytest.fixture
def ssh(tmp_path) -> Iterator[Callable[[str], subprocess.Popen]]:
    """`ssh(address)` starts the ssh server of a machine, 127.0.0.1 or 127.0.0.2; tmp_path/client is ssh's settings."""
    if not Path("/usr/sbin/sshd").exists():
        pytest.skip("sshd is not installed: apt-get install openssh-server")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "sshd_config").write_text(
        f"HostKey {tmp_path}/host\nStrictModes no\nAuthorizedKeysFile {tmp_path}/user.pub\nPidFile none"
    )
    (tmp_path / "client").write_text(
        f"Port {(port := free_port())}\nIdentityFile {tmp_path}/user\nStrictHostKeyChecking no\n"
        "UserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    with ExitStack() as stack:

        def serve(address: str) -> subprocess.Popen:
            options = ["-o", f"ListenAddress={address}:{port}"]
            daemon = subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", tmp_path / "sshd_config", *options])
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)
            return daemon

        yield serve


def lose(machine: subprocess.Popen) -> None:
    """Kill the server and all that it has started, as power does that fails."""
    for process in [*psutil.Process(machine.pid).children(recursive=True), machine]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    machine.wait()


def test_ssh_loses_a_machine_and_gets_it_back_and_ctrl_c_saves(ssh, settings, undisturbed, tmp_path):
    run, hosts, log = tmp_path / "run", tmp_path / "hosts", tmp_path / "log"
    words = [f"--hostfile={hosts}", f"--on_args=-F {tmp_path}/client", f"--port={free_port()}", "--workers=2"]
    command = launch_words("ssh", settings, run, *words, f"--master_port={free_port()}")
    hosts.write_text("127.0.0.1 slots=0\n127.0.0.2 slots=0")
    assert f"hostfile='{hosts}': 127.0.0.1 cannot be used by ssh: " in refused(command)
    ssh("127.0.0.1")
    second = ssh("127.0.0.2")
    with launched(command, log, ON_CPUS) as launcher:
        wait_until(lambda: steps_of(run) > 4, 120, launcher)
        lose(second)
        wait_until(lambda: "waiting for 127.0.0.2" in log.read_text(errors="replace"), 120, launcher)
        ssh("127.0.0.2")
        before = steps_of(run)
        wait_until(lambda: starts_of(run) == 2 and steps_of(run) > before, 120, launcher)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130, log.read_text(errors="replace")
    assert any(run.glob("checkpoint-*")) and not programs_of(run)
    with launched([*command, "--resume_from_checkpoint=last"], log, ON_CPUS) as launcher:
        assert launcher.wait(240) == 0, log.read_text(errors="replace")
    check_drawn_alike(run, undisturbed)
    assert not list(tmp_path.glob("run-launch-*")) and not programs_of(run)


def test_with_min_ranks_the_run_continues_on_the_machine_that_is_left(ssh, settings, undisturbed, tmp_path):
    run, hosts, log = tmp_path / "run", tmp_path / "hosts", tmp_path / "log"
    hosts.write_text("127.0.0.1 slots=0\n127.0.0.2 slots=0\n")
    words = [f"--hostfile={hosts}", f"--on_args=-F {tmp_path}/client", f"--port={free_port()}", "--min_ranks=1"]
    first, _ = ssh("127.0.0.1"), ssh("127.0.0.2")
    command = launch_words("ssh", settings, run, *words, f"--master_port={free_port()}", "--save_steps=5")
    with launched(command, log, ON_CPUS) as launcher:
        wait_until(lambda: steps_of(run) > 6, 120, launcher)
        lose(first)
        assert launcher.wait(240) == 0, log.read_text(errors="replace")
    assert [row["ranks"] for row in lines(run / "starts.jsonl")] == [2, 1]
    # Another number of ranks adds in another order.
    assert (run / "completions.jsonl").read_text() == (undisturbed / "completions.jsonl").read_text()
    expected = weights(undisturbed / "model")
    assert all((weight - expected[name]).abs().max() < 1e-4 for name, weight in weights(run / "model").items())


def test_ray_loses_a_node_of_ranks_and_workers_and_gets_another(settings, undisturbed, postgres, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="pip install ray==2.60.0")
    from ray.cluster_utils import Cluster

    for name, value in ON_CPUS.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    environment, run, log = os.environ | {"RAY_ADDRESS": cluster.address}, tmp_path / "run", tmp_path / "log"
    words = ["--nnodes=2", "--gpus_per_node=0", "--workers=2", f"--pool_url={postgres.new_database()}"]
    command = launch_words("ray", settings, run, *words, f"--pool_folder={tmp_path}/files")
    try:
        assert "nnodes=2: the plan has 6 programs with a CPU each, the cluster 3 CPUs" in refused(command, environment)
        node = cluster.add_node(num_cpus=3)
        run.mkdir()
        (run / "stop").touch()  # of an earlier grpo stop
        with launched(command, log, environment) as launcher:
            for program, steps in (("generate.py", 4), ("grpo_ref_split.py", 8)):
                wait_until(lambda steps=steps: steps_of(run) > steps, 120, launcher)
                programs_of(run, program)[-1].kill()
            wait_until(lambda: starts_of(run) == 2, 120, launcher)
            before = steps_of(run)
            postgres.stop(signal.SIGQUIT)
            time.sleep(1)
            postgres.start()
            wait_until(lambda: steps_of(run) > before + 2, 120, launcher)
            cluster.remove_node(node)
            wait_until(lambda: "waiting for places" in log.read_text().rpartition("starts again")[2], 120, launcher)
            cluster.add_node(num_cpus=3)
            assert launcher.wait(240) == 0, log.read_text()
        assert starts_of(run) == 3 and "a rank ended with code -9" in log.read_text()
        check_drawn_alike(run, undisturbed)
        wait_until(lambda: not programs_of(run), 30)
        assert not list(tmp_path.glob("run-launch-*"))
    finally:
        cluster.shutdown()


@pytest.fixture
def pods(tmp_path) -> Iterator[dict]:
    """Machines by the names that the others know them by, and two workers."""
    with ExitStack() as stack:
        try:
            names = "grpo-first-0.grpo-first", "grpo-first-1.grpo-first", "grpo-first-pool", "worker-0", "worker-1"
            made = stack.enter_context(machines(tmp_path, names))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield made


def test_kubernetes_drains_and_loses_nodes_of_trainers_pool_and_workers(pods, settings, undisturbed, tmp_path):
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate==1.37.0")
    manifests, file, runs = {}, tmp_path / "first.yaml", tmp_path / "runs"
    words = ["--nnodes=2", "--gpus_per_node=0", "--workers=2", "--image=grpo", f"--render={file}"]
    assert subprocess.run(launch_words("k8s", settings, runs / "first", *words), cwd=REPOSITORY).returncode == 0
    for manifest in yaml.safe_load_all(file.read_text()):
        schemas.validate(manifest, "1.37", strict=True)
        manifests[manifest["kind"], manifest["metadata"]["name"]] = manifest.get("spec") or manifest
    (tmp_path / "settings.yaml").write_text(manifests["ConfigMap", "grpo-first"]["data"]["settings.yaml"])
    (tmp_path / "token").write_text(manifests["Secret", "grpo-first"]["stringData"]["token"])
    places = {"/run/secrets/grpo": tmp_path, "/settings": tmp_path, "/pool": tmp_path}
    run, job = runs / "first", manifests["Job", "grpo-first"]

    def start(stack: ExitStack, pod: str, kind: str, name: str) -> subprocess.Popen:
        (container,) = manifests[kind, name]["template"]["spec"]["containers"]
        words = "\n".join([sys.executable, *container["args"]]).replace("$(JOB_COMPLETION_INDEX)", pod[11:12])
        for path, here in places.items():
            words = words.replace(f"={path}", f"={here}")
        return stack.enter_context(pods[pod].running(words.splitlines(), tmp_path / f"{pod}.log"))

    def until(end: Callable[[list[subprocess.Popen]], object]) -> list[int]:
        """Start the Job's pods, let `end` do something to them, and return their exit codes."""
        with ExitStack() as stack:
            names = [f"grpo-first-{index}.grpo-first" for index in range(job["completions"])]
            started = [start(stack, name, "Job", "grpo-first") for name in names]
            end(started)
            return [pod.wait(180) for pod in started]

    with ExitStack() as stack:
        pool = start(stack, "grpo-first-pool", "Deployment", "grpo-first-pool")
        worker, _ = (start(stack, f"worker-{number}", "Deployment", "grpo-first-worker") for number in range(2))

        def drain(started: list[subprocess.Popen]) -> None:
            wait_until(lambda: steps_of(run) > 6, 120, started[0])
            worker.terminate()
            started[1].send_signal(signal.SIGTERM)

        def lose_nodes(started: list[subprocess.Popen]) -> None:
            wait_until(lambda: steps_of(run) > 16, 120, started[0])
            os.killpg(pool.pid, signal.SIGKILL)
            start(stack, "grpo-first-pool", "Deployment", "grpo-first-pool")
            wait_until(lambda: steps_of(run) > 24, 120, started[0])
            os.killpg(started[0].pid, signal.SIGKILL)

        created_again, fatal = ([*rule["onExitCodes"]["values"]] for rule in job["podFailurePolicy"]["rules"][1::-1])
        codes = until(drain)
        assert codes == [143, 143] and 143 in created_again, [log.read_text() for log in tmp_path.glob("*.log")]
        start(stack, "worker-0", "Deployment", "grpo-first-worker")
        assert 0 not in (codes := until(lose_nodes)) and not {*codes} & {*fatal}, codes
        assert until(lambda started: None) == [0, 0], [log.read_text() for log in tmp_path.glob("*.log")]
    assert starts_of(run) == 3
    check_drawn_alike(run, undisturbed)
