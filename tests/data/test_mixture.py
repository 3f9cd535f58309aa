"""Several datasets as one: the file that lists them, the order of training, and a run with metrics for each."""

import re

import numpy as np
import pytest
from recorded import write_rows
from trainer_runs import lines, options, plain_python

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.dataset import parts_of, weights_of
from grpo.data.prompts import PromptStream, load_examples, order_of
from grpo.data.records import Example

SUMS = [{"question": f"What is {a} plus 3?", "answer": str(a + 3), "level": 20 - a} for a in range(20)]
POEMS = [{"wish": f"Write {n} lines.", "source": "a friend", "lines": n} for n in range(1, 6)]
LISTED = """
- path: sums
  weight: 3
- path: poems.jsonl
  prompt_column: wish
  test_split: ""
  weight: 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_rows(tmp_path / "sums/train.jsonl", SUMS)
    write_rows(tmp_path / "sums/test.jsonl", SUMS[:6])
    write_rows(tmp_path / "poems.jsonl", POEMS)
    (tmp_path / "mix.yaml").write_text(LISTED)
    return tmp_path


def config(folder, *more) -> TrainerConfig:
    return parse_arguments(TrainerConfig, "", ["--dataset_name", f"{folder}/mix.yaml", "--system_prompt", "", *more])


def test_rows_of_all_have_the_columns_of_all_and_their_source(folder, tokenizer):
    examples = load_examples(config(folder), "train", tokenizer, progress=False)
    first, last = examples[0], examples[-1]
    assert [example.index for example in examples] == [*range(25)]
    assert [example.source for example in examples] == ["sums"] * 20 + ["poems"] * 5
    names = ["question", "answer", "level", "wish", "lines", "source"]
    assert first.columns == dict(zip(names, ["What is 0 plus 3?", "3", 20, None, None, "sums"], strict=True))
    # A column of the dataset's own stays.
    assert last.columns == dict(zip(names, [None, None, None, "Write 5 lines.", 5, "a friend"], strict=True))
    held_out = load_examples(config(folder), "test", tokenizer, 4, progress=False)
    assert [example.source for example in held_out] == ["sums"] * 4
    (folder / "mix.yaml").write_text(LISTED.replace("weight: 3", "weight: 0"))
    trained = load_examples(config(folder), "train", tokenizer, progress=False)
    assert {example.source for example in trained} == {"poems"}
    assert weights_of(config(folder)) == {"poems": 1}
    assert examples[0].columns.keys() == held_out[0].columns.keys()


def test_a_dataset_that_is_not_trained_on_or_not_evaluated_is_left_out(folder, tokenizer):
    """A single file too, which has no test split."""
    sums = "- path: sums\n  weight: 1\n"
    for rest in ("weight: 0", "weight: 0, test_split: ''", "weight: 2, split: ''"):
        (folder / "mix.yaml").write_text(f"{sums}- {{path: poems.jsonl, prompt_column: wish, {rest}}}")
        examples = load_examples(config(folder), "train", tokenizer, progress=False)
        assert {example.source for example in examples} == {"sums"} and weights_of(config(folder)) == {"sums": 1}
    (folder / "mix.yaml").write_text(
        "- {path: sums, answer_column: '', weight: 1}\n"
        "- {path: poems.jsonl, prompt_column: wish, answer_column: lines, test_split: '', weight: 1}"
    )
    assert "answer" in load_examples(config(folder), "test", tokenizer, progress=False)[0].columns


def test_of_rows_that_are_held_out_a_dataset_that_names_its_split_gives_none(folder, tokenizer):
    def sources(split: str) -> list[str]:
        examples = load_examples(config(folder, "--eval_holdout", "2"), split, tokenizer, progress=False)
        return [example.source for example in examples]

    assert sources("train") == ["sums"] * 18 + ["poems"] * 5 and sources("test") == ["sums"] * 2
    text = "- {path: sums, split: ''}\n- {path: poems.jsonl, prompt_column: wish, answer_column: ''}\n"
    (folder / "mix.yaml").write_text(text)
    assert sources("train") == ["poems"] * 3 and sources("test") == ["sums"] * 6 + ["poems"] * 2


def test_a_label_is_the_last_part_of_a_path_without_a_files_ending(folder):
    (folder / "mix.yaml").write_text("- path: org/data-v1.0\n- path: org/data-v1.1\n- path: poems.jsonl\n")
    assert [part.label for part in parts_of(config(folder))] == ["data-v1.0", "data-v1.1", "poems"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1", "write a list of datasets, '- path: ...' for each"),
        ("- sums", "write a list of datasets"),
        ("[]", "write a list of datasets"),
        ("- {path: sums, colum: x}", "dataset 1: colum: no such field"),
        ("- {path: sums, prompt_colum: x}", "dataset 1: prompt_colum: no such field; did you mean prompt_column?"),
        ("- {path: sums, weight: -1}", "dataset 1: weight=-1: use a number from 0 on"),
        ("- {path: sums, weight: .nan}", "dataset 1: weight=nan: use a number from 0 on"),
        ("- {path: sums, split: 3}", "dataset 1: split=3: use a text"),
        ("- {weight: 1}", "dataset 1 has no path: add one"),
        ("- {path: sums}\n- {path: other/sums}", "two datasets are called 'sums': give each a label"),
        ("- {path: sums, weight: 1}\n- {path: poems.jsonl}", "give every dataset a weight, or none"),
        ("- {path: sums, weight: 0}\n- {path: poems.jsonl, weight: 0}", "every weight is 0"),
        ("- {path: [", "not YAML"),
        (None, "No such file or directory: give the path of a YAML file"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(folder, text, fault):
    (folder / "mix.yaml").unlink() if text is None else (folder / "mix.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"dataset_name='{folder}/mix.yaml': .*{re.escape(fault)}"):
        parts_of(config(folder))


def examples_of(**counts: int) -> list[Example]:
    sources = [source for source, count in counts.items() for _ in range(count)]
    return [
        Example(index=index, prompt="", prompt_ids=[1], columns={"level": -index}, source=source)
        for index, source in enumerate(sources)
    ]


def test_each_source_has_its_share_and_its_own_epochs_on_any_number_of_ranks():
    examples, weights = examples_of(a=10, b=7, c=100), {"a": 5.0, "b": 2.0, "c": 3.0}
    stream = PromptStream(examples, 6, 1, weights=weights)
    steps = [stream.examples_of(step) for step in range(200)]
    drawn = [example for step in steps for example in step]
    for number in range(1, len(drawn) + 1):
        counts = {source: sum(example.source == source for example in drawn[:number]) for source in weights}
        assert all(abs(counts[source] - number * weight / 10) < 4 for source, weight in weights.items())
    for source, size in (("a", 10), ("b", 7), ("c", 100)):
        mine = [example.index for example in drawn if example.source == source]
        epochs = [mine[start : start + size] for start in range(0, len(mine) - size + 1, size)]
        assert len(epochs) >= 3 and all(len({*epoch}) == size for epoch in epochs)
        assert epochs[0] != epochs[1]
    for step in (0, 57, 199):
        shares = [stream.examples_of(step, rank, 3) for rank in range(3)]
        assert [example for share in shares for example in share] == steps[step]
    assert stream.steps_per_epoch == 117 / 6 and PromptStream(examples, 6, 1).steps_per_epoch == 117 // 6
    again = PromptStream(examples, 6, 1, weights=weights)  # the step number is the whole state
    assert again.examples_of(57) == steps[57]
    assert PromptStream(examples, 6, 2, weights=weights).examples_of(57) != steps[57]


def test_a_given_order_holds_within_each_source(folder):
    examples = examples_of(a=4, b=3)
    order = order_of(config(folder, "--dataset_order", "column:level"), examples)
    stream = PromptStream(examples, 2, 1, order, {"a": 1.0, "b": 1.0})
    drawn = [example for step in range(7) for example in stream.examples_of(step)]
    for source, expected in (("a", [3, 2, 1, 0]), ("b", [6, 5, 4])):
        mine = [example.index for example in drawn if example.source == source]
        assert mine == np.resize(expected, len(mine)).tolist()


def test_a_replaced_prompt_gives_way_to_one_of_its_source_or_to_the_next_of_a_given_order(folder):
    examples, weights = examples_of(a=9, b=60), {"a": 2.0, "b": 1.0}
    stream = PromptStream(examples, 6, 1, weights=weights)
    in_round = stream.examples_of(3) + stream.examples_of(4)
    for attempt in (1, 2):
        others = stream.replacements(3, 2, attempt, range(12))
        assert [other.source for other in others] == [example.source for example in in_round]
        of_b = [example for example in others if example.source == "b"]
        assert len({example.index for example in of_b}) == len(of_b) and not any(map(in_round.count, of_b))

    order = order_of(config(folder, "--dataset_order", "column:level"), examples)
    ordered = PromptStream(examples, 4, 1, order)
    attempts = [ordered.replacements(2, 2, attempt, range(8)) for attempt in (1, 2)]
    assert [example.index for attempt in attempts for example in attempt] == [*range(68 - 16, 68 - 32, -1)]
    mixed = PromptStream(examples, 6, 1, order, weights)
    numbers = [example.index for example in mixed.replacements(0, 1, 1, range(6)) if example.source == "b"]
    first = [example.index for example in mixed.examples_of(0) if example.source == "b"]
    assert numbers == [number - len(first) for number in first]


@pytest.mark.slow
def test_a_run_has_the_rewards_of_each_dataset_and_refuses_other_weights(folder, model_folder):
    (folder / "mine.py").write_text(
        "def told(completions, source, lines, answer, **kwargs):\n"
        "    assert {*source} <= {'sums', 'a friend'}\n"
        "    assert all((gold is None) == (name == 'a friend') for gold, name in zip(answer, source))\n"
        "    return [1.0 if name == 'sums' else count for name, count in zip(source, lines)]\n"
    )
    words = options(model_folder, folder / "mix.yaml", folder / "run", beta=0, max_steps=2, save_steps=2, eval_steps=1)
    words += ["--reward_funcs", f"{folder}/mine.py:told", "correctness_reward", "--prompts_per_step", "8"]
    planned = plain_python(*words, "--dry_run")
    assert "sums: 20, 75% of a run's, poems: 5, 25% of a run's" in planned.stdout, planned.stdout
    run = plain_python(*words)
    assert run.returncode == 0, run.stdout
    before, first, last = lines(folder / "run/metrics.jsonl")
    assert before["eval_n"] == 6 and before["eval_sums_accuracy"] == before["eval_accuracy"]
    assert "eval_poems_accuracy" not in before and before["eval_sums_reward"] == before["eval_reward"]
    for step in (first, last):
        assert step["rewards/sums/told/mean"] == 1 and 1 <= step["rewards/poems/told/mean"] <= 5
        expected = 0.75 * step["rewards/sums/told/mean"] + 0.25 * step["rewards/poems/told/mean"]
        assert step["rewards/told/mean"] == pytest.approx(expected)
    (folder / "mix.yaml").write_text(LISTED.replace("weight: 3", "weight: 2"))
    refused = plain_python(*words, "--resume_from_checkpoint", "last", "--max_steps", "3")
    assert refused.returncode == 2 and "the weights of datasets is {'sums': 3, 'poems': 1} there" in refused.stdout
