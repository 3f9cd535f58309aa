"""Token log-probs in fp32: the one function that policy and reference share, so that equal weights give equal numbers.

The body of the model runs once over the padded batch. The head (lm_head, softmax) runs over completion positions only,
CHUNK tokens at a time, and in a backward pass each chunk is computed again: neither the (B, L, V) logits of the usual
way nor all (T, V) logits of the completions ever exist.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from grpo.batch import Batch
from grpo.config import ConfigError

CHUNK = 512  # tokens: 300 MB of fp32 logits at a vocabulary of 152k
_MM_GIVES_FP32 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


def token_logprobs(
    model: nn.Module, batch: Batch, temperature: float, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log p(token | all before it) of every completion token, and on request the entropy of its distribution.

    Both float32 [T] in the order of `batch.targets`, of the distribution softmax(logits / temperature). The entropy (in
    nats) carries no gradient.
    """
    # No attention mask: the padding is on the right, where no token of a causal model can see it.
    body = model.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    hidden = body.last_hidden_state.flatten(0, 1)[batch.predicts]
    head = Head(model, temperature)
    chunks = []
    for rows, targets in zip(hidden.split(CHUNK), batch.targets.split(CHUNK), strict=True):
        if torch.is_grad_enabled():
            # Not reentrant: that would fire the weight's gradient hook once a chunk, and ZeRO reduces in that hook.
            chunks.append(checkpoint(head.score, rows, targets, with_entropy, use_reentrant=False))
        else:
            chunks.append(head.score(rows, targets, with_entropy))
    logprobs = torch.cat([chunk[0] for chunk in chunks])
    return logprobs, torch.cat([chunk[1] for chunk in chunks]) if with_entropy else None


class Head:
    """The way from last hidden states to log-probs, as the model's own forward goes it, but with fp32 logits.

    Some models change their logits after lm_head; each way known is done here: `final_logit_softcapping` (Gemma),
    `logit_scale` (Cohere), `logits_scaling` (Granite). `check` tells whether that is all the model does.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0):
        linear = model.get_output_embeddings()
        self.weight, self.bias = linear.weight, getattr(linear, "bias", None)
        config = model.config.get_text_config()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        self.temperature = temperature

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden size] -> float32 [n, vocabulary], before the temperature."""
        logits = _Fp32Linear.apply(hidden, self.weight)
        if self.bias is not None:
            logits = logits + self.bias.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def score(self, hidden: torch.Tensor, targets: torch.Tensor, with_entropy: bool):
        logits = self.logits(hidden)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        normaliser = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normaliser
        if not with_entropy:
            return logprobs, None
        with torch.no_grad():
            mean_logit = (logits.softmax(-1) * logits).sum(-1)
        return logprobs, normaliser.detach() - mean_logit

    @classmethod
    @torch.no_grad()
    def check(cls, model: nn.Module) -> None:
        """Hold this head against the model's own on a few tokens. Raises ConfigError where they differ."""
        embedding = model.get_input_embeddings().weight
        ids = torch.arange(16, device=embedding.device).unsqueeze(0) % len(embedding)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        own = model(input_ids=ids, use_cache=False).logits[0].float()
        ours = cls(model).logits(hidden[0])
        # bfloat16 keeps 8 bits: the model's own logits are that coarse.
        tolerance = 1e-4 if hidden.dtype == torch.float32 else 0.03
        difference = ((own - ours).abs().max() / own.abs().max().clamp(min=1.0)).item()
        if not difference <= tolerance:
            raise ConfigError(
                f"{type(model).__name__} does something to its logits that grpo/logprobs.py does not know "
                f"(relative difference {difference:.1e}): add it to Head, or use another model"
            )


class _Fp32Linear(torch.autograd.Function):
    """hidden @ weight.T with float32 output, also where both are bfloat16.

    Rounding logits to bfloat16 moves log-probs by up to 0.09 and makes a KL where there is none; casting the weight to
    float32 instead would cost a second copy of it.
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.dtype == torch.float32:
            return hidden @ weight.t()
        if hidden.is_cuda and _MM_GIVES_FP32:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.t().float()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        return grad @ weight, grad.t() @ hidden if ctx.needs_input_grad[1] else None
