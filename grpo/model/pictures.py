"""Turns encoded pictures into token ids and inputs of the vision tower, by a vision-language model's own processor.

The processor decides which arrays those are, and how many tokens a picture becomes: whatever it returns beside the ids
is handed to the model by its name. Pictures are always resized by Pillow (transformers' PIL backend), so that
trainer and server get the same pixels whatever else is installed. At the end: which parts of a model are its tower.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from grpo.config.errors import one_line, require
from grpo.config.sampling_settings import SharedConfig
from grpo.model.hub import base_of, find_file, refuse_unloadable
from grpo.model.sharded import is_sharded
from grpo.wire.health import fingerprint
from grpo.wire.picture_files import MOST_PIXELS, PicturedPrompt, PictureError, check_picture, open_picture

log = logging.getLogger(__name__)

# Of pixels: 27 pictures of 1,000 tokens for Qwen. Those of a step are prepared once for sampling, scoring and update.
KEPT_BYTES = 2**29
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
# Fields of an image processor in which two equal ones may differ.
_VOLATILE = ("processor_class", "image_processor_type", "feature_extractor_type", "auto_map", "_processor_class")


def takes_pictures(settings: PretrainedConfig) -> bool:
    """Tell whether a model of this configuration was saved with a vision tower."""
    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(settings), None)
    return known is not None and known.__name__ in (settings.architectures or ())


def load_processor(
    config: SharedConfig, settings: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PictureProcessor | None:
    """Load the processor that comes with a model; None for a model that takes text alone. A tokenizer without a chat
    template gets the processor's. Raises ConfigError, also if nothing follows `min_pixels` or `max_pixels`."""
    name = base_of(config.model_name_or_path) or config.model_name_or_path
    limits = {limit: value for limit in ("min_pixels", "max_pixels") if (value := getattr(config, limit)) is not None}
    if not takes_pictures(settings) or find_file(name, "preprocessor_config.json", "processor_config.json") is None:
        for limit, value in limits.items():
            require(False, limit, value, f"{config.model_name_or_path} takes no pictures: leave it out")
        return None
    options = {"trust_remote_code": config.trust_remote_code}
    remedy = "install the package that its processor of pictures names, or use another model"
    with refuse_unloadable("model_name_or_path", config.model_name_or_path, remedy):
        images = AutoImageProcessor.from_pretrained(name, backend="pil", **limits, **options)
        for limit, value in limits.items():
            known = limit in getattr(images.valid_kwargs, "__annotations__", {})
            require(known, limit, value, f"{type(images).__name__} resizes every picture to one size: leave it out")
        made_of = _without_video(PROCESSOR_MAPPING[type(settings)], images, tokenizer)
        processor = made_of.from_pretrained(name, **options)
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    return PictureProcessor(processor, [path for file in _FILES if (path := find_file(name, file))], limits)


class PictureProcessor:
    """A model's own processor, for pictures and prompts. Any thread may use it."""

    def __init__(self, processor, files: Sequence[str] = (), limits: dict[str, int] | None = None):
        """`files`: those that it was loaded from; `limits`: the settings that it was given beside theirs."""
        self._processor, self._files, self._limits = processor, files, limits or {}
        self.placeholder: str = processor.image_token  # stands for a picture in a text that `encode` takes
        # The first call also switches off the padding and truncation of tokenizer.json: a tokenizer that changes
        # while another thread uses it fails ("Already borrowed").
        probe = self._call(processor.image_token * 2, [Image.new("RGB", (64, 64))] * 2)
        types = next((name for name in _PER_TOKEN[2:] if name in probe), None)
        ids = np.asarray(probe["input_ids"][0])
        marked = ids[np.asarray(probe[types][0]) == 1] if types else ids[ids == processor.image_token_id]
        self.token_id = int(marked[0])  # the id that stands for a piece of a picture
        self.types_name = types  # the model's input that marks those ids, if it has one
        # Idefics3 has the tiles of all pictures in one row, [1, tiles, ...].
        self._pictures_dimension = 1 if len(probe.get("pixel_values", ())) == 1 else 0
        self.kept_bytes = KEPT_BYTES  # most bytes of prepared pictures, and of their files, that are kept
        self._kept: OrderedDict[bytes, tuple[int, dict[str, Tensor]]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()
        self._decoded_pixels, self._turn, self._freed = 0, threading.Lock(), threading.Condition()

    @property
    def fingerprint(self) -> str:
        """Return a hash that differs if another processor would make other pixels or other ids of a picture."""
        images = self._processor.image_processor
        settings = {name: value for name, value in images.to_dict().items() if name not in _VOLATILE}
        plain = {name: value for name, value in vars(self._processor).items() if isinstance(value, int | float | str)}
        of_prompt = {name: value for name, value in plain.items() if name != "chat_template"}
        return fingerprint(type(images).__name__, json.dumps([settings, of_prompt], sort_keys=True, default=str))

    def encode(self, text: str, pictures: Sequence[bytes], add_special_tokens: bool) -> PicturedPrompt:
        """Tokenize a text with a placeholder for each picture. Raises PictureError for one that cannot be used."""
        images = [open_picture(picture) for picture in pictures]
        ids = self._call(text, images, add_special_tokens=add_special_tokens)["input_ids"][0]
        return PicturedPrompt(ids, pictures)

    def count(self, pictures: Sequence[bytes]) -> int:
        """Return how many ids stand for the pieces of these pictures. Raises as `encode`."""
        return sum(self._prepare(picture)[0] for picture in pictures)

    def inputs(self, pictures: Sequence[bytes]) -> list[dict[str, Tensor]]:
        """Return the vision tower's inputs for each picture, by name, on the CPU. Raises as `encode`."""
        return [self._prepare(picture)[1] for picture in pictures]

    def join(self, inputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Join the `inputs` of several pictures, of one prompt or many. A dimension for a picture's tiles
        (LLaVA-OneVision) is padded with zeros, which the model leaves out."""
        joined, dimension = {}, self._pictures_dimension
        for name in inputs[0]:
            values = [of_picture[name] for of_picture in inputs]
            sizes = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
            counts = [value.shape[dimension] for value in values]
            sizes[dimension] = sum(counts)
            joined[name] = values[0].new_zeros(sizes)
            for value, part in zip(values, joined[name].split(counts, dimension), strict=True):
                part[tuple(map(slice, value.shape))] = value
        return joined

    def _prepare(self, picture: bytes) -> tuple[int, dict[str, Tensor]]:
        """Return `count` and `inputs` of a picture, and keep those of the last pictures."""
        with self._lock:
            if (kept := self._kept.get(picture)) is not None:
                self._kept.move_to_end(picture)
                return kept
        with self._room_for(picture):
            found = self._call(self.placeholder, [open_picture(picture)], return_tensors="pt")
        count = int((found["input_ids"] == self.token_id).sum())
        prepared = count, {name: value for name, value in found.items() if name not in _PER_TOKEN}
        with self._lock:
            if picture not in self._kept:
                self._kept[picture] = prepared
                self._size += _bytes(picture, prepared)
            while len(self._kept) > 1 and self._size > self.kept_bytes:
                self._size -= _bytes(*self._kept.popitem(last=False))
        return prepared

    @contextmanager
    def _room_for(self, picture: bytes) -> Iterator[None]:
        """Wait until the pictures that all threads decode, with this one, have MOST_PIXELS at most."""
        width, height = check_picture(picture)
        pixels = width * height
        # In turn: else a large picture would wait for as long as other threads have small ones.
        with self._turn, self._freed:
            self._freed.wait_for(lambda: self._decoded_pixels + pixels <= MOST_PIXELS)
            self._decoded_pixels += pixels
        try:
            yield
        finally:
            with self._freed:
                self._decoded_pixels -= pixels
                self._freed.notify()

    def save(self, folder: Path) -> None:
        """Write its files, with its own limits in them, into a model's folder. Raises OSError."""
        for file in self._files:
            settings = json.loads(Path(file).read_text(encoding="utf-8"))
            if file.endswith("processor_config.json") and "video" not in Path(file).name:
                of_images = settings if "preprocessor" in Path(file).name else settings.get("image_processor", {})
                of_images.update(self._limits)
            (folder / Path(file).name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def _call(self, text: str, images: list, **options) -> dict[str, Any]:
        try:
            return self._processor(text=[text], images=images, **options)
        except ValueError as error:
            # Qwen's refuses 200 times as wide as high.
            raise PictureError(f"is refused by the model's processor ({one_line(error)})") from error


class Vision:
    """Makes a model's inputs beside the ids of prompts with pictures."""

    def __init__(self, processor: PictureProcessor, model: PreTrainedModel):
        self._processor, self._device = processor, model.device
        self._get_positions = getattr(model.base_model, "get_rope_index", None)
        self.token_id = processor.token_id
        self.has_positions = self._get_positions is not None
        self.types_name = None if self.has_positions else processor.types_name
        self._model = model

    @cached_property
    def filler(self) -> PicturedPrompt | None:
        """Return a small picture's prompt if the tower is trained or sharded; else None. Ask once DeepSpeed has it."""
        is_trained = any(parameter.requires_grad for parameter in vision_parameters(self._model))
        if not (is_trained or is_sharded(self._model)):
            return None
        return self._processor.encode(self._processor.placeholder, [_noise(8, 8, 0)], False)

    def inputs(self, prompts: Sequence[PicturedPrompt]) -> dict[str, Tensor]:
        """Return the vision tower's inputs for these prompts, by name. Raises PictureError if a picture is damaged."""
        return self._processor.join(self._processor.inputs([file for prompt in prompts for file in prompt.pictures]))

    def positions(self, prompt: PicturedPrompt) -> np.ndarray:
        """Return int64 [tokens], or for a model that has them [3, tokens], time, row and column of each token."""
        if not self.has_positions:
            return np.arange(len(prompt))
        ids = torch.from_numpy(np.asarray(prompt, np.int64)).unsqueeze(0)
        inputs = self._processor.inputs(prompt.pictures)
        grids = [{name: fed[name] for name in fed if name.endswith("grid_thw")} for fed in inputs]
        types = (ids == self.token_id).int()
        positions, _ = self._get_positions(input_ids=ids, mm_token_type_ids=types, **self._processor.join(grids))
        return positions[:, 0].numpy()

    def first_position(self, prompt: PicturedPrompt) -> int:
        """Return the position of the first token that follows a prompt."""
        return int(self.positions(prompt).max()) + 1

    def for_generate(self, prompts: Sequence[Sequence[int]], input_ids: Tensor) -> dict[str, Tensor]:
        """Return the inputs of transformers' generate beside the ids [B, L] of prompts."""
        pictured = [prompt for prompt in prompts if isinstance(prompt, PicturedPrompt)]
        if not pictured:
            return {}
        inputs = self.inputs(pictured)
        if self._processor.types_name is not None:
            inputs[self._processor.types_name] = (input_ids == self.token_id).long()
        return {name: value.to(self._device) for name, value in inputs.items()}

    def trial_prompt(self, count: int, ids: Sequence[int], seed: int) -> PicturedPrompt:
        """Make a prompt of one or two pictures of different sizes, noise by `seed`, and these ids."""
        pictures = [_noise(width, height, seed) for width, height in ((40, 56), (72, 36))[:count]]
        # Qwen takes two pictures without text between them for one.
        text = f"{self._processor.placeholder}\n" * count
        before = self._processor.encode(text, pictures, add_special_tokens=False)
        return PicturedPrompt([*before, *ids], pictures)


def _without_video(base: type, images, tokenizer: PreTrainedTokenizerBase) -> type:
    """Return the processor's class made of these parts alone: its video part needs torchvision, and is never used."""

    class Processor(base):
        @classmethod
        def _get_arguments_from_pretrained(cls, *arguments, **options) -> list:
            return [{"image_processor": images, "tokenizer": tokenizer}.get(name) for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, name: str, argument):
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    Processor.__name__ = base.__name__
    return Processor


def _noise(width: int, height: int, seed: int) -> bytes:
    file = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _bytes(picture: bytes, prepared: tuple[int, dict[str, Tensor]]) -> int:
    return len(picture) + sum(value.nbytes for value in prepared[1].values())


# The vision tower: the part of a model that makes tokens of pictures, trained with the language model, or frozen.


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the vision tower, its projector too: all that are not the language model's."""
    language = _language(model)
    return [parameter for parameter in model.parameters() if id(parameter) not in language]


def vision_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the outermost modules that have such parameters alone."""
    language, found = _language(model), []
    for name, module in model.named_modules():  # a module before its parts
        parameters = {id(parameter) for parameter in module.parameters()}
        is_inside = name.startswith(tuple(f"{outer}." for outer in found))
        if parameters and parameters.isdisjoint(language) and not is_inside:
            found.append(name)
    return found


def freeze_vision_tower(model: PreTrainedModel) -> None:
    """Train the language model alone: no gradient, no optimizer state and no kept activations for the vision tower."""
    parameters = vision_parameters(model)
    for parameter in parameters:
        parameter.requires_grad_(False)
    count = sum(parameter.numel() for parameter in parameters)
    log.info("the vision tower is frozen: %s parameters in %s", f"{count:,}", ", ".join(vision_modules(model)))


def _language(model: PreTrainedModel) -> set[int]:
    """Return the ids of the language model's parameters, embeddings and head included."""
    parts = model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()
    return {id(parameter) for part in parts for parameter in part.parameters()}
