"""One function of the user's: loaded, called as TRL calls it, checked. Worker processes import no more than this."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import signal
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from grpo.config.errors import ConfigError, RewardError, did_you_mean
from grpo.config.user_code import Key, imported, load_file

if TYPE_CHECKING:
    from grpo.wire.rewards import Message

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 500
LARGEST_REWARD = 1e100  # the squares of a group's rewards, in its std, are in float64's range then
_OURS = Path(__file__).parents[1]
RECORDED = {"step", "phase", "prompt", "pictures", "completion", "messages", "answer", "reward", "advantage"}
"""what completions.jsonl has of each completion: no name for a column of log_extra"""


class Misuse(Exception):
    """A function that does not take or return what a reward function does. The message follows its name in a
    sentence."""


@dataclass(frozen=True)
class TrainerState:
    """Where the training is: two fields of transformers' TrainerState, which TRL passes to reward functions."""

    global_step: int = 0
    """the number of updates done"""
    max_steps: int = 0
    """the number of updates of the whole run"""


class Logged:
    """What reward functions log. Its two methods are TRL's arguments of the same names."""

    def __init__(self) -> None:
        self.extra: dict[str, list] = {}
        """by column, a value for each completion, of the types that JSON has"""
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Iterable) -> None:
        """Add a column, with one value for each completion, to the record of completions."""
        if column in RECORDED:
            raise ValueError(f"log_extra: completions.jsonl has {column!r} of its own: choose another name")
        # A tensor or array becomes numbers, any other object a text; NaN becomes null.
        text = json.dumps(
            [*values], ensure_ascii=False, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x)
        )
        plain = json.loads(text.encode("utf-8", "replace"), parse_constant=lambda _: None)
        self.extra.setdefault(_encodable(column), []).extend(plain)

    def log_metric(self, name: str, value: float) -> None:
        """Add a value to a metric: the mean of all values that all ranks log is recorded."""
        self.metrics.setdefault(_encodable(name), []).append(float(value))

    def add(self, other: Logged) -> None:
        """Take up what another function logged; a column that both have is the other's."""
        self.extra |= other.extra
        for name, values in other.metrics.items():
            self.metrics.setdefault(name, []).extend(values)


@dataclass(frozen=True)
class RewardBatch:
    """What reward functions are called with."""

    prompts: list[str] | list[list[Message]]
    completions: list[str] | list[list[Message]]
    columns: dict[str, list]
    """the other arguments that are lists with a value for each completion"""
    state: TrainerState
    key: Key = ()
    """what random numbers of the functions follow from"""

    def select(self, i: int) -> RewardBatch:
        """Return completion `i` as a batch of one."""
        columns = {name: values[i : i + 1] for name, values in self.columns.items()}
        return RewardBatch(self.prompts[i : i + 1], self.completions[i : i + 1], columns, self.state, (*self.key, i))

    def make_arguments(self, logged: Logged) -> dict[str, Any]:
        """Make the arguments of a call. No other function and no later step may see what a function changes in them.

        Of an EncodedPicture the copy is a PIL image.
        """
        lists = {"prompts": self.prompts, "completions": self.completions, **self.columns}
        return {
            **copy.deepcopy(lists),
            "trainer_state": self.state,
            "log_extra": logged.log_extra,
            "log_metric": logged.log_metric,
        }


def load_function(name: str) -> Callable:
    """Return a function of the top-level `reward.py`, or of another file: "path/to/file.py:function".

    Raises ConfigError where there is no such file or function, or the file cannot be imported.
    """
    path, _, function_name = name.rpartition(":")
    if path:
        module = load_file("reward_funcs", name, path)
    else:
        with imported("reward_funcs", name, "reward.py"):
            module = importlib.import_module("reward")
    function = getattr(module, function_name, None)
    if not callable(function):
        defined = _list_reward_functions(module)
        raise ConfigError(
            f"reward_funcs={name!r}: {path or 'reward.py'} has no such function"
            f"{did_you_mean(function_name, defined)}: name one that it has ({', '.join(defined) or 'none yet'}), one "
            "elsewhere as path/to/file.py:function, or a reward model as ./folder or org/model"
        )
    return function


def call_function(function: Callable, batch: RewardBatch, logged: Logged) -> list | BaseException:
    """Return one reward per completion, or the exception that prevented it, even sys.exit's."""
    try:
        return check_returned(begin_call(function, batch, logged), batch, logged)
    except BaseException as error:  # the user's code may raise anything; the caller says which function it was
        # With a signal handler of our own, Ctrl-C raises nothing: then the function raised it.
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        return error


def begin_call(function: Callable, batch: RewardBatch, logged: Logged) -> Any:
    """Call the function, and return what it returns: of an async one, what to await. Raises what it raises.

    Raises Misuse where it does not take the arguments.
    """
    if getattr(function, "takes_batch", False):  # it calls a function of the user's itself, perhaps elsewhere
        return function(batch, logged)
    arguments = batch.make_arguments(logged)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return function(**arguments)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise Misuse(
            f"cannot be called: {error}: it is given {', '.join(arguments)}: let it name those that it needs, and end "
            "with **kwargs for the rest"
        ) from None
    return function(**arguments)


def check_returned(returned: Any, batch: RewardBatch, logged: Logged) -> list:
    """Return the rewards as a list. Raises Misuse unless there is one, and one of each column, per completion."""
    count = len(batch.completions)
    if returned is None:
        raise Misuse("returned None: is a `return` missing?")
    if not isinstance(returned, Iterable):
        raise Misuse(f"returned {repr_of(returned)}: it must return a list with one reward for each completion")
    # The elements of a tensor are tensors.
    rewards = [reward.item() if getattr(reward, "ndim", None) == 0 else reward for reward in returned]
    if len(rewards) != count:
        raise Misuse(f"returned {len(rewards)} rewards for {count} completions: return one for each")
    for column, values in logged.extra.items():
        if len(values) != count:
            raise Misuse(f"gave log_extra {len(values)} values of {column!r} for {count} completions")
    return rewards


def make_error(name: str, error: BaseException, completion: str | None = None) -> RewardError:
    """Make the error that ends the run for what a function raised."""
    return RewardError(f"Reward function {name!r} {describe_failure(error, completion)}", format_user_stack(error))


def describe_failure(error: BaseException, completion: str | None = None) -> str:
    """Return what a function did wrong, to follow its name in a sentence; `completion` is the one at fault if known."""
    if isinstance(error, Misuse):
        return str(error)
    return f"failed{'' if completion is None else f' on {quote_completion(completion)}'}: {repr_of(error)}"


def repr_of(value: object) -> str:
    """Return the repr of an object of the user's; its type's name where its own method for that raises."""
    try:
        return repr(value)
    except Exception:
        return type(value).__name__


def format_user_stack(error: BaseException) -> str:
    """Format the error's traceback from the user's first line on; "" where the error is no line of the user's."""
    stack = error.__traceback__
    while stack and _OURS in Path(stack.tb_frame.f_code.co_filename).parents:
        stack = stack.tb_next
    return "".join(traceback.format_exception(type(error), error, stack)) if stack else ""


def is_reward(reward: Any) -> bool:
    try:
        return reward is None or (isinstance(reward, Real) and abs(float(reward)) <= LARGEST_REWARD)
    except OverflowError:  # an int or a Fraction that float64 does not reach
        return False


def invalid_reward(name: str, shown: str, completion: str) -> RewardError:
    """Make the error for a function that returned something else than a reward; `shown` is its repr."""
    return RewardError(
        f"Reward function {name!r} returned {shown} for {quote_completion(completion)}: "
        "a reward is a finite number of at most 1e100, or None where the function does not apply"
    )


def quote_completion(completion: str, characters: int = SHOWN_CHARACTERS) -> str:
    return f"the completion {completion[:characters]!r}" + ("..." if len(completion) > characters else "")


def log_lost_call(label: str, how: str, completion: str, fallback: float) -> None:
    """Log what a call earns that gave no answer. An error: ranks other than the first show nothing less."""
    shown = quote_completion(completion, 80)
    log.error("reward function %r %s on %s: that earns %g", label, how, shown, fallback)


def text_of(completion: str | list[Message]) -> str:
    """Return the completion as text: of messages what the assistant says in them, joined by line ends."""
    if isinstance(completion, str):
        return completion
    return "\n".join(message["content"] for message in completion if message["role"] == "assistant")


def _encodable(name: object) -> str:
    """Return a name as text, with a question mark for each character that no file can hold."""
    return str(name).encode("utf-8", "replace").decode()


def _list_reward_functions(module: ModuleType) -> list[str]:
    """Return the names of the module's functions that take `completions`, as a reward function must."""
    functions = inspect.getmembers(module, inspect.isfunction)
    return [name for name, function in functions if "completions" in inspect.signature(function).parameters]
