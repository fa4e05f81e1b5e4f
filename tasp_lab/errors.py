"""The errors a user can meet, one small hierarchy.

The command line prints the message of a `TaspLabError` as one line and exits with status 2; any other exception
is a bug. Every message names what is wrong, where, and what was expected.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line; its kind where it says nothing.

    >>> first_line(ValueError("too long\\nby far")), first_line(ValueError())
    ('too long', 'ValueError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


class TaspLabError(Exception):
    """Root of every error that tasp-lab raises on purpose."""


class QuantityError(TaspLabError):
    """A size, bandwidth, time or scale that cannot be read or makes no sense."""


class TopologyError(TaspLabError):
    """A topology that cannot exist, or a name, file or expression that describes none."""


class NoRouteError(TopologyError):
    """Two ranks have no way to each other that passes through switches only."""


class NoDecompositionError(TaspLabError):
    """The rings asked for do not exist, or rings that were given are not a decomposition."""


class ProfileError(TaspLabError):
    """A profile of a machine that cannot be read, or that lacks what is asked of it."""


class ScheduleError(TaspLabError):
    """A schedule that breaks a rule. The message names step, rank and block."""


class WorkloadError(TaspLabError):
    """An attention layer that cannot be computed. The message names the number and what was expected."""


class RunError(TaspLabError):
    """A run on real processes that did not end well. The message names the rank."""


class FabricError(TaspLabError):
    """This machine cannot build the emulated fabric. The message says what is missing."""


class TableError(TaspLabError):
    """A measurement that cannot be read. The message names file and line, what was found and what was expected."""


class FitError(TaspLabError):
    """A model that cannot be fitted to measurements. The message names what is missing."""


class OutputError(TaspLabError):
    """A file could not be written. Nothing of it is left behind."""
