"""The reference server that `benchmarks.ref_server` measures ours against: simple_GRPO's method behind our wire.

One request is one group and is scored alone: its rows are padded on the right to the longest, the model gives the
logits of every position of every row, prompt and padding included, and a loop over rows takes log-softmax and gathers.
Bottle, waitress and grpo/wire/logprobs.py are those of our server, so that the two differ in how they score and in
nothing else. It scores at temperature 1 whatever is asked, as simple_GRPO does, and is for this measurement only.

    python -m benchmarks.baseline_server FOLDER PORT
"""

from __future__ import annotations

import sys
import threading

import bottle
import numpy as np
import torch
import waitress
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo.wire.health import ModelInfo, ServerInfo
from grpo.wire.logprobs import LogprobsAnswer, LogprobsRequest, decode_request, encode_answer
from grpo.wire.refusals import CONTENT_TYPE, HEALTH_PATH, LOGPROBS_PATH

PAD = 0


@torch.inference_mode()
def score(model: PreTrainedModel, request: LogprobsRequest) -> np.ndarray:
    """float32 [completion_lengths.sum()]"""
    sequences = request.sequences()
    input_ids = torch.full((len(sequences), max(len(p) + len(c) for p, c in sequences)), PAD)
    for row, (prompt, completion) in enumerate(sequences):
        input_ids[row, : len(prompt) + len(completion)] = torch.from_numpy(np.concatenate([prompt, completion]))
    logits = model(input_ids).logits[:, :-1]
    rows = []
    for row_logits, next_ids in zip(logits, input_ids[:, 1:], strict=True):
        rows.append(row_logits.log_softmax(-1).gather(-1, next_ids.unsqueeze(-1)).squeeze(-1))
    return np.concatenate(
        [row[len(p) - 1 : len(p) + len(c) - 1].numpy() for row, (p, c) in zip(rows, sequences, strict=True)]
    )


def main(folder: str, port: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    vocabulary, longest = model.config.vocab_size, model.config.max_position_embeddings
    one_at_a_time = threading.Lock()
    app = bottle.Bottle()

    @app.get(HEALTH_PATH)
    def health():
        return ServerInfo(status="ready", model=ModelInfo(name=folder)).to_json()

    @app.post(LOGPROBS_PATH)
    def logprobs():
        body = bottle.request.environ["wsgi.input"].read()
        request = decode_request(body, vocab_size=vocabulary, max_length=longest, max_sequences=10**6, max_tokens=10**9)
        with one_at_a_time:
            answer = score(model, request)
        bottle.response.content_type = CONTENT_TYPE
        return encode_answer(
            LogprobsAnswer(logprobs=answer, model_fingerprint="baseline", request_id=request.request_id)
        )

    waitress.serve(app, host="127.0.0.1", port=port, threads=64)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
