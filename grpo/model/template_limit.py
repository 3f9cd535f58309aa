"""Limits the memory of a chat template: it is a program that comes with the model, and may ask for any memory.

transformers renders templates in jinja2's sandbox, which keeps a template from files and code but not from memory.
Importing this module puts a sandbox with a limit in its place.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MOST = 1 << 26
"""characters or elements that a template may put together in one place, and in all its sums and products"""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that refuses a text or list of more than MOST by SecurityError, before it is made."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    class code_generator_class(CodeGenerator):
        """Lets `a ~ b` call the environment, as the intercepted operators do."""

        def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
            self.write("environment.join(context, (")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.filters = _LimitedFilters(self.filters)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _count(context, _size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def join(self, context: Context, parts: Iterable[Any]) -> str:
        texts = [str(part) for part in parts]
        _count(context, sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(text, str):  # its methods: ljust, center, format
            _check_numbers((*arguments, *named.values(), *_widths(text)))
        result = super().call(context, function, *arguments, **named)
        _count(context, len(result) if isinstance(text, str) and isinstance(result, str | list) else 0)
        return result

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the outputs of a template, a macro or a block."""
        texts, length = [], 0
        for text in parts:
            length += len(text)
            _check_numbers((length,))
            texts.append(text)
        return "".join(texts)


class _LimitedFilters(UserDict):
    """Filters that take no larger number than MOST, such as the width of `center`."""

    def __setitem__(self, name: str, function: Callable) -> None:
        value = 1 + hasattr(function, "jinja_pass_arg")  # the filtered value comes before, and may be any number

        @wraps(function)
        def limited(*arguments: Any, **named: Any) -> Any:
            _check_numbers((*arguments[value:], *named.values()))
            result = function(*arguments, **named)
            _check_numbers((len(result) if isinstance(result, str | list) else 0,))
            return result

        super().__setitem__(name, limited)


def _size(operator: str, left: Any, right: Any) -> int:
    """Return at most how long the result of an operator is; 64 for each bit of a huge integer, which takes time."""
    lengths = [len(value) if isinstance(value, str | list | tuple) else None for value in (left, right)]
    if operator == "%":
        return max(_widths(left), default=0) if isinstance(left, str) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return 64 * bits if bits > 4096 else 0
    if operator == "*":
        count, length = (left, lengths[1]) if lengths[0] is None else (right, lengths[0])
        return count * length if isinstance(count, int) and length is not None else 0
    return sum(length or 0 for length in lengths)


def _widths(text: str) -> list[int]:
    """Return the numbers in a format, such as 9 in `%9d`; `%*d` takes its width from its arguments."""
    return [int(number[:20]) for number in re.findall(r"[%:]\D?\D?(\d+)", text)] + [MOST + 1] * bool("%*" in text)


def _count(context: Context, size: int) -> None:
    """Count the characters and elements of this rendering. A list that grows in a loop is counted each time."""
    context.put_together = getattr(context, "put_together", 0) + max(0, size)
    _check_numbers((context.put_together,))


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and value > MOST for value in values):
        raise SecurityError(f"it puts together more than {MOST} characters")


chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment
