"""pass@k, avg@k and their errors against counts by hand; and numbers that do not know how many ranks there are."""

import math
import statistics
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from told import sampled

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.programs import EvaluateConfig
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import load_examples
from grpo.data.records import Example, Rollout
from grpo.rewards.functions import TrainerState
from grpo.sampling.generate import LocalSampler
from grpo.sampling.sampler import Sampler
from grpo.trainer.evaluation import best_metric, check_verdicts, evaluate, pass_at_k
from grpo.trainer.rewarding import Rewarder


def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one():
    for n in range(1, 9):
        for k in range(1, n + 1):
            shares = []
            for c in range(n + 1):
                choices = list(combinations([True] * c + [False] * (n - c), k))
                shares.append(float(Fraction(sum(map(any, choices)), len(choices))))
            np.testing.assert_allclose(pass_at_k(np.arange(n + 1), n, k), shares, rtol=1e-12, atol=1e-15)


def test_pass_at_k_holds_for_numbers_whose_factorials_no_float_can():
    n, counts = 10_000, [0, 1, 3, 500, 5000, 9999, 10_000]
    for k in (1, 2, 100, 5000, 9999, 10_000):
        exact = [float(1 - Fraction(math.comb(n - c, k), math.comb(n, k))) for c in counts]
        estimates = pass_at_k(np.array(counts), n, k)
        np.testing.assert_allclose(estimates, exact, rtol=1e-9)
        assert np.all((estimates >= 0) & (estimates <= 1))


@pytest.fixture
def ask(model, tokenizer, model_folder, data_folder):
    """`ask(rank, world size, **settings)`: metrics and completions of seven problems, with verdicts that vary."""

    def run(rank=0, world_size=1, **settings):
        fixed = {"system_prompt": "", "max_completion_length": 12, "eval_samples": 7, "sequences_per_generate": 3}
        config = config_of(**{"model": model_folder, "dataset": data_folder} | fixed | settings)
        examples = load_examples(config, "test", tokenizer, config.eval_samples, progress=False)
        sampler = LocalSampler(model, tokenizer, [tokenizer.eos_token_id], config.max_completion_length)
        rewarder = Rewarder(FUNCTIONS, FUNCTIONS, config)
        return evaluate(sampler, examples, rewarder, rank=rank, world_size=world_size, state=TrainerState())

    return run


def config_of(**settings) -> EvaluateConfig:
    return parse_arguments(EvaluateConfig, "", [f"--{name}={value}" for name, value in settings.items()])


def is_correct(completion: str, answer: str) -> bool:
    return len(completion) % 3 == int(answer) % 3


def has_format(completion: str, prompt: str) -> bool:
    return len(prompt + completion) % 2 == 0


def right(prompts, completions, answer, **columns):
    return [1.5 * is_correct(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def tidy(prompts, completions, **columns):
    return [0.1 + 0.2 * has_format(completion, prompt) for prompt, completion in zip(prompts, completions, strict=True)]


right.is_verdict, tidy.full_reward = True, 0.1 + 0.2
FUNCTIONS = {"right": right, "tidy": tidy}


def test_the_metrics_are_those_of_the_completions(ask):
    metrics, completions = ask(num_generations_eval=5)
    assert len(completions) == 7 * 6
    for completion in completions:
        assert completion["correct"] == is_correct(completion["completion"], completion["answer"])
        assert completion["format"] == has_format(completion["completion"], completion["prompt"])
    greedy = [completion for completion in completions if completion["sample"] == 0]
    p, formats, lengths = (
        statistics.mean(completion[name] for completion in greedy) for name in ("correct", "format", "tokens")
    )
    earned = [1.5 * answer["correct"] + 0.1 + 0.2 * answer["format"] for answer in greedy]
    expected = {
        "accuracy": p,
        "accuracy_se": math.sqrt(p * (1 - p) / 7),
        "n": len(greedy),
        "format": formats,
        "completions/mean_length": lengths,
        "completions/clipped_ratio": statistics.mean(not completion["finished"] for completion in greedy),
        "num_tokens": sum(completion["tokens"] for completion in completions),
        "reward": statistics.mean(earned),
        "reward_se": statistics.stdev(earned) / math.sqrt(7),
        "rewards/right/mean": 1.5 * p,
        "rewards/tidy/mean": statistics.mean(earned) - 1.5 * p,
    }
    right = [[] for _ in range(7)]
    for completion in completions:
        if completion["sample"]:
            right[completion["problem"]].append(completion["correct"])
    assert all(len(verdicts) == 5 for verdicts in right)
    estimates = {"avg@5": [*map(statistics.mean, right)]}
    for k in (1, 2, 4, 5):
        estimates[f"pass@{k}"] = [statistics.mean(map(any, combinations(verdicts, k))) for verdicts in right]
    assert 0 < statistics.mean(estimates["avg@5"]) < statistics.mean(estimates["pass@2"]) < 1, "verdicts that vary"
    for name, values in estimates.items():
        expected |= {name: statistics.mean(values), f"{name}_se": statistics.stdev(values) / math.sqrt(7)}
    assert metrics == pytest.approx({f"eval_{name}": value for name, value in expected.items()})


class ScriptedSampler(Sampler):
    """A sampler without a model: it answers greedily with the gold answer, and sample by sample in turn."""

    def rollout(self, text: str) -> Rollout:
        return sampled(text.encode(), text)

    def greedy(self, examples):
        return [self.rollout(example.gold) for example in examples]

    def sample(self, examples, copies, temperature, seed, on_groups=None, ids=None):
        return [[self.rollout(str(number % 2)) for _ in range(copies)] for number in ids]


def same(prompts, completions, answer, **columns):
    return [float(completion == gold) for completion, gold in zip(completions, answer, strict=True)]


same.is_verdict = True


@pytest.mark.parametrize("world_size", [2, 3, 20])
def test_ranks_share_the_work_without_changing_it(ask, world_size):
    _, alone = ask(num_generations_eval=4)
    shares = [ask(rank, world_size, num_generations_eval=4)[1] for rank in range(world_size)]
    together = [completion for share in shares for completion in share]

    def order(completion):
        return completion["sample"] > 0, completion["problem"], completion["sample"]

    assert sorted(together, key=order) == sorted(alone, key=order)
    if world_size < 20:
        assert max(map(len, shares)) - min(map(len, shares)) <= 6, "at most two calls"


def test_the_seed_decides_the_samples_and_greedy_knows_none(ask):
    def texts(seed):
        _, completions = ask(seed=seed, num_generations_eval=3)
        assert ask(seed=seed, num_generations_eval=3, temperature=3.0, eval_temperature=1.0)[1] == completions
        return [
            [completion["completion"] for completion in completions if (completion["sample"] > 0) == drawn]
            for drawn in (False, True)
        ]

    first, again, different = texts(1), texts(1), texts(2)
    assert first == again
    assert first[0] == different[0] and first[1] != different[1]
    assert len(set(first[1])) > 15, "samples of a problem differ"


def test_a_single_problem_has_no_error_over_problems_and_more_samples_than_a_call_may_draw(ask):
    metrics, completions = ask(eval_samples=1, num_generations_eval=8)
    assert [completion["sample"] for completion in completions] == [*range(9)]
    assert math.isnan(metrics["eval_avg@8_se"]) and not math.isnan(metrics["eval_avg@8"])


def length(prompts, completions, **columns):
    """None for some answers, as a function that does not apply to them returns."""
    return [None if answer.endswith("1") else 3.0 * len(answer) for answer in completions]


async def constant(prompts, completions, **columns):
    return [-1.0] * len(completions)


def evaluated(examples: int, functions: dict, **settings):
    """Return metrics and completions of the gold answers 0, 1, 0, 1, ..."""
    config = config_of(**{"model": "none", "dataset": "none", "sequences_per_generate": 2, **settings})
    config.reward_funcs, config.reward_weights = [*functions], config.reward_weights[: len(functions)]
    golds = [str(index % 2) for index in range(examples)]
    problems = [
        Example(index=index, prompt="?", prompt_ids=[1], columns={"answer": gold}, gold=gold)
        for index, gold in enumerate(golds)
    ]
    rewarder = Rewarder(functions, functions, config)
    return evaluate(ScriptedSampler(), problems, rewarder, rank=0, world_size=1, state=TrainerState())


def test_any_sampler_can_be_evaluated():
    metrics, completions = evaluated(4, {"same": same}, num_generations_eval=2, sequences_per_generate=1, seed=0)
    assert (metrics["eval_accuracy"], metrics["eval_avg@2"], metrics["eval_pass@2"]) == (1.0, 0.5, 1.0)
    assert [completion["completion"] for completion in completions] == [*"0101", *"10" * 4]


def test_without_a_verdict_the_rewards_are_what_counts():
    metrics, completions = evaluated(4, {"length": length, "constant": constant})
    assert not [name for name in metrics if "accuracy" in name or "format" in name]
    assert (metrics["eval_rewards/length/mean"], metrics["eval_rewards/constant/mean"]) == (3.0, -1.0)
    assert metrics["eval_reward"] == statistics.mean([2.0, -1.0, 2.0, -1.0])
    assert metrics["eval_reward_se"] == pytest.approx(statistics.stdev([2.0, -1.0, 2.0, -1.0]) / 2)
    assert [answer["reward"] for answer in completions] == [2.0, -1.0] * 2
    assert not completions[0].keys() & {"correct", "format"}
    metrics, _ = evaluated(4, {"length": length})  # None for every second
    assert (metrics["eval_reward"], metrics["eval_rewards/length/mean"], metrics["eval_n"]) == (3.0, 3.0, 4)
    assert not [name for name in metrics if "@" in name]


def test_all_verdicts_that_apply_must_say_right():
    def even(prompts, completions, **columns):
        return [None if answer == "1" else 1.0 for answer in completions]

    def odd(prompts, completions, **columns):
        return [1.0 if answer == "1" else None for answer in completions]

    def first(prompts, completions, **columns):
        return [0.0] + [None] * (len(completions) - 1)

    for function in (even, odd, first):
        function.is_verdict = True
    assert evaluated(5, {"even": even})[0]["eval_accuracy"] == 0.6
    assert evaluated(5, {"even": even, "odd": odd})[0]["eval_accuracy"] == 1.0
    assert evaluated(5, {"even": even, "first": first})[0]["eval_accuracy"] == 0.0


def test_which_metric_is_the_best_one_is_a_setting():
    both, alone = {"same": same, "length": length}, {"length": length}
    assert best_metric(TrainerConfig(), both) == "eval_accuracy"
    assert best_metric(TrainerConfig(), alone) == "eval_reward"
    for name in ("reward", "eval_reward", "rewards/length/mean", "accuracy", "pass@2"):
        config = TrainerConfig(metric_for_best_model=name, num_generations_eval=2)
        assert best_metric(config, both) == "eval_" + name.removeprefix("eval_")
    for name in ("accuracy", "pass@2", "loss", "rewards/other/mean"):
        with pytest.raises(ConfigError, match=f"^metric_for_best_model=.{name}.: .* of reward, rewards/length/mean$"):
            best_metric(TrainerConfig(metric_for_best_model=name), alone)


def test_samples_need_a_verdict():
    check_verdicts(EvaluateConfig(num_generations_eval=2), {"same": same})
    check_verdicts(EvaluateConfig(), {"length": length})
    with pytest.raises(ConfigError, match="^num_generations_eval=2: .* none of length is a verdict"):
        check_verdicts(EvaluateConfig(num_generations_eval=2), {"length": length})
