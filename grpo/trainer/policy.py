"""The policy before its first step: loaded or counted, made trainable, with the sampler that draws from it."""

import logging

import torch
from transformers import PreTrainedModel

from grpo.config.trainer import TrainerConfig
from grpo.model.activations import checkpoint_activations, tile_mlps
from grpo.model.fingerprint import describe
from grpo.model.hub import base_of
from grpo.model.load import enough_memory, load_model
from grpo.model.logprobs import check_router
from grpo.model.lora import LocalReference, put_adapter, train_adapter
from grpo.model.memory import on_meta
from grpo.model.packing import Batcher
from grpo.model.pictures import freeze_vision_tower
from grpo.model.trial import check_shares, make_batcher
from grpo.run.preflight import check_alike
from grpo.sampling.sampler import Sampler
from grpo.sampling.self_check import make_sampler
from grpo.trainer.inputs import Inputs
from grpo.wire.health import ModelInfo

log = logging.getLogger(__name__)


def load_policy(config: TrainerConfig, inputs: Inputs, device: torch.device) -> tuple[PreTrainedModel, ModelInfo]:
    """Load the policy, and describe it before anything of it is changed."""
    log.info("loading %s", config.model_name_or_path)
    model = load_model(config, device, on_host=not inputs.begins_whole(config))
    policy_info = describe(model, inputs.tokenizer, config.model_name_or_path, inputs.processor)
    _check_model(model, config)
    check_alike({"the model's fingerprint": policy_info.fingerprint})
    return model, policy_info


def policy_on_meta(config: TrainerConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return what would be trained, without its weights. Raises ConfigError as a run would."""
    model = on_meta(config, dtype)
    if base_of(config.model_name_or_path) is not None:
        put_adapter(model, config.model_name_or_path)
    make_trainable(model, config)
    _check_model(model, config)
    return model


def _check_model(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Raise ConfigError if the model lacks what settings need."""
    if config.router_aux_loss_coef > 0:
        check_router(model, config.router_aux_loss_coef)
    if config.sequence_parallel_size > 1:
        check_shares(model.config, config.sequence_parallel_size)


def make_trainable(model: PreTrainedModel, config: TrainerConfig) -> LocalReference | None:
    """Add the adapter, freeze the rest, recompute activations; return the policy as its own reference."""
    came_with_adapter = config.use_peft and train_adapter(model, config)
    if config.freeze_vision_tower:
        freeze_vision_tower(model)
    if config.gradient_checkpointing:
        checkpoint_activations(model, config.activation_offloading)
    if config.tiled_mlp:
        tile_mlps(model)
    if config.beta == 0 or config.ref == "server":
        return None
    with enough_memory(config):
        return LocalReference(model, copies=came_with_adapter or config.ref == "local")


def choose_sampler(config: TrainerConfig, inputs: Inputs, model: PreTrainedModel) -> tuple[Batcher, Sampler | None]:
    """Try out which batches and which local sampler the model allows; none if nothing is drawn here."""
    with enough_memory(config):
        batcher = make_batcher(model, inputs.tokenizer.pad_token_id, inputs.processor)
        if not inputs.draws_here(config):
            return batcher, None
        return batcher, make_sampler(
            model,
            inputs.tokenizer,
            config.max_completion_length,
            rows=config.sequences_per_generate,
            packs=batcher.packs and config.sampler != "generate",
            vision=batcher.vision,
            turns=inputs.turns,
            cuda_graphs=config.cuda_graphs,
            fused_kernels=config.fused_kernels,
        )
