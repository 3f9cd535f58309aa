"""The model card: README.md in a saved model's folder, with the front matter that the hub reads, from model_card.md.

What is not known, such as a licence, is left out.
"""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from transformers import PreTrainedModel

from grpo.config.trainer import TrainerConfig
from grpo.run.json_lines import read_record

_TEMPLATE = Path(__file__).with_suffix(".md")
_SETTINGS = (
    *("loss_type", "beta", "learning_rate", "prompts_per_step", "num_generations", "temperature"),
    *("max_prompt_length", "max_completion_length", "reward_funcs", "reward_weights", "seed"),
)
_STARTED_IN = Path.cwd()  # a reward function may change the directory
_VLLM_RANK = 16
"""the largest rank of an adapter that vLLM takes without --max-lora-rank"""


def write_card(
    folder: Path,
    config: TrainerConfig,
    model: PreTrainedModel,
    has_template: bool,
    step: int,
    name: str = "MODEL",
    takes_pictures: bool = False,
) -> None:
    """Write the card of `model` as it was saved to `folder`, which is in the run's folder, after `step`.

    `has_template` tells whether its tokenizer has a chat template, and `name` is what commands call the model. Raises
    OSError.
    """
    run = folder.absolute().parent
    adapter = model.peft_config["default"] if hasattr(model, "peft_config") else None
    base, data = model.config._name_or_path, config.dataset_name
    facts = {
        **({"base_model": base} if _is_on_hub(base) else {}),
        **({"datasets": [data]} if _is_on_hub(data) else {}),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if takes_pictures else "text-generation",
        "tags": ["grpo", "generated_from_trainer", *(["lora"] if adapter else [])],
    }
    settings = {setting: getattr(config, setting) for setting in _SETTINGS}
    if adapter:
        settings |= {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha, "quantization": config.quantization}
    if takes_pictures:
        of_pictures = {name: getattr(config, name) for name in ("min_pixels", "max_pixels", "freeze_vision_tower")}
        settings |= {name: value for name, value in of_pictures.items() if value}
    # With save_system_prompt the chat template has it.
    system = "" if config.save_system_prompt else config.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    question: str | list[dict[str, str]] = "..."
    if takes_pictures:
        messages = [message | {"content": [{"type": "text", "text": system}]} for message in messages]
        question = [{"type": "image", "path": "picture.png"}, {"type": "text", "text": "..."}]
    options = [f"max_new_tokens={config.max_completion_length}", "do_sample=False"]
    if config.chat_template_kwargs:
        options.append(f"tokenizer_encode_kwargs={config.chat_template_kwargs!r}")
    columns, results = _results(run, step)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"json": partial(json.dumps, ensure_ascii=False), "shell": shlex.quote}
    card = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        front_matter=yaml.safe_dump(facts, sort_keys=False),
        title=run.name if name == "MODEL" else name.split("/")[-1],
        name=name,
        adapter=adapter,
        base=base if _is_on_hub(base) else Path(base).name,
        base_path=base,
        step=step,
        data=data if _is_on_hub(data) else Path(data).name,
        columns=columns,
        results=results,
        chat=has_template,
        pictures=takes_pictures,
        max_new_tokens=config.max_completion_length,
        system=system,
        messages=[*messages, {"role": "user", "content": question}],
        text=f"{system}\n\n...\n\n" if system else "...\n\n",
        options=options,
        max_rank=f" --max-lora-rank {adapter.r}" if adapter and adapter.r > _VLLM_RANK else "",
        settings=[
            (setting, " ".join(map(str, value)) if isinstance(value, list) else value)
            for setting, value in settings.items()
        ],
        versions=_versions(run),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _is_on_hub(name: str) -> bool:
    """Tell whether a model or dataset that was loaded came from the hub: a folder of that name goes first."""
    return not (_STARTED_IN / name).exists()


def _results(run: Path, step: int) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of a table of the first and last evaluation up to `step`; none if there is but one."""
    evaluated = [row for row in _records(run / "metrics.jsonl", b'"eval_n"') if row["step"] <= step]
    if len(evaluated) < 2:
        return [], []
    first, last = evaluated[0], evaluated[-1]
    heads = [f"step {row['step']} ({row['eval_n']} problems)" for row in (first, last)]
    rows = []
    for title in ("accuracy", "reward"):
        values = [(row.get(f"eval_{title}"), row.get(f"eval_{title}_se")) for row in (first, last)]
        if all(value is not None for value, _ in values):
            rows.append([title] + [f"{value:.3f}" + (f" ± {se:.3f}" if se is not None else "") for value, se in values])
    return heads, rows


def _versions(run: Path) -> list[str]:
    """Return what the run was last started with, of starts.jsonl."""
    started = _records(run / "starts.jsonl", b'"versions"')
    if not started:
        return []
    versions, commit = started[-1]["versions"], started[-1].get("commit")
    return [f"{name} {number}" for name, number in versions.items()] + (
        [f"commit {commit} of grpo-ref-split"] if commit else []
    )


def _records(path: Path, marker: bytes) -> list[dict[str, Any]]:
    """Return the records of a run's file whose lines have these bytes; none without the file."""
    if not path.exists():
        return []
    with open(path, "rb") as lines:
        return [record for line in lines if marker in line and (record := read_record(line)) is not None]
