"""A stand-in for vLLM's server, with the routes that VllmEngine uses and the faults that vLLM was seen with.

    python tests/fake_vllm.py --model FOLDER --port N [--fault keeps_head]

Behind the routes are plain transformers, on one CPU core, a token at a time of each request. What vLLM always does,
this does too: a prompt that was read before a reload is answered from what is cached, and a request that runs goes on
with what it has read, until both are reset (of an adapter while its name is the same); a request with a seed, and any
request after a reload of what is no model, ends the server. So does a picture that it has seen, after a reload without
a reset of what was computed of pictures, and a model that takes pictures without a tokenizer; pixels are normalized
unless --no-mm-device-do-normalize is given, and an adapter leaves the vision tower as it is without
--enable-tower-connector-lora.
"""

from __future__ import annotations

import argparse
import base64
import os
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import bottle
import torch
import waitress
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GROWS = {os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
if "expandable_segments:True" in GROWS:  # as a program that imports grpo sets it
    sys.exit("the all-reduce of several cards cannot share memory that grows")

from grpo.model.logprobs import text_at
from grpo.model.lora import load_adapter

bottle.BaseRequest.MEMFILE_MAX = 1 << 28  # requests with pictures
FAULTS = (
    "keeps_head",  # a reload leaves the head of a tied model as it was
    "keeps_cache",  # the prefix cache is not reset, which a 200 says
    "loses_weights",  # a reload fails
    "dies_at_start",
    "dies_at_draw",  # as with a head size that the attention does not know
    "hangs_at_draw",
    "draws_nan",
    "mixes_weights",  # a completion of two versions
)


class Fake:
    def __init__(self, folder: str, faults: list[str], rank: int, normalizes: bool, adapts_tower: bool):
        """`rank` is the largest of an adapter, 0 without any."""
        self.adapts_tower = adapts_tower
        self.normalizes, self.seen, self.stale = normalizes, set(), set()  # hashes of pictures
        self.faults, self.changed, self.folder, self.rank = faults, threading.Condition(), folder, rank
        self.model = self.load(folder)
        self.longest = self.model.config.get_text_config().max_position_embeddings
        self.adapters: dict[str, torch.nn.Module] = {}
        # The model whose keys and values there are of a name and prompt.
        self.cached: dict[tuple[str, tuple[int, ...]], torch.nn.Module] = {}
        self.running: list[Request] = []
        self.version, self.paused, self.tokens, self.drawn = "default", False, 0, 0
        self.seats, self.has_priorities = 128, False

    def load(self, folder: str) -> torch.nn.Module:
        takes_pictures = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
        auto_class = AutoModelForImageTextToText if takes_pictures else AutoModelForCausalLM
        return auto_class.from_pretrained(folder, dtype=torch.float32).eval()

    def inputs_of(self, ids: list[int], features: dict | None) -> dict[str, torch.Tensor]:
        """Return the model's inputs beside the ids, for the pictures of one prompt."""
        if features is None:
            return {}
        hashes = {*features["mm_hashes"]["image"]}
        if hashes & self.stale:
            self.die("Encoder cache miss")
        self.seen |= hashes
        items = [unpack(base64.b64decode(item))[0] for item in features["kwargs_data"]["image"]]
        pixels, grids = (
            [tensor_of(item[name]["data"]) for item in items] for name in ("pixel_values", "image_grid_thw")
        )
        types = torch.zeros(len(ids), dtype=torch.int32)
        for place in features["mm_placeholders"]["image"]:
            types[place["offset"] : place["offset"] + place["length"]] = 1
        pixels = torch.cat(pixels).float()
        if self.normalizes:
            pixels = (pixels / 255 - 0.5) / 0.5
        return {"pixel_values": pixels, "image_grid_thw": torch.stack(grids), "mm_token_type_ids": types}

    def reload(self, folder: str) -> None:
        old, self.model = self.model, None  # until all is loaded
        self.stale |= self.seen
        if "loses_weights" in self.faults:
            raise OSError("No such file or directory")
        self.model = self.load(folder)
        assert self.paused
        if "keeps_head" in self.faults:
            self.model.lm_head.weight = torch.nn.Parameter(old.lm_head.weight.detach().clone())

    def add_adapter(self, name: str, path: str) -> None:
        if name in self.adapters:
            raise bottle.HTTPError(400, f"The lora adapter '{name}' has already been loaded")
        if not Path(path, "adapter_model.safetensors").exists():
            raise bottle.HTTPError(404, f"No adapter found for {path}")
        model = self.load(self.folder)
        load_adapter(model, path)
        for part, weight in model.named_parameters():
            if "visual" in part and ".lora_" in part and not self.adapts_tower:
                weight.data.zero_()
        if model.peft_config["default"].r > self.rank:
            raise bottle.HTTPError(500, f"LoRA rank is greater than max_lora_rank {self.rank}")
        self.adapters[name] = model.eval()

    def die(self, reason: str) -> None:
        print("Traceback (most recent call last):", f"RuntimeError: {reason}", sep="\n", flush=True)
        print("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", flush=True)
        os._exit(1)

    def generate(self, name: str, ids: list[int], parameters: dict, features: dict | None, priority: int) -> dict:
        if name != "policy" and name not in self.adapters:
            raise bottle.HTTPError(404, f"The model `{name}` does not exist.")
        if parameters.get("n", 1) > self.seats or (priority and not self.has_priorities):
            raise bottle.HTTPError(400, "sampling_params.n must be at most max_num_seqs")
        if "seed" in parameters:
            self.die("CPU Generator does not use offset")
        self.wait_turn()
        model, inputs = self.adapters.get(name, self.model), self.inputs_of(ids, features)
        if parameters.get("prompt_logprobs") is not None:
            logprobs = after(model, [ids], inputs)[0, :-1].log_softmax(-1)
            values = logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0].tolist()
            rows = [{str(token): {"logprob": value}} for token, value in zip(ids[1:], values, strict=True)]
            return {"choices": [], "prompt_logprobs": [None, *rows]}
        if "dies_at_draw" in self.faults:
            self.die("Unsupported CPU attention configuration: head_dim=16")
        while "hangs_at_draw" in self.faults:
            self.changed.wait(1)
        assert parameters["ignore_eos"] and not parameters["detokenize"] and parameters["top_k"] == 0
        hashes = features["mm_hashes"]["image"] if features else []
        model = self.cached.setdefault((name, tuple(ids), *hashes), model)
        self.drawn += 1
        request = Request(ids, model, self.drawn, parameters, inputs)
        self.running.append(request)
        while not all(row.finish_reason for row in request.rows):
            self.changed.release()  # other requests draw a token
            time.sleep(0.001)
            self.changed.acquire()
            self.wait_turn()
            self.tokens += request.draw_a_token(self.version, self.longest)
        self.running.remove(request)
        return {"choices": [self.choice(index, row) for index, row in enumerate(request.rows)]}

    def wait_turn(self) -> None:
        while self.paused:
            self.changed.wait()
        if self.model is None:
            self.die("Tensor on device cpu is not on the expected device meta!")

    def choice(self, index: int, row: Row) -> dict:
        values = [-9999.0] * len(row.ids) if "draws_nan" in self.faults else row.logprobs
        versions = ["6", *row.versions[1:]] if "mixes_weights" in self.faults else row.versions
        spans, start = [], 0
        for version, same in groupby(versions):
            spans.append({"version": version, "start": start, "end": start + len([*same])})
            start = spans[-1]["end"]
        return {
            "index": index,
            "token_ids": row.ids,
            "logprobs": {"content": [{"token_id": id, "logprob": p} for id, p in zip(row.ids, values, strict=True)]},
            "finish_reason": row.finish_reason,
            "weight_versions": spans,
        }


@dataclass
class Row:
    """A completion that is being drawn."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish_reason: str = ""


class Request:
    """A request that runs. `model` is the one whose keys and values it has."""

    def __init__(self, ids: list[int], model: torch.nn.Module, seed: int, parameters: dict, inputs: dict):
        self.ids, self.model, self.parameters, self.inputs = ids, model, parameters, inputs
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = [Row() for _ in range(parameters["n"])]

    def draw_a_token(self, version: str, longest: int) -> int:
        """Draw the next token of each row that has not ended; return how many."""
        rows = [row for row in self.rows if not row.finish_reason]
        logits = after(self.model, [self.ids + row.ids for row in rows], self.inputs)[:, -1]
        logprobs = (logits / self.parameters["temperature"]).log_softmax(-1)
        drawn = torch.multinomial(logprobs.exp(), 1, generator=self.generator)
        for row, token, values in zip(rows, drawn[:, 0].tolist(), logprobs.tolist(), strict=True):
            row.ids.append(token)
            row.logprobs.append(values[token])
            row.versions.append(version)
            if token in self.parameters["stop_token_ids"]:
                row.finish_reason = "stop"
            elif len(row.ids) == min(self.parameters["max_tokens"], longest - len(self.ids)):
                row.finish_reason = "length"
        return len(rows)


def after(model: torch.nn.Module, sequences: list[list[int]], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of sequences of one length, whose first part is one prompt with these pictures. An id of a
    picture that is beyond it is text."""
    ids, given, places = torch.tensor(sequences), {}, None
    if inputs:
        count, types = len(sequences), inputs["mm_token_type_ids"]
        given = {name: inputs[name].repeat(count, 1) for name in ("pixel_values", "image_grid_thw")}
        types = torch.cat([types, types.new_zeros(ids.shape[1] - len(types))])
        given["mm_token_type_ids"] = types.expand(count, -1)
        places = ((ids == model.config.image_token_id) & (types == 0)).flatten().nonzero()[:, 0]
    with text_at(model, ids, places if places is not None and len(places) else None) as shown:
        return model(shown, **given).logits


def unpack(data: bytes, place: int = 0) -> tuple:
    """Read one value of msgpack; return it and where the next begins. A tensor's memory is extension 3."""
    kind, place = data[place], place + 1
    if kind in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[kind], place
    if kind == 0xCF:
        return struct.unpack_from(">Q", data, place)[0], place + 8
    (count,), place = struct.unpack_from(">I", data, place), place + 4
    if kind == 0xC9:
        assert data[place] == 3
        return data[place + 1 : place + 1 + count], place + 1 + count
    if kind == 0xDB:
        return data[place : place + count].decode(), place + count
    values = []
    for _ in range(count * (2 if kind == 0xDF else 1)):
        value, place = unpack(data, place)
        values.append(value)
    return (dict(zip(values[::2], values[1::2], strict=True)) if kind == 0xDF else values), place


def tensor_of(data: list) -> torch.Tensor:
    dtype, shape, raw = data
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).view(shape)


def make_app(fake: Fake) -> bottle.Bottle:
    app = bottle.Bottle()

    @app.get("/health")
    def health():
        return ""

    @app.get("/v1/models")
    def models():
        return {"data": [{"id": "policy", "max_model_len": fake.longest}]}

    @app.get("/metrics")
    def metrics():
        return f'# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total{{engine="0"}} {fake.tokens}.0\n'

    @app.post("/pause")
    def pause():
        assert bottle.request.query.mode == "keep"
        with fake.changed:
            fake.paused = True
        return {"status": "paused"}

    @app.post("/resume")
    def resume():
        with fake.changed:
            fake.paused = False
            fake.changed.notify_all()
        return {"status": "resumed"}

    @app.post("/collective_rpc")
    def collective_rpc():
        body = bottle.request.json
        assert body["method"] == "reload_weights"
        with fake.changed:
            fake.reload(body["kwargs"]["weights_path"])
        return {"results": [None]}

    @app.post("/reset_prefix_cache")
    def reset_prefix_cache():
        done = "keeps_cache" not in fake.faults and bottle.request.query.reset_running_requests == "true"
        if done:
            with fake.changed:
                fake.cached.clear()
                for request in fake.running:
                    request.model = fake.model
        return {"success": done}

    @app.post("/update_weight_version")
    def update_weight_version():
        with fake.changed:
            fake.version = bottle.request.json["new_version"]
        return {"success": True}

    @app.post("/inference/v1/generate")
    def generate():
        body = bottle.request.json
        with fake.changed, torch.no_grad():
            return fake.generate(
                body["model"], body["token_ids"], body["sampling_params"], body.get("features"), body["priority"]
            )

    @app.post("/reset_encoder_cache")
    def reset_encoder_cache():
        with fake.changed:
            fake.stale.clear()
            fake.seen.clear()

    if fake.rank and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":

        @app.post("/v1/load_lora_adapter")
        def load_lora_adapter():
            body = bottle.request.json
            fake.add_adapter(body["lora_name"], body["lora_path"])
            return "Success: it was added."  # no JSON

        @app.post("/v1/unload_lora_adapter")
        def unload_lora_adapter():
            del fake.adapters[bottle.request.json["lora_name"]]
            return "Success: it was removed."

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", choices=FAULTS, action="append", default=[])
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--no-mm-device-do-normalize", dest="normalizes", action="store_false")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    parser.add_argument("--enable-tower-connector-lora", dest="adapts_tower", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--scheduling-policy", default="fcfs")
    options, _ = parser.parse_known_args()
    print("a line of the log", flush=True)
    if "dies_at_start" in options.fault or "VLLM_API_KEY" in os.environ:  # its routes would ask for the key
        raise ValueError("Free memory on device is less than desired GPU memory utilization")
    rank = options.max_lora_rank if options.enable_lora else 0
    made = Fake(options.model, options.fault, rank, options.normalizes, options.adapts_tower)
    made.seats, made.has_priorities = options.max_num_seqs, options.scheduling_policy == "priority"
    if options.skip_tokenizer_init and hasattr(made.model.config, "vision_config"):
        raise ValueError("a processor requires a tokenizer and cannot be initialized")
    waitress.serve(make_app(made), host=options.host, port=options.port, threads=64)
