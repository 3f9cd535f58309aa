"""Episodes of an agent, which are trained on as several sequences: from the sampler's records to the samples of a step.

What they weigh in a step's gradient is in test_step.py, and in tests/algorithm/test_loss.py.
"""

import random
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from models import distance
from rounding import GRADIENT, assert_rounded
from servers import open_client
from step_worker import episodes
from told import of_reference, sampled

from grpo.algorithm.loss import grpo_loss
from grpo.algorithm.loss_types import StepSize, Tokens
from grpo.config.command_line import parse_arguments
from grpo.config.loss_settings import LossSection
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import PromptStream
from grpo.data.records import Example, Group, Rollout, Sample, StepBatch, make_samples
from grpo.model.logprobs import token_logprobs
from grpo.model.trial import make_batcher
from grpo.rewards.compute import load_reward_funcs, start_rewards
from grpo.run.metrics import PhaseClock, add_stats, step_metrics
from grpo.trainer.rewarding import Rewarder
from grpo.trainer.round import Rounds
from grpo.trainer.server_scores import ServerScores
from grpo.trainer.step_result import stats_of_completions, tokens_of_completions
from grpo.wire.tool_outcomes import Branch

NAN = float("nan")
TREE = [
    Branch(
        prompt_ids=[5, 6],
        completion_ids=[7, 8, 20, 9],
        sampling_logprobs=[-1, -2, NAN, -3],
        drawn=[True, True, False, True],
    ),
    Branch(  # the same prompt, and [7, 8] again, which is trained on above
        prompt_ids=[5, 6],
        completion_ids=[7, 8, 21, 10, 11],
        sampling_logprobs=[NAN, NAN, NAN, -4, -5],
        drawn=[False, False, False, True, True],
    ),
    Branch(prompt_ids=[5, 6, 7], completion_ids=[12], sampling_logprobs=[-6], drawn=[True]),
]
EXAMPLE = Example(index=0, prompt="p", prompt_ids=[5, 6], columns={}, gold="4")


def rollout(branches: list[Branch], finished: bool = True) -> Rollout:
    marked = [pair for branch in branches for pair in zip(branch.completion_ids, branch.drawn, strict=True)]
    drawn = [token for token, mark in marked if mark]
    return sampled(drawn, finished=finished, sampling_logprobs=[-1.0] * len(drawn), branches=branches)


def group(number: int = 3) -> Group:
    """Three branches of a cut episode, none, a plain completion, one branch."""
    plain = sampled([13, 14], sampling_logprobs=[-7.0, -8.0])
    rollouts = [rollout(TREE, finished=False), rollout([]), plain, rollout(TREE[2:])]
    return Group(id=number, example=EXAMPLE, rollouts=rollouts)


def test_each_branch_is_a_sample_that_knows_its_episode():
    made = make_samples(group())
    assert [(sample.place, sample.branch) for sample in made] == [(0, 0), (0, 1), (0, 2), (2, None), (3, 0)]
    assert [sample.group_id for sample in made] == [3] * 5
    assert [sample.prompt_ids for sample in made] == [[5, 6], [5, 6], [5, 6, 7], [5, 6], [5, 6, 7]]
    assert [sample.finished for sample in made] == [False, False, False, True, True], "a whole episode is masked"
    assert [sample.tokens for sample in made] == [3, 2, 1, 2, 1]
    assert [sample.completion_tokens for sample in made] == [6, 6, 6, 2, 1]
    assert [sample.is_first for sample in made] == [True, False, False, True, True]
    assert [sample.sampling_logprobs.tolist() for sample in made] == [[-1, -2, -3], [-4, -5], [-6], [-7, -8], [-6]]


def test_only_those_that_are_trained_on_become_samples():
    made = make_samples(replace(group(), chosen=[1, 3]))
    assert [(sample.place, sample.branch) for sample in made] == [(1, 0)]


def test_metrics_count_episodes():
    stats = {}
    add_stats(stats, stats_of_completions([rollout(TREE, finished=False), rollout([]), rollout(TREE[2:])]))
    found = step_metrics(stats)
    assert found["completions/mean_length"] == pytest.approx((6 + 0 + 1) / 3)
    assert found["completions/clipped_ratio"] == pytest.approx(1 / 3)
    made = make_samples(group())
    rewards = torch.zeros(1, 4)
    batch = StepBatch(groups=[group()], by_function=rewards[None], rewards=rewards, signal=rewards[0] > 0, samples=made)
    prompts, drawn = (2 + 2 + 3, 0, 2, 3), (6, 0, 2, 1)
    for masked, trained in ((False, [6, 2, 1]), (True, [2, 1])):
        tokens = tokens_of_completions(batch, LossSection(mask_truncated_completions=masked))
        assert tokens == {"tokens:none": [*map(sum, zip(prompts, drawn, strict=True))], "trained_on:none": trained}
    assert [each.turns for each in group().rollouts] == [4, 0, 1, 1]
    assert [each.answer_tokens for each in group().rollouts] == [4, 0, 0, 0]


def test_a_batch_is_cut_by_groups_and_its_lines_have_their_episodes_advantage():
    groups = [group(3), Group(id=5, example=EXAMPLE, rollouts=[rollout([])] * 4), replace(group(8), chosen=[2, 0])]
    samples = [sample for each in groups for sample in make_samples(each)]
    for sample in samples:
        sample.advantage = 10.0 * sample.group_id + sample.place
    rewards = torch.arange(12, dtype=torch.float64).view(3, 4)
    signal = torch.tensor([True, False, True])
    batch = StepBatch(groups=groups, by_function=rewards[None], rewards=rewards, signal=signal, samples=samples)
    cuts = [batch.cut(0, 2), batch.cut(2, 3)]
    assert [cut.samples for cut in cuts] == [samples[:5], samples[5:]] and len(samples) == 9
    assert [[each.id for each in cut.groups] for cut in cuts] == [[3, 5], [8]]
    assert [cut.signal.tolist() for cut in cuts] == [[True, False], [True]]
    advantages = [30, None, 32, 33, *[None] * 4, 81, None, 80, None]
    assert [line["advantage"] for line in batch.to_lines()] == advantages
    assert [line["reward"] for line in batch.to_lines()] == [*range(12)]
    assert [line["advantage"] for cut in cuts for line in cut.to_lines()] == advantages


def test_answers_of_several_prompts_reach_their_branches():
    made = make_samples(group())
    first = [np.float32([-1, -2, NAN, -3]), np.float32([NAN, NAN, NAN, -4, -5]), np.float32([-7, -8])]
    second = [np.float32([-6]), np.float32([-9])]
    scorer = of_reference(first, second)
    scorer.ask([group()])
    assert [(prompt, len(completions)) for _, prompt, completions in scorer.clients[""].asked] == [
        ([5, 6], 3),
        ([5, 6, 7], 2),
    ]
    scorer.wait(made[::-1])
    assert [sample.ref_logprobs.tolist() for sample in made] == [[-1, -2, -3], [-4, -5], [-6], [-7, -8], [-9]]
    again, scorer = make_samples(group()), of_reference(first, ValueError("lost"))
    scorer.ask([group()])
    with pytest.raises(ValueError, match="lost"):
        scorer.wait(again)
    assert [sample.ref_logprobs is not None for sample in again] == [True, True, False, False, False]


def logprobs_of(model: torch.nn.Module, branch: Branch, temperature: float = 1.0) -> torch.Tensor:
    """Compute the log-probs of a branch's drawn tokens, of its path alone."""
    logits = model(input_ids=torch.tensor([branch.prompt_ids + branch.completion_ids])).logits[0]
    logits = logits[len(branch.prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)[range(len(branch.completion_ids)), branch.completion_ids][branch.drawn]


@pytest.mark.parametrize("weighting", ["tokens", "branches"])
@pytest.mark.parametrize("packs", [True, False])
def test_the_gradient_of_trees_is_that_of_their_paths(model, weighting, packs):
    """Trees of three branches and less, in one pass of the model that computes a shared prompt once."""
    trees = episodes()
    settings = LossSection(loss_type="grpo", branch_weighting=weighting)
    samples = [sample for each in trees for sample in make_samples(each)]
    batcher = replace(make_batcher(model, 0), packs=packs)
    sequences = [(sample.prompt_ids, sample.completion_ids) for sample in samples]
    batch = batcher.make(sequences, torch.device("cpu"), [sample.drawn for sample in samples])
    flat = sum(len(prompt) + len(completion) for prompt, completion in sequences)
    assert not packs or batch.input_ids.numel() < 0.8 * flat, "shared prompts are there once"
    logprobs, _ = token_logprobs(model, batch, 1.0)
    draw = random.Random(1)
    of_place = [[draw.gauss(0, 1) for _ in each.rollouts] for each in trees]
    of_episodes = torch.tensor([sample.completion_tokens for sample in samples])
    tokens = Tokens(
        lengths=torch.tensor([sample.tokens for sample in samples]),
        completion_lengths=of_episodes if weighting == "tokens" else None,
        advantages=torch.tensor([of_place[sample.group_id][sample.place] for sample in samples]),
        logprobs=logprobs,
        entropy=torch.zeros_like(logprobs),
    )
    count = 9 if weighting == "tokens" else 18
    step = StepSize(sequences=count, tokens=len(logprobs))
    loss, _ = grpo_loss(tokens, step, settings, beta=0.0, entropy_coef=0.0, max_completion_length=32)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    plain, total = type(model)(model.config).double().eval(), 0.0
    plain.load_state_dict(model.state_dict())
    for of_group, each in zip(of_place, trees, strict=True):
        for advantage, episode in zip(of_group, each.rollouts, strict=True):
            length = sum(sum(branch.drawn) for branch in episode.branches)
            for branch in episode.branches:
                divisor = count * (length if weighting == "tokens" else sum(branch.drawn))
                # As drawn the ratio is 1, with the slope of the log-prob.
                total = total - advantage * logprobs_of(plain, branch).sum() / divisor
    slopes = torch.autograd.grad(total, [*plain.parameters()])
    expected = dict(zip([name for name, _ in plain.named_parameters()], slopes, strict=True))
    assert found.keys() == expected.keys()
    assert_rounded(distance(found, expected), 0.0, GRADIENT)


class Scripted:
    """A sampler whose episodes are given by group and attempt."""

    def __init__(self, rounds: dict[tuple[int, int], list[Rollout]]):
        self.rounds = rounds

    def sample(self, examples, copies, temperature, seed, on_groups=None, ids=None):
        drawn = [self.rounds[number, seed >> 32] for number in ids]
        for index, rollouts in enumerate(drawn):
            on_groups({index: rollouts})
        return drawn

    def update_weights(self, version: int) -> None:
        pass


REWARDS = (
    "def by_text(completions, **columns):\n    return [float(messages[-1]['content']) for messages in completions]\n"
)


def episodes_of(number: int) -> list[Rollout]:
    return episodes()[number % 3].rollouts


def scripted(rewards: list[list[float]]) -> dict[tuple[int, int], list[Rollout]]:
    """The episodes of a round with these rewards. Group 1 has no signal at first, and is replaced."""

    def with_rewards(number: int, of_group: list[float]) -> list[Rollout]:
        return [replace(each, text=str(reward)) for each, reward in zip(episodes_of(number), of_group, strict=True)]

    made = {(number, 0): with_rewards(number, of_group) for number, of_group in enumerate(rewards)}
    return made | {(1, 0): with_rewards(0, [2.0] * 4), (1, 1): made[1, 0]}


def test_a_round_of_episodes_asks_a_real_reference_about_all_branches(server, model, data_folder, tmp_path, one_rank):
    """With the KL in the reward, an episode's is that of all its branches. A resumed run asks again."""
    (tmp_path / "own.py").write_text(REWARDS)
    settings = {"beta": 0.3, "kl_in_reward": True, "kl_estimator": "k1", "scale_rewards": "none", "temperature": 0.8}
    settings |= {"num_generations": 4, "prompts_per_step": 2, "steps_per_generation": 2, "max_steps": 4}
    settings |= {"reward_funcs": f"{tmp_path}/own.py:by_text", "max_resample": 1, "dataset_name": data_folder}
    config = parse_arguments(TrainerConfig, "", [f"--{name}={value}" for name, value in settings.items()])
    draw = random.Random(3)
    rewards = [[draw.gauss(0, 1) for _ in range(4)] for _ in range(4)]
    loaded = load_reward_funcs(config.reward_funcs)
    policy = type(model)(model.config).eval()
    policy.load_state_dict({name: 1.1 * weight for name, weight in model.state_dict().items()})
    with open_client(server.url, ref_startup_timeout=20, ref_deadline=30, temperature=0.8) as client:
        rounds = Rounds(
            config=config,
            model=policy,
            sampler=Scripted(scripted(rewards)),
            batcher=make_batcher(policy, 0),
            stream=PromptStream([replace(EXAMPLE, index=index) for index in range(9)], 2, config.seed),
            rewarder=Rewarder(loaded, start_rewards(loaded, config, torch.device("cpu"))[0], config),
            scorers=[ServerScores("ref_logprobs", {"": client}, phase="wait_ref")],
            reference=None,
        )
        batches, replaced = rounds.collect(0, updates=0, beta=0.3, clock=PhaseClock())
        assert replaced == 1
        answered = [sample.ref_logprobs for batch in batches for sample in batch.samples]
        for batch in batches:
            for sample in batch.samples:
                sample.ref_logprobs = None
        (scorer,) = rounds.scorers
        scorer.forget()
        scorer.ask_again(batches)
        for batch in batches:
            scorer.wait(batch.samples)
    again = [sample.ref_logprobs for batch in batches for sample in batch.samples]
    assert_rounded(np.concatenate(again), np.concatenate(answered))

    samples = [sample for batch in batches for sample in batch.samples]
    penalties = [[0.3 * value for value in of_group] for of_group in kl_of_paths(policy, model, samples)]
    assert max(abs(value) for of_group in penalties for value in of_group) > 0.1, "it shows"
    expected = oracle.advantages(rewards, "none", penalties=penalties)
    lines = iter(line for batch in batches for line in batch.to_lines())
    for number, of_group in enumerate(expected):
        for episode, value in zip(episodes_of(number), of_group, strict=True):
            advantage = next(lines)["advantage"]
            assert (advantage is None) == (not episode.branches)
            if episode.branches:
                assert_rounded(advantage, value, GRADIENT)
    assert next(lines, None) is None
    assert [[each.id for each in batch.groups] for batch in batches] == [[0, 1], [2, 3]]


def kl_of_paths(policy, reference, samples: list[Sample]) -> list[list[float]]:
    """Return the sum of log-ratios of each episode of four groups, in float64, each path by itself. Check the samples'
    log-probs on the way."""
    exact = [type(policy)(policy.config).double().eval() for _ in range(2)]
    for plain, model in zip(exact, (policy, reference), strict=True):
        plain.load_state_dict(model.state_dict())
    left, found = iter(samples), []
    for number in range(4):
        found.append([])
        for episode in episodes_of(number):
            kl = 0.0
            for branch in episode.branches:
                sample = next(left)
                with torch.no_grad():
                    ours, theirs = (logprobs_of(model, branch, 0.8) for model in exact)
                assert (sample.group_id, sample.completion_ids) == (number, branch.completion_ids)
                assert_rounded(sample.old_logprobs, ours)
                assert_rounded(sample.ref_logprobs, theirs)
                kl += (ours - theirs).sum().item()
            found[-1].append(kl)
    assert next(left, None) is None
    return found
