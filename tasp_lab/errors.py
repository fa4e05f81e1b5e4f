"""The exception hierarchy of tasp-lab.

The command line prints the message of a `TaspLabError` as one line and exits with status 2; any other exception
is a bug. Every message states what is wrong, where, and what was expected.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def first_line(error: BaseException) -> str:
    """The first line of an error message; the name of its type if the message is empty.

    >>> first_line(ValueError("too long\\nby far")), first_line(ValueError())
    ('too long', 'ValueError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is none of those known, with the nearest of them if one is near.

    >>> unknown("schedule", "rng", ["ring", "direct"])
    "unknown schedule 'rng', did you mean 'ring'? expected one of ring, direct"
    """
    names = list(known)
    given = name.casefold()
    near = [each for each in names if len(given) > 3 and each.startswith(given)]  # a name that was not written out
    near = near or difflib.get_close_matches(given, names, n=1)
    hint = f" did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r},{hint} expected one of {', '.join(names)}"


class TaspLabError(Exception):
    """Base class of all tasp-lab errors."""


class QuantityError(TaspLabError):
    """A size, bandwidth, time or scale that cannot be parsed or is out of range."""


class TopologyError(TaspLabError):
    """An invalid topology, or a name, file or expression that does not describe one."""


class NoRouteError(TopologyError):
    """Two ranks have no route to each other through switches only."""


class NoDecompositionError(TaspLabError):
    """The requested rings do not exist, or the given rings are not a decomposition."""


class ProfileError(TaspLabError):
    """A machine profile that cannot be read, or that lacks a required entry."""


class OverrideError(TaspLabError):
    """An override of a name that is unknown, or by a value that is malformed or impossible."""


class ScheduleError(TaspLabError):
    """An invalid schedule. The message names step, rank and block."""


class NoLinkError(ScheduleError):
    """A transfer for which the topology has no link: `where` it is, its two ranks, and the topology's name."""

    def __init__(self, where: str, source: int, destination: int, topology: str) -> None:
        super().__init__(where, source, destination, topology)
        self.where, self.source, self.destination, self.topology = where, source, destination, topology

    def __str__(self) -> str:
        ranks = f"rank {self.source} sends to rank {self.destination}"
        return f"{self.where}: {ranks}, but {self.topology} has no such link"


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
