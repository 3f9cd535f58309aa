"""`grpo_ref_split.py --dry_run`: what it finds out, what it refuses, and what it leaves alone."""

import dataclasses
import json
import logging
import os
import re
import shutil

import pytest
import torch
from conftest import REPOSITORY, free_port
from transformers import AutoTokenizer, BloomConfig, JetMoeConfig, Qwen2Config

from demo.task import write_dataset
from grpo.config.errors import ConfigError, RewardError
from grpo.config.trainer import TrainerConfig
from grpo.model.memory import total, trainer_lines
from grpo.run.preflight import RunDescription
from grpo.run.run_folder import write_progress
from grpo.trainer.dry_run import dry_run
from grpo.trainer.policy import policy_on_meta
from grpo.trainer.rank_memory import RankWork, rank_memory


@pytest.fixture(scope="module")
def weightless(model_folder, tmp_path_factory) -> str:
    """The tiny model's folder without its weights."""
    ignored = shutil.ignore_patterns("*.safetensors")
    return str(shutil.copytree(model_folder, tmp_path_factory.mktemp("weightless") / "tiny", ignore=ignored))


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("problems")
    write_dataset(folder, seed=0, train_size=80, test_size=16)
    return str(folder)


@pytest.fixture
def given(weightless, problems, tmp_path) -> dict:
    settings = {"model_name_or_path": weightless, "dataset_name": problems, "output_dir": str(tmp_path / "run")}
    settings |= {"system_prompt": "", "max_prompt_length": 96, "max_completion_length": 24, "num_generations": 4}
    settings |= {"prompts_per_step": 6, "micro_batch_tokens": 200, "eval_samples": 10, "report_to": ["none"]}
    return settings | {"ref_servers": [f"http://127.0.0.1:{free_port()}"]}


@pytest.fixture
def printed(given, capsys):
    """`printed(**changes)`: what a dry run with these settings prints."""

    def run(**changes) -> str:
        dry_run(TrainerConfig(**given | changes))
        return capsys.readouterr().out

    return run


def test_a_best_model_needs_a_checkpoint_that_is_evaluated(printed):
    best = {"load_best_model_at_end": True, "save_steps": 30, "eval_steps": 50}
    with pytest.raises(ConfigError, match="load_best_model_at_end=True: no checkpoint of 100 steps is evaluated: make"):
        printed(**best, max_steps=100)
    assert printed(**best, max_steps=150) and printed(**best | {"save_steps": 50}, max_steps=2)


def test_it_finds_everything_and_leaves_nothing(given, printed, model, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        output = printed()
    for name in ("correctness_reward", "format_reward"):  # each is called once
        assert caplog.text.count(f"{name} gives 0.0 for the gold answer of the first prompt, 0.0 for") == 1
    count = sum(parameter.numel() for parameter in model.parameters())
    for words in (
        f"{count:,} parameters, {count:,} of them trained",
        "80 prompts to train on",
        "10 held out",
        "correctness_reward x 1, format_reward x 1",
        f"{given['ref_servers'][0]} cannot be reached (Connection refused): a run would wait for it",
        "6 prompts x 4 completions over 1 rank",
        "24 completions a round, 24 at a time",
        *("masters", "AdamW's moments", "KV cache", "activations", "margin", "three runs on an H200"),
    ):
        assert words in output
    as_set, *changed = output.split("as set  ")[1].splitlines()
    assert "fits a card of 8 GB" in as_set and any("use_peft True" in line for line in changed)
    # Each line is a change that needs less.
    needed = [float(line.split(" GiB")[0].split()[-1]) for line in (as_set, *changed)]
    assert len(needed) > 3 and all(size <= needed[0] for size in needed)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_an_optimizer_in_8_bits_and_one_on_the_cpu_are_choices_but_not_together(given, printed, optim, tmp_path):
    pytest.importorskip("bitsandbytes")
    # Embeddings stay in 32 bits, so in the tiny model itself 8 bits would spare nothing worth a line.
    wide = Qwen2Config(hidden_size=512, num_hidden_layers=2, num_attention_heads=4, intermediate_size=2048)
    wide.save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(given["model_name_or_path"]).save_pretrained(tmp_path / "wide")
    choices = printed(model_name_or_path=str(tmp_path / "wide"), optim=optim).split("On a card")[1]
    is_plain = optim == "adamw_torch"
    assert ("optim adamw_8bit" in choices) == ("deepspeed configs/ds_offload.json" in choices) == is_plain


def be_rank(rank: int, monkeypatch) -> None:
    """Have the variables of one of two ranks."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))


def test_a_step_is_cut_as_the_update_cuts_it_and_rank_0_alone_says_so(printed, monkeypatch):
    be_rank(0, monkeypatch)
    output = printed()
    longest = int(output.split("prompts to train on, of ")[1].split(" to ")[1].split()[0])
    # A group is one micro-batch: longest + 4 x 24 tokens, two of them are more than 200.
    assert 2 * (longest + 4 * 24) > 200 and longest + 4 * 24 <= 200
    assert "over 2 ranks" in output and "3 of 4 completions" in output and "3 at most, of 200 tokens at most" in output
    assert f"{3 * (longest + 4 * 24)} at most, a shared prompt once" in output
    be_rank(1, monkeypatch)
    assert printed() == ""


def test_it_logs_in_where_the_model_is_to_be_pushed(given, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "any")
    with pytest.raises(ConfigError, match="push_to_hub=True: https://.* does not log you in"):
        dry_run(TrainerConfig(**given, push_to_hub=True))


GAME = """
class Short:
    def reset(self, columns):
        return "Go."
    def step(self, text):
        return 0.0, True
"""


def test_it_plays_a_turn_of_the_environment(given, tmp_path):
    (game := tmp_path / "games.py").write_text(GAME)
    with pytest.raises(
        RewardError, match=rf"^environment='{game}:Short': step returned \(0.0, True\): step must return"
    ):
        dry_run(TrainerConfig(**given | {"environment": f"{game}:Short"}))


def test_the_launcher_starts_the_server(printed, monkeypatch):
    monkeypatch.setenv("GRPO_COMMAND", "python -m grpo.launch --dry_run")
    for changes, words in (({"ref_servers": None}, ", which grpo.launch starts with the run"), ({}, " cannot be")):
        assert re.search(f"  reference  http://127.0.0.1:[0-9]+{words}", printed(**changes))


@pytest.mark.rare
def test_servers_are_asked_once_and_one_that_cannot_serve_is_named_and_no_failure(printed, server):
    assert f"{server.url} is ready: " in printed(ref_servers=[server.url])
    output = printed(reward_funcs=["format_reward", server.url], beta=0.0)
    assert f"{server.url} cannot serve this run: serves" in output and "none: beta is 0" in output
    away = {"sampler": "pool", "pool": f"http://127.0.0.1:{free_port()}", "eval_steps": 0}
    output = printed(**away)
    assert f"sampler    {away['pool']} cannot be reached (Connection refused): a run would wait for it" in output
    assert "24 completions a round, which workers draw;" in output and "KV cache" not in output
    output = printed(**away | {"pool": server.url})
    assert f"sampler    {server.url} cannot serve this run: is no pool of rollouts" in output


def test_an_adapter_and_weights_in_4_bits_are_counted(printed, server):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    adapter = {"use_peft": True, "ref": "adapter_off"}
    output = printed(**adapter, lora_target_modules=["q_proj"])
    assert "the trainer itself, its adapter off" in output and "use_peft" not in output
    assert "quantization 4bit" in output
    output = printed(**adapter, quantization="4bit")
    assert "4 bit weights unpacked" in output and "quantization 4bit" not in output
    output = printed(use_peft=True, quantization="4bit", ref_servers=[server.url])
    assert "with quantization none, and that of the policy is 4bit" in output


def test_an_offloaded_optimizer_is_counted_in_the_machines_memory(given, printed, tmp_path, monkeypatch):
    settings = json.loads((REPOSITORY / "ds_config.json").read_text())
    settings |= {"zero_force_ds_cpu_optimizer": False, "data_types": {"grad_accum_dtype": "fp32"}}
    settings["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
    (tmp_path / "offload.json").write_text(json.dumps(settings))
    output = printed(deepspeed=str(tmp_path / "offload.json"))
    assert "weights on their way back" in output and "ds_offload" not in output.split("On a card")[1]
    # On a card the host has them, of all ranks of the machine.
    monkeypatch.setenv("LOCAL_SIZE", "3")
    config = TrainerConfig(**given | {"dtype": "float32"})
    memory = rank_memory(
        policy_on_meta(config, torch.float32),
        RankWork(config=config, ranks=1, longest_prompt=96, held_out=0),
        settings,
        "cuda",
    )
    [together] = [line for line in trainer_lines(memory, torch.float32, 1) if "times 3 ranks here" in line]
    size, ram = total(memory.host), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert f"{3 * size / 2**30:.1f} of {ram / 2**30:.1f} GiB: it fits" in together
    too_much = dataclasses.replace(memory, host={"masters": ram // 2})
    assert any("it does NOT fit" in line for line in trainer_lines(too_much, torch.float32, 1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_type": "nowhere.py:loss"},
        {"dataset_prompt_column": "problem"},
        {"prompts_per_step": 81},
        {"use_peft": True, "lora_target_modules": ["nowhere_proj"]},
        {"reward_funcs": ["./nowhere/model"]},
    ],
    ids=lambda wrong: [*wrong][-1],
)
def test_a_mistake_is_refused(given, wrong):
    with pytest.raises(ConfigError) as refused:
        dry_run(TrainerConfig(**given | wrong))
    assert str(refused.value).startswith(tuple(wrong))


@pytest.fixture
def of_config(given, tokenizer, tmp_path):
    """`of_config(class, **settings)`: the settings of a run with a small model of that kind, without weights."""

    def settings(kind: type, **more) -> dict:
        folder = str(tmp_path / "model")
        kind(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, **more).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return given | {"model_name_or_path": folder}

    return settings


def test_a_model_that_cannot_recompute_is_refused_as_a_run_refuses_it(of_config, printed):
    small = dict(intermediate_size=48, num_key_value_heads=2, kv_channels=8, num_local_experts=2, num_experts_per_tok=1)
    settings = of_config(JetMoeConfig, **small)
    words = "gradient_checkpointing=True: JetMoeForCausalLM does not know how to: set it to false"
    with pytest.raises(ConfigError, match=f"^{words}$"):
        printed(**settings, gradient_checkpointing=True)
    output = printed(**settings, gradient_checkpointing=False)
    assert "Memory: no estimate (JetMoeForCausalLM does not run without numbers" in output


def test_without_a_formula_there_is_no_estimate_and_all_else(of_config, printed):
    output = printed(**of_config(BloomConfig))
    assert "80 prompts to train on" in output and "A step: 6 prompts" in output
    assert "Memory: no estimate (BloomForCausalLM does not let its attention be counted" in output.splitlines()[-1]


def test_it_says_where_a_run_goes_on_and_refuses_other_settings(given, printed, tmp_path):
    run = tmp_path / "run"
    changes = {"resume_from_checkpoint": "last", "eval_steps": 0, "beta": 0.0}
    settings = TrainerConfig(**given | changes)

    def start_of(**more) -> str:
        return re.search(r"^  start +(.*)", printed(**changes | more), re.MULTILINE)[1]

    assert start_of() == f"at step 0: there is nothing to resume in {run}"
    assert not run.exists()
    checkpoint = run / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    write_progress(checkpoint, RunDescription(settings, [], ranks=1).fields)
    with pytest.raises(ConfigError, match=f"^resume_from_checkpoint='{checkpoint}': the prompts' count and sum"):
        start_of()
    with pytest.raises(ConfigError, match="checkpoint-3': learning_rate is 1e-06 there and 0.1 here: leave it as it"):
        start_of(learning_rate=0.1)
    write_progress(checkpoint, {"format": 4})
    with pytest.raises(ConfigError, match="checkpoint-3': the checkpoint's format is 4 there and 6 here"):
        start_of()
    (run / "model").mkdir()
    write_progress(run / "model", {"step": settings.max_steps})
    assert start_of() == f"nothing to do: the run in {run} is done"
    with pytest.raises(ConfigError, match="it holds a run"):  # before the data is read
        printed(dataset_name="/no/data")
