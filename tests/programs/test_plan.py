"""The plan that `grpo launch` shows, and what it writes for SLURM and Kubernetes."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib

import pytest
import yaml
from conftest import REPOSITORY
from servers import wait_until

from grpo.clusters import k8s, slurm, ssh
from grpo.clusters.plan import OF_POOL, roles_of, share_of
from grpo.config.command_line import parse_arguments, to_yaml
from grpo.config.errors import ConfigError
from grpo.config.programs import LaunchConfig, WorkerConfig
from grpo.config.server import ServerConfig
from grpo.launch import launch
from grpo.run.run_folder import is_stop_asked

CARDS = list(map(str, range(8)))
TWO_NODES = ["--config", "configs/two_nodes.yaml", "--nnodes=2", "--gpus_per_node=8", "--output_dir=/runs/first"]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def planned(*words: str) -> tuple[LaunchConfig, list]:
    config = parse_arguments(LaunchConfig, "", [*TWO_NODES, *words])
    return config, roles_of(config)


def test_the_plan_counts_programs_and_gpus_and_says_who_waits_for_whom(capsys, tmp_path):
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8")
    words = ["--on=ssh", f"--hostfile={tmp_path}/hosts", "--output_dir=/runs/first", "--config=configs/two_nodes.yaml"]
    words += ["--workers=3", "--prompts_per_step=48", "--print_plan"]
    assert launch(parse_arguments(LaunchConfig, "", words)) == 0
    rows = {line.split()[0]: re.split("  +", line) for line in capsys.readouterr().out.splitlines()}
    assert rows["trainer"][1:6] == ["12", "1", "8", "64", "server and pool"]
    assert rows["server"][1:6] == ["1", "1", "8", "64", "-"]
    assert rows["pool"][1:6] == ["1", "0", "2", "8", "-"] and "--pool_file /runs/first.pool" in rows["pool"][-1]
    assert rows["worker"][1:6] == ["3", "1", "8", "64", "pool"]
    with pytest.raises(ConfigError, match="^nnodes=3: the hostfile names 2 machines: leave it out"):
        launch(parse_arguments(LaunchConfig, "", [*words, "--nnodes=3"]))


def settings_for(text: str, tmp_path, *words: str) -> LaunchConfig:
    """What a machine's launcher reads."""
    (tmp_path / "settings.yaml").write_text(text)
    (tmp_path / "token").write_text("secret\n")
    return parse_arguments(LaunchConfig, "", [f"--config={tmp_path}/settings.yaml", *words])


def test_slurm_s_job_starts_a_launcher_of_the_same_run_on_each_node(tmp_path):
    config, _ = planned("--on=slurm", "--workers=3", "--min_ranks=4", "--prompts_per_step=48", "--on_args=-p gpu")
    script = tmp_path / "job"
    script.write_text(slurm.job(config))
    subprocess.run(["bash", "-n", script], check=True)
    asked = re.findall("^#SBATCH (.*)", script.read_text(), re.MULTILINE)
    wanted = ["--nodes=1-2", "--gpus-per-node=8 --exclusive --mem=0", "-p gpu", "--output=/runs/first.log", "--requeue"]
    assert set(wanted) <= {*asked}
    joined = script.read_text().replace("\\\n", " ")
    (command,) = re.findall(r'--config "\$folder/settings.yaml".*', joined)
    values = {"$folder": str(tmp_path), "$SLURM_NNODES": "2", "$first": "n1", "$((port + 1))": "21", "$port": "20"}
    for name, value in values.items():
        command = command.replace(name, value)
    settings = script.read_text().partition("<< 'END'\n")[2].partition("END")[0]
    node = settings_for(settings, tmp_path, *shlex.split(command.rstrip("& ")), "--node_rank=1")
    assert node.output_dir == "/runs/first" and node.starts_server and node.pool == "http://n1:22"
    assert share_of(node, CARDS).world_size == share_of(config, CARDS).world_size == 12
    assert share_of(node, CARDS).worker_cards == ["6", "7"]


FAKE_SLURM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
"srun "*) trap 'exit '$CODE TERM; touch "$CALLS.began"; while true; do sleep 0.1; done ;;
"squeue "*%T) echo $STATE; cp run-launch-*/token "$CALLS.token" ;;
"squeue "*) echo "1.0 trainers" ;;
"scancel "*) pkill -TERM -P $PPID -f /srun ;;
"scontrol show node"*) echo NodeAddr=n1 ;;
"scontrol show"*) echo n1 ;;
esac
"""


@pytest.mark.parametrize(
    "state, code, is_queued", [("RUNNING", 143, True), ("COMPLETING", 143, False), ("RUNNING", 0, False)]
)
def test_slurm_s_job_queues_itself_after_a_signal_but_not_after_scancel_or_the_last_step(
    state, code, is_queued, tmp_path
):
    config, _ = planned("--on=slurm", f"--output_dir={tmp_path}/run")
    (tmp_path / "job").write_text(slurm.job(config))
    for name in ("srun", "squeue", "scancel", "scontrol"):
        (tmp_path / name).write_text(FAKE_SLURM)
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}
    variables |= {"STATE": state, "CODE": str(code)} | ({"GRPO_REF_TOKEN": "secret"} if code == 143 else {})
    variables |= {"SLURM_JOB_NODELIST": "n", "CALLS": f"{tmp_path}/calls", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", tmp_path / "job"], env=variables, start_new_session=True)
    wait_until((tmp_path / "calls.began").exists, 20, job)
    # SLURM signals all processes of a cancelled job, and of another one the script alone.
    os.kill(job.pid, signal.SIGTERM) if state == "RUNNING" else os.killpg(job.pid, signal.SIGTERM)
    assert job.wait(20) == code
    token = (tmp_path / "calls.token").read_text().strip()
    assert token == "secret" if code == 143 else len(token) == 44
    assert ("scontrol requeue 1" in (tmp_path / "calls").read_text()) == is_queued
    assert not list(tmp_path.glob("run-launch-*"))


@pytest.mark.parametrize("on", ["slurm", "k8s"])
def test_a_command_of_several_lines_and_an_odd_folder_are_only_text(on, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_COMMAND", "grpo launch --system_prompt 'One\nkind: two\n'")
    folder = tmp_path / "its: #1 'run' %j"
    config, roles = planned(f"--on={on}", "--image=r/grpo" if on == "k8s" else "--nnodes=2", f"--output_dir={folder}/a")
    if on == "k8s":
        job = next(each for each in yaml.safe_load_all(k8s.manifests(config, roles)) if each["kind"] == "Job")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["volumeMounts"][0]["mountPath"] == str(folder) and container["image"] == "r/grpo"
    else:
        before, _, after = slurm.job(config).partition("#SBATCH")
        assert all(line.startswith("#") for line in before.splitlines())
        (output,) = re.findall("--output=(.*)", after)
        assert shlex.split(output) == [f"{folder}/a.log".replace("%", "%%")]


def test_an_address_of_the_pools_database_is_in_kubernetes_secret_alone():
    url = "postgresql://grpo:s3cret@db/run1"
    place = [f"--pool_url={url}", "--pool_folder=s3://bucket/run1"]
    text = k8s.manifests(*planned("--on=k8s", "--image=r/grpo", "--workers=4", *place))
    manifests = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}
    assert manifests["Secret", "grpo-first"]["stringData"]["pool_url"] == url and text.count("s3cret") == 1
    (container,) = manifests["Deployment", "grpo-first-pool"]["spec"]["template"]["spec"]["containers"]
    assert "--pool_url $(POOL_URL) --pool_folder s3://bucket/run1" in " ".join(container["args"])
    (variable,) = container["env"]
    assert variable["name"] == "POOL_URL" and variable["valueFrom"]["secretKeyRef"]["key"] == "pool_url"


def test_what_kubernetes_starts_finds_the_others(tmp_path):
    config, roles = planned("--on=k8s", "--image=r/grpo", "--workers=4", "--worker_args=--engine vllm", "--seed=5")
    manifests = {
        (each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(k8s.manifests(config, roles))
    }
    settings = manifests["ConfigMap", "grpo-first"]["data"]["settings.yaml"]

    def started(kind: str, name: str, program: type):
        pod = manifests[kind, name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["image"] == "r/grpo"
        words = "\n".join(container["args"][1 + (program is LaunchConfig) :]).replace("$(JOB_COMPLETION_INDEX)", "1")
        for place in ("/settings", "/run/secrets/grpo"):
            words = words.replace(f"={place}/", f"={tmp_path}/")
        return container, parse_arguments(program, "", words.splitlines())

    settings_for(settings, tmp_path)
    job = manifests["Job", "grpo-first"]["spec"]
    container, node = started("Job", "grpo-first", LaunchConfig)
    assert job["completions"] == job["parallelism"] == node.nnodes == 2 and node.seed == 5
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    node.check_ranks(share_of(node, CARDS).world_size)
    labels, pod = job["template"]["metadata"]["labels"], job["template"]["spec"]
    assert node.master_addr == f"grpo-first-0.{pod['subdomain']}"
    assert manifests["Service", pod["subdomain"]]["spec"]["selector"] == labels
    _, pool = started("Deployment", "grpo-first-pool", ServerConfig)
    container, worker = started("Deployment", "grpo-first-worker", WorkerConfig)
    (port,) = manifests["Service", "grpo-first-pool"]["spec"]["ports"]
    assert node.pool == worker.pool == f"http://grpo-first-pool:{pool.port}" and port["port"] == pool.port
    assert "--engine" in container["args"] and manifests["Deployment", "grpo-first-worker"]["spec"]["replicas"] == 4
    assert node.token == pool.token == worker.token == "secret"


def test_workers_with_vllm_take_the_trainer_s_file(tmp_path):
    words = "--on=slurm", "--workers=3", "--worker_args=--engine vllm", "--prompts_per_step=48"
    config, _ = planned(*words, "--sequences_per_generate=32")
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml({name: value for name, value in config.changed().items() if name not in OF_POOL}))
    worker = parse_arguments(WorkerConfig, "", [f"--config={file}", *shlex.split(config.worker_args)])
    assert worker.engine == "vllm" and worker.pool == config.pool


def test_a_rendered_token_is_for_nobody_else_to_read(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("")
    file.chmod(0o644)
    config, roles = planned("--on=k8s", "--image=r/grpo", f"--render={file}")
    assert k8s.start(config, roles) == 0
    (secret,) = (each for each in yaml.safe_load_all(file.read_text()) if each["kind"] == "Secret")
    assert len(secret["stringData"]["token"]) > 30 and file.stat().st_mode & 0o777 == 0o600


FAKE_KUBECTL = """#!/bin/sh
case "$*" in
"--context=a get secret grpo-first "*) grep -o 'token: ".*"' "$APPLIED" | cut -d'"' -f2 | tr -d '\\n' | base64 -w 0 ;;
"--context=a apply -f -") cat > "$APPLIED" ;;
*) exit 1 ;;
esac
"""


def test_pods_that_live_on_have_the_token_of_the_next_start(tmp_path, monkeypatch):
    (tmp_path / "kubectl").write_text(FAKE_KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("APPLIED", str(tmp_path / "applied"))
    applied = []
    for _ in range(2):
        assert k8s.start(*planned("--on=k8s", "--image=r/grpo", "--workers=4", "--on_args=--context=a")) == 0
        applied.append((tmp_path / "applied").read_text())
    assert applied[0] == applied[1] and applied[0].count("token: ") == 1


def test_runs_have_names_of_their_own_on_kubernetes():
    long = "qwen2.5-7b-instruct-gsm8k-lora-r64-beta-0.0"
    folders = ["first", "seed_1", "seed-1", "Seed-1", "Первый", "第二", f"{long}1", f"{long}4"]
    configs = [planned("--on=k8s", "--image=r/grpo", f"--output_dir=/runs/{folder}")[0] for folder in folders]
    names = [k8s.name_of(config) for config in configs]
    assert names[0] == "grpo-first" and names[2] == "grpo-seed-1" and len({*names}) == len(names)
    assert all(re.fullmatch("[a-z0-9-]{1,54}", name) for name in names)


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--on=slurm"], "on='slurm': there is no sbatch here: start this on a login node, or --render FILE"),
        (["--on=k8s", "--image=a"], "on='k8s': there is no kubectl here: install it, or --render FILE"),
        (
            ["--on=k8s", "--image=a", "--output_dir=first"],
            "output_dir='first': name a folder in the pods' shared volume",
        ),
        (["--on=k8s", "--image=a", "--render=/nowhere/a"], "render='/nowhere/a': No such file or directory: name a"),
        (["--on=slurm", "--render=/nowhere/a"], "render='/nowhere/a': No such file or directory: name a"),
        (["--on=slurm", "--workers=16"], "workers=16: they leave no GPU to the trainer, of 8 on each machine"),
        (["--on=slurm", "--prompts_per_step=7"], "prompts_per_step=7: 15 ranks cannot share it equally"),
    ],
)
def test_a_plan_that_cannot_start_is_refused(words, sentence, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    if "k8s" not in words[0]:
        words = [*words, f"--output_dir={tmp_path}/run"]
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        launch(parse_arguments(LaunchConfig, "", [*TWO_NODES, *words]))


def test_an_engine_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "grpo.clusters.ray", raising=False)
    with pytest.raises(ConfigError, match=r"^on='ray': .* has no ray: pip install 'grpo-ref-split\[ray\]'"):
        launch(parse_arguments(LaunchConfig, "", [*TWO_NODES, "--on=ray"]))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert "ray" in project["optional-dependencies"]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("a slots=8\na slots=8", "line 2 is 'a slots=8': write 'HOST slots=GPUS', each host once"),
        ("# mine\n\na slot=8", "line 3 is 'a slot=8'"),
        ("2001:db8::1 slots=8", "line 1 is '2001:db8::1 slots=8'"),
        ("a slots=8\nb slots=4", r"its machines have \[4, 8\] slots: give all as many"),
        ("", "it names no machine"),
    ],
)
def test_a_hostfile_with_a_mistake_is_refused(text, reason, tmp_path):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=f"^hostfile='.*hosts': {reason}"):
        ssh.read_hosts(str(tmp_path / "hosts"))
    (tmp_path / "hosts").write_text("a slots=8  # the first\nme@b slots=8\n")
    assert ssh.read_hosts(str(tmp_path / "hosts")) == (["a", "me@b"], 8)


FAKE_SSH = """#!/bin/sh
case "$*" in
*" away "*) echo "cd: no such folder" >&2; exit 1 ;;
*" hangs "*) exec sleep 60 ;;
*"--node_rank 1"*) exit 2 ;;
*--node_rank*) head -c 1 > /dev/null; exit 130 ;;
esac
"""


@pytest.fixture
def by_ssh(tmp_path, monkeypatch):
    """`by_ssh(host)`: the exit code of a run on it and a second machine, of which that one refuses its settings."""
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("_GRACE", "_BETWEEN"):
        monkeypatch.setattr(ssh, name, 0.2)

    def start(host: str) -> int:
        (tmp_path / "hosts").write_text(f"{host} slots=8\nother slots=8\n")
        words = ["--config=configs/two_nodes.yaml", "--on=ssh", f"--hostfile={tmp_path}/hosts"]
        return launch(parse_arguments(LaunchConfig, "", [*words, f"--output_dir={tmp_path}/run"]))

    return start


def test_a_machine_without_ssh_is_told(by_ssh, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="^on='ssh': there is no ssh here: install it"):
        by_ssh("first")


def test_by_ssh_a_machine_that_lacks_the_folder_is_named_and_no_token_is_written(by_ssh, tmp_path, monkeypatch):
    monkeypatch.setattr(ssh, "shared_files", None)
    with pytest.raises(ConfigError, match="hosts': away cannot be used by ssh: cd: no such folder"):
        by_ssh("away")


def test_a_machine_whose_disk_hangs_is_named(by_ssh, monkeypatch):
    monkeypatch.setattr(ssh, "_ANSWER", 1.0)
    with pytest.raises(ConfigError, match="hosts': hangs cannot be used by ssh: this folder did not answer within 1 s"):
        by_ssh("hangs")


def test_a_machine_that_fails_by_itself_while_another_waits_for_it_is_not_taken_for_lost(by_ssh, tmp_path):
    assert by_ssh("first") == 2
    assert not list(tmp_path.glob("run-launch-*"))


def test_what_an_earlier_grpo_stop_left_does_not_end_the_next_start(by_ssh, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/stop").touch()
    assert by_ssh("first") == 2
    assert not is_stop_asked(tmp_path / "run")


def test_on_in_a_file_of_settings_is_a_name(tmp_path):
    (tmp_path / "run.yaml").write_text("on: slurm\ngpus_per_node: 4\noutput_dir: run\n")
    assert parse_arguments(LaunchConfig, "", [f"--config={tmp_path}/run.yaml"]).on == "slurm"
