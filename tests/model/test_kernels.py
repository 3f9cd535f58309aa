"""The kernels of a drawn token, run by Triton's interpreter, beside float64 and beside the pass that is written out."""

import json
import logging
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ENVIRONMENT, REPOSITORY
from models import CONFIGS, SMALL, build, by_hand, example, vectors_at_random
from torch import Tensor, nn
from transformers import LlamaConfig

from grpo.model.shared_cache import Scoring, Shape, SharedCache, Step
from grpo.model.token_pass import cannot_fuse
from grpo.model.tree_attention import switch_on
from grpo.sampling import self_check
from grpo.sampling.continuous import ContinuousSampler
from grpo.sampling.self_check import make_sampler

pytest.importorskip("triton")

from grpo.kernels import drawing, fused_pass
from grpo.kernels.attention import PART, HeadNorms, attend, rotate_and_keep
from grpo.kernels.fused_pass import add_norm, gated, project

DTYPES = torch.float32, torch.bfloat16
# The interpreter cuts bits off where a card rounds to bfloat16: up to one in the last place for each rounding.
NEAR = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
EXAMPLES = [example([5, 6, 7]), example([9, 10, 11, 12, 13, 14, 3, 4, 8, 9])]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a card"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of NaN and of what a mask leaves out
]


def assert_near(computed: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = expected.abs().max().clamp(min=1.0)
    assert computed.shape == expected.shape
    assert ((computed.double() - expected).abs().max() / scale).item() < NEAR[dtype]


def rms(states: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    states = states.double()
    return states * (states.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size", "columns", "kept"), [(1, 24, 40, 8), (5, 150, 64, 32), (130, 32, 33, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_norms_and_products_are_those_of_float64(rows, size, columns, kept, bias, dtype):
    torch.manual_seed(rows)
    states, more, weight = (torch.randn(shape).to(dtype) for shape in ((rows, size), (rows, size), (size,)))
    summed = states.double() + more.double()
    assert_near(add_norm(states.clone(), None, weight, 1e-6), rms(states, weight), dtype)
    normed = add_norm(states, more, weight, 1e-6)
    assert_near(states, summed, dtype)
    assert_near(normed, rms(states, weight), dtype)
    query, key, value, gate, up = (
        nn.Linear(size, out, bias=bias, dtype=dtype) for out in (columns, kept, kept, columns, columns)
    )
    exact = [F.linear(states.double(), of.weight.double(), of.bias.double() if bias else None) for of in (query, key)]
    with torch.no_grad():
        projected = project(states, query, key, value)
        assert_near(projected[0], exact[0], dtype)
        assert_near(projected[1], exact[1], dtype)
        assert_near(projected[2], value.double()(states.double()), dtype)
        wanted = F.silu(gate.double()(states.double())) * up.double()(states.double())
        assert_near(gated(states, gate.to(dtype), up.to(dtype)), wanted, dtype)


class Cells:
    """A cache with prompts and rows of these lengths, NaN wherever no token is, and the same by rows in float64."""

    def __init__(self, prompts: list[int], rows: list[tuple[int, int]], *, heads: int, size: int, dtype: torch.dtype):
        """`rows`: the slot and the place of each."""
        torch.manual_seed(len(rows))
        self.heads, copies, longest = heads, 5, max(prompts)
        own = max(place for _, place in rows) + 3
        self.cache = SharedCache(
            rows=len(rows), slots=len(prompts), copies=copies, longest_prompt=longest + 2, longest_completion=own
        )
        self.cache.make_room(own, len(rows))
        self.cache.fill([*range(len(prompts))], prompts)
        self.cache.keep(0, *torch.randn(2, 1, heads, sum(prompts), size).to(dtype))
        kept = self.cache.of_layer(0)
        for states in kept[:2]:
            for slot, length in enumerate(prompts):
                states.unflatten(0, (-1, heads))[slot, :, length:] = torch.nan
        for states in kept[2:]:
            by_row = states.unflatten(0, (-1, heads))
            for row, (_, place) in enumerate(rows):
                by_row[row, :, :place] = torch.randn(heads, place, size).to(dtype)
                by_row[row, :, place:] = torch.nan
        numbers, rows_of = [0] * len(prompts), torch.zeros(len(prompts), copies, dtype=torch.int64)
        cells = []
        for row, (slot, _) in enumerate(rows):
            rows_of[slot, numbers[slot]] = row
            cells.append((slot, numbers[slot]))
            numbers[slot] += 1
        self.rows, self.prompts = rows, prompts
        self.cache.step(
            Step(
                shape=Shape(rows=len(rows), slots=len(prompts), prompt=self.cache.prompt_room, own=self.cache.room),
                cells=torch.tensor(cells).T.contiguous(),
                prompts=torch.tensor([prompts[slot] for slot, _ in rows]),
                places=torch.tensor([place for _, place in rows]),
                rows_of=rows_of,
            )
        )

    def expected(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attend row by row and head by head, in float64."""
        kept, out = [states.unflatten(0, (-1, self.heads)).double() for states in self.cache.of_layer(0)], []
        repeat = query.shape[1] // self.heads
        for row, (slot, place) in enumerate(self.rows):
            for head in range(query.shape[1]):
                of_prompt = (slot, head // repeat, slice(self.prompts[slot]))
                of_row = (row, head // repeat, slice(place + 1))
                keys, values = (torch.cat([kept[of][of_prompt], kept[of + 2][of_row]]) for of in (0, 1))
                scores = keys @ query[row, head].double() * scoring.scaling
                if scoring.softcap is not None:
                    scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                if scoring.window is not None:
                    scores[: max(0, len(scores) - scoring.window)] = -torch.inf
                out.append(scores.softmax(dim=0) @ values)
        return torch.stack(out).view(len(query), -1)


# Prompts and rows in one part, at the ends of parts, and in several; rows that are alone, and more than a tile has.
LAYOUTS = {
    "ragged": ([3, 1, 7], [(0, 2), (2, 0), (0, 5), (1, 1), (0, 0), (2, 4)]),
    "parts": ([PART, PART + 1, 2], [(0, PART - 1), (1, PART), (2, 1), (1, 3)]),
    "one row": ([4], [(0, 0)]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "heads", "repeat", "size", "scoring"),
    [
        ("ragged", 2, 2, 8, Scoring(0.4)),
        ("ragged", 1, 3, 24, Scoring(0.2, softcap=1.5)),
        ("ragged", 2, 1, 16, Scoring(0.3, window=4)),
        ("ragged", 1, 20, 8, Scoring(0.3)),
        ("parts", 1, 2, 16, Scoring(0.3)),
        ("parts", 1, 1, 16, Scoring(0.3, window=PART - 3)),
        ("one row", 2, 2, 32, Scoring(0.2, softcap=0.5, window=2)),
    ],
)
def test_attention_is_that_of_float64_and_does_not_read_what_no_row_sees(layout, heads, repeat, size, scoring, dtype):
    cells = Cells(*LAYOUTS[layout], heads=heads, size=size, dtype=dtype)
    rows = len(cells.rows)
    query, key, value = (torch.randn(rows, count * size).to(dtype) for count in (heads * repeat, heads, heads))
    angle = torch.rand(rows, 1, size // 2) * 6
    cosine, sine = torch.cat([angle.cos()] * 2, dim=2), torch.cat([-angle.sin(), angle.sin()], dim=2)
    norms = HeadNorms(*torch.randn(2, size).to(dtype), 1e-6) if size > 8 else None
    rotated = rotate_and_keep(cells.cache, 0, (query, key, value), torch.stack([cosine, sine], dim=1).to(dtype), norms)
    kept = cells.cache.of_layer(0)
    for states, computed, weight in ((query, rotated, norms and norms.query), (key, None, norms and norms.key)):
        states = states.view(rows, -1, size)
        states = states.double() if weight is None else rms(states, weight)
        left, right = states.chunk(2, dim=2)
        exact = states * cosine.double() + torch.cat([right, left], dim=2) * sine.double()
        if computed is None:
            places = [place for _, place in cells.rows]
            computed = kept.own_keys.unflatten(0, (-1, heads))[torch.arange(rows), :, places]
        assert_near(computed, exact, dtype)
    assert_near(attend(cells.cache, 0, rotated, scoring), cells.expected(rotated, scoring), dtype)


@pytest.mark.rare
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_many_rows_and_long_prompts_is_that_of_float64(dtype):
    prompts = [700, 3, 256, 255, 513, 1, 90, 64, 17, 300, 31, 5, 128]
    rows = [(row % len(prompts), 37 * row % 530) for row in range(64)]
    cells = Cells(prompts, rows, heads=2, size=64, dtype=dtype)
    for states in cells.cache.of_layer(0)[2:]:
        states.nan_to_num_(0.5)
    query = torch.randn(len(rows), 6, 64).to(dtype)
    for scoring in (Scoring(0.125), Scoring(0.125, softcap=20.0, window=300)):
        assert_near(attend(cells.cache, 0, query, scoring), cells.expected(query, scoring), dtype)


def test_a_row_that_waits_disturbs_no_other():
    """Its cell names another row, as that of a free row does."""
    cells = Cells(*LAYOUTS["ragged"], heads=2, size=8, dtype=torch.float32)
    query = torch.randn(len(cells.rows), 4, 8)
    for states in cells.cache.of_layer(0)[2:]:
        states.nan_to_num_(0.0)
    before = attend(cells.cache, 0, query, Scoring(0.4))
    slot, copy = cells.cache.now.cells[:, 2].tolist()
    cells.cache.now.rows_of[slot, copy] = 0
    after = attend(cells.cache, 0, query, Scoring(0.4))
    drawing = [0, 1, 3, 4, 5]
    assert torch.equal(before[drawing], after[drawing])
    assert after.isfinite().all()


@pytest.mark.parametrize("vocabulary", [1, 1000, drawing.BLOCK, 5 * drawing.BLOCK + 3])
def test_a_token_is_the_inverse_of_the_distribution_function_of_float64(vocabulary):
    torch.manual_seed(vocabulary)
    logits = torch.randn(7, vocabulary) * 3
    logits[3, : vocabulary // 2] = -torch.inf
    logits[4, vocabulary // 2 + 1 :] = -torch.inf
    numbers = torch.rand(7, dtype=torch.float64)
    numbers[0], numbers[1], numbers[3], numbers[4] = 0.0, 1 - 2**-53, 0.0, 1 - 2**-53
    tokens, logprobs = drawing.draw(logits, numbers)
    shares = logits.double().softmax(dim=1)
    ends = shares.cumsum(dim=1)
    expected = (ends / ends[:, -1:] <= numbers.unsqueeze(1)).sum(dim=1).clamp(max=vocabulary - 1)
    # With the largest number it is the last token that has a probability, whatever rounding does to the sum.
    expected[1], expected[4] = shares[1].nonzero().max(), shares[4].nonzero().max()
    assert tokens.tolist() == expected.tolist()
    exact = logits.double().log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs.double(), exact, atol=1e-5)
    logits[2, [vocabulary // 3, vocabulary - 1]] = 50.0
    tokens, _ = drawing.draw(logits, None)
    assert tokens.tolist() == logits.argmax(dim=1).tolist()
    assert tokens[2] == vocabulary // 3
    logits[5, vocabulary // 2] = torch.nan
    for given in (numbers, None):
        tokens, logprobs = drawing.draw(logits, given)
        assert logprobs.isnan().nonzero().tolist() == [[5]]
        assert 0 <= tokens[5] < vocabulary


def sampler(model, tokenizer, longest: int = 3, **options) -> ContinuousSampler:
    switch_on(model, "segments")
    return ContinuousSampler(model, tokenizer, [*range(20, 26)], longest, rows=3, **options)


def drawn(of: ContinuousSampler) -> tuple[list[list[int]], Tensor]:
    """Draw two completions of each prompt at a temperature of 0.9: their ids, and the log-probs of all."""
    rollouts = [rollout for group in of.sample(EXAMPLES, 2, 0.9, seed=2) for rollout in group]
    logprobs = [value for rollout in rollouts for value in rollout.sampling_logprobs]
    return [rollout.completion_ids for rollout in rollouts], torch.tensor(logprobs)


MODELS = {name: CONFIGS[name] for name in ("mistral, sliding window", "qwen2", "qwen3")} | {
    "llama with biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)
}


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *[("qwen2", None), ("qwen2", ["k_proj", "up_proj"]), ("qwen3", None)],  # an adapter does its own work
        pytest.param("mistral, sliding window", None, marks=pytest.mark.rare),
        pytest.param("llama with biases", None, marks=pytest.mark.rare),
    ],
)
def test_it_draws_what_the_pass_that_is_written_out_draws(name, targets, tokenizer):
    model = vectors_at_random(build(MODELS[name]))
    if targets is not None:
        peft = pytest.importorskip("peft")
        model.add_adapter(peft.LoraConfig(target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"))
    ids, logprobs = drawn(sampler(model, tokenizer))
    fused_ids, fused_logprobs = drawn(sampler(model, tokenizer, fused=True))
    assert fused_ids == ids
    assert torch.allclose(fused_logprobs, logprobs, atol=2e-4)
    sequences = [(EXAMPLES[number // 2].prompt_ids, completion) for number, completion in enumerate(ids)]
    exact, _ = by_hand(model.double(), sequences, 0.9)
    assert torch.allclose(fused_logprobs.double(), exact, atol=2e-4)


def test_kernels_are_refused_by_name():
    assert cannot_fuse(build(CONFIGS["qwen2"]).model) == ""
    assert "Llama" in cannot_fuse(build(CONFIGS["cohere, scaled"]).model)
    model = build(CONFIGS["qwen3"]).to(torch.bfloat16)
    model.model.norm.float()
    assert "norms have another dtype" in cannot_fuse(model.model)


def wrong(fused_attend, fails: bool):
    def attend(*arguments) -> Tensor:
        if fails:
            raise RuntimeError("out of resource: shared memory, Required: 163840, Hardware limit: 101376")
        return fused_attend(*arguments).flip(1)

    return attend


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("right", torch.float32), ("right", torch.bfloat16), ("wrong", torch.bfloat16), ("not built", torch.float32)],
)
def test_kernels_that_are_wrong_or_do_not_build_are_not_used(kernels, dtype, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(self_check, "runs_kernels", lambda device: True)
    if kernels != "right":
        monkeypatch.setattr(fused_pass, "attend", wrong(fused_pass.attend, fails=kernels == "not built"))
    model = vectors_at_random(build(CONFIGS["qwen2"])).to(dtype)
    switch_on(model, "segments")
    with caplog.at_level(logging.INFO):
        chosen = make_sampler(model, tokenizer, 3, packs=True)
    lines = [line for line in caplog.messages if "fused" in line]
    if kernels == "right":
        assert chosen.fused
        assert lines == []
        return
    assert not chosen.fused
    (line,) = lines
    assert line.startswith("sampling goes a slower way, without fused kernels: Qwen2ForCausalLM")
    assert ("Hardware limit" in line) == (kernels == "not built")
    off = make_sampler(model, tokenizer, 3, packs=True, fused_kernels=False)
    assert len([line for line in caplog.messages if "fused" in line]) == 1
    assert drawn(chosen)[0] == drawn(off)[0]


@pytest.mark.rare
def test_kernels_build_for_cards_that_are_not_here(tmp_path):
    """Each fits the shared memory of a consumer card, 99 KiB, and products load 16 bytes at a time, while they add."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, REPOSITORY / "tests/compiled_kernels.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["card"] for row in built} == {"A100", "RTX 4090", "H100"}
    names = {"_add_norm", "_project", "_gated", "_rotate_and_keep", "_attend", "_join", "_reduce", "_choose"}
    assert {row["kernel"] for row in built} == names
    assert max(row["shared"] for row in built) <= 99 * 1024
    assert all(row["copies of 16 bytes"] for row in built if row["kernel"] in ("_project", "_gated", "_attend"))
