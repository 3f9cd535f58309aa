"""A record has the pictures of its prompts beside it, each once, and their names."""

import json

from pictured import drawing

from grpo.config.trainer import TrainerConfig
from grpo.run.recorder import Recorder

PNG, JPEG = drawing(8, 8, 0), drawing(8, 8, 1, "JPEG")


def test_each_picture_is_written_once_and_named_beside_its_completions(tmp_path):
    config = TrainerConfig(eval_steps=0, report_to=["none"])
    recorder = Recorder(config, tmp_path, after=-1)
    pictured = {"prompt": "p", "pictures": (PNG, JPEG)}
    recorder.completions(1, "train", [pictured] * 2 + [{"prompt": "text"}])
    recorder.close()
    recorder = Recorder(config, tmp_path, after=1)
    recorder.completions(2, "eval", [{"prompt": "p", "pictures": (JPEG,)}])
    recorder.bad_step(2, [pictured])
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    first, second = lines[0]["pictures"]
    assert (first[-4:], second[-4:]) == (".png", ".jpg")
    assert lines[0] == lines[1] and "pictures" not in lines[2] and lines[3]["pictures"] == [second]
    assert json.loads((tmp_path / "bad_steps.jsonl").read_text())["pictures"] == [first, second]
    files = {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    assert files == {first: PNG, second: JPEG}
