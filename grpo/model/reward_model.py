"""A reward model: a sequence-classification model with one output, which scores a whole text.

A chat is rendered by the reward model's own template, which may differ from the policy's: another model's control
tokens would be plain words to it. A template writes every special token, so the tokenizer adds none. Without a template
the messages follow each other as plain text, and the tokenizer adds its special tokens ([CLS] and [SEP], for example).

A text's score does not depend on its batch: transformers computes the same for the text alone. Rows are padded on the
right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import jinja2
import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import grpo.model.template_limit  # noqa: F401  it limits templates
from grpo.config.errors import ConfigError
from grpo.config.sampling_settings import SharedConfig
from grpo.model.fingerprint import describe
from grpo.model.hub import check_model_name, refuse_damaged
from grpo.model.load import refuse_hub_kernels, resolve_dtype
from grpo.model.lora import base_of
from grpo.model.packing import Batcher
from grpo.wire.health import ModelInfo
from grpo.wire.logprobs import LogprobsRequest
from grpo.wire.refusals import ProtocolError, check_number, malformed
from grpo.wire.rewards import Input, Message, RewardRequest

PADDED = Batcher(pad_token_id=0, longest_packed=0)
"""cuts texts by a token budget; `sequence_scores` pads the rows"""

_CHARACTERS_A_TOKEN = 64
"""no text has more characters a token on average: a longer text is refused before it is tokenised"""


def load_reward_model(
    config: SharedConfig, field: str, name: str, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a reward model. Raises ConfigError, naming `field`, if it does not exist or does not give one score."""
    check_model_name(field, name)
    options = {"trust_remote_code": config.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        settings = AutoConfig.from_pretrained(base_of(name) or name, **options)
        refuse_hub_kernels(field, name, settings, config.trust_remote_code)
        with refuse_damaged(field, name, name):
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                name, dtype=resolve_dtype(config, device), output_loading_info=True, **options
            )
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{field}={name!r}: cannot be loaded as a reward model ({reason}): give a local folder, or a hub id that "
            "this machine can reach, of a sequence-classification model"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"{field}={name!r}: its weights lack {missing[0]}, so its scores would be random: name a model that was "
            "trained to give a reward"
        )
    if model.config.num_labels != 1:
        raise ConfigError(
            f"{field}={name!r}: it gives {model.config.num_labels} numbers for a text: name a model with one output "
            "(num_labels 1)"
        )
    model.config.get_text_config().use_cache = False  # nothing is generated: keys and values are not kept
    return model.eval().requires_grad_(False).to(device), tokenizer


def describe_reward(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> ModelInfo:
    info = describe(model, tokenizer, name)
    # The tokenizer's limit is the right one: RoBERTa has two more positions than it takes tokens.
    return replace(info, max_length=min(info.max_length, tokenizer.model_max_length))


def tokenize(tokenizer: PreTrainedTokenizerBase, inputs: Iterable[Input], max_length: int) -> Iterator[np.ndarray]:
    """Tokenise texts, and chats by the tokenizer's template, and yield the int32 ids of each.

    Raises ProtocolError: 422 for a text of more than `max_length` tokens, 400 for one that cannot be scored at all.
    """
    added = tokenizer.chat_template is None
    for place, item in enumerate(inputs):
        text = item if isinstance(item, str) else _render(tokenizer, place, item)
        size = f"{len(text)} characters"
        if len(text) <= _CHARACTERS_A_TOKEN * max_length:
            # Not verbose: the tokenizer only warns of lengths that are refused below.
            ids = np.asarray(tokenizer(text, add_special_tokens=added, verbose=False)["input_ids"], np.int32)
            size = f"{len(ids)} tokens"
            if len(ids) == 0:
                raise malformed(f"input {place} is a text without a token, which has no score")
            if len(ids) <= max_length:
                yield ids
                continue
        message = f"sequence {place} has {size}: this model takes at most {max_length} tokens"
        raise ProtocolError(422, "sequence_too_long", message)


def read_request(
    tokenizer: PreTrainedTokenizerBase, body: bytes, max_length: int, max_sequences: int, max_tokens: int
) -> LogprobsRequest:
    """Read a request's texts as tokens for the server's queue: prompts without a completion.

    Raises ProtocolError: 400 for anything malformed, 413 and 422 beyond the limits.
    """
    request = RewardRequest.from_json(body, max_sequences)
    ids: list[np.ndarray] = []
    tokens = 0
    for text in tokenize(tokenizer, request.inputs, max_length):
        ids.append(text)
        tokens += len(text)
        check_number("tokens", tokens, max_tokens)
    lengths = np.array([len(text) for text in ids], np.int32)
    return LogprobsRequest(
        np.concatenate(ids), lengths, np.zeros_like(lengths), request_id=request.request_id, client=request.client
    )


@torch.inference_mode()
def sequence_scores(model: PreTrainedModel, texts: list[np.ndarray]) -> np.ndarray:
    """Score texts, given as ids, in one forward pass. Return float32 [texts]."""
    pad = _padding(model, texts)
    ids = np.full((len(texts), max(map(len, texts))), pad, np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    config = model.config.get_text_config()
    original, config.pad_token_id = config.pad_token_id, pad
    try:
        logits = model(
            input_ids=torch.from_numpy(ids).to(model.device), attention_mask=torch.from_numpy(mask).to(model.device)
        ).logits
    finally:
        config.pad_token_id = original
    return logits[:, 0].float().cpu().numpy()


def scores_for_queue(
    model: PreTrainedModel, batcher: Batcher, sequences: list[tuple[np.ndarray, np.ndarray]], temperature: float
) -> tuple[list[np.ndarray], int]:
    """Score a batch for the server's Worker: float32 [1] of each sequence, and the tokens of the forward pass."""
    texts = [np.concatenate(sequence) for sequence in sequences]  # only the Worker's probe has a completion
    return np.split(sequence_scores(model, texts), len(texts)), len(texts) * max(map(len, texts))


def _padding(model: PreTrainedModel, texts: list[np.ndarray]) -> int:
    """Return the model's padding id, or without one an id that no text ends in.

    A decoder takes its score at a row's last token that is not padding. Without a padding id that is the last token of
    a text alone, and must be the last one in a batch too.
    """
    configured = model.config.get_text_config().pad_token_id
    if configured is not None and configured >= 0:
        return configured
    last_tokens = {int(text[-1]) for text in texts}
    return next(token for token in range(len(last_tokens) + 1) if token not in last_tokens)


def _render(tokenizer: PreTrainedTokenizerBase, place: int, messages: list[Message]) -> str:
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in messages)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except jinja2.TemplateError as error:
        raise malformed(f"input {place}: the reward model's chat template refuses these messages ({error})") from error
