"""Filters of points: expressions over the names of a study.

An expression compares and calculates with names, numbers (``64Ki`` is 65536) and texts: ``seq / ranks < 1Ki``,
``machine == "h100-8" and heads % ranks``. The section ``[where]`` may define further names, in any order::

    [where]
    per_rank = "seq / ranks"
    skip = "per_rank < 1Ki"
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from tasp_lab.core.errors import StudyError, unknown
from tasp_lab.core.units import parse_count

_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip

_PREFIXED = re.compile(r"(?<![\w.\"'])([0-9]+(?:\.[0-9]+)?[KMGT]i)\b")
MAX_LENGTH = 2_000


@dataclass(frozen=True)
class Expression:
    """A parsed expression; `names` are those that it uses."""

    text: str
    tree: ast.expr = field(repr=False, compare=False)
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Parse an expression. Raises `StudyError`.

        >>> Expression.parse("seq / ranks < 1Ki").value({"seq": 8192, "ranks": 16})
        True
        """
        if not isinstance(text, str) or not text.strip() or len(text) > MAX_LENGTH:
            raise StudyError(f"filter {str(text)[:40]!r}: expected an expression such as seq / ranks < 1Ki")
        numbers = _PREFIXED.sub(lambda found: str(parse_count(found[1])), text)
        try:
            tree = ast.parse(numbers.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            hint = "expected == to compare" if re.search(r"(?<![=!<>])=(?!=)", text) else getattr(error, "msg", None)
            raise StudyError(f"filter {text!r}: {hint or 'cannot be read'}") from error
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED):
                raise StudyError(f"filter {text!r}: expected names, numbers, texts, comparisons, and, or, not, + - * /")
        return cls(text, tree, frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))

    def value(self, names: Mapping[str, object]) -> Any:
        """The value with these names. Raises `StudyError` for values that do not fit together."""
        try:
            return _value(self.tree, names)
        except (TypeError, ZeroDivisionError, OverflowError, ValueError) as error:
            raise StudyError(f"filter {self.text!r}: {error}") from error


_ALLOWED = (
    ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Compare, ast.Name, ast.Load,
    ast.Constant, ast.List, ast.Tuple, *_OPERATORS,
)  # fmt: skip


def _value(node: ast.expr, names: Mapping[str, object]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names[node.id]
        case ast.List() | ast.Tuple():
            return [_value(each, names) for each in node.elts]
        case ast.UnaryOp():
            of = _value(node.operand, names)
            return not of if isinstance(node.op, ast.Not) else -of
        case ast.BinOp():
            return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
        case ast.BoolOp():
            holds = (_value(each, names) for each in node.values)
            return all(holds) if isinstance(node.op, ast.And) else any(holds)
        case ast.Compare():
            return _compared(node, names)
    raise AssertionError("there are no other nodes")


def _compared(node: ast.Compare, names: Mapping[str, object]) -> bool:
    left = _value(node.left, names)
    for kind, right_node in zip(node.ops, node.comparators, strict=True):
        right = _value(right_node, names)
        if not _OPERATORS[type(kind)](left, right):
            return False
        left = right
    return True


@dataclass(frozen=True)
class Where:
    """The section ``[where]``: definitions, in an order in which they can be evaluated, and filters."""

    definitions: tuple[tuple[str, Expression], ...] = ()
    skip: tuple[Expression, ...] = ()
    keep: tuple[Expression, ...] = ()

    @classmethod
    def parse(cls, section: Mapping[str, object]) -> Where:
        """Parse the section. Raises `StudyError`, also for definitions that depend on each other in a circle."""
        defined = {name: Expression.parse(str(text)) for name, text in section.items() if name not in ("skip", "keep")}
        ordered = _in_order(defined)
        return cls(tuple((name, defined[name]) for name in ordered), *(
            tuple(Expression.parse(text) for text in _texts(name, section.get(name, ()))) for name in ("skip", "keep")
        ))  # fmt: skip

    @property
    def names(self) -> frozenset[str]:
        """The names that it uses and does not define."""
        used = (each.names for each in (*(expression for _, expression in self.definitions), *self.skip, *self.keep))
        return frozenset().union(*used) - {name for name, _ in self.definitions}

    def check(self, known: Iterable[str]) -> None:
        """Raise `StudyError` for a name that is none of those known."""
        known = sorted(known)
        for name in sorted(self.names):
            if name not in known:
                raise StudyError(f"where: {unknown('name', name, known)}")
        for name, _ in self.definitions:
            if name in known:
                raise StudyError(f"where: {name!r} is defined, but the study has that name already")

    def keeps(self, names: Mapping[str, object]) -> bool:
        """Whether a point with these names is kept.

        >>> Where.parse({"skip": "seq / ranks < 1Ki"}).keeps({"seq": 8192, "ranks": 16})
        False
        """
        known = dict(names)
        for name, expression in self.definitions:
            known[name] = expression.value(known)
        return all(each.value(known) for each in self.keep) and not any(each.value(known) for each in self.skip)


NO_FILTER = Where()


def _texts(name: str, given: object) -> Sequence[str]:
    texts = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(each, str) for each in texts):
        raise StudyError(f"where: {name} is {given!r}, expected a filter or a list of them")
    return list(texts)


def _in_order(defined: Mapping[str, Expression]) -> list[str]:
    uses = {name: sorted(expression.names & defined.keys()) for name, expression in defined.items()}
    try:
        return list(TopologicalSorter(uses).static_order())
    except CycleError as error:
        raise StudyError(f"where: circular definition {' -> '.join(reversed(error.args[1]))}") from error
