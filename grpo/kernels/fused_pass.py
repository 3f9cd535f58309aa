"""The pass of grpo/model/token_pass.py by the Triton kernels of grpo/kernels: 9 launches a layer instead of 38.

On a card a step of a small model takes as long as its launches. What is no plain linear layer (an adapter, a quantised
weight) does its own work, and the kernels the rest.
"""

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from grpo.kernels.attention import HeadNorms, attend, rotate_and_keep
from grpo.kernels.products import add_norm, gated, project
from grpo.model.shared_cache import SharedCache
from grpo.model.token_pass import TokenPass


class FusedPass(TokenPass):
    """The pass by kernels. It reads the weights in place, and makes no copy of them."""

    def __init__(self, body: nn.Module, cache: SharedCache, positions: int):
        """Every position of a token is less than `positions`."""
        super().__init__(body, cache, positions)
        self._last, self._fused = body.norm, [_FusedLayer(layer) for layer in body.layers]

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden, more, angles = self._embed(tokens), None, self._angles_at(positions)
        for layer, fused in zip(self._layers, self._fused, strict=True):
            states = _normed(hidden, more, fused.norm)
            query = rotate_and_keep(self._cache, layer.number, fused.project(states), angles, fused.head_norms)
            more = layer.output(attend(self._cache, layer.number, query, layer.scoring))
            more = layer.down(fused.gated(_normed(hidden, more, fused.mlp_norm)))
        return _normed(hidden, more, self._last)


class _FusedLayer:
    def __init__(self, layer: nn.Module):
        attention, mlp = layer.self_attn, layer.mlp
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm, attention.k_norm
            self.head_norms = HeadNorms(query=query.weight, key=key.weight, epsilon=query.variance_epsilon)
        self._projections = attention.q_proj, attention.k_proj, attention.v_proj
        self._gates, self._activation = (mlp.gate_proj, mlp.up_proj), mlp.act_fn
        self._is_joined = _are_plain(self._projections)
        self._is_gated = _are_plain(self._gates) and isinstance(mlp.act_fn, (nn.SiLU, SiLUActivation))

    def project(self, states: Tensor) -> tuple[Tensor, ...]:
        if self._is_joined:
            return project(states, *self._projections)
        return tuple(projection(states) for projection in self._projections)

    def gated(self, states: Tensor) -> Tensor:
        if self._is_gated:
            return gated(states, *self._gates)
        gate, up = self._gates
        return self._activation(gate(states)) * up(states)


def _are_plain(modules: tuple[nn.Module, ...]) -> bool:
    """Return whether these are linear layers and nothing more, all with a bias or all without, as they lie."""
    plain = all(type(module) is nn.Linear and module.weight.is_contiguous() for module in modules)
    return plain and len({module.bias is None for module in modules}) == 1


def _normed(hidden: Tensor, more: Tensor | None, norm: nn.Module) -> Tensor:
    return add_norm(hidden, more, norm.weight, norm.variance_epsilon)
