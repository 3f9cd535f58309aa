"""The pictures of requests, checked against the ids that stand for them, and prepared before their request waits."""

import threading
from contextlib import nullcontext

import numpy as np

from grpo.model.pictures import PictureProcessor, Vision
from grpo.wire.logprobs import LogprobsRequest
from grpo.wire.picture_files import PicturedPrompt, PictureError, pictures_of
from grpo.wire.refusals import ProtocolError, malformed

_KEPT_BYTES = 2 * 2**30  # of prepared pictures of requests that wait: 110,000 tokens of Qwen's
_AT_ONCE = 2  # requests whose pictures are prepared at a time, so that the model's thread has its share of the cores


class PictureCheck:
    """Checks requests with the processor of a vision-language model. A request's own thread prepares its pictures, so
    that the scorer and other requests need not wait for that. The processor keeps those that it prepared last; the
    scorer prepares the others again."""

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
