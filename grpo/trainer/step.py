"""One optimizer step from completions with their advantages, whatever the cut into ranks and micro-batches. It trains
on the tokens that the policy drew. The answers of tools and environments between them are fed to the model, and have no
part in any number here."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from grpo.trainer.server_scores import ServerScores, unanswered
from grpo.wire.picture_files import pictures_of

DRIFT = "drift/"  # before a group's id: each token's distance of the sampler's log-prob from the policy's


def update(
    engine,
    samples: Sequence[Sample],
    config: TrainerConfig,
    batcher: Batcher,
    clock: PhaseClock,
    *,
    beta: float,
    entropy_coef: float,
    scorers: Sequence[ServerScores] = (),
) -> dict[str, Stats]:
    """Do one optimizer step on this rank's samples and return this rank's stats by name. All ranks call it together.

    The gradient is that of the loss over the whole step. Samples without reference log-probs take them from `scorers`,
    the servers that were asked. Samples that are trained on again keep the policy's log-probs before this step as
    `old_logprobs`. A step whose loss or gradient is not finite changes no weight on any rank: see
    `engine.was_step_applied()`. If every completion of every rank is masked, the engine is not called, and the stats
    have no "loss". Raises ServersLost on every rank, with the weights unchanged, if a server did not answer a request.
    """
    samples, _ = split_masked(samples, config)
    for scorer in scorers if batcher.ranks is not None else ():  # each of them needs the others' log-probs
        with clock(scorer.phase):
            scorer.wait_together(samples)
    high_entropy = _high_entropy(engine.module, samples, config, batcher, clock)
    samples, _ = _of_row_ranks(samples, batcher)
    micro_batches = batcher.cut(_sequences(samples), config.micro_batch_tokens)
    size = _whole_step(samples, high_entropy, batcher, config, engine.module.device)
    if size.tokens == 0:
        return {}  # zero gradients would still let AdamW's momentum and weight decay move the weights
    micro_batches = _as_many_on_every_rank(micro_batches)
    chosen = None
    if config.router_aux_loss_coef > 0:
        with clock("routers"):
            chosen = _experts_chosen(engine.module, samples, micro_batches, batcher)

    step = _Step(
        engine=engine,
        config=config,
        batcher=batcher,
        clock=clock,
        beta=beta,
        entropy_coef=entropy_coef,
        scorers=scorers,
        size=size,
        chosen=chosen,
    )
    # DeepSpeed 0.19 takes the first backward pass of each step for the last one. With an offloaded optimizer it then
    # drops the gradients that it reduced during that pass, all but those of the last bucket.
    engine.optimizer.set_gradient_accumulation_boundary(False)
    for indices in micro_batches:
        rows = [samples[index] for index in indices]
        step.add_gradient(rows, None if high_entropy is None else [high_entropy[index] for index in indices])
    raise_together(step.lost, ServersLost)
    with clock("optimizer"):
        engine.step()
    if not engine.was_step_applied():
        engine.optimizer.averaged_gradients.clear()  # with offload DeepSpeed would add the next step's gradient to this
    for sample, logprobs in step.by_sample(step.old_logprobs) if step.old_logprobs else ():
        sample.old_logprobs = logprobs.numpy()
    return step.stats() if batcher.ranks is None or batcher.ranks.rank == 0 else {}  # the others' are the same


@dataclass(kw_only=True)
class _Step:
    """One optimizer step: what its micro-batches share, and the numbers that they leave, on the device until the step
    is done: to fetch one waits for all work of the device."""

    engine: Any
    config: TrainerConfig
    batcher: Batcher
    clock: PhaseClock
    beta: float
    entropy_coef: float
    scorers: Sequence[ServerScores]
    size: StepSize
    chosen: torch.Tensor | None  # how many of the step's tokens chose each expert; None without a balance loss
    lost: ServerError | None = None
    trained: list[Sample] = field(default_factory=list)
    old_logprobs: list[torch.Tensor] = field(default_factory=list)  # empty if the samples have some, or need none
    values: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def add_gradient(self, rows: list[Sample], high_entropy: list[np.ndarray] | None) -> None:
        """Add the gradient of a micro-batch. Without a token, compute one of weight 0: every parameter takes part."""
        config, real = self.config, any(sample.tokens for sample in rows)
        if not real:
            rows, high_entropy = _filler(config.teacher_top_k), None
        # As the engine's forward does, which is not called: with ZeRO-3 the gradient of this micro-batch would take the
        # place of the one before.
        self.engine.optimizer.clear_backward_seen_flag()
        tokens, routers = self._forward(rows, high_entropy)
        loss, metrics = grpo_loss(
            tokens,
            self.size,
            config,
            beta=self.beta,
            entropy_coef=self.entropy_coef,
            max_completion_length=config.max_completion_length,
        )
        sums = {}
        if self.chosen is not None:
            imbalance = balance_loss(routers, self.chosen, self.size)
            loss = loss + config.router_aux_loss_coef * imbalance
            sums["aux_loss"] = imbalance.detach()
        sums["loss"] = loss.detach()
        # DeepSpeed skips, on all ranks, a step whose gradient is not finite: this makes one of a loss that is not.
        finite = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
        # The factor world_size undoes ZeRO's mean over ranks.
        self.engine.backward(loss * finite * real * dist.get_world_size(), scale_wrt_gas=False)
        if real:
            self.trained += rows
            if config.num_iterations > 1 and tokens.old_logprobs is None:
                self.old_logprobs.append(tokens.logprobs.detach())
            for collected, new in ((self.values, metrics), (self.sums, sums)):
                for name, value in new.items():
                    collected[name].append(value)

    def _forward(self, rows: list[Sample], high_entropy: list[np.ndarray] | None) -> tuple[Tokens, torch.Tensor | None]:
        """Return the loss's input, and with a balance loss the routers' logits."""
        model, temperature, device = self.engine.module, self.config.temperature, self.engine.module.device
        batch, routers = _make(rows, self.batcher, device), None
        # Copies to a card wait for its work: before the forward pass, all but the reference's answers.
        lengths, of_completions = torch.tensor([sample.tokens for sample in rows], device=device), None
        if self.config.branch_weighting == "tokens" and any(sample.branch is not None for sample in rows):
            of_completions = torch.tensor([sample.completion_tokens for sample in rows], device=device)
        advantages = torch.tensor([sample.advantage for sample in rows], device=device)
        old_logprobs = _joined([sample.old_logprobs for sample in rows], device)
        sampling_logprobs = _joined([sample.sampling_logprobs for sample in rows], device)
        high = _joined(high_entropy, device)
        # A divergence needs the teacher's answers before the forward pass, which computes the policy's log-probs of its
        # tokens; all others are waited for after it.
        top_k = self.config.teacher_top_k
        teacher = self._teacher(rows) if top_k else None
        if top_k:
            batch = batch.with_others(teacher[:, 1 + top_k :].long())
        if self.chosen is None:
            logprobs, entropy = token_logprobs(model, batch, temperature, with_entropy=True)
        else:
            logprobs, entropy, routers = with_router_logits(model, batch, temperature)
        policy_top = None
        if top_k:
            logprobs, policy_top = logprobs[:, 0], logprobs[:, 1:]
        else:
            teacher = self._teacher(rows)
        tokens = Tokens(
            lengths=lengths,
            completion_lengths=of_completions,
            advantages=advantages,
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=old_logprobs,
            ref_logprobs=self._answers("ref_logprobs", rows) if self.config.beta > 0 else None,
            teacher_logprobs=None if teacher is None else teacher[:, 0],
            teacher_top=None if policy_top is None else teacher[:, 1 : 1 + top_k],
            policy_top=policy_top,
            sampling_logprobs=sampling_logprobs,
            high_entropy=high,
        )
        return tokens, routers

    def _answers(self, field: str, rows: list[Sample], top_k: int = 0) -> torch.Tensor:
        """Wait for what servers say of the samples. After a failed request it is 0: all ranks raise its error after the
        last collective."""
        for scorer in self.scorers:
            if scorer.field == field:
                with self.clock(scorer.phase):
                    try:
                        scorer.wait(rows)
                    except ServerError as error:
                        self.lost = error
        known = [getattr(sample, field) for sample in rows]
        lost = [unanswered(sample, top_k, 0.0) for sample in rows]
        values = [zeros if of is None else of for of, zeros in zip(known, lost, strict=True)]
        return _joined(values, self.engine.module.device)

    def _teacher(self, rows: list[Sample]) -> torch.Tensor | None:
        """Return the rows of the teachers' answers, [T, 1 + 2k]; None without teachers."""
        if not self.config.teacher_servers:
            return None
        answers = self._answers("teacher", rows, self.config.teacher_top_k)
        return answers.view(len(answers), 1 + 2 * self.config.teacher_top_k)

    def stats(self) -> dict[str, Stats]:
        """Return this rank's stats by name, with a pool also each group's distance of the sampler from the policy."""
        stats: dict[str, Stats] = {}
        add_stats(stats, {name: torch.cat(parts) for name, parts in self.values.items()})
        if self.config.pool is not None and DISTANCE in self.values:
            for sample, distances in self.by_sample(self.values[DISTANCE]):
                add_stats(stats, {f"{DRIFT}{sample.group_id}:none": distances})
        return stats | {
            name: Stats(count=len(parts), total=sum(torch.stack(parts).tolist()), statistic="sum")
            for name, parts in self.sums.items()
        }

    def by_sample(self, parts: list[torch.Tensor]) -> Iterator[tuple[Sample, torch.Tensor]]:
        """Yield each sample with its tokens' values. `parts` are those of the micro-batches."""
        values = torch.cat(parts).cpu().split([sample.tokens for sample in self.trained])
        return zip(self.trained, values, strict=True)


def split_masked(samples: Sequence[Sample], config: LossSection) -> tuple[list[Sample], list[Sample]]:
    """Split the samples into those that an update trains on and those that mask_truncated_completions leaves out."""
    trained = [sample for sample in samples if sample.finished or not config.mask_truncated_completions]
    return trained, [sample for sample in samples if config.mask_truncated_completions and not sample.finished]


@torch.no_grad()
def policy_logprobs(
    model: PreTrainedModel, samples: list[Sample], config: TrainerConfig, batcher: Batcher, with_entropy: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the model's log-probs of each sample, and its entropies on request: float32 [sample.tokens], bit for bit
    those of an update on the same samples: in bfloat16 another cut into micro-batches rounds differently. All ranks
    call it together."""
    samples, mine = _of_row_ranks(samples, batcher)
    logprobs = [np.zeros(0, np.float32)] * len(samples)
    entropies = list(logprobs)
    for indices in _as_many_on_every_rank(batcher.cut(_sequences(samples), config.micro_batch_tokens)):
        rows = [samples[index] for index in indices]
        lengths = [sample.tokens for sample in rows]
        batch = _make(rows if any(lengths) else _filler(), batcher, model.device)
        computed = token_logprobs(model, batch, config.temperature, with_entropy)
        for result, values in zip((logprobs, entropies), computed, strict=True) if any(lengths) else ():
            for index, part in zip(indices, values.cpu().split(lengths), strict=True) if values is not None else ():
                result[index] = part.numpy()
    return logprobs[mine], entropies[mine]


@torch.no_grad()
def _experts_chosen(
    model: PreTrainedModel, samples: Sequence[Sample], micro_batches: list[list[int]], batcher: Batcher
) -> torch.Tensor:
    """Count how many of the step's tokens, on all ranks, chose each expert: float64 [experts]."""
    per_token = model.config.get_text_config().num_experts_per_tok
    total = torch.zeros(1, dtype=torch.float64, device=model.device)
    for indices in micro_batches:
        rows = [samples[index] for index in indices]
        real = any(sample.tokens for sample in rows)
        logits = router_logits(model, _make(rows if real else _filler(), batcher, model.device))
        total = total + experts_chosen(logits, per_token) * real
    return sum(gather(total.cpu()))


def _as_many_on_every_rank(micro_batches: list[list[int]]) -> list[list[int]]:
    """Add empty micro-batches, in which a filler is computed: ZeRO-2 reduces gradients in every backward pass, and
    ZeRO-3 gathers weights in every pass, so that all ranks do equally many."""
    return micro_batches + [[]] * (max(gather(len(micro_batches))) - len(micro_batches))


def _of_row_ranks(values: list, batcher: Batcher) -> tuple[list, slice]:
    """Return the values of all ranks that share rows with this one, and which are its own."""
    return (values, slice(None)) if batcher.ranks is None else batcher.ranks.gather(values)


def _filler(top_k: int = 0) -> list[Sample]:
    sample = Sample(prompt_ids=[0], completion_ids=[0], finished=True, ref_logprobs=np.zeros(1, np.float32))
    sample.teacher = unanswered(sample, top_k, 0.0)
    return [sample]


def _sequences(samples: Sequence[Sample]) -> list[tuple[Ids, Ids]]:
    return [(sample.prompt_ids, sample.completion_ids) for sample in samples]


def _make(samples: Sequence[Sample], batcher: Batcher, device: torch.device) -> Batch:
    """Make a micro-batch. If the vision tower is trained, or sharded, and no prompt has a picture, add a small one
    without a completion, whose gradient is 0. ZeRO-2 sums gradients over the ranks as they arrive: if another rank has
    pictures, they would come in another order, and ranks add up those of different weights, or wait for ever. On one
    rank too: for an offloaded parameter without a gradient DeepSpeed takes that of the step before."""
    sequences, drawn = _sequences(samples), [sample.drawn for sample in samples]
    filler = batcher.vision.filler if batcher.vision is not None else None
    if filler is not None and not any(pictures_of(prompt) for prompt, _ in sequences):
        sequences.append((filler, []))
        drawn.append(None)
    return batcher.make(sequences, device, drawn)


def _joined(parts: list[np.ndarray | None] | None, device: torch.device) -> torch.Tensor | None:
    """Join the parts to one tensor. Of a batch's samples all have a part or none has: then return None."""
    return None if parts is None or parts[0] is None else torch.from_numpy(np.concatenate(parts)).to(device)


def _high_entropy(
    model: PreTrainedModel, samples: list[Sample], config: TrainerConfig, batcher: Batcher, clock: PhaseClock
) -> list[np.ndarray] | None:
    """Mark the tokens in the policy term, of all samples in this rank's rows: bool [sample.tokens]; None for all."""
    if config.top_entropy_quantile == 1:
        return None
    with clock("old_logprobs"):
        _, entropies = policy_logprobs(model, samples, config, batcher, with_entropy=True)
    marks, _ = _of_row_ranks(_highest(entropies, config.top_entropy_quantile), batcher)
    return marks


def _highest(entropies: list[np.ndarray], share: float) -> list[np.ndarray]:
    """Mark the tokens whose entropy is within the highest `share` of the step's, over all ranks: bool, shaped as given.
    Wang et al. 2025, "Beyond the 80/20 Rule", arXiv:2506.01939, equation 6. The quantile is interpolated, as TRL does.
    """
    all_entropies = np.concatenate(gather(np.concatenate([np.zeros(0, np.float32), *entropies])))
    threshold = np.quantile(all_entropies, 1 - share) if len(all_entropies) else 0.0
    return [values >= threshold for values in entropies]


def _whole_step(
    samples: Sequence[Sample],
    high_entropy: list[np.ndarray] | None,
    batcher: Batcher,
    config: LossSection,
    device: torch.device,
) -> StepSize:
    """Return the step's size over all ranks."""
    sequences = sum(sample.is_first or config.branch_weighting == "branches" for sample in samples)
    tokens = sum(sample.tokens for sample in samples)
    high = tokens if high_entropy is None else sum(int(marks.sum()) for marks in high_entropy)
    sums = torch.tensor([sequences, tokens, high], device=device)
    dist.all_reduce(sums)
    if batcher.ranks is not None:
        sums //= batcher.ranks.size  # they have the same samples
    sequences, tokens, high = sums.tolist()
    return StepSize(sequences=sequences, tokens=tokens, high_entropy_tokens=high)
