"""Datasets with pictures: every form of a picture, where they go in a prompt, and what is refused or dropped."""

import copy
import io
import itertools

import datasets
import numpy as np
import pictured
import pytest
from PIL import Image
from recorded import write_rows as write

from grpo.config.command_line import parse_arguments
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.dataset_pictures import PictureColumn
from grpo.data.examples import make_example
from grpo.data.prompts import load_examples
from grpo.model.load import load_settings, load_tokenizer
from grpo.model.pictures import load_processor
from grpo.wire.picture_files import EncodedPicture, PicturedPrompt, open_picture, pictures_of

PNG, JPEG = pictured.drawing(32, 24, 0), pictured.drawing(24, 40, 1, "JPEG")
SLOT = "<|vision_start|><|image_pad|><|vision_end|>"


class Model:
    """A tiny model's tokenizer and processor, and its examples of rows."""

    def __init__(self, family: str, folder):
        self.folder = pictured.save(family, folder)
        config = self.config("rows.jsonl")
        self.tokenizer, settings = load_tokenizer(config), load_settings(config)
        self.processor = load_processor(config, settings, self.tokenizer)

    def config(self, dataset, *options) -> TrainerConfig:
        named = "--dataset_name", str(dataset), "--model_name_or_path", str(self.folder), "--system_prompt", ""
        return parse_arguments(TrainerConfig, "", [*named, *options])

    def load(self, dataset, *options):
        return load_examples(self.config(dataset, *options), "train", self.tokenizer, 0, False, self.processor)

    def text(self, example) -> str:
        """A prompt with each picture's ids as one placeholder."""
        ids = [*example.prompt_ids]
        runs = itertools.groupby(ids, key=lambda token: token == self.processor.token_id)
        return self.tokenizer.decode([token for is_piece, run in runs for token in ([*run][:1] if is_piece else run)])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Model:
    return Model("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Model:
    return Model("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def row(pictures, question="What is it?", column="images", **others):
    return {"question": question, "answer": "4", column: pictures, **others}


def user(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def test_every_form_of_a_picture_is_read_as_the_datasets_own_bytes(tmp_path, qwen):
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown/1.png").write_bytes(PNG)
    (tmp_path / "shown/2.jpg").write_bytes(JPEG)
    (tmp_path / "2.jpg").write_bytes(JPEG)
    feature = {"question": datasets.Value("string"), "answer": datasets.Value("string")}
    several = [{"bytes": PNG, "path": "a.png"}, {"bytes": JPEG, "path": None}], datasets.List(datasets.Image())
    for column, (value, kind) in {"images": several, "image": (Image.open(io.BytesIO(PNG)), datasets.Image())}.items():
        features = datasets.Features(feature | {column: kind})
        of_hub = datasets.Dataset.from_list([row(value, column=column)], features=features)
        of_hub.to_parquet(tmp_path / f"{column}.parquet")
    write(tmp_path / "bytes.parquet", [row(PNG, column="image"), row(None, column="image")])
    write(tmp_path / "paths.jsonl", [row(["shown/1.png", str(tmp_path / "2.jpg")]), row([]), row(None)])
    write(tmp_path / "path.jsonl", [row("shown/2.jpg", column="image")])
    expected = {"images.parquet": [(PNG, JPEG)], "bytes.parquet": [(PNG,), ()], "path.jsonl": [(JPEG,)]}
    expected["paths.jsonl"] = [(PNG, JPEG), (), ()]
    for name, pictures in expected.items():
        examples = qwen.load(tmp_path / name)
        assert [pictures_of(example.prompt_ids) for example in examples] == pictures, name
        assert [isinstance(example.prompt_ids, PicturedPrompt) for example in examples] == [*map(bool, pictures)]
    (only,) = qwen.load(tmp_path / "image.parquet")
    assert np.array_equal(open_picture(*pictures_of(only.prompt_ids)), open_picture(PNG))


def test_pictures_whose_names_begin_as_the_split_are_no_rows(tmp_path, qwen):
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown/train-1.png").write_bytes(PNG)
    write(tmp_path / "train.jsonl", [row("shown/train-1.png", column="image")])
    (only,) = qwen.load(tmp_path)
    assert pictures_of(only.prompt_ids) == (PNG,)


@pytest.mark.parametrize("kind", ["WEBP", "BMP", "GIF", "TIFF"])
def test_other_formats_become_png_without_loss(tmp_path, qwen, kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    data = pictured.encoded(Image.open(io.BytesIO(PNG)), kind, **options)
    (only,) = qwen.load(write(tmp_path / "rows.parquet", [row([data])]))
    (picture,) = pictures_of(only.prompt_ids)
    assert picture.startswith(b"\x89PNG")
    assert np.array_equal(open_picture(picture), Image.open(io.BytesIO(data)).convert("RGB"))


def test_a_pil_image_of_any_mode_is_encoded(qwen):
    for mode in ("RGB", "RGBA", "L", "P", "1", "CMYK", "F"):
        picture = Image.open(io.BytesIO(PNG)).convert(mode)
        read = PictureColumn("images", "").read(picture, 0)
        assert np.array_equal(open_picture(read.file), picture.convert("RGB")), mode


@pytest.mark.parametrize(
    "question, pictures, rendered",
    [
        ("Which?", [PNG], f"{SLOT}Which?"),
        ("Which?", [PNG, JPEG], f"{SLOT}{SLOT}Which?"),
        ("<image>Which?", [PNG], f"{SLOT}Which?"),
        ("Is <image> in <image>?", [PNG, JPEG], f"Is {SLOT} in {SLOT}?"),
        ("Which?", [], "Which?"),
        ("Which?", None, "Which?"),
        ([{"role": "user", "content": "Is it <image>?"}], [PNG], f"Is it {SLOT}?"),
        ([{"role": "user", "content": [{"type": "text", "text": "Is it"}, {"type": "image"}]}], [PNG], f"Is it{SLOT}"),
        ([{"role": "user", "content": [{"type": "text", "text": "Is it?"}]}], [PNG], f"{SLOT}Is it?"),
        ([{"role": "user", "content": [{"type": "text", "text": "Is it?"}]}], [], "Is it?"),
    ],
)
def test_a_picture_goes_where_the_prompt_says_or_before_it(tmp_path, qwen, question, pictures, rendered):
    (only,) = qwen.load(write(tmp_path / "rows.parquet", [row(pictures, question), row([PNG], question=None)]))
    assert only.prompt.endswith(user(rendered))
    assert qwen.text(only) == only.prompt
    pieces = sum(token == qwen.processor.token_id for token in only.prompt_ids)
    assert pieces == (qwen.processor.count(pictures) if pictures else 0)
    assert qwen.tokenizer.decode(only.prompt_ids).count("<|image_pad|>") == pieces


def test_chats_are_rendered_as_trl_renders_them(tmp_path, qwen):
    data_utils = pytest.importorskip("trl.data_utils")
    text = {"role": "user", "content": "What is it?"}
    in_parts = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]}
    again = {"role": "user", "content": "Why?"}
    answer = {"role": "assistant", "content": "It is"}
    for chat, pictures in (
        ([{"role": "system", "content": "Be brief."}, text], [PNG, JPEG]),
        ([text, answer, again], [PNG]),
        ([text, answer], [PNG]),
        ([in_parts, answer], [PNG]),
    ):
        example = make_example(
            qwen.config("x"), qwen.tokenizer, 0, row(pictures, chat), PictureColumn("images", ""), qwen.processor
        )
        images = [open_picture(picture) for picture in pictures]
        prepared = data_utils.prepare_multimodal_messages(chat, images)
        ends = chat[-1]["role"] == "assistant"
        expected = qwen.tokenizer.apply_chat_template(
            prepared, tokenize=False, add_generation_prompt=not ends, continue_final_message=ends
        )
        assert example.prompt == expected
        given = [message["content"] for message in example.conversation]
        theirs = [message["content"] for message in prepared]
        of_given, of_theirs = ([[part["type"] for part in content] for content in chat] for chat in (given, theirs))
        assert of_given == of_theirs
        given, theirs = (
            [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
            for messages in (copy.deepcopy(example.conversation), prepared)
        )
        assert len(given) == len(pictures) and all(map(np.array_equal, given, theirs)), "as reward functions see them"
        assert all(isinstance(message["content"], str) for message in example.messages)


def test_text_is_rendered_as_for_a_text_model(tmp_path, qwen):
    """With a column of pictures and without: what is not pictured is asked as ever."""
    questions = ["What?", [{"role": "system", "content": "S"}, {"role": "user", "content": "What?"}]]
    for place, question in enumerate(questions):
        plain = {"question": question, "answer": "4"}
        config = qwen.config(write(tmp_path / f"{place}.jsonl", [plain]))
        (expected,) = load_examples(config, "train", qwen.tokenizer, progress=False)
        (found,) = qwen.load(write(tmp_path / f"{place}.parquet", [plain | {"image": None}]))
        assert (found.prompt, found.prompt_ids) == (expected.prompt, expected.prompt_ids)
        assert type(found.prompt_ids) is list


def test_without_pictures_in_the_data_the_mark_is_text(tmp_path, qwen, tokenizer):
    rows = [{"question": "What does <image> do?", "answer": "4"}]
    path = write(tmp_path / "rows.jsonl", rows)
    assert "What does <image> do?" in qwen.load(path)[0].prompt
    assert "What does <image> do?" in load_examples(qwen.config(path), "train", tokenizer, progress=False)[0].prompt
    path = write(tmp_path / "left_out.parquet", [row([PNG], "What does <image> do?")])
    assert "What does <image> do?" in qwen.load(path, "--dataset_image_column", "")[0].prompt


def test_a_template_that_takes_content_in_parts_alone_is_given_text_in_parts(tmp_path, llava):
    first, second = llava.load(write(tmp_path / "rows.parquet", [row([PNG], "Is <image> it?"), row([], "And?")]))
    assert first.prompt == "USER: <image>\nIs   it? ASSISTANT:"  # the real template, too, has the pictures first
    assert second.prompt == "USER: And? ASSISTANT:" and type(second.prompt_ids) is list


def test_rows_at_fault_are_dropped_and_counted_by_reason(tmp_path, qwen, caplog):
    flat = pictured.drawing(800, 2, 0)
    rows = [
        row([PNG], "Fine?"),
        row([PNG[:40]], "Cut off?"),
        row([b"GIF89a not really"], "What?"),
        row([flat], "Flat?"),
        row([PNG], "<image> and <image>?"),
        row([], "Where is <image>?"),
        row([], "<|image_pad|>?"),
        row([], "word " * 200),
        row([PNG] * 2, "Two?"),
    ]
    limits = "--max_prompt_length", "150", "--max_pictures", "1"
    (only,) = qwen.load(write(tmp_path / "rows.parquet", rows), *limits)
    assert only.index == 0
    dropped = "train: {} of 9 rows dropped, {}"
    assert dropped.format(1, "with more pictures than max_pictures=1 (the first is row 8 from 0: 2") in caplog.text
    picture = "with a picture that cannot be used (the first is row 1 from 0: is damaged"
    assert dropped.format(3, picture) in caplog.text
    count = "with more or fewer places for pictures than pictures (the first is row 4 from 0: places for pictures: 2"
    assert dropped.format(3, count) in caplog.text
    assert dropped.format(1, "longer than max_prompt_length=150 tokens (the first is row 7 from 0: ") in caplog.text


def test_what_a_server_would_refuse_in_the_run_is_dropped_before_it(tmp_path, caplog):
    gemma = Model("gemma3", tmp_path / "gemma")
    path = write(tmp_path / "rows.parquet", [row([PNG]), row([], "<image_soft_token>"), row([PNG] * 257)])
    (only,) = gemma.load(path)
    assert only.index == 0
    assert "(the first is row 1 from 0: places for pieces of pictures are in the text itself" in caplog.text
    assert "(the first is row 2 from 0: is among 257 with" in caplog.text


@pytest.mark.parametrize("name", ["mask", "images"])
def test_pictures_that_are_no_part_of_the_prompt_stay_encoded_too(tmp_path, qwen, tokenizer, name):
    feature = {"question": datasets.Value("string"), "answer": datasets.Value("string"), name: datasets.Image()}
    rows = [row({"bytes": pictured.drawing(32, 24, 0, "BMP"), "path": None}, "<image>?", name), row(None, "No?", name)]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows, features=datasets.Features(feature)).to_parquet(path)
    left_out = qwen.config(path, "--dataset_image_column", "")
    first, second = load_examples(left_out, "train", tokenizer, progress=False)
    assert "<image>?" in first.prompt and type(first.prompt_ids) is list
    assert isinstance(first.columns[name], EncodedPicture) and second.columns[name] is None
    assert np.array_equal(copy.deepcopy(first.columns[name]), open_picture(PNG))


def test_examples_are_in_the_order_of_the_rows(tmp_path, qwen):
    rows = [row([pictured.drawing(16 + place, 30, place)], f"{place}?") for place in range(40)]
    examples = qwen.load(write(tmp_path / "rows.parquet", rows))
    assert [example.index for example in examples] == [*range(40)]
    assert [pictures_of(example.prompt_ids) for example in examples] == [(*picture["images"],) for picture in rows]


def test_the_tokens_of_pictures_count_as_the_prompts(tmp_path, qwen):
    path = write(tmp_path / "rows.parquet", [row([PNG])])
    (only,) = qwen.load(path)
    length = len(only.prompt_ids)
    assert length > len(qwen.tokenizer(only.prompt)["input_ids"])
    assert qwen.load(path, "--max_prompt_length", str(length))
    message = f"longer than max_prompt_length={length - 1} tokens .*: {length} tokens.*raise max_prompt_length"
    with pytest.raises(ConfigError, match=message):
        qwen.load(path, "--max_prompt_length", str(length - 1))


@pytest.mark.parametrize(
    "rows, options, message",
    [
        ([row([PNG])], ["--dataset_image_column", "photo"], "dataset_image_column='photo': .* columns images: name"),
        ([row([PNG])], ["--dataset_image_column", "answer"], "dataset_image_column='answer': beside .* answers"),
        ([row(PNG, image=PNG)], [], "dataset_image_column=None: .* has the columns images, image: name"),
        ([row([7])], [], r"dataset_image_column='images': row 0 \(from 0\) has 7: a picture is a file's bytes"),
        ([row("https://x.org/a.png")], [], "dataset_image_column='images': row 0 .* nothing is fetched from"),
        ([row("no.png")], [], "1 of 1 rows dropped, .* cannot be read .no.png: No such file.*dataset_..._column"),
        ([row([PNG], "<image><image>")], [], "1 of 1 rows dropped, .*places for pictures: 2, pictures: 1"),
    ],
)
def test_what_no_row_survives_is_one_sentence(tmp_path, qwen, rows, options, message):
    with pytest.raises(ConfigError, match=message):
        qwen.load(write(tmp_path / "rows.parquet", rows), *options)


def test_a_text_model_that_is_given_pictures_is_refused(tmp_path, qwen, tokenizer):
    path = write(tmp_path / "rows.parquet", [row([]), row([PNG])])
    names = write(tmp_path / "names.jsonl", [row("", column="image"), row("no file", column="image")])
    message = r"model_name_or_path=.*row 1 \(from 0\) of .* has a picture in 'images', and this model takes text alone"
    with pytest.raises(ConfigError, match=message):
        load_examples(qwen.config(path), "train", tokenizer, progress=False)
    with pytest.raises(ConfigError, match=message.replace("images", "image")):
        load_examples(qwen.config(names), "train", tokenizer, progress=False)
    for name in (path, names):
        left_out = qwen.config(name, "--dataset_image_column", "")
        assert len(load_examples(left_out, "train", tokenizer, progress=False)) == 2
