"""The pictures of completions in a page: which are there, how large, and which files are never read."""

import base64
import io

import numpy as np
from pictured import drawing
from PIL import Image
from recorded import completion, write

from grpo.report.read import LARGEST_FILE, LONGEST_SIDE, read_completions, read_pictures, read_run

METRICS = [{"step": 1, "reward": 1}]


def recorded(folder, completions, pictures: dict[str, bytes]):
    """Return a run, its blocks of completions, and the pictures of a page with room for 10 MB."""
    write(folder, METRICS, completions)
    (folder / "pictures").mkdir()
    for name, data in pictures.items():
        (folder / "pictures" / name).write_bytes(data)
    run = read_run(folder)
    return run, read_completions(run, 10**6)


def opened(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_a_group_has_its_own_pictures(tmp_path):
    """Two problems of one text and one answer are told apart by them."""
    completions = [completion(1, pictures=[name]) for name in ("a.png", "a.png", "b.jpg")] + [completion(1)]
    files = {"a.png": drawing(24, 16, 0), "b.jpg": drawing(24, 16, 1, "JPEG")}
    run, blocks = recorded(tmp_path, completions, files)
    groups = [(group.get("pictures"), len(group["completions"])) for group in blocks[0]["groups"]]
    assert groups == [(["a.png"], 2), (["b.jpg"], 1), (None, 1)]
    urls = read_pictures(run, blocks, 10**6)
    assert urls == {
        name: f"data:image/{kind};base64,{base64.b64encode(files[name]).decode()}"
        for name, kind in (("a.png", "png"), ("b.jpg", "jpeg"))
    }
    assert run.notes == []


def test_a_large_picture_is_made_smaller(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (600, 1200, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((2400, 1200)).save(file, "PNG")
    run, blocks = recorded(tmp_path, [completion(1, pictures=["a.png"])], {"a.png": file.getvalue()})
    (url,) = read_pictures(run, blocks, 10**6).values()
    assert len(file.getvalue()) > LARGEST_FILE and opened(url).size == (LONGEST_SIDE, LONGEST_SIDE // 2)


def test_what_is_not_there_or_no_picture_is_left_out_and_said(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(drawing(8, 8, 0))
    names = ["../../secret.png", str(secret), "config.yaml", 7, None]
    completions = [
        completion(1, pictures=names),
        completion(2, pictures=["gone.png", "bad.png"]),
        completion(3, pictures=4),
    ]
    run, blocks = recorded(tmp_path / "run", completions, {"bad.png": b"x" * 2 * LARGEST_FILE})
    assert [block["groups"][0].get("pictures") for block in blocks] == [None, ["gone.png", "bad.png"], None]
    assert read_pictures(run, blocks, 10**6) == {}
    assert run.notes == ["0 of 2 pictures are shown"]


def test_where_not_all_fit_those_of_training_are_left_out_evenly(tmp_path):
    files = {f"{place}.png": drawing(40, 40, place) for place in range(30)}
    completions = [completion(step, pictures=[f"{step}.png"]) for step in range(1, 25)]
    held_out = [completion(step, "eval", pictures=[f"{25 + place}.png"]) for step in (0, 9) for place in range(5)]
    run, blocks = recorded(tmp_path, completions + held_out, files)
    whole = sum(map(len, read_pictures(run, blocks, 10**6).values()))
    assert run.notes == []
    urls = read_pictures(run, blocks, whole // 2)
    assert sum(map(len, urls.values())) <= whole // 2 + 30 * 24
    assert {f"{25 + place}.png" for place in range(5)} < set(urls) and {"1.png", "24.png"} < set(urls)
    assert run.notes == [f"{len(urls)} of 29 pictures are shown"]
