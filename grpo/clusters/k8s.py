"""Applies the run to Kubernetes: a Job of pods that train, Deployments of pool and workers, their settings and volumes.

    grpo launch --on k8s --nnodes 2 --gpus_per_node 8 --image REGISTRY/grpo --config configs/two_nodes.yaml \\
        --output_dir /runs/first --render first.yaml

The image is that of examples/Dockerfile. The folder above output_dir is a volume that the pods share. Workers have pods
of their own, beside the nodes of the trainer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shlex
from base64 import b64decode
from dataclasses import replace
from pathlib import Path, PurePosixPath

from grpo.clusters.plan import Role, fill_in, run_tool
from grpo.config.command_line import to_yaml
from grpo.config.errors import one_line, typed_command
from grpo.config.programs import LaunchConfig
from grpo.run.run_folder import writable

log = logging.getLogger("grpo.launch")


def start(config: LaunchConfig, roles: list[Role]) -> int:
    """Write the manifests, or apply them. Raises ConfigError for a run's folder that is in no volume, or with kubectl's
    own words if they are refused."""
    folder = PurePosixPath(config.output_dir)
    in_volume = folder.is_absolute() and len(folder.parts) > 2
    config.check(in_volume, output_dir="name a folder in the pods' shared volume, such as /runs/first")
    kubectl, remedy = ["kubectl", *shlex.split(config.on_args or "")], "install it, or --render FILE"
    if config.render is None and config.token is None:
        # Pods of an earlier start may live on, with its token.
        words = ["get", "secret", name_of(config), "--output=jsonpath={.data.token}"]
        config.token = b64decode(run_tool(config, [*kubectl, *words], remedy).stdout).decode() or None
    text = manifests(config, roles)
    if config.render is not None:
        with writable("render", Path(config.render)):
            descriptor = os.open(config.render, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it has the token
            os.fchmod(descriptor, 0o600)  # also of a file that was there
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        log.info("the manifests are in %s: kubectl apply -f %s", config.render, config.render)
        return 0
    done = run_tool(config, [*kubectl, "apply", "-f", "-"], remedy, text=text)
    config.check(done.returncode == 0, on=one_line(done.stderr))
    log.info("applied: kubectl logs --follow job/%s", name_of(config))
    return 0


def name_of(config: LaunchConfig) -> str:
    """Return the Job's name: of the run's folder, with a digest of its path where Kubernetes allows no such name."""
    folder = PurePosixPath(config.output_dir).name
    name = re.sub("[^a-z0-9]+", "-", folder.lower())[:40].strip("-")
    digest = hashlib.sha256(config.output_dir.encode()).hexdigest()[:8]
    return "-".join(filter(None, ["grpo", name, "" if name == folder else digest]))


def manifests(config: LaunchConfig, roles: list[Role]) -> str:
    """Return the manifests as YAML."""
    folder, name = PurePosixPath(config.output_dir), name_of(config)
    by_name, settings = {role.name: role for role in roles}, config.passed_on()
    pool = by_name.get("pool")
    if pool is not None:
        for setting in ("workers", "worker_args", "pool_url", "pool_folder"):
            settings.pop(setting, None)
        settings |= {"sampler": "pool", "pool": f"http://{name}-pool:{config.pool_port}"}
        words = ["ref_server.py", "--task=rollouts", "--pool_file=/pool/rollouts.sqlite"]
        if config.pool_url is not None:  # from the secret, as it may have a password
            words = ["$(POOL_URL)" if word == config.pool_url else word for word in pool.words]
        pool = replace(pool, words=words)
    return fill_in(
        "kubernetes.yaml",
        command=one_line(typed_command(), None),
        name=name,
        image=config.image,
        nnodes=config.nnodes,
        gpus_per_node=config.gpus_per_node,
        output_dir=folder,
        runs=str(folder.parent),
        token=config.token or secrets.token_urlsafe(32),
        settings=to_yaml(settings),
        trainer=by_name["trainer"],
        pool=pool,
        pool_url=config.pool_url,
        pool_port=config.pool_port,
        worker=by_name.get("worker"),
    )
