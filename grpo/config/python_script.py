"""Reads settings in a Python script or notebook: the keywords of the calls that configure a trainer, and constants.
Runs nothing: names that are assigned once stand for their values, and arithmetic is computed."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError

Given = dict[str, Any]  # the values by that trainer's names, of which the last counts


class Unknown(str):
    """A value that only the script knows, as it stands there."""


_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    """Compute an expression of constants, names of such, and arithmetic. Raises ValueError if it has anything else."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in names:
            return evaluate(names[name], {other: value for other, value in names.items() if other != name})
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):  # a dtype
            return name
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [evaluate(item, names) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {evaluate(key, names): evaluate(value, names) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(evaluate(operand, names))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            first, second = evaluate(left, names), evaluate(right, names)
            if isinstance(op, ast.Add) and isinstance(first, str) and isinstance(second, str):
                return first + second
            try:
                return _OPERATIONS[type(op)](_number(first), _number(second))
            except ArithmeticError as error:
                raise ValueError(str(error)) from error
    raise ValueError(f"{ast.unparse(node)} is no constant")


def _number(value: Any) -> int | float:
    if not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    return value


def parse_script(text: str, path: Path) -> ast.Module:
    """Parse a script, or the cells of a notebook, without lines for its shell."""
    if path.suffix == ".ipynb":
        try:
            cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        except (KeyError, TypeError) as error:
            raise ValueError("it is no notebook") from error
        text = "\n".join(cell for cell in cells if not cell.startswith("%%"))
    try:
        return ast.parse(text)
    except SyntaxError:
        without = re.sub(r"^([ \t]*)[!%].*$", r"\1pass", text, flags=re.MULTILINE)
        if without == text:
            raise
        return ast.parse(without)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the values of names that are assigned once."""
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and stored.count(target.id) == 1:
                    found[target.id] = node.value
    return found


_LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The calls of a TRL script that have settings: the names of what they take by position, and their own defaults, of
# those for the model unsloth's.
_CALLS: dict[str, tuple[list[str], Given]] = {
    "GRPOConfig": (["output_dir"], {}),
    "GRPOTrainer": (["model", "reward_funcs", "args", "train_dataset", "eval_dataset"], {}),
    "BitsAndBytesConfig": ([], {}),
    "LoraConfig": ([], {"use_peft": True, "r": 8, "lora_alpha": 8}),
    "from_pretrained": (["model_name"], {}),
    "get_peft_model": ([], {"use_peft": True, "r": 16, "lora_alpha": 16, "target_modules": _LINEAR_LAYERS}),
}
_FOR_THE_MODEL = {"from_pretrained", "get_peft_model"}
_PARSERS = {"TrlParser", "HfArgumentParser"}


def trl_settings(path: Path, tree: ast.Module) -> Given:
    """Return the keywords of the calls that configure a trainer, and the configuration's later settings. Raises
    ConfigError if the script takes its settings from the command line."""
    names = _constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    called = {_name_of(call) for call in calls}
    if "GRPOConfig" not in called and called & _PARSERS:
        remedy = "name the YAML file of its --config, or a .sh file with its command"
        raise ConfigError(f"from='{path}': its settings are on the command line ({min(called & _PARSERS)}): {remedy}")
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    of_model = _calls_for_the_model(calls, assignments)
    given: Given = {}
    for name in ("SYSTEM_PROMPT", "system_prompt"):
        if name in names and isinstance(prompt := _value(names[name], names), str):
            given["system_prompt"] = prompt
    for call in calls:
        name = _name_of(call)
        if name not in _CALLS or (name in _FOR_THE_MODEL and call not in of_model):
            continue
        positions, defaults = _CALLS[name]
        if name == "from_pretrained" and ast.unparse(call.func).startswith("Fast"):
            defaults = {"load_in_4bit": True}
        if name == "get_peft_model" and "LoraConfig" in called:
            defaults = {}  # peft's own, and not unsloth's: its numbers are LoraConfig's
        given |= defaults | _arguments(call, positions, names)
    configs = {name for node in assignments if _name_of(node.value) == "GRPOConfig" for name in _targets(node)}
    for node in assignments:
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) in configs:
            given[target.attr] = _value(node.value, names)
    given |= _loaded(names.get(str(given.get("train_dataset"))), names)
    is_read = {
        "args": True,
        "model": "model_name" in given and isinstance(given.get("model"), Unknown),
        "train_dataset": "dataset_name" in given,
        "peft_config": "LoraConfig" in called,
        "quantization_config": "BitsAndBytesConfig" in called,
    }
    return {name: value for name, value in given.items() if not is_read.get(name)}


def _calls_for_the_model(calls: list[ast.Call], assignments: list[ast.Assign]) -> list[ast.expr]:
    """Return the calls that make what GRPOTrainer trains or, if that is not to be seen, any model; none if the trainer
    loads it by its name: others are a judge's or a reward's."""
    trained = [_arguments(call, ["model"], {}).get("model") for call in calls if _name_of(call) == "GRPOTrainer"]
    names = {model for model in trained if isinstance(model, Unknown)}
    if trained and not names and all(isinstance(model, str) for model in trained):
        return []
    made = [node.value for node in assignments if _targets(node) & names]
    made = made or [node.value for node in assignments if "Model" in ast.unparse(node.value).partition("(")[0]]
    return [call for call in made if _name_of(call) == "from_pretrained" or getattr(call, "keywords", [])]


def _loaded(node: ast.expr | None, names: Mapping[str, ast.expr]) -> Given:
    """Return the dataset that `load_dataset` of the hub's library loads, if it is all known."""
    if _name_of(node) != "load_dataset":
        return {}
    arguments = _arguments(node, ["path", "name"], names)
    ours = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
    is_known = arguments.keys() <= ours.keys() and not any(isinstance(value, Unknown) for value in arguments.values())
    return {ours[name]: value for name, value in arguments.items()} if is_known else {}


def _name_of(call: ast.expr | None) -> str:
    """Return the last part of a called name."""
    function = getattr(call, "func", None)
    return getattr(function, "id", getattr(function, "attr", ""))


def _targets(node: ast.Assign) -> set[str]:
    return {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def _arguments(call: ast.Call, positions: list[str], names: Mapping[str, ast.expr]) -> Given:
    pairs = list(zip(positions, call.args, strict=False))
    for each in call.keywords:
        found = names.get(getattr(each.value, "id", ""), each.value)
        if each.arg is not None:
            pairs.append((each.arg, each.value))
        elif isinstance(found, ast.Dict):
            pairs += _items(found)
        elif _name_of(found) == "dict":
            pairs += [(inner.arg or "**", inner.value) for inner in found.keywords]
        else:
            pairs.append((f"**{ast.unparse(each.value)}", each.value))
    return {name: _functions(node, names) if name == "reward_funcs" else _value(node, names) for name, node in pairs}


def _items(node: ast.Dict) -> list[tuple[str, ast.expr]]:
    return [(str(getattr(key, "value", "**")), value) for key, value in zip(node.keys, node.values, strict=True)]


def _value(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    try:
        return evaluate(node, names)
    except ValueError:
        return Unknown(ast.unparse(node))


def _functions(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    """Return the names of reward functions as they are called when they stand in rewards.py."""
    found = names.get(getattr(node, "id", ""), node)
    items = found.elts if isinstance(found, ast.List | ast.Tuple) else [node]
    values = [
        f"rewards.py:{item.id}" if isinstance(item, ast.Name) and item.id not in names else _value(item, names)
        for item in items
    ]
    return Unknown(ast.unparse(node)) if any(isinstance(value, Unknown) for value in values) else values


def plain_settings(tree: ast.Module, wanted: Collection[str]) -> Given:
    """Return the module's constants; of calls and dictionaries the wanted names, of which the first counts."""
    names = _constants(tree)
    top = [name for node in tree.body if isinstance(node, ast.Assign) for name in _targets(node)]
    pairs = [(name, names[name]) for name in top if name in names]
    if "system_prompt" in names:  # simple_GRPO's, in a function
        pairs.append(("system_prompt", names["system_prompt"]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            pairs += [(each.arg, each.value) for each in node.keywords if each.arg in wanted]
        elif isinstance(node, ast.Dict):
            pairs += [(name, value) for name, value in _items(node) if name in wanted]
    given: Given = {}
    for name, node in pairs:
        value = _value(node, names)
        if not isinstance(value, Unknown | dict):
            given.setdefault(name, value)
    return given
