"""`grpo init`: the starting point is accepted and runs; other trainers' settings become ours."""

import sys

import pytest
import torch
from conftest import REPOSITORY, run_python
from trainer_runs import finish, lines
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from grpo.config.command_line import parse_arguments
from grpo.config.programs import LaunchConfig
from grpo.init import main

EASYR1 = """
data:
  train_files: hiyouga/math12k@train
  val_files: hiyouga/math12k@test
  prompt_key: problem
  answer_key: answer
  image_key: images
  max_response_length: 2048
  system_prompt: Write $x$.
  seed: ${SEED}
  rollout_batch_size: 512
algorithm: {adv_estimator: reinforce_plus_plus, disable_kl: false, kl_penalty: low_var_kl, kl_coef: 1.0e-2}
worker:
  actor:
    global_batch_size: 128
    model: {model_path: Qwen/Qwen2.5-7B-Instruct, freeze_vision_tower: false}
    optim: {lr: 1.0e-6}
  rollout: {n: 5, top_p: 0.99}
trainer: {total_episodes: 15, val_freq: 5, save_freq: -1, save_limit: 3}
"""


@pytest.fixture
def init(tmp_path, monkeypatch):
    """`init(*words)`: what the command does in an empty folder, in this process; its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["grpo init", *words])
        try:
            return main()
        except SystemExit as ended:
            return ended.code

    return run


def accepted(folder, monkeypatch) -> LaunchConfig:
    monkeypatch.chdir(folder)
    return parse_arguments(LaunchConfig, "", ["--config", "config.yaml"])


def test_other_trainers_settings_become_ours(init, tmp_path, monkeypatch):
    (tmp_path / "theirs.yaml").write_text(EASYR1)
    assert init("mine", "--from", "easyr1", "theirs.yaml") == 0
    assert accepted(tmp_path / "mine", monkeypatch).num_generations == 5


def test_the_starting_point_is_accepted_and_nothing_is_overwritten(init, tmp_path, monkeypatch, capsys):
    assert init() == 0 and "next:  cd . && grpo launch --config config.yaml --dry_run" in capsys.readouterr().out
    assert [len(lines(tmp_path / f"data/{split}.jsonl")) for split in ("train", "test")] == [64, 16]
    config = accepted(tmp_path, monkeypatch)
    assert config.reward_funcs == ["rewards.py:right_number", "rewards.py:brevity"] and not config.starts_server
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    (tmp_path / "config.yaml").unlink()
    del before[tmp_path / "config.yaml"]
    assert init("my run") == 0 and "next:  cd 'my run' && grpo launch" in capsys.readouterr().out
    assert init(300 * "a") == 2 and "File name too long: name a folder that can be written" in capsys.readouterr().err
    assert init() == 2
    assert "it has rewards.py, data/train.jsonl, data/test.jsonl already" in capsys.readouterr().err
    assert not (tmp_path / "config.yaml").exists()
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize(
    "words, message",
    [
        (["openrlhf", "x.yaml"], "from='openrlhf': use trl, verl, easyr1, simple_grpo"),
        (["verl", "absent.sh"], "from='absent.sh': No such file or directory: name the file of verl's settings"),
        (["trl", "broken.py"], "from='broken.py': it cannot be read"),
        (["verl", "empty.sh"], "from='empty.sh': it has no setting of verl: name another file"),
    ],
)
def test_a_file_that_cannot_be_translated_is_refused_before_anything_is_written(words, message, init, tmp_path, capsys):
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "empty.sh").write_text("echo hello\n")
    assert init("mine", "--from", *words) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "mine").exists()


QUICK_START = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=8, max_steps=3, bf16=False)
trainer = GRPOTrainer("a model", reward_funcs="./judge", args=args, train_dataset=prompts, peft_config=LoraConfig(r=4))
"""


def judge(folder, model_folder) -> None:
    """Save a reward model with the policy's tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    sizes["num_key_value_heads"] = 4
    config = Qwen2Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("user", ["Burkov", "simple_GRPO", "TRL", "EasyR1"])
def test_the_settings_of_four_users_train(user, init, tmp_path, model_folder, data_folder, server):
    """As their files have them, but for model, data, lengths and prompts a step."""
    expected, data = ["correctness_reward"], data_folder
    words = [f"--model_name_or_path={model_folder}", f"--ref_servers={server.url}", f"--output_dir={tmp_path / 'run'}"]
    words += ["--prompts_per_step=2", "--max_prompt_length=400", "--max_completion_length=16", "--eval_steps=0"]
    words += ["--report_to=none"]
    if user in ("Burkov", "simple_GRPO"):
        file = REPOSITORY / f"configs/{user.lower()}.yaml"
        words += ["--max_steps=3", "--max_resample=1", "--temperature=1"]
        expected += ["format_reward"]
    else:
        (tmp_path / "theirs").write_text(QUICK_START if user == "TRL" else EASYR1)
        theirs = (tmp_path / "theirs").rename(tmp_path / ("theirs.py" if user == "TRL" else "theirs.yaml"))
        assert init("mine", "--from", user.lower(), str(theirs)) == 0
        file = tmp_path / "mine/config.yaml"
    if user == "TRL":
        judge(tmp_path / "judge", model_folder)
        data, expected = tmp_path / "prompts.jsonl", ["judge"]
        data.write_text("".join(f'{{"prompt": "Say {number}."}}\n' for number in range(8)))
        words += [f"--reward_funcs={tmp_path / 'judge'}"]
    elif user == "EasyR1":  # its 15 passes are a few steps here
        words += ["--dataset_prompt_column=question", "--reward_funcs", "correctness_reward", "--num_train_epochs=0.02"]
    finish(1, [f"--config={file}", f"--dataset_name={data}", *words])
    rows = lines(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(f"rewards/{name}/mean" in row for row in rows for name in expected)
    assert ("kl" in rows[-1]) is (user != "TRL")


@pytest.mark.slow
def test_the_starting_point_trains(tmp_path, model_folder):
    here = {"folder": tmp_path, "environment": {"PYTHONPATH": str(REPOSITORY)}}
    run_python("-m", "grpo", "init", check=True, **here)
    words = ["--config", "config.yaml", "--output_dir", "run", "--model_name_or_path", model_folder, "--max_steps=2"]
    words += ["--eval_steps=2", "--max_prompt_length=200", "--max_completion_length=8"]
    done = run_python("-m", "grpo.launch", *words, **here)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = lines(tmp_path / "run/metrics.jsonl")
    assert rows[-1]["step"] == 2 and "rewards/brevity/mean" in rows[-1] and "eval_accuracy" in rows[-1]
