"""Build the demo's vision-language model: a Qwen2.5-VL of 0.2 M parameters that can look but mostly guesses.

As with the model of text, two supervised phases train it. In the first it learns to see, and to count the shapes of
every kind before it answers. In the second it gets bad habits: it looks where it is told to count, one question in
five, and guesses or forgets the tags nearly everywhere else. A guess is drawn without the picture. Reinforcement
learning has to discover that looking pays everywhere.
"""

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from demo.model import START, TAG, TAGS, begin, greedy_accuracy, language_settings, save, train, train_tokenizer
from demo.pictures import CELL, SIDE, Problem, guess, look, problems, untagged

MERGED = 2  # patches of a token's side
PATCH = CELL // MERGED
PIECE, VIDEO, BEGIN, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    rng = random.Random(seed)
    corpus = (
        "\n".join(["user", p.text, "assistant", *TAG.split(look(p) + guess(rng)), untagged(rng)])
        for p in islice(problems(rng), 2000)
    )
    return train_tokenizer(corpus, [START, BEGIN, END, PIECE, VIDEO], TAGS, CHAT_TEMPLATE)


def build_processor() -> Qwen2VLImageProcessorPil:
    """Make Qwen's own image processor, with patches of 8 pixels; it leaves the demo's pictures as large as they are."""
    size = {"shortest_edge": CELL**2, "longest_edge": (2 * SIDE * CELL) ** 2}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGED, size=size)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    piece, video, start, end = tokenizer.convert_tokens_to_ids([PIECE, VIDEO, BEGIN, END])
    positions = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
    text = language_settings(tokenizer) | {"rope_parameters": positions}
    vision = dict(
        depth=1, hidden_size=48, intermediate_size=96, num_heads=4, out_hidden_size=64, initializer_range=0.06
    )
    vision |= dict(patch_size=PATCH, spatial_merge_size=MERGED, window_size=SIDE * CELL, fullatt_block_indexes=[0])
    ids = dict(image_token_id=piece, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end)
    whole = dict(text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="float32")
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**whole, **ids))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def habitual(rng: random.Random) -> Iterator[tuple[Problem, str]]:
    """Draw demonstrations of the second phase: the model looks mostly where it is told to count, and seldom elsewhere.
    It is told so more often than in the data so that it keeps the skill."""
    all_wordings, told_to_count = problems(rng), problems(rng, wordings=["count"])
    while True:
        problem = next(told_to_count if rng.random() < 0.5 else all_wordings)
        odds = [0.9, 0.05, 0.05] if problem.wording == "count" else [0.1, 0.6, 0.3]
        yield problem, rng.choices([look(problem), guess(rng), untagged(rng)], odds)[0]


def build(folder: Path, seed: int) -> None:
    """Build the model and write it with tokenizer and processor to `folder`, which must not exist. Uses no held-out
    arrangement. Takes about 80 s of one CPU core."""
    rng = begin(folder, seed)
    torch.set_num_threads(2)  # the shown runs began so; one thread, as in the other demos, rounds differently
    tokenizer, processor = build_tokenizer(seed), build_processor()
    model = build_model(tokenizer)
    piece = tokenizer.convert_tokens_to_ids(PIECE)

    def inputs_of(examples: list[Problem], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        pixels = processor([problem.draw() for problem in examples], return_tensors="pt")
        return {**pixels, "mm_token_type_ids": (ids == piece).int()}

    accuracy = partial(greedy_accuracy, model, tokenizer, list(islice(problems(rng), 256)), inputs_of)
    teach = partial(train, model, tokenizer, accuracy=accuracy, inputs_of=inputs_of)
    counted = ((problem, look(problem)) for problem in problems(rng))
    teach(counted, name="learning to look", updates=600, learning_rate=8e-3)
    teach(habitual(rng), name="picking up bad habits", updates=150, learning_rate=2e-3)
    save(folder, model, tokenizer, processor)
