"""Print what tiny runs leave, as hashes: `python tests/golden.py > before`, change the code, run it again, and diff.

For a change that should alter no number: moved code, other names, smaller parts. Eight kinds of runs, on one rank and
two: metrics without times, completions and weights; and the text of --help.
Another CPU gives other hashes. Words after the script choose kinds. Some minutes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

KINDS = {
    "grpo": {"num_iterations": 2, "steps_per_generation": 2},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0, "max_resample": 2},
    "kl_in_reward": {"kl_in_reward": None, "beta": 0.1},
    "remax": {"advantage_estimator": "remax"},
    "LoRA": {"use_peft": None, "ref": "adapter_off", "lora_target_modules": "all-linear", "learning_rate": 1e-2},
    "tools": {},
    "pictures": {"beta": 0.1},
    "pool": {"sampler": "pool", "max_policy_lag": 1},
}


def main(chosen: list[str]) -> None:
    from conftest import REPOSITORY, write_model

    from demo.task import write_dataset

    show("help", subprocess.check_output([sys.executable, "grpo_ref_split.py", "--help", "all"], cwd=REPOSITORY))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = write_model(folder / "model", seed=0), folder / "data"
        write_dataset(data, seed=0, train_size=256)
        (folder / "own.py").write_text(
            "def letters(completions, **columns):\n    return [len(c) / 100 for c in completions]\n"
        )
        for kind in chosen or KINDS:
            for ranks in (1, 2):
                place = folder / f"{kind}-{ranks}"
                place.mkdir()
                run_one(kind, ranks, place, model, data, f"{folder}/own.py:letters")


def run_one(kind: str, ranks: int, place: Path, model: Path, data: Path, letters: str) -> None:
    from conftest import running_server
    from pools import running_pool, workers
    from recorded import write_rows
    from trainer_runs import finish, options, timeless, weights

    changes = {"max_steps": 4, "eval_steps": 2, "report_to": "none", "reward_funcs": letters, **KINDS[kind]}
    served = ["--deterministic", "true"]
    with ExitStack() as stack:
        if kind == "tools":
            import callers

            folder = callers.write(place / "shop")
            model, data = folder / "model", folder / "data"
            rows = [{"question": f"{number}: how much is a pen?", "answer": "7"} for number in range(24)]
            for split in ("train", "test"):
                write_rows(data / f"{split}.jsonl", rows)
            changes |= {"environment": f"{folder}/tools.py:Shop", "reward_funcs": f"{folder}/tools.py:cheap"}
            changes |= {"max_completion_length": 160, "max_prompt_length": 400, "max_tool_calling_iterations": 3}
        if kind == "pictures":
            import pictured

            model, data = pictured.save("qwen2_5_vl", place / "model"), place / "data"
            rows = []
            for number in range(16):
                file = f"{number}.png"
                data.mkdir(exist_ok=True)
                (data / file).write_bytes(pictured.drawing(24 + 8 * (number % 3), 16, seed=number))
                rows.append({"question": f"<image>Which of {number}?", "answer": "#### 3", "images": [file]})
            for split in ("train", "test"):
                write_rows(data / f"{split}.jsonl", rows)
            changes |= {"max_prompt_length": 200, "max_completion_length": 12, "max_pixels": 1024}
            served += ["--max_pixels", "1024"]
        if kind == "pool":
            (place / "pool").mkdir()
            file = stack.enter_context(running_pool(place / "pool"))
            stack.enter_context(workers(file.url, place / "pool", "a"))
            changes["pool"] = file.url
        if changes.get("beta") != 0 and kind != "LoRA":
            server = stack.enter_context(running_server(model, place, *served))
            changes["ref_servers"] = server.url
        finish(ranks, options(model, data, place / "run", **changes))
    run = place / "run"
    show(f"{kind} {ranks} metrics", json.dumps(timeless(run)).encode())
    show(f"{kind} {ranks} completions", (run / "completions.jsonl").read_bytes())
    show(
        f"{kind} {ranks} weights",
        b"".join(tensor.numpy().tobytes() for _, tensor in sorted(weights(run / "model").items())),
    )


def show(name: str, content: bytes) -> None:
    print(f"{name:28}{hashlib.sha256(content).hexdigest()[:32]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
