"""Calls that real ranks refuse, one after the other, in a group that can still be used afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tasp_lab.core.errors import TaspLabError
from tests.support.ranks import on_ranks, succeeded


def check_refusals(refusal: Callable[[str], None], expected: Mapping[str, tuple[str, str]]) -> None:
    """Make each of two ranks call `refusal`, a function of a module, with each key; then with ``nothing``, which works.

    A value is what the lines that rank 0 and rank 1 are told contain.
    """
    for rank, answer in enumerate(succeeded(on_ranks(_refusals, 2, refusal, list(expected)))):
        for (change, told), error in zip(expected.items(), answer, strict=True):
            assert isinstance(error, TaspLabError), (change, error)
            assert told[rank] in str(error), (change, error)
            assert "\n" not in str(error), change


def _refusals(refusal: Callable[[str], None], changes: Sequence[str]) -> list[Exception]:
    """On a rank: what it raises at one thing after the other that cannot work; at last something that does."""
    found = []
    for change in changes:
        try:
            refusal(change)
        except Exception as error:
            found.append(error)
    refusal("nothing")
    return found
