"""`grpo_ref_split.py --dry_run`: check everything that a run checks before it loads a model, and print its needs.

A dry run makes no folder, waits for no server and loads no weights. It starts only the processes that `reward_timeout`
and `tool_timeout` ask for.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from grpo.client.connection import Connection
from grpo.client.reference import check_reference
from grpo.client.server_errors import RequestFailure, ServerError
from grpo.client.sessions import check_certificates
from grpo.config.errors import COMMAND, ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example
from grpo.model.fingerprint import describe_without_weights
from grpo.model.hub import base_of
from grpo.model.load import checkpoint_activations, refuse_hub_kernels, resolve_dtype
from grpo.model.logprobs import check_router
from grpo.model.lora import check_adapter, put_adapter, train_adapter
from grpo.model.memory import Memory, Terms, change_lines, on_meta, trainer_lines
from grpo.model.packing import Batcher
from grpo.model.pictures import PictureProcessor, freeze_vision_tower, vision_parameters
from grpo.pool.client import PoolClient
from grpo.run.collective import own_place
from grpo.run.description import RunDescription
from grpo.run.folder import check_login
from grpo.run.run_folder import Damaged, check_format, find_checkpoints, find_run_folder, finished_steps, read_progress
from grpo.tools.dialogue import UserResponder
from grpo.trainer.deepspeed_engine import engine_config
from grpo.trainer.pool_sampler import describe_workers
from grpo.trainer.rank_memory import RankWork, rank_memory
from grpo.trainer.setup import Inputs, read_inputs
from grpo.wire.health import ModelInfo
from grpo.wire.picture_files import PicturedPrompt, pictures_of

log = logging.getLogger(__name__)


def dry_run(config: TrainerConfig) -> None:
    """Print a run's plan on rank 0. Raises ConfigError and RewardError as a run would."""
    rank, ranks, device = own_place()
    if rank != 0:
        return
    for name in ("lora", "pictures"):  # or every adapter, and every frozen tower, that is counted would be logged
        logging.getLogger(f"grpo.model.{name}").setLevel(logging.WARNING)
    folder = find_run_folder(config)
    if config.push_to_hub:
        check_login()
    inputs = read_inputs(config, rank, ranks, device)
    start = _describe_start(config, folder, RunDescription(config, inputs.examples, ranks))
    model = policy_on_meta(config, resolve_dtype(config, device))
    policy_info = describe_without_weights(model, inputs.tokenizer, config.model_name_or_path, inputs.processor)
    if config.router_aux_loss_coef > 0:
        check_router(model, config.router_aux_loss_coef)

    longest = max(len(example.prompt_ids) for example in inputs.examples)
    pictured = _most_pictured(inputs)
    work = RankWork(config, ranks, longest, len(inputs.held_out), inputs.processor, pictured)
    found = _describe_inputs(config, inputs, model, policy_info, pictured)
    if config.resume_from_checkpoint is not None:
        found.append(f"  start      {start}")
    step = _describe_step(work, inputs.examples)
    log.info("counting what a rank needs, as set and with one setting changed: this may take half a minute")
    memory = _describe_memory(work, inputs.reward_funcs, device)
    print("\n\n".join("\n".join(lines) for lines in (found, step, memory)))


def policy_on_meta(config: TrainerConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return what would be trained, without its weights. Raises ConfigError as a run would."""
    model = on_meta(config, dtype)
    if base_of(config.model_name_or_path) is not None:
        put_adapter(model, config.model_name_or_path)
    if config.use_peft:
        train_adapter(model, config)
    if config.freeze_vision_tower:
        freeze_vision_tower(model)
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    return model


def _describe_start(config: TrainerConfig, folder: Path, description: RunDescription) -> str:
    """Return at which step a run would begin. Raises ConfigError if the checkpoint has other settings or data."""
    if config.resume_from_checkpoint == "last" and finished_steps(folder) >= config.max_steps:
        return f"nothing to do: the run in {folder} is done"
    found = find_checkpoints(config)
    for checkpoint in found:
        with suppress(Damaged):  # a run takes the one before
            saved = read_progress(checkpoint)
            check_format(checkpoint, saved)
            description.check(checkpoint, saved)
            return f"goes on from {checkpoint}"
    if found:
        return f"a run would refuse it: all of {folder} is damaged"
    return f"at step 0: there is nothing to resume in {folder}"


def _describe_inputs(
    config: TrainerConfig,
    inputs: Inputs,
    model: PreTrainedModel,
    policy_info: ModelInfo,
    pictured: PicturedPrompt | None,
) -> list[str]:
    """Return a run's model, data, rewards and the servers' answers. `pictured` has the most tokens of pictures."""
    rewards = inputs.reward_funcs
    weighted = [f"{name} x {weight:g}" for name, weight in zip(rewards, config.reward_weights, strict=True)]
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    lengths = [len(example.prompt_ids) for example in inputs.examples]
    takes_pictures = inputs.processor is not None
    lines = [
        "Dry run: no weights were loaded, no folder was made.",
        f"  model      {policy_info.name}: {count:,} parameters, {trained:,} of them trained",
        *([f"  vision     {_describe_tower(config, model)}"] if takes_pictures else []),
        f"  tokenizer  {policy_info.vocab_size:,} tokens in the model's vocabulary, {policy_info.max_length:,} in its "
        "longest sequence",
        f"  dataset    {config.dataset_name}: {len(inputs.examples):,} prompts to train on, of {min(lengths)} to "
        f"{max(lengths)} tokens (mean {sum(lengths) / len(lengths):.0f}), {len(inputs.held_out):,} held out",
        *([f"  pictures   {_describe_pictures(inputs, pictured)}"] if takes_pictures else []),
        *([f"  answers    {_describe_turns(config, inputs.turns)}"] if inputs.turns is not None else []),
        f"  rewards    {', '.join([*weighted, *(name for name in inputs.rewards if name not in rewards)])}",
    ]
    if config.beta == 0:
        lines.append("  reference  none: beta is 0")
    elif config.ref == "adapter_off":
        lines.append("  reference  the trainer itself, its adapter off")
    elif COMMAND in os.environ and config.ref_servers == [f"http://127.0.0.1:{config.port}"]:
        lines.append(f"  reference  {config.ref_servers[0]}, which grpo.launch starts with the run")
    else:
        connection = Connection(config, "logprobs")
        for url in config.ref_servers:
            lines.append(f"  reference  {url} {_describe_server(connection, url, inputs, config, policy_info)}")
    if config.sampler == "pool":
        lines.append(f"  sampler    {_describe_source(config)}")
    for reward in rewards.values():
        if isinstance(reward, str) and reward.startswith(("http://", "https://")):
            lines.append(f"  rewards    {reward} {_describe_server(Connection(config, 'reward'), reward)}")
    return lines


def _describe_turns(config: TrainerConfig, turns: UserResponder) -> str:
    names = [tool["function"]["name"] for tool in turns.tools or []]
    where = "in the trainer" if config.tool_timeout is None else f"in other processes, {config.tool_timeout:g} s a call"
    by = f" by {config.environment}" if config.environment is not None else ""
    return f"{', '.join(names) or 'to each turn'}{by}, {where}"


def _describe_tower(config: TrainerConfig, model: PreTrainedModel) -> str:
    tower = vision_parameters(model)
    count = sum(weight.numel() for weight in tower)
    trained = sum(weight.numel() for weight in tower if weight.requires_grad)
    why = " (freeze_vision_tower)" if config.freeze_vision_tower else ""
    return f"{count:,} of these parameters are the vision tower's, {trained:,} of them trained{why}"


def _describe_pictures(inputs: Inputs, pictured: PicturedPrompt | None) -> str:
    count = sum(bool(pictures_of(example.prompt_ids)) for example in inputs.examples)
    of_most = f", of {_pieces(pictured, inputs.processor)} tokens at most" if pictured is not None else ""
    return f"in {count:,} of these prompts{of_most}"


def _most_pictured(inputs: Inputs) -> PicturedPrompt | None:
    """Return the prompt with the most tokens of pictures; None without pictures."""
    prompts = [example.prompt_ids for example in inputs.examples if pictures_of(example.prompt_ids)]
    return max(prompts, key=lambda prompt: _pieces(prompt, inputs.processor), default=None)


def _pieces(prompt: PicturedPrompt, processor: PictureProcessor) -> int:
    return int((np.asarray(prompt) == processor.token_id).sum())


def _describe_server(
    connection: Connection,
    url: str,
    inputs: Inputs | None = None,
    config: TrainerConfig | None = None,
    policy_info: ModelInfo | None = None,
) -> str:
    """Ask a server once for its model, and return the answer as the rest of a sentence. Raises nothing."""
    try:
        model_info = connection.health(url).model
        if inputs is not None and config is not None and policy_info is not None:
            policy_info = replace(policy_info, fingerprint=model_info.fingerprint)
            check_reference(config, policy_info, model_info, has_pictures=inputs.has_pictures)
    except RequestFailure as failure:
        return f"{failure}: a run would wait for it"
    except ServerError as error:
        return f"cannot serve this run: {str(error).removeprefix(f'{url} ')}"
    return f"is ready: {model_info.name}, {model_info.dtype} on {model_info.device}"


def _describe_source(config: TrainerConfig) -> str:
    """Return the source of completions: ask the pool once for its run and its workers."""
    if config.pool is None:
        return f"of the run in {config.replay}"
    try:
        pool = PoolClient(config.pool, config.token, check_certificates(config.ref_ca_file))
        run, status = pool.run(), pool.status()
    except RequestFailure as failure:
        return f"{config.pool} {failure}: a run would wait for it"
    except ServerError as error:
        return f"cannot come: {error}"
    of = f"of run {run.name}" if run else "of no run yet"
    return f"{config.pool} is a pool {of}; {describe_workers(status, config.pool)}"


def _describe_step(work: RankWork, examples: list[Example]) -> list[str]:
    """Return how a step is cut into ranks, sampling and micro-batches."""
    config, generations, longest_completion = (
        work.config,
        work.config.num_generations,
        work.config.max_completion_length,
    )
    mean = sum(len(example.prompt_ids) for example in examples) / len(examples)
    full = [([prompt], range(longest_completion)) for prompt in range(work.prompts) for _ in range(generations)]
    full = [([*prompt, *range(work.longest_prompt - 1)], completion) for prompt, completion in full]
    micro_batches = Batcher(0, 2**31).cut(full, config.micro_batch_tokens)
    completions = work.prompts * config.steps_per_generation * generations
    at_once = f"{min(config.sequences_per_generate, completions)} at a time"
    drawn = "which workers draw" if config.sampler == "pool" else at_once
    return [
        f"A step: {config.prompts_per_step} prompts x {generations} completions over {work.ranks} "
        f"rank{'s' if work.ranks > 1 else ''}; on each",
        f"  groups         {work.prompts} of {generations} completions",
        f"  sampling       {completions} completions a round, {drawn}; it feeds {config.updates_per_round} updates",
        f"  tokens         {work.prompts * work.group:,} at most, a shared prompt once",
        f"                 {work.prompts * (mean + generations * longest_completion):,.0f} with prompts of "
        "mean length and all completions at full length",
        f"  micro-batches  {len(micro_batches)} at most, of {work.tokens:,} tokens at most",
    ]


def _describe_memory(work: RankWork, rewards: dict, device: torch.device) -> list[str]:
    """Return a rank's memory on this machine and on a card: as set, and with each change that lowers it."""
    config, cuda = work.config, torch.device("cuda")
    models: dict[tuple, PreTrainedModel] = {}

    def needed(config: TrainerConfig, ranks: int, device: torch.device) -> Memory:
        dtype, ds_config = resolve_dtype(config, device), engine_config(config, ranks, device)
        # Most changes leave the model as it is. A pass of 28 layers takes a second, and is counted once for a model.
        key = dtype, config.gradient_checkpointing, config.freeze_vision_tower, config.use_peft
        if key not in models:
            models[key] = policy_on_meta(config, dtype)
        memory = rank_memory(models[key], replace(work, config=config, ranks=ranks), ds_config, device.type)
        return replace(memory, standing=memory.standing | _reward_models(config, rewards, device))

    try:
        memories = {"as set": needed(config, work.ranks, cuda)}
        for changes, ranks in _changes(work, offloaded=bool(memories["as set"].host)):
            # A change that a run would refuse, or whose package is not installed, is no choice.
            with suppress(ConfigError):
                changed = replace(config, **changes)
                changed.check_ranks(ranks)
                check_adapter(changed)
                memory = needed(changed, ranks, cuda)
                if memory.total < memories["as set"].total:
                    name = " ".join(f"{field} {value}" for field, value in changes.items()) or f"{ranks} ranks"
                    memories[name] = memory
        lines = trainer_lines(needed(config, work.ranks, device), resolve_dtype(config, device), work.ranks)
    except NotImplementedError as error:
        return [f"Memory: no estimate ({' '.join(str(error).split())[:300]})"]
    return [*lines, "", *change_lines(memories, resolve_dtype(config, cuda))]


def _changes(work: RankWork, offloaded: bool) -> list[tuple[dict[str, object], int]]:
    """Return changes of one setting that may lower a rank's memory, each with the number of ranks."""
    freezes = [{"freeze_vision_tower": True}] if work.processor is not None else []
    halved = "micro_batch_tokens", "sequences_per_generate", "max_completion_length"
    changes = [{name: getattr(work.config, name) // 2} for name in halved]
    changes += [{"gradient_checkpointing": True}, {"dtype": "bfloat16"}, {"optim": "adamw_8bit"}, *freezes]
    if not offloaded:
        changes.append({"deepspeed": "configs/ds_offload.json"})
    changes += [{"use_peft": True}, {"quantization": "4bit"}]
    return [({}, 2 * work.ranks), *((change, work.ranks) for change in changes)]


def _reward_models(config: TrainerConfig, rewards: dict, device: torch.device) -> Terms:
    """Return the weights of the reward models that every rank loads. Raises ConfigError for a name that has none."""
    terms = {}
    for name in rewards.values():
        if not isinstance(name, str) or name.startswith(("http://", "https://")):
            continue
        try:
            settings = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
            refuse_hub_kernels("reward_funcs", name, settings, config.trust_remote_code)
            with torch.device("meta"):
                model = AutoModelForSequenceClassification.from_config(settings)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"reward_funcs={name!r}: cannot be loaded as a reward model ({reason})") from error
        count = sum(parameter.numel() for parameter in model.parameters())
        terms[f"reward model {name}"] = count * resolve_dtype(config, device).itemsize
    return terms
