"""Padding, places and cutting."""

from hypothesis import given
from hypothesis import strategies as st

from grpo.batch import cut_by_tokens, make_batch


def test_the_worked_example_of_the_docstring():
    batch = make_batch([[7, 8], [9]], [[1, 2], [3]], pad_token_id=0, device="cpu")
    assert batch.input_ids.tolist() == [[7, 8, 1, 2], [9, 3, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.predicts.tolist() == [1, 2, 4]
    assert batch.targets.tolist() == [1, 2, 3]


def test_a_pad_token_inside_a_completion_is_a_token():
    pad = eos = 5
    batch = make_batch([[1, pad], [2]], [[eos], [3, pad, eos]], pad, "cpu")
    assert batch.targets.tolist() == [eos, 3, pad, eos]


def test_an_empty_completion_has_no_places():
    batch = make_batch([[1, 2], [3], [4]], [[], [6], []], 0, "cpu")
    assert batch.targets.tolist() == [6]
    assert batch.input_ids.flatten()[batch.predicts].tolist() == [3]


ids = st.integers(0, 9)
sequence = st.tuples(st.lists(ids, min_size=1, max_size=6), st.lists(ids, max_size=6))


@given(st.lists(sequence, min_size=1, max_size=6))
def test_every_place_stands_before_its_target(sequences):
    prompts, completions = zip(*sequences, strict=True)
    batch = make_batch(prompts, completions, 0, "cpu")
    assert batch.targets.tolist() == [token for completion in completions for token in completion]
    assert batch.input_ids.flatten()[batch.predicts + 1].tolist() == batch.targets.tolist()
    for row, (prompt, completion) in enumerate(sequences):
        assert batch.input_ids[row, : len(prompt) + len(completion)].tolist() == prompt + completion


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_a_cut_takes_every_sequence_once_and_keeps_the_budget(lengths, budget):
    batches = cut_by_tokens(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= budget


def test_like_lengths_are_cut_together():
    assert cut_by_tokens([10, 2, 9, 2, 2], budget=20) == [[0, 2], [1, 3, 4]]
