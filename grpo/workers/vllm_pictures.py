"""Prompts with pictures as vLLM's /inference/v1/generate takes them: our ids, our pixels, and where they belong.

vLLM would prepare a picture itself, by torchvision: other pixels if it is resized. Its `kwargs_data` is base64 of
msgpack: of each picture {name: {"data": [dtype, shape, bytes as extension 3], "field": [kind, its settings]}}.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from grpo.config.errors import ConfigError
from grpo.config.sampling_settings import SharedConfig
from grpo.model.load import load_settings, load_tokenizer
from grpo.model.pictures import load_processor
from grpo.pool.protocol import RunInfo
from grpo.wire.picture_files import PicturedPrompt, PictureError
from grpo.workers.engine import EngineError, WorkerFailed, check_processor

_RAW = 3  # vLLM's msgpack extension for a tensor's memory
_KEPT = 16  # pictures; of a picture of 640 x 480 there are 5 MB


class VllmPictures:
    """Makes the field `features` of requests. Any thread may call it."""

    def __init__(self, run: RunInfo, folder: Path, dtype: str):
        """`dtype`: the weights', which vLLM would give pixels anyway. Raises WorkerFailed, and EngineError."""
        try:
            config = SharedConfig(model_name_or_path=str(folder))
            self._processor = load_processor(config, load_settings(config), load_tokenizer(config))
        except ConfigError as error:
            raise EngineError(str(error)) from error
        check_processor(run, "" if self._processor is None else self._processor.fingerprint)
        self._dtype = getattr(torch, dtype)
        self._prepared = lru_cache(_KEPT)(self._prepare)

    def features(self, prompt: PicturedPrompt) -> dict[str, Any]:
        """Return a prompt's features. Raises EngineError for a picture that cannot be used, or is not the ids'."""
        ids, token, end = [*prompt], self._processor.token_id, 0
        hashes, places, data = [], [], []
        for file in prompt.pictures:
            try:
                count, sha256, encoded = self._prepared(file)
            except PictureError as error:
                raise EngineError(f"a picture {error}") from error
            begin = ids.index(token, end) if token in ids[end:] else end
            end = begin + count
            # vLLM would draw from whatever it makes of others.
            if ids[begin:end] != [token] * count:
                raise EngineError("the ids of a prompt do not fit its pictures")
            hashes.append(sha256)
            places.append({"offset": begin, "length": count})
            data.append(encoded)
        return {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": places}, "kwargs_data": {"image": data}}

    def _prepare(self, file: bytes) -> tuple[int, str, str]:
        """Return how many ids stand for a picture's pieces, its hash, by which vLLM keeps its results, and the
        tower's inputs. Raises PictureError."""
        (inputs,) = self._processor.inputs([file])
        if inputs.keys() != {"pixel_values", "image_grid_thw"}:
            raise WorkerFailed(f"a vision tower that takes {', '.join(inputs)}: draw with --engine transformers")
        pixels, grid = inputs["pixel_values"].to(self._dtype), inputs["image_grid_thw"][0]
        of_patches = {"keep_on_cpu": False, "slices": [[0, len(pixels), None]], "dim": 0}
        item = {
            "pixel_values": {"data": _data(pixels), "field": ["flat", of_patches]},
            "image_grid_thw": {"data": _data(grid), "field": ["batched", {"keep_on_cpu": True}]},
        }
        sha256, encoded = hashlib.sha256(file).hexdigest(), base64.b64encode(_pack(item)).decode()
        return self._processor.count([file]), sha256, encoded


def _data(values: torch.Tensor) -> list:
    raw = values.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return [str(values.dtype).removeprefix("torch."), [*values.shape], raw]


def _pack(value: Any) -> bytes:
    """Write msgpack (its specification, https://github.com/msgpack/msgpack); bytes are a tensor's memory."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return struct.pack(">BQ", 0xCF, value)
    if isinstance(value, str):
        return struct.pack(">BI", 0xDB, len(value.encode())) + value.encode()
    if isinstance(value, bytes):
        return struct.pack(">BIB", 0xC9, len(value), _RAW) + value
    if isinstance(value, dict):
        return struct.pack(">BI", 0xDF, len(value)) + b"".join(_pack(key) + _pack(each) for key, each in value.items())
    return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(_pack, value))
