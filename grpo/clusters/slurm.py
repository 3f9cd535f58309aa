"""Submits the run to SLURM as one job, which a person can read and edit first.

    grpo launch --on slurm --nnodes 2 --gpus_per_node 8 --config configs/two_nodes.yaml --output_dir /shared/run \\
        --on_args "--partition=gpu --time=24:00:00"

Each node runs a launcher, with this Python. With min_ranks SLURM may give fewer nodes, too.
"""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path

from grpo.clusters.plan import Role, are_enough, fill_in, run_tool
from grpo.config.command_line import to_yaml
from grpo.config.connection_settings import TOKEN_VARIABLE
from grpo.config.errors import one_line, typed_command
from grpo.config.programs import LaunchConfig
from grpo.run.run_folder import writable

log = logging.getLogger("grpo.launch")


def start(config: LaunchConfig, roles: list[Role]) -> int:
    """Write the job, or submit it. Raises ConfigError with SLURM's own words if it refuses the job."""
    text = job(config)
    if config.render is not None:
        with writable("render", Path(config.render)):
            Path(config.render).write_text(text, encoding="utf-8")
        log.info("the job is in %s: sbatch %s", config.render, config.render)
        return 0
    Path(config.output_dir).parent.mkdir(parents=True, exist_ok=True)  # for its log
    # SLURM would keep a job that no nodes can ever take.
    remedy = "start this on a login node, or --render FILE"
    refusal = run_tool(config, ["sbatch", "--test-only"], remedy, text=text).stderr
    says = f"the cluster has none such: {one_line(refusal)}"
    config.check("node configuration is not available" not in refusal, nnodes=says)
    done = run_tool(config, ["sbatch", "--parsable"], remedy, text=text)
    config.check(done.returncode == 0, on=f"{one_line(done.stderr)}: on_args has options of sbatch")
    number = done.stdout.strip().partition(";")[0]
    run = shlex.quote(config.output_dir)
    log.info("job %s is submitted; its log: %s; to save and end it: grpo stop %s", number, log_of(config), run)
    return 0


def job(config: LaunchConfig) -> str:
    """Return the script for sbatch."""
    # sbatch gives the job the variables of its own shell: the token itself stands in no script.
    token = f'{{ printf %s "${{{TOKEN_VARIABLE}:-}}" | grep . || head -c 32 /dev/urandom | base64; }}'
    if config.token_file is not None:
        token = f"cat {shlex.quote(str(Path(config.token_file).expanduser().absolute()))}"
    fewest = next((count for count in range(1, config.nnodes) if are_enough(config, count)), config.nnodes)
    return fill_in(
        "slurm.sbatch",
        command=one_line(typed_command(), None),
        quoted_command=shlex.quote(typed_command()),
        nodes=config.nnodes if config.min_ranks is None else f"{fewest}-{config.nnodes}",
        output=shlex.quote(log_of(config).replace("%", "%%")),  # sbatch fills in %j
        gpus_per_node=config.gpus_per_node,
        on_args=config.on_args,
        run=shlex.quote(str(Path(config.output_dir).absolute())),
        token=token,
        settings=to_yaml(config.passed_on()),
        python=shlex.quote(sys.executable),
    )


def log_of(config: LaunchConfig) -> str:
    return f"{Path(config.output_dir).absolute()}.log"
