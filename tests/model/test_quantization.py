"""QLoRA: an adapter on weights in 4 bits, what it computes, what it is held against, and what is saved of it."""

import shutil

import pytest
import torch
from adapters import (
    CPU,
    by_hand,
    copied,
    exact,
    move,
    policy,
    reference_scores,
    scores,
    snapshot,
    trained,
    trainer,
    write_adapter,
)
from rounding import FEW_BITS, FORMULA, NETWORK, assert_rounded
from trainer_runs import equal, finish, lines, options, timeless, weights
from transformers import AutoModelForCausalLM

from grpo.client.reference import check_reference
from grpo.client.server_errors import ServerError
from grpo.config.errors import ConfigError
from grpo.config.sampling_settings import SharedConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig
from grpo.model.activations import checkpoint_activations
from grpo.model.fingerprint import describe
from grpo.model.load import load_model, load_reference
from grpo.model.lora import LocalReference, base_weights, unpacked
from grpo.model.trial import make_batcher
from grpo.run.folder import save_model
from grpo.sampling.self_check import make_sampler
from grpo.trainer.deepspeed_engine import make_optimizer

pytest.importorskip("peft")
pytest.importorskip("accelerate")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

ALL = ["--lora_target_modules", "all-linear"]
KINDS = {"LoRA": [], "DoRA": ["--use_dora"]}
kinds = pytest.mark.parametrize("kind", KINDS)
# NormalFloat's 16 values: Dettmers et al. 2023, arXiv:2305.14314, appendix E.
BELOW = -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334
MIDDLE = -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224
NF4 = torch.tensor([*BELOW, *MIDDLE, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])


def quantized(*words, model):
    return policy("--quantization", "4bit", *words, model=model)


def plain_copy(model) -> AutoModelForCausalLM:
    """The base under an adapter as a model in 32 bits, its packed weights unpacked."""
    plain = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32)
    plain.load_state_dict(base_weights(model), strict=False)
    return plain


def test_weights_are_those_of_the_qlora_paper(model_folder):
    """Blocks of 64 by their largest number, which itself is kept in 8 bits: so it is near, and the same for a block."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = load_model(SharedConfig(model_name_or_path=str(model_folder), quantization="4bit"), CPU)
    packed = {name for name, weight in model.named_parameters() if weight.dtype == torch.uint8}
    projections = {*("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}
    assert {name.split(".")[-2] for name in packed} == projections
    for name, weight in model.named_parameters():
        before, now = base.get_parameter(name).detach(), unpacked(weight)
        if name not in packed:
            assert torch.equal(now, before)
            continue
        assert now.shape == before.shape and now.dtype == torch.float32
        blocks, largest = before.view(-1, 64), before.view(-1, 64).abs().amax(dim=1, keepdim=True)
        nearest = NF4[(blocks / largest).unsqueeze(-1).sub(NF4).abs().argmin(-1)]
        scale = now.view(-1, 64).abs().amax(dim=1, keepdim=True)
        torch.testing.assert_close(now.view(-1, 64), nearest * scale)
        assert ((scale / largest - 1).abs() < 0.05).all()


@kinds
def test_gradients_are_those_on_the_unpacked_weights(model_folder, kind, tmp_path):
    """Also after passes without a gradient, which pack the weights anew on some CPUs; checkpointing on."""
    adapter = write_adapter(tmp_path / "adapter", model_folder, r=4, lora_alpha=6, use_dora=kind == "DoRA")
    model, began_with_adapter = quantized(model=adapter)
    assert began_with_adapter
    batcher = make_batcher(model, 0)
    with torch.no_grad():
        before = scores(model, batcher)
    checkpoint_activations(model)
    parameters = trained(model)
    now = scores(model, batcher)
    assert torch.equal(now.detach(), before)
    slopes = torch.autograd.grad(now.sum(), [*parameters.values()])

    plain = plain_copy(model)
    plain.save_pretrained(tmp_path / "plain")
    assert_rounded(before, exact(by_hand(tmp_path / "plain", adapter)), FEW_BITS)
    other, _ = policy(model=copied(adapter, tmp_path / "other", base_model_name_or_path=str(tmp_path / "plain")))
    expected = torch.autograd.grad(exact(other).float().sum(), [*trained(other).values()])
    for name, slope, known in zip(parameters, slopes, expected, strict=True):
        assert slope.abs().max() > 0, name
        assert_rounded(slope, known, FEW_BITS)


@kinds
def test_the_kl_is_0_at_first_and_the_base_is_the_reference(model_folder, tokenizer, kind):
    model, began_with_adapter = quantized(*ALL, *KINDS[kind], model=model_folder)
    own, batcher = LocalReference(model, began_with_adapter), make_batcher(model, 0)
    assert batcher.packs
    make_sampler(model, tokenizer, 8)  # raises where the log-probs that are drawn with are not those of the loss
    served = load_reference(ServerConfig(model_name_or_path=str(model_folder), quantization="4bit"), CPU)
    with torch.no_grad():
        reference = scores(served, make_batcher(served, 0))
        now = scores(model, batcher)
        # DoRA's (m / norm - 1) x rounds.
        assert_rounded(now, reference, NETWORK if kind == "DoRA" else 0)
        move(model)
        assert (scores(model, batcher) - now).abs().max() > 0.01
    assert torch.equal(torch.cat(reference_scores(own, model, batcher)), reference)


@kinds
def test_what_is_saved_is_the_policy_and_the_run_goes_on_as_if_nothing_was(model_folder, tokenizer, kind, tmp_path):
    model, _ = quantized("--lora_target_modules", "q_proj", "down_proj", *KINDS[kind], model=model_folder)
    move(model)
    with torch.no_grad():
        now = scores(model)
    before = snapshot(model)
    save_model(model, tokenizer, tmp_path / "merged", TrainerConfig(use_peft=True, merge_on_save=True))
    save_model(model, tokenizer, tmp_path / "adapter", TrainerConfig())
    assert equal(before, snapshot(model))

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert not hasattr(plain.config, "quantization_config") and not hasattr(plain, "peft_config")
    assert_rounded(exact(plain), now, FEW_BITS)
    again, began_with_adapter = quantized(model=tmp_path / "adapter")
    assert began_with_adapter
    with torch.no_grad():
        assert torch.equal(scores(again), now)


def test_policy_and_server_agree_on_what_quantized_weights_are(model_folder, tokenizer, tmp_path):
    """Weights in 16 bits, as models are: then a server in bfloat16 has the very ones of a policy in float32."""
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def served(quantization, dtype="float32"):
        config = ServerConfig(model_name_or_path=str(tmp_path), quantization=quantization, dtype=dtype)
        return describe(load_reference(config, CPU), tokenizer, "x")

    config = trainer("--quantization=4bit", "--max_completion_length=24", "--max_prompt_length=9", model=tmp_path)
    own = describe(load_model(config, CPU), tokenizer, "x")
    assert own.quantization == "4bit"
    check_reference(config, own, served("4bit"))
    assert served("4bit", "bfloat16").fingerprint == own.fingerprint
    for quantization in ("none", "8bit"):
        other = served(quantization)
        assert other.quantization == quantization and other.fingerprint != own.fingerprint
        said = f"with quantization {quantization}, .*: restart it with --quantization 4bit"
        with pytest.raises(ServerError, match=said):
            check_reference(config, own, other)


def test_weights_that_come_quantized_take_an_adapter_and_no_other_training(model_folder, tokenizer, tmp_path):
    config = SharedConfig(model_name_or_path=str(model_folder), quantization="4bit")
    load_model(config, CPU).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="are quantized already: use none, or name the model that they were made fr"):
        quantized(model=tmp_path)
    model, _ = policy(model=tmp_path)
    assert describe(model, tokenizer, "x").quantization == "4bit" and trained(model)
    whole = TrainerConfig(model_name_or_path=str(tmp_path))
    with pytest.raises(ConfigError, match="its weights are quantized, so that they cannot be trained: add use_peft"):
        make_optimizer(load_model(whole, CPU), whole)


@pytest.mark.slow
def test_two_ranks_go_on_as_if_nothing_was(model_folder, data_folder, letters, tmp_path, few):
    """Without a server: the base is loaded and quantized again, the checkpoint has the adapter alone."""
    changes = dict(quantization="4bit", use_peft=None, ref="adapter_off", lora_target_modules="all-linear")
    changes |= dict(save_steps=2, eval_steps=0, learning_rate=1e-2, gradient_checkpointing="true")
    run = tmp_path / "run"
    output = finish(2, [*options(model_folder, data_folder, run, **changes), *letters])
    assert "ref is adapter_off: no reference server" in output
    rows = lines(run / "metrics.jsonl")
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] > 1e-6
    assert all(row["grad_norm"] > 0 for row in rows)
    saved = torch.load(run / "checkpoint-2/engine/mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert saved and all("lora_" in name for name in saved)

    for ranks in few([2, 1], 1):
        again = tmp_path / f"again on {ranks}"
        shutil.copytree(run, again, ignore=shutil.ignore_patterns("checkpoint-3", "model"))
        words = [*options(model_folder, data_folder, again, **changes), "--resume_from_checkpoint", "last"]
        output = finish(ranks, [*words, *letters])
        assert "goes on after step 2" in output
        here, there = weights(again / "model"), weights(run / "model")
        for name in there:
            assert_rounded(here[name], there[name], 0 if ranks == 2 else FORMULA)
        assert ranks == 1 or timeless(again) == timeless(run)
