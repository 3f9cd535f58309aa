"""The update and scoring of completions of a prompt with a picture beside TRL's. CPU, fp32, random weights.

    python -m benchmarks.vision                     time and memory beside TRL, in pairs; bytes of a request
    python -m benchmarks.vision --part share        only count: what share of the arithmetic is the vision tower's
    python -m benchmarks.vision --tokens 60         ... with a smaller picture and shorter completions, to try it out

Needs trl (written for 1.16.0). The model is a Qwen2.5-VL of which text and vision tower are made smaller alike, so that
a picture costs as many tokens of text as in Qwen2.5-VL-3B; the first table holds one against the other. TRL's side is
its own GRPOTrainer: `compute_loss` with pixel_values for the update, `_get_per_token_logps_and_entropies` for scoring.
Both sides compute the same loss and the same gradients: that is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from unittest.mock import patch

import torch
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedModel, Qwen2_5_VLConfig

from benchmarks import logprobs
from benchmarks.arithmetic import each_alone, prompt_once
from benchmarks.common import BESIDE_TRL, beside_trl, forget_peak, fresh, in_turn, machine, peak_above, seconds, table
from benchmarks.logprobs import GROUP, ONE_BATCH, Ours, Theirs, check_sides
from demo.model import build_tokenizer
from grpo.config.sampling_settings import SharedConfig
from grpo.model.load import load_tokenizer
from grpo.model.pictures import PictureProcessor, load_processor
from grpo.wire.logprobs import LogprobsRequest, encode_request
from grpo.wire.picture_files import PicturedPrompt

PATCH, MERGED = 14, 28  # pixels a side of a patch, and of a token
TEXT_TOKENS = 50  # of the question
VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def real() -> Qwen2_5_VLConfig:
    """Return the sizes of Qwen2.5-VL-3B-Instruct."""
    return Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=2,
        ),
        vision_config=dict(
            depth=32,
            hidden_size=1280,
            intermediate_size=3420,
            num_heads=16,
            out_hidden_size=2048,
            window_size=112,
            fullatt_block_indexes=[7, 15, 23, 31],
        ),
        tie_word_embeddings=True,
    )


def small() -> Qwen2_5_VLConfig:
    """Return an eighth of each width, a ninth of the layers of text, an eighth of the tower's.

    All of its layers look through windows: at an eighth of the width a layer that sees the whole picture, as one in
    eight of the real tower's does, would cost four others instead of a third of one.
    """
    return Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=1376,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
        ),
        vision_config=dict(
            depth=4,
            hidden_size=160,
            intermediate_size=428,
            num_heads=4,
            out_hidden_size=256,
            window_size=112,
            fullatt_block_indexes=[],
        ),
        tie_word_embeddings=True,
    )


def of_tower(config: Qwen2_5_VLConfig, tokens: int) -> int:
    """Count the multiply-adds of one picture through the vision tower, forward."""
    vision, patches = config.vision_config, tokens * (MERGED // PATCH) ** 2
    hidden, merged = vision.hidden_size, vision.hidden_size * (MERGED // PATCH) ** 2
    whole = len(vision.fullatt_block_indexes)
    keys = whole * patches + (vision.depth - whole) * min(patches, (vision.window_size // PATCH) ** 2)
    layer = 4 * hidden**2 + 3 * hidden * vision.intermediate_size
    embedding = 3 * vision.temporal_patch_size * PATCH**2 * hidden
    merger = merged**2 + merged * vision.out_hidden_size
    return patches * (vision.depth * layer + 2 * hidden * keys + embedding) + tokens * merger


def part_share(tokens: int, completion: int) -> None:
    """Print how much of a forward pass of a group is the tower's, in the real model and in the small one."""
    group = [([0] * (tokens + TEXT_TOKENS), [[0] * completion] * GROUP)]
    rows = []
    for name, config in (("Qwen2.5-VL-3B", real()), ("the small one", small())):
        tower, text = of_tower(config, tokens), config.text_config
        theirs = sum(each_alone(group).multiply_adds(text).values()) + GROUP * tower
        ours = sum(prompt_once(group).multiply_adds(text).values()) + tower
        rows.append(
            [name, f"{2 * tower / 1e9:,.0f}", f"{GROUP * tower / theirs:.0%}", f"{tower / ours:.0%}", theirs / ours]
        )
    head = ["model", "GFLOP a picture", "of all: each completion alone", "of all: the picture once", "all over all"]
    print(f"\n### The tower's share: {tokens:,} tokens a picture, {GROUP} completions of {completion}, forward\n")
    print(table(head, [[*row[:-1], f"{row[-1]:.2f}"] for row in rows]))


@dataclass(frozen=True)
class Setting:
    """One side of a comparison, as another process is told of it."""

    side: str
    tokens: int
    completion: int
    checkpointing: bool = True
    compact: bool = False
    phase: str = "update"


class TheirsPictured(Theirs):
    """The same with a picture in the prompt: its pixels once for each completion, as TRL's processor makes them."""

    def __init__(self, model: PreTrainedModel, folder: Path, checkpointing: bool, compact: bool):
        super().__init__(model, checkpointing, compact=compact)
        self.images = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def inputs(self, work: logprobs.Work) -> list[dict]:
        [inputs] = super().inputs(work)
        pictures = [picture for prompt, _ in work.sequences for picture in prompt.pictures]
        pixels = self.images([Image.open(BytesIO(picture)) for picture in pictures], return_tensors="pt")
        whole = torch.cat([inputs["prompt_ids"], torch.zeros_like(inputs["completion_ids"])], 1)
        types = (whole == self.model.config.image_token_id).long()
        return [inputs | {**pixels, "num_images": [1] * len(pictures), "mm_token_type_ids": types}]

    @torch.no_grad()
    def score(self, inputs: dict) -> None:
        """Do as TRL does for the log-probs of the reference model."""
        from trl.trainer.grpo_trainer import disable_gradient_checkpointing

        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        names = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
        of_pictures = {name: inputs[name] for name in names}
        kept = inputs["completion_ids"].shape[1]
        with (
            patch("trl.trainer.utils._use_triton", return_value=self.compact),
            disable_gradient_checkpointing(self.model, self.trainer.args.gradient_checkpointing_kwargs),
        ):
            self.trainer._get_per_token_logps_and_entropies(self.model, ids, mask, kept, batch_size=8, **of_pictures)


def make_folder(folder: Path) -> Path:
    """Write the configuration, the tokenizer, and the processor's settings, which are those of Qwen2.5-VL."""
    tokenizer = build_tokenizer(0)
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [*VISION_TOKENS.values()]}, replace_extra_special_tokens=False
    )
    tokenizer.save_pretrained(folder)
    config = small()
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    for name, token in VISION_TOKENS.items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    config.save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def build(folder: Path) -> tuple[PreTrainedModel, PictureProcessor]:
    shared = SharedConfig(model_name_or_path=str(folder), dtype="float32")
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    return model, load_processor(shared, config, load_tokenizer(shared))


def diagram(tokens: int) -> bytes:
    """Draw some lines and circles, as in a geometry problem, in a PNG of so many tokens."""
    down = max(divisor for divisor in range(1, int(tokens**0.5) + 1) if tokens % divisor == 0)
    picture = Image.new("RGB", (tokens // down * MERGED, down * MERGED), "white")
    pen, (width, height) = ImageDraw.Draw(picture), picture.size
    pen.polygon([(width // 9, height // 8), (width // 2, height - 20), (width - 20, height // 3)], outline="black")
    pen.ellipse([(width // 4, height // 4), (width // 2, height // 2)], outline="black")
    pen.text((width // 9, height // 9), "A  B  C  x + 2  37", fill="black")
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def make_work(processor: PictureProcessor, tokens: int, completion: int) -> logprobs.Work:
    draw = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 400, (length,), generator=draw).tolist()  # words: no special token

    picture = diagram(tokens)
    seen = processor.encode(f"<|vision_start|>{processor.placeholder}<|vision_end|>", [picture], False)
    assert processor.count([picture]) == tokens
    prompt = PicturedPrompt([*seen, *ids(TEXT_TOKENS - 2)], [picture])
    sequences = [(prompt, ids(completion)) for _ in range(GROUP)]
    references = [-7.6 + 0.3 * torch.randn(completion, generator=draw) for _ in sequences]
    return logprobs.Work(sequences, torch.randn(GROUP, generator=draw), references)


def side_of(setting: Setting, folder: Path) -> tuple[Ours | TheirsPictured, PictureProcessor]:
    model, processor = build(folder)
    if setting.side == "ours":
        return Ours(model, setting.checkpointing, ONE_BATCH, processor), processor
    return TheirsPictured(model, folder, setting.checkpointing, setting.compact), processor


def phase_of(setting: Setting, side: Ours | TheirsPictured, work: logprobs.Work) -> Callable[[], object]:
    if setting.phase == "update":
        return side.prepare(work)
    if setting.side == "ours":
        return lambda: side.score(work)
    [inputs] = side.inputs(work)
    return lambda: side.score(inputs)


def peak_here(setting: Setting) -> int:
    """Bytes that a phase takes above weights and gradients, its pixels among them. For a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        side, processor = side_of(setting, make_folder(Path(name)))
        phase_of(setting, side, make_work(processor, 4, 4))()  # from here on the gradients exist
        work = make_work(processor, setting.tokens, setting.completion)
        processor._kept.clear()
        start = forget_peak()
        phase_of(setting, side, work)()
        return peak_above(start)


def peak(setting: Setting) -> int:
    return int(fresh("-m", "benchmarks.vision", "--peak", json.dumps(asdict(setting))))


def part_pairs(tokens: int, completion: int, repeats: int) -> None:
    default = Setting("trl", tokens, completion)
    comparisons = {
        "update, defaults of both": default,
        "update, TRL's head on completions only": replace(default, compact=True),
        "update, without activation checkpointing": replace(default, checkpointing=False, compact=True),
        "scoring": replace(default, phase="score"),
        "scoring, TRL's head on completions only": replace(default, phase="score", compact=True),
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(Path(name))
        for title, setting in comparisons.items():
            own = replace(setting, side="ours")
            (ours, processor), (theirs, _) = side_of(own, folder), side_of(setting, folder)
            work = make_work(processor, tokens, completion)
            check_sides(ours, theirs, work)
            phases = {"ours": phase_of(own, ours, work), "trl": phase_of(setting, theirs, work)}
            times = in_turn(phases, repeats)
            del ours, theirs, phases
            print(f"{title}: {times}", file=sys.stderr)
            peaks = {side: peak(one) for side, one in (("ours", own), ("trl", setting))}
            rows.append(beside_trl(title, times, peaks))
        print(f"\n### Beside TRL: {tokens:,} tokens a picture, {GROUP} completions of {completion}, {repeats} pairs\n")
        print(table(["phase", *BESIDE_TRL], rows))
        print("\nMiB: peak above weights and gradients, pixels in it, each side in a process of its own.")
        part_bytes(work, folder)


def part_bytes(work: logprobs.Work, folder: Path) -> None:
    """Print what a group's request to the reference server has, beside its pixels, and the time to make those."""
    prompt, _ = work.sequences[0]
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    opened = Image.open(BytesIO(prompt.pictures[0]))
    pixels = images([opened], return_tensors="pt")["pixel_values"]
    once, each = (seconds(lambda count=count: images([opened] * count, return_tensors="pt")) for count in (1, GROUP))
    request = encode_request(LogprobsRequest.of(prompt, [completion for _, completion in work.sequences], 1.0))
    rows = [
        ["the picture's file", f"{len(prompt.pictures[0]):,}"],
        ["a request of the group", f"{len(request):,}"],
        ["the picture's pixels, as the tower is fed them", f"{pixels.nbytes:,}"],
    ]
    print("\n### Bytes of a group over HTTP\n")
    print(table(["what", "bytes"], rows))
    print(f"\nPixels from the file: {once:.2f} s for the group, {each:.2f} s for each completion's own.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vision", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["share", "all"], default="all")
    parser.add_argument("--tokens", type=int, default=1000, help="of the picture (default: 1000)")
    parser.add_argument("--completion", type=int, help="tokens of a completion (default: 3 of 10 of the picture's)")
    parser.add_argument("--repeats", type=int, default=3, help="pairs (default: 3)")
    parser.add_argument("--peak", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if arguments.peak:
        print(peak_here(Setting(**arguments.peak)))
        return
    completion = arguments.completion or arguments.tokens * 3 // 10
    print(machine())
    part_share(arguments.tokens, completion)
    if arguments.part == "all":
        part_pairs(arguments.tokens, completion, arguments.repeats)


if __name__ == "__main__":
    main()
