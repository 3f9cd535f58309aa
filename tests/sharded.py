"""DeepSpeed's files for weights that the ranks share out, for models as small as the tests'."""

import json
from pathlib import Path

from conftest import REPOSITORY

ON_CARDS, ON_HOST = "configs/ds_zero3.json", "configs/ds_zero3_offload.json"


def in_layers(file: str, folder: Path, most: int = 30_000) -> Path:
    """Return a copy of a shipped file with which small weights are gathered and let go of as large ones are, `most`
    numbers at a time."""
    settings = json.loads((REPOSITORY / file).read_text())
    limits = {"stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": most}
    settings["zero_optimization"] |= limits | {"stage3_prefetch_bucket_size": 10_000, "reduce_bucket_size": 5_000}
    path = folder / Path(file).name
    path.write_text(json.dumps(settings))
    return path
