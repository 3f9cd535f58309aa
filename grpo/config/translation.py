"""Translates the settings of other trainers into ours (`grpo init --from`). A setting that is in a file is written, or
listed with its value. Some are made of several pieces: batches, steps, clips, a KL in loss or reward."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from grpo.config.command_line import check_single
from grpo.config.errors import ConfigError, one_line
from grpo.config.fields import default_of, is_met
from grpo.config.loss_settings import UNUSED_BOUNDS
from grpo.config.other_names import DEFAULTS, INSTEAD, OTHER_MEANINGS, TABLES, Rule, Settings
from grpo.config.other_trainers import read_settings
from grpo.config.programs import LaunchConfig
from grpo.config.python_script import Unknown

FIELDS = {each.name: each for each in fields(LaunchConfig)}
_TOLD_IF_OFF = {"filter_overlong_prompts", "val_before_train"}  # all other hints are for settings that are on
_HINTS = {
    **dict.fromkeys(("min_pixels", "max_pixels"), "it is for a model that reads pictures"),
    "shuffle": "",  # of the completions of a round; verl has the name for the prompts too
}


@dataclass(frozen=True)
class Translation:
    settings: Settings  # ours; dataset_name is a list of entries, if there are several datasets
    lost: dict[str, tuple[str, str]]  # settings without a counterpart, each with its value, and a hint or ""
    files: list[Path]  # that were read


def translate(trainer: str, path: Path) -> Translation:
    """Read another trainer's YAML, Python script or notebook, or shell command. Raises ConfigError if the file cannot
    be read, or has nothing of that trainer."""
    table = TABLES[trainer]
    if trainer in ("trl", "simple_grpo"):  # which have names of ours
        ours = FIELDS.keys() - OTHER_MEANINGS - table.keys()
        table = table | {name: (name, None) for name in ours}
    try:
        given, files = read_settings(trainer, path, table)
    except OSError as error:
        raise ConfigError(f"from='{path}': {error.strerror}: name the file of {trainer}'s settings") from error
    except ConfigError:
        raise
    except (SyntaxError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"from='{path}': it cannot be read ({one_line(error)}): correct it") from error
    parts = Parts(trainer, path, _gathered(given, table), table)
    if not parts.values and not parts.unknown:
        raise ConfigError(f"from='{path}': it has no setting of {trainer}: name another file")
    settings = {name: value for name, value in parts.values.items() if not name.startswith("_")}
    settings |= {name: value for name, value in DEFAULTS[trainer].items() if not parts.has(name)}
    for join in JOINS[trainer]:
        used = set(parts.used)
        try:
            settings |= {name: value for name, value in join(parts).items() if value is not None}
        except OnlyTheScriptKnows:
            parts.used = used  # those that nothing else uses are listed
    for name, value in settings.items():
        if name != "dataset_name":  # a list of them becomes a file
            check_single(FIELDS[name], value, f"from='{path}': ")
    parts.lose_unused()
    _drop_what_does_nothing(parts, settings)
    in_order = {name: settings[name] for name in FIELDS if name in settings}
    return Translation(settings=in_order, lost=parts.lost, files=files)


def _gathered(given: Settings, table: dict[str, Rule]) -> Settings:
    """Make one setting of the entries of a mapping, which a command gives one by one."""
    result: Settings = {}
    for name, value in given.items():
        mapping, _, entry = name.rpartition(".")
        entries = result.get(mapping, {})
        if mapping in table and isinstance(entries, dict) and not isinstance(value, Unknown):
            result[mapping] = {**entries, entry: value}
        else:
            result[name] = value
    return result


def _drop_what_does_nothing(parts: Parts, settings: Settings) -> None:
    """Take settings away that a launch would refuse, since they do nothing. List those that are given."""
    config = SimpleNamespace(**{name: default_of(each) for name, each in FIELDS.items()} | settings)
    for name, value in list(settings.items()):
        needs = FIELDS[name].metadata["needs"]
        reason = ""
        if needs and value != default_of(FIELDS[name]) and not is_met(config, needs):
            reason = f"it does nothing without {needs}"
        elif name in UNUSED_BOUNDS.get(settings.get("loss_type"), ()):
            reason = f"loss_type {settings['loss_type']} has no such clip"
        if reason:
            del settings[name]
            if name in parts.values:
                parts.lose_part(name, None, reason)


class OnlyTheScriptKnows(Exception):
    """A setting cannot be made of its pieces."""


class Parts:
    """What another trainer's file says, by our names; which pieces of settings were used or lost."""

    def __init__(self, trainer: str, path: Path, given: Settings, table: dict[str, Rule]):
        self.trainer, self.path, self.given = trainer, path, given
        self.values: Settings = {}
        self.unknown: set[str] = set()  # parts whose values only the script knows
        self.used: set[str] = set()
        self.lost: dict[str, tuple[str, str]] = {}  # value and hint, by that trainer's name
        self.names = {part: name for name, (part, _) in reversed(table.items())}  # that trainer's, by part
        for name, rule in table.items():
            if given.get(name) is not None:  # None is as if it were not given
                self._add(name, rule)
        for name in given.keys() - table.keys():
            self.lose(name, given[name])

    def _add(self, name: str, rule: Rule) -> None:
        """Take a setting in. Raises ConfigError if its value is none that the trainer takes."""
        part, convert = rule
        value = self.given[name]
        if isinstance(value, Unknown):
            self.unknown.add(part)
            self.lose(name, value, "only the script knows it: write its value")
            return
        try:
            ours = convert(value) if convert else value
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"from='{self.path}': {name}={value!r}: {one_line(error)}: correct it") from error
        if ours is None:
            self.lose(name, value)
        elif part not in self.values:
            self.values[part], self.names[part] = ours, name
        elif self.values[part] != ours:
            self.lose(name, value, f"{self.names[part]} counts")

    def has(self, part: str) -> bool:
        return part in self.values or part in self.unknown

    def take(self, part: str, default: Any = None) -> Any:
        """Return a part, or that trainer's default. Raises OnlyTheScriptKnows."""
        self.used.add(part)
        if part in self.unknown - self.values.keys():
            raise OnlyTheScriptKnows
        return self.values.get(part, default)

    def lose(self, name: str, value: Any, hint: str | None = None) -> None:
        """List a setting with its value and a hint, unset that of INSTEAD for it or for its section."""
        if hint is None:
            *_, last = steps = name.split(".")[1:] or [name]
            is_on = value not in (None, False, "", [], {})
            hints = [text for step in steps if (text := (_HINTS | INSTEAD).get(step))]
            hint = hints[0] if hints and is_on != (last in _TOLD_IF_OFF) else ""
        text = "(hidden)" if name == "hub_token" else one_line(value, None) or "''"
        self.lost.setdefault(one_line(name, None), (text, hint))

    def lose_part(self, part: str, default: Any, hint: str) -> None:
        """List a part, also one that the file leaves at that trainer's default."""
        name = self.names[part]
        self.lose(name, self.given.get(name, default), hint)

    def lose_unused(self) -> None:
        """List the pieces that no setting was made of."""
        for part in self.values:
            if part.startswith("_") and part not in self.used:
                self.lose_part(part, None, _UNUSED.get(part, "only the script knows what it goes with"))


# Each of these makes the settings that go together, so that pieces that only the script knows leave no others out. What
# is None is not set.


def _rounds_of_trl(parts: Parts) -> Settings:
    reason = "prompts_per_step is of one process: multiply it by their number"
    with suppress(OnlyTheScriptKnows):
        completions = parts.take("_sequences", 8) * parts.take("_accumulation", 1)
        if completions % (of_prompt := parts.take("num_generations", 8)):
            reason = f"prompts_per_step is {completions} / {of_prompt} x the number of processes: write that"
    parts.lose_part("_sequences", 8, reason)
    return _rounds_of_sequences(parts, 8)


def _rounds_of_sequences(parts: Parts, default: int | None = None) -> Settings:
    """Count prompts and updates; there a batch counts completions, and steps are of accumulation."""
    passes = parts.take("_accumulation", 1)
    sequences = parts.take("_sequences", default)
    prompts = sequences and max(1, sequences * passes // parts.take("num_generations", 8))
    updates = parts.take("_micro_steps", passes) // passes
    return {"prompts_per_step": prompts, "steps_per_generation": updates if updates > 1 else None}


def _length_of_simple_grpo(parts: Parts) -> Settings:
    batches, saves, passes = parts.take("_micro_batches"), parts.take("_micro_saves"), parts.take("_accumulation", 1)
    return {"max_steps": batches and batches // passes, "save_steps": saves and max(1, saves // passes)}


def _length(parts: Parts) -> Settings:
    steps = parts.take("_max_steps", -1)
    if steps > 0:  # which wins there
        return {"max_steps": _in_updates(parts, steps)}
    return {"num_train_epochs": parts.take("_epochs", {"trl": 3.0, "verl": 30.0, "easyr1": 15.0}[parts.trainer])}


def _clip_of_trl(parts: Parts) -> Settings:
    """Give cispo TRL's bound, which is epsilon where epsilon_high is not set."""
    if parts.take("loss_type") != "cispo" or parts.has("epsilon_high"):
        return {}
    high = parts.take("epsilon", 0.2)
    parts.values.pop("epsilon", None)  # or it would be listed as lost
    return {"epsilon_high": high}


def _warmup(parts: Parts) -> Settings:
    if parts.take("lr_scheduler_type") == "constant":  # which ignores a warm-up there, and is refused with one here
        for part in ("_warmup_steps", "_warmup_share"):
            if parts.has(part):
                parts.lose_part(part, None, "a constant rate has no warm-up there, either")
        return {"warmup_steps": 0}
    steps = parts.take("_warmup_steps", -1.0)
    if steps >= 1 or (steps == 0 and parts.trainer != "trl"):
        return {"warmup_steps": _in_updates(parts, int(steps))}
    return {"warmup_steps": steps if steps > 0 else parts.take("_warmup_share", 0)}


def _saves_of_trl(parts: Parts) -> Settings:
    strategy = str(parts.take("_save_strategy", "steps")).lower()
    if strategy in ("no", "false"):  # YAML reads no as False
        return {"save_steps": 0}
    if strategy == "steps":
        return {"save_steps": parts.take("_save_steps", 500)}
    parts.lose_part("_save_strategy", strategy, INSTEAD["save_strategy"])
    return {}


def _evaluations_of_trl(parts: Parts) -> Settings:
    strategy = str(parts.take("_eval_strategy", "no")).lower()
    if strategy in ("no", "false"):
        return {"eval_steps": 0}
    if strategy == "steps":
        steps = parts.take("_eval_steps") or parts.given.get("logging_steps", 10)
        return {} if isinstance(steps, Unknown) else {"eval_steps": steps}
    parts.lose_part("_eval_strategy", strategy, INSTEAD["eval_strategy"])
    return {}


def _prompts_of_trl(parts: Parts) -> Settings:
    """Open-R1 makes chats of a column and a system prompt; TRL itself continues a text."""
    is_chat = parts.has("system_prompt") or parts.has("dataset_prompt_column")
    return {"prompt_format": "chat" if is_chat else "raw"}


_BATCHES = {"verl": (1024, 256), "easyr1": (512, 256)}  # prompts of a round, and of an update


def _batch(parts: Parts) -> Settings:
    whole, batch = _BATCHES[parts.trainer]
    given = parts.take("_mini_batch")
    return {"prompts_per_step": given or min(batch, parts.take("_round", whole))}


def _rounds(parts: Parts) -> Settings:
    updates = parts.take("_round", _BATCHES[parts.trainer][0]) // _batch(parts)["prompts_per_step"]
    return {"steps_per_generation": updates if updates > 1 else None}


def _in_updates(parts: Parts, steps: int) -> int:
    """Return a number of steps in updates: a step of verl's and EasyR1's is a round, of several. -1 is never."""
    if steps <= 0 or parts.trainer not in _BATCHES:
        return max(0, steps)
    return steps * (_rounds(parts)["steps_per_generation"] or 1) * parts.take("num_iterations", 1)


def _saves(parts: Parts) -> Settings:
    return {"save_steps": _in_updates(parts, parts.take("_save_freq", -1))}


def _evaluations(parts: Parts) -> Settings:
    return {"eval_steps": _in_updates(parts, parts.take("_eval_freq", -1))}


def _course(parts: Parts) -> Settings:
    course = parts.take("_course", "constant")
    if course != "cosine":
        return {"lr_scheduler_type": "constant_with_warmup" if course == "constant" else course}
    lowest, cycles = parts.take("_lowest_rate", 0.0), parts.take("_cycles", 0.5)
    arguments = {"min_lr_rate": lowest} if lowest else {}
    if cycles != 0.5:
        arguments["num_cycles"] = cycles
    name = "cosine_with_min_lr" if lowest else "cosine"
    return {"lr_scheduler_type": name, "lr_scheduler_kwargs": arguments or None}


def _betas(parts: Parts) -> Settings:
    first, second = parts.take("_betas", [0.9, 0.999])
    return {"adam_beta1": first, "adam_beta2": second}


def _lora(parts: Parts) -> Settings:
    if (rank := parts.take("_rank", 0)) <= 0:
        return {}
    alpha = parts.take("_alpha", 64 if parts.trainer == "easyr1" else 16)
    modules = parts.take("_modules", ["all-linear"])
    return {"use_peft": True, "lora_r": rank, "lora_alpha": alpha, "lora_target_modules": modules}


def _kl(parts: Parts) -> Settings:
    in_loss = parts.take("_kl_in_loss", False)
    if parts.trainer == "verl":
        in_reward = parts.take("_kl_in_reward", False)
        if in_loss and in_reward:
            parts.lose_part("_kl_in_reward", True, "the loss has the KL already: one of both")
        if in_loss:
            return _kl_term(parts, "_kl_loss_coef", "_kl_loss_type", "k3")
        is_off = not in_reward
    else:
        is_off = parts.take("_no_kl", False)
    if is_off:
        return {"beta": 0.0}
    settings = _kl_term(parts, "_kl_coef", "_kl_penalty", "k1")
    if in_loss or not settings["beta"]:
        return settings
    is_adaptive = parts.take("_kl_control", "fixed") == "adaptive"
    return settings | {"kl_in_reward": True, "kl_target": parts.take("_kl_target", 0.1) if is_adaptive else None}


def _kl_term(parts: Parts, weight: str, estimator: str, default: str) -> Settings:
    beta = parts.take(weight, 0.001)
    return {"beta": beta, "kl_estimator": parts.take(estimator, default) if beta else None}


def _advantages(parts: Parts) -> Settings:
    if parts.take("advantage_estimator", "gae") not in ("grpo", "passk") or not parts.has("_by_std"):
        return {}
    return {"scale_rewards": "group" if parts.take("_by_std") else "none"}


def _loss(parts: Parts) -> Settings:
    """Choose the loss type by the kind of loss and the mean over tokens, and its bounds."""
    kind, mean = parts.take("_loss", ""), parts.take("_mean", "dapo")
    is_verl = parts.trainer == "verl"
    if kind in ("gspo", "sapo") and is_verl:  # which take no other mean there
        if parts.has("_mean") and mean != "grpo":
            parts.lose_part("_mean", mean, f"{kind} is a mean over sequences, there too")
        mean = "grpo"
    if kind == "sapo":
        if mean != "grpo":
            parts.lose_part("_mean", "token", "sapo is a mean over sequences here")
        return {"loss_type": "sapo"}
    low = parts.take("_low") if parts.has("_low") else parts.take("_low_and_high", 0.2)
    default = 0.2 if is_verl else 0.3
    high = parts.take("_high") if parts.has("_high") else parts.take("_low_and_high", default)
    if kind == "cispo":
        if low < 1:  # a ratio is never below 0
            parts.lose_part("_low", low, "cispo has no bound below here")
        if mean != "dapo":
            parts.lose_part("_mean", mean, "cispo is a mean over all tokens here")
        return {"loss_type": "cispo", "epsilon_high": round(1 + high, 12)}  # there it is the distance from 1
    settings = {"loss_type": mean, "epsilon": low, "epsilon_high": high}
    if kind == "gspo":
        settings["importance_sampling_level"] = "sequence"
    elif kind:
        settings["loss_type"] = kind
    if kind != "gspo" or not is_verl:
        settings["delta"] = parts.take("_dual", 3.0)
    return settings


def _data(parts: Parts) -> Settings:
    """Name the dataset: a folder with a file for each split, or a dataset of the hub; or list several."""
    trained = [_source(name) for name in _listed(parts.take("_train"))]
    held_out = [_source(name) for name in _listed(parts.take("_held_out"))]
    if not trained:
        if held_out:
            parts.lose_part("_held_out", None, "there is nothing to train on")
        return {}
    if len(trained) == 1 and len(held_out) <= 1 and {place for place, _ in held_out} <= {trained[0][0]}:
        (place, split), test = trained[0], held_out[0][1] if held_out else "test"
        splits = {"dataset_train_split": (split, "train"), "dataset_test_split": (test, "test")}
        return {"dataset_name": place} | {name: value for name, (value, usual) in splits.items() if value != usual}
    entries = [{"path": place, "split": split, "test_split": ""} for place, split in trained]
    entries += [{"path": place, "split": "", "test_split": split} for place, split in held_out]
    for entry in entries:
        entry["label"] = f"{Path(entry['path']).name}-{entry['split'] or entry['test_split']}"
    return {"dataset_name": entries}


def _listed(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value]) if each]


def _source(name: str) -> tuple[str, str]:
    """Return the folder of a file and its name, or of `hub/name@split` both."""
    place, _, split = os.path.expandvars(os.path.expanduser(name)).partition("@")
    path = Path(place)
    if path.suffix not in (".parquet", ".json", ".jsonl", ".csv"):
        return place, split or "train"
    return str(path.parent), re.sub(r"-\d+-of-\d+$", "", path.stem)


def _rewards(parts: Parts) -> Settings:
    """Name their functions as they are called once they stand in rewards.py, which has one of its own."""
    if parts.has("reward_funcs"):
        return {}
    file, function = parts.take("_reward_file"), parts.take("_reward")
    if not (file or function):
        return {"reward_funcs": ["rewards.py:right_number"]}
    for part in ("_reward_file", "_reward"):
        if part in parts.values:
            parts.lose_part(part, None, INSTEAD["reward_function"])
    return {"reward_funcs": [f"rewards.py:{str(function or 'compute_score').rpartition(':')[2]}"]}


_LIKE_VERL = (_batch, _rounds, _length, _warmup, _course, _betas, _saves, _evaluations, _lora, _kl, _loss, _data)
_OF_TRL = (_rounds_of_trl, _clip_of_trl, _length, _warmup, _saves_of_trl, _evaluations_of_trl, _prompts_of_trl)
JOINS: dict[str, tuple[Callable[[Parts], Settings], ...]] = {
    "trl": (*_OF_TRL, _rewards),
    "verl": (*_LIKE_VERL, _advantages, _rewards),
    "easyr1": (*_LIKE_VERL, _rewards),
    "simple_grpo": (_rounds_of_sequences, _length_of_simple_grpo, _rewards),
}
_UNUSED = {
    **dict.fromkeys(("_alpha", "_modules"), "it does nothing without a LoRA rank"),
    **dict.fromkeys(("_kl_loss_coef", "_kl_loss_type"), "the loss has no KL"),
    **dict.fromkeys(("_kl_coef", "_kl_penalty"), "there is no KL that takes it"),
    **dict.fromkeys(("_kl_control", "_kl_target"), "no KL in a reward is adapted to it"),
    **dict.fromkeys(("_low", "_high", "_low_and_high", "_dual"), "the loss has no such clip"),
    **dict.fromkeys(("_lowest_rate", "_cycles"), "it is for a cosine"),
    "_epochs": "the number of steps counts",
    "_warmup_share": "the number of steps counts",
    "_by_std": "the advantage estimator does not take it",
    "_save_steps": "save_strategy counts",
    "_eval_steps": "without eval_strategy steps it does nothing",
}  # why no setting was made of a piece
