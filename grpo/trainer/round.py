"""A round of generation, in phase order: sample, reward while the reference is at work, replace groups without signal,
score with the policy as it is, compare within each group.

The token ids of a completion go from `Sampler.sample` to `Rounds.collect`, through `make_samples` to `update`
(grpo/trainer/step.py), which packs them with `Batcher.make` and gives their log-probs to `grpo_loss`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from grpo.algorithm.advantages import advantages, groups_with_signal, most_varied, total_rewards
from grpo.algorithm.loss import kl_divergence
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import AdaptiveStream, PromptStream
from grpo.data.records import Example, Group, Rollout, Sample, StepBatch, make_samples
from grpo.model.lora import LocalReference
from grpo.model.packing import Batcher
from grpo.rewards.functions import Logged, TrainerState
from grpo.run.collective import gather
from grpo.run.metrics import PhaseClock
from grpo.sampling.sampler import Sampler
from grpo.trainer.rewarding import Rewarder, fail_together
from grpo.trainer.server_scores import ServerScores
from grpo.trainer.step import policy_logprobs, split_masked


@dataclass(kw_only=True)
class Rounds:
    """The source of a run's rounds: completions of the policy as it is, with all that the updates need."""

    config: TrainerConfig
    model: PreTrainedModel
    sampler: Sampler
    batcher: Batcher
    stream: PromptStream
    rewarder: Rewarder
    scorers: Sequence[ServerScores]  # the servers that are asked about completions
    reference: LocalReference | None  # None unless the policy itself is the reference
    weights_to_draw: Callable[[], AbstractContextManager] = nullcontext  # in which the sampler has the whole model
    logged: dict[str, list[float]] = field(default_factory=dict)  # what log_metric was given, until a step has taken it

    def __post_init__(self) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._weights = self.rewarder.weights

    def collect(self, number: int, *, updates: int, beta: float, clock: PhaseClock) -> tuple[list[StepBatch], int]:
        """Draw round `number` (from 0) with the policy as it is after so many updates. Return the batch of each of its
        steps, and how many groups were replaced. All ranks call it together. Raises ServersLost and RewardsLost."""
        config = self.config
        steps, share = config.steps_of_round(number), config.prompts_per_step // self._world_size
        examples, ids = self.stream.groups_of(steps, self._rank, self._world_size)
        self._state, self._clock = TrainerState(updates, config.max_steps), clock
        for scorer in self.scorers:
            scorer.forget()
        with clock("generate"):
            self.sampler.update_weights(updates)
        with fail_together(), self.weights_to_draw():
            with clock("generate"):
                groups = self._draw(examples, ids, attempt=0)
            with clock("reward"):
                by_function = self._reward(groups, attempt=0)
            greedy = self._reward_greedy(groups, attempt=0)
        if isinstance(self.stream, AdaptiveStream):
            signals = groups_with_signal(by_function, self.rewarder.signal_weights, config, greedy=greedy).tolist()
            self.stream.record(gather(dict(zip(ids, signals, strict=True))))
        replaced = self._replace(groups, by_function, greedy=greedy, first_step=steps[0])
        compared_rewards = by_function
        if config.num_draws is not None:
            chosen = most_varied(total_rewards(by_function, self._weights), config.num_generations)
            groups = [replace(group, chosen=row) for group, row in zip(groups, chosen.tolist(), strict=True)]
            compared_rewards = by_function.gather(2, chosen.expand(len(by_function), -1, -1))
            self._ask(groups)

        by_group = [make_samples(group) for group in groups]
        samples_by_step = [[*chain(*by_group[begin : begin + share])] for begin in range(0, len(groups), share)]
        # The first step gets its old log-probs from its own forward pass: only the others are computed here.
        if scored := samples_by_step if config.kl_in_reward else samples_by_step[1:]:
            with clock("old_logprobs"):
                for sample, logprobs in self._score(scored):
                    sample.old_logprobs = logprobs
        if self.reference is not None:
            with clock("ref_logprobs"), self.reference.in_place():
                for sample, logprobs in self._score(samples_by_step):
                    sample.ref_logprobs = logprobs

        compared = self._compare(by_group, compared_rewards, greedy, beta)
        whole = StepBatch(
            groups=groups,
            by_function=by_function,
            rewards=total_rewards(by_function, self._weights),
            signal=compared.ne(0).any(dim=1),
            samples=[*chain(*by_group)],
        )
        return [whole.cut(begin, begin + share) for begin in range(0, len(groups), share)], replaced

    def _compare(
        self, by_group: list[list[Sample]], rewards: torch.Tensor, greedy: torch.Tensor, beta: float
    ) -> torch.Tensor:
        """Put the advantages into the samples of each group, and return them: float64 [groups, completions]. Rewards
        are float64 [functions, groups, completions], greedy ones [functions, groups]."""
        config, samples, count = self.config, [*chain(*by_group)], rewards.shape[2]
        # The branches of an episode are one completion.
        cells = [row * count + sample.place for row, of_group in enumerate(by_group) for sample in of_group]

        def by_completion(values: list, dtype: torch.dtype) -> torch.Tensor:
            total = torch.zeros(len(by_group) * count, dtype=dtype)
            total.index_add_(0, torch.tensor(cells, dtype=torch.int64), torch.tensor(values, dtype=dtype))
            return total.view(len(by_group), count)

        kl = self._kl(samples) if config.kl_in_reward else [0.0] * len(samples)
        penalty = beta * by_completion(kl, torch.float64)
        lengths = by_completion([sample.tokens for sample in samples], torch.int64)
        # Some ways to compare look at the rewards of all ranks.
        by_rank = zip(*gather((rewards, greedy, penalty, lengths)), strict=True)
        of_all = [torch.cat(parts, dim) for parts, dim in zip(by_rank, (1, 1, 0, 0), strict=True)]
        all_rewards, all_greedy, all_penalties, all_lengths = of_all
        compared = advantages(
            all_rewards, self._weights, config, penalty=all_penalties, lengths=all_lengths, greedy=all_greedy
        )
        share_of_rank = compared[self._rank * len(by_group) : (self._rank + 1) * len(by_group)]
        of_completions = share_of_rank.flatten().tolist()
        for sample, cell in zip(samples, cells, strict=True):
            sample.advantage = of_completions[cell]
        return share_of_rank

    def _ask(self, groups: list[Group]) -> None:
        for scorer in self.scorers:
            scorer.ask(groups)

    def _draw(self, examples: list[Example], ids: list[int], attempt: int) -> list[Group]:
        """Draw a group for each example. Ask the reference about groups as they end, together in one request."""

        def ask(ended: dict[int, list[Rollout]]) -> None:
            groups = [
                Group(id=ids[place], example=examples[place], rollouts=rollouts) for place, rollouts in ended.items()
            ]
            self._ask(groups)

        config = self.config
        on_groups = ask if self.scorers and config.num_draws is None else None
        seed = config.seed + (attempt << 32)  # a replacement has its group's id, so it is drawn with another seed
        sampled = self.sampler.sample(
            examples, config.draws, config.temperature, seed=seed, on_groups=on_groups, ids=ids
        )
        return [
            Group(id=group_id, example=example, rollouts=rollouts)
            for group_id, example, rollouts in zip(ids, examples, sampled, strict=True)
        ]

    def _reward(self, groups: list[Group], attempt: int) -> torch.Tensor:
        """Compute the groups' rewards: float64 [functions, groups, drawn completions], NaN if one does not apply."""
        logged = Logged()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        examples = [group.example for group in groups for _ in group.rollouts]
        key = (self._rank, attempt)
        by_function = self.rewarder.compute(examples, rollouts, self._state, logged=logged, key=key)
        for name, values in logged.metrics.items():
            self.logged.setdefault(name, []).extend(values)
        if logged.extra:
            rows = iter([dict(zip(logged.extra, row, strict=True)) for row in zip(*logged.extra.values(), strict=True)])
            for group in groups:
                group.extra[:] = [next(rows) for _ in group.rollouts]
        return by_function.view(len(by_function), len(groups), self.config.draws)

    def _reward_greedy(self, groups: list[Group], attempt: int) -> torch.Tensor:
        """Compute the rewards of greedy completions of the groups' prompts, which are not trained on: float64
        [functions, groups]. With another advantage_estimator than remax nothing is drawn and all are 0."""
        if self.config.advantage_estimator != "remax":
            return torch.zeros(len(self.rewarder.names), len(groups), dtype=torch.float64)
        examples = [group.example for group in groups]
        with self._clock("generate"):
            rollouts = self.sampler.greedy(examples)
        with self._clock("reward"):
            return self.rewarder.compute(examples, rollouts, self._state, key=(self._rank, attempt, "greedy"))

    def _replace(self, groups: list[Group], by_function: torch.Tensor, *, greedy: torch.Tensor, first_step: int) -> int:
        """Replace groups without signal by groups of other prompts, in `groups`, `by_function` and `greedy`, up to
        max_resample times. Return how many on all ranks. (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2.)"""
        config, replaced = self.config, 0
        for attempt in range(1, config.max_resample + 1):
            signal = groups_with_signal(by_function, self.rewarder.signal_weights, config, greedy=greedy)
            rows = (~signal).nonzero().flatten().tolist()
            on_all_ranks = sum(gather(len(rows)))
            if on_all_ranks == 0:
                break
            replaced += on_all_ranks
            ids = [groups[row].id for row in rows]
            for group_id in ids:
                for scorer in self.scorers:
                    scorer.cancel(group_id)
            with fail_together(), self.weights_to_draw():
                with self._clock("generate"):
                    places = [group_id - first_step * config.prompts_per_step for group_id in ids]
                    steps = config.steps_per_generation
                    examples = self.stream.replacements(first_step, steps, attempt=attempt, places=places)
                    new_groups = self._draw(examples, ids, attempt)
                if rows:
                    with self._clock("reward"):
                        by_function[:, rows] = self._reward(new_groups, attempt)
                    greedy[:, rows] = self._reward_greedy(new_groups, attempt)
            for row, group in zip(rows, new_groups, strict=True):
                groups[row] = group
        return replaced

    def _score(self, by_step: list[list[Sample]]) -> Iterator[tuple[Sample, np.ndarray]]:
        """Yield each step's samples with the model's log-probs of them, in the micro-batches of that step's update."""
        for samples in by_step:
            for rows in split_masked(samples, self.config):
                logprobs, _ = policy_logprobs(self.model, rows, self.config, self.batcher)
                yield from zip(rows, logprobs, strict=True)

    def _kl(self, samples: list[Sample]) -> list[float]:
        """Return the KL of each sample. Raises ServersLost on every rank without an answer."""
        for scorer in self.scorers:
            with self._clock(scorer.phase):
                scorer.wait_together(samples)
        return [summed_kl(sample, self.config.kl_estimator).item() for sample in samples]


def summed_kl(sample: Sample, estimator: str) -> torch.Tensor:
    """Return the KL of the tokens that the policy drew, in nats, a float64 scalar, by the policy as the round began."""
    policy, reference = torch.from_numpy(sample.old_logprobs), torch.from_numpy(sample.ref_logprobs)
    return kl_divergence(policy.double(), reference.double(), estimator).sum()
