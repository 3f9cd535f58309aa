"""Reward models: in the trainer, and behind the real server, against transformers on one text at a time."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from conftest import REPOSITORY, free_port, run_python, running_server
from faulty_server import code_for, lower_limits
from rounding import assert_rounded
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from told import sampled
from trainer_runs import lines, options
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from demo.model import build_tokenizer
from grpo.client.reference import ReferenceClient
from grpo.client.server_errors import ServerError, ServersUnavailable
from grpo.config.errors import ConfigError, RewardError
from grpo.config.trainer import TrainerConfig
from grpo.data.chat_template import render_prompt
from grpo.data.examples import make_example
from grpo.model.reward_model import load_reward_model, sequence_scores, try_template
from grpo.rewards.compute import RewardModel, compute_rewards, load_reward_funcs, start_rewards
from grpo.rewards.functions import TrainerState
from grpo.trainer.rewarding import score_rollouts
from grpo.wire.health import ServerInfo
from grpo.wire.logprobs import LogprobsRequest, encode_request
from grpo.wire.rewards import RewardAnswer

CPU = torch.device("cpu")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")


def save(model, tokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def qwen2(folder: Path, pad: bool, labels: int = 1) -> Path:
    torch.manual_seed(7)
    tokenizer = build_tokenizer(seed=0)
    shape = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "max_position_embeddings": 128, **SIZES}
    shape |= {"pad_token_id": tokenizer.pad_token_id if pad else None, "num_labels": labels}
    config = Qwen2Config(initializer_range=0.2, dtype="float32", **shape)
    if not pad:
        tokenizer.pad_token = None
    return save(Qwen2ForSequenceClassification(config), tokenizer, folder)


def gpt2(folder: Path) -> Path:
    """Its padding is its end of text, with which its chats end, and it has learned positions."""
    torch.manual_seed(8)
    tokenizer = build_tokenizer(seed=0)
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system here') }}"
        "{% endif %}{{ message['content'] + '<|endoftext|>' }}{% endfor %}"
    )
    tokenizer.eos_token = tokenizer.pad_token
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=128, num_labels=1, initializer_range=0.2, **ids, **SIZES)
    return save(GPT2ForSequenceClassification(config), tokenizer, folder)


def bert(folder: Path) -> Path:
    """An encoder: no chat template, special tokens of its own, the score taken at the first."""
    torch.manual_seed(9)
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "one", "two", "three", "four", "five", "six", ".", "?", "is", "it"]
    fast = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=60
    )
    limits = {"vocab_size": len(words), "max_position_embeddings": 64}
    config = BertConfig(num_labels=1, initializer_range=0.3, **limits, **SIZES)
    return save(BertForSequenceClassification(config), tokenizer, folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reward-models")
    return {
        "qwen2": qwen2(folder / "qwen2", pad=True),
        "qwen2 without padding": qwen2(folder / "unpadded", pad=False),
        "gpt2": gpt2(folder / "gpt2"),
        "bert": bert(folder / "bert"),
    }


KINDS = ["qwen2", "qwen2 without padding", "gpt2", "bert"]
CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in [
        *[("is it one ?", "one"), ("is it two ?", "one two three . " * 4), ("three", "")],
        *[("is it six ?", "six . five . four . three . two ."), ("one ?", "<|endoftext|>"), ("is it one ?", "one")],
    ]
]


@torch.no_grad()
def exact(folder: Path, chats=CHATS) -> list[float]:
    """Score one text at a time, by transformers with the files as they are."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for chat in chats:
        if tokenizer.chat_template is None:
            inputs = tokenizer("\n\n".join(message["content"] for message in chat), return_tensors="pt")
        else:
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        scores.append(model(input_ids=inputs["input_ids"]).logits[0, 0].item())
    return scores


def in_trainer(folder: Path, **settings) -> RewardModel:
    return RewardModel(TrainerConfig(**settings), str(folder), CPU)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [100_000, 60, 1])
def test_scores_are_those_of_one_text_at_a_time(folders, kind, budget):
    expected = exact(folders[kind])
    assert np.ptp(expected) > 0.01
    scores = in_trainer(folders[kind], micro_batch_tokens=budget).score(CHATS)
    assert_rounded(scores, expected)


@torch.no_grad()
def test_without_padding_of_its_own_a_texts_very_last_token_counts_whatever_it_is(folders):
    model = AutoModelForSequenceClassification.from_pretrained(folders["qwen2 without padding"]).eval()
    texts = [np.array(ids) for ids in ([5, 6, 0], [7, 8, 9, 10, 1], [3, 0, 0], [2], [4, 4, 0, 3, 3, 3])]
    expected = [model(input_ids=torch.tensor([ids.tolist()])).logits[0, 0].item() for ids in texts]
    assert_rounded(sequence_scores(model, texts), expected)


def test_a_reward_model_judges_the_chat_by_its_own_template(folders, tokenizer):
    """The policy's template, with its control tokens, is another than the reward model's."""
    example = make_example(TrainerConfig(system_prompt=""), tokenizer, 0, {"question": "is it one ?", "answer": "one"})
    assert "<|im_start|>" in example.prompt
    reward_funcs = load_reward_funcs([str(folders["gpt2"])])
    assert list(reward_funcs) == ["gpt2"]
    config = TrainerConfig(reward_funcs=[str(folders["gpt2"])])
    rewards, _ = start_rewards(reward_funcs, config, CPU)
    table = score_rollouts(rewards, [example] * 2, [sampled([1], text) for text in ("one", "two")], TrainerState())
    chats = [[{"role": "user", "content": "is it one ?"}, {"role": "assistant", "content": a}] for a in ("one", "two")]
    assert_rounded(table, [exact(folders["gpt2"], chats)])


def test_with_the_policys_template_it_reads_what_the_policy_read(folders, tokenizer):
    system = {"role": "system", "content": "be brief"}
    text = AutoTokenizer.from_pretrained(folders["qwen2"]).apply_chat_template([system, *CHATS[0]], tokenize=False)
    assert text == render_prompt(tokenizer, "is it one ?", "be brief") + "one<|im_end|>\n"


def test_a_chat_that_the_template_refuses_is_an_error(folders):
    wrong = [*CHATS[0], {"role": "system", "content": "x"}]
    with pytest.raises(RewardError, match="gpt2 cannot score a completion: input 1: .* refuses .*no system here"):
        in_trainer(folders["gpt2"]).score([CHATS[0], wrong])
    with pytest.raises(ConfigError, match="^reward_funcs='.*gpt2': .* refuses .*no system here.*: correct chat_templ"):
        try_template(TrainerConfig(), str(folders["gpt2"]), wrong)


def test_a_template_may_raise_anything_and_writes_the_same_date_every_day(folders, tmp_path):
    folder = tmp_path / "dated"
    shutil.copytree(folders["gpt2"], folder)
    (folder / "chat_template.jinja").write_text(
        "{% if messages | length == 2 %}{{ 1 // 0 }}{% endif %}{{ raise_exception(strftime_now('%d %B %Y')) }}"
    )
    with pytest.raises(ConfigError, match=r"^reward_funcs='.*dated': .* refuses these messages \(.*by zero"):
        try_template(TrainerConfig(), str(folder), CHATS[0])
    with pytest.raises(ConfigError, match=r"refuses these messages \(26 July 2024\)"):
        try_template(TrainerConfig(), str(folder), CHATS[0][:1])


def test_a_template_that_knows_no_system_has_its_text_before_the_users(folders):
    user, answer = CHATS[0]
    merged = [user | {"content": f"be brief\n\n{user['content']}"}, answer]
    scores = in_trainer(folders["gpt2"]).score([[{"role": "system", "content": "be brief"}, *CHATS[0]]])
    assert_rounded(scores, exact(folders["gpt2"], [merged]))
    with pytest.raises(RewardError, match="refuses .*no system here"):  # an answer never takes it up
        in_trainer(folders["gpt2"]).score([[{"role": "system", "content": "be brief"}, answer]])


def test_a_text_beyond_the_model_is_an_error(folders):
    long = [{"role": "user", "content": "one " * 59}]
    assert len(in_trainer(folders["bert"]).score([[{"role": "user", "content": "one " * 58}]])) == 1
    with pytest.raises(RewardError, match="sequence 0 has 61 tokens: this model takes at most 60"):
        in_trainer(folders["bert"]).score([long])


def test_it_is_frozen_and_keeps_its_settings(folders):
    model, _ = load_reward_model(TrainerConfig(), "reward_funcs", str(folders["qwen2 without padding"]), CPU)
    sequence_scores(model, [np.array([5, 6, 0]), np.array([2])])
    assert model.config.pad_token_id is None and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_one_too_large_for_the_memory_is_named(folders, monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.25 GiB")

    monkeypatch.setattr("transformers.PreTrainedModel.to", no_room)
    with pytest.raises(ConfigError, match="reward_funcs='.*': out of memory: free .*, or serve it from another card"):
        load_reward_model(TrainerConfig(), "reward_funcs", str(folders["bert"]), CPU)


# --- finding it


@pytest.mark.parametrize(
    "name, label", [("org/reward-7b", "reward-7b"), ("https://other:8000/", "other:8000"), ("http://h:1/rm/", "h:1/rm")]
)
def test_what_a_name_means(name, label):
    assert load_reward_funcs([name]) == {label: name.rstrip("/")}


def test_a_folder_is_a_model_where_it_has_a_slash(folders, monkeypatch):
    monkeypatch.chdir(folders["bert"].parent)
    assert load_reward_funcs(["./bert", f"{folders['gpt2']}/"]) == {"bert": "bert", "gpt2": str(folders["gpt2"])}
    with pytest.raises(ConfigError, match=r"reward_funcs='bert': reward.py .* reward model is written ./folder"):
        load_reward_funcs(["bert"])


@pytest.mark.parametrize("name", ["some/mine.py", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_what_is_none_of_them_is_refused(name):
    with pytest.raises(ConfigError, match=f"^reward_funcs='{name}': no such folder: name a reward model"):
        load_reward_funcs([name])


def test_a_model_that_was_never_trained_to_reward_is_refused(model_folder, folders, tmp_path):
    with pytest.raises(ConfigError, match=r"reward_funcs='.*': its weights lack score.weight, so its scores"):
        in_trainer(model_folder)
    with pytest.raises(ConfigError, match="it gives 3 numbers for a text"):
        in_trainer(qwen2(tmp_path / "three", pad=True, labels=3))
    os.truncate(tmp_path / "three/model.safetensors", 100)
    with pytest.raises(ConfigError, match="^reward_funcs='.*': its weights are damaged"):
        in_trainer(tmp_path / "three")
    settings = json.loads((tmp_path / "three/config.json").read_text()) | {"attn_implementation": "someone/kernel"}
    (tmp_path / "three/config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"^reward_funcs='.*': its config.json names .* \(someone/kernel\), which"):
        in_trainer(tmp_path / "three")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="reward_funcs='.*': cannot be loaded .* of a sequence-class"):
        in_trainer(tmp_path)


# --- behind the server


TOKEN = {"Authorization": "Bearer s3cret"}


@pytest.fixture(scope="module")
def token_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text("s3cret")
    return str(path)


@pytest.fixture(scope="module")
def served(folders, tmp_path_factory):
    words = ["--task=reward", "--max_queue_tokens=4000", "--max_length=100", "--max_batch_tokens=256"]
    settings = {"environment": {"GRPO_REF_TOKEN": "s3cret"}, "code": code_for(lower_limits, 64 << 20, 32)}
    with running_server(folders["qwen2"], tmp_path_factory.mktemp("rm"), *words, **settings) as server:
        yield server


def post(server, content, headers=TOKEN) -> requests.Response:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return requests.post(server.url + "/v1/rewards", data=body, timeout=60, headers=headers)


def refusal(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_served_scores_are_those_of_the_trainer(served, folders, token_file):
    config = TrainerConfig(reward_funcs=[served.url, str(folders["qwen2"])], token_file=token_file)
    rewards, _ = start_rewards(load_reward_funcs(config.reward_funcs), config, CPU)
    chats = CHATS * 9  # in several requests
    texts = ["not looked at"] * len(chats)
    remote, local = compute_rewards(rewards, texts, texts, {}, conversations=chats)
    assert_rounded(remote, local)
    assert_rounded(remote, exact(folders["qwen2"]) * 9)


def test_text_in_score_out(served, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["qwen2"])
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS]
    answer = post(served, {"inputs": [*texts, *CHATS], "request_id": "r"})
    assert answer.status_code == 200 and answer.headers["Content-Type"] == "application/json"
    decoded = RewardAnswer.from_json(answer.content, 2 * len(CHATS))
    assert_rounded(decoded.scores, exact(folders["qwen2"]) * 2)
    health = ServerInfo.from_json(requests.get(served.url + "/health", timeout=5, headers=TOKEN).content)
    assert (decoded.model_fingerprint, decoded.request_id) == (health.model.fingerprint, "r")
    assert (health.task, health.status, health.model.max_length) == ("reward", "ready", 100)
    metrics = requests.get(served.url + "/metrics", timeout=5, headers=TOKEN).text
    assert 'grpo_ref_requests_total{path="/v1/rewards",status="200"}' in metrics


@needs_curl
def test_the_request_by_hand_in_the_docs_works(served):
    text = (REPOSITORY / "docs/protocol.md").read_text()
    command = text.split("```bash\n")[1].split("```")[0]
    command = command.replace("http://127.0.0.1:59875", served.url)
    command = command.replace("--fail", "--fail --header 'Authorization: Bearer s3cret'")
    done = subprocess.run(["sh", "-ec", command], capture_output=True, text=True)
    assert len(json.loads(done.stdout)["scores"]) == 2, done.stderr


INPUTS = [
    *[b"[]", b'"text"', b"[1]", b"[[]]", b'[[{"content": "x"}]]', b'[[{"role": "user", "content": ["x"]}]]'],
    *[b'[[{"role": "user", "content": "x", "name": "y"}]]', b'[[{"role": "x", "content": "y", "role": "z"}]]'],
    *[b'["x", ""]', b'["\\ud800"]', b'["\xff"]', b'["x",]', b'["x" "y"]', b'["x"], "temperature": 1'],
    *[b'["x"], "client": 5', b'["x"], "client": "%s"' % (b"y" * 129), b'["x"], "inputs": ["y"]', b'["x"]} {'],
]
WRONG = [b"hello", b"[]", b"{}", b'{"inputs" ["x"]}', b'{"inputs": ["x"]', b'{"inputs": ' + b"[" * 100_000]
WRONG += [b'{"inputs": %s}' % inputs for inputs in INPUTS]


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body[:40])
def test_400_for_what_is_malformed(served, body):
    answer = post(served, body)
    assert refusal(answer) == (400, "malformed")
    assert len(answer.content) < 1000


def test_the_limits_of_the_service_hold(served):
    assert refusal(post(served, {"inputs": ["x"]}, headers={})) == (401, "unauthorized")
    assert post(served, {"inputs": ["0"] * 32}).status_code == 200
    assert refusal(post(served, {"inputs": ["0"] * 33})) == (413, "too_many_sequences")
    assert post(served, {"inputs": ["0" * 100] * 20}).status_code == 200
    assert refusal(post(served, {"inputs": ["0" * 100] * 20 + ["0"]})) == (413, "too_many_tokens")
    assert refusal(post(served, {"inputs": ["0" * 101]})) == (422, "sequence_too_long")
    assert refusal(post(served, {"inputs": ["0" * 10_000_000]})) == (422, "sequence_too_long")


def test_a_server_of_the_other_task_is_refused_both_ways(served, server, folders, token_file):
    with pytest.raises(ServerError, match=r"serves .*qwen2 for the task reward: set ref_servers to .* --task logprobs"):
        ReferenceClient(TrainerConfig(ref_servers=[served.url], token_file=token_file)).wait_ready()
    with pytest.raises(ServerError, match="for the task logprobs: set reward_funcs to .* --task reward"):
        start_rewards(load_reward_funcs([server.url]), TrainerConfig(reward_funcs=[server.url]), CPU)
    body = encode_request(LogprobsRequest.of([1], [[2]], 1.0))
    answer = requests.post(served.url + "/v1/logprobs", data=body, timeout=5, headers=TOKEN)
    assert refusal(answer) == (404, "not_found")
    assert "its --task is reward" in answer.json()["error"]["message"]
    assert refusal(post(server, {"inputs": ["x"]})) == (404, "not_found")


def test_a_reward_server_that_is_not_there_or_refuses_is_said(served, token_file):
    url = f"http://127.0.0.1:{free_port()}"
    config = TrainerConfig(reward_funcs=[url], ref_startup_timeout=1.0)
    with pytest.raises(ServersUnavailable, match=rf"no reward server at {url} .*ref_server.py --task reward"):
        start_rewards(load_reward_funcs([url]), config, CPU)
    config = TrainerConfig(reward_funcs=[served.url], token_file=token_file)
    rewards, _ = start_rewards(load_reward_funcs([served.url]), config, CPU)
    with pytest.raises(ServerError, match="refused a request with 422: sequence 0 has"):
        compute_rewards(rewards, ["p"], ["a"], {}, conversations=[[{"role": "user", "content": "0" * 110}]])


# --- a whole run


@pytest.mark.slow
def test_a_run_with_a_model_here_a_model_there_and_a_function_that_hangs(
    launch, folders, served, model_folder, data_folder, tmp_path, token_file
):
    """In training, in its evaluations, and in that of the saved model by two processes."""
    hangs = tmp_path / "hangs.py"
    hangs.write_text(
        "import time, zlib\n"
        "def hangs(prompts, completions, **columns):\n"
        "    for completion in completions:\n"
        "        if completion and zlib.crc32(completion.encode()) % 5 == 0:\n"
        "            time.sleep(600)\n"
        "    return [2.0 for completion in completions]\n"
    )
    few = {"num_generations": 8, "prompts_per_step": 2, "max_steps": 2, "eval_samples": 4, "sequences_per_generate": 2}
    few |= {"beta": 0, "reward_timeout": 1, "token_file": token_file}
    functions = ["--reward_funcs", str(folders["bert"]), served.url, f"{hangs}:hangs", "format_reward"]
    done = run_python("grpo_ref_split.py", *options(model_folder, data_folder, tmp_path / "run", **few), *functions)
    assert done.returncode == 0, done.stderr
    rows = lines(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 3
    late = done.stderr.count("reward function 'hangs' gave no answer within 1 s on the completion")
    label = served.url.removeprefix("http://")
    names = "bert", label, "hangs", "format_reward"
    given = 4 * (rows[0]["eval_rewards/hangs/mean"] + rows[2]["eval_rewards/hangs/mean"])
    for row in rows[1:]:
        for name in names:
            assert math.isfinite(row[f"rewards/{name}/mean"])
        assert row["rewards/bert/std"] > 0 and row[f"rewards/{label}/std"] > 0
        given += row["rewards/hangs/mean"] * 16
    assert 0 < late < 40
    assert given == pytest.approx(2.0 * (40 - late))
    assert rows[2]["eval_reward"] == pytest.approx(sum(rows[2][f"eval_rewards/{name}/mean"] for name in names))

    again = [f"--model={tmp_path / 'run/model'}", "--eval_samples=4", "--sequences_per_generate=2"]
    words = [*again, f"--token_file={token_file}", *functions, f"--output={tmp_path / 'out'}"]
    ended = launch(2, "--module", "grpo.evaluate", *words)
    assert ended.returncode == 0, ended.stdout
    assert "Warning" not in ended.stdout and ended.stdout.count("on 4 problems of") == 1
    drawn = [row["completion"] for row in lines(tmp_path / "out/completions.jsonl")]
    held_out = [row for row in lines(tmp_path / "run/completions.jsonl") if row["phase"] == "eval"]
    assert drawn == [row["completion"] for row in held_out[-4:]]
    evaluated = json.loads((tmp_path / "out/metrics.json").read_text())
    assert evaluated.pop("eval_runtime") > 0 and "eval_reward" in evaluated
    recorded = {name: value for name, value in rows[2].items() if name.startswith("eval_")}
    assert evaluated.keys() == recorded.keys()
    assert_rounded([*evaluated.values()], [recorded[name] for name in evaluated])
    clients = requests.get(served.url + "/status", headers=TOKEN, timeout=5).json()["clients"]
    places = [client["name"].rsplit(", ", 1)[0] for client in clients]  # without the host, the newest first
    assert sorted(places[:3]) == ["evaluate, rank 0 of 2", "evaluate, rank 1 of 2", "run, rank 0 of 1"]
