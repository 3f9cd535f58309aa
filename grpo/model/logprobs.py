"""Computes token log-probs in fp32, for policy and reference: equal weights give equal numbers.

The head runs over completion positions only, a block of tokens by a block of the vocabulary at a time: a block's logits
are reduced to their logsumexp while they are in cache, and computed again in the backward pass. So logits of (T, V) or
(B, L, V) never exist, and memory grows with neither T nor V. The sum over vocabulary blocks is that of Cut
Cross-Entropy (Wijmans et al. 2024, arXiv:2411.09009, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grpo.config.errors import ConfigError, require
from grpo.model.packing import Batch

# Tokens and vocabulary of a block of logits: 16 MB fit a CPU's cache, a GPU is faster with few large launches.
CPU_BLOCK = (1024, 4096)
CUDA_BLOCK = (4096, 16384)
BITS_KEPT = {torch.float32: 24, torch.bfloat16: 12, torch.float16: 12}
"""On a CPU, gradients leave out what all blocks together have of a token's probability below 2 to minus these."""
FEW_ROWS = 256  # of 16 bits: a CPU multiplies the weight by them up to twice as fast as them by the weight


def token_logprobs(
    model: nn.Module, batch: Batch, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log p(token | all tokens before it) of every completion token, and on request the entropy there, in nats.
    Both are float32 [T] in the order of `batch.targets`, of softmax(logits / temperature), and carry gradients. If the
    batch has `others`, the log-probs are [T, 1 + k], theirs behind the token's own."""
    return _at_head(_body(model, batch), model, batch, temperature, with_entropy)


@torch.no_grad()
def likeliest_tokens(model: nn.Module, batch: Batch, temperature: float, top_k: int, known_ids: int) -> Tensor:
    """Return float32 [T, 1 + 2 top_k]: each completion token's log-prob, those of the likeliest of the first
    `known_ids` tokens of the vocabulary, the largest first, and their ids."""
    likeliest = Likeliest(top_k, known_ids)
    logprobs, _ = _at_head(_body(model, batch), model, batch, temperature, with_entropy=False, likeliest=likeliest)
    return torch.cat([logprobs.unsqueeze(1), *likeliest.found()], dim=1)


def with_router_logits(model: nn.Module, batch: Batch, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies and `router_logits` from one forward pass."""
    body = _body(model, batch, output_router_logits=True)
    return *_at_head(body, model, batch, temperature, with_entropy=True), _at_routers(body, batch)


def router_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return a mixture of experts' router logits where completion tokens are predicted: [layers, T, experts]."""
    return _at_routers(_body(model, batch, output_router_logits=True), batch)


@torch.no_grad()
def check_router(model: nn.Module, coefficient: float) -> None:
    """Raise ConfigError if the model has no routers, or does not return their logits."""
    config = model.config.get_text_config()
    has_logits = hasattr(config, "output_router_logits") and hasattr(config, "num_experts_per_tok")
    if has_logits and model.device.type != "meta":
        ids = torch.arange(4, device=model.device).unsqueeze(0)
        body = body_of(model)(input_ids=ids, use_cache=False, output_router_logits=True)
        has_logits = bool(getattr(body, "router_logits", None))
    reason = f"{type(model).__name__} has no experts, or does not show how it chooses among them"
    require(has_logits, "router_aux_loss_coef", coefficient, f"{reason}: leave it out")


def _body(model: nn.Module, batch: Batch, **options):
    """Run the model's body over a batch and return its output; `options` go to its forward."""
    inputs = {"input_ids": batch.input_ids, "use_cache": False, **batch.pictures}
    # A padded batch needs no attention mask: no token of a causal model can see padding on the right.
    if batch.tree is not None:
        # transformers passes a mask in four dimensions unchanged; without one it would build one, N by N.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
        inputs |= {"position_ids": batch.position_ids, "attention_mask": mask, "tree": batch.tree}
        inputs |= {} if batch.parts is None else {"parts": batch.parts}
    elif batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids
    recompute(model, wanted=torch.is_grad_enabled())
    with text_at(model, batch.input_ids, batch.not_pieces) as inputs["input_ids"]:
        return body_of(model)(**inputs, **options)


@contextmanager
def text_at(model: nn.Module, input_ids: Tensor, places: Tensor | None) -> Iterator[Tensor]:
    """Let the model take the ids at these places for text, which it would take for pieces of a picture. It is given
    another id there, and its embedding the right one, except in calls with other shapes, such as those that generate
    makes for the tokens that follow."""
    if places is None:
        yield input_ids
        return
    shown = input_ids.clone()
    shown.view(-1)[places] = (input_ids.view(-1)[places[0]] == 0).long()

    def embed_right_ids(embedding: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if inputs[0].shape != input_ids.shape:
            return inputs
        ids = inputs[0].clone()
        ids.view(-1)[places.to(ids.device)] = input_ids.view(-1)[places].to(ids.device)
        return (ids, *inputs[1:])

    with model.get_input_embeddings().register_forward_pre_hook(embed_right_ids):
        yield shown


def _predicting(states: Tensor, batch: Batch) -> Tensor:
    """Return the rows that predict the completion tokens, [T, size], on the device of `states`."""
    return states.flatten(0, -2)[batch.predicts.to(states.device)]


def _at_routers(body, batch: Batch) -> Tensor:
    device = batch.predicts.device
    return torch.stack([_predicting(layer, batch).to(device) for layer in body.router_logits])


def _at_head(
    body,
    model: nn.Module,
    batch: Batch,
    temperature: float,
    with_entropy: bool,
    *,
    likeliest: Likeliest | None = None,
) -> tuple[Tensor, Tensor | None]:
    linear = model.get_output_embeddings()
    hidden = _predicting(body.last_hidden_state, batch).to(linear.weight)  # Mamba's are float32 in any dtype
    targets = batch.targets.to(linear.weight.device)
    if batch.others is not None:
        targets = torch.cat([targets.unsqueeze(1), batch.others.to(targets)], dim=1)

    def logprobs(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        head = Head.of(model, temperature)
        return _Logprobs.apply(hidden, head.weight, head.bias, targets, head, with_entropy, likeliest)

    # ZeRO-3 has a module's weight in place while the module computes, and before its backward pass.
    with computing(linear, logprobs):
        results = linear(hidden)
    return results if batch.parts is None else tuple(map(batch.parts.join, results))


@contextmanager
def computing(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Let a module's hooks run around another computation than its own."""
    before = vars(module).get("forward")  # accelerate's, of a model on several cards
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def body_of(model: nn.Module) -> nn.Module:
    """Return the model below its head, or `model` itself if that is not known."""
    # The base_model_prefix of Llama4ForCausalLM names a part that only the model with images has.
    return getattr(model, "model", model) if model.base_model is model else model.base_model


def recompute(model: nn.Module, wanted: bool) -> None:
    """Tell the layers that can recompute their activations (`checkpoint_activations`) whether to do so. Layers
    recompute only in training mode, which they must still have in the backward pass. The rest of the model stays in
    evaluation mode: training mode turns on noise that no setting turns off (PhiMoE draws its experts at random)."""
    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer.training = wanted


class Buffers(NamedTuple):
    """The memory in which one block after another is computed, float32. New memory for each, which the system hands
    out page by page, takes longer than the block's conversion."""

    logits: Tensor
    weight: Tensor  # that of a 16-bit weight on a CPU, else empty


@dataclass(frozen=True, kw_only=True)
class Head:
    """The model's head: from last hidden states to logits, as in the model's own forward, but in fp32. Some models
    scale their logits, or the hidden states before lm_head: by `logit_scale` (Cohere), `lm_head_multiplier` (Falcon-H1)
    or 1 / `logits_scaling` (Granite, MiniCPM3; HyperCLOVA X multiplies by it). Gemma caps them
    (`final_logit_softcapping`). The temperature divides last."""

    weight: Tensor  # [vocabulary, hidden size]
    bias: Tensor | None
    scale: float
    softcap: float | None
    temperature: float

    @classmethod
    def of(cls, model: nn.Module, temperature: float = 1.0) -> Head:
        linear, config = model.get_output_embeddings(), model.config.get_text_config()
        names = ("logit_scale", "lm_head_multiplier", "logits_scaling")
        scale, multiplier, scaling = (getattr(config, name, None) or 1.0 for name in names)
        scale *= multiplier * scaling if config.model_type == "hyperclovax" else multiplier / scaling
        softcap = getattr(config, "final_logit_softcapping", None)
        bias = getattr(linear, "bias", None)
        return cls(weight=linear.weight, bias=bias, scale=scale, softcap=softcap, temperature=temperature)

    def logits(self, hidden: Tensor, tokens: slice, buffers: Buffers | None = None) -> Tensor:
        """Compute logits over the temperature: [n, hidden size] -> float32 [n, len(tokens)], perhaps in `buffers`."""
        logits = _linear_fp32(hidden, self.weight[tokens], *(buffers or ()))
        if self.bias is not None:
            logits += self.bias[tokens].float()
        if self.softcap is not None:
            logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        elif self.scale != self.temperature:
            logits *= self.scale / self.temperature
        return logits

    def all_logits(self, hidden: Tensor) -> Tensor:
        """Compute all logits of few rows: [n, hidden size] -> float32 [n, vocabulary], without gradients."""
        return torch.cat([self.logits(hidden, block) for block in self.blocks(hidden)[1]], dim=1)

    def logits_in_blocks(self, hidden: Tensor) -> Tensor:
        """Do the same in blocks of the vocabulary, -inf beyond its end: float32 [blocks, n, size]."""
        _, slices, buffers = self.blocks(hidden)
        if len(slices) == 1:
            return self.logits(hidden, slices[0]).unsqueeze(0)
        size, rows = slices[0].stop, len(hidden)
        kept = torch.empty(len(slices), rows * size, dtype=torch.float32, device=hidden.device)
        blocks = kept.view(-1, size, rows).mT if _few_on_cpu(hidden) else kept.view(-1, rows, size)
        for part, block, tokens in zip(kept, blocks, slices, strict=True):
            if tokens.stop <= len(self.weight):
                self.logits(hidden, tokens, buffers._replace(logits=part))
            else:
                last = self.logits(hidden, tokens)
                block.fill_(-torch.inf)[:, : last.shape[1]] = last
        return blocks

    def back_through(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of `logits` into that of hidden @ weight + bias, in place."""
        if self.softcap is not None:
            gradient *= 1 - (logits * (self.temperature / self.softcap)).square_()
        if self.scale != self.temperature:
            gradient *= self.scale / self.temperature
        return gradient

    def blocks(self, hidden: Tensor) -> tuple[int, list[slice], Buffers]:
        """Return the tokens of a block, the slices of the vocabulary, and the buffers of a block."""
        on_cpu = hidden.device.type == "cpu"
        tokens, vocabulary = CPU_BLOCK if on_cpu else CUDA_BLOCK
        tokens = max(1, min(tokens, len(hidden)))
        slices = [slice(start, start + vocabulary) for start in range(0, len(self.weight), vocabulary)]
        columns = min(vocabulary, len(self.weight))
        sizes = tokens * columns, columns * self.weight.shape[1] if on_cpu and self.weight.dtype != torch.float32 else 0
        return tokens, slices, Buffers(*(torch.empty(n, dtype=torch.float32, device=hidden.device) for n in sizes))

    @classmethod
    @torch.no_grad()
    def check(cls, model: nn.Module) -> None:
        """Compare this head with the model's own on a few tokens. Raises ConfigError if they differ."""
        embedding, name = model.get_input_embeddings().weight, type(model).__name__
        ids = torch.arange(16, device=embedding.device).unsqueeze(0) % len(embedding)
        linear, head_inputs = model.get_output_embeddings(), []
        body = body_of(model)(input_ids=ids, use_cache=False)
        hidden = getattr(body, "last_hidden_state", None)
        if linear is None or hidden is None or hidden.shape[-1] != linear.weight.shape[1]:
            raise ConfigError(f"{name} has no linear head over its last hidden states: use another model")
        with linear.register_forward_pre_hook(lambda linear, inputs: head_inputs.append(inputs[0])):
            expected = model(input_ids=ids, use_cache=False).logits[0].float()
        head = cls.of(model)
        hidden = hidden[0].to(head.weight)
        # In 16 bit two passes may round differently, and a deep model amplifies that, for some tokens without limit. So
        # the head is compared on its own input of the same pass, and that input with the body's output by the quarter
        # of tokens that differ least.
        same_pass = head_inputs[-1].view_as(hidden).to(head.weight) if head_inputs else hidden
        if (same_pass - hidden * head.scale).norm() < (same_pass - hidden).norm():  # scaled before the linear layer
            same_pass = same_pass / head.scale
        computed = head.logits(same_pass, slice(None)).to(expected.device)
        moved, size = (states.float().norm(dim=1) for states in (same_pass - hidden, hidden))
        between = (moved / size.clamp(min=1e-9)).quantile(0.25).item()
        difference = ((expected - computed).abs().max() / expected.abs().max().clamp(min=1.0)).item()
        # bfloat16 keeps 8 bits: the model's own logits are that coarse.
        most, most_between = (1e-4, 1e-4) if hidden.dtype == torch.float32 else (0.03, 0.3)
        if not (difference <= most and between <= most_between):
            reason = f"does something to its logits that Head does not know (by {max(difference, between):.1e} of them)"
            raise ConfigError(f"{name} {reason}: add it to grpo/model/logprobs.py, or use another model")


class Likeliest:
    """What collects each token's largest logits while blocks of the vocabulary come by."""

    def __init__(self, count: int, known_ids: int):
        self._count, self._known_ids = count, known_ids
        self._so_far: tuple[Tensor, Tensor] | None = None  # the rows' largest logits, and their ids
        self._found: list[tuple[Tensor, Tensor]] = []  # log-probs and ids, of one block of rows after the other

    def add(self, logits: Tensor, block: slice) -> None:
        """Take in the rows' logits of a block of the vocabulary."""
        width = min(logits.shape[1], self._known_ids - block.start)
        if width <= 0:
            return
        values, ids = logits[:, :width].topk(min(self._count, width), dim=1)
        ids += block.start
        if self._so_far is not None:
            values, ids = (torch.cat(parts, dim=1) for parts in zip(self._so_far, (values, ids), strict=True))
            values, places = values.topk(min(self._count, values.shape[1]), dim=1)
            ids = ids.gather(1, places)
        self._so_far = values, ids

    def end_rows(self, normaliser: Tensor) -> None:
        """Keep the rows' log-probs, by the log of the sum of all exponentials, and begin with the next rows."""
        values, ids = self._so_far
        self._found.append((values - normaliser.unsqueeze(1), ids))
        self._so_far = None

    def found(self) -> tuple[Tensor, Tensor]:
        """Return all log-probs and ids, each float32 [T, count]: it has ids exactly below 2^24."""
        logprobs, ids = (torch.cat(parts) for parts in zip(*self._found, strict=True))
        return logprobs, ids.float()


class _Logprobs(torch.autograd.Function):
    """Log-probs of the targets, float32 shaped as these, [T] or [T, n], and entropies [T] or None, from hidden states
    [T, hidden size]. One node of the graph, so that the weight's gradient comes once: ZeRO reduces it each time."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, head: Head, with_entropy: bool, likeliest: Likeliest | None = None):
        tokens, slices, buffers = head.blocks(hidden)
        logprobs, entropies, normalisers, shares = [], [], [], []
        columns = targets if targets.dim() == 2 else targets.unsqueeze(1)
        for rows, row_targets in zip(hidden.split(tokens), columns.split(tokens), strict=True):
            of_target = torch.empty(row_targets.shape, dtype=torch.float32, device=hidden.device)
            parts, mean_logits = [], []
            for block in slices:
                logits = head.logits(rows, block, buffers)
                place, inside = _places(row_targets, block, logits)
                of_target = torch.where(inside, logits.gather(1, place), of_target)
                if likeliest is not None:
                    likeliest.add(logits, block)
                # logsumexp in place: another 16 MB beside the block would leave the cache, and fragment the heap.
                top = logits.amax(1, keepdim=True)
                below = logits.sub_(top)
                if with_entropy:
                    share = below.exp()
                    total = share.sum(1)
                    mean_logits.append(share.mul_(below).sum(1) / total + top.squeeze(1))
                    del share  # or it would stay beside the next block's
                else:
                    total = below.exp_().sum(1)
                parts.append(total.log_() + top.squeeze(1))
            block_sums = torch.stack(parts)
            normalisers.append(normaliser := block_sums.logsumexp(0))
            shares.append(block_sums - normaliser)
            logprobs.append(of_target - normaliser.unsqueeze(1))
            if likeliest is not None:
                likeliest.end_rows(normaliser)
            if with_entropy:
                # A block's mean logit weighs as much as the block's share of the probability.
                entropies.append(normaliser - (torch.exp(shares[-1]) * torch.stack(mean_logits)).sum(0))
        entropy = torch.cat(entropies) if with_entropy else None
        ctx.head = head
        ctx.set_materialize_grads(False)  # an output that no loss uses has None for a gradient, and costs nothing
        # A GPU would wait for the host to learn which rows a block needs.
        kept_shares = torch.cat(shares, dim=1) if hidden.device.type == "cpu" else None
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(normalisers), entropy, kept_shares)
        return torch.cat(logprobs).view(targets.shape), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient, entropy_gradient):
        hidden, weight, bias, targets, normalisers, entropy, shares = ctx.saved_tensors
        head = ctx.head
        targets = targets if targets.dim() == 2 else targets.unsqueeze(1)
        gradient = torch.zeros_like(targets, dtype=torch.float32) if gradient is None else gradient.view_as(targets)
        tokens, slices, buffers = head.blocks(hidden)
        least = -BITS_KEPT[weight.dtype] * math.log(2) - math.log(len(slices))
        of_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), tokens):
            part = slice(start, start + tokens)
            for number, block in enumerate(slices):
                chosen = part
                if shares is not None and entropy_gradient is None:
                    has_target = ((targets[part] >= block.start) & (targets[part] < block.stop)).any(1)
                    chosen = start + ((shares[number, part] > least) | has_target).nonzero()[:, 0]
                rows, row_targets, upstream = hidden[chosen], targets[chosen], gradient[chosen]
                of_all = upstream.sum(1, keepdim=True)  # each target's log-prob has the normaliser
                logits = head.logits(rows, block, buffers)
                slope = logits - normalisers[chosen].unsqueeze(1)
                if entropy_gradient is None:
                    # d logprob / d logits = onehot(target) - p, with p = softmax(logits)
                    slope.exp_().mul_(-of_all)
                else:
                    # d entropy / d logits = -p (log p + entropy)
                    share = slope.exp()
                    of_entropy = entropy_gradient[chosen].unsqueeze(1)
                    slope.add_(entropy[chosen].unsqueeze(1)).mul_(of_entropy).add_(of_all).mul_(share).neg_()
                    del share
                place, inside = _places(row_targets, block, logits)
                slope.scatter_add_(1, place, torch.where(inside, upstream, 0.0))
                slope = head.back_through(slope, logits)
                if of_bias is not None:
                    of_bias[block] += slope.sum(0)
                slope = slope.to(weight.dtype)
                of_hidden[chosen] += _linear_fp32(slope, weight[block].t(), room=buffers.weight)
                if of_weight is not None:
                    of_weight[block].addmm_(slope.t(), rows)
                del slope
        return of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None, None


def _places(targets: Tensor, block: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's column in the block, int64 [n, targets], and whether the block contains it, bool."""
    place = targets - block.start
    width = logits.shape[1]
    return place.clamp(0, width - 1), (place >= 0) & (place < width)


def _few_on_cpu(rows: Tensor) -> bool:
    # Not in float32, where the weight is read in place: a resumed run would have other last bits, by its address.
    return rows.device.type == "cpu" and len(rows) < FEW_ROWS and rows.dtype != torch.float32


def _linear_fp32(rows: Tensor, weight: Tensor, out: Tensor | None = None, room: Tensor | None = None) -> Tensor:
    """Compute rows @ weight.T in float32: rounded to bfloat16, logits move log-probs by up to 0.09. `out` and `room`:
    memory for the result and for the weight, float32, of any size that is enough."""
    shape = len(rows), len(weight)
    if out is not None:
        out = out[: shape[0] * shape[1]]
    if rows.device.type != "cpu":
        precision = {} if rows.dtype == torch.float32 else {"out_dtype": torch.float32}
        return torch.mm(rows, weight.t(), out=None if out is None else out.view(shape), **precision)
    if weight.dtype != torch.float32 and room is not None:
        room = room[: weight.numel()]
        as_it_lies = room.view(weight.shape) if weight.is_contiguous() else room.view(weight.shape[::-1]).t()
        weight = as_it_lies.copy_(weight)
    if _few_on_cpu(rows):
        return torch.mm(weight.float(), rows.float().t(), out=None if out is None else out.view(shape[::-1])).t()
    return torch.mm(rows.float(), weight.float().t(), out=None if out is None else out.view(shape))
