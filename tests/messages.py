"""What the programs can end with, read from their source: each text of an exception, and what goes to stderr.

Nothing is imported or run. A message is the text as it stands in the source, with `…` for each part that only a run
knows. Followed are local names, alternatives, and parameters up to the calls that give them a text; what a called
function returns, or an attribute is set to, is a message of its own.

Left out: exceptions of other libraries; a class with a private name (`_Lost`), which never leaves its module; and
NotImplementedError, which says that one way cannot be taken where there is another.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

GAP = "…"
_NEXT = "\0"  # between the texts of several arguments while they are one

Site = tuple[ast.expr, "Scope"]


@dataclass(frozen=True)
class Message:
    text: str
    place: str
    """file:line"""


@dataclass(eq=False)
class Scope:
    """A function, or a file's top level."""

    path: str
    outer: Scope | None = None
    in_class: str = ""
    name: str = ""
    arguments: ast.arguments | None = None
    values: dict[str, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))
    """what is assigned to each local name"""
    returns: list[ast.expr] = field(default_factory=list)

    @cached_property
    def parameters(self) -> list[str]:
        names = [one.arg for one in self.arguments.posonlyargs + self.arguments.args] if self.arguments else []
        return names[1:] if self.in_class and names[:1] in (["self"], ["cls"]) else names

    @property
    def defaults(self) -> dict[str, ast.expr]:
        given = self.arguments.defaults
        return dict(zip(self.parameters[len(self.parameters) - len(given) :], given, strict=True))


class Program:
    def __init__(self, folder: Path, files: list[Path]):
        self._calls: dict[str, list[tuple[ast.Call, Scope]]] = defaultdict(list)
        self._functions: dict[str, list[Scope]] = defaultdict(list)
        self._attributes: dict[str, list[Site]] = defaultdict(list)
        self._bases: dict[str, list[str]] = {}
        for path in files:
            self._enter(ast.parse(path.read_text(encoding="utf-8")), Scope(str(path.relative_to(folder))))
        known = {
            name for name, one in vars(builtins).items() if isinstance(one, type) and issubclass(one, BaseException)
        }
        while new := {name for name, bases in self._bases.items() if known & {*bases}} - known:
            known |= new
        self._exceptions = {one for one in known if not one.startswith("_")} - {"NotImplementedError"}

    def messages(self) -> list[Message]:
        """Each text once, at the first place that has it."""
        found: dict[str, Message] = {}
        todo, seen = [*self._sites()], set()
        while todo:
            node, scope, *within = todo.pop()
            for text, place in self._said(node, scope, *within):
                text = tidy(text)
                if len(re.findall(r"[a-zA-Z_]{2,}", text)) > 1 and " " in text:
                    found.setdefault(text, Message(text, place))
            for name in self._leaves(node, scope, (ast.Call, ast.Attribute)) - seen:
                seen.add(name)
                todo += [(value, one) for one in self._functions[name] for value in one.returns]
                todo += self._attributes[name]
        return sorted(found.values(), key=lambda one: (one.place.split(":")[0], int(one.place.split(":")[1])))

    def _enter(self, node: ast.AST, scope: Scope, in_class: str = "") -> None:
        for child in ast.iter_child_nodes(node):
            inner, inside = scope, in_class
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner, inside = Scope(scope.path, scope, in_class, child.name, child.args), ""
                self._functions[child.name].append(inner)
            elif isinstance(child, ast.ClassDef):
                inside, self._bases[child.name] = child.name, [_name(base) for base in child.bases]
            elif isinstance(child, ast.Call):
                if _name(getattr(child.func, "value", None)) != "log":  # a line of the log ends nothing
                    self._calls[_name(child.func)].append((child, scope))
            elif isinstance(child, ast.Return) and child.value is not None:
                scope.returns.append(child.value)
            for target, value in _assigned(child):
                if isinstance(target, ast.Name):
                    scope.values[target.id].append(value)
                elif isinstance(target, ast.Attribute):
                    self._attributes[target.attr].append((value, scope))
            self._enter(child, inner, inside)

    def _sites(self) -> Iterator[tuple]:
        """Each expression that is a message as a whole: arguments of `_said`."""
        for name, calls in self._calls.items():
            for call, scope in calls:
                raised = name in self._exceptions and self._maker(name) is None
                raised = raised or (name == "__init__" and scope.in_class in self._exceptions)
                if raised or name == "say_once":
                    yield from ((one, scope) for one in call.args[:1])
                elif name == "print" and any(
                    one.arg == "file" and _name(one.value) == "stderr" for one in call.keywords
                ):
                    yield from ((one, scope, (scope,)) for one in call.args)  # around what a caller says

    def _maker(self, exception: str) -> Scope | None:
        """The __init__ of an exception class of ours, its own or that of a base."""
        for one in self._functions["__init__"]:
            if one.in_class == exception:
                return one
        return next(filter(None, map(self._maker, self._bases.get(exception, []))), None)

    def _callers(self, scope: Scope) -> list[tuple[ast.Call, Scope]]:
        if scope.name == "__init__":
            names = [one for one in self._exceptions if self._maker(one) is scope]
            return [call for name in names for call in self._calls[name]]
        private = scope.name.startswith("_") or (scope.outer is not None and scope.outer.name)
        method = ast.Attribute if scope.in_class else ast.Name
        return [
            (call, caller)
            for call, caller in self._calls[scope.name]
            if isinstance(call.func, method) and (caller.path == scope.path or not private)
        ]

    def _said(self, node: ast.expr, scope: Scope, within: tuple[Scope, ...] = ()) -> list[tuple[str, str]]:
        """(text, place) of each message that the expression is, whoever calls the function."""
        found = [(text, f"{scope.path}:{node.lineno}") for text in self._texts(node, scope, {})]
        needed = sorted(self._leaves(node, scope, ast.Name) & {*scope.parameters})
        given = []
        for call, caller in self._callers(scope) if needed and scope not in within else []:
            arguments = scope.defaults | dict(zip(scope.parameters, call.args, strict=False))
            arguments |= {one.arg: one.value for one in call.keywords if one.arg}
            # All arguments as one text: those of a call belong together.
            parts = [part for name in needed for part in (arguments.get(name, ast.Constant(GAP)), ast.Constant(_NEXT))]
            together = ast.JoinedStr([ast.FormattedValue(part, -1) for part in parts], lineno=call.lineno)
            for text, place in self._said(together, caller, (*within, scope)):
                if re.search("[a-z]", text):
                    bound = dict(zip(needed, text.split(_NEXT), strict=False))
                    given += [(one, place) for one in self._texts(node, scope, bound)]
        return given or found

    def _texts(self, node: ast.expr, scope: Scope, bound: dict[str, str], under: tuple[str, ...] = ()) -> list[str]:
        """What the expression can be as a text. `bound` has parameters' texts, `under` the names that are looked up."""

        def of(one: ast.expr) -> list[str]:
            return self._texts(one, scope, bound, under)

        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return ["".join(some) for some in product(*map(of, parts))]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return ["".join(some) for some in product(of(left), of(right))]
            case ast.Name(id=name) if name in bound:
                return [bound[name]]
        inner = [
            text
            for one, where in self._inside(node, scope, under)
            for text in self._texts(one, where, bound, (*under, _name(node)))
        ]
        return [*dict.fromkeys(inner)] or [GAP]

    def _inside(self, node: ast.expr, scope: Scope, under: tuple[str, ...]) -> list[Site]:
        """The expressions of which the text of this one is one."""
        match node:
            case ast.FormattedValue(value=value, conversion=-1 | 115, format_spec=None):
                return [(value, scope)]
            case ast.IfExp(body=body, orelse=other):
                return [(body, scope), (other, scope)]
            case ast.Call(func=ast.Name(id="str"), args=[value]) | ast.Subscript(value=value, slice=ast.Slice()):
                return [(value, scope)]
            case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[ast.GeneratorExp(elt=value)]):
                return [(value, scope)]
            case ast.Name(id=name) if name not in under:
                where: Scope | None = scope
                while where is not None and name not in where.parameters:
                    if name in where.values:
                        return [(value, where) for value in where.values[name]]
                    where = where.outer
        return []

    def _leaves(self, node: ast.expr, scope: Scope, kind: type | tuple, under: tuple[str, ...] = ()) -> set[str]:
        """Names of this kind that stand in the expression as a text which is not known."""
        inner = [(one, scope) for one in getattr(node, "values", ())] if isinstance(node, ast.JoinedStr) else []
        inner += [(node.left, scope), (node.right, scope)] if isinstance(node, ast.BinOp) else []
        inner += self._inside(node, scope, under)
        own = {_name(getattr(node, "func", node))} if isinstance(node, kind) else set()
        return own.union(*(self._leaves(one, where, kind, (*under, _name(node))) for one, where in inner))


def tidy(text: str) -> str:
    """In one line, and a bare `…` for each part that varies, whatever quotes it is in."""
    text = re.sub(rf"(['\"]?)(?:{GAP}|\.\.\.)+\1", GAP, " ".join(text.split()))
    return re.sub(f"{GAP}[{GAP} ]*{GAP}", GAP, text)


def _name(node: ast.AST | None) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of each assignment that the node is."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.For | ast.comprehension):
        pairs = [(node.target, _of_several(value)) for value in getattr(node.iter, "elts", [])]
    else:
        pairs = []
    for target, value in pairs:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, map(_of_several, value.elts), strict=False)
        else:
            yield target, value


def _of_several(value: ast.expr) -> ast.expr:
    """A single word that is one of several is a name, and varies; it may also belong to one of the others alone."""
    is_name = isinstance(value, ast.Constant) and " " not in str(value.value)
    return ast.copy_location(ast.Constant(GAP), value) if is_name else value
