"""Describe a model so that two processes can tell whether they have the same one."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.model.load import NO_LIMIT, longest_sequence
from grpo.model.lora import quantization_of, scalings, unpacked
from grpo.model.pictures import PictureProcessor
from grpo.model.sharded import shape_of
from grpo.model.weights_file import WeightsFile, sample
from grpo.wire.health import ModelInfo, fingerprint

# Fields in which the configurations of two equal models may differ. The samples are those of unpacked weights.
_VOLATILE = {
    *("_name_or_path", "transformers_version", "dtype", "use_cache", "architectures", "weights_sha256"),
    *("quantization_config", "pad_token_id", "bos_token_id", "eos_token_id"),
}


PROBE = (
    "Tom has 3.5 apples, 1,234,567 pears and -42 plums:\n\tx = (a+b)**2 # naïve Straße\r\n  don't   WON'T "
    "日本語 한국어 العربية עברית हिन्दी 🍎👩‍👩‍👧 \u200b∑∫≠ <think></think> http://a.b/c?d=e&f\n\n\nEnd."
)
"""text in which tokenizers differ: numbers, blanks, line ends, code, contractions, scripts, joined signs, tags"""


def describe(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, processor: PictureProcessor | None = None
) -> ModelInfo:
    """Return a model's identity for both sides of the wire."""
    info = describe_without_weights(model, tokenizer, name, processor)
    weights = (unpacked(parameter).flatten() for parameter in model.parameters())
    samples = (values[sample(len(values))] for values in weights)
    digest = getattr(model.config, "weights_sha256", "")
    return replace(info, fingerprint=_fingerprint(model, info.inputs_fingerprint, samples, digest))


def describe_without_weights(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, processor: PictureProcessor | None = None
) -> ModelInfo:
    """Describe a model that may be on device meta: without `fingerprint`."""
    placed = getattr(model, "hf_device_map", None)
    return ModelInfo(
        name=name,
        tokenizer_fingerprint=fingerprint(tokenizer.get_vocab()),
        text_fingerprint=fingerprint(_special_tokens(tokenizer), tokenizer.encode(PROBE, add_special_tokens=False)),
        config_fingerprint=fingerprint(_settings(model.config.to_dict())),
        vocab_size=shape_of(model.get_input_embeddings().weight)[0],
        max_length=longest_sequence(model.config) or NO_LIMIT,
        dtype=str(model.dtype).removeprefix("torch."),
        device=", ".join(sorted({str(place) for place in placed.values()})) if placed else str(model.device),
        quantization=quantization_of(model),
        processor_fingerprint=processor.fingerprint if processor is not None else "",
    )


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, str]]:
    added = sorted(tokenizer.added_tokens_decoder.items())
    return [(token_id, token.content) for token_id, token in added if token.special]


def fingerprint_with(model: PreTrainedModel, inputs: str, weights: WeightsFile, digest: str) -> str:
    """Return the fingerprint that `describe` would give `model` with these weights. `digest`: its config's
    `weights_sha256` then, for differences that no sample shows; `inputs`: its ModelInfo's `inputs_fingerprint`."""
    samples = (weights.read(name, sample(shape_of(values).numel())) for name, values in model.named_parameters())
    return _fingerprint(model, inputs, samples, digest)


def _fingerprint(model: PreTrainedModel, inputs: str, samples: Iterable[torch.Tensor], digest: str) -> str:
    settings = _settings(model.config.to_dict())
    if adapter_scalings := scalings(model):
        settings["adapter_scalings"] = adapter_scalings
    # Rounded to bfloat16, so that the same weights loaded in another dtype give the same fingerprint.
    rounded = [values.to(torch.bfloat16).float().cpu().numpy() for values in samples]
    return fingerprint(settings, inputs, np.concatenate(rounded).tobytes(), *([digest] if digest else []))


def _settings(config: dict) -> dict:
    """Return the configuration without the fields in which two equal models may differ."""
    kept = config.keys() - _VOLATILE
    return {name: _settings(config[name]) if isinstance(config[name], dict) else config[name] for name in kept}
