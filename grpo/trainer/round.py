"""A round of generation, in phase order: sample, reward while the reference is at work, replace groups without signal,
score with the policy that drew, compare within each group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo.algorithm.advantages import advantages, groups_with_signal, soft_overlong_punishment, total_rewards
from grpo.algorithm.loss import kl_divergence
from grpo.client.errors import ServerError, ServersLost
from grpo.client.reference import ReferenceClient
from grpo.config.trainer import TrainerConfig
from grpo.model.lora import OwnReference
from grpo.model.packing import Batcher
from grpo.rewards.compute import compute_rewards
from grpo.rollouts.local import Sampler
from grpo.rollouts.prompts import PromptStream
from grpo.rollouts.records import Example, Group, Rollout, Sample, StepBatch
from grpo.run.collective import gather, raise_together
from grpo.run.phase_clock import PhaseClock
from grpo.trainer.step import policy_logprobs, sort_out


class Rounds:
    """Draws a round of completions with the policy as it is, and makes of it what the updates need."""

    def __init__(
        self,
        config: TrainerConfig,
        model: PreTrainedModel,
        sampler: Sampler,
        batcher: Batcher,
        examples: list[Example],
        stream: PromptStream,
        reward_funcs: dict[str, Callable],
        client: ReferenceClient | None,
        own_reference: OwnReference | None,
        rank: int,
        world_size: int,
    ):
        self._config, self._model, self._sampler, self._batcher = config, model, sampler, batcher
        self._examples, self._stream, self._reward_funcs, self._client = examples, stream, reward_funcs, client
        self._own_reference, self._rank, self._world_size = own_reference, rank, world_size
        self.reward_names, weights = [*reward_funcs], [*config.reward_weights]
        if config.soft_punish_cache:
            self.reward_names, weights = [*self.reward_names, "soft_overlong_punishment"], [*weights, 1.0]
        self._weights = torch.tensor(weights, dtype=torch.float64)

    def collect(self, number: int, updates: int, beta: float, clock: PhaseClock) -> tuple[list[StepBatch], int]:
        """Round `number` (from 0), drawn after so many updates: the parts for its steps, and how many groups were
        replaced on all ranks. All ranks call it together. Raises ServersLost."""
        config = self._config
        first, share = number * config.steps_per_generation, config.prompts_per_step // self._world_size
        steps = range(first, first + config.steps_per_generation)
        start = self._rank * share
        ids = [step * config.prompts_per_step + start + place for step in steps for place in range(share)]
        with clock("generate"):
            indices = [i for step in steps for i in self._stream.indices(step, self._rank, self._world_size)]
            groups = self._draw(indices, ids, updates, attempt=0)
        with clock("reward"):
            by_function = self._reward(groups)
        replaced = self._replace(groups, by_function, ids, first, updates, clock)

        sequences = [sequence for group in groups for sequence in make_sequences(group)]
        size = share * config.num_generations
        by_step = [sequences[begin : begin + size] for begin in range(0, len(sequences), size)]
        # Of the first step's sequences its own forward pass will say what the policy that drew them says.
        if due := by_step if config.kl_in_reward else by_step[1:]:
            with clock("old_logprobs"):
                for sequence, logprobs in self._score(due):
                    sequence.old_logprobs = logprobs

        if self._own_reference is not None:
            with clock("ref_logprobs"), self._own_reference.in_place():
                for sequence, logprobs in self._score(by_step):
                    sequence.ref_logprobs = partial(np.asarray, logprobs)

        penalty = torch.zeros(by_function.shape[1:], dtype=torch.float64)
        if config.kl_in_reward:
            lost = None
            with clock("wait_ref"):
                try:
                    kl = torch.stack([summed_kl(sequence, config.kl_estimator) for sequence in sequences])
                    penalty = beta * kl.view(penalty.shape)
                except ServerError as error:
                    lost = error
            raise_together(lost, ServersLost, self._model.device)
        # Some ways to compare look at the rewards of all ranks.
        all_rewards, all_penalties = zip(*gather((by_function, penalty)), strict=True)
        compared = advantages(torch.cat(all_rewards, dim=1), self._weights, config, torch.cat(all_penalties))
        own = compared[self._rank * len(groups) : (self._rank + 1) * len(groups)]
        for sequence, advantage in zip(sequences, own.flatten().tolist(), strict=True):
            sequence.advantage = advantage

        signal = groups_with_signal(by_function, self._weights, config)
        whole = StepBatch(groups, by_function, total_rewards(by_function, self._weights), signal, sequences)
        return [whole.cut(begin, begin + share) for begin in range(0, len(groups), share)], replaced

    def _score(self, by_step: list[list[Sample]]) -> Iterator[tuple[Sample, np.ndarray]]:
        """Each step's sequences with what the model says of them now, in the micro-batches of that step's update."""
        for of_step in by_step:
            for rows in sort_out(of_step, self._config):
                logprobs, _ = policy_logprobs(self._model, rows, self._config, self._batcher)
                yield from zip(rows, logprobs, strict=True)

    def _draw(self, indices: list[int], ids: list[int], updates: int, attempt: int) -> list[Group]:
        """A group for each example. Each goes to the reference soon after its last completion ends."""
        config, groups = self._config, []
        at_once = max(1, config.sequences_per_generate // config.num_generations)
        for start in range(0, len(ids), at_once):
            some = [self._examples[index] for index in indices[start : start + at_once]]
            requests: list[Future[list[np.ndarray]] | None] = [None] * len(some)

            def ask(place: int, rollouts: list[Rollout], start=start, some=some, requests=requests) -> None:
                requests[place] = self._ask(ids[start + place], some[place], rollouts)

            sampled = self._sampler.sample(
                self._model,
                some,
                config.num_generations,
                config.temperature,
                # The first group's id is in no other call's seed of this attempt, on no rank and in no round.
                seed=config.seed * 1_000_003 + ids[start] + (attempt << 52),
                policy_version=updates,
                on_group=ask if self._client is not None else None,
            )
            groups += map(Group, ids[start:], some, sampled, requests)
        return groups

    def _ask(self, group: int, example: Example, rollouts: list[Rollout]) -> Future[list[np.ndarray]]:
        completions = [rollout.completion_ids for rollout in rollouts]
        return self._client.submit(example.prompt_ids, completions, f"group {group}")

    def ask_again(self, parts: list[StepBatch]) -> None:
        """Ask the reference for what it had not said of these when the run was saved."""
        for part in parts:
            copies = self._config.num_generations
            for place, group in enumerate(part.groups):
                rows = part.sequences[place * copies : (place + 1) * copies]
                if self._client is not None and any(one.ref_logprobs is None for one in rows):
                    request = self._ask(group.id, group.example, group.rollouts)
                    part.groups[place] = replace(group, reference=request)
                    for column, one in enumerate(rows):
                        one.ref_logprobs = partial(reference_logprobs, request, column)

    def _reward(self, groups: list[Group]) -> torch.Tensor:
        """float64 [functions, groups, num_generations], NaN where a function does not apply."""
        config = self._config
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        sources = [group.example for group in groups for _ in group.rollouts]
        by_function = torch.from_numpy(
            compute_rewards(
                self._reward_funcs,
                [example.prompt for example in sources],
                [rollout.text for rollout in rollouts],
                {name: [example.columns[name] for example in sources] for name in sources[0].columns},
                [example.messages for example in sources],
            )
        )
        if config.soft_punish_cache:
            lengths = torch.tensor([len(rollout.completion_ids) for rollout in rollouts])
            punishment = soft_overlong_punishment(lengths, config.max_completion_length, config.soft_punish_cache)
            by_function = torch.cat([by_function, punishment.unsqueeze(0)])
        return by_function.view(len(by_function), len(groups), -1)

    def _replace(
        self,
        groups: list[Group],
        by_function: torch.Tensor,
        ids: list[int],
        first: int,
        updates: int,
        clock: PhaseClock,
    ) -> int:
        """Put groups of other prompts in the place of those without signal, in `groups` and `by_function`, up to
        max_resample times. Returns how many on all ranks. (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2.)"""
        config, replaced = self._config, 0
        for attempt in range(1, config.max_resample + 1):
            dull = (~groups_with_signal(by_function, self._weights, config)).nonzero().flatten().tolist()
            everywhere = sum(gather(len(dull)))
            if everywhere == 0:
                break
            replaced += everywhere
            if not dull:
                continue
            places = [ids[row] - first * config.prompts_per_step for row in dull]
            with clock("generate"):
                others = self._stream.others(first, config.steps_per_generation, attempt, places)
                fresh = self._draw(others, [ids[row] for row in dull], updates, attempt)
            with clock("reward"):
                by_function[:, dull] = self._reward(fresh)
            for row, group in zip(dull, fresh, strict=True):
                if groups[row].reference is not None:
                    groups[row].reference.cancel()
                groups[row] = group
        return replaced


def make_sequences(group: Group) -> list[Sample]:
    """The group's completions as the update wants them."""
    return [
        Sample(
            group.example.prompt_ids,
            rollout.completion_ids,
            rollout.finished,
            ref_logprobs=partial(reference_logprobs, group.reference, column) if group.reference is not None else None,
            sampling_logprobs=np.asarray(rollout.sampling_logprobs, np.float32),
        )
        for column, rollout in enumerate(group.rollouts)
    ]


def reference_logprobs(request: Future[list[np.ndarray]], column: int) -> np.ndarray:
    """Waits for a group's answer; the float32 log-probs of one of its completions."""
    return request.result()[column]


def summed_kl(sequence: Sample, estimator: str) -> torch.Tensor:
    """The KL of a whole completion in nats, a float64 scalar, by the policy that drew it. Waits for the reference."""
    own, reference = torch.from_numpy(sequence.old_logprobs), torch.from_numpy(sequence.ref_logprobs())
    return kl_divergence(own.double(), reference.double(), estimator).sum()
