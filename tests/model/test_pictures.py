"""Prompts with pictures against plain transformers in float64, one unpadded sequence at a time, for seven families."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from models import distance
from picture_oracle import Plain
from pictured import FAMILIES, build_model, drawing, save
from ragged import named
from rounding import GRADIENT, assert_rounded
from transformers import AutoConfig

from grpo.config.errors import ConfigError
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig
from grpo.model.activations import checkpoint_activations
from grpo.model.load import load_model, load_tokenizer
from grpo.model.logprobs import token_logprobs
from grpo.model.lora import train_adapter
from grpo.model.packing import Batcher
from grpo.model.pictures import (
    PictureProcessor,
    Vision,
    freeze_vision_tower,
    load_processor,
    vision_modules,
    vision_parameters,
)
from grpo.model.trial import make_batcher, trial_sequences
from grpo.trainer.inputs import read_inputs
from grpo.wire.picture_files import PicturedPrompt, pictures_of

WIDE, TALL = drawing(24, 16, seed=0), drawing(20, 36, seed=1, file_format="JPEG")
OTHER = drawing(24, 16, seed=2)  # as large as WIDE, so that its prompt has the same ids
EVERYTHING = 10**6


@dataclass
class Family:
    folder: object
    plain: Plain
    tokenizer: object
    model: torch.nn.Module
    processor: PictureProcessor
    batcher: Batcher

    def prompt(self, *content: str | bytes) -> PicturedPrompt | list[int]:
        """Expand a message by the rules of the oracle."""
        ids, pictures = self.plain.message(*content)
        return PicturedPrompt(ids, pictures) if pictures else ids

    def sequences(self) -> list[tuple]:
        """Make (prompt, completion) pairs out of order: groups, an empty completion, drawn picture tokens."""
        token = self.plain.picture_token
        first, second = self.prompt("How many? ", WIDE), self.prompt("How many? ", OTHER)
        assert [*first] == [*second]
        several, text = self.prompt(TALL, " or ", WIDE, " then ", OTHER), self.prompt("How many are 2?")
        return [
            (first, [40, 41, 42, 43]),
            (text, [50, 51, token, 52]),
            (several, [60, 61]),
            (second, [40, 41, 42, 43]),
            (first, []),
            (several, [token, token, 62, 63, 64, 65, 66]),
            (text, [53]),
            (first, [44, token, 45, 46, 47, 48]),
            (second, [49]),
            (self.prompt("Is this ", TALL, "?"), [70, 71, 72]),
        ]

    def plain_sequences(self) -> list[tuple]:
        return [(prompt, pictures_of(prompt), completion) for prompt, completion in self.sequences()]


def load(folder) -> Family:
    config = ServerConfig(model_name_or_path=str(folder), dtype="float32")
    tokenizer, model = load_tokenizer(config), load_model(config, torch.device("cpu"))
    processor = load_processor(config, model.config, tokenizer)
    batcher = make_batcher(model, tokenizer.pad_token_id, processor)
    return Family(folder, Plain(folder), tokenizer, model, processor, batcher)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return load(save(request.param, tmp_path_factory.mktemp(request.param)))


def padded(family: Family) -> Batcher:
    return Batcher(family.tokenizer.pad_token_id, 0, Vision(family.processor, family.model))


def in_micro_batches(family: Family, batcher: Batcher, budget: int):
    """Yield the rows of each micro-batch with their log-probs."""
    sequences = family.sequences()
    for rows in batcher.cut(sequences, budget):
        batch = batcher.make([sequences[row] for row in rows], "cpu")
        logprobs, _ = token_logprobs(family.model, batch, 1.0)
        yield rows, logprobs.split([len(sequences[row][1]) for row in rows])


def test_a_prompt_is_what_the_familys_rules_make_of_it(family):
    for content in [("How many? ", WIDE), (TALL, " or ", WIDE, " then ", OTHER), (WIDE, OTHER)]:
        expected, (text, pictures) = family.prompt(*content), family.plain.rendered(*content)
        assert text.count(family.processor.placeholder) == len(pictures)
        assert family.processor.encode(text, pictures, add_special_tokens=False) == expected
        assert family.processor.count(pictures) == list(expected).count(family.processor.token_id)
    assert family.processor.token_id == family.plain.picture_token


def test_pixels_are_the_image_processors_own(family):
    prompt = family.prompt(TALL, " or ", WIDE)
    inputs = family.processor.join(family.processor.inputs(prompt.pictures))
    expected = family.plain.pixels((TALL, WIDE))
    for name, value in expected.items():
        assert torch.equal(inputs[name], value)


def test_every_family_is_packed_also_where_the_pieces_of_a_picture_see_each_other(family):
    batch = family.batcher.make(family.sequences(), "cpu")
    see_each_other = any(blocks is not None for blocks in batch.tree.blocks)
    assert see_each_other == (family.plain.family == "gemma3")


def test_no_text_of_the_trial_has_the_id_of_a_pictures_piece(family, monkeypatch):
    """In a small vocabulary an arbitrary id may be it."""
    (text, _), *_ = trial_sequences(family.model)
    monkeypatch.setattr(family.batcher.vision, "token_id", text[1])
    sequences = trial_sequences(family.model, family.batcher.vision)
    assert sequences[0][0] != text and not any(text[1] in prompt or text[1] in rest for prompt, rest in sequences)


def test_a_window_may_cut_a_picture(tmp_path):
    folder = save("gemma3", tmp_path / "gemma3")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["sliding_window"] = 24
    (folder / "config.json").write_text(json.dumps(config))
    narrow = load(folder)
    assert narrow.batcher.packs
    sequences = narrow.sequences()
    assert max(len(prompt) + len(completion) for prompt, completion in sequences) > 24
    expected = torch.cat([narrow.plain.logprobs(*sequence).detach() for sequence in narrow.plain_sequences()])
    batch = narrow.batcher.make(sequences, "cpu")
    assert batch.tree is not None
    with torch.no_grad():
        logprobs, _ = token_logprobs(narrow.model, batch, 1.0)
    assert_rounded(logprobs, expected)


def test_a_groups_pictures_are_seen_once(family):
    prompt = family.prompt(TALL, " or ", WIDE)
    of_prompt = family.processor.join(family.processor.inputs(prompt.pictures))["pixel_values"]
    batch = family.batcher.make([(prompt, [40 + number]) for number in range(3)], "cpu")
    assert batch.pictures["pixel_values"].numel() == of_prompt.numel()


def test_log_probs_are_those_of_float64(family):
    expected = [family.plain.logprobs(*sequence).detach() for sequence in family.plain_sequences()]
    for batcher in (family.batcher, padded(family)):
        for budget in (1, 150, EVERYTHING):
            with named("packed" if batcher is family.batcher else "padded", budget), torch.no_grad():
                for rows, logprobs in in_micro_batches(family, batcher, budget):
                    for row, of_row in zip(rows, logprobs, strict=True):
                        assert_rounded(of_row, expected[row])


def test_a_picture_moves_log_probs(family):
    """Else all the rest of this module would hold for models that do not look."""
    sequences = family.plain_sequences()
    moved = (family.plain.logprobs(*sequences[0]) - family.plain.logprobs(*sequences[3])).abs()
    assert moved.max() > 0.1


@pytest.mark.parametrize("recomputes", [False, True], ids=["", "activations recomputed"])
def test_the_gradient_is_plain_pytorchs_for_any_cut(family, recomputes):
    """Of every parameter, the vision tower's too. One micro-batch alone has no picture, another nothing else."""
    count = sum(len(completion) for _, completion in family.sequences())
    weights = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    exact = family.plain.gradient(family.plain_sequences(), weights)
    assert all(exact[name].any() for name in exact if "visual" in name)  # Qwen's; of LLaVA's a layer is not read
    of_row = weights.split([len(completion) for _, completion in family.sequences()])
    if recomputes:
        family = load(family.folder)
        checkpoint_activations(family.model)
    for budget in (1, 150, EVERYTHING):
        family.model.zero_grad()
        for rows, logprobs in in_micro_batches(family, family.batcher, budget):
            sum((of_row[row] * part).sum() for row, part in zip(rows, logprobs, strict=True)).backward()
        gradient = {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad
            for name, weight in family.model.named_parameters()
        }
        with named("micro-batches of", budget):
            assert gradient.keys() == exact.keys()
            towers = {name: exact[name] for name in exact if "visual" in name or "vision" in name or "multi" in name}
            assert_rounded([distance(gradient, exact), distance(gradient, towers)], [0.0, 0.0], GRADIENT)


def test_gradients_come_in_the_same_order_with_pictures_and_beside_the_filler(family):
    """ZeRO-2's ranks reduce them in that order, each rank's micro-batch with pictures or without."""
    family = load(family.folder)
    checkpoint_activations(family.model)
    finished = []
    for name, weight in family.model.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda weight, name=name: finished[-1].append(name))
    pictured, text, *_ = family.sequences()
    beside = (family.batcher.vision.filler, [])
    for batcher in (family.batcher, padded(family)):
        finished.clear()
        for sequences in ([pictured], [text, beside], [pictured, text], [text, text, beside]):
            finished.append([])
            token_logprobs(family.model, batcher.make(sequences, "cpu"), 1.0)[0].sum().backward()
        assert all(order == finished[0] for order in finished)
        assert len(finished[0]) > len([*family.model.get_decoder().parameters()]) + 1  # the tower's too


def test_processors_that_make_other_pixels_have_other_fingerprints(family, tmp_path):
    """Whatever of preprocessor_config.json or processor_config.json makes other pixels or ids; nothing else does."""
    path = family.folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    changes = {
        "qwen2_vl": [{"max_pixels": 2048}, {"min_pixels": 256}, {"image_mean": [0.5] * 3}],
        "qwen3_vl": [{"size": {"shortest_edge": 64, "longest_edge": 2048}}],
        "gemma3": [{"do_pan_and_scan": True}, {"resample": 3}],
        "llava": [{"image_std": [0.5] * 3}, {"do_center_crop": False}],
        "llava_onevision": [{"image_grid_pinpoints": [[24, 12], [12, 24]]}],
        "idefics3": [{"size": {"longest_edge": 16}}],
    }
    for number, change in enumerate(changes.get(family.plain.family, [{"max_pixels": 2048}])):
        folder = tmp_path / str(number)
        shutil.copytree(family.folder, folder)
        (folder / path.name).write_text(json.dumps(settings | change))
        assert fingerprint_of(folder) != family.processor.fingerprint, change
    shutil.copytree(family.folder, tmp_path / "same")
    (tmp_path / "same" / path.name).write_text(json.dumps(dict(reversed(settings.items()))))
    assert fingerprint_of(tmp_path / "same") == family.processor.fingerprint
    if family.plain.family.startswith("qwen"):
        assert fingerprint_of(family.folder, max_pixels=2048) != family.processor.fingerprint


def fingerprint_of(folder, **limits) -> str:
    config = ServerConfig(model_name_or_path=str(folder), dtype="float32", **limits)
    return load_processor(config, AutoConfig.from_pretrained(folder), load_tokenizer(config)).fingerprint


def test_a_saved_model_makes_the_same_pixels(family, tmp_path):
    """Also where the limits that it was trained with are not those of the model that it came from."""
    limits = {"max_pixels": 2048} if family.plain.family.startswith("qwen") else {}
    config = ServerConfig(model_name_or_path=str(family.folder), dtype="float32", **limits)
    processor = load_processor(config, family.model.config, load_tokenizer(config))
    family.model.save_pretrained(tmp_path)
    family.tokenizer.save_pretrained(tmp_path)
    processor.save(tmp_path)
    assert fingerprint_of(tmp_path) == processor.fingerprint


@pytest.mark.parametrize("limit", ["min_pixels", "max_pixels"])
def test_a_limit_that_nothing_would_follow_is_refused(family, model_folder, limit):
    config = ServerConfig(model_name_or_path=str(model_folder), **{limit: 500})
    with pytest.raises(ConfigError, match=f"^{limit}=500: .* takes no pictures: leave it out"):
        load_processor(config, AutoConfig.from_pretrained(model_folder), load_tokenizer(config))
    config = ServerConfig(model_name_or_path=str(family.folder), **{limit: 500})
    if not family.plain.family.startswith("qwen"):
        with pytest.raises(ConfigError, match=f"^{limit}=500: .* resizes every picture to one size: leave it out"):
            load_processor(config, family.model.config, family.tokenizer)


def test_threads_share_a_processor(family):
    pictures = [drawing(16 + 8 * (number % 4), 24, seed=number) for number in range(16)]
    texts = [f"{family.processor.placeholder} number {number}" for number in range(len(pictures))]

    def encode(number: int) -> PicturedPrompt:
        return family.processor.encode(texts[number], [pictures[number]], add_special_tokens=number % 2 == 0)

    expected = [encode(number) for number in range(len(texts))]
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(encode, [*range(len(texts))] * 4)] == expected * 4


def test_the_tower_and_its_projector_are_all_but_the_language_model(family, model):
    assert vision_parameters(model) == vision_modules(model) == []  # it takes text alone
    name = family.plain.family
    model = build_model(name, family.tokenizer)
    expected = {
        "gemma3": ["model.vision_tower", "model.multi_modal_projector"],
        "llava": ["model.vision_tower", "model.multi_modal_projector"],
        "llava_onevision": ["model.vision_tower", "model.multi_modal_projector"],
        "idefics3": ["model.vision_model", "model.connector"],
    }.get(name, ["model.visual"])
    assert vision_modules(model) == expected
    freeze_vision_tower(model)
    frozen = {weight for weight, parameter in model.named_parameters() if not parameter.requires_grad}
    in_modules = {weight for weight, _ in model.named_parameters() if weight.startswith(tuple(expected))}
    assert frozen == in_modules | ({"model.image_newline"} if name == "llava_onevision" else set())
    assert sum(parameter.numel() for parameter in vision_parameters(model)) > 10_000


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"]])
def test_an_adapter_stays_out_of_a_frozen_tower(family, targets):
    for frozen in (False, True):
        model = build_model(family.plain.family, family.tokenizer)
        train_adapter(model, TrainerConfig(use_peft=True, lora_target_modules=targets, freeze_vision_tower=frozen))
        adapters = [weight for weight, parameter in model.named_parameters() if parameter.requires_grad]
        in_tower = [weight for weight in adapters if weight.startswith(tuple(vision_modules(model)))]
        has_such = targets is None or not family.plain.family.startswith("qwen")
        assert bool(in_tower) == (has_such and not frozen)
        assert len(adapters) > len(in_tower)


def test_a_model_without_one_is_refused(model_folder, data_folder):
    data = dict(dataset_name=str(data_folder), beta=0.0, max_prompt_length=50, max_completion_length=50)
    config = TrainerConfig(model_name_or_path=str(model_folder), freeze_vision_tower=True, **data)
    refused = f"^freeze_vision_tower=True: {model_folder} has no vision tower: leave it out$"
    with pytest.raises(ConfigError, match=refused):
        read_inputs(config, rank=0, world_size=1, device=torch.device("cpu"))
