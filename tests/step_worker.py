"""Run under the launcher by test_step.py: `update` on this rank's share of fixed sequences, case after case from the
same weights, with plain SGD, so that the change of the weights is the gradient. Rank 0 writes what came out.

    step_worker.py MODEL CASES OUT

With a vision-language MODEL some prompts have pictures. CASES is a JSON list of {"options": [...], "shares": [...],
"order": [...], "old": bool, "sampled": bool, "small_steps": [...]}: the trainer's options; how many sequences each rank
has, and of all sequences which stands where; whether they come with old and the sampler's log-probs; learning rates of
updates before the one looked at. In a case with "answers" the policy did not draw all tokens; one with "episodes" has
branches of episodes in place of the sequences; one that is "padded" packs nothing. A case with "spoiled", a sequence
and an advantage for it, begins with an update that must change nothing; so does one with "masked", of which every
completion was cut. After one that is "scored" a pass without gradients is made, and the weights are copied.
"""

import json
import random
import sys
from dataclasses import replace
from itertools import chain
from math import isfinite
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from pictured import drawing
from told import sampled

from grpo.algorithm.advantages import group_advantages
from grpo.config.command_line import parse_arguments
from grpo.config.sampling_settings import SharedConfig
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example, Group, Sample, make_samples
from grpo.model.load import load_model, load_tokenizer
from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher
from grpo.model.pictures import PictureProcessor, load_processor, takes_pictures
from grpo.model.sharded import weights_to_save
from grpo.model.trial import make_batcher, share_rows
from grpo.run.collective import gather
from grpo.run.metrics import PhaseClock, Stats, add_stats
from grpo.trainer import deepspeed_engine
from grpo.trainer.deepspeed_engine import deepspeed, engine_config, join_ranks, start_engine
from grpo.trainer.policy import make_trainable
from grpo.trainer.step import update
from grpo.wire.picture_files import PicturedPrompt
from grpo.wire.tool_outcomes import Branch

LEARNING_RATE = 1e3  # the change of a weight is then far above the rounding of the weight
PROMPTS, GENERATIONS = 12, 3
EMPTY = (0, 17)
UNFINISHED = (3, 4, 5, 8, 20, 29, 35)
PICTURES = {1: [(16, 24)], 4: [(40, 8), (20, 20)], 5: [(8, 8)], 10: [(24, 16)]}  # sizes of the pictures of a prompt


def step(engine, samples: list[Sample], config: TrainerConfig, batcher: Batcher) -> dict[str, Stats]:
    """Do an update; return every rank's stats, added up."""
    stats = update(engine, samples, config, batcher, PhaseClock(), beta=config.beta, entropy_coef=config.entropy_coef)
    total: dict[str, Stats] = {}
    for of_rank in gather(stats):
        add_stats(total, of_rank)
    return total


def pictured_text(place: int, placeholder: str) -> tuple[str, list[bytes]]:
    """Return the text that a prompt with pictures begins with, and its pictures."""
    pictures = [drawing(*size, seed=place) for size in PICTURES[place]]
    return "".join(f"see {placeholder} " for _ in pictures), pictures


def rewards() -> list[list[float]]:
    """Return rewards with a group of equals, a group with a reward that does not apply, and a group of only such."""
    draw = random.Random(6)
    groups = [[draw.gauss(0, 1) for _ in range(GENERATIONS)] for _ in range(PROMPTS)]
    groups[4], groups[7][1], groups[9] = [0.1] * GENERATIONS, float("nan"), [float("nan")] * GENERATIONS
    return groups


def sequences(processor: PictureProcessor | None = None) -> list[Sample]:
    """Make ragged samples: among them empty and one-token completions, truncated ones, and some with the pad token.

    With a processor some prompts have pictures.
    """
    draw = random.Random(5)
    prompts = [[draw.randint(5, 200) for _ in range(length)] for length in (1, 20, 7, 3, 12, 9, 2, 5, 30, 4, 8, 16)]
    if processor is not None:
        # Ids that are text in every family; completions may have a picture's id too.
        prompts = [[id + 40 for id in prompt] for prompt in prompts]
        for place in PICTURES:
            before = processor.encode(*pictured_text(place, processor.placeholder), add_special_tokens=False)
            prompts[place] = PicturedPrompt([*before, *prompts[place]], before.pictures)
    made = []
    for number in range(PROMPTS * GENERATIONS):
        length = 0 if number in EMPTY else {1: 1, 2: 30}.get(number, draw.randint(1, 16))
        completion = [draw.randint(0, 200) for _ in range(length)]
        # The tiny model's log-probs lie about -6.2.
        lows = 5.6, 3, 5.6
        old, reference, sampling = (np.float32([-draw.uniform(low, 7) for _ in completion]) for low in lows)
        sampling[[draw.random() < 0.2 for _ in completion]] = np.nan
        sample = Sample(
            prompt_ids=prompts[number // GENERATIONS],
            completion_ids=completion,
            finished=number not in UNFINISHED,
            ref_logprobs=reference,
        )
        sample.old_logprobs, sample.sampling_logprobs = old, sampling
        made.append(sample)
    return made


def teacher_rows(number: int, tokens: int, top_k: int) -> np.ndarray:
    """Make what a teacher says of a sequence's tokens, as LogprobsAnswer.table; some sequences have none."""
    draw = np.random.default_rng(number)
    probabilities = np.sort(draw.dirichlet(np.ones(top_k + 1), tokens), axis=1)[:, ::-1][:, :top_k]
    ids = np.array([draw.permutation(200)[:top_k] for _ in range(tokens)]).reshape(tokens, top_k)
    rows = np.column_stack([draw.uniform(-7, -4, tokens), np.log(probabilities), ids]).astype(np.float32)
    if number % 6 == 5:
        rows[:, : 1 + top_k] = np.nan
    return rows


def drawn() -> list[np.ndarray]:
    """Mark the tokens of each sequence that the policy drew, where others are answers: in the middle of most sequences,
    at the end of some, and in one everywhere."""
    draw, marked = random.Random(8), []
    for number, sample in enumerate(sequences()):
        marks = np.ones(len(sample.completion_ids), bool)
        for _ in range(number % 3):
            begin = draw.randint(1, len(marks) + 1)
            marks[begin : begin + draw.randint(1, 6)] = False
        marked.append(marks & (number != 10))
    return marked


def episodes() -> list[Group]:
    """Make groups of four episodes: a tree of three branches, one branch, none, two. A branch may begin with tokens
    that are trained on in another one, in its prompt or behind it. One of the trees was cut."""
    draw = random.Random(9)

    def ids(most: int) -> list[int]:
        return [draw.randint(5, 200) for _ in range(draw.randint(1, most))]

    def branch(prompt: list[int], *parts: list[int], again: bool = False) -> Branch:
        """Make a branch of segments that were drawn and answers in turn; the first segment may be trained elsewhere."""
        marks = [[place % 2 == 0 and not (again and place == 0)] * len(part) for place, part in enumerate(parts)]
        drawn, completion = [*chain(*marks)], [*chain(*parts)]
        logprobs = [-draw.uniform(5.6, 7) if mark else float("nan") for mark in drawn]
        return Branch(prompt_ids=prompt, completion_ids=completion, sampling_logprobs=logprobs, drawn=drawn)

    groups = []
    for number in range(3):
        root, rollouts = ids(20), []
        for count in (3, 1, 0, 2):
            first, answer = ids(6), ids(5)
            branches = [
                branch(root, first, answer, ids(9)),
                branch(root, first, ids(5), ids(3), again=True),
                branch([*root, *first, *answer], ids(12)),
            ][:count]
            if count == 1:
                branches = [branch(ids(8), ids(7), ids(4), ids(2))]
            rollouts.append(sampled([], finished=(number, count) != (1, 3), branches=branches))
        groups.append(
            Group(id=number, example=Example(index=0, prompt="", prompt_ids=[1], columns={}), rollouts=rollouts)
        )
    return groups


def branch_samples() -> list[Sample]:
    """Make the samples of the episodes, with an advantage of each episode, and old and the reference's log-probs."""
    draw = random.Random(4)
    advantages = [[draw.gauss(0, 1) for _ in group.rollouts] for group in episodes()]
    samples = [sample for group in episodes() for sample in make_samples(group)]
    for sample in samples:
        sample.advantage = advantages[sample.group_id][sample.place]
        sample.old_logprobs, sample.ref_logprobs = (
            np.float32([-draw.uniform(low, 7) for _ in range(sample.tokens)]) for low in (5.6, 3)
        )
    return samples


def own_share(case: dict, config: TrainerConfig, rank: int, processor: PictureProcessor | None = None) -> list[Sample]:
    advantages = group_advantages(torch.tensor(rewards(), dtype=torch.float64), config.scale_rewards)
    samples = branch_samples() if case.get("episodes") else sequences(processor)
    if not case.get("episodes"):
        for sample, advantage in zip(samples, advantages.flatten().tolist(), strict=True):
            sample.advantage = advantage
    for sample in samples:
        sample.old_logprobs = sample.old_logprobs if case["old"] else None
        sample.sampling_logprobs = sample.sampling_logprobs if case["sampled"] else None
    for number, sample in enumerate(samples) if config.teacher_servers else ():
        rows = teacher_rows(number, len(sample.completion_ids), config.teacher_top_k)
        sample.teacher = rows if config.teacher_top_k else rows[:, 0]
    for sample, marks in zip(samples, drawn(), strict=True) if case.get("answers") else ():
        sample.drawn = marks
        for name in ("ref_logprobs", "old_logprobs", "sampling_logprobs", "teacher"):
            if (values := getattr(sample, name)) is not None:
                setattr(sample, name, values[marks])
    end = sum(case["shares"][: rank + 1])
    return [samples[index] for index in case["order"][end - case["shares"][rank] : end]]


def read_config(case: dict) -> TrainerConfig:
    sizes = ["--prompts_per_step", str(PROMPTS), "--num_generations", str(GENERATIONS)]
    fixed = ["--max_completion_length", "32", "--temperature", "0.8"]
    return parse_arguments(TrainerConfig, "", [*sizes, *fixed, *case["options"]])


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy the trained weights."""
    copies = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            with deepspeed.zero.GatheredParameters([weight]):
                copies[name] = weight.detach().clone()
    return copies


def check_unchanged(engine, case: dict, config: TrainerConfig, batcher: Batcher, rank: int) -> None:
    """Check that an update with a spoiled advantage, or on completions that are all masked, changes no weight."""
    samples, before = own_share(case, config, rank), weights_of(engine.module)
    skipped, steps = engine.skipped_steps, engine.global_steps
    if "spoiled" in case:
        number, advantage = case["spoiled"]
        end = sum(case["shares"][: rank + 1])
        numbers = case["order"][end - case["shares"][rank] : end]
        if number in numbers:
            samples[numbers.index(number)].advantage = advantage
        stats = step(engine, samples, config, batcher)
        assert not engine.was_step_applied() and engine.skipped_steps == skipped + 1
        assert isfinite(stats["loss"].total) == isfinite(np.float32(advantage))
    else:
        assert step(engine, [replace(sample, finished=False) for sample in samples], config, batcher) == {}
        assert engine.global_steps == steps
    assert all(torch.equal(before[name], now) for name, now in weights_of(engine.module).items())


def main(model, cases_file, out) -> None:
    cases = json.loads(Path(cases_file).read_text())
    configs = [read_config(case) for case in cases]
    rank, world_size, device, _ = join_ranks(configs[0])
    shared = SharedConfig(model_name_or_path=model)
    policy = load_model(shared, device)
    processor = None
    if takes_pictures(policy.config):  # the models of text have no tokenizer
        processor = load_processor(shared, policy.config, load_tokenizer(shared))
    make_trainable(policy, configs[0])
    packed = share_rows(make_batcher(policy, 0, processor), policy, configs[0].sequence_parallel_size)
    first = weights_of(policy)
    settings = engine_config(configs[0], world_size, device) | {"zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD([w for w in policy.parameters() if w.requires_grad], lr=LEARNING_RATE)
    deepspeed_engine.make_optimizer = lambda model, config: optimizer
    deepspeed_engine.NORM_BLOCK = 100  # numbers: the gradients have several blocks
    engine, _ = start_engine(configs[0], settings, policy)

    results = []
    for case, config in zip(cases, configs, strict=True):
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if name in first:
                    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                        weight.copy_(first[name])
        engine.optimizer.refresh_fp32_params()
        samples = own_share(case, config, rank, processor)
        batcher = replace(packed, packs=False) if case.get("padded") else packed
        if "spoiled" in case or "masked" in case:
            check_unchanged(engine, case, config, batcher, rank)
        # The last update is the one that is looked at; those before it move the weights a little.
        for rate in (*case["small_steps"], LEARNING_RATE):
            for group in optimizer.param_groups:
                group["lr"] = rate
            before = weights_of(policy)
            stats = step(engine, samples, config, batcher)
        if case.get("scored"):  # no backward pass takes what ZeRO-3 fetches ahead for it
            with torch.no_grad():
                token_logprobs(policy, batcher.make([([5, 6, 7], [8, 9])], device), temperature=1.0)
            copied, now = weights_to_save(policy), weights_of(policy)
            assert rank > 0 or all(torch.equal(values, now[name]) for name, values in copied.items())
        results.append(
            {
                "before": before,
                "gradient": {name: (before[name] - now) / LEARNING_RATE for name, now in weights_of(policy).items()},
                "norm": float(engine.get_global_grad_norm()),
                "held": sum(weight.numel() for weight in policy.parameters()) / sum(map(torch.numel, before.values())),
                "stats": {name: (values.count, values.total) for name, values in stats.items()},
            }
        )
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
