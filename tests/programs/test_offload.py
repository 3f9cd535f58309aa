"""With its optimizer on the CPU a run has the weights that it has without: killed, resumed, on other ranks."""

import pytest
import torch
from altered_trainer import killed_at
from rounding import FORMULA, assert_rounded
from trainer_runs import finish, options, training, weights, went_on

KILLED = killed_at("grpo.run.checkpoints:Checkpoints.delete_old:before:1")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_twice_it_has_the_weights_of_a_run_without_offload(model_folder, data_folder, letters, tmp_path):
    def words(run: str, **changes) -> list[str]:
        settings = {"max_steps": 4, "save_steps": 1, "save_total_limit": 0, "eval_steps": 0, "report_to": "none"}
        # Clipping takes a norm that is summed in another order; a group is drawn by itself whoever draws it.
        settings |= {"beta": 0, "max_grad_norm": 0, "sequences_per_generate": 4}
        return [*options(model_folder, data_folder, tmp_path / run, **settings, **changes), *letters]

    finish(1, words("without"))
    offloaded = words("with", deepspeed="configs/ds_offload.json", resume_from_checkpoint="last")
    for step in (0, 1):
        with training(1, offloaded, *KILLED) as process:
            output, _ = process.communicate(timeout=200)
        assert process.returncode != 0 and went_on(output) == step, output
    here, there = (weights(tmp_path / run / "checkpoint-2") for run in ("with", "without"))
    assert all(torch.equal(here[name], there[name]) for name in there)

    output = finish(2, offloaded)
    assert went_on(output) == 2 and "DeepSpeed rearranges it for 2" in output
    here, there = (weights(tmp_path / run / "model") for run in ("with", "without"))
    for name in there:
        assert_rounded(here[name], there[name], FORMULA, about=name)
