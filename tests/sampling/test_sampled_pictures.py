"""What samplers draw after prompts with pictures, against plain transformers in float64, for seven families."""

from dataclasses import dataclass

import pytest
import torch
from picture_oracle import Plain
from pictured import FAMILIES, drawing, save
from rounding import assert_rounded
from scripted_turns import Scripted, naive

from grpo.config.server import ServerConfig
from grpo.data.records import Example
from grpo.model.load import load_model, load_tokenizer
from grpo.model.pictures import load_processor
from grpo.model.trial import make_batcher
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.generate import LocalSampler
from grpo.sampling.self_check import make_sampler
from grpo.wire.picture_files import PicturedPrompt, pictures_of

pytestmark = [pytest.mark.slow, pytest.mark.sampled(2)]

LENGTH, COPIES, HOT, SEED = 12, 12, 4.0, 7
WIDE, TALL = drawing(24, 16, seed=0), drawing(20, 36, seed=1, file_format="JPEG")
OTHER = drawing(24, 16, seed=2)  # as large as WIDE, so that its prompt has the same ids
PROMPTS = [("How many? ", WIDE), ("2 and 2?",), ("How many? ", OTHER), (TALL, " or ", WIDE), ("Is it? ", TALL)]


@dataclass
class Family:
    plain: Plain
    samplers: dict
    examples: list[Example]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = save(request.param, tmp_path_factory.mktemp(request.param))
    config = ServerConfig(model_name_or_path=str(folder), dtype="float32")
    tokenizer, model = load_tokenizer(config), load_model(config, torch.device("cpu"))
    batcher = make_batcher(model, tokenizer.pad_token_id, load_processor(config, model.config, tokenizer))
    # 16 rows are fewer than there are completions: they are filled again.
    chosen = make_sampler(model, tokenizer, LENGTH, rows=16, packs=batcher.packs, vision=batcher.vision)
    generate = make_sampler(model, tokenizer, LENGTH, rows=16, packs=0, vision=batcher.vision)
    assert isinstance(chosen, ContinuousSampler) and isinstance(generate, LocalSampler)
    plain = Plain(folder)
    return Family(plain, {"continuous": chosen, "generate": generate}, [prompt_of(plain, *parts) for parts in PROMPTS])


def prompt_of(plain: Plain, *content: str | bytes) -> Example:
    ids, pictures = plain.message(*content)
    prompt_ids = PicturedPrompt(ids, pictures) if pictures else ids
    return Example(index=0, prompt="", prompt_ids=prompt_ids, columns={"answer": ""})


def test_samplers_know_the_log_probs_of_what_they_draw(family):
    """Both draw the same, at a temperature so high that it is picture tokens too: they are text."""
    ids, known = {}, {}
    for kind, sampler in family.samplers.items():
        groups = sampler.sample(family.examples, COPIES, temperature=HOT, seed=SEED)
        ids[kind] = [rollout.completion_ids for rollouts in groups for rollout in rollouts]
        known[kind] = torch.tensor([x for rollouts in groups for r in rollouts for x in r.sampling_logprobs]).double()
    assert ids["continuous"] == ids["generate"]
    assert any(family.plain.picture_token in completion for completion in ids["generate"])
    prompts = [example.prompt_ids for example in family.examples for _ in range(COPIES)]
    expected = []
    for prompt, completion in zip(prompts, ids["generate"], strict=True):
        logits = family.plain.logits(prompt, pictures_of(prompt), completion).detach()
        expected.append(torch.log_softmax(logits / HOT, -1)[range(len(completion)), completion])
    for logprobs in known.values():
        assert_rounded(logprobs, torch.cat(expected))


@pytest.mark.parametrize("kind", ["continuous", "generate"])
def test_a_greedy_completion_takes_the_likeliest_tokens(family, kind):
    for example, rollout in zip(family.examples, family.samplers[kind].greedy(family.examples), strict=True):
        pictures = pictures_of(example.prompt_ids)
        rows = family.plain.logits(example.prompt_ids, pictures, rollout.completion_ids)
        assert rows.argmax(-1).tolist() == rollout.completion_ids


@pytest.mark.parametrize("kind", ["continuous", "generate"])
def test_a_completion_goes_on_after_an_answer(family, kind, monkeypatch):
    """Ids of pictures' pieces in what was drawn and in answers are text."""
    plain, sampler = family.plain, family.samplers[kind]
    ends = [token for token in range(6, 260) if token % 4 == 0 and token != plain.picture_token]

    def answer(drawn, turn):
        return None if sum(drawn) % 4 == 3 else [plain.picture_token, 7 + sum(drawn) % 50][: 1 + sum(drawn) % 2]

    turns = Scripted(ends, answer)
    monkeypatch.setattr(sampler, "_turns", turns)
    monkeypatch.setattr(sampler, "eos_token_ids", ends)
    groups = sampler.sample(family.examples, 3, temperature=HOT, seed=SEED)
    assert turns.alive() == 0 and sum(False in rollout.drawn for rollouts in groups for rollout in rollouts) > 5
    for index, (example, rollouts) in enumerate(zip(family.examples, groups, strict=True)):
        prompt, pictures = example.prompt_ids, pictures_of(example.prompt_ids)
        for copy, rollout in enumerate(rollouts):

            def logits_of(begun, prompt=prompt, pictures=pictures):
                return plain.logits(prompt, pictures, [*begun, 0])[-1]

            ids, drawn, logprobs = naive(logits_of, example, Scripted(ends, answer), LENGTH, HOT, (SEED, index, copy))
            assert (rollout.completion_ids, rollout.drawn) == (ids, drawn)
            known = [value for value, was_drawn in zip(rollout.sampling_logprobs, drawn, strict=True) if was_drawn]
            assert_rounded(known, logprobs)
