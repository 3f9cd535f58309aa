"""One optimizer step from completions with their advantages, whatever the cut into ranks and micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from grpo.algorithm.loss import StepSize, Tokens, balance_loss, experts_chosen, grpo_loss
from grpo.client.errors import ServerError, ServersLost
from grpo.config.trainer import TrainerConfig
from grpo.model.logprobs import router_logits, token_logprobs, with_router_logits
from grpo.model.packing import Batcher
from grpo.rollouts.records import Sample
from grpo.run.collective import gather, raise_together
from grpo.run.metrics import Stats, add_stats
from grpo.run.phase_clock import PhaseClock


class NothingLearned(Exception):
    """Too many steps in a row from which the policy learned nothing."""


def update(
    engine,
    sequences: Sequence[Sample],
    config: TrainerConfig,
    batcher: Batcher,
    clock: PhaseClock,
    beta: float,
    entropy_coef: float,
) -> dict[str, Stats]:
    """One optimizer step from this rank's sequences; all ranks call it together. Returns this rank's stats by name.

    The gradient is that of the loss over the whole step: a token's weight is fixed by the step's size, and ZeRO's mean
    over ranks is undone by the factor world_size. Where sequences are to be trained on again, their `old_logprobs` are
    set to what the policy says of them here, before this step. A step whose loss or gradient is not finite changes
    nothing on any rank; `engine.was_step_applied()` says so. Nor does one without a token to train on, where every
    completion of every rank is masked: the engine does not hear of it, and the stats have no "loss".

    Raises ServersLost, on every rank and with the weights as they were, where one gets no answer of the reference.
    """
    device = engine.module.device
    sequences, _ = sort_out(sequences, config)
    high_entropy = None
    if config.top_entropy_quantile < 1:
        with clock("old_logprobs"):
            _, entropies = policy_logprobs(engine.module, sequences, config, batcher, with_entropy=True)
        high_entropy = _highest(entropies, config.top_entropy_quantile)
    micro_batches = _cut(sequences, config, batcher)
    size, most = _whole_step(sequences, high_entropy, len(micro_batches), device)

    if size.tokens == 0:
        return {}  # zero gradients would still let AdamW's momentum and weight decay move the weights
    chosen = None
    if config.router_aux_loss_coef > 0:
        with clock("routers"):
            chosen = _experts_chosen(engine.module, sequences, micro_batches, batcher)
    lost: ServerError | None = None
    # They stay on the device until the step is done: to fetch one is to wait for all that was asked of the device.
    values: dict[str, list[torch.Tensor]] = defaultdict(list)
    sums: dict[str, list[torch.Tensor]] = defaultdict(list)
    again: list[Sample] = []
    first_logprobs: list[torch.Tensor] = []
    # ZeRO-2 reduces in every backward, so every rank must do equally many. A rank that has fewer, or nothing but empty
    # completions in one, goes through the same motions with one token of weight 0: every parameter must take part.
    filler = Sample([0], [0], True, ref_logprobs=lambda: np.zeros(1, np.float32))
    for indices in micro_batches + [[]] * (most - len(micro_batches)):
        rows = [sequences[index] for index in indices]
        real = any(one.completion_ids for one in rows)
        rows = rows if real else [filler]
        batch = batcher.make([(one.prompt_ids, one.completion_ids) for one in rows], device)
        lengths = torch.tensor([len(one.completion_ids) for one in rows], device=device)
        if chosen is None:
            logprobs, entropy = token_logprobs(engine.module, batch, config.temperature, with_entropy=True)
        else:
            logprobs, entropy, routers = with_router_logits(engine.module, batch, config.temperature, with_entropy=True)
        reference = None
        if config.beta > 0:
            with clock("wait_ref"):
                try:
                    reference = [one.ref_logprobs() for one in rows]
                except ServerError as error:
                    # The others are in this step's collectives: it goes through its motions, to no effect.
                    lost, reference = error, [np.zeros(len(one.completion_ids), np.float32) for one in rows]
        tokens = Tokens(
            lengths,
            torch.tensor([one.advantage for one in rows], device=device),
            logprobs,
            entropy,
            _joined([one.old_logprobs for one in rows], device),
            _joined(reference, device),
            _joined([one.sampling_logprobs for one in rows], device),
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
        # DeepSpeed leaves out, on all ranks, a step whose gradient is not finite: so it is where the loss is not.
        finite = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
        engine.backward(loss * finite * real * dist.get_world_size(), scale_wrt_gas=False)
        if not real:
            continue
        for name, metric in metrics.items():
            values[name].append(metric)
        sums["loss"].append(loss.detach())
        if chosen is not None:
            sums["aux_loss"].append(imbalance.detach())
        if config.num_iterations > 1 and tokens.old_logprobs is None:
            again += rows
            first_logprobs.append(logprobs.detach())
    raise_together(lost, ServersLost, device)
    with clock("optimizer"):
        engine.step()
    if not engine.was_step_applied():
        engine.optimizer.averaged_gradients.clear()  # with offload DeepSpeed would add the next step's gradient to this
    if again:
        of_each = torch.cat(first_logprobs).cpu().split([len(one.completion_ids) for one in again])
        for sequence, its in zip(again, of_each, strict=True):
            sequence.old_logprobs = its.numpy()
    stats: dict[str, Stats] = {}
    add_stats(stats, {name: torch.cat(parts) for name, parts in values.items()})
    return stats | {name: Stats(len(parts), sum(torch.stack(parts).tolist())) for name, parts in sums.items()}


def sort_out(sequences: Sequence[Sample], config: TrainerConfig) -> tuple[list[Sample], list[Sample]]:
    """Those that an update trains on, and those that it leaves out."""
    trained = [one for one in sequences if one.finished or not config.mask_truncated_completions]
    return trained, [one for one in sequences if config.mask_truncated_completions and not one.finished]


@torch.no_grad()
def policy_logprobs(
    model: PreTrainedModel,
    sequences: Sequence[Sample],
    config: TrainerConfig,
    batcher: Batcher,
    with_entropy: bool = False,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the model says now of each sequence: log-probs, and on request entropies. float32 [len(completion_ids)].

    They are bit for bit those of an update on the same sequences, which cuts them into the same micro-batches: in
    bfloat16 another micro-batch rounds otherwise.
    """
    logprobs = [np.zeros(0, np.float32)] * len(sequences)
    entropies = list(logprobs)
    for indices in _cut(sequences, config, batcher):
        rows = [sequences[index] for index in indices]
        if not any(one.completion_ids for one in rows):
            continue
        batch = batcher.make([(one.prompt_ids, one.completion_ids) for one in rows], model.device)
        lengths = [len(one.completion_ids) for one in rows]
        both = token_logprobs(model, batch, config.temperature, with_entropy)
        for every, values in zip((logprobs, entropies), both, strict=True):
            if values is not None:
                for index, own in zip(indices, values.cpu().split(lengths), strict=True):
                    every[index] = own.numpy()
    return logprobs, entropies


@torch.no_grad()
def _experts_chosen(
    model: PreTrainedModel, sequences: Sequence[Sample], micro_batches: list[list[int]], batcher: Batcher
) -> torch.Tensor:
    """How many of the step's tokens, on all ranks, chose each expert. float64 [experts]."""
    per_token = model.config.get_text_config().num_experts_per_tok
    total = torch.zeros(1, dtype=torch.float64, device=model.device)
    for indices in micro_batches:
        rows = [sequences[index] for index in indices]
        if any(row.completion_ids for row in rows):
            batch = batcher.make([(row.prompt_ids, row.completion_ids) for row in rows], model.device)
            total = total + experts_chosen(router_logits(model, batch), per_token)
    return sum(gather(total.cpu()))  # a rank without tokens adds a 0


def _cut(sequences: Sequence[Sample], config: TrainerConfig, batcher: Batcher) -> list[list[int]]:
    return batcher.cut([(one.prompt_ids, one.completion_ids) for one in sequences], config.micro_batch_tokens)


def _joined(parts: list[np.ndarray | None] | None, device: torch.device) -> torch.Tensor | None:
    """One after the other; None where there are none. Of a batch's sequences all have some, or none has."""
    return None if parts is None or parts[0] is None else torch.from_numpy(np.concatenate(parts)).to(device)


def _highest(entropies: list[np.ndarray], share: float) -> list[np.ndarray]:
    """bool, as long as each: the tokens whose entropy is within the highest `share` of the step's, over all ranks.

    Wang et al. 2025, "Beyond the 80/20 Rule", arXiv:2506.01939, equation 6. The quantile is interpolated, as TRL does.
    """
    every = np.concatenate(gather(np.concatenate([np.zeros(0, np.float32), *entropies])))
    threshold = np.quantile(every, 1 - share) if len(every) else 0.0
    return [own >= threshold for own in entropies]


def _whole_step(
    sequences: Sequence[Sample], high_entropy: list[np.ndarray] | None, micro_batches: int, device: torch.device
) -> tuple[StepSize, int]:
    """The step's size over all ranks, and the most micro-batches that a rank has."""
    tokens = sum(len(one.completion_ids) for one in sequences)
    high = tokens if high_entropy is None else sum(int(own.sum()) for own in high_entropy)
    sums = torch.tensor([len(sequences), tokens, high], device=device)
    most = torch.tensor(micro_batches, device=device)
    dist.all_reduce(sums)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return StepSize(*sums.tolist()), int(most)
