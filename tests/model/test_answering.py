"""grpo.yaml in a model's folder: who is asked as in training, what wins over it, and what it must not say."""

import pytest
from adapters import write_adapter
from conftest import LAUGHS
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.programs import EvaluateConfig
from grpo.config.sampling_settings import ChatConfig
from grpo.config.trainer import TrainerConfig
from grpo.data.chat_template import render_prompt
from grpo.model.answering import ANSWERING, model_settings, read_answering
from grpo.model.load import load_model
from grpo.run.folder import save_model
from grpo.trainer.inputs import warn_of_other_question

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

SYSTEM = "Be brief: \"one\" word,\n{{ no }} {% more %} \\ 'than' that — 🐸"
TRAINED = {"system_prompt": SYSTEM, "chat_template_kwargs": {"enable_thinking": False}, "max_completion_length": 40}
TRAINED |= {"max_prompt_length": 300, "temperature": 0.7, "seed": 3, "dataset_name": "my/data"}
TRAINED |= {"dataset_config": "hard", "dataset_prompt_column": "problem", "dataset_answer_column": "solution"}


@pytest.fixture(params=["whole", "adapter"])
def saved(request, model, tokenizer, model_folder, tmp_path):
    """The folder of a model, or of an adapter, that a run with TRAINED has saved."""
    trained = model
    if request.param == "adapter":
        adapter = write_adapter(tmp_path / "adapter", model_folder, r=2)
        trained = load_model(TrainerConfig(model_name_or_path=str(adapter)), model.device)
    save_model(trained, tokenizer, tmp_path / "model", TrainerConfig(trust_remote_code=True, **TRAINED))
    return tmp_path / "model"


def parsed(config_class, *words):
    return parse_arguments(config_class, "", [*map(str, words)], model_settings)


def test_a_saved_model_is_asked_as_in_training(saved, capsys):
    for config_class in (EvaluateConfig, ChatConfig):
        config = parsed(config_class, "--model", saved)
        assert {name: getattr(config, name, value) for name, value in TRAINED.items()} == TRAINED
        assert config.trust_remote_code is False
        (line,) = capsys.readouterr().err.splitlines()
        assert f"asked as in training, by {saved}/{ANSWERING}: system_prompt=" in line
        assert "max_completion_length=40, temperature=0.7, seed=3" in line
        assert ("dataset_prompt_column='problem'" in line) == (config_class is EvaluateConfig)


def test_the_command_line_and_the_file_of_config_win(saved, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text("temperature: 0.5\nseed: 5\n")
    words = ["--model", saved, "--config", tmp_path / "own.yaml", "--temperature", "1.0", "--dataset", "other"]
    config = parsed(EvaluateConfig, *words, "--dataset-prompt-column=question", "--system_prompt=")
    assert (config.temperature, config.seed, config.max_completion_length) == (1.0, 5, 40)
    assert (config.dataset_name, config.dataset_config, config.dataset_prompt_column) == ("other", None, "question")
    assert (config.system_prompt, config.dataset_answer_column) == ("", "solution")
    line = capsys.readouterr().err
    assert "max_completion_length=40" in line
    assert not [name for name in ("system_prompt", "temperature", "seed", "dataset_name") if f"{name}=" in line]


def test_a_model_without_the_file_is_asked_by_the_defaults(model_folder, capsys):
    assert parsed(EvaluateConfig, "--model", model_folder) == EvaluateConfig(model_name_or_path=str(model_folder))
    assert capsys.readouterr().err == ""


def test_the_file_reaches_no_other_setting(model_folder, tmp_path):
    (tmp_path / ANSWERING).write_text("trust_remote_code: true\nof_a_newer_version: 1\nseed: 9\n")
    config = parsed(EvaluateConfig, "--model", tmp_path)
    assert (config.trust_remote_code, config.seed) == (False, 9)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("reward_weights: [1, 1, --trust_remote_code]", "reward_weights='--trust_remote_code': use a number"),
        ("system_prompt: [a, --trust_remote_code]", "system_prompt=['a', '--trust_remote_code']: give a single value"),
    ],
)
def test_a_word_of_a_list_in_the_file_is_no_option(text, reason, tmp_path, capsys):
    (tmp_path / ANSWERING).write_text(text)
    with pytest.raises(SystemExit):
        parsed(EvaluateConfig, "--model", tmp_path)
    assert reason in capsys.readouterr().err


def test_another_dataset_is_not_cut_by_the_runs_splits(tmp_path):
    text = "dataset_train_split: train[100:]\ndataset_test_split: train[:100]\neval_holdout: 5\nreward_funcs: null\n"
    (tmp_path / ANSWERING).write_text(text)
    assert parsed(EvaluateConfig, "--model", tmp_path).dataset_test_split == "train[:100]"
    assert parsed(EvaluateConfig, "--model", tmp_path).eval_holdout == 5
    assert parsed(EvaluateConfig, "--model", tmp_path, "--dataset_test_split", "validation").eval_holdout == 0
    config = parsed(EvaluateConfig, "--model", tmp_path, "--dataset", "other.jsonl")
    assert (config.dataset_train_split, config.dataset_test_split, config.eval_holdout) == ("train", "test", 0.0)


def test_a_single_reward_function_of_the_file_is_named_whole(tmp_path, capsys):
    (tmp_path / ANSWERING).write_text("reward_funcs: mine.py:brevity")
    with pytest.raises(SystemExit):
        parsed(EvaluateConfig, "--model", tmp_path)
    assert "error: reward_funcs='mine.py:brevity': " in (words := capsys.readouterr().err)
    assert "add --reward_funcs mine.py:brevity, or others" in words


@pytest.mark.parametrize("content", ["seed: [1", "a text", LAUGHS], ids=["YAML", "text", "aliases"])
def test_a_damaged_file_is_refused(content, tmp_path, capsys):
    (tmp_path / ANSWERING).write_text(content)
    with pytest.raises(ConfigError, match="^model_name_or_path=.*its grpo.yaml cannot be read"):
        read_answering(str(tmp_path))
    with pytest.raises(SystemExit):
        parsed(ChatConfig, "--model", tmp_path)
    assert "error: model_name_or_path=" in capsys.readouterr().err


def test_a_model_of_the_hub_brings_its_file_too(tmp_path, monkeypatch):
    import huggingface_hub.constants

    repository = tmp_path / "models--my--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / ANSWERING).write_text("seed: 9\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_answering("my/other") == ("", {})
    assert read_answering("my/model")[1] == {"seed": 9}


@pytest.mark.parametrize("name", ["runs/nope", "./nope"])
def test_a_path_without_a_model_is_answered_without_the_hub(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # asking would take half a minute
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        parsed(ChatConfig, "--model", name)
    assert f"error: model_name_or_path='{name}': there is no such file or folder: correct" in capsys.readouterr().err


def test_a_models_file_names_no_tools_but_tells_of_them(model, tokenizer, tmp_path, capsys):
    (tool := tmp_path / "bank.py").write_text("def balance() -> int: ...")
    config = TrainerConfig(tools=[f"{tool}:balance"], max_turns=3, max_tool_response_length=90)
    save_model(model, tokenizer, tmp_path / "model", config)
    for config_class in (EvaluateConfig, ChatConfig):
        asked = parsed(config_class, "--model", tmp_path / "model")
        assert (asked.tools, asked.max_turns) == ([], None)
        assert f"{tool}:balance'], and is asked without" in capsys.readouterr().err
        asked = parsed(config_class, "--model", tmp_path / "model", "--tools", f"{tool}:balance")
        assert (asked.tools, asked.max_turns, asked.max_tool_response_length) == ([f"{tool}:balance"], 3, 90)
        assert "asked without" not in capsys.readouterr().err


def test_a_model_that_an_agent_asked_is_asked_as_then_where_it_is_named_again(model, tokenizer, tmp_path, capsys):
    (program := tmp_path / "solve.py").write_text("def solve(): ...")
    (game := tmp_path / "game.py").write_text("class Game: ...")
    turns = {"max_turns": 3, "agent_history": "rendered", "tool_call_parser": "hermes"}
    turns |= {"agent_may_sample": True, "agent_failure_reward": -1.0}
    config = TrainerConfig(agent=f"{program}:solve", reward_funcs=["format_reward"], **turns)
    save_model(model, tokenizer, tmp_path / "model", config)
    for config_class in (EvaluateConfig, ChatConfig):
        asked = parsed(config_class, "--model", tmp_path / "model")
        assert (asked.agent, asked.max_turns) == (None, None)
        assert f"agent {program}:solve, and is asked without" in capsys.readouterr().err
        asked = parsed(config_class, "--model", tmp_path / "model", "--agent", f"{program}:solve")
        assert {name: getattr(asked, name) for name in turns} == turns
        asked = parsed(config_class, "--model", tmp_path / "model", "--tools", f"{game}:Game")
        assert (asked.max_turns, asked.agent_history) == (3, "drawn")
    config = TrainerConfig(tools=[f"{game}:Game"], max_turns=3, tool_timeout=7.0, max_tool_response_length=9)
    save_model(model, tokenizer, tmp_path / "other", config)
    assert parsed(ChatConfig, "--model", tmp_path / "other", "--agent", f"{program}:solve").max_turns == 3


def test_a_trainer_that_asks_something_else_says_so(saved, caplog):
    warn_of_other_question(TrainerConfig(model_name_or_path=str(saved), **TRAINED))
    assert not caplog.messages
    warn_of_other_question(TrainerConfig(model_name_or_path=str(saved), **TRAINED | {"system_prompt": "Think."}))
    (message,) = caplog.messages
    assert message.startswith("system_prompt was 'Be brief: ") and message.endswith(", and is 'Think.'")


def test_a_saved_system_prompt_is_put_in_once_by_every_program(model, tokenizer, tmp_path):
    config = TrainerConfig(system_prompt=SYSTEM, save_system_prompt=True)
    save_model(model, tokenizer, tmp_path / "model", config)
    saved = AutoTokenizer.from_pretrained(tmp_path / "model")
    question = [{"role": "user", "content": "What is 2+2?"}]
    expected = render_prompt(tokenizer, question, SYSTEM)
    assert expected.count(SYSTEM) == 1 and tokenizer.chat_template == saved.chat_template.partition("\n")[2]
    assert saved.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == expected
    assert render_prompt(saved, question, SYSTEM) == expected
    # Another system message is not doubled, and a chat goes on.
    other = [{"role": "system", "content": "Think."}, *question, {"role": "assistant", "content": "4"}, *question]
    assert saved.apply_chat_template(other, tokenize=False) == tokenizer.apply_chat_template(other, tokenize=False)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    # A model that was trained further is asked as the last run says.
    save_model(model, saved, tmp_path / "further", TrainerConfig(system_prompt="Think.", save_system_prompt=True))
    further = AutoTokenizer.from_pretrained(tmp_path / "further")
    rendered = further.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert rendered == render_prompt(tokenizer, question, "Think.")
