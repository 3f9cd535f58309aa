"""Loss and gradient of completions of prompts with pictures against TRL's own GRPOTrainer, for a tiny Qwen2.5-VL."""

import sys
import warnings

import numpy as np
import pytest
import torch
from models import distance
from picture_oracle import Plain
from pictured import drawing, save
from ragged import named
from rounding import GRADIENT, assert_rounded

from grpo.algorithm.loss import grpo_loss
from grpo.algorithm.loss_types import StepSize, Tokens
from grpo.config.loss_settings import LossSection
from grpo.config.server import ServerConfig
from grpo.model.load import load_model, load_tokenizer
from grpo.model.logprobs import token_logprobs
from grpo.model.pictures import load_processor
from grpo.model.trial import make_batcher
from grpo.wire.picture_files import PicturedPrompt

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11")

BETA, LONGEST = 0.3, 8
WIDE, TALL = drawing(24, 16, seed=0), drawing(20, 36, seed=1)
PROMPTS = [("How many? ", [WIDE]), ("Which? ", [TALL, WIDE]), ("2 and 2?", []), ("How many? ", [drawing(24, 16, 2)])]
LENGTHS = (3, 8, 1, 5)  # of the completions of each prompt
COUNT = len(PROMPTS) * len(LENGTHS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Plain(save("qwen2_5_vl", tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module")
def folder(plain):
    return plain.model.config._name_or_path


@pytest.fixture(scope="module")
def sequences(plain) -> list[tuple]:
    """(prompt, pictures, completion), the completions of a prompt one after the other."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for text, pictures in PROMPTS:
        content = [*[{"type": "image"} for _ in pictures], {"type": "text", "text": text}]
        message = [{"role": "user", "content": content}]
        rendered = plain.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        prompt = plain.prompt(rendered, pictures)
        made += [(prompt, pictures, torch.randint(10, 200, (n,), generator=draw).tolist()) for n in LENGTHS]
    return made


def numbers() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return advantages and the reference's log-probs."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(COUNT, generator=draw), [-6 + torch.randn(n, generator=draw) for n in LENGTHS * len(PROMPTS)]


@pytest.fixture(scope="module")
def trainer(folder, tmp_path_factory):
    """TRL's trainer of the model. Its own generation would give `inputs_of` what it gives `compute_loss`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's imports, not ours
        from datasets import Dataset
        from transformers import AutoModelForImageTextToText, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        trainer = GRPOTrainer(
            AutoModelForImageTextToText.from_pretrained(folder),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                str(tmp_path_factory.mktemp("trl")),
                use_cpu=True,
                bf16=False,
                report_to="none",
                use_bias_correction_kl=False,
                num_generations=len(LENGTHS),
                per_device_train_batch_size=COUNT,
                gradient_checkpointing=False,
                max_completion_length=LONGEST,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a question"] * COUNT}),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
    # Set here and not in the config: there it would load a reference model, which has no part in this.
    trainer.beta = BETA
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def drawn(answers: bool) -> list[np.ndarray]:
    """Mark the tokens of each completion that the policy drew: all, or all but one or two of the longer ones."""
    places = [np.arange(length) for length in LENGTHS * len(PROMPTS)]
    return [~((place >= 1) & (place <= 2) & (place < len(place) - 1) & answers) for place in places]


def inputs_of(plain, sequences, answers: bool) -> dict:
    """Lay the step out as TRL's `_generate_and_score_completions` does: prompts padded left, completions right."""
    from trl.trainer.utils import pad

    prompts = [torch.tensor(prompt) for prompt, _, _ in sequences]
    completions = [torch.tensor(completion) for _, _, completion in sequences]
    pixels = [plain.pixels((picture,)) for _, pictures, _ in sequences for picture in pictures]
    advantages, references = numbers()

    def padded(rows: list[torch.Tensor], side: str, value: float = 0) -> torch.Tensor:
        return pad(rows, padding_value=value, padding_side=side)

    completion_ids = padded(completions, "right", plain.tokenizer.pad_token_id)
    types = padded([(prompt == plain.picture_token).long() for prompt in prompts], "left")
    mask = padded([torch.ones_like(ids) for ids in completions], "right")
    tool_mask = padded([torch.from_numpy(marks).long() for marks in drawn(answers)], "right", 1)
    return {
        "prompt_ids": padded(prompts, "left", plain.tokenizer.pad_token_id),
        "prompt_mask": padded([torch.ones_like(ids) for ids in prompts], "left"),
        "completion_ids": completion_ids,
        "completion_mask": mask,
        "advantages": advantages,
        "tool_mask": tool_mask,
        "num_items_in_batch": (mask * tool_mask).sum(),
        "ref_per_token_logps": padded(references, "right"),
        "pixel_values": torch.cat([of_picture["pixel_values"] for of_picture in pixels]),
        "image_grid_thw": torch.cat([of_picture["image_grid_thw"] for of_picture in pixels]),
        "num_images": [len(pictures) for _, pictures, _ in sequences],
        "mm_token_type_ids": torch.cat([types, torch.zeros_like(completion_ids)], 1),
    }


def ours(folder, sequences, settings: LossSection, budget: int, answers: bool) -> tuple[float, dict[str, torch.Tensor]]:
    config = ServerConfig(model_name_or_path=folder, dtype="float32")
    tokenizer, model = load_tokenizer(config), load_model(config, torch.device("cpu"))
    batcher = make_batcher(model, tokenizer.pad_token_id, load_processor(config, model.config, tokenizer))
    pairs = [(PicturedPrompt(prompt, seen) if seen else prompt, completion) for prompt, seen, completion in sequences]
    (advantages, references), marks = numbers(), drawn(answers)
    size, total = StepSize(COUNT, sum(int(of_row.sum()) for of_row in marks)), 0.0
    for rows in batcher.cut(pairs, budget):
        batch = batcher.make([pairs[row] for row in rows], "cpu", [marks[row] for row in rows])
        logprobs, entropy = token_logprobs(model, batch, 1.0, True)
        lengths = torch.tensor([marks[row].sum() for row in rows])
        reference = torch.cat([references[row][marks[row]] for row in rows])
        tokens = Tokens(lengths, advantages[rows], logprobs, entropy, ref_logprobs=reference)
        loss, _ = grpo_loss(tokens, size, settings, beta=BETA, entropy_coef=0.0, max_completion_length=LONGEST)
        loss.backward()
        total += loss.item()
    return total, {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_loss_and_gradient_are_trls(trainer, plain, folder, sequences, loss_type, answers):
    """With answers of tools among the completion's tokens TRL has a mask of them."""
    trainer.loss_type = loss_type
    trainer.model.zero_grad()
    expected = trainer.compute_loss(trainer.model, inputs_of(plain, sequences, answers))
    expected.backward()
    slopes = {name: weight.grad for name, weight in trainer.model.named_parameters()}
    assert all(slope.any() for name, slope in slopes.items() if "visual" in name)
    for budget in (200, 10**6):
        with named(loss_type, budget):
            loss, gradient = ours(folder, sequences, LossSection(loss_type=loss_type), budget, answers)
            assert_rounded(loss, expected.item())
            assert_rounded(distance(gradient, slopes), 0.0, GRADIENT)
