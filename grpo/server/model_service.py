"""The service of a model: loads it, reads requests and checks their pictures, scores them, and describes itself at
/health and /status."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from grpo.config.server import ServerConfig
from grpo.server.http import THREADS
from grpo.server.monitor import add_up
from grpo.server.service import Service
from grpo.wire.health import ModelInfo, ServerInfo
from grpo.wire.logprobs import MOST_TOP_K, LogprobsAnswer, LogprobsRequest, decode_request, encode_answer
from grpo.wire.picture_files import PicturedPrompt, PictureError, pictures_of
from grpo.wire.refusals import ProtocolError, malformed
from grpo.wire.rewards import RewardAnswer

if TYPE_CHECKING:  # loaded after the port is taken
    import torch
    from transformers import PreTrainedModel

    from grpo.model.pictures import PictureProcessor, Vision

log = logging.getLogger("ref_server")

# Threads that may work and wait at once; the other threads keep /health and refusals quick.
MOST_REQUESTS = THREADS - 8  # requests for the model
MOST_SEQUENCES = 4096  # of one request: a trainer sends a group or some small ones, some hundred at most
_MOST_UPDATES = 4  # requests with weights
_CHECK_SECONDS = 0.5  # how often a thread that waits for the model checks whether its client is still connected
_KEPT_BYTES = 2 * 2**30  # of prepared pictures of requests that wait: 110,000 tokens of Qwen's
_AT_ONCE = 2  # requests whose pictures are prepared at a time, so that the model's thread has its share of the cores


class ModelService(Service):
    """The state of a server of a model and, once it is loaded, its queue and scorer."""

    def __init__(self, config: ServerConfig):
        super().__init__(config, ModelInfo(name=config.model_name_or_path))
        self.queue = self.scorer = self.updates = self.pictures = None
        self.request_threads = threading.Semaphore(MOST_REQUESTS)
        self.picture_threads = threading.Semaphore(MOST_REQUESTS // 2)  # text finds the others free
        self.update_threads = threading.Semaphore(_MOST_UPDATES)
        # While they are read, JSON and tokens take many times the size of the body: read one request at a time.
        self._reading = threading.Lock()
        self._read_texts = None

    def load(self) -> None:
        """Load the model and begin to score. Raises ConfigError for a missing model, or a card that is no use."""
        from grpo.model.devices import take_device
        from grpo.server.fair_queue import FairQueue
        from grpo.server.scorer import Scorer
        from grpo.server.weight_swap import WeightSwap

        config, device = self.config, take_device(local_rank=0)
        load = self._load_reward_model if config.task == "reward" else self._load_reference
        model, info, batcher, compute, most_top_k = load(device)
        self._watch_cards(model)
        self.queue = FairQueue(
            batcher,
            budget=config.batch_tokens(device.type),
            max_tokens=config.max_queue_tokens,
            max_requests=MOST_REQUESTS,
            deterministic=config.deterministic,
            fingerprint=info.fingerprint,
        )
        self.scorer = Scorer(
            self.queue, model, batcher, on_death=self.fail, on_pass=self.monitor.scored, compute=compute
        )
        folder = config.update_folder
        if folder is not None:
            self.updates = WeightSwap(
                self.queue,
                model,
                inputs=info.inputs_fingerprint,
                folder=folder,
                patience=2 * config.body_timeout,  # a single piece may take body_timeout
                on_swap=self._describe_update,
            )
        longest = min(config.max_length or info.max_length, info.max_length)
        self.change_info(
            status="ready",
            model=replace(info, max_length=longest),
            takes_updates=folder is not None,
            most_top_k=most_top_k,
        )

    def _load_reference(self, device: torch.device) -> tuple:
        """Return the reference model, its description, the batcher, the function that scores with them, and the largest
        top_k."""
        from grpo.model.fingerprint import describe
        from grpo.model.load import enough_memory, load_reference, load_tokenizer
        from grpo.model.pictures import load_processor
        from grpo.model.trial import make_batcher
        from grpo.server.scorer import completion_logprobs

        config = self.config
        tokenizer, model = load_tokenizer(config), load_reference(config, device)
        processor = load_processor(config, model.config, tokenizer)
        info = describe(model, tokenizer, config.model_name_or_path, processor)
        with enough_memory(config):
            batcher = make_batcher(model, tokenizer.pad_token_id, processor)
        self.pictures = PictureCheck(processor, batcher.vision)
        known_ids = min(len(tokenizer), info.vocab_size)
        compute = partial(completion_logprobs, known_ids=known_ids)
        return model, info, batcher, compute, min(MOST_TOP_K, known_ids)

    def _load_reward_model(self, device: torch.device) -> tuple:
        from grpo.model.reward_model import PADDED, describe_reward, load_reward_model, read_request, scores_for_queue

        name = self.config.model_name_or_path
        model, tokenizer = load_reward_model(self.config, "model_name_or_path", name, device)
        self._read_texts = partial(read_request, tokenizer)
        return model, describe_reward(model, tokenizer, name), PADDED, scores_for_queue, 0

    def _watch_cards(self, model: PreTrainedModel) -> None:
        """Let the monitor show the memory and use of the model's cards."""
        import torch

        from grpo.model.load import cards_of, device_memory, device_use

        if cards := cards_of(model):
            for card in cards:
                torch.cuda.reset_peak_memory_stats(card)  # count from here on, without loading
            self.monitor.device_memory = partial(device_memory, cards)
            if device_use(cards) is not None:
                self.monitor.device_use = partial(device_use, cards)

    def _describe_update(self, fingerprint: str, sha256: str) -> None:
        name = f"{self.config.model_name_or_path}, updated to {sha256[:12]}"
        self.change_info(model=replace(self.info.model, name=name, fingerprint=fingerprint))

    def description(self) -> str:
        model = self.info.model
        return f"{model.dtype} on {model.device}, up to {model.max_length} tokens a sequence"

    def tidy(self) -> None:
        if self.updates is not None:
            self.updates.uploads.drop_stalled()

    def drain(self, seconds: float) -> None:
        log.info("stopping: %d tokens in hand", add_up(self.held())[0])
        self.scorer.close(seconds)

    def read(self, body: Callable[[], bytes]) -> LogprobsRequest:
        """Read a request, and its body only if it can be answered now. Raises ProtocolError."""
        self.check_ready()
        model, most_tokens = self.info.model, self.config.max_request_tokens
        limits = {"max_length": model.max_length, "max_sequences": MOST_SEQUENCES, "max_tokens": most_tokens}
        if self.config.task == "reward":
            with self._reading:
                return self._read_texts(body(), **limits)
        request = decode_request(body(), vocab_size=model.vocab_size, max_top_k=self.info.most_top_k, **limits)
        with self.thread_of(self.picture_threads) if request.pictures else nullcontext():
            self.pictures.check(request)
        return request

    def score(self, request: LogprobsRequest, sender: str, is_gone: Callable[[], bool]) -> bytes:
        """Return the bytes of the answer, or raise ProtocolError. Take the request back when its client `is_gone`."""
        future = self.queue.submit(request, request.client or sender)
        while not wait([future], timeout=_CHECK_SECONDS).done:
            try:
                self.check_connected(is_gone)
            except ProtocolError as error:
                self.queue.cancel(future, error)
                raise
        answer = future.result()
        of_request = {"model_fingerprint": answer.fingerprint, "request_id": request.request_id}
        if self.config.task == "reward":
            return RewardAnswer(scores=answer.values, **of_request).to_json()
        return encode_answer(LogprobsAnswer.of_table(answer.values, **of_request))

    def held(self) -> dict[str, tuple[int, int]]:
        return self.queue.held() if self.queue else {}

    def current_info(self) -> ServerInfo:
        return replace(self.info, queue_depth=add_up(self.held())[0])

    def status(self) -> dict:
        tokens, requests = add_up(self.held())
        limits = {"max_tokens": self.config.max_queue_tokens, "max_requests": MOST_REQUESTS}
        return super().status() | {
            "deterministic": self.config.deterministic,
            "max_batch_tokens": self.queue.budget if self.queue else 0,
            "queue": {"tokens": tokens, "requests": requests, **limits},
        }


class PictureCheck:
    """Checks the pictures of requests against the ids that stand for them, with the processor of a vision-language
    model, before the requests wait. A request's own thread prepares its pictures, so that the scorer and other requests
    need not wait for that. The processor keeps those that it prepared last; the scorer prepares the others again."""

    def __init__(self, processor: PictureProcessor | None, vision: Vision | None):
        self.processor, self.vision = processor, vision
        if processor is not None:
            processor.kept_bytes = _KEPT_BYTES
        self._preparing = threading.Semaphore(_AT_ONCE)

    def check(self, request: LogprobsRequest) -> None:
        """Raise ProtocolError: 400 for a damaged picture, 422 for pictures that do not fit the model or the ids."""
        if self.processor is None:
            if request.pictures:
                raise ProtocolError(422, "no_pictures", "this server's model takes no pictures: send text alone")
            return
        before = None
        for row, (prompt, _) in enumerate(request.sequences()):
            if prompt is not before:
                with self._preparing if isinstance(prompt, PicturedPrompt) else nullcontext():
                    self._check_prompt(row, prompt)
            before = prompt

    def _check_prompt(self, row: int, prompt: PicturedPrompt | np.ndarray) -> None:
        places, made = int((np.asarray(prompt) == self.processor.token_id).sum()), 0
        try:
            for picture in pictures_of(prompt):
                made += self.processor.count([picture])
                if made > places:  # prepare no more pictures than the ids, which are limited, stand for
                    break
            if made == places > 0:
                self.vision.first_position(prompt)
        except PictureError as error:
            raise malformed(f"a picture of sequence {row} {error}") from error
        except MemoryError:
            raise
        # The code of processor and model may raise anything for a picture of an odd shape, or for ids in another order.
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise _wrong(row, f"has pictures that this model cannot be fed ({reason})") from error
        if made != places:
            counts = f"{places} tokens of a picture (id {self.processor.token_id}), and its pictures make"
            raise _wrong(row, f"has {counts} {'more' if made > places else made}")


def _wrong(row: int, reason: str) -> ProtocolError:
    return ProtocolError(422, "wrong_pictures", f"the prompt of sequence {row} {reason}")
