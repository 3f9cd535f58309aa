"""The forward pass of a decode step, a token a row, written out for Llama, Mistral, Qwen2 and Qwen3.

transformers' own pass treats a token as a text, which takes a small model's step longer than its products. Here the
same numbers are computed in the same order, with the same rounding, by three quarters of the kernels.
"""

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo.model.shared_cache import Scoring, SharedCache

KNOWN = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
Map = Callable[[Tensor], Tensor]


def is_known(body: nn.Module) -> bool:
    """Return whether the body is one of these models, unchanged, in the installed transformers."""
    norms = (type(part) for part in body.modules() if hasattr(part, "variance_epsilon"))
    is_theirs = all(of.__module__.startswith("transformers.models.") for of in (type(body), *norms))
    return is_theirs and type(body).__name__ in KNOWN


def cannot_fuse(body: nn.Module) -> str:
    """Return why the kernels of grpo/kernels cannot compute the pass, as part of a sentence; empty if they can."""
    if not is_known(body):
        return f"kernels know {', '.join(KNOWN)} alone"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    vectors = {of.weight.dtype for of in body.modules() if hasattr(of, "variance_epsilon")}
    if vectors != {body.embed_tokens.weight.dtype}:
        return "its norms have another dtype than its embeddings"
    return ""


class TokenPass:
    """The pass of a model's body whose keys and values are in a cache. It reads the weights in place."""

    def __init__(self, body: nn.Module, cache: SharedCache, positions: int):
        """Every position of a token is less than `positions`."""
        self._embed, self._rotary, self._norm = body.embed_tokens, body.rotary_emb, _norm(body.norm)
        self._layers, self._cache = [_Layer(layer) for layer in body.layers], cache
        self._table = None
        # The others' angles follow from the largest position of a pass.
        if body.rotary_emb.rope_type not in ("dynamic", "longrope"):
            self._table = self._angles(torch.arange(positions, device=self._embed.weight.device))

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Compute last hidden states, int64 [rows], int64 [rows] -> [rows, hidden size], as the cache's `step` says."""
        hidden = self._embed(tokens)
        cos, sin = self._angles_at(positions).unbind(dim=1)
        for layer in self._layers:
            query, key, value = layer.project(hidden, cos, sin)
            out = self._cache.attend(layer.number, query, key, value, layer.scoring)
            hidden = hidden + layer.output(out.flatten(1))
            states = layer.mlp_norm(hidden)
            hidden = hidden + layer.down(layer.activation(layer.gate(states)) * layer.up(states))
        return self._norm(hidden)

    def _angles_at(self, positions: Tensor) -> Tensor:
        return self._angles(positions) if self._table is None else self._table.index_select(0, positions)

    def _angles(self, positions: Tensor) -> Tensor:
        """Compute the cosines and sines that turn a head at these positions: int64 [n] -> [n, 2, 1, head size]."""
        cos, sin = self._rotary(self._embed.weight, positions.unsqueeze(1))
        # rotate_half of transformers moves the halves of a head and negates one of them: here the sine has the sign.
        half = sin.shape[2] // 2
        return torch.stack([cos, torch.cat([-sin[:, :, :half], sin[:, :, half:]], dim=2)], dim=1)


class _Layer:
    def __init__(self, layer: nn.Module):
        attention, mlp = layer.self_attn, layer.mlp
        self.number, self._size = attention.layer_idx, attention.head_dim
        # Mistral's layers read it from the settings, Llama has none.
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        self.scoring = Scoring(attention.scaling, window=window)
        self._norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self._query, self._key, self._value, self.output = (
            _linear(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        )
        self.gate, self.up, self.down = _linear(mlp.gate_proj), _linear(mlp.up_proj), _linear(mlp.down_proj)
        self.activation = mlp.act_fn
        self._head_norms = None
        if hasattr(attention, "q_norm"):
            self._head_norms = _norm(attention.q_norm), _norm(attention.k_norm)

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Compute query, key and value: [rows, heads, 1, head size] each, with as many heads as each has."""
        states, heads = self._norm(hidden), (len(hidden), -1, self._size)
        query, key, value = (project(states).view(heads) for project in (self._query, self._key, self._value))
        if self._head_norms is not None:
            query, key = self._head_norms[0](query), self._head_norms[1](key)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (states * cos).add_(states.roll(states.shape[2] // 2, dims=2).mul_(sin))


def _linear(module: nn.Module) -> Map:
    # What is more than nn.Linear (an adapter, a quantised weight) does its own work.
    return partial(F.linear, weight=module.weight, bias=module.bias) if type(module) is nn.Linear else module


def _norm(module: nn.Module) -> Map:
    weight, size, epsilon = module.weight, module.weight.shape, module.variance_epsilon
    # The weight is multiplied after rounding to the model's dtype, as transformers does; F.rms_norm would do it before.
    return lambda hidden: weight * F.rms_norm(hidden, size, eps=epsilon)
