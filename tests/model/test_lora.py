"""LoRA, rsLoRA and DoRA: what they compute, by their papers' formulas; the reference without a server; what is saved.

Adapters to begin with are written by peft alone, as a fine-tuning tool writes them.
"""

import json
import os
import warnings

import pytest
import torch
from adapters import (
    CPU,
    PAIRS,
    TARGETS,
    by_hand,
    copied,
    exact,
    move,
    peft,
    policy,
    reference_scores,
    scores,
    snapshot,
    trained,
    trainer,
    write_adapter,
)
from conftest import running_server
from models import distance, example
from rounding import FORMULA, NETWORK, NO_KL, assert_rounded
from safetensors.torch import load_file
from trainer_runs import equal, lines, options, plain_python
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.sampling_settings import SharedConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig
from grpo.model.activations import checkpoint_activations
from grpo.model.fingerprint import describe
from grpo.model.load import load_model, load_reference, load_tokenizer
from grpo.model.lora import LocalReference, check_adapter, train_adapter
from grpo.model.trial import make_batcher
from grpo.run.folder import save_model
from grpo.sampling.generate import LocalSampler

# Of peft's own PeftModel, which only these tests use.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
KINDS = {"LoRA": {}, "rsLoRA": {"use_rslora": True}, "DoRA": {"use_dora": True}}
FLAGS = {kind: [f"--{name}" for name in settings] for kind, settings in KINDS.items()}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def adapters(model_folder, tmp_path_factory):
    return {
        kind: write_adapter(tmp_path_factory.mktemp("adapters") / kind, model_folder, r=4, lora_alpha=6, **settings)
        for kind, settings in KINDS.items()
    }


@kinds
def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(model_folder, kind):
    base = load_model(SharedConfig(model_name_or_path=str(model_folder)), CPU)
    words = [*FLAGS[kind], "--lora_target_modules", *TARGETS]
    made, began_with_adapter = policy(*words, model=model_folder)
    assert not began_with_adapter
    assert_rounded(scores(made), scores(base), NETWORK if kind == "DoRA" else 0)
    layers = len(TARGETS) * base.config.num_hidden_layers
    names = trained(made)
    assert len(names) == layers * (3 if kind == "DoRA" else 2) and all(".lora_" in name for name in names)
    assert equal(trained(made), trained(policy(*words, model=model_folder)[0]))  # on every rank the same
    assert not equal(trained(made), trained(policy(*words, "--seed", "1", model=model_folder)[0]))


def test_trls_names_and_defaults(model_folder):
    made, _ = policy(model=model_folder)
    config = made.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.0)
    assert set(config.target_modules) == {"q_proj", "v_proj"}  # peft's choice for Qwen2
    every, _ = policy("--lora_target_modules", "all-linear", "--lora_r", "2", model=model_folder)
    assert len(trained(every)) == 2 * 7 * made.config.num_hidden_layers  # not the head
    assert {min(weight.shape) for weight in trained(every).values()} == {2}


@kinds
def test_an_adapter_computes_what_its_paper_says(model_folder, adapters, kind):
    model = load_model(SharedConfig(model_name_or_path=str(adapters[kind])), CPU)
    expected = exact(by_hand(model_folder, adapters[kind]))
    batcher = make_batcher(model, 0)
    assert batcher.packs
    assert_rounded(scores(model, batcher), expected)
    base = exact(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64))
    assert (expected - base).abs().mean() > 0.01
    others = [exact(by_hand(model_folder, adapters[other])) for other in KINDS if other != kind]
    assert all((expected - other).abs().mean() > 0.01 for other in others)


@pytest.mark.parametrize("checkpointing", [False, True])
@kinds
def test_gradients_are_those_of_plain_autograd(model_folder, adapters, kind, checkpointing):
    """Ours in fp32, packed, through our head; against peft's own model in float64, all logits, each sequence alone."""
    model, began_with_adapter = policy(model=adapters[kind])
    assert began_with_adapter
    if checkpointing:
        checkpoint_activations(model)
    weights = torch.randn(sum(len(rest) for _, rest in PAIRS), generator=torch.Generator().manual_seed(3))
    (scores(model, temperature=0.8) * weights).sum().backward()
    assert all(weight.grad is None for weight in model.parameters() if not weight.requires_grad)

    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    plain = peft.PeftModel.from_pretrained(base, adapters[kind], is_trainable=True).double().eval()
    (exact(plain, temperature=0.8) * weights.double()).sum().backward()
    expected = {name.removeprefix("base_model.model."): weight.grad for name, weight in trained(plain).items()}
    ours = {name: weight.grad for name, weight in trained(model).items()}
    assert ours.keys() == expected.keys()
    assert_rounded(distance(ours, expected), 0.0)


@kinds
def test_the_reference_is_the_base_while_a_new_adapter_moves(model_folder, kind):
    base = scores(load_model(SharedConfig(model_name_or_path=str(model_folder)), CPU), temperature=0.9)
    model, _ = policy(*FLAGS[kind], model=model_folder)
    reference, batcher = LocalReference(model, copies=False), make_batcher(model, 0)
    move(model)
    before, places = snapshot(model), [weight.data_ptr() for weight in trained(model).values()]
    moved = scores(model, batcher, temperature=0.9)
    answers = reference_scores(reference, model, batcher, temperature=0.9)
    assert [len(answer) for answer in answers] == [len(rest) for _, rest in PAIRS]
    assert torch.equal(torch.cat(answers), base)
    for budget in (1, 40):
        cut = reference_scores(reference, model, batcher, temperature=0.9, budget=budget)
        assert_rounded(torch.cat(cut), base)
    # And nothing is left of it, also after an error.
    with pytest.raises(IndexError), reference.in_place():
        raise IndexError
    assert (moved - base).abs().mean() > 0.01 and torch.equal(scores(model, batcher, temperature=0.9), moved)
    assert equal(before, snapshot(model))
    assert places == [weight.data_ptr() for weight in trained(model).values()]


@kinds
def test_the_reference_is_the_adapter_that_a_run_began_with(adapters, kind):
    model, began_with_adapter = policy(model=adapters[kind])
    reference, batcher = LocalReference(model, began_with_adapter), make_batcher(model, 0)
    start = scores(model, batcher)
    move(model)
    moved = scores(model, batcher)
    assert torch.equal(torch.cat(reference_scores(reference, model, batcher)), start)
    assert (moved - start).abs().mean() > 0.01 and torch.equal(scores(model, batcher), moved)
    assert len(trained(model)) > 0


def test_sampling_with_dora_computes_norms_once_and_keeps_none(model_folder, adapters, tokenizer, monkeypatch):
    examples = [example(prompt) for prompt, _ in PAIRS[::4]]
    model, _ = policy(model=adapters["DoRA"])
    plain = by_hand(model_folder, adapters["DoRA"], torch.float32)
    by_tokens = LocalSampler(plain, tokenizer, [tokenizer.eos_token_id], 12).greedy(examples)
    sampler = LocalSampler(model, tokenizer, [tokenizer.eos_token_id], 12)
    layer = peft.tuners.lora.dora.DoraLinearLayer
    norms, plain_norm = [], layer.get_weight_norm
    monkeypatch.setattr(layer, "get_weight_norm", lambda *words, **more: norms.append(1) or plain_norm(*words, **more))
    drawn = sampler.greedy(examples)
    assert [rollout.completion_ids for rollout in drawn] == [rollout.completion_ids for rollout in by_tokens]
    assert len(norms) == len(TARGETS) * model.config.num_hidden_layers
    move(model)
    moved = scores(model)
    sampler.greedy(examples)
    assert torch.equal(scores(model), moved)
    monkeypatch.undo()
    fresh = load_model(SharedConfig(model_name_or_path=str(adapters["DoRA"])), CPU)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(scores(fresh), moved)


@kinds
def test_a_saved_adapter_goes_on_where_it_was(model_folder, adapters, tokenizer, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(model_folder.parent)
    base = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    for number, start in enumerate((model_folder.name, str(adapters[kind]))):  # a relative path is made absolute
        model, _ = policy(*FLAGS[kind], model=start)
        move(model)
        folder = tmp_path / str(number)
        save_model(model, tokenizer, folder, TrainerConfig())
        names = {path.name for path in folder.iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json"} <= names
        assert not {"config.json", "model.safetensors"} & names
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(model_folder)
        assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
        frozen = {name.replace(".base_layer", ""): w for name, w in model.state_dict().items() if ".lora_" not in name}
        assert equal(frozen, base)
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir(tmp_path)
            again, began_with_adapter = policy(model=folder)
            assert began_with_adapter and equal(snapshot(again), snapshot(model))
            assert torch.equal(scores(again), scores(model))
            stranger = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
            assert_rounded(exact(stranger), scores(model))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@kinds
def test_a_merged_model_is_plain_and_the_run_goes_on(model_folder, adapters, tokenizer, tmp_path, kind, dtype):
    model, _ = policy("--dtype", dtype, model=adapters[kind])
    before, expected = snapshot(model), scores(model)
    save_model(model, tokenizer, tmp_path / "model", TrainerConfig(use_peft=True, merge_on_save=True))
    assert equal(snapshot(model), before) and torch.equal(scores(model), expected)
    assert not (tmp_path / "model/adapter_config.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    original = AutoModelForCausalLM.from_pretrained(model_folder)
    same = {"_name_or_path": None, "dtype": None}
    assert plain.state_dict().keys() == original.state_dict().keys()
    assert plain.config.to_dict() | same == original.config.to_dict() | same
    assert plain.generation_config.to_dict() == original.generation_config.to_dict()
    byhand = by_hand(model_folder, adapters[kind]).state_dict()
    for name, weight in plain.state_dict().items():
        assert weight.dtype == getattr(torch, dtype)
        assert_rounded(weight, byhand[name], FORMULA, weight.dtype)
    AutoTokenizer.from_pretrained(tmp_path / "model")


def test_the_tokenizer_is_the_adapters_own_or_its_bases(model_folder, tokenizer, tmp_path):
    folder = write_adapter(tmp_path / "adapter", model_folder, r=2)
    assert not (folder / "tokenizer_config.json").exists()
    config = SharedConfig(model_name_or_path=str(folder))
    assert load_tokenizer(config).get_vocab() == tokenizer.get_vocab()
    reference = AutoTokenizer.from_pretrained(model_folder)
    reference.add_tokens(["<own>"])
    reference.save_pretrained(folder)
    assert "<own>" in load_tokenizer(config).get_vocab()


def fingerprint(model, tokenizer) -> str:
    return describe(model, tokenizer, "x").fingerprint


def test_policy_and_server_agree_on_what_an_adapter_is(model_folder, adapters, tokenizer, tmp_path):
    def served(folder) -> str:
        return fingerprint(load_reference(ServerConfig(model_name_or_path=str(folder)), CPU), tokenizer)

    known = [served(folder) for folder in (model_folder, *adapters.values())]
    assert len(set(known)) == len(known)
    for folder, there in zip((model_folder, *adapters.values()), known, strict=True):
        assert fingerprint(load_model(SharedConfig(model_name_or_path=str(folder)), CPU), tokenizer) == there
    louder = copied(adapters["LoRA"], tmp_path / "louder", lora_alpha=7)
    assert served(louder) not in known


@pytest.mark.parametrize(
    "settings, reason",
    [
        (dict(modules_to_save=["norm"]), r"has modules_to_save=\['norm'\], which is more than LoRA"),
        (dict(bias="lora_only"), "has bias='lora_only'"),
        (dict(init_lora_weights="pissa"), "has init_lora_weights='pissa'"),
        (dict(trainable_token_indices=[1, 2]), "has trainable_token_indices"),
        (dict(target_modules=["lm_head"]), "puts an adapter on the embeddings or the head"),
    ],
)
def test_other_adapters_are_refused(model_folder, tmp_path, settings, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about what is tied
        folder = write_adapter(tmp_path / "adapter", model_folder, **settings)
        with pytest.raises(ConfigError, match=f"model_name_or_path='{folder}': .*{reason}"):
            load_model(SharedConfig(model_name_or_path=str(folder)), CPU)


def test_an_adapter_of_another_shape_or_another_kind_is_refused(model_folder, adapters, tmp_path):
    cut = copied(adapters["LoRA"], tmp_path / "cut")
    os.truncate(f"{cut}/adapter_model.safetensors", 100)
    cases = {
        "its weights do not fit its base": {"r": 8},
        "name different layers": {"target_modules": ["q_proj"]},
        "does not say which model it belongs to": {"base_model_name_or_path": None},
        "cannot be loaded .*no/such/base": {"base_model_name_or_path": "/no/such/base"},
    }
    folders = [copied(adapters["LoRA"], tmp_path / str(place), **case) for place, case in enumerate(cases.values())]
    for folder, reason in [(cut, "its weights are damaged"), *zip(folders, cases, strict=True)]:
        with pytest.raises(ConfigError, match=reason):
            load_model(SharedConfig(model_name_or_path=folder), CPU)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    peft.get_peft_model(base, peft.IA3Config(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "ia3")
    with pytest.raises(ConfigError, match="IA3.*, not LoRA"):
        load_model(SharedConfig(model_name_or_path=str(tmp_path / "ia3")), CPU)


@pytest.mark.parametrize(
    "targets, reason",
    [
        (["nowhere"], r"lora_target_modules='nowhere': .* linear layers \(down_proj, .*, v_proj\), or all-linear$"),
        (["q_proj", "v_projj"], r"lora_target_modules='v_projj': the model has no such layer: "),
        (["lm_head", "q_proj"], "embeddings or the head"),
        (["embed_tokens"], "embeddings or the head"),
    ],
)
def test_targets_that_do_not_work_are_refused(model_folder, targets, reason):
    config = trainer("--lora_target_modules", *targets, model=model_folder)
    model = load_model(config, CPU)
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=reason):
        warnings.simplefilter("ignore")
        train_adapter(model, config)


def test_what_is_known_before_loading_is_refused_by_then(model_folder, adapters, monkeypatch):
    plain = parse_arguments(TrainerConfig, "", ["--model_name_or_path", str(adapters["LoRA"])])
    with pytest.raises(ConfigError, match="it is an adapter: add use_peft"):
        check_adapter(plain)
    check_adapter(trainer(model=adapters["LoRA"]))
    check_adapter(trainer(model=model_folder))
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else found(name))
    with pytest.raises(ConfigError, match="use_peft=True: peft is not installed: pip install peft"):
        check_adapter(trainer(model=model_folder))
    with pytest.raises(ConfigError, match="peft is not installed"):
        load_reference(ServerConfig(model_name_or_path=str(adapters["LoRA"])), CPU)


@pytest.mark.slow
def test_with_a_server_the_kl_begins_at_0_from_a_new_adapter_and_from_an_old_one(
    server, model_folder, adapters, data_folder, letters, tmp_path
):
    def run(name, begin, url, *more):
        settings = options(begin, data_folder, tmp_path / name, ref_servers=url, use_peft=None, eval_steps=0)
        ended = plain_python(*settings, *letters, *more)
        assert ended.returncode == 0, ended.stdout
        assert "has other weights than the policy starts from" not in ended.stdout
        rows = lines(tmp_path / name / "metrics.jsonl")
        assert abs(rows[0]["kl"]) < NO_KL and rows[-1]["kl"] > 1e-8

    run("new", model_folder, server.url, "--lora_target_modules", "all-linear", "--use_rslora")
    with running_server(adapters["LoRA"], tmp_path) as served:
        run("old", adapters["LoRA"], served.url, "--merge_on_save")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "old" / "model")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    its = base.state_dict()
    differing = {name for name, weight in plain.state_dict().items() if not torch.equal(weight, its[name])}
    layers = base.config.num_hidden_layers
    assert len(differing) == len(TARGETS) * layers and all(name.split(".")[-2] in TARGETS for name in differing)
