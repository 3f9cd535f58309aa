"""Loads a reward function, calls it as TRL does, on a batch or on each completion alone with a deadline
(`reward_timeout`), and checks its rewards. Worker processes import only this."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import inspect
import json
import logging
import math
import re
import signal
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from grpo.config import user_code
from grpo.config.errors import RewardError, require
from grpo.config.fields import PACKAGE
from grpo.config.user_code import Key, parameters_of
from grpo.usercode.process import CallLost, ProcessPool, ended_within

if TYPE_CHECKING:
    from grpo.wire.rewards import Message

log = logging.getLogger(__name__)

# The arguments by which a reward function of another trainer is known.
_OTHERS = {"reward_inputs": "EasyR1", "reward_input": "EasyR1", "predict_str": "EasyR1", "solution_str": "verl"}
_OTHERS |= {"solution_strs": "verl", "queries": "OpenRLHF", "item": "simple_GRPO"}

LARGEST_REWARD = 1e100  # float64 holds its square, which std needs
_FALLBACK = 0.0  # the reward of a completion on which a function hangs or ends its process
RECORDED = {"step", "phase", "prompt", "pictures", "completion", "messages", "answer", "reward", "advantage"}
"""the fields of completions.jsonl, which log_extra must not use"""


@runtime_checkable
class RewardScorer(Protocol):
    """A reward model, here or on a server. It scores conversations, without a dataset's columns."""

    def score(self, conversations: Sequence[list[Message]]) -> list[float]:
        """Return one score per conversation. May be async."""


def is_scorer(reward: object) -> bool:
    """Tell a reward model from a function, or an object that is called and has a method `score` of its own."""
    return isinstance(reward, RewardScorer) and not callable(reward)


class Misuse(Exception):
    """A function without a reward function's arguments or result. The message follows its name in a sentence."""


@dataclass(frozen=True)
class TrainerState:
    """The updates done and those of the whole run, as in transformers' TrainerState, which TRL passes."""

    global_step: int = 0
    max_steps: int = 0


class Logged:
    """The logs of reward functions. log_extra and log_metric are TRL's arguments.

    `extra` has, by column, a value for each completion, plain data for JSON.
    """

    def __init__(self) -> None:
        self.extra: dict[str, list] = {}
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Iterable) -> None:
        """Add a column, with one value for each completion, to the record of completions."""
        if column in RECORDED:
            raise ValueError(f"log_extra: completions.jsonl has a field {column!r}: choose another name")
        # A tensor or array becomes numbers, any other object a text; NaN becomes null.
        text = json.dumps(
            [*values], ensure_ascii=False, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x)
        )
        plain = json.loads(text.encode("utf-8", "replace"), parse_constant=lambda _: None)
        self.extra.setdefault(column, []).extend(plain)

    def log_metric(self, name: str, value: float) -> None:
        """Add a value to a metric: the mean of all values that all ranks log is recorded."""
        self.metrics.setdefault(name, []).append(float(value))

    def add(self, other: Logged) -> None:
        """Add another function's logs; a column of both is the other's."""
        self.extra |= other.extra
        for name, values in other.metrics.items():
            self.metrics.setdefault(name, []).extend(values)


@dataclass(frozen=True)
class RewardBatch:
    """The arguments of reward functions."""

    prompts: list[str] | list[list[Message]]
    completions: list[str] | list[list[Message]]
    columns: dict[str, list]  # other lists with a value for each completion
    state: TrainerState
    key: Key = ()  # the seed of the functions' random numbers
    conversations: Sequence[list[Message]] = ()  # each prompt's chat with the completion, for reward models

    def select(self, i: int) -> RewardBatch:
        """Return completion `i` as a batch of one."""
        columns = {name: values[i : i + 1] for name, values in self.columns.items()}
        return RewardBatch(
            prompts=self.prompts[i : i + 1],
            completions=self.completions[i : i + 1],
            columns=columns,
            state=self.state,
            key=(*self.key, i),
        )

    def make_arguments(self, logged: Logged) -> dict[str, Any]:
        """Copy the arguments for a call, which may change them. The copy of an EncodedPicture is a PIL image."""
        lists = {"prompts": self.prompts, "completions": self.completions, **self.columns}
        return {
            **copy.deepcopy(lists),
            "trainer_state": self.state,
            "log_extra": logged.log_extra,
            "log_metric": logged.log_metric,
        }


def load_function(name: str) -> Callable:
    """Return a function of the top-level `reward.py`, or of another file: "path/to/file.py:function". Words in brackets
    after the name, "format_reward(reasoning, answer)", are its argument `tags`.

    Raises ConfigError if there is none, the import fails, or the function takes no tags.
    """
    path, colon, name = name.rpartition(":")  # brackets may stand in a path
    name, bracket, words = name.partition("(")
    name = path + colon + name
    if colon:
        function = user_code.load_function("reward_funcs", name)
    else:
        with user_code.imported("reward_funcs", name, "reward.py"):
            module = importlib.import_module("reward")
        kind = "function (a reward model is written ./folder or org/model)"
        function = user_code.find_function("reward_funcs", name, module, kind)
    remedy = "it is a class: make an object of it at the end of the file, and name that"
    require(not inspect.isclass(function), "reward_funcs", name, remedy)
    if not bracket:
        return function
    parameters = parameters_of(function, follow_wrapped=True)  # what a decorator hands on, it may take by **kwargs
    remedy = "it has no argument `tags`: leave the brackets out"
    require("tags" in parameters, "reward_funcs", f"{name}({words}", remedy)
    tags = tuple(word.strip() for word in words.removesuffix(")").split(","))
    default = parameters["tags"].default
    fits = all(tags) and (not isinstance(default, tuple) or len(tags) == len(default))
    remedy = "name its tags between the brackets, as many as it has of its own, or leave them out"
    require(fits, "reward_funcs", f"{name}({words}", remedy)
    return functools.update_wrapper(functools.partial(function, tags=tags), function)


def call_function(function: Callable | RewardScorer, batch: RewardBatch, logged: Logged) -> list | BaseException:
    """Return one reward per completion, or the exception raised, even sys.exit's."""
    try:
        return _check_returned(_begin_call(function, batch, logged), batch, logged)
    except BaseException as error:  # the user's code may raise anything
        # With a signal handler of our own, Ctrl-C raises nothing: then the function raised it.
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        return error


async def await_call(function: Callable | RewardScorer, batch: RewardBatch, logged: Logged) -> list:
    """Return one reward per completion, of an async function."""
    return _check_returned(await _begin_call(function, batch, logged), batch, logged)


def _begin_call(function: Callable | RewardScorer, batch: RewardBatch, logged: Logged) -> Any:
    """Call the function; an async one returns an awaitable."""
    if is_scorer(function):
        return function.score(batch.conversations)
    if getattr(function, "takes_batch", False):
        return function(batch, logged)
    arguments = batch.make_arguments(logged)
    if isinstance(function, functools.partial):  # its tags, not a column of the dataset
        arguments = {name: value for name, value in arguments.items() if name not in function.keywords}
    # No signature is asked beforehand: functools.wraps and update_wrapper show that of another function than is called.
    return function(**arguments)


def _check_returned(returned: Any, batch: RewardBatch, logged: Logged) -> list:
    """Return the rewards as a list. Raises Misuse unless it and each logged column have a value per completion."""
    count, returned = len(batch.completions), _take_parts_out(returned, logged)
    if returned is None:
        raise Misuse("returned None: is a `return` missing?")
    if inspect.iscoroutine(returned):
        returned.close()
        raise Misuse("returned a coroutine: let what is called be async def, its decorator too")
    if not isinstance(returned, Iterable):
        raise Misuse(f"returned {repr_of(returned)}: it must return a list with one reward for each completion")
    rewards = [*map(to_plain, returned)]
    if len(rewards) != count:
        raise Misuse(f"returned {len(rewards)} rewards for {count} completions: return one for each")
    for column, values in logged.extra.items():
        if len(values) != count:
            raise Misuse(f"gave log_extra {len(values)} values of {column!r} for {count} completions")
    return rewards


def _take_parts_out(returned: Any, logged: Logged) -> Any:
    """Return "overall" (EasyR1) or "score" (verl) of a dict of lists or a list of dicts; log the rest of each
    completion, and as metrics. Return anything else unchanged. Raises Misuse without either."""
    is_rows = isinstance(returned, Sequence) and returned and all(isinstance(row, Mapping) for row in returned)
    if is_rows:
        names = dict.fromkeys(name for row in returned for name in row)  # the first row may lack some
        returned = {name: [row.get(name) for row in returned] for name in names}
    if not isinstance(returned, Mapping):
        return returned
    parts = dict(returned)
    if (total := next((name for name in ("overall", "score") if name in parts), None)) is None:
        raise Misuse(f"returned {', '.join(map(str, parts))} without 'overall', which is trained on: add it")
    overall = parts.pop(total)
    for name, values in parts.items():
        logged.log_extra(name, values)
        if any(isinstance(value, str) for value in values):  # a reason in words is for the record alone
            continue
        for value in values:
            logged.log_metric(f"rewards/{name}/mean", math.nan if value is None else value)
    return overall


def make_error(
    name: str, function: Callable, error: BaseException, batch: RewardBatch, completion: str | None = None
) -> RewardError:
    """Make the error that ends the run after a function raised on a batch, on this completion if it is known."""
    if isinstance(error, Misuse):
        how = str(error)
    elif (refused := _refused_parameters(function, error)) is not None:
        how = f"cannot be called: {_explain_refusal(refused, error, batch)}"
    else:
        how = f"failed{'' if completion is None else f' on {quote_completion(completion)}'}: {repr_of(error)}"
        how += _explain_types(error, batch)
    return RewardError(f"Reward function {name!r} {how}", format_user_stack(error))


def _refused_parameters(function: Callable, error: BaseException) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of the function if it does not take the arguments, or of one to which a decorator hands
    them on; None if the error is another one."""
    if not isinstance(error, TypeError) or not re.search(r"\bargument|takes no", _words_of(error)):
        return None
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_code is _begin_call.__code__:  # no line of the function has run
        return parameters_of(function)
    wrapped = getattr(inspect.unwrap(function), "__qualname__", None)
    return parameters_of(function, follow_wrapped=True) if _words_of(error).startswith(f"{wrapped}() ") else None


def _explain_refusal(parameters: Mapping[str, inspect.Parameter], error: BaseException, batch: RewardBatch) -> str:
    given = batch.make_arguments(Logged())
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in given
    ]
    if not missing:
        is_by_place = any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters.values())
        remedy = "arguments come by their names: leave the / out" if is_by_place else "end with **kwargs"
        words = _words_of(error).rpartition("() ")[2]
        return f"{words}: it is given {', '.join(given)}: {remedy}"
    trainer = next((_OTHERS[name] for name in missing if name in _OTHERS), None)
    remedy = "give the dataset a column of that name, or the argument a default"
    if trainer is not None:
        remedy = f"these are arguments of {trainer}: call it from a function of three lines, as docs/rewards.md shows"
    return f"it asks for {', '.join(missing)}, and is given {', '.join(given)}: {remedy}"


def _explain_types(error: BaseException, batch: RewardBatch) -> str:
    """Return the likely reason of an error of a function that was written for the other kind of prompts, or ""."""
    if not isinstance(error, TypeError | AttributeError):
        return ""
    words, is_text = _words_of(error), all(isinstance(completion, str) for completion in batch.completions)
    gold = next(iter(batch.columns.get("answer", ())), None)
    if is_text and re.search(r"string indices must|'str' object has no attribute '(get|items|keys|values)'", words):
        return ": completions are text here, not messages, because the dataset's prompts are text"
    if not is_text and re.search(r"\blist\b", words):
        text = "completion[-1]['content']"
        reason = "the dataset's prompts are, or an agent's episode"
        return f": completions are lists of messages here, as {reason}: the text is {text}"
    if isinstance(gold, Mapping) and re.search(r"\b(dict|gold answer)\b", words):
        example = f"dataset_answer_column COLUMN.{next(iter(gold))}"
        return f": the gold answer is a dict of {', '.join(gold)}: name the one to compare with, as in {example}"
    return ""


def _words_of(error: BaseException) -> str:
    """Return the words of an error that Python raises; of others, whose str may raise, those that they are made of."""
    return next((each for each in error.args if isinstance(each, str)), "")


def repr_of(value: object) -> str:
    """Return an object's repr, or its type's name if that raises."""
    try:
        return repr(value)
    except Exception:
        return type(value).__name__


def format_user_stack(error: BaseException) -> str:
    """Format the error's traceback from the user's first line on, or ""."""
    stack = error.__traceback__
    while stack and PACKAGE in Path(stack.tb_frame.f_code.co_filename).parents:
        stack = stack.tb_next
    return "".join(traceback.format_exception(type(error), error, stack)) if stack else ""


def to_plain(value: Any) -> Any:
    """Return the Python number of a NumPy or torch scalar, as the elements of a tensor are; else the value."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def is_reward(reward: Any) -> bool:
    try:
        return reward is None or (isinstance(reward, Real) and abs(float(reward)) <= LARGEST_REWARD)
    except OverflowError:  # an int or a Fraction that float64 does not reach
        return False


def invalid_reward(name: str, reward: object, completion: str) -> RewardError:
    """Make the error for a result that is no reward."""
    return RewardError(
        f"Reward function {name!r} returned {repr_of(reward)} for {quote_completion(completion)}: "
        "a reward is a finite number of at most 1e100, or None where the function does not apply"
    )


def quote_completion(completion: str, characters: int = 500) -> str:
    return f"the completion {completion[:characters]!r}" + ("..." if len(completion) > characters else "")


def text_of(completion: str | list[Message]) -> str:
    """Return the completion as text: the assistant's messages, joined by line ends."""
    if isinstance(completion, str):
        return completion
    return "\n".join(message["content"] for message in completion if message["role"] == "assistant")


def with_calls(content: str, message: Mapping[str, Any]) -> str:
    """Return a message's content as text, with each of its calls of a tool as a line of JSON."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or []]
    return "\n".join([*([content] if content or not calls else []), *calls])


def call_each_alone(label: str, compute_reward: Callable[[RewardBatch, Logged], Awaitable[float | None]]) -> Callable:
    """Return an async function for `await_call` that calls this one on all completions at once, as batches of one. The
    calls' logs are logged for the whole batch: a column is null for calls without it."""

    async def compute_or_fall_back(batch: RewardBatch, logged: Logged) -> float | None:
        try:
            return await compute_reward(batch, logged)
        except CallLost as lost:
            # An error: ranks other than the first show no warnings.
            shown = quote_completion(text_of(batch.completions[0]), 80)
            log.error("reward function %r %s on %s: that earns %g", label, lost, shown, _FALLBACK)
            return _FALLBACK

    async def rewards(batch: RewardBatch, logged: Logged) -> list[float | None]:
        logs = [Logged() for _ in batch.completions]
        calls = [asyncio.ensure_future(compute_or_fall_back(batch.select(i), alone)) for i, alone in enumerate(logs)]
        try:
            values = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        for column in dict.fromkeys(column for alone in logs for column in alone.extra):
            logged.log_extra(column, [alone.extra.get(column, [None])[0] for alone in logs])
        for alone in logs:
            alone.extra = {}
            logged.add(alone)
        return values

    rewards.takes_batch = True
    return rewards


def add_deadline(label: str, function: Callable, seconds: float) -> Callable:
    """Return an async function that calls this one on each completion alone, in this process, for `seconds` at most."""

    async def compute_reward(batch: RewardBatch, logged: Logged) -> float | None:
        call = await ended_within(seconds, await_call(function, batch, logged))
        try:
            return call.result()[0]
        except BaseException as error:  # the user's code may raise anything
            raise make_error(label, function, error, batch, text_of(batch.completions[0])) from error

    return call_each_alone(label, compute_reward)


class RewardService:
    """Calls reward functions in a process, on one completion at a time."""

    def __init__(self, names: list[str]):
        """`names` are as in `reward_funcs`."""
        self._functions = [(name.rpartition(":")[2], load_function(name)) for name in names]

    def answer(self, index: int, batch: RewardBatch) -> dict[str, Any]:
        """Call a function on a batch of one completion. Raises sys.exit and other ends of a process."""
        (label, function), logged, completion = self._functions[index], Logged(), text_of(batch.completions[0])
        with user_code.user_code(*batch.key, index):
            returned = call_function(function, batch, logged)
        if isinstance(returned, Exception) and not isinstance(returned, MemoryError):
            error = make_error(label, function, returned, batch, completion)
        elif isinstance(returned, BaseException):
            raise returned  # the process ends
        elif not is_reward(returned[0]):
            error = invalid_reward(label, returned[0], completion)
        else:
            reward = None if returned[0] is None else float(returned[0])
            return {"reward": reward, "extra": logged.extra, "metrics": logged.metrics}
        return {"error": str(error), "traceback": error.traceback}


class RewardPool(ProcessPool):
    """Worker processes that call reward functions, on one completion at a time."""

    def __init__(self, names: list[str], timeout: float, workers: int):
        """`names` are as in `reward_funcs`. A call may take `timeout` seconds."""
        super().__init__((RewardService, (names,), names), timeout, threads=workers, started=workers)
        self._names = names

    def make_function(self, name: str) -> Callable:
        """Return an async function that calls the function of this name in the workers, on each completion alone. It
        raises RewardError if the function raises or returns no reward."""
        index, label = self._names.index(name), name.rpartition(":")[2]

        async def compute_reward(batch: RewardBatch, logged: Logged) -> float | None:
            reply = await self.run(self.call, index, batch)
            if "error" in reply:
                raise RewardError(reply["error"], reply["traceback"])
            logged.extra, logged.metrics = reply["extra"], reply["metrics"]
            return reply["reward"]

        return call_each_alone(label, compute_reward)
