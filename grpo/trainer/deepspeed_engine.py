"""All of DeepSpeed: ranks meet, ds_config.json is completed with the run's sizes and rates, the engine starts."""

import json
import logging
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.config.console import free_port
from grpo.config.errors import ConfigError, one_line, rank_count, ranks_here
from grpo.config.fields import find_file
from grpo.config.trainer import TrainerConfig
from grpo.model.devices import describe_shared_cards, memory_of_others, p2p_hint, wants_card
from grpo.model.load import float32_weights, resolve_dtype
from grpo.model.logprobs import body_of
from grpo.model.lora import require_packages
from grpo.model.memory import machine_memory
from grpo.model.sharded import is_sharded, whole
from grpo.run.collective import gather, own_place
from grpo.run.watchdog import TIME_OUT, Watchdog
from grpo.trainer.out_of_memory import START, explain_shortage

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# Numbers in a group: bitsandbytes' kernels count in 32 bits, and where the optimizer is offloaded DeepSpeed copies a
# whole group on the card before it moves it.
_LARGEST_GROUP = 2**30
NORM_BLOCK = 2**22  # numbers


def make_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.Optimizer:
    """Make AdamW over the trained parameters: torch's, or with adamw_8bit that of bitsandbytes. (DeepSpeed's would be
    compiled at the first start.) Raises ConfigError for weights in less than 16 bits, which cannot be trained."""
    if not config.use_peft and any(weight.dtype.itemsize < 2 for weight in model.parameters()):
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path!r}: its weights are quantized, so that they cannot be "
            "trained: add use_peft, or name the model that they were made from"
        )
    decayed, not_decayed = parameter_groups(model)
    kinds = [(decayed, {"weight_decay": config.weight_decay}), (not_decayed, {"weight_decay": 0.0})]
    make = partial(torch.optim.AdamW, fused=True)
    if config.optim == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        class AdamW(AdamW8bit):
            def get_config(self, group_index: int, index: int, group: dict) -> dict:
                return super().get_config(group_index, index, group) | {"optim_bits": group["optim_bits"]}

        make, large = AdamW, {id(weight) for weight in in_8_bits(model)}
        kinds = [
            ([weight for weight in weights if (id(weight) in large) == (bits == 8)], settings | {"optim_bits": bits})
            for weights, settings in kinds
            for bits in (8, 32)
        ]
    # An adapter has no biases and norms: DeepSpeed takes no empty group.
    groups = [{"params": part, **settings} for weights, settings in kinds for part in in_parts(weights)]
    betas = config.adam_beta1, config.adam_beta2
    return make(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon)


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters with weight decay and those without, as `Trainer.get_decay_parameter_names`."""
    norms = {id(weight) for part in model.modules() if isinstance(part, nn.LayerNorm) for weight in part.parameters()}
    decayed, not_decayed = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_bare = id(parameter) in norms or _NOT_DECAYED.search(name.lower())
            (not_decayed if is_bare else decayed).append(parameter)
    return decayed, not_decayed


def in_8_bits(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose moments are in 8 bits, as in `Trainer`: matrices, but no embeddings, nothing small.
    ZeRO-2 makes one tensor of a group, in which bitsandbytes could not see the small ones."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [weight for weight in parameter_groups(model)[0] if id(weight) not in embeddings and weight.numel() >= 4096]


def in_parts(weights: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Cut weights into groups of a bounded size."""
    parts: list[list[nn.Parameter]] = []
    size = 0
    for weight in weights:  # of ZeRO-3's each has a size of 0: one group
        if not parts or size + weight.numel() > _LARGEST_GROUP:
            parts.append([])
            size = 0
        parts[-1].append(weight)
        size += weight.numel()
    return parts


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainerConfig) -> LRScheduler:
    """Make the schedule of the rate, that of `transformers.get_scheduler`. Raises ConfigError if it refuses."""
    name, arguments, last = config.lr_scheduler_type, config.lr_scheduler_kwargs, config.max_steps
    warmup = math.ceil(config.warmup_steps * (last if config.warmup_steps < 1 else 1))
    if arguments or name not in ("constant_with_warmup", "linear", "cosine"):
        from transformers.optimization import get_scheduler  # which takes seconds: it loads bitsandbytes

        try:
            return get_scheduler(
                name, optimizer, num_warmup_steps=warmup, num_training_steps=last, scheduler_specific_kwargs=arguments
            )
        except (TypeError, ValueError) as error:
            config.refuse("lr_scheduler_kwargs", f"{name}: {one_line(error)}: give the arguments of transformers' own")

    def factor(updates: int) -> float:
        if updates < warmup:
            return updates / warmup
        if name == "constant_with_warmup":
            return 1.0
        whole = max(1, last - warmup)
        if name == "linear":
            return max(0.0, (last - updates) / whole)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((updates - warmup) / whole))))

    return LambdaLR(optimizer, factor)


if not wants_card():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found none
# DeepSpeed's own calls, one line a rank. The barrier's, on GPUs, means the device that join_ranks has set.
warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context", UserWarning)
import deepspeed
from deepspeed.accelerator import cuda_accelerator, get_accelerator

# With NVIDIA's library it reads CUDA_VISIBLE_DEVICES as numbers, where GPU-... and MIG-... may stand.
cuda_accelerator.pynvml = None

log = logging.getLogger(__name__)


class Ranks(NamedTuple):
    """This rank among the launched processes."""

    rank: int
    size: int  # number of ranks
    device: torch.device
    watchdog: Watchdog


def join_ranks(config: TrainerConfig) -> Ranks:
    """Meet the other ranks. Raises ConfigError if a card cannot be used."""
    rank, world_size, device = own_place()
    if "RANK" not in os.environ:  # plain python instead of the deepspeed launcher: one rank
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if device.type == "cpu":
        # An operation that only DeepSpeed's inference uses, and that costs a minute of C++ compiling on a CPU.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    held = memory_of_others(device)
    cards = range(torch.cuda.device_count()) if device.type == "cuda" else ()  # on the CPU CUDA may be broken
    watchdog = Watchdog(rank, world_size, hint=p2p_hint([torch.cuda.get_device_name(card) for card in cards]))
    deepspeed.init_distributed(verbose=False, timeout=_longest_collective(config))
    if shared_cards := describe_shared_cards(gather(held)):
        log.warning("%s", shared_cards)
    watchdog.met = True
    return Ranks(rank=rank, size=world_size, device=device, watchdog=watchdog)


def start_engine(
    config: TrainerConfig, ds_config: dict, model: nn.Module, is_new: bool = False
) -> tuple[Any, LRScheduler]:
    """Return the DeepSpeed engine around the policy, and its learning-rate schedule. A policy that `is_new`
    is as its model's files have it. Raises ConfigError."""
    check_host(config, ds_config["zero_optimization"], model)
    shortage = partial(explain_shortage, lambda: (START, START), config, lambda: "nothing is lost: no step was done")
    if shards := ds_config["zero_optimization"]["stage"] == 3:
        with shortage():
            shard_weights(model, ds_config)
    else:
        keep_gradients_apart(ds_config["zero_optimization"], model)
    optimizer = make_optimizer(model, config)
    schedule = make_schedule(optimizer, config)
    with refused_by_deepspeed(config.deepspeed, AssertionError), shortage():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=ds_config)
    if shards:
        _notice_passes(engine.optimizer.parameter_offload, model)
    elif engine.optimizer.cpu_offload:
        sum_norms_in_blocks(engine.optimizer)
    if is_new:
        _begin_in_float32(engine, config)
    # DeepSpeed times each forward pass of the whole model. The update calls the model's body, so it would time sampled
    # tokens, and wait for the device before each.
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    # ZeRO reduces in a group of its own, which DeepSpeed makes with torch's time-out: 10 minutes on GPUs.
    # Before torch 2.14 this was private.
    set_timeout = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
    set_timeout(_longest_collective(config), engine.seq_data_parallel_group)
    return engine, schedule


def is_away(zero: dict, what: str) -> bool:
    """Tell whether DeepSpeed keeps `offload_optimizer` or `offload_param` in the machine's memory."""
    return zero.get(what, {}).get("device", "none") != "none"


def check_host(config: TrainerConfig, zero: dict, model: nn.Module) -> None:
    """Raise ConfigError if an offloaded optimizer is larger than the machine's memory: the system would end the rank
    without a word, or another program."""
    if not torch.cuda.is_available() or not is_away(zero, "offload_optimizer"):
        return
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    ranks, there = rank_count(), machine_memory()
    needed = 16 * trained * ranks_here(ranks) / ranks
    if needed > there:  # masters, gradients and moments alone
        sizes = f"the offloaded optimizer takes {needed / 2**30:.0f} GiB of this machine's memory, which has"
        remedy = "use_peft, more machines, or a file without offload_optimizer"
        config.refuse("deepspeed", f"{sizes} {there / 2**30:.0f}: {remedy}")


def _begin_in_float32(engine: Any, config: TrainerConfig) -> None:
    """Begin AdamW's weights, which are float32, with those that the model's files hold in float32. DeepSpeed begins
    them with the bfloat16 that the policy computes in, in whose spacing the first updates would be lost."""
    if config.use_peft or engine.module.dtype != torch.bfloat16:
        return
    trained = {name: weight for name, weight in engine.module.named_parameters() if weight.requires_grad}
    shards = is_sharded(engine.module)
    for name, value in float32_weights(config.model_name_or_path):
        if (weight := trained.get(name)) is None:
            continue
        with whole(weight):  # transformers may have loaded it otherwise than it is named
            is_same = weight.shape == value.shape and torch.equal(weight.cpu(), value.to(weight.dtype))
        if is_same and shards:
            share = weight.partition_numel()  # that of the last rank may go beyond the end
            padded = nn.functional.pad(value.flatten(), (0, share * dist.get_world_size() - value.numel()))
            deepspeed.utils.safe_set_local_fp32_param(weight, padded[share * dist.get_rank() :][:share])
        elif is_same:
            deepspeed.utils.safe_set_full_fp32_param(weight, value)


def shard_weights(model: PreTrainedModel, ds_config: dict) -> None:
    """Share the weights out over the ranks' cards, one at a time. Raises ConfigError for a model without layers."""
    layers = {type(part) for part in model.modules() if isinstance(part, GradientCheckpointingLayer)}
    if not layers:
        raise ConfigError(
            f"deepspeed: {type(model).__name__} has no layers that could be gathered one by one: use stage 2"
        )
    # A layer's weights come at once: with an adapter peft reads some beside their modules, and experts are called as
    # tokens choose them. Such a layer's end in the backward pass is seen by the gradient of its input.
    deepspeed.utils.set_z3_leaf_modules(model, [*layers])
    if not model.get_input_embeddings().weight.requires_grad:
        model.enable_input_require_grads()
    deepspeed.zero.Init(module=model, config_dict_or_path=ds_config, dtype=model.dtype)
    # It moves weights alone, and the engine then moves nothing: a vision tower's positions would stay on the host.
    device = get_accelerator().current_device_name()
    for part in model.modules():
        for name, buffer in [*part.named_buffers(recurse=False)]:
            setattr(part, name, buffer.to(device))


def _notice_passes(offload: Any, model: PreTrainedModel) -> None:
    """Let DeepSpeed know the begin of a pass, for it fetches weights ahead in the order of the pass before: to it a
    pass is one of the whole model, and here the body computes. All ranks compute equally many, unless they draw. What
    it fetches ahead for a backward pass that does not come it must let go of: nobody could make it whole."""

    def begin(*_) -> None:
        if offload.forward_hooks:  # else the weights are whole (whole_weights)
            offload.get_param_coordinator().reset_step()

    def end(*_) -> None:
        if offload.forward_hooks and not torch.is_grad_enabled():
            offload.get_param_coordinator()._clean_inflight_param_registry()

    body_of(model).register_forward_pre_hook(begin, prepend=True)
    model.get_output_embeddings().register_forward_hook(end)


@contextmanager
def whole_weights(engine: Any) -> Iterator[None]:
    """Let every rank have all weights within, to draw with them as often as it has to. All ranks enter it together.
    Without sharded weights nothing changes."""
    if not is_sharded(engine.module):
        yield
        return
    offload = engine.optimizer.parameter_offload
    weights = [*engine.module.parameters()]
    if dist.get_world_size() > 1:  # all together, DeepSpeed would copy every offloaded share to the card first
        for weight in weights:
            weight.all_gather([weight])
    with deepspeed.zero.GatheredParameters(weights):
        # They would let go of a weight after its module's first use.
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        try:
            yield
        finally:
            offload._register_deepspeed_module(engine.module)


def sum_norms_in_blocks(zero: Any) -> None:
    """Let ZeRO with its optimizer on the CPU read a gradient's norm in blocks, in float64 as before. DeepSpeed 0.19
    copies the whole gradient in float64: 4 GiB of a 7B model's head, for which a card of 24 GB has no room."""

    def set_norm(weight: nn.Parameter) -> None:
        number = zero.get_param_id(weight)
        _, start, _, count = zero.grad_position[number]
        share = zero.get_param_gradient_attribute(weight).view(-1).narrow(0, start, count)
        norms = [block.double().norm() for block in share.split(NORM_BLOCK)]
        zero.norm_for_param_grads[number] = torch.stack(norms).norm()

    zero.set_norm_for_param_grad_in_gpu = set_norm


def _longest_collective(config: TrainerConfig) -> timedelta:
    # The others wait for a rank that waits for servers.
    return timedelta(seconds=TIME_OUT + config.ref_deadline + (config.pool_deadline if config.sampler == "pool" else 0))


def engine_config(config: TrainerConfig, world_size: int, device: torch.device) -> dict[str, Any]:
    """Return the file with every "auto" filled. Raises ConfigError if the run contradicts it, or DeepSpeed."""
    file = _DeepSpeedFile(config.deepspeed)
    for key in {"optimizer", "scheduler"} & file.settings.keys():
        raise file.error(f"{key} is set there, and the run's settings decide it: take it out")
    place = _fill_zero(file, config)
    sequences, dtype = config.prompts_per_step * config.num_generations, resolve_dtype(config, device)
    filled = {
        "train_batch_size": sequences,
        "train_micro_batch_size_per_gpu": sequences // world_size,
        "gradient_accumulation_steps": 1,  # micro-batches are cut by a budget of tokens
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.max_grad_norm,
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled at the first start
        "bf16.enabled": dtype == torch.bfloat16,
        "bf16.check_grad_overflow": True,  # a step that is not finite is left out
        "zero_optimization.compute_grad_norm": True,
        "fp16.enabled": False,
        "wall_clock_breakdown": False,  # these time forward passes through the engine, past which the trainer's go
        "flops_profiler.enabled": False,
    }
    for key, value in filled.items():
        file.fill(key, value)
    zero = file.section("zero_optimization")
    if zero.get("overlap_comm") == "auto":
        zero["overlap_comm"] = world_size > 1  # one rank has no other to talk with, and would hold a second bucket
    data_types = file.section("data_types")
    known = ("bf16", "fp32") if dtype == torch.bfloat16 else ("fp32",)
    sums = data_types.setdefault("grad_accum_dtype", "auto")
    if sums == "auto":
        # ZeRO-2 takes the memory for fp32 sums of gradients anyway, for AdamW's step, unless the step is on the CPU:
        # then bf16 sums are kept there too, and fp32 ones would stay on the GPU.
        data_types["grad_accum_dtype"] = known[0] if place == "cpu" else "fp32"
    elif sums not in known:
        raise file.error(f"data_types.grad_accum_dtype is {sums!r}: with {dtype} use {' or '.join(known)}")
    settings = file.settings
    # DeepSpeed takes its default for a key that is missing.
    settings["zero_optimization"] = {key: value for key, value in zero.items() if value != "auto"}
    with refused_by_deepspeed(file.path, Exception):  # pydantic's, DeepSpeed's own, any other of a value's wrong type
        # Without the whole batch, which DeepSpeed compares with the ranks that have met: in a dry run none have.
        deepspeed.DeepSpeedConfig({key: value for key, value in settings.items() if key != "train_batch_size"})
    return settings


class _DeepSpeedFile:
    """A JSON file of DeepSpeed's settings."""

    def __init__(self, name: str):
        self.path = find_file(name)
        try:
            self.settings = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or f"not JSON: {error}"
            raise ConfigError(f"deepspeed='{name}': {reason}: give the path of a JSON file") from error
        if not isinstance(self.settings, dict):
            raise ConfigError(f"deepspeed='{name}': write a JSON object")

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"deepspeed='{self.path}': {text}")

    def section(self, name: str) -> dict[str, Any]:
        """Return a section, such as zero_optimization.offload_optimizer, which is added if the file has none."""
        section = self.settings
        for key in filter(None, name.split(".")):
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise self.error(f"{name} is {section!r}: write a JSON object, or take it out")
        return section

    def place(self, name: str) -> str:
        """Return where an offloading section, which may be missing, puts things: "cpu" or "none"."""
        parent, _, key = name.rpartition(".")
        place = self.section(name).get("device", "none") if key in self.section(parent) else "none"
        if place not in ("cpu", "none"):
            raise self.error(f"{name}.device is {place!r}: use 'cpu'")
        return place

    def fill(self, name: str, value: Any) -> None:
        """Set a key in its section. Raises ConfigError if it has another value."""
        place, _, key = name.rpartition(".")
        section = self.section(place)
        if section.get(key, "auto") not in ("auto", value):
            raise self.error(f"{name} is {section[key]!r}, and this run makes it {value!r}: write 'auto' there")
        section[key] = value


def _fill_zero(file: _DeepSpeedFile, config: TrainerConfig) -> str:
    """Complete the section of ZeRO. Return where its optimizer's state is: "cpu" or "none"."""
    file.settings.setdefault("zero_optimization", {"stage": 2})
    zero, name = file.section("zero_optimization"), "zero_optimization.offload_optimizer"
    if zero.get("stage") not in (2, 3):
        raise file.error(f"zero_optimization.stage is {zero.get('stage')!r}: use 2, or 3, which shares out weights too")
    place = file.place(name)
    if zero["stage"] == 3:
        file.place("zero_optimization.offload_param")
        _check_sharding(file, config)
    if config.optim == "adamw_8bit":
        require_packages("optim", config.optim, "bitsandbytes")
        if place != "none":
            raise ConfigError(
                f"optim={config.optim!r}: '{file.path}' has {name}, which wants AdamW on the CPU, in 32 bits: take one "
                "of them out"
            )
        file.fill("zero_allow_untested_optimizer", True)
    return place


def _check_sharding(file: _DeepSpeedFile, config: TrainerConfig) -> None:
    """Complete what ZeRO-3 has beyond ZeRO-2. Raises ConfigError for settings that need a rank's weights whole."""
    # Its own linear layers round the bias separately, and would be those of the whole process: log-probs in bfloat16
    # would be up to 0.04 from those of a worker or a reference.
    file.fill("zero_optimization.memory_efficient_linear", False)
    for kind in ("weights", "nontrainable_weights", "gradients"):
        file.fill(f"zero_optimization.zero_quantized_{kind}", False)
    file.fill("zero_optimization.zero_hpz_partition_size", 1)
    remedy = f"not with '{file.path}', whose stage 3 shares out the weights: "
    config.check(config.quantization == "none", quantization=remedy + "use none")
    config.check(config.optim != "adamw_8bit", optim=remedy + "use adamw_torch")
    config.check(not config.merge_on_save, merge_on_save=remedy + "merge the saved adapter afterwards")
    copies = config.beta > 0 and config.ref == "local"
    config.check(not copies, ref=remedy + "use server, or with an adapter adapter_off")
    config.check(not (config.ref_update_steps and config.use_peft), ref_update_steps=remedy + "use 0 with an adapter")


@contextmanager
def refused_by_deepspeed(path: str | Path, kind: type[Exception]) -> Iterator[None]:
    """Raise ConfigError for an error of DeepSpeed's checks of the file."""
    try:
        yield
    except kind as error:
        reason = one_line(error) or repr(error)
        raise ConfigError(f"deepspeed='{path}': DeepSpeed refuses it: {reason}: correct it there") from error


def keep_gradients_apart(zero: dict[str, Any], model: nn.Module) -> None:
    """Switch `overlap_comm` off if a trained weight is larger than a bucket, unless it is the embeddings. While one
    stream sums such a gradient, DeepSpeed 0.19 frees it on ranks that own no part of it, and the backward pass reuses
    its memory. The embeddings' gradient is the last of the pass."""
    embeddings, bucket = model.get_input_embeddings().weight, int(zero.get("reduce_bucket_size", 500_000_000))
    trained = (weight for weight in model.parameters() if weight.requires_grad and weight is not embeddings)
    largest = max((weight.numel() for weight in trained), default=0)
    if zero.get("overlap_comm") and largest > bucket:
        zero["overlap_comm"] = False
        log.info("overlap_comm is off: a weight has %d numbers, above reduce_bucket_size=%d", largest, bucket)
