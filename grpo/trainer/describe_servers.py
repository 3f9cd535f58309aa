"""A dry run's lines on the servers of a run: whether each answers now, and whether it could serve the run."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from grpo.client.connection import Connection
from grpo.client.reference import check_reference, check_teacher, check_top_k
from grpo.client.server_errors import RequestFailure, ServerError
from grpo.config.errors import COMMAND
from grpo.config.trainer import TrainerConfig
from grpo.pool.client import PoolClient
from grpo.trainer.inputs import Inputs
from grpo.trainer.pool_sampler import describe_workers
from grpo.wire.health import ModelInfo


def server_lines(config: TrainerConfig, policy: ModelInfo, inputs: Inputs) -> list[str]:
    """Ask each server once. Return a line for each, as the plan shows it."""
    lines = [f"  reference  {text}" for text in _reference(config, policy, has_pictures=bool(inputs.pictured))]
    for source, urls in config.teachers.items():
        check = partial(_teacher, config, policy, has_pictures=bool(inputs.pictured))
        of_source = f", for the prompts of {source}" if source else ""
        lines += [f"  teacher    {_answer(url, check)}{of_source}" for url in urls]
    if config.sampler == "pool":
        replay = f"of the run in {config.replay}"
        lines.append(f"  sampler    {_answer(config.pool, partial(_pool, config)) if config.pool else replay}")
    for url in filter(is_url, inputs.rewards.values()):
        answer = _answer(url, lambda url: _ready(Connection(config, "reward").health(url).model))
        lines.append(f"  rewards    {answer}")
    return lines


def is_url(reward: Callable | str) -> bool:
    return isinstance(reward, str) and "://" in reward


def _reference(config: TrainerConfig, policy: ModelInfo, has_pictures: bool) -> Iterator[str]:
    if config.beta == 0:
        yield "none: beta is 0"
    elif config.ref != "server":
        way = "its adapter off" if config.ref == "adapter_off" else "from a copy of its weights"
        yield f"the trainer itself, {way}"
    elif COMMAND in os.environ and config.ref_servers == [f"http://127.0.0.1:{config.port}"]:
        yield f"{config.ref_servers[0]}, which grpo.launch starts with the run"
    else:
        connection = Connection(config, "logprobs")

        def check(url: str) -> str:
            reference = connection.health(url).model
            same = replace(policy, fingerprint=reference.fingerprint)  # the weights are not loaded
            check_reference(config, same, reference, has_pictures=has_pictures)
            return _ready(reference)

        yield from (_answer(url, check) for url in config.ref_servers)


def _teacher(config: TrainerConfig, policy: ModelInfo, url: str, *, has_pictures: bool) -> str:
    server = Connection(config, "logprobs").health(url)
    check_top_k(url, server.most_top_k, config.teacher_top_k)
    check_teacher(config, url, policy=policy, teacher=server.model, has_pictures=has_pictures)
    return _ready(server.model)


def _answer(url: str, ask: Callable[[str], str]) -> str:
    """Ask a server once, and return its answer, or its failure, as a sentence."""
    try:
        return f"{url} {ask(url)}"
    except RequestFailure as failure:
        return f"{url} {failure}: a run would wait for it"
    except ServerError as error:
        return f"{url} cannot serve this run: {str(error).removeprefix(f'{url} ')}"


def _ready(model_info: ModelInfo) -> str:
    return f"is ready: {model_info.name}, {model_info.dtype} on {model_info.device}"


def _pool(config: TrainerConfig, url: str) -> str:
    pool = PoolClient(url, token=config.token, ref_ca_file=config.ref_ca_file)
    run, status = pool.run(), pool.status()
    return f"is a pool {f'of run {run.name}' if run else 'of no run yet'}; {describe_workers(status, url)}"
