"""Packing, padding, places and cutting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.model.packing import Batcher

ANY = 10**9
PACKED, PADDED = Batcher(0, packs=True), Batcher(0, packs=False)


def test_equal_prompts_are_found_wherever_they_stand_and_whatever_holds_them():
    mixed = [([7, 8], [1, 2]), ([9], [3, 4]), (np.asarray([7, 8], np.int32), np.asarray([5, 6], np.int32))]
    batch = PACKED.make(mixed, "cpu")
    assert batch.input_ids.tolist() == [[7, 8, 1, 5, 9, 3]]
    assert batch.targets.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.predicts.tolist() == [1, 2, 4, 5, 1, 3]


ids = st.integers(0, 9)
# Few prompts, so that some are shared.
sequence = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.lists(ids, max_size=6))


def histories(batch) -> list[list[int]]:
    """What each predicting place has seen, followed from the tensors alone."""
    if batch.tree is None:
        width = batch.input_ids.shape[1]
        rows = batch.input_ids.tolist()
        return [rows[place // width][: place % width + 1] for place in batch.predicts.tolist()]
    flat, seen, at = batch.input_ids[0].tolist(), [], 0
    for prompt, completions in batch.tree.groups:
        start = flat[at : at + prompt]
        seen += [start[: place + 1] for place in range(prompt)]
        at += prompt
        for length in completions:
            seen += [start + flat[at : at + place + 1] for place in range(length)]
            at += length
    assert [len(tokens) - 1 for tokens in seen] == batch.position_ids[0].tolist()
    return [seen[place] for place in batch.predicts.tolist()]


@pytest.mark.parametrize("batcher", [PACKED, PADDED])
@settings(deadline=None)
@given(sequences=st.lists(sequence, min_size=1, max_size=8), draw=st.randoms(use_true_random=False))
def test_every_target_is_predicted_from_all_that_stands_before_it(batcher, sequences, draw):
    """Answers stand there too, and are no targets."""
    predicted = [
        draw.choice([None, np.array([draw.random() < 0.5 for _ in completion], bool)]) for _, completion in sequences
    ]
    batch = batcher.make(sequences, "cpu", predicted)
    expected = [
        (list(prompt) + list(completion[:place]), token)
        for (prompt, completion), marks in zip(sequences, predicted, strict=True)
        for place, token in enumerate(completion)
        if marks is None or marks[place]
    ]
    assert list(zip(histories(batch), batch.targets.tolist(), strict=True)) == expected


def tokens(batcher, sequences, rows) -> int:
    """What a batch costs, counted by hand."""
    if batcher is PADDED:
        return len(rows) * max(sum(map(len, sequences[row])) for row in rows)
    prompts = {tuple(sequences[row][0]) for row in rows}
    return sum(map(len, prompts)) + sum(len(sequences[row][1]) for row in rows)


@pytest.mark.parametrize("batcher", [PACKED, PADDED])
@settings(deadline=None)
@given(sequences=st.lists(sequence, max_size=20), budget=st.integers(1, 30))
def test_a_cut_takes_every_sequence_once_and_keeps_the_budget(batcher, sequences, budget):
    batches = batcher.cut(sequences, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(sequences)))
    for batch in batches:
        assert len(batch) == 1 or tokens(batcher, sequences, batch) <= budget


def test_like_lengths_are_padded_together():
    assert PADDED.cut([([1], [2] * (n - 1)) for n in (10, 2, 9, 2, 2)], budget=20) == [[0, 2], [1, 3, 4]]


def test_groups_stay_together_where_they_fit_and_their_prompt_counts_once():
    three_each = [([token] * 10, [0] * 5) for token in (1, 2, 3)] * 3  # three groups of 10 + 3 x 5 = 25 tokens
    assert PACKED.cut(three_each, budget=50) == [[0, 3, 6, 1, 4, 7], [2, 5, 8]]
    assert PACKED.cut(three_each, budget=49) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    # Larger than any batch: as many as fit beside the prompt, which is in each of them.
    assert PACKED.cut(three_each[:1] * 5, budget=20) == [[0, 1], [2, 3], [4]]
