"""Tiny vision-language models with their processors, as folders, and small drawn pictures.

A folder has the files of a real checkpoint of its family: class names, special tokens, placeholders, chat template and
preprocessor settings are the family's own, only the sizes are small. Nothing here needs torchvision: the files of
Qwen's video processors, which cannot be made without it, are written by hand.
"""

import copy
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedTokenizerFast

PATCH = 4  # pixels a side; Qwen and Gemma merge two by two of them into a token
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
TEXT = dict(**SIZES, num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6)
HALVES = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
CLIP = dict(image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711])
STEPS = dict(do_convert_rgb=True, do_normalize=True, do_rescale=True, do_resize=True, rescale_factor=1 / 255)

QWEN_TOKENS = dict(
    pad_token="<|endoftext|>",
    eos_token="<|im_end|>",
    extra_special_tokens=["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
)
QWEN_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3_TEMPLATE = QWEN_TEMPLATE.replace(
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}",
    "",
)
PAN_AND_SCAN = "max_num_crops", "min_crop_size", "min_ratio_to_activate"
GEMMA_TOKENS = dict(
    pad_token="<pad>",
    bos_token="<bos>",
    eos_token="<end_of_turn>",
    extra_special_tokens=["<start_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    model_specific_special_tokens=dict(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    ),
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}"
    "{%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}"
    "{%- set loop_messages = messages[1:] -%}"
    "{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- else -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
LLAVA_TOKENS = dict(
    pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", extra_special_tokens=["<image>"]
)
# The pictures first wherever they are in the content, and nothing of a content that is a string: so is the real one.
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

TILED_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<image>{% else %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
IDEFICS_TOKENS = [
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]


def square(side: int) -> dict:
    return {"height": side, "width": side}


def processors_of(name: str, image_processor: dict, **settings) -> dict:
    """The files of a family's processors, by their names."""
    images = {"image_processor_type": f"{name}ImageProcessor", "processor_class": f"{name}Processor"} | image_processor
    return dict(preprocessor_config=images, processor_config={"processor_class": f"{name}Processor"} | settings)


def qwen(name: str, image_processor: dict, text: dict, vision: dict, template: str = QWEN_TEMPLATE) -> dict:
    sizes = dict(patch_size=PATCH, temporal_patch_size=2)
    images = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": f"{name}Processor", "merge_size": 2}
    images |= sizes | image_processor
    video = {key: value for key, value in images.items() if key != "image_processor_type"}
    video["video_processor_type"] = f"{'Qwen3' if name == 'Qwen3VL' else 'Qwen2'}VLVideoProcessor"
    return dict(
        tokens=QWEN_TOKENS,
        template=template,
        processor=dict(preprocessor_config=images, video_preprocessor_config=video),
        text=dict(**TEXT, bos_token_id=None, **text),
        vision=dict(depth=2, spatial_merge_size=2, in_channels=3, **sizes, **vision),
        ids=dict(
            image_token_id="<|image_pad|>",
            video_token_id="<|video_pad|>",
            vision_start_token_id="<|vision_start|>",
            vision_end_token_id="<|vision_end|>",
        ),
    )


QWEN_VISION = dict(hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=32)
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
SIGLIP = dict(model_type="siglip_vision_model", **SIZES, patch_size=PATCH, vision_use_head=False)
TILES = [[24, 12], [12, 36]]
FAMILIES = {
    "qwen2_vl": qwen(
        "Qwen2VL",
        dict(min_pixels=8**2, max_pixels=64**2, **CLIP),
        text=dict(rope_parameters=MROPE),
        vision=dict(embed_dim=32, hidden_size=32, mlp_ratio=2, num_heads=4),
    ),
    "qwen2_5_vl": qwen(
        "Qwen2_5_VL",
        dict(min_pixels=8**2, max_pixels=64**2, **CLIP),
        text=dict(rope_parameters=MROPE),
        # windows of 2 x 2 tokens in the first layer, all of a picture in the second
        vision=dict(**QWEN_VISION, window_size=16, fullatt_block_indexes=[1]),
    ),
    "qwen3_vl": qwen(
        "Qwen3VL",
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 8**2, "longest_edge": 64**2},
            **HALVES,
        },
        text=dict(head_dim=8, rope_parameters={**MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}),
        vision=dict(**QWEN_VISION, num_position_embeddings=64, deepstack_visual_indexes=[0]),
        template=QWEN3_TEMPLATE,
    ),
    "gemma3": dict(
        tokens=GEMMA_TOKENS,
        template=GEMMA_TEMPLATE,
        processor=processors_of(
            "Gemma3",
            dict(size=square(16), **HALVES, image_seq_length=4, resample=2, **STEPS | {"do_convert_rgb": None})
            | dict.fromkeys(["do_pan_and_scan", *(f"pan_and_scan_{name}" for name in PAN_AND_SCAN)]),
            image_seq_length=4,
        ),
        text=dict(
            **TEXT,
            model_type="gemma3_text",
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision=dict(**SIGLIP, image_size=16),
        ids=dict(
            image_token_index="<image_soft_token>", boi_token_index="<start_of_image>", eoi_token_index="<end_of_image>"
        ),
        mm_tokens_per_image=4,
    ),
    "llava": dict(
        tokens=LLAVA_TOKENS,
        template=LLAVA_TEMPLATE,
        processor=processors_of(
            "Llava",
            dict(image_processor_type="CLIPImageProcessor", size={"shortest_edge": 12}, crop_size=square(12))
            | dict(do_center_crop=True, resample=3, **STEPS, **CLIP),
            image_token="<image>",
            num_additional_image_tokens=1,
            patch_size=PATCH,
            vision_feature_select_strategy="default",
        ),
        text=dict(**TEXT, model_type="llama", tie_word_embeddings=False),
        # The layer before the last is read, as in the real one: the last takes no part.
        vision=dict(model_type="clip_vision_model", **SIZES, image_size=12, patch_size=PATCH, projection_dim=32),
        ids=dict(image_token_index="<image>"),
        image_seq_length=9,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    ),
    # A picture becomes tiles, as many as fit its shape, and one of all of it; of a prompt [pictures, tiles, ...].
    "llava_onevision": dict(
        tokens=LLAVA_TOKENS | dict(extra_special_tokens=["<image>", "<video>", "<end_of_utterance>"]),
        template=TILED_TEMPLATE,
        processor=processors_of(
            "LlavaOnevision",
            dict(size=square(12), image_grid_pinpoints=TILES, do_pad=True, resample=3, **HALVES, **STEPS),
            num_image_tokens=9,
            vision_aspect_ratio="anyres_max_9",
            vision_feature_select_strategy="full",
        ),
        text=dict(**TEXT, model_type="qwen2"),
        vision=dict(**SIGLIP, image_size=12),
        ids=dict(image_token_index="<image>", video_token_index="<video>"),
        image_grid_pinpoints=TILES,
    ),
    # So it does here, and a prompt has the tiles of all its pictures in one row: [1, tiles, ...].
    "idefics3": dict(
        tokens=LLAVA_TOKENS | dict(extra_special_tokens=IDEFICS_TOKENS),
        template=TILED_TEMPLATE,
        processor=processors_of(
            "Idefics3",
            dict(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=True)
            | dict(do_pad=True, resample=1, **HALVES, **STEPS),
            image_seq_len=4,
        ),
        text=dict(**TEXT, model_type="llama"),
        vision=dict(**SIZES, image_size=16, patch_size=PATCH),
        ids=dict(image_token_id="<image>"),
        scale_factor=2,
    ),
}


def build_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of the 256 bytes and the family's special tokens."""
    named = dict(FAMILIES[family]["tokens"])
    special = [token for value in named.values() for token in ([value] if isinstance(value, str) else value)]
    special = [token for token in dict.fromkeys(special) if token.startswith("<")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if bos := named.get("bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=FAMILIES[family]["template"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        **named,
    )


def for_vllm(family: str) -> dict:
    """Return one of Qwen's families with a text model that vLLM computes on a CPU: heads of 32 numbers, none tied."""
    made = copy.deepcopy(FAMILIES[family])
    made["text"] |= dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False)
    made["text"] |= dict(max_position_embeddings=2048)
    if "head_dim" in made["text"]:
        made["text"]["head_dim"] = 32
    made["text"]["rope_parameters"]["mrope_section"] = [6, 5, 5] if family == "qwen3_vl" else [4, 6, 6]
    made["vision"]["hidden_size" if family == "qwen2_vl" else "out_hidden_size"] = 64
    return made


def build_model(
    family: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0, family_of: dict | None = None
) -> torch.nn.Module:
    """Make a model with weights so wide that a wrong position, mask or picture shows. Gemma's own would be zeros."""
    family_of = family_of or FAMILIES[family]
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vocabulary = dict(vocab_size=len(tokenizer), **ids)
    parts = "tokens", "template", "processor", "text", "vision", "ids"
    others = {name: value for name, value in family_of.items() if name not in parts}
    config = AutoConfig.for_model(
        family,
        text_config=vocabulary | family_of["text"] | {"dtype": "float32"},
        vision_config=family_of["vision"] | {"dtype": "float32"},
        tie_word_embeddings=family_of["text"].get("tie_word_embeddings", True),
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in family_of["ids"].items()},
        **others,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):  # a norm's
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.normal_(std=0.3)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def save(family: str, folder: Path, seed: int = 0, family_of: dict | None = None) -> Path:
    """Write model, tokenizer and processor files of a family, and return the folder."""
    tokenizer = build_tokenizer(family)
    build_model(family, tokenizer, seed, family_of).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, settings in FAMILIES[family]["processor"].items():
        (folder / f"{name}.json").write_text(json.dumps(settings, indent=2))
    return folder


def drawing(width: int, height: int, seed: int, file_format: str = "PNG") -> bytes:
    """Return the file of a picture: some shapes in strong colours, each picture another."""
    random = np.random.default_rng(seed)
    picture = Image.new("RGB", (width, height), tuple(random.integers(0, 256, 3).tolist()))
    pen = ImageDraw.Draw(picture)
    for _ in range(4):
        across = sorted(random.integers(0, width, 2).tolist())
        down = sorted(random.integers(0, height, 2).tolist())
        shape = pen.ellipse if random.random() < 0.5 else pen.rectangle
        shape([(across[0], down[0]), (across[1], down[1])], fill=tuple(random.integers(0, 256, 3).tolist()))
    return encoded(picture, file_format)


# Files, honest ones and others.

DRAWN = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8))


def encoded(picture: Image.Image = DRAWN, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_claiming(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def jpeg_claiming(width: int, height: int) -> bytes:
    whole = encoded(kind="JPEG")
    place = whole.index(b"\xff\xc0") + 5
    return whole[:place] + struct.pack(">HH", height, width) + whole[place + 4 :]
