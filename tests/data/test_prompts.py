"""Loading from every kind of place, gold answers, prompts, and the order of training."""

import json
import math
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from recorded import write_rows
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.programs import EvaluateConfig
from grpo.config.trainer import TrainerConfig
from grpo.data.chat_template import render_prompt
from grpo.data.examples import gold_answer
from grpo.data.prompts import AdaptiveStream, PromptStream, check_reward_columns, load_examples, order_of
from grpo.data.records import Rollout
from grpo.evaluate import _split
from grpo.rewards.functions import TrainerState
from grpo.trainer.dry_run import dry_run
from grpo.trainer.rewarding import score_rollouts
from reward import correctness_reward

ROWS = [
    {"question": "One and one?", "answer": "1+1=2\n#### 2", "level": 1},
    {"question": "Two and two?", "answer": "2+2=4\n#### 4", "level": 2},
]


def config(name, *options) -> TrainerConfig:
    return parse_arguments(TrainerConfig, "", ["--dataset_name", str(name), "--system_prompt", "", *options])


def write(path, rows=ROWS):
    return write_rows(path, rows)


def golds_of(tokenizer, data, split: str, *options: str) -> list[str]:
    return [each.gold for each in load_examples(config(data, *options), split, tokenizer, progress=False)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows[1]*.jsonl"])
def test_a_local_file_is_a_dataset(tmp_path, tokenizer, name):
    first, second = load_examples(config(write(tmp_path / name)), "train", tokenizer, progress=False)
    assert first.columns == {"question": "One and one?", "answer": "2", "level": 1}
    assert second.columns == {"question": "Two and two?", "answer": "4", "level": 2}
    assert first.prompt == "<|im_start|>user\nOne and one?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(first.prompt_ids) == first.prompt


def test_a_raw_prompt_is_continued_as_it_is_and_a_chat_never_is(tmp_path, tokenizer, caplog):
    rows = [{"question": "Once upon"}, {"question": [{"role": "user", "content": "Tell me"}]}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(rows[0]) + "\n")
    (raw,) = load_examples(config(path, "--prompt_format", "raw"), "train", tokenizer)
    assert raw.prompt == "Once upon" and raw.prompt_ids == tokenizer("Once upon")["input_ids"]
    assert raw.messages == [{"role": "user", "content": "Once upon"}]
    unset = parse_arguments(TrainerConfig, "", ["--dataset_name", str(path), "--prompt_format", "raw"])
    assert load_examples(unset, "train", tokenizer) == [raw]  # the default is no wish of the user's
    given = config(path, "--prompt_format", "raw", "--system_prompt", "Be brief.")
    with pytest.raises(ConfigError, match=r"^system_prompt='Be brief\.': prompt_format raw continues a text without"):
        load_examples(given, "train", tokenizer)
    path.write_text(json.dumps(rows[1]) + "\n")
    with caplog.at_level("INFO"):
        (chat,) = load_examples(config(path, "--prompt_format=raw", "--system_prompt=Be brief."), "train", tokenizer)
    assert chat.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTell me<|im_end|>")
    assert "the system prompt 'Be brief....' stands before 1 prompts: --system_prompt '' leaves it out" in caplog.text


@pytest.mark.parametrize("template", [None, "{{ bos_token }}{{ messages[0].content }}"])
def test_a_prompt_begins_with_one_token_of_a_beginning(tmp_path, model_folder, template):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.bos_token, tokenizer.chat_template = "<|im_start|>", template
    first = tokenizer.bos_token_id
    adding = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)])
    tokenizer.backend_tokenizer.post_processor = adding
    rest = tokenizer("Once upon", add_special_tokens=False)["input_ids"]
    rows = [{"question": f"{begin}Once upon"} for begin in ("", "<|im_start|>", "<|im_start|><|im_start|>")]
    path = write(tmp_path / "rows.jsonl", rows)
    examples = load_examples(config(path, "--prompt_format", "raw"), "train", tokenizer)
    assert [each.prompt_ids for each in examples] == [[first, *rest], [first, *rest], [first, first, *rest]]
    if template is None:
        examples = load_examples(config(path), "train", tokenizer)
        assert [each.prompt_ids.count(first) for each in examples] == [1, 1, 2]


@pytest.mark.parametrize("name", ["rows.jsonl", "folder/train.csv"])
def test_rows_that_are_held_out_are_evaluated_on_and_never_trained_on(tmp_path, tokenizer, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".csv":
        path.write_text("question,answer\n" + "".join(f"{number}?,{number}\n" for number in range(10)))
    else:
        write(path, [{"question": f"{number}?", "answer": f"{number}"} for number in range(10)])
    data = path if "jsonl" in name else path.parent
    golds = partial(golds_of, tokenizer, data)
    for holdout, size in (("3", 3), ("0.25", 3), ("0.01", 1)):
        trained, held_out = (golds(split, "--eval_holdout", holdout) for split in ("train", "test"))
        assert len(held_out) == size and sorted(trained + held_out) == [*map(str, range(10))]
        assert held_out == golds("test", "--eval_holdout", holdout, "--seed", "7")  # runs can be compared
    with pytest.raises(ConfigError, match="eval_holdout=10.0: .* has 10 rows: leave some to train on"):
        golds("test", "--eval_holdout", "10")
    with pytest.raises(ConfigError, match="eval_holdout=1.0: dataset_test_split='train' is the split to train on: "):
        golds("train", "--eval_holdout", "1", "--dataset_test_split", "train")
    evaluation = EvaluateConfig(dataset_name=str(data), eval_holdout=3)
    assert _split(evaluation) == "test"  # of a single file too


@pytest.mark.parametrize("name", ["rows.jsonl", "folder/train.jsonl"])
def test_a_part_of_a_split_is_named_as_datasets_names_it(tmp_path, tokenizer, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path, [{"question": f"{number}?", "answer": f"{number}"} for number in range(10)])
    data = str(path if name == "rows.jsonl" else path.parent)
    golds = partial(golds_of, tokenizer, data)
    parts = ["--dataset_train_split=train[30%:]", "--dataset_test_split=train[:3]"]
    assert golds("train[30%:]", *parts) == [*map(str, range(3, 10))]
    assert golds("train[:3]", *parts) == ["0", "1", "2"]
    assert _split(EvaluateConfig(dataset_name=data, dataset_test_split="train[:3]")) == "train[:3]"
    with pytest.raises(ConfigError, match=r"split 'train\[:x\]' cannot be loaded \(.*Unrecognized instruction format"):
        golds("train[:x]", "--dataset_train_split=train[:x]")


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_dataset_of_trl_needs_no_column_named(tmp_path, tokenizer, suffix):
    path = tmp_path / f"rows.{suffix}"
    path.write_text("prompt,answer\n007,7\n" if suffix == "csv" else '{"prompt": "007", "answer": "7"}\n')
    (only,) = load_examples(config(path), "train", tokenizer, progress=False)
    assert only.columns == {"prompt": "007", "answer": "7"} and "user\n007<" in only.prompt
    both = write(tmp_path / "both.jsonl", [{"prompt": "other", **ROWS[0]}])
    (only,) = load_examples(config(both), "train", tokenizer, progress=False)
    assert "user\nOne and one?<" in only.prompt
    named = config(both, "--dataset_prompt_column", "prompt")
    (only,) = load_examples(named, "train", tokenizer, progress=False)
    assert "user\nother<" in only.prompt


def test_other_datasets_name_their_columns(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", [{"problem": "x?", "solution": 7, "hint": "seven"}])
    options = ["--dataset_prompt_column", "problem", "--dataset_answer_column", "solution"]
    (only,) = load_examples(config(path, *options), "train", tokenizer, progress=False)
    assert only.columns == {"problem": "x?", "solution": 7, "answer": "7", "hint": "seven"} and only.gold == "7"
    with pytest.raises(ConfigError, match=r"dataset_prompt_column='question': .*columns problem, solution, hint"):
        load_examples(config(path), "train", tokenizer, progress=False)
    with pytest.raises(ConfigError, match=r"dataset_answer_column='gold': .*name one of them"):
        load_examples(config(path, *options[:3], "gold"), "train", tokenizer, progress=False)


VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{number} and one?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"split": "train", "index": number, "answer": f"It is {number + 1}"},
    }
    for number in range(3)
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_dotted_name_is_a_field_of_a_column(tmp_path, tokenizer, name):
    """As in verl's rows. The columns stay dicts, which reward functions are given by name."""
    path = write(tmp_path / name, VERL)
    asked = config(path, "--dataset_answer_column", "reward_model.ground_truth")
    examples = load_examples(asked, "train", tokenizer, progress=False)
    assert [example.columns for example in examples] == [{**row, "answer": f"{i + 1}"} for i, row in enumerate(VERL)]
    assert [example.gold for example in examples] == ["1", "2", "3"]

    def by_fields(completions, extra_info, reward_model, answer, **kwargs):
        pairs = zip(extra_info, reward_model, answer, strict=True)
        return [info["index"] + (model["ground_truth"] == gold) for info, model, gold in pairs]

    answers = [Rollout(completion_ids=[1], finished=True, text="", sampling_logprobs=[], policy_version=0)] * 3
    assert score_rollouts({"f": by_fields}, examples, answers, TrainerState()).tolist() == [[1, 2, 3]]
    order = order_of(config(path, "--dataset_order", "column:extra_info.index"), examples[::-1])
    assert order.tolist() == [2, 1, 0]
    nested = config(path, "--dataset_prompt_column=extra_info.answer", "--dataset_answer_column=extra_info.index")
    first, *_ = load_examples(nested, "train", tokenizer, progress=False)
    assert "user\nIt is 1<" in first.prompt and first.gold == "0"


def test_a_missing_field_or_a_gold_answer_of_several_is_a_sentence_with_the_fields(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", VERL)
    fields = r"prompt, ability, reward_model, reward_model\.style, reward_model\.ground_truth, extra_info, .*: name "
    with pytest.raises(ConfigError, match=f"dataset_answer_column='reward_model.gold': .* the columns .*{fields}"):
        load_examples(config(path, "--dataset_answer_column", "reward_model.gold"), "train", tokenizer)
    plain = load_examples(config(path), "train", tokenizer)
    with pytest.raises(ConfigError, match=f"reward_funcs='asks': it asks for gold answers.*{fields}"):
        check_reward_columns(config(path), plain, {"asks": lambda completions, answer, **_: []})
    whole = config(path, "--dataset_answer_column", "reward_model")
    examples = load_examples(whole, "train", tokenizer)
    check_reward_columns(whole, examples, {"mine": lambda completions, answer, **_: []})
    reason = "correctness_reward reads text, and this is a dict: name reward_model.style or reward_model.ground_truth"
    with pytest.raises(ConfigError, match=f"^dataset_answer_column='reward_model': {reason}$"):
        check_reward_columns(whole, examples, {"correctness_reward": correctness_reward})


def test_dicts_of_other_fields_in_each_row_and_columns_with_dots_are_found(tmp_path, tokenizer):
    rows = [{"question": "x?", "info": {"a": 1}, "a.b": "1"}, {"question": "y?", "info": {"b": [2]}, "a.b": "2"}]
    for name, golds in {"info.b": ["[2]"], "a.b": ["1", "2"]}.items():
        path = write(tmp_path / "rows.jsonl", rows)
        assert golds_of(tokenizer, path, "train", "--dataset_answer_column", name) == golds


def test_prompts_alone_are_for_rewards_that_ask_for_no_gold_answer(tmp_path, tokenizer):
    plain = write(tmp_path / "plain.jsonl", [{"question": "x?", "hint": "seven"}])
    others = write(tmp_path / "others.jsonl", [{"question": "x?", "answer": None}])
    rewards = {"asks": lambda completions, answer, **_: [], "model": "org/model", "one": lambda completions, **_: []}
    rewards["may"] = lambda completions, answer=None, **_: []
    for settings, columns in (
        (config(plain), {"question": "x?", "hint": "seven"}),
        (config(others, "--dataset_answer_column", ""), {"question": "x?", "answer": None}),
    ):
        (only,) = load_examples(settings, "train", tokenizer, progress=False)
        assert only.columns == columns and only.gold == ""
    examples = load_examples(config(write(tmp_path / "rows.jsonl")), "train", tokenizer, progress=False)
    check_reward_columns(config(plain), examples, rewards)
    examples += load_examples(config(plain), "train", tokenizer, progress=False)  # as held out
    with pytest.raises(ConfigError, match=r"^reward_funcs='asks': it asks for gold .* columns question, hint: name"):
        check_reward_columns(config(plain), examples, rewards)
    check_reward_columns(config(plain), examples, {name: rewards[name] for name in rewards if name != "asks"})


def test_csv_is_read_with_prompts_and_answers_as_the_text_that_they_are(tmp_path, tokenizer):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffquestion,answer,level,note\n"One, ""two""\nand?",007,1,\nNA,NA,2,x\n3,,3,\n')
    first, second = load_examples(config(path), "train", tokenizer, progress=False)
    assert first.columns == {"question": 'One, "two"\nand?', "answer": "007", "level": 1, "note": None}
    assert second.columns == {"question": "NA", "answer": "NA", "level": 2, "note": "x"}


SOLUTION = ["--dataset_prompt_column", "problem", "--dataset_answer_column", "solution"]


def test_a_template_that_writes_the_date_gives_the_same_prompts_on_every_day(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ strftime_now('%d %b %Y') }}: {{ messages[-1].content }}")
    settings = config(write(tmp_path / "rows.jsonl"))
    first, _ = load_examples(settings, "train", tokenizer, progress=False)
    assert first.prompt == "26 Jul 2024: One and one?"


def test_calls_in_a_prompt_have_their_own_arguments_alone(tmp_path, tokenizer, monkeypatch):
    """Arrow gives each call the arguments of all."""

    def turn(name: str, arguments: dict) -> dict:
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    chat = [{"role": "user", "content": "Go."}, turn("add", {"x": 1}), turn("say", {"word": "a"})]
    rows = [{"question": [*chat, {"role": "user", "content": "Again."}], "answer": "1"}]
    template = "{% for message in messages %}{{ message.content }}{{ message.tool_calls | tojson }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template.replace("| tojson", "| default([]) | tojson"))
    (only,) = load_examples(config(write(tmp_path / "rows.parquet", rows)), "train", tokenizer, progress=False)
    assert '"arguments": {"x": 1}' in only.prompt and '"arguments": {"word": "a"}' in only.prompt


def test_a_column_called_answer_that_is_not_the_gold_answer_stays_what_it_is(tmp_path, tokenizer):
    rows = [{"problem": "x?", "solution": "5+2=7\n#### 7", "answer": f"{word} seven"} for word in ("It is", "Just")]
    settings = config(write(tmp_path / "rows.jsonl", rows), *SOLUTION)
    examples = load_examples(settings, "train", tokenizer, progress=False)
    assert [example.columns for example in examples] == rows
    assert [example.gold for example in examples] == ["7", "7"]
    check_reward_columns(settings, examples, {})


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_list_or_dict_arrives_as_the_dataset_has_it(tmp_path, tokenizer, name, caplog):
    tests = [{"input": "1 2", "output": 3}, {"input": "é", "output": None}]
    rows = [{"problem": "Add.", "solution": tests, "limits": {"seconds": 1.5}, "tags": ["a", "b"]}]
    rows.append(rows[0] | {"solution": []})
    settings = config(write(tmp_path / name, rows), *SOLUTION)
    (only,) = load_examples(settings, "train", tokenizer, progress=False)
    assert only.columns == rows[0] | {"answer": tests}
    assert json.loads(only.gold) == tests and "é" in only.gold
    assert "1 of 2 rows dropped, without a gold answer in 'solution'" in caplog.text


def test_a_prompt_column_under_a_name_of_the_arguments_is_given_as_that_argument(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", [{"prompts": "x?", "answer": "7"}])
    settings = config(path, "--dataset_prompt_column", "prompts")
    (only,) = examples = load_examples(settings, "train", tokenizer, progress=False)
    assert only.columns == {"answer": "7"}
    check_reward_columns(settings, examples, {})


NOTHING = [None, "", " \n\N{NO-BREAK SPACE}", "He has none.\n#### "]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_without_a_gold_answer_or_a_prompt_are_dropped_and_counted(tmp_path, tokenizer, caplog, name):
    rows = [*ROWS, *({"question": "And?", "answer": nothing} for nothing in NOTHING), {"question": "And?"}]
    rows += [{"question": None, "answer": "5"}, {"answer": "6"}, {"question": "What is it?", "answer": "None"}]
    kept = load_examples(config(write(tmp_path / name, rows)), "train", tokenizer, progress=False)
    assert [(example.index, example.gold) for example in kept] == [(0, "2"), (1, "4"), (9, "None")]
    assert "train: 5 of 10 rows dropped, without a gold answer in 'answer'" in caplog.text
    assert "train: 2 of 10 rows dropped, without a prompt in 'question'" in caplog.text


@pytest.mark.parametrize("blank", NOTHING[1:3])
def test_a_prompt_of_white_space_is_none_unless_the_environment_says_something(tmp_path, tokenizer, caplog, blank):
    rules, chat = {"role": "system", "content": "Count."}, [{"role": "user", "content": blank}]
    chats = [chat, [rules, *chat], [rules], []]
    chats += [[{"role": "user", "content": [{"type": "text", "text": text}]}] for text in (blank, "?")]
    texts = [{"question": text, "answer": "1", "level": level} for text in (blank, "?") for level in (1, 2)]
    for rows, turns, kept in [
        (texts, None, [2, 3]),
        (texts, Bank(), [1, 2, 3]),  # whose environment says something where the level is above 1
        ([{"question": messages, "answer": "1"} for messages in chats], None, [2, 5]),
    ]:
        path = write(tmp_path / f"{len(rows)}-{len(kept)}.jsonl", rows)
        examples = load_examples(config(path), "train", tokenizer, progress=False, turns=turns)
        assert [example.index for example in examples] == kept
        assert f"{len(rows) - len(kept)} of {len(rows)} rows dropped, without a prompt in 'question'" in caplog.text


PICTURE = {"type": "image", "image": "a.png"}


@pytest.mark.parametrize(
    "prompt",
    [7, {"role": "user"}, ["Hi"], [{"content": "Hi"}], [{"role": "user"}], [{"role": "user", "content": [PICTURE]}]],
)
def test_a_prompt_of_another_type_is_refused_with_its_row(tmp_path, tokenizer, prompt):
    path = write(tmp_path / "rows.jsonl", [ROWS[0], {"question": prompt, "answer": "1"}])
    way = ", as question.role" if isinstance(prompt, dict) else ""
    reason = rf"dataset_prompt_column='question': row 1 \(from 0\) has .*: a prompt is .*, or name another column{way}$"
    with pytest.raises(ConfigError, match=reason):
        load_examples(config(path), "train", tokenizer, progress=False)


BOTH = "dataset_answer_column='question': it is dataset_prompt_column too"
DROPPED = (
    "dataset_name='.*rows.jsonl': no row of split 'train' is left: 1 of 2 rows dropped, without a gold answer .*; "
    "1 of 2 rows dropped, without a prompt in 'question'"
)


@pytest.mark.parametrize(
    ("rows", "options", "split", "reason"),
    [
        (ROWS, ["--dataset_answer_column=question"], "train", BOTH),
        (ROWS, [], "test", "dataset_test_split='test': .*set eval_steps to 0"),  # a single file has none
        ([{"question": "Why?", "answer": None}, {"answer": "4"}], [], "train", DROPPED),
    ],
)
def test_a_file_that_gives_no_row_with_these_settings_is_refused(tmp_path, tokenizer, rows, options, split, reason):
    with pytest.raises(ConfigError, match=reason):
        load_examples(config(write(tmp_path / "rows.jsonl", rows), *options), split, tokenizer, progress=False)


@pytest.mark.parametrize("name", ["prompts", "completions", "trainer_state", "prompt_texts"])
def test_a_column_that_would_hide_what_reward_functions_are_given_is_refused(tmp_path, model_folder, name):
    path = write(tmp_path / "rows.jsonl", [{**row, name: "x"} for row in ROWS])
    lengths = "--max_prompt_length", "96", "--max_completion_length", "24"
    asked = config(path, "--model_name_or_path", str(model_folder), "--beta", "0", "--eval_steps", "0", *lengths)
    with pytest.raises(ConfigError, match=f"dataset_name='.*rows.jsonl': .* something else as {name}, the"):
        dry_run(asked)


def test_a_limit_takes_the_first(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", ROWS * 5)
    assert [e.index for e in load_examples(config(path), "train", tokenizer, limit=3, progress=False)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="^dataset_config='main': dataset_name .* is a path"):
        load_examples(config(path, "--dataset_config", "main"), "train", tokenizer)


GOOD = json.dumps(ROWS[0]) + "\n"
DEEP = "[" * 2000 + "]" * 2000


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("nobody/nothing", None, "dataset_name='nobody/nothing': split 'train' cannot be loaded"),
        ("./nothing", None, "dataset_name='./nothing': there is no such file or folder: correct the path"),
        ("rows.tsv", "question\tanswer\n", "one type, .json, .jsonl, .parquet, .csv, .*; found rows.tsv"),
        ("header.csv", "question,answer\n", r"\(header.csv: there is no row in it\)"),
        ("empty.csv", "", r"\(empty.csv: No columns to parse from file\)"),
        ("uneven.csv", "question,answer\nx,1\nx,y,1\n", r"\(uneven.csv: .* line 3, saw 3\)"),
        ("empty.jsonl", "", r"'train' cannot be loaded \(empty.jsonl: there is no row in it\): correct the file"),
        ("blank.jsonl", "\n\n", r"\(blank.jsonl: there is no row in it\)"),
        ("empty.json", "[]", r"\(empty.json: there is no row in it\)"),
        ("broken.jsonl", GOOD + '\n{"question": \n' + GOOD, r"\(broken.jsonl, line 3: Expecting value"),
        ("broken.json", '[{"question": "a",\n "answer": }]', r"\(broken.json, line 2: Expecting value"),
        ("lines.json", GOOD + '{"question": \n', r"\(lines.json, line 2: Expecting value"),
        ("half.jsonl", GOOD + '{"question": "\\ud800"}\n', r"\(half.jsonl, line 2: .* surrogates not allowed"),
        ("latin.jsonl", b'{"question": "\xe4"}\n', r"\(latin.jsonl, line 1: .* can't decode byte"),
        ("lists.jsonl", "[1, 2]\n[3]\n", r"\(lists.jsonl, line 2: Extra data"),
        ("deep.jsonl", f'{{"question": {DEEP}}}\n', "cannot be loaded"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path, monkeypatch, tokenizer, caplog, name, content, reason):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=reason):
        load_examples(config(name), "train", tokenizer, progress=False)
    assert "Failed to" not in caplog.text, "that one sentence says it"


def test_a_folder_or_a_table_without_rows_is_refused(tmp_path, tokenizer):
    empty = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    pyarrow.parquet.write_table(empty.empty_table(), tmp_path / "empty.parquet")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "mixed").mkdir()
    write(tmp_path / "mixed/train-0.jsonl")
    write(tmp_path / "mixed/train-1.parquet")
    for name, reason in {
        "empty.parquet": r"cannot be loaded \(empty.parquet: there is no row in it\)",
        "nothing": "split 'train' needs files .* found none: rename or convert them, or set dataset_train_split",
        "mixed": "found mixed/train-0.jsonl, mixed/train-1.parquet: rename or convert",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            load_examples(config(tmp_path / name), "train", tokenizer, progress=False)


def test_a_folder_has_splits_each_in_one_or_several_files(tmp_path, tokenizer):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data/train-00000-of-00002.parquet")
    write(tmp_path / "data/train-00001-of-00002.parquet", ROWS[:1])
    write(tmp_path / "held_out.jsonl", ROWS[1:])
    for split, gold in (("train", ["2", "4", "2"]), ("held_out", ["4"])):
        assert golds_of(tokenizer, tmp_path, split, "--dataset_test_split", "held_out") == gold
    with pytest.raises(ConfigError, match=r"called test\.\* or test-\*\.\*, or all in a folder test; found .*: rename"):
        load_examples(config(tmp_path), "test", tokenizer, progress=False)


LOOSE = [{"question": "Three?", "answer": "3", "level": 3}]


def test_what_save_to_disk_wrote_is_a_dataset(tmp_path, tokenizer):
    train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(LOOSE)
    train.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")

    def golds(name: str, split: str, *options: str) -> list[str]:
        return golds_of(tokenizer, tmp_path / name, split, *options)

    assert golds("one", "train") == golds("both", "train") == ["2", "4"] and golds("both", "test") == ["3"]
    (tmp_path / "both/dataset_dict.json").unlink()  # each split saved by itself
    assert golds("both", "train") == ["2", "4"]
    assert golds("one", "train[1:]", "--dataset_train_split=train[1:]") == ["4"]
    assert sorted(golds("one", "train", "--eval_holdout=1") + golds("one", "test", "--eval_holdout=1")) == ["2", "4"]
    assert _split(EvaluateConfig(dataset_name=str(tmp_path / "one"))) == "train"
    with pytest.raises(ConfigError, match="dataset_test_split='test': .*one is a single dataset: set eval_holdout"):
        golds("one", "test")
    with pytest.raises(ConfigError, match="split 'dev' is not among those that were saved, test, train: set dataset_t"):
        golds("both", "dev", "--dataset_test_split=dev")
    (tmp_path / "one/state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"one/state.json cannot be read \(KeyError: .*\): save the dataset again"):
        golds("one", "train")
    train.select([]).save_to_disk(tmp_path / "none")
    with pytest.raises(ConfigError, match="there is no row in .*/none: save some"):
        golds("none", "train")


def test_the_hubs_converted_layout_is_a_dataset_and_of_several_one_is_named(tmp_path, tokenizer):
    hub = tmp_path / "hub"
    write(hub / "default/train/0000.parquet")
    write(hub / "default/train/0001.parquet", LOOSE)
    write(hub / "default/test/0000.parquet", LOOSE)
    (hub / "default/train/0000.parquet.metadata").write_text("of a download")
    for folder in hub, hub / "default":
        for split, golds in {"train": ["2", "4", "3"], "test": ["3"]}.items():
            assert golds_of(tokenizer, folder, split) == golds
    write(hub / "socratic/train/0000.parquet", LOOSE)
    write(tmp_path / "clone/main/train-00000-of-00001.parquet")
    write(tmp_path / "clone/socratic/train-00000-of-00001.parquet")
    for folder, first in {hub: "default", tmp_path / "clone": "main"}.items():
        both = f"split 'train' is in {folder}/{first} and in {folder}/socratic: name one of these, or move the files"
        with pytest.raises(ConfigError, match=f"^dataset_name='{folder}': {both}"):
            load_examples(config(folder), "train", tokenizer)


@pytest.mark.parametrize(
    "answer, gold",
    [
        *[("He has 3.\n#### 1,080", "1,080"), ("#### -10", "-10"), ("42", "42"), (42, "42"), (18.0, "18")],
        *[(2.5, "2.5"), (datetime(2024, 5, 1), "2024-05-01"), (datetime(2024, 5, 1, 6), "2024-05-01 06:00:00")],
        *[("a #### b #### c ", "c"), ("None", "None"), (None, ""), (float("nan"), ""), ("\t", ""), ("18 ####", "")],
    ],
)
def test_gold_answers(answer, gold):
    assert gold_answer(answer) == gold


def test_a_system_prompt_comes_first_unless_the_data_has_one(tokenizer):
    with_system = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render_prompt(tokenizer, "Hi", "Be brief.") == with_system
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert render_prompt(tokenizer, messages, "Be long.") == with_system


def test_a_tokenizer_without_a_chat_template_gets_plain_text(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert render_prompt(tokenizer, "Two and two?", "Be brief.") == "Be brief.\n\nTwo and two?\n\n"
    assert render_prompt(tokenizer, "Two and two?", "") == "Two and two?\n\n"
    messages = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "It is"}]
    assert render_prompt(tokenizer, messages, "Be brief.") == "Be brief.\n\nTwo and two?\n\nIt is"


class Bank:
    """What an environment and its tools are to a prompt (grpo/data/records.py)."""

    tools: ClassVar = [{"type": "function", "function": {"name": "balance", "description": "Return a balance."}}]

    def observe(self, columns):
        return f" You have {columns['level']} coins." if columns["level"] > 1 else ""


WITH_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}|{% endfor %}assistant:"
)


def test_a_prompt_has_the_tools_and_what_the_environment_says_of_its_row(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(tokenizer, "chat_template", WITH_TOOLS)
    first, second = load_examples(config(write(tmp_path / "rows.jsonl")), "train", tokenizer, turns=Bank())
    assert first.prompt == "[balance]user:One and one?|assistant:"
    assert second.prompt == "[balance]user:Two and two? You have 2 coins.|assistant:"
    assert second.messages == [{"role": "user", "content": "Two and two? You have 2 coins."}]
    assert second.prompt_ids == tokenizer(second.prompt)["input_ids"]
    chat = [{"role": "system", "content": "Pay."}, {"role": "user", "content": "How much?"}]
    rows = write(tmp_path / "chats.jsonl", [{"question": chat, "answer": "2", "level": 2}])
    (example,) = load_examples(config(rows), "train", tokenizer, turns=Bank())
    assert example.prompt == "[balance]system:Pay.|user:How much? You have 2 coins.|assistant:"
    assert example.conversation[-1]["content"] == "How much? You have 2 coins."


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ raise_exception('no system role') }}", "TemplateError: no system role.*set system_prompt to ''"),
    ],
)
def test_whatever_a_template_raises_is_one_sentence(tmp_path, tokenizer, monkeypatch, template, reason):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=rf"model_name_or_path=.*chat template refuses row 0 \(from 0\) \({reason}"):
        load_examples(config(path), "train", tokenizer, progress=False)


def test_a_template_that_leaves_out_the_question_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% for message in messages %}assistant:{% endfor %}")
    with pytest.raises(ConfigError, match="model_name_or_path=.* leaves out the user's text: .*use"):
        render_prompt(tokenizer, "Two and two?", "")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content.upper() }}")
    assert render_prompt(tokenizer, "Two and two?", "") == "TWO AND TWO?"


def test_a_template_that_leaves_out_the_system_message_is_warned_of_once(tmp_path, tokenizer, monkeypatch, caplog):
    path = write(tmp_path / "rows.jsonl", ROWS * 3)
    load_examples(config(path, "--system_prompt", "Be brief."), "train", tokenizer, progress=False)
    assert "system message" not in caplog.text
    template = "{% for message in messages %}{{ message.content if message.role != 'system' }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    load_examples(config(path, "--system_prompt", "Be brief."), "train", tokenizer, progress=False)
    assert caplog.text.count("the model's chat template leaves the system message out of 6 of 6 prompts") == 1


@pytest.mark.parametrize("beginning", ["It is", "<think>\n", "Spaces after "])
def test_a_last_message_of_the_assistant_is_continued(tokenizer, beginning):
    messages = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": beginning}]
    rendered = render_prompt(tokenizer, messages, "")
    assert rendered == f"<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n{beginning}"
    data_utils = pytest.importorskip("trl.data_utils")
    assert rendered == data_utils.apply_chat_template({"prompt": messages}, tokenizer)["prompt"]


def turns(*texts: str) -> list[dict]:
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, texts, strict=False)]


RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
TEMPLATES = "and the chat template writes the marks of a chat itself: store the question alone, or use prompt_format"


@pytest.mark.parametrize(
    "prompts, options, warning",
    [
        ([RENDERED], [], f"the first prompt has <|im_end|>, {TEMPLATES}"),
        ([turns(RENDERED)], [], f"the first prompt has <|im_end|>, {TEMPLATES}"),
        (["<|begin_of_text|><|start_header_id|>user"], [], f"the first prompt has <|begin_of_text|>, {TEMPLATES}"),
        ([" <s>[INST] One? [/INST]"], ["--prompt_format=chat"], f"the first prompt has <s>[INST], {TEMPLATES}"),
        ([RENDERED], ["--prompt_format=raw"], None),
        (["What does HTML's <s>one</s> mean, and |x|, <|x|> and <think>?"], [], None),
        ([json.dumps(turns("One?"))], [], "the first prompt is the text of a list of messages, which is asked as it"),
        ([str(turns("One?"))], ["--prompt_format=raw"], "the first prompt is the text of a list of messages, which"),
        (['[{"from": "human", "value": "One?"}]'], [], "the first prompt is the text of a list of messages, which is"),
        (['[1, 2]: whose role is "system"?'], [], None),
        ([turns("One?", "It is 1."), turns("Two?", "It is 2.")], [], "the prompts end with the assistant's answer, wh"),
        ([turns("One?", "It is 1."), turns("Two?", "It is")], [], None),
        ([turns("One?", "Step 1:"), turns("Two?", "Step 1:")], [], None),
        ([turns("One?", "It is 1."), turns("Two?", "2", "Sure?")], [], None),
        ([turns("One?", "A."), turns("Two?", "B.")], ["--dataset_answer_column="], "the prompts end with the assistan"),
        ([turns("One?", "Well,"), turns("Two?", "Well,")], ["--dataset_answer_column="], None),
        (["One?", "Two?"], [], None),
    ],
)
def test_prompts_that_surely_are_not_meant_are_warned_of_once(tmp_path, tokenizer, caplog, prompts, options, warning):
    rows = [{"question": prompt, "answer": str(number)} for number, prompt in enumerate(prompts, 1)]
    load_examples(config(write(tmp_path / "rows.jsonl", rows), *options), "train", tokenizer, progress=False)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (warning is not None) and all(text.startswith(f"train: {warning}") for text in warnings)


def test_the_template_reads_chat_template_kwargs(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path / "rows.jsonl")
    template = "{{ messages[-1].content }}{{ '' if enable_thinking is defined and not enable_thinking else '<think>' }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)

    def prompts(*options) -> list[str]:
        return [example.prompt for example in load_examples(config(path, *options), "train", tokenizer, progress=False)]

    assert prompts() == ["One and one?<think>", "Two and two?<think>"]
    off = prompts("--chat_template_kwargs", '{"enable_thinking": false}')
    assert off == ["One and one?", "Two and two?"]
    (tmp_path / "run.yaml").write_text("chat_template_kwargs:\n  enable_thinking: false\n")
    assert prompts("--config", str(tmp_path / "run.yaml")) == off
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match=r"chat_template_kwargs=\{'enable_thinking': False\}: .*no template: leave"):
        prompts("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_each_step_equally_and_without_overlap(world_size):
    stream = PromptStream(range(50), prompts_per_step=8, seed=3)
    for step in range(20):
        shares = [stream.examples_of(step, rank, world_size) for rank in range(world_size)]
        whole = [index for share in shares for index in share]
        assert {len(share) for share in shares} == {8 // world_size} and len(set(whole)) == 8
        assert whole == stream.examples_of(step)  # the same examples whatever the number of ranks


def test_an_epoch_shows_no_example_twice_and_the_next_is_shuffled_anew():
    stream = PromptStream(range(24), prompts_per_step=8, seed=0)
    epochs = [[index for step in range(start, start + 3) for index in stream.examples_of(step)] for start in (0, 3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(24))] * 2
    assert epochs[0] != epochs[1]


def test_the_order_is_the_seeds_and_the_step_is_the_whole_state():
    first, again, different = (PromptStream(range(100), 10, seed) for seed in (1, 1, 2))
    assert [first.examples_of(step) for step in range(30)] == [again.examples_of(step) for step in range(30)]
    assert again.examples_of(17) == first.examples_of(17)  # asked out of order: as after a restart
    assert first.examples_of(0) != different.examples_of(0)


def test_a_given_order_is_kept_and_goes_on_from_the_start_in_the_same_step():
    rows = [SimpleNamespace(columns={"difficulty": value, "text": "a"}) for value in (5, 1.5, 3, 1, 4)]
    streams = {
        name: PromptStream(range(5), 2, seed=0, order=order_of(TrainerConfig(dataset_order=name), rows))
        for name in ("as_is", "column:difficulty", "shuffled")
    }

    def ten(stream: PromptStream) -> list[int]:
        return [example for step in range(5) for example in stream.examples_of(step)]

    assert ten(streams["as_is"]) == [0, 1, 2, 3, 4] * 2
    assert ten(streams["column:difficulty"]) == [3, 1, 2, 4, 0] * 2
    assert ten(streams["shuffled"]) == ten(PromptStream(range(5), 2, seed=0))
    for name, value in (("text", "'a'"), ("level", "None")):
        with pytest.raises(ConfigError, match=f"dataset_order='column:{name}': that column of .* has {value}: use num"):
            order_of(TrainerConfig(dataset_order=f"column:{name}"), rows)
    with pytest.raises(ConfigError, match="dataset_order='random': use shuffled, adaptive, as_is or"):
        TrainerConfig(dataset_order="random")


def adaptive(teaches: Callable[[int, int], bool], rounds: int, lag: int = 0) -> tuple[AdaptiveStream, list[list[int]]]:
    """A stream over 20 prompts in rounds of 2 steps x 4, recorded by two ranks, and the prompts of its rounds."""
    stream, drawn = AdaptiveStream(range(20), 4, 7, steps_per_round=2, max_lag=lag), []
    for number in range(rounds):
        stream.examples_of(2 * (number + lag))  # workers draw ahead
        shares = [stream.groups_of((2 * number, 2 * number + 1), rank, 2) for rank in range(2)]
        by_rank = [{group: teaches(prompt, number) for prompt, group in zip(*share, strict=True)} for share in shares]
        stream.record(by_rank)
        drawn.append(stream.examples_of(2 * number) + stream.examples_of(2 * number + 1))
    return stream, drawn


def test_a_prompt_is_taken_with_the_share_of_its_groups_that_had_a_signal():
    """By the count of turns that such chances give on average."""
    _, drawn = adaptive(lambda prompt, number: prompt < 10, rounds=200)
    counts = Counter(prompt for prompts in drawn for prompt in prompts)
    epochs = counts[0]
    assert all(counts[prompt] == pytest.approx(epochs, rel=0.1) for prompt in range(10))  # one is not twice in a step
    # Taken k times without a signal, it waits k + 1 turns on average: after n turns it came about sqrt(2 n) times.
    expected = math.sqrt(2 * epochs)
    seldom = [counts[prompt] for prompt in range(10, 20)]
    assert expected / 2 < min(seldom) and sum(seldom) / 10 == pytest.approx(expected, rel=0.25)
    assert {len({*prompts[:4]}) for prompts in drawn} == {len({*prompts[4:]}) for prompts in drawn} == {4}


def test_the_signals_are_all_its_state_and_drawing_ahead_needs_none_that_is_not_there_yet():
    for lag in (0, 2):
        stream, drawn = adaptive(lambda prompt, number: (prompt + number) % 3 == 0, rounds=40, lag=lag)
        again = AdaptiveStream(range(20), 4, 7, 2, lag)
        again.signals = stream.signals[: 30 * 8]  # what a checkpoint after round 30 keeps
        asked = [again.examples_of(2 * number) + again.examples_of(2 * number + 1) for number in range(31 + lag)]
        assert asked[: len(drawn)] == drawn[: len(asked)]
    always, never = (adaptive(lambda *_, has=has: has, 6)[1] for has in (True, False))
    plain = PromptStream(range(20), 4, 7)
    first_epoch = [prompt for step in range(5) for prompt in plain.examples_of(step)]
    assert [prompt for prompts in always for prompt in prompts][:20] == first_epoch and always != never


def test_other_prompts_are_none_of_the_batch_and_fixed_by_the_seed():
    stream, same = PromptStream(range(40), prompts_per_step=8, seed=0), PromptStream(range(40), 8, 0)
    batch = stream.examples_of(2) + stream.examples_of(3)
    first = stream.replacements(2, 2, attempt=1, places=[0, 3, 15])
    assert not set(first) & set(batch) and len(set(first)) == 3
    assert first == same.replacements(2, 2, 1, [0, 3, 15])
    # A place's prompt does not depend on which other places ask, so neither on the number of ranks.
    assert first[1:] == stream.replacements(2, 2, 1, [3]) + stream.replacements(2, 2, 1, [15])
    assert first != stream.replacements(2, 2, 2, [0, 3, 15]) and first != stream.replacements(4, 2, 1, [0, 3, 15])


def test_an_attempt_gives_no_prompt_of_an_earlier_one_while_the_data_has_others():
    stream = PromptStream(range(80), prompts_per_step=8, seed=0)
    batch, places = stream.examples_of(2) + stream.examples_of(3), range(16)
    attempts = [stream.replacements(2, 2, attempt, places) for attempt in range(1, 6)]
    assert len({*batch, *(prompt for attempt in attempts[:4] for prompt in attempt)}) == 80
    # Then the others are given again, to other places.
    assert not set(attempts[4]) & set(batch) and attempts[4] not in attempts[:4]


def test_where_the_batch_is_all_the_data_any_other_prompt_does():
    stream = PromptStream(range(8), prompts_per_step=8, seed=0)
    first, second = (stream.replacements(0, 1, attempt, range(8)) for attempt in (1, 2))
    assert set(first) == set(second) == set(range(8)) and first != second


def test_too_small_a_dataset_is_refused():
    with pytest.raises(ConfigError, match="prompts_per_step=8: the dataset has only 7 usable prompts"):
        PromptStream(range(7), 8, 0)
