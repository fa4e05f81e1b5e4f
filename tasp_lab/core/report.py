"""The interface that all results share: a dictionary, a data frame, text and HTML."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tasp_lab.core.errors import MissingPackageError
from tasp_lab.core.tables import Part, Table, brief, to_html, to_text

if TYPE_CHECKING:
    import pandas as pd


class Report(ABC):
    """A result. `str` gives the tables of the command line, `repr` one line; a notebook shows the tables as HTML."""

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """The object that ``--json`` prints."""

    @abstractmethod
    def records(self) -> Sequence[Mapping[str, object]]:
        """The rows of `to_pandas`, by column."""

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """The tables and lines of the command line."""

    def to_pandas(self) -> pd.DataFrame:
        """The result as a data frame. Raises `MissingPackageError` where pandas is not installed."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingPackageError("to_pandas needs pandas, which is not installed: pip install pandas") from error
        return pd.DataFrame(self.records())

    def __str__(self) -> str:
        return to_text(self.parts())

    def __repr__(self) -> str:
        first = next(iter(self.parts()), "empty")
        return brief(self, first.title if isinstance(first, Table) else first)

    def _repr_html_(self) -> str:
        return to_html(self.parts())


@dataclass(frozen=True, repr=False)
class View(Report):
    """A result that is ready: the object of ``--json``, its rows, and the tables and lines of the command line."""

    document: Mapping[str, object]
    rows: Sequence[Mapping[str, Any]]
    shown: Sequence[Part]

    def to_dict(self) -> dict[str, object]:
        return dict(self.document)

    def records(self) -> Sequence[Mapping[str, Any]]:
        return self.rows

    def parts(self) -> Sequence[Part]:
        return self.shown


Result = TypeVar("Result", bound=Report)


class Reports(Report, tuple[Result, ...]):
    """Several results, one below the other."""

    def to_dict(self) -> dict[str, object]:
        return {"parts": [each.to_dict() for each in self]}

    def records(self) -> list[Mapping[str, object]]:
        return [row for each in self for row in each.records()]

    def parts(self) -> list[Part]:
        return [part for each in self for part in each.parts()]


def flat(row: Mapping[str, object]) -> dict[str, object]:
    """The fields of a row that are single values.

    >>> flat({"time_s": 1.0, "transfers": []})
    {'time_s': 1.0}
    """
    return {name: value for name, value in row.items() if not isinstance(value, (list, tuple, dict))}
