"""The choice of the local sampler at the start: does it draw from the distribution that the loss scores?"""

import logging
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.errors import ConfigError, one_line
from grpo.data.records import Example, Responder
from grpo.model.devices import is_out_of_memory, runs_kernels
from grpo.model.load import eos_token_ids
from grpo.model.logprobs import body_of, token_logprobs
from grpo.model.packing import Batcher
from grpo.model.pictures import Vision
from grpo.model.token_pass import cannot_fuse
from grpo.model.trial import distance, refused_distance, small_windows, trial_sequences
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.generate import LocalSampler
from grpo.sampling.rows import StepGraphs
from grpo.wire.picture_files import with_more

log = logging.getLogger(__name__)

# Layers with which a token that is drawn attends to other keys than when it is scored, in rows that are longer than the
# trial's: MiniMax-M3's and DeepSeek-V4's blocks of keys are counted from a row's first column, padding included, and
# Unlimited-OCR's window moves over drawn tokens only.
DRAWN_FROM_OTHER_KEYS = {
    *("minimax_m3_sparse", "reference_sliding_attention"),
    *("heavily_compressed_attention", "compressed_sparse_attention"),
}


def check_sampling(
    model: PreTrainedModel, sampler: LocalSampler, pad_token_id: int, vision: Vision | None = None
) -> None:
    """Draw two completions of a prompt beside a longer prompt, so that generate pads it on the left; with `vision` both
    have pictures. Logs a small difference between their log-probs and the loss's. Raises ConfigError for a large one,
    or if the model cannot draw them."""
    *_, (longer, rest), (prompt, _) = trial_sequences(model, vision)
    examples = [Example(index=0, prompt="", prompt_ids=ids, columns={}) for ids in (prompt, with_more(longer, rest))]
    try:
        drawn, _ = sampler.sample(examples, 2, 1.0, seed=0)
    # The model's own code may fail in any way.
    except Exception as error:
        if is_out_of_memory(error):  # says nothing about the model
            raise
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise ConfigError(f"{type(model).__name__} cannot draw tokens ({reason}): use another model") from error
    *_, (different, _) = trial_sequences(model, vision, prompts_at=5)
    batcher = Batcher(pad_token_id, packs=False, vision=vision)
    after = [[(ids, rollout.completion_ids) for rollout in drawn] for ids in (prompt, different)]
    with torch.no_grad():
        scored, moved = (token_logprobs(model, batcher.make(rows, model.device), 1.0)[0].cpu() for rows in after)
    difference = distance(torch.tensor([value for rollout in drawn for value in rollout.sampling_logprobs]), scored)
    if not difference <= refused_distance(model, distance(moved, scored)):
        raise ConfigError(
            f"{type(model).__name__} draws tokens with other log-probs (by {difference:.1e} on average) than it gives "
            "them afterwards, in a batch with a longer prompt: use another model"
        )
    if model.dtype == torch.float32 and difference > 1e-4:
        log.warning(
            "%s draws tokens with other log-probs (by %.1e on average) than it gives them afterwards: the metrics "
            "sampling/... and the weights of importance_sampling_mode contain this difference",
            type(model).__name__,
            difference,
        )


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A way to draw with rows that are always full."""

    graphs: type[StepGraphs] | None
    is_fused: bool
    instead: str
    """how it goes if the trial shows that this does not, as part of a sentence"""


def _ways(model: PreTrainedModel, cuda_graphs: bool, fused_kernels: bool) -> list[_Way]:
    """Return the ways that can be tried, the fastest first."""
    graphs, ways = StepGraphs if cuda_graphs and model.device.type == "cuda" else None, []
    if fused_kernels and runs_kernels(model.device):
        if reason := cannot_fuse(body_of(model)):
            log.info("%s draws without fused kernels: %s", type(model).__name__, reason)
        else:
            ways.append(_Way(graphs=graphs, is_fused=True, instead="without fused kernels"))
    if graphs is not None:
        ways.append(_Way(graphs=graphs, is_fused=False, instead="without CUDA graphs"))
    return [*ways, _Way(graphs=None, is_fused=False, instead="by transformers' generate")]


def make_sampler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_completion_length: int,
    *,
    rows: int = 64,
    packs: bool = False,
    vision: Vision | None = None,
    turns: Responder | None = None,
    cuda_graphs: bool = True,
    fused_kernels: bool = True,
) -> LocalSampler:
    """Choose the sampler that keeps its rows full if the model allows it, else transformers' generate. On a GPU its
    steps are the kernels of grpo/kernels and CUDA graphs, if wanted, and if the trial shows that the model allows it.
    `packs` is the batcher's; False asks for generate. `turns` may have a `sampler` of their own, a ContinuousSampler
    that must do. Raises ConfigError if even generate would draw from another distribution."""
    for layer_type in getattr(model.config.get_text_config(), "layer_types", None) or ():
        if layer_type in DRAWN_FROM_OTHER_KEYS:
            reason = "in long rows a token is drawn from another distribution than it is trained on: use another model"
            raise ConfigError(f"{type(model).__name__} has layers of type {layer_type}: {reason}")
    never, pad = model.get_input_embeddings().weight.shape[0], tokenizer.pad_token_id  # no early end
    check_sampling(model, LocalSampler(model, tokenizer, [never], 4, vision=vision), pad, vision)
    ends, continuous = eos_token_ids(model, tokenizer), getattr(turns, "sampler", ContinuousSampler)

    def make(kind: type[LocalSampler], **options) -> LocalSampler:
        return kind(model, tokenizer, ends, max_completion_length, rows=rows, vision=vision, turns=turns, **options)

    def make_plain() -> LocalSampler:
        if continuous is not ContinuousSampler:
            reason = f"{type(model).__name__} is drawn by transformers' generate, and an agent asks rows one by one"
            raise ConfigError(f"{reason}: use another model")
        return make(LocalSampler)

    if not packs:
        return make_plain()
    for way in _ways(model, cuda_graphs, fused_kernels):
        # Three rows for four completions: one waits, and the last row moves. Of the three steps with three rows, and of
        # those with one, the second records a graph and the third replays it.
        graphs = way.graphs and partial(way.graphs, refuse_waits=True)
        tried = ContinuousSampler(
            model, tokenizer, [never], 4, rows=3, vision=vision, graphs=graphs, fused=way.is_fused
        )
        try:
            with small_windows(model):
                check_sampling(model, tried, pad, vision)
        except ConfigError as error:
            reason = str(error).removesuffix(": use another model")
            log.warning("sampling goes a slower way, %s: %s", way.instead, reason)
        else:
            return make(continuous, graphs=way.graphs, fused=way.is_fused)
    return make_plain()
