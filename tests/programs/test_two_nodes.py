"""Two machines train, each with a launcher of its own, and the first has the reference too, as configs/two_nodes.yaml
says it.

They are network namespaces, each with its own name and address, joined by a switch; or, where those cannot be made,
both are this machine.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from conftest import free_port
from machines import NAMES, loopback, machines
from processes import left_of, processes_below
from trainer_runs import OPTIONS, STEPS, check_alike, check_same, options, reach, timeless, went_on

LAUNCH = [sys.executable, "-m", "grpo.launch", "--config", "configs/two_nodes.yaml"]


class Cluster:
    """The machines, with all that a run on them needs."""

    def __init__(self, network, folder: Path, words: list[str]):
        self.network, self.folder, self.words, self.port = network, folder, words, free_port()

    @contextmanager
    def launched(self, run: Path, *more: str, last: str = ""):
        """The two launchers, on their way. `last` is an option that the second alone has."""
        words = [*LAUNCH, *self.words, f"--output_dir={run}", "--nproc_per_node=1", "--nnodes=2", *more]
        words += [f"--master_addr={self.network['node-1'].host}", f"--master_port={self.port}"]
        with ExitStack() as stack:
            yield [
                stack.enter_context(self.network[name].running([*words, *place], self.log(name)))
                for name, place in zip(NAMES, [["--node_rank=0"], ["--node_rank=1", *last.split()]], strict=True)
            ]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def output(self, name: str) -> str:
        return self.log(name).read_text()

    def wait_until(self, words: str, launchers: list[subprocess.Popen]) -> None:
        """Rank 0 has said them."""
        while words not in self.output("node-1"):
            assert all(launcher.poll() is None for launcher in launchers), "".join(map(self.output, NAMES))
            time.sleep(0.01)

    def finish(self, run: Path, *more: str) -> str:
        """Run to a good end; what rank 0 said."""
        with self.launched(run, *more) as launchers:
            codes = [launcher.wait(timeout=240) for launcher in launchers]
        assert codes == [0, 0], "".join(map(self.output, NAMES))
        return self.output("node-1")


def reference_of(launcher: subprocess.Popen) -> psutil.Process:
    (server,) = (
        each for each in psutil.Process(launcher.pid).children() if "ref_server.py" in " ".join(each.cmdline())
    )
    return server


@pytest.fixture(scope="module")
def cluster(model_folder, data_folder, letters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "token").write_text("two-machines-and-no-more")
    changes = {"port": free_port(), "token_file": folder / "token", "ref_startup_timeout": 120, "deterministic": None}
    with ExitStack() as stack:
        try:
            network = stack.enter_context(machines(folder))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"network namespaces cannot be made here, so both machines are this one: {error}")
            network = loopback()
        words = [*options(model_folder, data_folder, "", **OPTIONS | changes), *letters]
        yield Cluster(network, folder, [word for word in words if not word.startswith("--output_dir")])


@pytest.fixture(scope="module")
def undisturbed(cluster) -> Path:
    """The folder of a run on both machines from beginning to end."""
    run = cluster.folder / "undisturbed"
    output = cluster.finish(run)
    assert "machine 0 runs ranks 0 to 0 of 2" in output and "ranks 1 to 1 of 2" in cluster.output("node-2")
    assert [row["step"] for row in timeless(run)] == list(range(STEPS + 1))
    return run


@pytest.mark.slow
def test_two_machines_do_what_two_ranks_on_one_do(cluster, undisturbed):
    run = cluster.folder / "one"
    command = [*LAUNCH, *cluster.words, f"--output_dir={run}", "--nproc_per_node=2"]
    with cluster.network["node-1"].running(command, cluster.log("one")) as launcher:
        assert launcher.wait(timeout=240) == 0, cluster.output("one")
    check_same(undisturbed, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake, sentence",
    [
        ("--nproc_per_node=2", "one machine counts [24] ranks, another one [24]: all must see equally many GPUs"),
        (
            "--node_rank=0",
            "rank 0 was started twice, on node-[12] and on node-[12]: each machine has its own node_rank",
        ),
    ],
)
def test_machines_that_were_started_otherwise_end_at_once(cluster, mistake, sentence):
    if cluster.network["node-1"].host == cluster.network["node-2"].host:
        pytest.skip("both machines are this one")
    with cluster.launched(cluster.folder / "run", last=mistake) as launchers:
        assert 0 not in [launcher.wait(timeout=60) for launcher in launchers]
    for output in map(cluster.output, NAMES):
        assert re.search(sentence, output) and "Traceback" not in output, output


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
                below = [pid for launcher in launchers for pid in processes_below(launcher)]
                os.killpg(hit.pid, number)  # the machine
            else:
                cluster.wait_until("goes on after step", launchers)
                below = [pid for launcher in launchers for pid in processes_below(launcher)]
                reference = reference_of(launchers[0])
                reference.suspend()  # no later round begins before the signal has come
                hit.send_signal(number)  # the launcher alone
                time.sleep(1)
                reference.resume()
            codes = [launcher.wait(timeout=60) for launcher in launchers]
            assert not left_of(below) and 0 not in codes, (name, number)
        outputs = list(map(cluster.output, NAMES))
        if number == signal.SIGKILL:
            assert "another rank has ended" in outputs[0] and "Traceback" not in outputs[0]
        else:
            stopped = r": stopped by signal \d+; .*last --output_dir .* after step (\d+)"
            lines = [re.findall(stopped, output) for output in outputs]
            assert len(lines[0]) == 1 and lines[0] == lines[1] and int(lines[0][0]) > kept, outputs
            kept = int(lines[0][0])
        assert (run / f"checkpoint-{kept}").is_dir()
    assert went_on(cluster.finish(run, "--resume_from_checkpoint=last")) == kept
    check_alike(run, undisturbed)
