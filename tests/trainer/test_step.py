"""The gradient of a step is that of the whole step's loss, whatever the number of ranks and the cut into micro-batches.

Held against plain PyTorch in float64 that shares no code with ours: one unpadded sequence at a time, all logits,
log_softmax; and the papers' formulas in Python floats (oracle.py). Tokens of answers, which the policy did not draw,
are in these sequences too, and have weight 0.
"""

import json
import math
import random

import numpy as np
import oracle
import pytest
import torch
from experts import balanced, mixture
from models import distance
from rounding import assert_rounded
from sharded import ON_CARDS, ON_HOST, in_layers
from step_worker import (
    EMPTY,
    GENERATIONS,
    PROMPTS,
    UNFINISHED,
    branch_samples,
    drawn,
    episodes,
    rewards,
    sequences,
    teacher_rows,
)
from trainer_runs import run_ranks
from transformers import AutoModelForCausalLM

from grpo.algorithm.loss import DISTANCE
from grpo.config.loss_settings import LossSection
from grpo.data.records import Sample

TEMPERATURE, LONGEST = 0.8, 32  # as step_worker.py sets them
BETA = 0.3
COUNT = PROMPTS * GENERATIONS

LOSSES = [{"loss_type": loss_type} for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")]
LOSSES += [{"loss_type": loss_type, "importance_sampling_level": "sequence"} for loss_type in ("grpo", "luspo")]  # GSPO
# Every loss with every scale, the truncated completions in or out.
PLAIN = [
    {**loss, "scale_rewards": scale, "mask_truncated_completions": masked}
    for loss in LOSSES
    for scale in ("group", "batch", "none")
    for masked in (False, True)
]
OPTIONS = [
    {"beta": 0.0},
    {"kl_estimator": "k1"},
    {"kl_estimator": "k2"},
    {"kl_estimator": "k3+", "loss_type": "dapo"},
    {"delta": 1.5, "use_bias_correction_kl": True},
    {"entropy_coef": 0.05},
    {"entropy_coef": 0.05, "top_entropy_quantile": 0.4, "mask_truncated_completions": True},
    {"top_entropy_quantile": 0.2, "loss_type": "dapo"},
    {"off_policy_mask_threshold": 0.01, "loss_type": "bnpo"},
    {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": 1.3},
    {"importance_sampling_mode": "token_mask", "importance_sampling_clip_min": 0.8, "loss_type": "cispo"},
    {"importance_sampling_mode": "token_truncate", "loss_type": "vespo"},
    {"importance_sampling_mode": "sequence_truncate", "importance_sampling_level": "sequence"},
    {"importance_sampling_mode": "sequence_mask", "loss_type": "dr_grpo"},
]
# With a teacher, of whose likeliest tokens the policy is told, too.
OPTIONS += [
    {"distillation_coef": 0.7},
    {"distillation_coef": 0.2, "loss_type": "cispo", "beta": 0.0, "mask_truncated_completions": True},
    {"distillation_loss": "reverse_kl", "distillation_top_k": 5, "distillation_coef": 2.0},
    {"distillation_loss": "forward_kl", "distillation_top_k": 1, "loss_type": "dapo", "beta": 0.0},
    {"distillation_loss": "jsd", "distillation_top_k": 30, "entropy_coef": 0.05, "top_entropy_quantile": 0.4},
]
# Settings; with old log-probs, the sampler's, answers.
CASES = [(settings, False, False, False) for settings in PLAIN]
CASES += [
    (settings, True, "sampl" in str(settings), answers) for settings in (*LOSSES, *OPTIONS) for answers in (False, True)
]
# Rank 0 has the empty completions, rank 1 of 3 and of 4 nothing but a truncated one.
UNEQUAL = {1: [36], 2: [2, 34], 3: [2, 1, 33], 4: [2, 1, 8, 25]}


def cut(number: int, ranks: int) -> tuple[int, list[int], list[int]]:
    """A token budget, shares and an order, other ones for each case and number of ranks."""
    draw = random.Random(10 * number + ranks)
    budget = draw.choice((1, 60, 60, 150, 150, 10**6))  # 1: every sequence alone
    order = draw.sample(range(COUNT), COUNT)
    if draw.random() < 0.5:
        return budget, [COUNT // ranks] * ranks, order
    first = [*EMPTY, UNFINISHED[0]]
    return budget, UNEQUAL[ranks], first + [index for index in order if index not in first]


def worker_case(number: int, ranks: int, **more) -> dict:
    settings, old, sampled, answers = CASES[number]
    budget, shares, order = cut(number, ranks)
    values = {"beta": BETA, "max_grad_norm": 0.0, **settings, "micro_batch_tokens": budget, **more}
    if sampled:  # as a pool's workers do, whose distance from the policy is counted by group
        values = {"sampler": "pool", "pool": "http://127.0.0.1:1", "importance_sampling_mode": "none", **values}
    if "distillation" in str(settings):
        values["teacher_servers"] = "http://127.0.0.1:1"
    options = [f"--{name}={value}" for name, value in values.items()]
    case = {"options": options, "order": order, "shares": shares, "old": old, "sampled": sampled, "answers": answers}
    return case | {"padded": number % 3 == 0, "small_steps": []}


class Plain:
    """The model in float64 with every sequence's log-probs and entropies, to be differentiated again and again."""

    def __init__(self, folder, weights=None):
        # Of the ways to compute experts only this one takes float64.
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        if weights is not None:
            self.model.load_state_dict(weights, strict=False)  # a tied head is named once
        self.all_logits = [self.logits(*pair) for pair in enumerate(sequences())]
        rows = zip(self.all_logits, sequences(), strict=True)
        self.rows = [self.row(logits, sample.completion_ids) for logits, sample in rows]

    def logits(self, number: int, sample: Sample) -> torch.Tensor:
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        return self.model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]

    def row(self, logits: torch.Tensor, completion: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies of a completion; both are empty for an empty one."""
        logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
        return logprobs[range(len(completion)), completion], -(logprobs.exp() * logprobs).sum(-1)

    def step(self, settings: LossSection, old: list | None, sampled: bool, answers=False, of=range(COUNT)):
        """(gradients by parameter name, metrics) of the whole step, or of these of its samples."""
        trained = drawn() if answers else [np.ones(len(row[0]), bool) for row in self.rows]
        advantages = [value for group in oracle.advantages(rewards(), settings.scale_rewards) for value in group]
        kept, rows = [], []
        for number, (sample, advantage, row) in enumerate(zip(sequences(), advantages, self.rows, strict=True)):
            if number not in of or (settings.mask_truncated_completions and not sample.finished):
                continue
            marks = trained[number]
            rows.append((row, marks, number))
            learns = settings.distillation_loss is None and settings.distillation_coef != LossSection.distillation_coef
            kept.append(
                oracle.Completion(
                    advantage,
                    row[0][marks].tolist(),
                    row[1][marks].tolist(),
                    old=np.array(old[number])[marks].tolist() if old else None,
                    ref=sample.ref_logprobs[marks].tolist() if settings.beta else None,
                    sampling=sample.sampling_logprobs[marks].tolist() if sampled else None,
                    teacher=teacher_rows(number, len(marks), 0)[marks, 0].tolist() if learns else None,
                )
            )
        if settings.top_entropy_quantile < 1:
            kept = oracle.mark_high_entropy(kept, settings.top_entropy_quantile)
        size = oracle.size(kept)
        total = torch.zeros((), dtype=torch.float64)
        apart = torch.zeros((), dtype=torch.float64)
        for sample, (row, marks, number) in zip(kept, rows, strict=True):
            of_row = oracle.gradient(sample, size, settings, settings.beta, LONGEST)
            for values, slopes in zip(row, of_row, strict=True):
                weights = torch.zeros(len(marks), dtype=torch.float64)
                weights[marks] = torch.tensor(slopes, dtype=torch.float64)
                total = total + (values * weights).sum()
            if settings.distillation_loss is not None:
                of_token = self.divergence(number, settings)[torch.tensor(marks)].nansum()
                divisor = oracle.own_divisor(int(marks.sum()), size, settings, LONGEST)
                apart = apart + settings.distillation_coef * of_token / divisor
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        slopes = torch.autograd.grad(total + apart, parameters, retain_graph=True, materialize_grads=True)
        entropies = [value for sample in kept for value in sample.entropy]
        loss = oracle.loss(kept, settings, settings.beta, LONGEST) + apart.item()
        return dict(zip(names, slopes, strict=True)), {"loss": loss, "entropy": oracle.mean(entropies)}

    def divergence(self, number: int, settings: LossSection) -> torch.Tensor:
        """Return the policy's divergence from the teacher at each token of a sequence, from whole distributions."""
        top_k, logits = settings.distillation_top_k, self.all_logits[number]
        rows = torch.from_numpy(teacher_rows(number, len(logits), top_k)).double()
        if rows[:, 0].isnan().any():
            return torch.zeros(len(logits), dtype=torch.float64)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, rows[:, 1 + top_k :].long(), True)
        policy, teacher = torch.softmax(logits / TEMPERATURE, -1), rows[:, 1 : 1 + top_k].exp()
        p = torch.cat([policy.gather(1, rows[:, 1 + top_k :].long()), policy.masked_fill(chosen, 0).sum(1, True)], 1)
        q = torch.cat([teacher, 1 - teacher.sum(1, True)], 1)
        m = (p + q) / 2
        return {
            "reverse_kl": p * (p / q).log(),
            "forward_kl": q * (q / p).log(),
            "jsd": (p * (p / m).log() + q * (q / m).log()) / 2,
        }[settings.distillation_loss].sum(1)


@pytest.fixture(scope="module")
def plain(model_folder):
    return Plain(model_folder)


@pytest.fixture(scope="module")
def expected(plain):
    """`expected(number)`: gradients and metrics of a case, computed once for all numbers of ranks."""
    known = {}

    def of(number: int):
        if number not in known:
            values, old, sampled, answers = CASES[number]
            olds = [sample.old_logprobs.tolist() for sample in sequences()] if old else None
            known[number] = plain.step(LossSection(**{"beta": BETA, **values}), olds, sampled, answers)
        return known[number]

    return of


def norm(gradients) -> float:
    return sum((gradient**2).sum().item() for gradient in gradients.values()) ** 0.5


def run(ranks: int, model_folder, tmp_path, cases: list[dict]) -> list[dict]:
    given, out = tmp_path / "cases.json", tmp_path / "results.pt"
    given.write_text(json.dumps(cases))
    ended = run_ranks(ranks, "tests/step_worker.py", str(model_folder), str(given), str(out))
    assert ended.returncode == 0, ended.stdout
    return torch.load(out)


def check(number: int, result: dict, gradients: dict, metrics: dict, limit: float = 0.0) -> None:
    case = CASES[number]
    whole = norm(gradients)
    assert_rounded(result["norm"], whole, about=case)  # before clipping
    if limit and limit < whole:
        gradients = {name: gradient * limit / (whole + 1e-6) for name, gradient in gradients.items()}
    assert_rounded(distance(result["gradient"], gradients), 0.0, about=case)
    assert_rounded(result["stats"]["loss"][1], metrics["loss"], about=case)
    if case[2]:
        assert result["stats"]["drift/-1"] == result["stats"][DISTANCE]
    count, total = result["stats"]["entropy"]
    assert_rounded(total / count, metrics["entropy"], about=case)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "ranks, clipping, checkpointing",
    [(1, False, False), (2, True, False), (3, False, True), (4, False, False)],
    ids=["1 rank", "2 ranks, gradients clipped", "3 ranks, activations recomputed", "4 ranks"],
)
def test_every_loss_with_every_option(model_folder, tmp_path, plain, expected, few, ranks, clipping, checkpointing):
    """All cases in one start, each cut at random; then some losses with two updates on the same completions."""
    numbers = few(range(len(CASES)), 24)
    limit = sorted(norm(expected(number)[0]) for number in numbers)[len(numbers) // 2] if clipping else 0.0
    engine = {"gradient_checkpointing": checkpointing, "max_grad_norm": limit}
    cases = [worker_case(number, ranks, **engine) for number in numbers]
    twice = [(number, bool(place % 2)) for place, number in enumerate(range(0, len(PLAIN), 6)[ranks - 1 :: 4])]
    cases += [
        worker_case(number, ranks, num_iterations=2, **engine) | {"small_steps": [0.3], "answers": answers}
        for number, answers in twice
    ]
    results = run(ranks, model_folder, tmp_path, cases)
    for number, result in zip(numbers, results, strict=False):
        check(number, result, *expected(number), limit)

    # The second update is held to the policy before the first.
    old = [row[0].tolist() for row in plain.rows]
    for (number, answers), result in zip(twice, results[len(numbers) :], strict=True):
        moved = Plain(model_folder, result["before"])
        change = torch.cat([row[0] for row in moved.rows]) - torch.cat([row[0] for row in plain.rows])
        assert change.abs().max() > 0.2, "within the clip"
        check(number, result, *moved.step(LossSection(beta=BETA, **CASES[number][0]), old, False, answers), limit)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "ranks, file, checkpointing, most",
    [(2, ON_CARDS, True, 30_000), (1, ON_HOST, False, 10**9), (2, ON_HOST, True, 30_000)],
)
def test_so_it_is_where_ranks_share_out_the_weights(
    model_folder, tmp_path, expected, few, ranks, file, checkpointing, most
):
    """With clipping, and after a step that is left out. After a pass without gradients they can be copied."""
    numbers = few(range(0, len(CASES), 2), 12)
    limit = sorted(norm(expected(number)[0]) for number in numbers)[len(numbers) // 2]
    engine = {"deepspeed": in_layers(file, tmp_path, most), "gradient_checkpointing": checkpointing}
    engine["max_grad_norm"] = limit
    cases = [worker_case(number, ranks, **engine) for number in numbers]
    cases[1] |= {"spoiled": (11, float("nan"))}
    cases[-1] |= {"scored": True}
    for number, result in zip(numbers, run(ranks, model_folder, tmp_path, cases), strict=True):
        check(number, result, *expected(number), limit)
        assert result["held"] < 0.1


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks, size, stage, recomputes", [(2, 2, 2, True), (4, 2, 3, True), (4, 4, 2, False)])
def test_so_it_is_where_ranks_share_rows(model_folder, tmp_path, expected, few, ranks, size, stage, recomputes):
    """Groups of two ranks, and one of four with two key heads; some ranks have next to nothing to predict."""
    numbers = few(range(1, len(CASES), 2), 12)
    engine = {"sequence_parallel_size": size, "gradient_checkpointing": recomputes}
    if stage == 3:
        engine["deepspeed"] = in_layers(ON_CARDS, tmp_path)
    cases = [worker_case(number, ranks, **engine) | {"padded": False} for number in numbers]
    cases[1] |= {"spoiled": (11, float("nan"))}
    for number, result in zip(numbers, run(ranks, model_folder, tmp_path, cases), strict=True):
        check(number, result, *expected(number))


OF_EPISODES = [
    {"branch_weighting": weighting, **loss, **more}
    for weighting in ("tokens", "branches")
    for loss, more in [
        *((loss, {"mask_truncated_completions": bool(place % 2)}) for place, loss in enumerate(LOSSES)),
        ({"loss_type": "sapo"}, {"kl_estimator": "k1"}),
        ({"loss_type": "dr_grpo"}, {"importance_sampling_mode": "sequence_truncate"}),
        ({"loss_type": "grpo"}, {"off_policy_mask_threshold": 0.01, "entropy_coef": 0.05}),
    ]
]


def of_episodes(plain: Plain, settings: LossSection, sampled: bool) -> tuple[dict, float]:
    """(gradients by parameter name, loss) of the step of all episodes: each path through a tree by itself."""
    samples, rows, made = iter(branch_samples()), [], []
    for group in episodes():
        for rollout in group.rollouts:
            of_episode = []
            for branch in rollout.branches:
                given = next(samples)
                if settings.mask_truncated_completions and not rollout.finished:
                    continue
                marks = np.array(branch.drawn)
                row = [values[marks] for values in plain.row(plain.logits(0, branch), branch.completion_ids)]
                rows.append(row)
                of_episode.append(
                    oracle.Completion(
                        given.advantage,
                        *(values.tolist() for values in row),
                        old=given.old_logprobs.tolist(),
                        ref=given.ref_logprobs.tolist(),
                        sampling=np.float32(branch.sampling_logprobs)[marks].tolist() if sampled else None,
                    )
                )
            made.append(of_episode)
    branches = [branch for of_episode in made for branch in of_episode]
    size, by = oracle.size(branches), oracle.divisors(made, settings, LONGEST)
    total, loss = torch.zeros((), dtype=torch.float64), []
    for row, branch, divisor in zip(rows, branches, by, strict=True):
        slopes = oracle.gradient(branch, size, settings, BETA, LONGEST, divisor=divisor)
        for values, of_values in zip(row, slopes, strict=True):
            total = total + (values * torch.tensor(of_values, dtype=torch.float64)).sum()
        loss += oracle.shares(branch, size, settings, BETA, LONGEST, divisor=divisor)
    names, parameters = zip(*plain.model.named_parameters(), strict=True)
    slopes = torch.autograd.grad(total, parameters, retain_graph=True, materialize_grads=True)
    return dict(zip(names, slopes, strict=True)), math.fsum(loss)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_branches_of_episodes_are_weighed_as_the_loss_says(model_folder, tmp_path, plain, few, ranks):
    """Trees that share prompts and drawn tokens, whose branches are on any rank and in any micro-batch."""
    draw, cases, count = random.Random(ranks), [], len(branch_samples())
    chosen = few(OF_EPISODES, 5)
    for number, settings in enumerate(chosen):
        sampled = "importance_sampling_mode" in settings or "off_policy_mask_threshold" in settings
        first = draw.randrange(count) if ranks == 2 else count
        values = {"beta": BETA, "max_grad_norm": 0.0, "micro_batch_tokens": (1, 60, 150, 10**6)[number % 4], **settings}
        values |= {"agent": "command: true"}  # without one no episode has branches
        cases.append(
            {
                "options": [f"--{name}={value}" for name, value in values.items()],
                "order": draw.sample(range(count), count),
                "shares": [first, count - first][:ranks],
                "episodes": True,
                "old": True,
                "sampled": sampled,
                "padded": number % 5 == 4,
                "small_steps": [],
            }
        )
    results = run(ranks, model_folder, tmp_path, cases)
    for settings, case, result in zip(chosen, cases, results, strict=True):
        gradients, loss = of_episodes(plain, LossSection(beta=BETA, **settings), case["sampled"])
        assert_rounded(result["norm"], norm(gradients), about=settings)
        assert_rounded(distance(result["gradient"], gradients), 0.0, about=settings)
        assert_rounded(result["stats"]["loss"][1], loss, about=settings)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("shared_out", [False, True])
def test_experts_are_balanced_over_the_whole_step(tmp_path, shared_out):
    """Three ranks, one with nothing but a masked completion: the loss of all tokens at once, added with its weight."""
    engine = {"deepspeed": in_layers(ON_CARDS, tmp_path)} if shared_out else {}
    experts = mixture("mixtral")
    experts.save_pretrained(tmp_path / "experts")
    assert PLAIN[1]["mask_truncated_completions"]
    kinds = [(answers, budget) for answers in (False, True) for budget in (1, 100)]
    cases = [
        worker_case(1, 3, router_aux_loss_coef=0.5, micro_batch_tokens=budget, **engine) | {"answers": answers}
        for answers, budget in kinds
    ]
    plain = Plain(tmp_path / "experts")
    for (answers, _), result in zip(kinds, run(3, tmp_path / "experts", tmp_path, cases), strict=True):
        gradients, metrics = plain.step(LossSection(beta=BETA, **PLAIN[1]), None, False, answers)
        kept = [
            (sample.prompt_ids, sample.completion_ids, marks if answers else slice(None))
            for sample, marks in zip(sequences(), drawn(), strict=True)
            if sample.finished
        ]
        value, slopes = balanced(plain.model, kept)
        gradients = {name: slope + 0.5 * slopes[name] for name, slope in gradients.items()}
        check(1, result, gradients, metrics | {"loss": metrics["loss"] + 0.5 * value})
        assert_rounded(result["stats"]["aux_loss"][1], value)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_that_teaches_nothing_changes_nothing_and_leaves_no_trace(model_folder, tmp_path, expected, ranks):
    """As the first step of all and as a later one: without a token, or with an advantage that makes the loss infinite,
    or NaN, or its gradient alone too large for float32."""
    spoiled = [(10, float("inf")), (11, float("nan")), (12, 1e30)]
    cases = [(number, {"spoiled": spoiled[place % 3]}) for place, number in enumerate(range(0, len(PLAIN), 7))]
    masking = [number for number, (settings, *_) in enumerate(CASES) if settings.get("mask_truncated_completions")]
    cases = [(number, {"masked": True}) for number in masking[::9]] + cases
    results = run(ranks, model_folder, tmp_path, [worker_case(number, ranks) | kind for number, kind in cases])
    for (number, _), result in zip(cases, results, strict=True):
        check(number, result, *expected(number))
