"""`grpo_ref_split.py --dry_run`: check everything that a run checks before it loads a model, and print its needs. It
makes no folder, waits for no server and loads no weights."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from grpo.config.errors import ConfigError, one_line
from grpo.config.trainer import TrainerConfig
from grpo.data.dataset import weights_of
from grpo.model.fingerprint import describe_without_weights
from grpo.model.hub import refuse_unloadable
from grpo.model.load import refuse_hub_kernels, resolve_dtype
from grpo.model.lora import check_adapter
from grpo.model.memory import Memory, Terms, change_lines, trainer_lines
from grpo.model.packing import Batcher
from grpo.model.pictures import vision_parameters
from grpo.run.checkpoints import check_space
from grpo.run.collective import own_place
from grpo.run.folder import check_login
from grpo.run.preflight import RunDescription
from grpo.run.run_folder import Damaged, find_checkpoints, find_run_folder, finished_steps, read_progress
from grpo.trainer.deepspeed_engine import engine_config
from grpo.trainer.describe_servers import is_url, server_lines
from grpo.trainer.inputs import Inputs, read_inputs
from grpo.trainer.policy import policy_on_meta
from grpo.trainer.rank_memory import RankWork, rank_memory
from grpo.wire.health import ModelInfo

log = logging.getLogger(__name__)


def dry_run(config: TrainerConfig) -> None:
    """Print a run's plan on rank 0. Raises ConfigError and RewardError as a run would."""
    rank, ranks, device = own_place()
    if rank != 0:
        return
    for name in ("lora", "pictures"):  # or every model that is counted would be logged
        logging.getLogger(f"grpo.model.{name}").setLevel(logging.WARNING)
    folder = find_run_folder(config)
    if config.push_to_hub:
        check_login()
    inputs = read_inputs(config, rank=rank, world_size=ranks, device=device)
    description = RunDescription(config, inputs.examples, ranks=ranks, stage=inputs.zero_stage)
    start = _describe_start(config, folder, description)
    model = policy_on_meta(config, resolve_dtype(config, device))
    policy_info = describe_without_weights(model, inputs.tokenizer, config.model_name_or_path, inputs.processor)
    work = RankWork.of(config, ranks, inputs)
    found = _describe_inputs(work, inputs, model, policy_info)
    found.append(f"  disk       {check_space(config, folder, model)}")
    if config.resume_from_checkpoint is not None:
        found.append(f"  start      {start}")
    step = _describe_step(work, inputs)
    log.info("counting what a rank needs, as set and with one setting changed: this may take half a minute")
    memory = _describe_memory(work, inputs.reward_funcs, device)
    print("\n\n".join("\n".join(lines) for lines in (found, step, memory)))


def _describe_start(config: TrainerConfig, folder: Path, description: RunDescription) -> str:
    """Return at which step a run would begin. Raises ConfigError if the checkpoint has other settings or data."""
    if config.resume_from_checkpoint == "last" and finished_steps(folder) >= config.max_steps:
        return f"nothing to do: the run in {folder} is done"
    found = find_checkpoints(config)
    for checkpoint in found:
        with suppress(Damaged):  # a run takes the one before
            saved = read_progress(checkpoint)
            description.check(checkpoint, saved)
            return f"goes on from {checkpoint}"
    if found:
        return f"a run would refuse it: all of {folder} is damaged"
    return f"at step 0: there is nothing to resume in {folder}"


def _describe_inputs(work: RankWork, inputs: Inputs, model: PreTrainedModel, policy_info: ModelInfo) -> list[str]:
    config, rewards = work.config, inputs.reward_funcs
    weighted = [f"{name} x {weight:g}" for name, weight in zip(rewards, config.reward_weights, strict=True)]
    lengths = [len(example.prompt_ids) for example in inputs.examples]
    takes_pictures = inputs.processor is not None
    most_pictures = f", of {work.picture_tokens} tokens at most" if inputs.pictured else ""
    frozen = " (freeze_vision_tower)" if config.freeze_vision_tower else ""
    tower = "of these parameters are the vision tower's"
    lines = [
        "Dry run: no weights were loaded, no folder was made.",
        f"  model      {policy_info.name}: {_count(model.parameters(), 'parameters')}",
        *([f"  vision     {_count(vision_parameters(model), tower)}{frozen}"] if takes_pictures else []),
        f"  tokenizer  {policy_info.vocab_size:,} tokens in the model's vocabulary, {policy_info.max_length:,} in its "
        "longest sequence",
        f"  dataset    {config.dataset_name}: {len(inputs.examples):,} prompts to train on, of {min(lengths)} to "
        f"{max(lengths)} tokens (mean {sum(lengths) / len(lengths):.0f}), {len(inputs.held_out):,} held out",
        *([f"             {_describe_mixture(config, inputs)}"] if inputs.examples[0].source else []),
        *([f"  pictures   in {len(inputs.pictured):,} of these prompts{most_pictures}"] if takes_pictures else []),
        *([f"  answers    {_describe_turns(config, inputs)}"] if inputs.turns is not None else []),
        f"  rewards    {', '.join([*weighted, *(name for name in inputs.rewards if name not in rewards)]) or 'none'}",
    ]
    return lines + server_lines(config, policy_info, inputs)


def _describe_mixture(config: TrainerConfig, inputs: Inputs) -> str:
    counts = Counter(example.source for example in inputs.examples)
    weights = weights_of(config) or counts
    shares = {source: weights[source] / sum(weights.values()) for source in counts}
    return ", ".join(f"{source}: {count:,}, {shares[source]:.0%} of a run's" for source, count in counts.items())


def _count(parameters: Iterable[nn.Parameter], what: str) -> str:
    counts, trained = zip(*((each.numel(), each.numel() * each.requires_grad) for each in parameters), strict=True)
    return f"{sum(counts):,} {what}, {sum(trained):,} of them trained"


def _describe_turns(config: TrainerConfig, inputs: Inputs) -> str:
    if config.agent is not None:
        return f"the requests of {config.agent}, {config.max_concurrent_episodes} episodes at a time"
    names = [tool["function"]["name"] for tool in inputs.turns.tools or []]
    where = "in the trainer" if config.tool_timeout is None else f"in other processes, {config.tool_timeout:g} s a call"
    by = f" by {config.environment}" if config.environment is not None else ""
    return f"{', '.join(names) or 'to each turn'}{by}, {where}"


def _describe_step(work: RankWork, inputs: Inputs) -> list[str]:
    config, generations = work.config, work.config.num_generations
    longest_completion = config.max_completion_length
    mean = sum(len(example.prompt_ids) for example in inputs.examples) / len(inputs.examples)
    sharing = config.sequence_parallel_size
    prompts = range(work.prompts * sharing)
    full = [([prompt], range(longest_completion)) for prompt in prompts for _ in range(generations)]
    full = [([*prompt, *range(work.longest_prompt - 1)], completion) for prompt, completion in full]
    micro_batches = Batcher(0, packs=True).cut(full, config.micro_batch_tokens * sharing)
    completions = work.prompts * config.steps_per_generation * config.draws
    at_once = f"{min(config.sequences_per_generate, completions)} at a time"
    drawn = "which workers draw" if config.sampler == "pool" else at_once
    return [
        f"A step: {config.prompts_per_step} prompts x {generations} completions over {work.ranks} "
        f"rank{'s' if work.ranks > 1 else ''}; on each",
        f"  groups         {work.prompts} of {generations} completions"
        + (f", chosen of {config.draws}" if config.num_draws else ""),
        f"  sampling       {completions} completions a round, {drawn}; it feeds {config.updates_per_round} updates",
        f"  tokens         {work.prompts * work.group:,} at most, a shared prompt once",
        f"                 {work.prompts * (mean + generations * longest_completion):,.0f} with prompts of "
        "mean length and all completions at full length",
        f"  micro-batches  {len(micro_batches)} at most, of {work.tokens:,} tokens at most"
        + (f" on each of the {sharing} ranks that share them" if sharing > 1 else ""),
    ]


def _describe_memory(work: RankWork, rewards: dict, device: torch.device) -> list[str]:
    """Describe the memory on this machine and on a card: as set, and with each change that lowers it."""
    config, cuda = work.config, torch.device("cuda")
    models: dict[tuple, PreTrainedModel] = {}

    def needed(config: TrainerConfig, ranks: int, device: torch.device) -> Memory:
        dtype, ds_config = resolve_dtype(config, device), engine_config(config, ranks, device)
        # Most changes leave the model as it is. A pass of 28 layers takes a second, and is counted once for a model.
        names = "gradient_checkpointing", "activation_offloading", "tiled_mlp", "freeze_vision_tower", "use_peft"
        key = dtype, *(getattr(config, name) for name in names)
        if key not in models:
            models[key] = policy_on_meta(config, dtype)
        memory = rank_memory(models[key], replace(work, config=config, ranks=ranks), ds_config, device.type)
        return replace(memory, standing=memory.standing | _reward_models(config, rewards, device))

    try:
        as_set = needed(config, work.ranks, cuda)
        memories = {"as set": as_set}
        for name, ranks, changes in _changes(work, as_set):
            # A change that a run would refuse, or whose package is not installed, is no choice.
            with suppress(ConfigError):
                changed = replace(config, **changes)
                changed.check_ranks(ranks)
                check_adapter(changed)
                memory = needed(changed, ranks, cuda)
                if memory.total < as_set.total:
                    memories[name] = memory
        lines = trainer_lines(needed(config, work.ranks, device), resolve_dtype(config, device), work.ranks)
    except NotImplementedError as error:
        return [f"Memory: no estimate ({one_line(error)})"]
    return [*lines, "", *change_lines(memories, resolve_dtype(config, cuda))]


def _changes(work: RankWork, as_set: Memory) -> Iterator[tuple[str, int, dict[str, object]]]:
    """Yield changes that may lower a rank's memory: name, number of ranks, settings."""
    yield f"{2 * work.ranks} ranks", 2 * work.ranks, {}
    halved = "micro_batch_tokens", "sequences_per_generate", "max_completion_length"
    settings = {name: getattr(work.config, name) // 2 for name in halved}
    settings |= dict.fromkeys(("gradient_checkpointing", "activation_offloading", "tiled_mlp"), True)
    settings |= {"dtype": "bfloat16", "optim": "adamw_8bit"}
    settings |= {"freeze_vision_tower": True} if work.processor is not None else {}
    kinds = {"offload": "masters" not in as_set.host}
    if work.ranks > 1:
        kinds |= {"zero3": "small weights" not in as_set.standing, "zero3_offload": "weights" not in as_set.host}
    files = [("deepspeed", f"configs/ds_{kind}.json") for kind, is_change in kinds.items() if is_change]
    for name, value in [*settings.items(), *files, ("use_peft", True), ("quantization", "4bit")]:
        yield f"{name} {value}", work.ranks, {name: value}


def _reward_models(config: TrainerConfig, rewards: dict, device: torch.device) -> Terms:
    """Return the weights of the reward models that every rank loads. Raises ConfigError for a name that has none."""
    terms = {}
    for name in rewards.values():
        if not isinstance(name, str) or is_url(name):
            continue
        with refuse_unloadable("reward_funcs", name), torch.device("meta"):
            settings = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
            refuse_hub_kernels("reward_funcs", name, settings, config.trust_remote_code)
            model = AutoModelForSequenceClassification.from_config(settings)
        count = sum(parameter.numel() for parameter in model.parameters())
        terms[f"reward model {name}"] = count * resolve_dtype(config, device).itemsize
    return terms
