"""Log-probs of completions of prompts with pictures, and their gradients, by plain transformers in float64.

One unpadded sequence at a time, all logits, log_softmax. Knows no code of grpo/: pixels are made by the family's image
processor as AutoImageProcessor gives it, and placeholders are expanded by the rules written down here.
"""

import io
from collections.abc import Sequence
from functools import cache

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

DRAWN = -1  # stands for the picture token's id where a completion has it: a word as others, not a place of a picture


class Plain:
    """A model folder of a family of `pictured.py`."""

    def __init__(self, folder):
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.family = self.model.config.model_type
        self.picture_token = self.model.config.image_token_id
        # Models look for picture tokens in their input_ids, so that there a drawn one has another id than here.
        self.model.get_input_embeddings().register_forward_pre_hook(
            lambda _, inputs: (inputs[0].where(inputs[0] != DRAWN, self.picture_token),)
        )
        self.pixels = cache(self._pixels)

    def _pixels(self, pictures: tuple[bytes, ...]) -> dict[str, torch.Tensor]:
        """Return the inputs of the vision tower for the pictures of one prompt."""
        if not pictures:
            return {}
        opened = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
        made = self.image_processor(opened, return_tensors="pt")
        return {name: value for name, value in made.items() if name != "num_crops"}

    def tokens_of(self, picture: bytes) -> int:
        """Return how many tokens stand for a picture."""
        made = self.pixels((picture,))
        if "image_grid_thw" in made:
            return int(made["image_grid_thw"].prod()) // 2**2  # patches, merged two by two
        if self.family == "llava_onevision":  # as many as the model itself makes
            return len(self.model.get_image_features(**made).pooler_output[0])
        return {"gemma3": 4, "llava": (12 // 4) ** 2}[self.family]

    def tiles_of(self, picture: bytes) -> str:
        """Return Idefics3's text for a picture: its tiles row by row, 4 tokens each, then all of it."""
        width, height = Image.open(io.BytesIO(picture)).size
        around, tokens = "<fake_token_around_image>", "<image>" * 4
        # Its longer side is two tiles, so the other one is two, or one where it is at most half as long.
        columns, rows = 2 if 2 * width > height else 1, 2 if 2 * height > width else 1
        of_rows = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tokens}" for column in range(columns))
            for row in range(rows)
        ]
        return "\n".join([*of_rows, "", f"{around}<global-img>{tokens}{around}"])

    def prompt(self, text: str, pictures: Sequence[bytes] = (), add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text with a placeholder for each picture, the placeholders expanded."""
        token = self.tokenizer.convert_ids_to_tokens(self.picture_token)
        placeholder = "<start_of_image>" if self.family == "gemma3" else token
        first, *rest = text.split(placeholder)
        expanded = first
        for picture, following in zip(pictures, rest, strict=True):
            tokens = self.tiles_of(picture) if self.family == "idefics3" else token * self.tokens_of(picture)
            if self.family == "gemma3":
                tokens = f"\n\n<start_of_image>{tokens}<end_of_image>\n\n"
            expanded += tokens + following
        return self.tokenizer(expanded, add_special_tokens=add_special_tokens)["input_ids"]

    def rendered(self, *content: str | bytes) -> tuple[str, list[bytes]]:
        """Render a chat message of texts and pictures."""
        parts = [{"type": "image"} if isinstance(part, bytes) else {"type": "text", "text": part} for part in content]
        message = [{"role": "user", "content": parts}]
        text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return text, [part for part in content if isinstance(part, bytes)]

    def message(self, *content: str | bytes) -> tuple[list[int], list[bytes]]:
        """Return the ids of a chat message, expanded, and its pictures."""
        text, pictures = self.rendered(*content)
        return self.prompt(text, pictures), pictures

    def logprobs(self, prompt: Sequence[int], pictures: Sequence[bytes], completion: Sequence[int]) -> torch.Tensor:
        """Return the log-prob of each token of a completion, float64 [len(completion)], with its graph."""
        rows = torch.log_softmax(self.logits(prompt, pictures, completion), -1)
        return rows.gather(1, torch.tensor([*completion], dtype=torch.int64)[:, None])[:, 0]

    def logits(self, prompt: Sequence[int], pictures: Sequence[bytes], completion: Sequence[int]) -> torch.Tensor:
        """Return the logits that each token of a completion is drawn from, float64 [len(completion), vocabulary]."""
        prompt_ids = torch.tensor([*prompt])
        completion_ids = torch.tensor([*completion], dtype=torch.int64)
        shown = torch.cat([prompt_ids, completion_ids.masked_fill(completion_ids == self.picture_token, DRAWN)])
        inputs = dict(self.pixels(tuple(pictures)))
        if inputs:
            inputs["pixel_values"] = inputs["pixel_values"].double()
        types = torch.zeros_like(shown)
        types[: len(prompt_ids)] = prompt_ids == self.picture_token
        if self.family == "gemma3":
            inputs["token_type_ids"] = types[None]
        elif self.family.startswith("qwen"):
            inputs["mm_token_type_ids"] = types[None]
        logits = self.model(input_ids=shown[None], use_cache=False, **inputs).logits[0]
        return logits[len(prompt_ids) - 1 : len(shown) - 1]

    def gradient(self, sequences, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradient of the weighted sum of all log-probs by every parameter, zeros where one takes no part.

        `sequences` are (prompt, pictures, completion); `weights` float64 [tokens of all completions].
        """
        total = (torch.cat([self.logprobs(*sequence) for sequence in sequences]) * weights).sum()
        parameters = dict(self.model.named_parameters())
        slopes = torch.autograd.grad(total, parameters.values(), materialize_grads=True)
        return dict(zip(parameters, slopes, strict=True))
