"""Two machines train and a third has the reference, each with a launcher of its own, as configs/two_nodes says it.

They are network namespaces, each with its own name and address, joined by a switch; or, where those cannot be made, all
of them are this machine.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import REPOSITORY, free_port
from machines import loopback, machines
from processes import left_of, processes_below
from trainer_runs import OPTIONS, STEPS, check_alike, check_same, options, reach, timeless, went_on

DEEPSPEED = str(Path(sys.executable).with_name("deepspeed"))
CONFIG = "configs/two_nodes/config.yaml"


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with ExitStack() as stack:
        try:
            made = stack.enter_context(machines(tmp_path_factory.mktemp("network")))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"network namespaces cannot be made here, so all machines are this one: {error}")
            made = loopback()
        yield made


class Cluster:
    """The machines, with all that a run on them needs."""

    def __init__(self, network, folder: Path, words: list[str]):
        self.network, self.folder, self.words = network, folder, words
        self.port = free_port()
        hosts = (REPOSITORY / "configs/two_nodes/hostfile").read_text()
        (folder / "hostfile").write_text(hosts.replace("slots=8", "slots=1"))
        self.reference: subprocess.Popen

    @contextmanager
    def launched(self, run: Path, *more: str):
        """The two launchers, on their way."""
        words = [f"--hostfile={self.folder / 'hostfile'}", "--no_ssh", f"--master_addr={self.network['node-1'].host}"]
        words = [DEEPSPEED, "-q", *words, f"--master_port={self.port}"]
        with ExitStack() as stack:
            launchers = []
            for rank, name in enumerate(("node-1", "node-2")):
                command = [*words, f"--node_rank={rank}", *self.program(run), *more]
                launchers.append(stack.enter_context(self.network[name].running(command, self.log(name))))
            yield launchers

    def program(self, run: Path) -> list[str]:
        return ["grpo_ref_split.py", "--config", CONFIG, *self.words, f"--output_dir={run}"]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def output(self, name: str) -> str:
        return self.log(name).read_text()

    def wait_until(self, words: str, launchers: list[subprocess.Popen]) -> None:
        """Rank 0 has said them."""
        while words not in self.output("node-1"):
            assert all(launcher.poll() is None for launcher in launchers), self.output("node-1") + self.output("node-2")
            time.sleep(0.01)

    def finish(self, run: Path, *more: str) -> str:
        """Run to a good end; what rank 0 said."""
        with self.launched(run, *more) as launchers:
            codes = [launcher.wait(timeout=240) for launcher in launchers]
        assert codes == [0, 0], self.output("node-1") + self.output("node-2")
        return self.output("node-1")


def processes_of(launchers: list[subprocess.Popen]) -> list[int]:
    return [pid for launcher in launchers for pid in processes_below(launcher)]


@pytest.fixture(scope="module")
def cluster(network, model_folder, data_folder, letters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "token").write_text("two-machines-and-a-third")
    with_reference = {"port": free_port(), "token_file": folder / "token"}
    url = f"http://{network['other-machine'].host}:{with_reference['port']}"
    changes = OPTIONS | with_reference | {"ref_servers": url, "ref_startup_timeout": 120}
    made = Cluster(network, folder, [*options(model_folder, data_folder, "", **changes), *letters])
    server = [sys.executable, "ref_server.py", "--config", CONFIG, f"--model_name_or_path={model_folder}"]
    server += ["--host=0.0.0.0", "--deterministic=true"]
    server += [f"--{name}={value}" for name, value in with_reference.items()]
    with network["other-machine"].running(server, made.log("other-machine")) as made.reference:
        yield made


@pytest.fixture(scope="module")
def undisturbed(cluster) -> Path:
    """The folder of a run on both machines from beginning to end."""
    run = cluster.folder / "undisturbed"
    cluster.finish(run)
    assert [row["step"] for row in timeless(run)] == list(range(STEPS + 1))
    return run


@pytest.mark.slow
def test_two_machines_do_what_two_ranks_on_one_do(cluster, undisturbed):
    run = cluster.folder / "one"
    command = [DEEPSPEED, "-q", "--num_gpus=2", f"--master_port={cluster.port}", *cluster.program(run)]
    with cluster.network["node-1"].running(command, cluster.log("one")) as launcher:
        assert launcher.wait(timeout=240) == 0, cluster.output("one")
    check_same(undisturbed, run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_or_stopped_on_one_machine_all_end_and_the_run_goes_on(cluster, undisturbed, few):
    run, kept = cluster.folder / "run", 2
    signals = few([("node-2", signal.SIGINT), ("node-1", signal.SIGTERM)], 1)
    for name, number in (("node-2", signal.SIGKILL), *signals):
        with cluster.launched(run, "--resume_from_checkpoint=last") as launchers:
            hit = launchers[name == "node-2"]
            if number == signal.SIGKILL:
                reach(launchers[0], run, kept + 1)
                below = processes_of(launchers)
                os.killpg(hit.pid, number)  # the machine
            else:
                cluster.wait_until("goes on after step", launchers)
                below = processes_of(launchers)
                cluster.reference.send_signal(signal.SIGSTOP)  # no later round begins before the signal has come
                os.kill(hit.pid, number)  # the launcher alone
                hit.wait(timeout=60)
                time.sleep(1)
                cluster.reference.send_signal(signal.SIGCONT)
            codes = [launcher.wait(timeout=60) for launcher in launchers]
            assert not left_of(below) and 0 not in codes, (name, number)
        outputs = [cluster.output("node-1"), cluster.output("node-2")]
        if number == signal.SIGKILL:
            assert "another rank has ended" in outputs[0] and "Traceback" not in outputs[0]
        else:
            stopped = r": stopped by signal 15; .*last --output_dir .* after step (\d+)"
            lines = [re.findall(stopped, output) for output in outputs]
            assert len(lines[0]) == 1 and lines[0] == lines[1] and int(lines[0][0]) > kept, outputs
            kept = int(lines[0][0])
        assert (run / f"checkpoint-{kept}").is_dir()
    assert went_on(cluster.finish(run, "--resume_from_checkpoint=last")) == kept
    check_alike(run, undisturbed)
