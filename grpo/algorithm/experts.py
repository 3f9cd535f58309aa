"""The loss that balances the experts of a mixture: Switch Transformer, Fedus et al. 2021, arXiv:2101.03961."""

from __future__ import annotations

import torch

from grpo.algorithm.tokens import StepSize


def experts_chosen(router_logits: torch.Tensor, per_token: int) -> torch.Tensor:
    """Count the tokens that chose each expert, the mean of all layers: [layers, T, experts] -> float64 [experts]."""
    chosen = router_logits.softmax(dim=-1).topk(per_token, dim=-1).indices
    # bincount would wait for a GPU to know how many there are.
    counts = torch.zeros(router_logits.shape[-1], dtype=torch.float64, device=router_logits.device)
    counts.index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.float64))
    return counts / len(router_logits)


def balance_loss(router_logits: torch.Tensor, chosen: torch.Tensor, step: StepSize) -> torch.Tensor:
    """Return these tokens' share of the whole step's load-balancing loss, experts x sum of f x P (equations 4 to 6).

    f is the share of the step's tokens that chose an expert, `chosen` / tokens; P the router's mean probability for it.
    f has no gradient, and with the whole step's f the sum over any cut is the loss of the step, the value that
    transformers' load_balancing_loss_func computes from all these tokens at once. router_logits: [layers, T, experts].
    """
    layers, _, experts = router_logits.shape
    shares = chosen.to(router_logits.device) / max(step.tokens, 1)
    probabilities = router_logits.softmax(dim=-1).sum(dim=(0, 1), dtype=torch.float32)
    return experts * (shares.float() * probabilities).sum() / (layers * max(step.tokens, 1))
