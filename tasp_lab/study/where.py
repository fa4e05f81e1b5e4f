"""Filters of points: expressions over the names of a study.

An expression compares and calculates with names, numbers (``64Ki`` is 65536) and texts: ``seq / ranks < 1Ki``,
``machine == "h100-8" and heads % ranks``. The section ``[where]`` of a study has some of them::

    [where]
    skip = ["seq / ranks < 1Ki", "nodes == 1 and variant == 'nic-x2'"]
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from tasp_lab.core.errors import StudyError, unknown
from tasp_lab.core.units import parse_count

# No calls, attributes, subscripts or powers: what is left of Python can be run, for it reaches nothing and stays small.
_ALLOWED = (
    ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div,
    ast.FloorDiv, ast.Mod, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn,
    ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple,
)  # fmt: skip

_PREFIXED = re.compile(r"(?<![\w.\"'])([0-9]+(?:\.[0-9]+)?[KMGT]i)\b")
MAX_LENGTH = 2_000


@dataclass(frozen=True)
class Expression:
    """A parsed expression; `names` are those that it uses."""

    text: str
    tree: ast.expr = field(repr=False, compare=False)
    code: CodeType = field(repr=False, compare=False)
    names: frozenset[str]

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
            tree = ast.parse(numbers.strip(), mode="eval")
            if not all(isinstance(node, _ALLOWED) for node in ast.walk(tree.body)):
                expected = "expected names, numbers, texts, comparisons, and, or, not, + - * /"
                raise StudyError(f"filter {text!r}: {expected}")
            code = compile(tree, "filter", "eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            hint = "expected == to compare" if re.search(r"(?<![=!<>])=(?!=)", text) else getattr(error, "msg", None)
            raise StudyError(f"filter {text!r}: {hint or 'cannot be read'}") from error
        return cls(text, tree.body, code, frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))

    def value(self, names: Mapping[str, object]) -> Any:
        """The value with these names. Raises `StudyError` for values that do not fit together."""
        try:
            return eval(self.code, {"__builtins__": {}}, names)
        except (TypeError, ZeroDivisionError, OverflowError, ValueError) as error:
            raise StudyError(f"filter {self.text!r}: {error}") from error


class Where(NamedTuple):
    """The section ``[where]``: filters of the points that are skipped, and of those that are kept."""

    skip: tuple[Expression, ...] = ()
    keep: tuple[Expression, ...] = ()

    @classmethod
    def parse(cls, section: Mapping[str, object]) -> Where:
        """Parse the section. Raises `StudyError`."""
        filters: dict[str, tuple[Expression, ...]] = {}
        for name, given in section.items():
            if name not in cls._fields:
                raise StudyError(f"[where]: {unknown('name', name, cls._fields)}")
            texts = given if isinstance(given, list | tuple) else [given]
            if not all(isinstance(text, str) for text in texts):
                raise StudyError(f"where: {name} is {given!r}, expected a filter or a list of them")
            filters[name] = tuple(map(Expression.parse, texts))
        return cls(**filters)

    def check(self, known: Iterable[str]) -> None:
        """Raise `StudyError` for a name that is not known."""
        known = sorted(known)
        for name in sorted({name for each in (*self.skip, *self.keep) for name in each.names}):
            if name not in known:
                raise StudyError(f"where: {unknown('name', name, known)}")

    def keeps(self, names: Mapping[str, object]) -> bool:
        """Whether a point with these names is kept.

        >>> Where.parse({"skip": "seq / ranks < 1Ki"}).keeps({"seq": 8192, "ranks": 16})
        False
        """
        return all(each.value(names) for each in self.keep) and not any(each.value(names) for each in self.skip)


NO_FILTER = Where()
