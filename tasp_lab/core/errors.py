"""The exception hierarchy of tasp-lab.

The command line prints the message of a `TaspLabError` as one line and exits with status 2; any other exception
is a bug. Every message states what is wrong, where, and what was expected.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType


def first_line(error: BaseException) -> str:
    """The first line of an error message; the name of its type if the message is empty.

    >>> first_line(ValueError("too long\\nby far")), first_line(ValueError())
    ('too long', 'ValueError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


def nearest(name: object, known: Iterable[str], most: int = 1, at_least: float = 0.6) -> list[str]:
    """The names that are nearest to a name, the nearest first; none if none is near. Case and separators are ignored.

    A name is near from a similarity of `at_least` on, see `difflib.SequenceMatcher.ratio`.

    >>> nearest("zig-zag", ["zigzag-ring-attention", "ring-attention"]), nearest("H100_8", ["h100-4x8", "h100-8"], 2)
    (['zigzag-ring-attention'], ['h100-8', 'h100-4x8'])
    """
    text, names = str(name), list(known)
    letters = _letters(text)
    matches = [each for each in names if len(letters) > 3 and _letters(each).startswith(letters)]  # not written out
    for form in (str.casefold, _letters):
        forms = {form(each): each for each in reversed(names)}
        matches += [forms[each] for each in difflib.get_close_matches(form(text), forms, most, at_least)]
    return list(dict.fromkeys(matches))[:most]


def _letters(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.casefold())


def unknown(what: str, name: object, known: Iterable[str], listed_by: str = "") -> str:
    """The message for a name that is none of those known, with the nearest of them if one is near.

    All known names follow; or where there are more than `MANY_NAMES`, what lists them, if that is given.

    >>> unknown("schedule", "rng", ["ring", "direct"])
    "unknown schedule 'rng', did you mean 'ring'? expected one of ring, direct"
    """
    return f"unknown {what} {name!r}, {expected_one_of(name, known, listed_by)}"


def expected_one_of(name: object, known: Iterable[str], listed_by: str = "") -> str:
    """The end of the message for a name that is none of those known, see `unknown`.

    >>> expected_one_of("aa", (letter * 3 for letter in "abcdefghijklmnop"), "tasp-lab names")
    "did you mean 'aaa'? tasp-lab names lists all"
    """
    names = list(known)
    is_long = bool(listed_by) and len(names) > MANY_NAMES
    near = nearest(name, names, 5 if is_long else 1)
    hint = f"did you mean {alternatives(near)}? " if near else ""
    return hint + (f"{listed_by} lists all" if is_long else f"expected one of {', '.join(names)}")


def alternatives(names: Sequence[str]) -> str:
    """One or more names as alternatives.

    >>> alternatives(["a", "b", "c"])
    "'a', 'b' or 'c'"
    """
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last


MANY_NAMES = 12
"""More names than these are not all listed in a message, if a command lists them."""


def of_type(what: str, value: object, expected: str) -> str:
    """The message for a value of another type than expected.

    >>> of_type("fold", "1", "a whole number")
    "fold: '1' of type str, expected a whole number"
    """
    text = " ".join(repr(value).split())
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{what}: {shown} of type {type(value).__name__}, expected {expected}"


class TaspLabError(Exception):
    """Base class of all tasp-lab errors. With ``--json`` an error is printed beside its `document`."""

    document: Mapping[str, object] = MappingProxyType({})


class QuantityError(TaspLabError):
    """A size, bandwidth, time or scale that cannot be parsed or is out of range."""


class TopologyError(TaspLabError):
    """An invalid topology, or a name, file or expression that does not describe one."""


class NoRouteError(TopologyError):
    """Two ranks have no route to each other: no link, no switches, and not as many ranks in between as may forward."""


class NoDecompositionError(TaspLabError):
    """The requested rings do not exist, or the given rings are not a decomposition."""


class NoRingError(NoDecompositionError):
    """No ring over linked ranks exists if this is `proved`, else none was found within the budget."""

    def __init__(self, text: str, *, proved: bool = True) -> None:
        super().__init__(text)
        self.proved = proved


class ProfileError(TaspLabError):
    """A machine profile that cannot be read, or that lacks a required entry."""


class OverrideError(TaspLabError):
    """An override of a name that is unknown, or by a value that is malformed or impossible."""


class ScheduleError(TaspLabError):
    """An invalid schedule. The message names step, rank and block."""

    line: int | None = None
    """The line of a user's file that wrote what is wrong, where it is known."""


class TooManyBlocksError(ScheduleError):
    """A schedule whose ranks and blocks are too many to prove. The message names both numbers."""


class NoLinkError(ScheduleError):
    """A transfer without a route: `where` it is, its two ranks, the topology's name, and why no other rank forwards."""

    def __init__(self, where: str, source: int, destination: int, topology: str, why: str) -> None:
        super().__init__(where, source, destination, topology, why)
        self.where, self.source, self.destination, self.topology, self.why = where, source, destination, topology, why

    def __str__(self) -> str:
        ranks = f"rank {self.source} sends to rank {self.destination}"
        return f"{self.where}: {ranks}, but {self.topology} has no such link, and {self.why}"


class WorkloadError(TaspLabError):
    """An invalid attention layer. The message names the value and what was expected."""


class ModelError(TaspLabError):
    """An unknown model, or a file that does not describe one. The message names the file and what was expected."""


class RunError(TaspLabError):
    """A failed run on real processes. The message names the rank."""


class FabricError(TaspLabError):
    """This machine cannot build the emulated fabric. The message names what is missing."""


class TableError(TaspLabError):
    """A measurement that cannot be read. The message names file and line, what was found and what was expected."""


class FitError(TaspLabError):
    """A model that cannot be fitted to measurements. The message names what is missing."""


class RejectedFitError(FitError):
    """A fit that predicts no better than the constants before it, so it was not written; `document` is its report."""

    def __init__(self, message: str, document: dict[str, object]) -> None:
        super().__init__(message)
        self.document = document


class OutputError(TaspLabError):
    """A file could not be written. No partial file remains."""


class StudyError(TaspLabError):
    """A study or its folder that cannot be read, or a question that its rows do not answer."""


class MissingPackageError(TaspLabError):
    """An optional package is not installed. The message names it and how to install it."""
