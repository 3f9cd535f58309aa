"""A reward model: a sequence-classification model with one output, which scores a whole text.

A chat is rendered by the reward model's own template, which writes every special token: another model's control tokens
would be plain words to it. Without a template the messages follow each other as plain text, and the tokenizer adds its
special tokens. A text's score does not depend on its batch. Rows are padded on the right.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo.config.errors import ConfigError, one_line, require
from grpo.config.sampling_settings import SharedConfig
from grpo.model.devices import refuse_shortage
from grpo.model.fingerprint import describe
from grpo.model.hub import base_of, check_model_name, refuse_unloadable
from grpo.model.load import refuse_hub_kernels, render_chat, resolve_dtype
from grpo.model.packing import Batcher
from grpo.wire.health import ModelInfo
from grpo.wire.logprobs import LogprobsRequest
from grpo.wire.refusals import ProtocolError, check_number, malformed
from grpo.wire.rewards import Input, Message, RewardRequest

PADDED = Batcher(pad_token_id=0, packs=False)  # cuts texts by a token budget; `sequence_scores` pads the rows

_CHARACTERS_A_TOKEN = 64
"""no text has more characters a token on average: a longer text is refused before it is tokenised"""


def load_reward_model(
    config: SharedConfig, field: str, name: str, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a reward model. Raises ConfigError, naming `field`, if it does not exist or does not give one score."""
    check_model_name(field, name)
    options = {"trust_remote_code": config.trust_remote_code}
    remedy = "give a folder, or a hub id that this machine can reach, of a sequence-classification model"
    with refuse_unloadable(field, name, remedy):
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        settings = AutoConfig.from_pretrained(base_of(name) or name, **options)
        refuse_hub_kernels(field, name, settings, config.trust_remote_code)
        options |= {"dtype": resolve_dtype(config, device), "output_loading_info": True}
        model, loading = AutoModelForSequenceClassification.from_pretrained(name, **options)
    missing, outputs = min(loading["missing_keys"], default=None), model.config.num_labels
    remedy = "name a model that was trained to give a reward"
    require(missing is None, field, name, f"its weights lack {missing}, so its scores would be random: {remedy}")
    require(outputs == 1, field, name, f"it gives {outputs} numbers for a text: name a model with one (num_labels 1)")
    model.config.get_text_config().use_cache = False  # nothing is generated: keys and values are not kept
    with refuse_shortage(field, name, "free the device's memory, or serve it from another card (--task reward)"):
        return model.eval().requires_grad_(False).to(device), tokenizer


def try_template(config: SharedConfig, name: str, conversation: list[Message]) -> None:
    """Render a conversation by a reward model's chat template, before it is loaded. Raises ConfigError if it cannot."""
    check_model_name("reward_funcs", name)
    with refuse_unloadable("reward_funcs", name):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    try:
        _render(tokenizer, 0, conversation)
    except ProtocolError as error:
        remedy = "correct chat_template.jinja in its folder, or use another reward model"
        raise ConfigError(f"reward_funcs={name!r}: {error}: {remedy}") from error


def describe_reward(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> ModelInfo:
    info = describe(model, tokenizer, name)
    # RoBERTa has two more positions than it takes tokens.
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
    tokenizer: PreTrainedTokenizerBase, body: bytes, *, max_length: int, max_sequences: int, max_tokens: int
) -> LogprobsRequest:
    """Read a request's texts as prompts without a completion. Raises ProtocolError: 400; 413 and 422 beyond limits."""
    request = RewardRequest.from_json(body, max_sequences)
    ids: list[np.ndarray] = []
    tokens = 0
    for text in tokenize(tokenizer, request.inputs, max_length):
        ids.append(text)
        tokens += len(text)
        check_number("tokens", tokens, max_tokens)
    lengths = np.array([len(text) for text in ids], np.int32)
    return LogprobsRequest(
        input_ids=np.concatenate(ids),
        prompt_lengths=lengths,
        completion_lengths=np.zeros_like(lengths),
        request_id=request.request_id,
        client=request.client,
    )


@torch.inference_mode()
def sequence_scores(model: PreTrainedModel, texts: list[np.ndarray]) -> np.ndarray:
    """Score texts, given as ids, in one forward pass. Return float32 [texts]."""
    config = model.config.get_text_config()
    original = config.pad_token_id
    config.pad_token_id = pad = _padding(original, texts)
    rows = [torch.from_numpy(text.astype(np.int64)) for text in texts]
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    try:
        logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
    finally:
        config.pad_token_id = original
    return logits[:, 0].float().cpu().numpy()


def scores_for_queue(
    model: PreTrainedModel,
    batcher: Batcher,
    sequences: list[tuple[np.ndarray, np.ndarray]],
    temperature: float,
    top_k: int,
) -> tuple[list[np.ndarray], int]:
    """Score a batch for the server's Worker: float32 [1] of each sequence, and the tokens of the forward pass."""
    texts = [np.concatenate(sequence) for sequence in sequences]  # only the Worker's probe has a completion
    return np.split(sequence_scores(model, texts), len(texts)), len(texts) * max(map(len, texts))


def _padding(configured: int | None, texts: list[np.ndarray]) -> int:
    """Return the model's padding id, or without one an id that no text ends in.

    A decoder takes its score at a row's last token that is not padding: it must be a text's last token.
    """
    if configured is not None and configured >= 0:
        return configured
    last_tokens = {int(text[-1]) for text in texts}
    return next(token for token in range(len(last_tokens) + 1) if token not in last_tokens)


def _render(tokenizer: PreTrainedTokenizerBase, place: int, messages: list[Message]) -> str:
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in messages)
    try:
        return render_chat(tokenizer, messages)
    except Exception as error:  # a template is a program that comes with the model: it may raise anything
        if [message["role"] for message in messages[:2]] == ["system", "user"]:
            # Gemma's template knows no system: as its authors do, its text goes before the user's first.
            system, first, *others = messages
            joined = first | {"content": f"{system['content']}\n\n{first['content']}"}
            return _render(tokenizer, place, [joined, *others])
        reason = f"the reward model's chat template refuses these messages ({one_line(error)})"
        raise malformed(f"input {place}: {reason}") from error
