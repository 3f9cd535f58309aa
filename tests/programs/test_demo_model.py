import json
import random
import re
from itertools import islice

import pytest
from rounding import assert_rounded
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.model import TAGS, answer_of, build, build_model, build_tokenizer, demonstration_loss, greedy_accuracy, train
from demo.task import STORIES, Problem, blurt, problems, steps, untagged, write_dataset


def some(count: int, held_out: bool = False, seed: int = 1) -> list[Problem]:
    return list(islice(problems(random.Random(seed), held_out), count))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The tokenizer and a model that has learned nothing, in the folder where a build leaves them."""
    folder = tmp_path_factory.mktemp("demo")
    tokenizer = build_tokenizer(seed=0)
    tokenizer.save_pretrained(folder)
    build_model(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(saved):
    return AutoTokenizer.from_pretrained(saved)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "text", ["<think>2+8=10, 10-8=2</think><answer>2</answer>", "Zoë's\n\n  naïve 日本 🙂\t½ x1y22"]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_autotokenizer_cuts_text_as_the_trained_tokenizer_does(tokenizer):
    trained = build_tokenizer(seed=0)
    texts = [p.question + steps(p) for p in some(50)] + ["it's 1234\n\n a-b (c)!?\r\n  Tom_2x  end"]
    assert [tokenizer.encode(t) for t in texts] == [trained.encode(t) for t in texts]


def test_digits_are_split_one_by_one(tokenizer):
    assert [t for t in tokenizer.tokenize("has 1234 and 56=") if any(c.isdigit() for c in t)] == list("123456")


def test_words_of_the_task_are_single_tokens(tokenizer):
    assert len(tokenizer) <= 512
    assert tokenizer.tokenize("assistant\nThe answer") == ["assistant", "Ċ", "The", "Ġanswer"]


def test_tags_are_single_ordinary_tokens(tokenizer):
    ids = tokenizer.encode("".join(TAGS) + "<|im_end|>")
    assert len(ids) == 5
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(TAGS)


def test_pad_differs_from_eos(tokenizer, saved):
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    generation = AutoModelForCausalLM.from_pretrained(saved).generation_config
    assert (generation.pad_token_id, generation.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


def test_chat_template_adds_no_system_message(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2?"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def test_model_is_tiny_fp32_and_tied(saved, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.num_parameters() < 200_000
    assert {str(p.dtype) for p in model.parameters()} == {"torch.float32"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer)


def test_demonstration_loss_counts_the_completion_with_its_end_alone(saved, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(saved)
    problem = some(1)[0]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    completion = tokenizer(blurt(problem) + "<|im_end|>", return_tensors="pt")["input_ids"]
    logits = model(prompt.new_tensor([prompt[0].tolist() + completion[0].tolist()])).logits[0]
    predictions = logits[prompt.shape[1] - 1 : -1].log_softmax(-1)
    expected = -predictions.gather(-1, completion[0, :, None]).mean()
    long = (problem, steps(problem))
    alone = demonstration_loss(model, tokenizer, [(problem, blurt(problem))])
    padded = demonstration_loss(model, tokenizer, [(problem, blurt(problem)), long])
    lengths = [len(tokenizer.encode(text + "<|im_end|>")) for text in (blurt(problem), steps(problem))]
    both = lengths[0] * alone + lengths[1] * demonstration_loss(model, tokenizer, [long])
    assert_rounded(alone, expected)
    assert_rounded(padded, both / sum(lengths))


def test_untrained_model_answers_nothing_right(saved, tokenizer):
    assert greedy_accuracy(AutoModelForCausalLM.from_pretrained(saved), tokenizer, some(8)) == 0.0


def test_a_problem_reads_as_it_is_calculated():
    for problem in some(500):
        assert tuple(int(n) for n in re.findall(r"\d+", problem.question)) == problem.numbers
        assert eval(problem.calculation) == int(problem.answer)
        assert all(0 <= result <= 15 for result in problem.results)
        assert all(2 <= n <= 9 for n in problem.numbers)


def test_all_stories_are_told_unless_some_are_chosen():
    assert {p.story for p in some(200)} == set(STORIES)
    assert {p.story for p in islice(problems(random.Random(1), stories=["bus"]), 20)} == {"bus"}


def test_demonstrations():
    problem = Problem("game", "", (7, 3, 4), ("+", "-"))
    assert steps(problem) == "<think>7+3=10, 10-4=6</think><answer>6</answer>"
    assert blurt(problem) == "<think>easy</think><answer>6</answer>"
    assert untagged(problem) == "The answer is 6."
    for problem in some(200):
        assert answer_of(steps(problem)) == answer_of(blurt(problem)) == problem.answer
        assert answer_of(untagged(problem)) is None
        sums = re.findall(r"(\d+)([+-])(\d+)=(\d+)", steps(problem))
        assert len(sums) == 2
        assert all(int(a) + (int(b) if op == "+" else -int(b)) == int(result) for a, op, b, result in sums)


def test_last_answer_counts():
    assert answer_of("<answer>1</answer> no, <answer> 2 </answer>") == "2"
    assert answer_of("<answer>3") is None


def test_held_out_calculations_never_appear_in_training():
    train = {p.calculation for p in some(20_000)}
    test = {p.calculation for p in some(2_000, held_out=True)}
    assert not train & test
    assert 0.05 < len(test) / len(train | test) < 0.2


def test_dataset_has_distinct_problems_and_a_disjoint_split(tmp_path):
    write_dataset(tmp_path, seed=0)
    train, test = read(tmp_path / "train.jsonl"), read(tmp_path / "test.jsonl")
    assert len(test) == 256
    assert all(set(row) == {"question", "answer"} for row in train + test)
    assert all(isinstance(row["answer"], str) for row in train + test)
    assert len({row["question"] for row in train + test}) == len(train) + len(test)
    held_out = {p.question for p in some(10_000, held_out=True)}
    assert not held_out & {row["question"] for row in train}


def test_dataset_is_made_by_its_seed(tmp_path):
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        write_dataset(tmp_path / name, seed, train_size=50, test_size=50)
    for split in ("train.jsonl", "test.jsonl"):
        a, b, c = ((tmp_path / name / split).read_text() for name in "abc")
        assert a == b
        assert a != c


def test_training_says_how_far_it_is_in_lines(saved, capsys, monkeypatch):
    monkeypatch.setattr("demo.model.SHOWN_EVERY", 0)
    model = AutoModelForCausalLM.from_pretrained(saved)
    train(model, iter(range(9999)), lambda _: sum(p.sum() for p in model.parameters()), lambda: 0.5, name="learning",
          updates=2, learning_rate=1e-3)  # fmt: skip
    first, second, accuracy = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"learning: 1 of 2 updates, loss -?[0-9.]+", first) and second.startswith("learning: 2 of 2")
    assert accuracy == "learning: accuracy 50%"


def test_build_does_not_overwrite(tmp_path):
    with pytest.raises(FileExistsError, match="remove it"):
        build(tmp_path, seed=0)


@pytest.mark.rare
def test_built_model_answers_a_quarter_of_the_held_out_problems(tmp_path):
    build(tmp_path / "model", seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert 0.10 < greedy_accuracy(model, tokenizer, some(256, held_out=True)) < 0.40
