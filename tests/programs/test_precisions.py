"""The engine as the trainer starts it: DeepSpeed's files, its process groups, sums of gradients, the optimizer."""

import json
import re
from datetime import timedelta

import pytest
import torch
from altered_trainer import killed_at
from conftest import REPOSITORY, run_python
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from engine_worker import DTYPES, SHIPPED
from rounding import FORMULA, assert_rounded
from sharded import ON_CARDS, in_layers
from torch import nn
from trainer_runs import check_weights, finish, options, training, weights, went_on
from transformers import AutoModelForCausalLM

from grpo.config.trainer import TrainerConfig
from grpo.run.checkpoints import put_steps
from grpo.run.watchdog import TIME_OUT
from grpo.trainer.deepspeed_engine import keep_gradients_apart


@pytest.fixture(scope="module")
def found(model_folder, data_folder, tmp_path_factory) -> dict:
    """What engine_worker.py found in one process."""
    out = tmp_path_factory.mktemp("engine") / "found.pt"
    ended = run_python("tests/engine_worker.py", model_folder, data_folder, out, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return torch.load(out, weights_only=False)


def test_every_shipped_file_is_tried():
    assert {*SHIPPED} == {"ds_config.json", *(f"configs/{path.name}" for path in REPOSITORY.glob("configs/*.json"))}
    for name in SHIPPED:
        zero = json.loads((REPOSITORY / name).read_text())["zero_optimization"]
        assert ("offload_optimizer" in zero) == ("offload" in name)


@pytest.mark.slow
def test_every_file_takes_steps_and_leaves_out_one_that_is_not_finite(found):
    """Every process group waits as long as the reference may take."""
    for (file, dtype), run in found["steps"].items():
        assert run["applied"] == [True, False, True, True], (file, dtype)
        assert run["offloaded"] == (file not in ("ds_config.json", "ds_zero3.json"))
        assert all(run["fused"])
        bf16 = file.endswith("offload.json") and dtype == "bfloat16"
        assert run["summed in"] == (torch.bfloat16 if bf16 else torch.float32)
        assert len(run["time-outs"]) >= 2
        assert {*run["time-outs"]} == {timedelta(seconds=TIME_OUT + TrainerConfig().ref_deadline)}
    refused = r"deepspeed='.*predivided.json': DeepSpeed refuses it: gradient_predivide_factor .*: correct it there"
    assert re.fullmatch(refused, found["refusal"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_offload_changes_no_bit(found, dtype):
    """Where no gradient is clipped: the norm is summed in another order. All sum gradients in fp32."""
    names = "ds_config.json", "mixed.json", "ds_zero3.json"
    here, *others = (found["steps"][file, dtype]["weights"] for file in names)
    for there in others:
        assert len(here) == len(there) and all(map(torch.equal, here, there))


@pytest.mark.slow
def test_sums_of_many_gradients_are_as_good_as_one_gradient_of_all(found):
    exact = found["gradients"]["exact", 10**6]
    errors = {key: ((found_sum - exact).norm() / exact.norm()).item() for key, found_sum in found["gradients"].items()}
    print(errors)
    assert_rounded(errors["exact", 1], 0.0)
    whole = errors["fp32", 10**6]
    assert errors["bf16", 10**6] == whole, "one gradient is no sum"
    assert errors["fp32", 1] < 1.1 * whole < errors["bf16", 1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ratio_of_the_first_pass_is_1_to_the_last_bit(found, dtype):
    """In rounds of three steps, trained on twice, while no weight moves; to a reference of the same weights, too."""
    for (of, kind), run in found["ratios"].items():
        if of == dtype:
            micro_batches, *apart = run
            assert micro_batches > 4 and apart == [0.0, 0.0], kind


@pytest.mark.slow
def test_more_micro_batches_wait_no_more_often_for_the_device(found):
    fetches = found["fetches"]
    for kind in {kind for kind, _ in fetches}:
        assert 0 < fetches[kind, 16] == fetches[kind, 2] < 20


LARGEST_OF_LAYERS = 192 * 64  # numbers of a matrix of the MLP


@pytest.mark.parametrize(
    "tied, frozen, bucket, expected",
    [
        (False, False, 100, False),
        (False, False, 10**6, True),
        (True, False, 100, False),
        (True, False, LARGEST_OF_LAYERS - 1, False),
        (True, False, LARGEST_OF_LAYERS, True),  # the embeddings alone are larger
        (False, False, LARGEST_OF_LAYERS, False),
        (False, True, LARGEST_OF_LAYERS, True),  # a frozen head has no gradient to sum
    ],
)
def test_what_is_larger_than_a_bucket_is_not_summed_beside_the_backward_pass(model, tied, frozen, bucket, expected):
    settings = type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": tied})
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(settings)
    other.lm_head.weight.requires_grad_(not frozen)
    zero = {"overlap_comm": True, "reduce_bucket_size": bucket}
    keep_gradients_apart(zero, other)
    assert zero["overlap_comm"] == expected


def test_counts_of_steps_come_to_their_parameters():
    """As DeepSpeed's universal checkpoint leaves them. Device meta stands for a GPU."""
    away, here = nn.Parameter(torch.zeros(2, device="meta")), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([away, here])
    for parameter in (away, here):
        optimizer.state[parameter]["step"] = torch.tensor(3.0)
    put_steps(optimizer)
    assert optimizer.state[away]["step"].device.type == "meta"
    assert optimizer.state[here]["step"] == 3.0


@pytest.mark.rare
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
        with training(1, offloaded, *killed_at("grpo.run.checkpoints:Checkpoints.save:after:1")) as process:
            output, _ = process.communicate(timeout=200)
        assert process.returncode != 0 and went_on(output) == step, output
    check_weights(tmp_path / "with/checkpoint-2", tmp_path / "without/checkpoint-2")

    output = finish(2, offloaded)
    assert went_on(output) == 2 and "DeepSpeed rearranges it for 2" in output
    here, there = (weights(tmp_path / run / "model") for run in ("with", "without"))
    for name in there:
        assert_rounded(here[name], there[name], FORMULA, about=name)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks, file", [(2, "ds_config.json"), (1, "configs/ds_offload.json"), (3, ON_CARDS)])
def test_in_bfloat16_a_model_in_float32_is_not_rounded_at_the_start(ranks, file, model_folder, data_folder, tmp_path):
    """AdamW's weights after a step too small to change them; their bfloat16 values are others."""
    path = in_layers(file, tmp_path) if file == ON_CARDS else file
    settings = {"max_steps": 1, "save_steps": 1, "eval_steps": 0, "report_to": "none", "beta": 0, "dtype": "bfloat16"}
    settings |= {"learning_rate": 1e-13, "prompts_per_step": 6, "deepspeed": path}
    finish(ranks, options(model_folder, data_folder, tmp_path / "run", **settings))
    there = weights(model_folder)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run/checkpoint-1", "engine")
    for name, weight in there.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12)
    rounded = sum(torch.count_nonzero(weight != weight.bfloat16()).item() for weight in there.values())
    assert rounded > 0.9 * sum(weight.numel() for weight in there.values())
