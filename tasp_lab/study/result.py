"""The result of a run of a study: its rows, and how many have which status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table
from tasp_lab.study.frames import counts_text
from tasp_lab.study.rows import PREDICTED, STATUSES, Row

MAX_ROWS = 40
"""Rows of the table; all are in the files."""


@dataclass(frozen=True, repr=False)
class StudyResult(Report):
    """The rows of a study, in the order of its points; `folder` is where they are kept, None if nowhere."""

    study: str
    rows: tuple[Row, ...]
    folder: Path | None

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows by status."""
        found = Counter(str(row["status"]) for row in self.rows)
        return {status: found[status] for status in STATUSES}

    def to_dict(self) -> dict[str, object]:
        """What ``--json`` prints: the study, its folder and its counts; rows are in the folder's files."""
        folder = None if self.folder is None else str(self.folder)
        return {"study": self.study, "folder": folder, "points": len(self.rows), "rows": self.counts}

    def records(self) -> Sequence[Mapping[str, object]]:
        return self.rows

    def parts(self) -> list[Part]:
        where = "" if self.folder is None else f", in {self.folder}"
        found: list[Part] = [f"study {self.study}: {counts_text(self.counts, 'points')}{where}"]
        for status in STATUSES:
            reasons = Counter(str(row["error"]) for row in self.rows if row["status"] == status not in PREDICTED)
            if reasons:
                rows = [(f"{count}", reason) for reason, count in reasons.most_common(MAX_ROWS)]
                found.append(Table(status, ("points", "reason"), rows, (1,)))
        return found

    def fastest(self, *group: str) -> list[Row]:
        """The fastest row for each value of some columns, in their order.

        Rows without a time are left out.
        """
        best: dict[tuple[object, ...], Row] = {}
        for row in self.rows:
            key = tuple(row[name] for name in group)
            if row["time_s"] is not None and (key not in best or _time_s(row) < _time_s(best[key])):
                best[key] = row
        return list(best.values())


def _time_s(row: Row) -> float:
    return float(row["time_s"] or 0)
