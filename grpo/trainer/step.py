"""One optimizer step from completions with their advantages, whatever the cut into ranks and micro-batches.

It trains on the tokens that the policy drew. What tools and environments answered between them is fed to the model, and
has no part in any number here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from grpo.algorithm.loss import DISTANCE, balance_loss, experts_chosen, grpo_loss
from grpo.algorithm.loss_types import StepSize, Tokens
from grpo.client.server_errors import ServerError, ServersLost
from grpo.config.loss_settings import LossSection
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Sample
from grpo.model.logprobs import router_logits, token_logprobs, with_router_logits
from grpo.model.packing import Batch, Batcher, Ids
from grpo.run.collective import gather, raise_together
from grpo.run.metrics import PhaseClock, Stats, add_stats
from grpo.wire.picture_files import pictures_of

DRIFT = "drift/"
"""before a group's id: the distance of the sampler's log-probs from the policy's, of each of its tokens"""
ReferenceRequests = Mapping[int, Future[list[np.ndarray]]]
"""The requests to the reference servers, by group id. An answer has the float32 log-probs of each completion."""


def update(
    engine,
    samples: Sequence[Sample],
    config: TrainerConfig,
    batcher: Batcher,
    clock: PhaseClock,
    beta: float,
    entropy_coef: float,
    requests: ReferenceRequests,
) -> dict[str, Stats]:
    """Do one optimizer step on this rank's samples and return this rank's stats by name. All ranks call it together.

    The gradient is that of the loss over the whole step: a token's weight is fixed by the step's size, and ZeRO's mean
    over ranks is undone by the factor world_size. The log-probs that the samples still lack are taken from the
    reference's answers to `requests`. Where samples are trained on again, their `old_logprobs` become the policy's
    log-probs before this step. A step whose loss or gradient is not finite changes nothing on any rank;
    `engine.was_step_applied()` tells. Nor does a step without a token to train on, where every completion of every rank
    is masked: then the engine is not called at all, and the stats have no "loss".

    Raises ServersLost on every rank, with the weights unchanged, where the reference has not answered one of them.
    """
    device = engine.module.device
    samples, _ = split_masked(samples, config)
    high_entropy = None
    if config.top_entropy_quantile < 1:
        with clock("old_logprobs"):
            _, entropies = policy_logprobs(engine.module, samples, config, batcher, with_entropy=True)
        high_entropy = _highest(entropies, config.top_entropy_quantile)
    micro_batches = _cut(samples, config, batcher)
    size, micro_batch_count = _whole_step(samples, high_entropy, len(micro_batches), device)

    if size.tokens == 0:
        return {}  # zero gradients would still let AdamW's momentum and weight decay move the weights
    chosen = None
    if config.router_aux_loss_coef > 0:
        with clock("routers"):
            chosen = _experts_chosen(engine.module, samples, micro_batches, batcher)
    lost: ServerError | None = None
    # They stay on the device until the step is done: to fetch one is to wait for all that was asked of the device.
    values: dict[str, list[torch.Tensor]] = defaultdict(list)
    sums: dict[str, list[torch.Tensor]] = defaultdict(list)
    compared: list[Sample] = []
    first_samples: list[Sample] = []
    first_logprobs: list[torch.Tensor] = []
    # ZeRO-2 reduces in every backward, so every rank must do equally many. A rank that has fewer, or nothing but empty
    # completions in one, computes one token of weight 0 instead: every parameter must take part.
    filler = Sample([0], [0], True, ref_logprobs=np.zeros(1, np.float32))
    # After a step, and at first, DeepSpeed 0.19 takes the next backward pass for its last. With an offloaded optimizer
    # it then drops, with the next micro-batch, each gradient that it reduced while the pass went on: all but those in
    # the last bucket.
    engine.optimizer.set_gradient_accumulation_boundary(False)
    for indices in micro_batches + [[]] * (micro_batch_count - len(micro_batches)):
        rows = [samples[index] for index in indices]
        real = any(sample.tokens for sample in rows)
        rows = rows if real else [filler]
        batch = _make(rows, batcher, device)
        lengths = torch.tensor([sample.tokens for sample in rows], device=device)
        if chosen is None:
            logprobs, entropy = token_logprobs(engine.module, batch, config.temperature, with_entropy=True)
        else:
            logprobs, entropy, routers = with_router_logits(engine.module, batch, config.temperature, with_entropy=True)
        ref_logprobs = None
        if config.beta > 0:
            with clock("wait_ref"):
                try:
                    wait_for_reference(rows, requests)
                    ref_logprobs = [sample.ref_logprobs for sample in rows]
                except ServerError as error:
                    # The other ranks are in this step's collectives: this one goes on with zeros, and all raise below.
                    lost, ref_logprobs = error, [np.zeros(sample.tokens, np.float32) for sample in rows]
        tokens = Tokens(
            lengths,
            torch.tensor([sample.advantage for sample in rows], device=device),
            logprobs,
            entropy,
            _joined([sample.old_logprobs for sample in rows], device),
            _joined(ref_logprobs, device),
            _joined([sample.sampling_logprobs for sample in rows], device),
            _joined([high_entropy[index] for index in indices] if high_entropy and real else None, device),
        )
        loss, metrics = grpo_loss(
            tokens,
            size,
            config,
            beta=beta,
            entropy_coef=entropy_coef,
            max_completion_length=config.max_completion_length,
        )
        if chosen is not None:
            imbalance = balance_loss(routers, chosen, size)
            loss = loss + config.router_aux_loss_coef * imbalance
        # DeepSpeed skips, on all ranks, a step whose gradient is not finite: a loss that is not finite becomes such.
        finite = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
        engine.backward(loss * finite * real * dist.get_world_size(), scale_wrt_gas=False)
        if not real:
            continue
        for name, metric in metrics.items():
            values[name].append(metric)
        if config.pool is not None and DISTANCE in metrics:
            compared += rows
        sums["loss"].append(loss.detach())
        if chosen is not None:
            sums["aux_loss"].append(imbalance.detach())
        if config.num_iterations > 1 and tokens.old_logprobs is None:
            first_samples += rows
            first_logprobs.append(logprobs.detach())
    raise_together(lost, ServersLost)
    with clock("optimizer"):
        engine.step()
    if not engine.was_step_applied():
        engine.optimizer.averaged_gradients.clear()  # with offload DeepSpeed would add the next step's gradient to this
    if first_samples:
        by_sample = torch.cat(first_logprobs).cpu().split([sample.tokens for sample in first_samples])
        for sample, old_logprobs in zip(first_samples, by_sample, strict=True):
            sample.old_logprobs = old_logprobs.numpy()
    stats: dict[str, Stats] = {}
    add_stats(stats, {name: torch.cat(parts) for name, parts in values.items()})
    if compared:
        lengths = [sample.tokens for sample in compared]
        for sample, distances in zip(compared, torch.cat(values[DISTANCE]).cpu().split(lengths), strict=True):
            add_stats(stats, {f"{DRIFT}{sample.group_id}:none": distances})
    return stats | {
        name: Stats(len(parts), sum(torch.stack(parts).tolist()), statistic="sum") for name, parts in sums.items()
    }


def wait_for_reference(samples: Sequence[Sample], requests: ReferenceRequests) -> None:
    """Fill in the reference's log-probs of the samples that lack them, as soon as they are answered. The reference
    scores the tokens of answers, too, which are left out.

    Raises ServerError where a request failed; its samples stay as they are.
    """
    for sample in samples:
        if sample.ref_logprobs is None:
            sample.ref_logprobs = sample.of_drawn(requests[sample.group_id].result()[sample.place])


def split_masked(samples: Sequence[Sample], config: LossSection) -> tuple[list[Sample], list[Sample]]:
    """Split the samples into those that an update trains on and those that mask_truncated_completions leaves out."""
    trained = [sample for sample in samples if sample.finished or not config.mask_truncated_completions]
    return trained, [sample for sample in samples if config.mask_truncated_completions and not sample.finished]


@torch.no_grad()
def policy_logprobs(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    config: TrainerConfig,
    batcher: Batcher,
    with_entropy: bool = False,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the model's log-probs of each sample, and its entropies on request: float32 [sample.tokens].

    They are bit for bit those of an update on the same samples, which cuts them into the same micro-batches: in
    bfloat16 another micro-batch rounds differently.
    """
    logprobs = [np.zeros(0, np.float32)] * len(samples)
    entropies = list(logprobs)
    for indices in _cut(samples, config, batcher):
        rows = [samples[index] for index in indices]
        if not any(sample.tokens for sample in rows):
            continue
        batch = _make(rows, batcher, model.device)
        lengths = [sample.tokens for sample in rows]
        computed = token_logprobs(model, batch, config.temperature, with_entropy)
        for result, values in zip((logprobs, entropies), computed, strict=True):
            if values is not None:
                for index, sample_values in zip(indices, values.cpu().split(lengths), strict=True):
                    result[index] = sample_values.numpy()
    return logprobs, entropies


@torch.no_grad()
def _experts_chosen(
    model: PreTrainedModel, samples: Sequence[Sample], micro_batches: list[list[int]], batcher: Batcher
) -> torch.Tensor:
    """Count how many of the step's tokens, on all ranks, chose each expert: float64 [experts]."""
    per_token = model.config.get_text_config().num_experts_per_tok
    total = torch.zeros(1, dtype=torch.float64, device=model.device)
    for indices in micro_batches:
        rows = [samples[index] for index in indices]
        if any(sample.tokens for sample in rows):
            batch = _make(rows, batcher, model.device)
            total = total + experts_chosen(router_logits(model, batch), per_token)
    return sum(gather(total.cpu()))  # a rank without tokens adds a 0


def _cut(samples: Sequence[Sample], config: TrainerConfig, batcher: Batcher) -> list[list[int]]:
    """Cut the samples into micro-batches: the indices of each. The tokens of answers count, for they are fed."""
    return batcher.cut(_sequences(samples), config.micro_batch_tokens)


def _sequences(samples: Sequence[Sample]) -> list[tuple[Ids, Ids]]:
    return [(sample.prompt_ids, sample.completion_ids) for sample in samples]


def _make(samples: Sequence[Sample], batcher: Batcher, device: torch.device) -> Batch:
    """Make a micro-batch; where the vision tower is trained and no prompt has a picture, with a small one beside them.

    ZeRO-2 sums a backward pass's gradients over the ranks as they arrive, a bucket at a time. Another rank may have
    pictures in this pass: with other gradients, or the same in another order, ranks would add up what does not belong
    together, or wait for ever. Zeros added to the loss would bring all gradients, but not in the order of the vision
    tower's own pass, so it runs: over a picture without a completion, whose gradient is 0. On one rank it is needed
    too: for an offloaded parameter without a gradient DeepSpeed takes that of the step before.
    """
    sequences, drawn = _sequences(samples), [sample.drawn for sample in samples]
    filler = batcher.vision.filler if batcher.vision is not None else None
    if filler is not None and not any(pictures_of(prompt) for prompt, _ in sequences):
        sequences.append((filler, []))
        drawn.append(None)
    return batcher.make(sequences, device, drawn)


def _joined(parts: list[np.ndarray | None] | None, device: torch.device) -> torch.Tensor | None:
    """Join the parts to one tensor. Of a batch's samples all have a part or none has: then return None."""
    return None if parts is None or parts[0] is None else torch.from_numpy(np.concatenate(parts)).to(device)


def _highest(entropies: list[np.ndarray], share: float) -> list[np.ndarray]:
    """Mark the tokens whose entropy is within the highest `share` of the step's, over all ranks: bool, shaped as given.

    Wang et al. 2025, "Beyond the 80/20 Rule", arXiv:2506.01939, equation 6. The quantile is interpolated, as TRL does.
    """
    all_entropies = np.concatenate(gather(np.concatenate([np.zeros(0, np.float32), *entropies])))
    threshold = np.quantile(all_entropies, 1 - share) if len(all_entropies) else 0.0
    return [values >= threshold for values in entropies]


def _whole_step(
    samples: Sequence[Sample], high_entropy: list[np.ndarray] | None, micro_batches: int, device: torch.device
) -> tuple[StepSize, int]:
    """Return the step's size over all ranks, and how many micro-batches the rank with the most of them has."""
    tokens = sum(sample.tokens for sample in samples)
    high = tokens if high_entropy is None else sum(int(marks.sum()) for marks in high_entropy)
    sums = torch.tensor([len(samples), tokens, high], device=device)
    largest = torch.tensor(micro_batches, device=device)
    dist.all_reduce(sums)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return StepSize(*sums.tolist()), int(largest)
