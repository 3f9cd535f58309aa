"""`python -m grpo.launch`: what it starts for which settings, and how it all ends."""

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from conftest import REPOSITORY, free_port, run_python
from processes import is_alive, processes_below
from servers import wait_until
from trainer_runs import check_alike, check_drawn_alike, finish, lines, options, training, wait_for_steps

from grpo.clusters.plan import FailureCount, Share, share_of
from grpo.config.errors import ConfigError
from grpo.config.programs import LaunchConfig
from grpo.launch import Programs, launch, visible_cards

MACHINES = {"nnodes": 2, "master_addr": "node-1", "output_dir": "run"}
THIRD = MACHINES | {"nnodes": 3, "node_rank": 2, "prompts_per_step": 12, "min_ranks": 3, "workers": 1}


@pytest.mark.parametrize(
    "settings, cards, numbers, of_ranks, of_server, of_workers",
    [
        ({}, ["0", "1", "GPU-7"], (0, 2, 2), ["0", "1"], ["GPU-7"], []),
        ({"dry_run": True}, ["0", "1", "2"], (0, 2, 2), ["0", "1"], ["2"], []),  # the run's number of ranks
        ({}, ["3"], (0, 1, 1), ["3"], ["3"], []),
        ({"beta": 0.0}, ["0", "1"], (0, 2, 2), ["0", "1"], None, []),
        ({}, [], (0, 1, 1), [], [], []),
        ({"nproc_per_node": 1}, ["0", "1", "2"], (0, 1, 1), ["0", "1"], ["2"], []),
        (MACHINES | {"beta": 0.0}, ["0", "1"], (0, 2, 4), ["0", "1"], None, []),
        (MACHINES | {"beta": 0.0, "node_rank": 1}, ["0", "1"], (2, 2, 4), ["0", "1"], None, []),
        (MACHINES | {"nnodes": 3}, ["0", "1"], (0, 1, 5), ["0"], ["1"], []),
        (MACHINES | {"nnodes": 3, "node_rank": 2}, ["0", "1"], (3, 2, 5), ["0", "1"], None, []),
        (MACHINES | {"node_rank": 1, "nproc_per_node": 1}, [], (1, 1, 2), [], None, []),
        ({"workers": 2}, [*"01234"], (0, 2, 2), ["0", "1"], ["4"], ["2", "3"]),
        ({"workers": 1}, ["0", "1"], (0, 1, 1), ["0"], ["0"], ["1"]),
        ({"workers": 2}, [], (0, 1, 1), [], [], ["", ""]),
        (MACHINES | {"workers": 3}, [*"0123"], (0, 2, 4), ["0", "1"], ["3"], ["2"]),
        (MACHINES | {"workers": 3, "node_rank": 1}, [*"0123"], (2, 2, 4), ["0", "1"], None, ["2", "3"]),
        ({"prompts_per_step": 4, "min_ranks": 3}, [*"012345"], (0, 4, 4), [*"01234"], ["5"], []),
        (THIRD, [*"01234"], (8, 4, 12), [*"0123"], None, ["4"]),
    ],
)
def test_each_machine_has_its_ranks_and_the_first_one_s_last_card_is_the_server_s(
    settings, cards, numbers, of_ranks, of_server, of_workers, monkeypatch
):
    """`numbers`: the machine's first rank, its ranks, and the run's."""
    monkeypatch.setenv("GRPO_REF_TOKEN", "secret")
    first, ranks, world_size = numbers
    places = {"cards": of_ranks, "server_cards": of_server, "worker_cards": of_workers}
    expected = Share(first=first, ranks=ranks, world_size=world_size, **places)
    assert share_of(LaunchConfig(**settings), cards) == expected


def test_no_card_is_taken_where_every_program_leaves_them(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for accelerator, cards in (("cpu", []), ("cuda", ["0", "1"])):
        monkeypatch.setenv("DS_ACCELERATOR", accelerator)
        assert visible_cards() == cards


def test_failures_are_too_many_after_three_without_a_step_in_between(tmp_path):
    failures, metrics = FailureCount(tmp_path), tmp_path / "metrics.jsonl"
    assert [failures.is_last() for _ in range(2)] == [False, False]
    metrics.write_text('{"step": 5}\n')
    assert [failures.is_last() for _ in range(2)] == [False, False]
    metrics.write_text('{"step": 4}\n')  # it went back to a checkpoint, and failed before step 6
    assert failures.is_last()


def test_a_second_start_leaves_the_request_to_stop_to_the_trainer_that_is_there(tmp_path, monkeypatch):
    class Nothing:
        def __init__(self, config, share, folder):
            self.folder = folder

        def run(self) -> int:
            with suppress(BlockingIOError):  # what cleans /tmp locks a folder before it looks inside
                fcntl.flock(os.open(self.folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return 0
            return 2

        def end(self) -> None: ...

    monkeypatch.setattr("grpo.launch.Programs", Nothing)
    config = LaunchConfig(beta=0.0, resume_from_checkpoint="last", output_dir=str(tmp_path))
    locked = "import sys, time; from pathlib import Path; from grpo.run.run_folder import lock_run"
    script = f"{locked}; lock_run(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    (tmp_path / "stop").touch()
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], cwd=REPOSITORY, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout.readline() == b"locked\n"
        assert launch(config) == 2
        assert (tmp_path / "stop").exists()
        trainer.kill()
    assert launch(config) == 2
    assert not (tmp_path / "stop").exists()


def test_a_killed_run_that_was_asked_to_stop_is_not_started_again(tmp_path, monkeypatch):
    (tmp_path / "stop").touch()
    share = Share(first=0, ranks=1, world_size=1, cards=[], server_cards=None, worker_cards=[])
    programs, starts = Programs(LaunchConfig(output_dir=str(tmp_path)), share, tmp_path), []

    def start_trainer() -> None:
        starts.append(subprocess.Popen(["sh", "-c", "kill -9 $$"]))
        programs._ranks.append(starts[-1])

    monkeypatch.setattr(programs, "_start_trainer", start_trainer)
    assert programs.run() == 137 and len(starts) == 1
    (tmp_path / "stop").unlink()
    assert programs.run() == 137 and len(starts) == 4


@pytest.mark.parametrize(
    "settings, starts",
    [
        *[({}, True), ({"beta": 0.0}, False), ({"use_peft": True, "ref": "adapter_off"}, False)],
        *[({"ref": "local"}, False), ({"ref_servers": ["http://other:59875"]}, False), ({"dry_run": True}, True)],
    ],
)
def test_a_server_is_started_where_one_is_asked_and_none_is_named(settings, starts):
    assert LaunchConfig(**settings).starts_server is starts


def test_a_server_that_its_own_trainer_would_not_find_is_refused(monkeypatch):
    monkeypatch.setenv("GRPO_REF_TOKEN", "secret")
    for settings in ({}, {"beta": 0.0, "workers": 1}):
        with pytest.raises(ConfigError, match="^host='192.0.2.1': the trainer asks server and pool at 127.0.0.1"):
            LaunchConfig(host="192.0.2.1", **settings)


def test_what_no_run_can_be_started_with_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for settings, reason in (
        ({"prompts_per_step": 8, "nproc_per_node": 3}, "prompts_per_step=8"),
        ({"output_dir": str(tmp_path)}, "output_dir=.*it holds a run"),
        ({"estimate": True}, "estimate"),  # of a server alone
        ({"task": "reward"}, "task"),
        ({"nnodes": 2}, "master_addr=None"),
        ({"nnodes": 2, "master_addr": "node-1"}, "output_dir=None"),
        (MACHINES, "token_file=None: the other machines ask"),
        (MACHINES | {"master_addr": "2001:db8::1"}, "master_addr='2001:db8::1': server and pool listen by IPv4"),
        ({"node_rank": 1}, "node_rank=1: of 1 machines"),
        ({"workers": 2, "pool": "http://a:1"}, "pool='http://a:1': workers get a pool of their own"),
        ({"workers": 1, "worker_args": "'"}, "worker_args=.*: No closing quotation: quote it as in a shell"),
        ({"min_ranks": 3, "prompts_per_step": 5}, "min_ranks=3: there are 1, and no number from it to that divides"),
        ({"min_ranks": 2}, "min_ranks=2: it does nothing without prompts_per_step"),
        ({"on": "slurm"}, "output_dir=None"),
        ({"on": "slurm", "output_dir": "run"}, "gpus_per_node=None: how many of each machine"),
        ({"on": "ssh", "output_dir": "run"}, "hostfile=None"),
        ({"on": "k8s", "output_dir": "/runs/a", "gpus_per_node": 8}, "image=None"),
    ):
        with pytest.raises(ConfigError, match=reason):
            launch(LaunchConfig(**settings))


def launching(words: list[str]):
    """The launcher on its way."""
    return training(1, words, "-m", "grpo.launch")


def launched(words: list[str]) -> tuple[int, str]:
    """Run the launcher to its end; return its exit code and its output."""
    with launching(words) as process:
        output, _ = process.communicate(timeout=240)
    return process.returncode, output


def children(process: subprocess.Popen) -> dict[int, str]:
    """The programs that a launcher has started, by number."""
    found = {}
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.Error):  # it has ended meanwhile
            found[child.pid] = " ".join(child.cmdline())
    return found


@pytest.mark.slow
def test_a_run_lives_through_the_death_of_server_and_rank_and_goes_on_after_ctrl_c(model_folder, data_folder, tmp_path):
    """Also where the server tells strangers nothing but that it can answer."""
    run, token = tmp_path / "run", tmp_path / "token"
    token.write_text("secret")
    changes = {"max_steps": 200, "port": free_port(), "eval_steps": 0, "save_steps": 2, "report_to": "none"}
    changes |= {"token_file": token}
    words = options(model_folder, data_folder, run, nproc_per_node=2, **changes)
    with launching(words) as process:
        wait_for_steps(process, run, 2)
        started = children(process)
        (server,) = [number for number, command in started.items() if "ref_server.py" in command]
        assert len(started) == 3
        os.kill(server, signal.SIGKILL)
        wait_for_steps(process, run, len(lines(run / "metrics.jsonl")) + 3)
        rank = max(number for number, command in children(process).items() if "grpo_ref_split.py" in command)
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: len(lines(run / "starts.jsonl")) == 2, 60, process)
        started |= children(process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "the reference server ended with code -9 and starts again" in output
    assert "a rank was killed by SIGKILL: the run continues" in output
    assert output.count("stopping after this step") == 1 and output.count(": stopped by signal 2") == 1, output
    assert "Traceback" not in output and "error" not in output
    assert not any(map(is_alive, started))

    done = len(lines(run / "metrics.jsonl"))
    (command,) = re.findall(r"stopped by signal 2; python -m grpo.launch (.*) goes on after step \d+", output)
    code, output = launched([*shlex.split(command), f"--max_steps={done + 2}"])
    assert code == 0, output
    assert [row["step"] for row in lines(run / "metrics.jsonl")] == list(range(1, done + 3))
    first, _, second = [row["command"] for row in lines(run / "starts.jsonl")]
    assert first == shlex.join(["python", "-m", "grpo.launch", *words])
    assert second == f"python -m grpo.launch {command} --max_steps={done + 2}"
    assert second.count("--output_dir") == second.count("--resume_from_checkpoint") == 1
    assert (run / "model/model.safetensors").exists()


@pytest.mark.slow
def test_workers_draw_what_the_trainer_would_though_one_and_their_pool_are_killed(
    model_folder, data_folder, letters, tmp_path
):
    run, alone = tmp_path / "drawn", tmp_path / "alone"
    changes = {"max_steps": 9, "eval_steps": 0, "beta": 0, "report_to": "none", "save_steps": 5}
    changes |= {"importance_sampling_mode": "none"}
    own = {"nproc_per_node": 1, "workers": 2, "port": free_port()}
    with launching([*options(model_folder, data_folder, run, **changes, **own), *letters]) as process:
        for program, steps in (("generate.py", 2), ("--task rollouts", 5)):
            wait_for_steps(process, run, steps)
            os.kill(next(number for number, words in children(process).items() if program in words), signal.SIGKILL)
        started = processes_below(process)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert re.search(r"worker \d ended with code -9 and starts again", output), output
    assert "the pool ended with code -9 and starts again" in output
    assert not any(map(is_alive, started))
    finish(1, [*options(model_folder, data_folder, alone, **changes), *letters])
    check_drawn_alike(run, alone)


SLOW = """
import time

def slow(completions, **columns):
    if len(completions) > 2:  # not the trial before the first step
        open("SIGN", "w").close()
        time.sleep(45)
    return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
@pytest.mark.rare
def test_a_lost_worker_ends_the_run_after_its_step_however_long_that_takes(model_folder, data_folder, tmp_path):
    run, sign, rewards = tmp_path / "run", tmp_path / "sign", tmp_path / "rewards.py"
    rewards.write_text(SLOW.replace("SIGN", str(sign)))
    changes = {"beta": 0, "eval_steps": 0, "reward_funcs": f"{rewards}:slow", "report_to": "none", "workers": 1}
    with launching(options(model_folder, data_folder, run, nproc_per_node=1, port=free_port(), **changes)) as process:
        wait_until(sign.exists, 120, process)
        while process.poll() is None:
            with suppress(psutil.Error):  # one that has just ended
                for child in psutil.Process(process.pid).children():
                    if "generate.py" in " ".join(child.cmdline()):
                        child.kill()
            time.sleep(0.5)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "worker 1 ended 3 times without a step in between" in output, output
    assert [row["step"] for row in lines(run / "metrics.jsonl")] == [1]
    assert (run / "checkpoint-1").exists()


BLIND = """
import os
import grpo.run.exit

def blind(completions, **columns):
    if os.environ["RANK"] == "1":
        grpo.run.exit.is_stop_asked = lambda folder: False
    return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
def test_grpo_stop_ends_a_run_for_good_and_resumed_it_has_the_bits_of_an_undisturbed_one(
    model_folder, data_folder, tmp_path
):
    """Also where one rank never sees the file."""
    changes = {"beta": 0, "eval_steps": 0, "report_to": "none", "reward_funcs": f"{tmp_path}/mine.py:blind"}
    (tmp_path / "mine.py").write_text(BLIND)

    def words(name: str, steps: int, **more) -> list[str]:
        return options(model_folder, data_folder, tmp_path / name, max_steps=steps, **changes, **more)

    run = tmp_path / "run"
    with launching(words("run", 10**6, nproc_per_node=2)) as process:
        wait_for_steps(process, run, 2)
        started = children(process)
        stopped = run_python("-m", "grpo", "stop", run)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, stopped.returncode) == (0, 0), output + stopped.stderr
    done = len(lines(run / "metrics.jsonl"))
    assert output.count("grpo stop: stopping after this step") == output.count(": stopped by grpo stop; python") == 1
    assert f"its last step was {done}, and it left checkpoint-{done}; python -m grpo.launch " in stopped.stdout
    assert "Traceback" not in output and "error" not in output and not any(map(is_alive, started))
    assert not (run / f"checkpoint-{done}/stop").exists() and not (run / "model").exists()

    code, output = launched(words("run", done + 2, nproc_per_node=2, resume_from_checkpoint="last"))
    assert code == 0 and f"goes on after step {done}" in output, output
    assert not (run / "stop").exists()
    finish(2, words("straight", done + 2))
    check_alike(run, tmp_path / "straight")


TIGHT = """
import torch
from grpo.algorithm.loss_types import mean_of_tokens

def tight(inputs, settings):
    if len(inputs.logprobs) > {most}:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity")
    return -inputs.advantages * inputs.ratio, mean_of_tokens(inputs), {{}}
"""


@pytest.mark.slow
def test_out_of_memory_a_run_goes_on_with_half_and_ends_with_the_bits_of_one_that_began_so(
    model_folder, data_folder, tmp_path
):
    """A loss that fails above so many tokens stands in for the card."""
    loss = tmp_path / "mine.py"
    changes = {"eval_steps": 0, "beta": 0, "report_to": "none", "loss_type": f"{loss}:tight"}

    def words(name: str, budget: int, **more) -> list[str]:
        return options(model_folder, data_folder, tmp_path / name, micro_batch_tokens=budget, **changes, **more)

    loss.write_text(TIGHT.format(most=300))
    code, output = launched(words("lowered", 1200, nproc_per_node=1))
    assert code == 0, output
    told = re.findall(r"the run goes on with (\w+=\d+) instead of (\d+)", output)
    assert told == [("micro_batch_tokens=600", "1200"), ("micro_batch_tokens=300", "600")], output
    finish(1, words("small", 300))
    whole, small = (lines(tmp_path / name / "metrics.jsonl") for name in ("lowered", "small"))
    assert [row["loss"] for row in whole] == [row["loss"] for row in small] and len(whole) == 3
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("lowered", "small")]
    assert weights[0] == weights[1]

    loss.write_text(TIGHT.format(most=60))
    code, output = launched(words("never", 1200, nproc_per_node=1))
    assert code == 1 and output.count("the run goes on with") == 2 and "lower micro_batch_tokens=300" in output


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process(model_folder, data_folder, tmp_path):
    run = tmp_path / "run"
    words = options(model_folder, data_folder, run, nproc_per_node=1, max_steps=200, port=free_port())
    with launching(words) as process:
        wait_for_steps(process, run, 1)
        started = children(process)
        assert len(started) == 2
        process.kill()
        process.communicate(timeout=60)
        wait_until(lambda: not any(map(is_alive, started)))


@pytest.mark.slow
def test_a_trainer_that_ends_with_0_before_its_last_step_is_a_failure(model_folder, data_folder, tmp_path):
    run, rewards = tmp_path / "run", tmp_path / "rewards.py"
    rewards.write_text("import ctypes\n\ndef ends(completions, **columns):\n    ctypes.CDLL(None).quick_exit(0)\n")
    words = options(model_folder, data_folder, run, beta=0, eval_steps=0, reward_funcs=f"{rewards}:ends")
    code, output = launched(words)
    assert code == 1 and f"{run}: the trainer ended with code 0" in output, output


@pytest.mark.slow
def test_a_server_that_cannot_start_ends_the_run(server, model_folder, data_folder, tmp_path):
    code, output = launched(options(model_folder, data_folder, tmp_path / "run", nproc_per_node=1, port=server.port))
    assert code == 2 and "starts again" not in output, output
    assert f"127.0.0.1:{server.port}" in output and "ended before it was ready" in output
    assert not (tmp_path / "run").exists()
