"""A run that goes on with another number of ranks ends where it would have ended."""

import json

import pytest
import torch
from altered_trainer import killed_at
from rounding import FORMULA, assert_rounded
from trainer_runs import finish, lines, reference, timeless, training, weights, went_on

from grpo.data.records import Example, Group, Sample, StepBatch
from grpo.run.checkpoints import share_anew

KILLED = "grpo.run.checkpoints:Checkpoints.delete_old:before:"
EXAMPLE = Example(index=0, prompt="p", prompt_ids=[1], columns={})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["reference updates", "LoRA", "sharded"])
def test_from_two_ranks_to_four_to_one_in_the_middle_of_rounds(setting, model_folder, tmp_path, kind):
    with reference(model_folder, tmp_path / "server") as server:
        finish(2, setting(tmp_path / "straight", kind, draws=False, ref_servers=server.url))
    run = tmp_path / "run"
    with reference(model_folder, tmp_path / "server 2") as server:
        words = setting(run, kind, draws=False, ref_servers=server.url, resume_from_checkpoint="last")
        for ranks, moment, step in ((2, KILLED + "1", 0), (4, KILLED + "2", 2)):
            with training(ranks, words, *killed_at(moment)) as process:
                output, _ = process.communicate(timeout=200)
            assert process.returncode != 0 and went_on(output) == step, output
        assert json.loads((run / "checkpoint-6/progress.json").read_text())["ranks"] == 4
        output = finish(1, words)
        assert went_on(output) == 6 and "checkpoint-6 is of 4 ranks: DeepSpeed rearranges it for 1" in output
    assert not [path.name for path in run.iterdir() if "universal" in path.name]

    for read in (timeless, lambda folder: lines(folder / "completions.jsonl")):
        for resumed, straight in zip(read(run), read(tmp_path / "straight"), strict=True):
            assert resumed.keys() == straight.keys()
            for name, value in straight.items():
                expected = pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value
                assert resumed[name] == expected, (name, resumed)
    for folder in ("model", "checkpoint-10"):
        resumed, straight = weights(run / folder), weights(tmp_path / "straight" / folder)
        assert resumed.keys() == straight.keys()
        for name in straight:
            assert_rounded(resumed[name], straight[name], FORMULA, about=(folder, name))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_a_round_is_shared_anew_in_the_order_of_its_groups(ranks):
    """Two steps of six groups of two completions, told apart by numbers, with any number of sequences."""

    def share_of(rank: int, of: int) -> list[StepBatch]:
        share, batches = 6 // of, []
        for step in range(2):
            numbers = [100 * step + rank * share + place for place in range(share)]
            groups = [Group(id=number, example=EXAMPLE, rollouts=[]) for number in numbers]
            rewards = torch.tensor([[2.0 * number, 2.0 * number + 1] for number in numbers])
            samples = [
                Sample(prompt_ids=[1], completion_ids=[row], finished=True, group_id=number)
                for number in numbers
                for row in range(number % 4)  # branches: of some groups none
            ]
            of_rewards = {"by_function": torch.stack([rewards, -rewards]), "signal": rewards[:, 0] > 3}
            batches.append(StepBatch(groups=groups, rewards=rewards, samples=samples, **of_rewards))
        return batches

    for before in (1, 2, 3, 6):
        by_rank = [share_of(rank, before) for rank in range(before)]
        for rank in range(ranks):
            for batch, expected in zip(share_anew(by_rank, rank, ranks), share_of(rank, ranks), strict=True):
                assert batch.groups == expected.groups and batch.samples == expected.samples
                for name in ("by_function", "rewards", "signal"):
                    assert torch.equal(getattr(batch, name), getattr(expected, name))
    assert share_anew([[], []], 0, 3) == []
