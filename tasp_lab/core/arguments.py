"""Arguments are said once, beside their type: checks, the command line, studies and documents read the annotation.

>>> @dataclass(frozen=True)
... class Wheel:
...     spokes: Annotated[int | None, Option("Spokes of the wheel.", least=3)] = None
...
>>> arguments_of(Wheel)["spokes"].option.help
'Spokes of the wheel.'
>>> check_arguments(vars(Wheel(8.5)), arguments_of(Wheel))
Traceback (most recent call last):
tasp_lab.core.errors.QuantityError: spokes: 8.5 of type float, expected a whole number or None

Nothing is converted before it is checked: a window of 8.7 is an error, not 8. Whole numbers are of any type that Python
counts among them, such as NumPy's, but True and False are none. This module imports nothing heavy, since the command
line needs options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass as dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tasp_lab.core.errors import QuantityError, TaspLabError, of_type


class Option(NamedTuple):
    """What is said of an argument beside its type.

    Parameters
    ----------
    help : its text on the command line; empty if it is no option there.
    flag : its name there, without hyphens; by default that of the argument.
    is_count : whether a text such as ``128Ki`` may stand for a number.
    least : the least value of a number.
    tried : values that tuning tries (`tasp_lab.prediction.evaluate.tuned`); none of what changes the numbers that a
        layer computes.
    open : values of which every prediction takes the fastest where the option is left at its default; where no machine
        is known, the schedule itself chooses by bytes.
    expected : the type in messages; by default it follows from the annotation.
    error : what another type raises; by default that of the whole class or function.
    """

    help: str = ""
    flag: str = ""
    is_count: bool = False
    least: int | None = None
    tried: tuple[object, ...] = ()
    open: tuple[object, ...] = ()
    expected: str = ""
    error: type[TaspLabError] | None = None


class Argument(NamedTuple):
    """An argument as its annotation describes it: `choices` are its values if they have names, `items` what a list has.

    Without `expected` any value is accepted.
    """

    types: tuple[type, ...]
    expected: str
    error: type[TaspLabError] = QuantityError
    items: type | None = None
    choices: tuple[str, ...] = ()
    option: Option = Option()

    def check(self, name: str, value: object) -> None:
        """Raise `error` for a value of another type."""
        if not self.expected:
            return
        is_flag = isinstance(value, bool) and bool not in self.types
        is_one_text = isinstance(value, str) and self.items is not None and str not in self.types
        if is_flag or is_one_text or not isinstance(value, self.types):
            raise self.error(of_type(name.replace("_", " "), value, self.expected))
        if self.items is not None and isinstance(value, Sequence | Set):
            for item in value:
                if not isinstance(item, self.items):
                    raise self.error(of_type(name.replace("_", " "), item, self.expected))


@cache
def arguments_of(owner: Callable[..., object], error: type[TaspLabError] = QuantityError) -> Mapping[str, Argument]:
    """The arguments of a function, or the fields of a dataclass, by name; another type raises `error` by default."""
    hints = get_type_hints(owner, include_extras=True)
    return {name: _argument(hint, error) for name, hint in hints.items() if name != "return"}


def check_arguments(given: Mapping[str, object], known: Mapping[str, Argument]) -> None:
    """Raise the error of the first argument that is of a wrong type; those that are not `known` may be anything."""
    for name, value in given.items():
        if name in known:
            known[name].check(name, value)


def is_whole(value: object) -> bool:
    """Whether a value is a whole number.

    >>> is_whole(8), is_whole(True), is_whole(8.0)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
_CHECKED: Mapping[Any, tuple[Any, ...]] = {int: (Integral,), float: (Real,), tuple: (Sequence, Set), None: (NoneType,)}
"""The types that an annotation stands for, where it is not that type alone."""


def _argument(hint: object, error: type[TaspLabError]) -> Argument:
    option, kinds = Option(), [hint]
    parts: list[Any] = []
    while kinds:  # the members of unions, in any depth
        kind = kinds.pop(0)
        if get_origin(kind) is Annotated:
            own, *beside = get_args(kind)
            option = next((each for each in beside if isinstance(each, Option)), option)
            kinds.insert(0, own)
        elif get_origin(kind) in (Union, UnionType):
            kinds = [*get_args(kind), *kinds]
        else:
            parts.append(None if kind is NoneType else kind)
    choices = next((get_args(part) for part in parts if get_origin(part) is Literal), ())
    plain = [str if get_origin(part) is Literal else part for part in parts]
    classes = [get_origin(part) or part for part in plain]
    items = next((get_args(part)[0] for part in plain if get_origin(part) in (tuple, Sequence)), None)
    types = tuple(each for kind in classes for each in _CHECKED.get(kind, (kind,)) if isinstance(each, type))
    expected, listed = option.expected or _words(classes, items), items if isinstance(items, type) else None
    return Argument(types, expected, option.error or error, listed, choices, option)


def _words(classes: Sequence[Any], items: object) -> str:
    """The types of a simple annotation in words; empty for another one."""
    kinds = [each for each in classes if each is not None]
    if len(kinds) != 1:
        return ""
    lists = {tuple: "a list of texts", Sequence: "a list of texts"} if items is str else {}
    words = (_WORDS | lists | {Callable: "a function"}).get(kinds[0], "")
    if words and None in classes:
        return "True, False or None" if kinds == [bool] else f"{words} or None"
    return words
