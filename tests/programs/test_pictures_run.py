"""A run of a vision-language model, server and trainer: it begins at a KL of 0 to its reference and its teacher, and
killed it goes on bit for bit."""

from contextlib import closing

import pictured
import pytest
import torch
from altered_trainer import killed_at
from conftest import running_server
from PIL import Image
from pools import running_pool, workers
from recorded import write_rows
from rounding import NO_KL
from test_pool_runs import LAG, check_survives, drawing
from trainer_runs import check_alike, check_drawn_alike, finish, options, timeless, training, weights, went_on
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from grpo.config.command_line import parse_arguments
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig
from grpo.model.fingerprint import describe
from grpo.model.load import load_model, load_reference, load_settings, load_tokenizer
from grpo.model.pictures import load_processor
from grpo.pool.store import Recording
from grpo.trainer.dry_run import dry_run
from grpo.trainer.publish_reference import WeightPublisher

SIZES = [(24, 16)], [], [(40, 40), (16, 24)], [(8, 56)], [], [(32, 32)], [(20, 36)], [(48, 16)]
MAX_PIXELS = 1024


@pytest.fixture(scope="module")
def words(tmp_path_factory, letters):
    """`words(run, url)`: the trainer's options. Some rows have no picture, and one has two."""
    folder = tmp_path_factory.mktemp("pictured")
    model, data = pictured.save("qwen2_5_vl", folder / "model"), folder / "data"
    (data / "files").mkdir(parents=True)
    for split, copies in (("train", 3), ("test", 1)):
        rows = []
        for number, sizes in enumerate(SIZES * copies):
            files = [f"files/{copies}-{number}-{place}.png" for place in range(len(sizes))]
            for place, (file, size) in enumerate(zip(files, sizes, strict=True)):
                (data / file).write_bytes(pictured.drawing(*size, seed=10 * number + place))
            question = "<image> or ".join(["Which?"] * len(sizes)) if sizes else "How many are two and two?"
            question = "<image>" * len(sizes) + question.replace("<image>", "")
            rows.append({"question": f"{number}: {question}", "answer": f"#### {number}", "images": files})
        write_rows(data / f"{split}.jsonl", rows)

    def make(run, url: str, **more) -> list[str]:
        changes = {"max_steps": 4, "save_steps": 1, "eval_steps": 0, "steps_per_generation": 2, "num_iterations": 1}
        changes |= {"max_completion_length": 12, "max_prompt_length": 200, "max_pixels": MAX_PIXELS}
        changes |= {"beta": 0.1, "ref_servers": url, "ref_deadline": 120, "resume_from_checkpoint": "last"}
        return [*options(model, data, run, **changes | more, report_to="none"), *letters]

    make.model = model
    return make


@pytest.mark.slow
def test_killed_between_two_steps_of_a_round_it_goes_on_bit_for_bit(words, tmp_path):
    runs = tmp_path / "undisturbed", tmp_path / "killed"
    flags = ["--deterministic", "true", "--max_pixels", str(MAX_PIXELS)]
    with running_server(words.model, tmp_path, *flags) as server:
        taught = {"teacher_servers": server.url, "distillation_loss": "forward_kl", "distillation_top_k": 5}
        first, second = (words(run, server.url, **taught) for run in runs)
        finish(1, first)
        with training(1, second, *killed_at("grpo.trainer.step:update:after:4")) as process:
            process.communicate(timeout=120)
        assert went_on(finish(1, second)) == 3
    rows = timeless(runs[0])
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for name in ("kl", "distillation/loss"):  # what scores sees the pictures that the policy saw
        assert 0 <= rows[0][name] < NO_KL and rows[1][name] > 1e-6, name
    check_alike(runs[1], runs[0])
    before, trained = weights(words.model), weights(runs[0] / "model")
    matrices = {name for name in before if before[name].ndim > 1}
    assert any("visual" in name for name in matrices)
    assert all(not torch.equal(trained[name], before[name]) for name in matrices)
    check_whole(runs[0] / "model")
    check_whole(runs[1] / "checkpoint-4")


@pytest.mark.slow
def test_workers_draw_for_prompts_with_pictures_what_the_trainer_draws_itself(words, tmp_path):
    """Two ranks, whose prompts share pictures; the pool is started again with the file of before the second round."""
    alone = {"beta": 0, "importance_sampling_mode": "none"}
    finish(2, words(tmp_path / "own", "http://127.0.0.1:1", **alone))
    folder = tmp_path / "pool"
    folder.mkdir()
    with running_pool(folder) as served, workers(served.url, folder, "a", "b"):
        finish(2, words(tmp_path / "run", "http://127.0.0.1:1", **alone, sampler="pool", pool=served.url))
    check_drawn_alike(tmp_path / "run", tmp_path / "own")
    with closing(Recording(str(folder / "run.sqlite"))) as recording:
        named = [len(recording.find((group, 0))[0].pictures) for group in range(8)]
    assert {0, 1, 2} == {*named}


@pytest.mark.rare
def test_whatever_is_killed_a_run_by_workers_with_pictures_ends_with_the_same_bits(words, tmp_path):
    def by_workers(run, **more) -> list[str]:
        return words(run, "http://127.0.0.1:1", **{"beta": 0, "max_steps": 6} | more)

    folders = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    with drawing(folders[0], "a", "b") as served:
        finish(2, by_workers(folders[0] / "run", pool=served.url, **LAG))
    check_survives(["rank", "pool", "worker"], "pictures", by_workers, *folders)


def check_whole(folder) -> None:
    """Hold a saved model to have all that transformers and we load, with the run's max_pixels."""
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    patches = images([Image.new("RGB", (200, 200))])["pixel_values"]
    assert MAX_PIXELS / 2 < len(patches) * pictured.PATCH**2 <= MAX_PIXELS
    config = ServerConfig(model_name_or_path=str(folder), dtype="float32")
    ours = load_reference(config, torch.device("cpu")).state_dict()
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    processor = load_processor(config, load_settings(config), load_tokenizer(config))
    assert processor.count([pictured.drawing(200, 200, 0)]) == len(patches) / 4


def test_the_dry_run_counts_pictures_and_the_tower(words, tmp_path, capsys):
    dry_run(parse_arguments(TrainerConfig, "", words(tmp_path / "run", "http://127.0.0.1:1")))
    printed = capsys.readouterr().out
    tower = sum(weight.numel() for name, weight in weights(words.model).items() if "visual" in name)
    assert f"  vision     {tower:,} of these parameters are the vision tower's, {tower:,} of them trained\n" in printed
    # The most are in the prompt with pictures of 16 x 24 pixels, 3 x 2 tokens, and of 40 x 40, made smaller: 4 x 4.
    assert "  pictures   in 18 of these prompts, of 22 tokens at most\n" in printed
    assert "  freeze_vision_tower True  " in printed and "no estimate" not in printed


def test_a_saved_reference_has_the_processor_too(words, tmp_path):
    """A server can be started with it."""
    config = TrainerConfig(model_name_or_path=str(words.model), max_pixels=MAX_PIXELS)
    model, tokenizer = load_model(config, torch.device("cpu")), load_tokenizer(config)
    processor = load_processor(config, model.config, tokenizer)
    described = describe(model, tokenizer, "p", processor)
    WeightPublisher(
        config=config,
        client=None,
        model=model,
        tokenizer=tokenizer,
        policy=described,
        folder=tmp_path,
        processor=processor,
    ).begin(described)
    check_whole(tmp_path / "reference-0")
