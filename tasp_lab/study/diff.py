"""What differs between two studies: rows, inputs, constants, versions, times, winners.

Rows of both studies are the same point if they agree in every column that varies in either of them. A column that has
one value in each study, but not the same one, is a difference of all rows and listed once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part, Table
from tasp_lab.study.captions import held_constant, listed
from tasp_lab.study.columns import NO_VALUE, plain, records_of, text_of, title_of
from tasp_lab.study.folder import StudyFolder, all_varying, questions
from tasp_lab.study.show import selected
from tasp_lab.study.winners import winners

if TYPE_CHECKING:
    import pandas as pd

SAME = 1e-9
"""Times that differ by at most this share are the same."""

MAX_ROWS = 20
"""As many rows are shown of each table; ``--json`` has all."""


@dataclass(frozen=True, repr=False)
class StudyDiff(Report):
    """What differs from study `a` to study `b`."""

    a: StudyFolder
    b: StudyFolder

    @cached_property
    def axes(self) -> list[str]:
        """The columns that tell points apart, in either study."""
        both = [self.a.study.axes, self.b.study.axes]
        known = dict.fromkeys((*questions(self._all(self.a)), *questions(self._all(self.b))))
        return [each for each in known if any(each in axes for axes in both)] or ["machine"]

    @cached_property
    def held(self) -> dict[str, tuple[object, object]]:
        """Columns that are constant in each study, with their different values."""
        one, two = (held_constant(self._all(each), self.axes) for each in (self.a, self.b))
        vary = {each for study in (self.a, self.b) for each in all_varying(self._all(study))}
        names = [each for each in dict.fromkeys((*one, *two)) if each not in vary]
        return {name: (one.get(name), two.get(name)) for name in names if one.get(name) != two.get(name)}

    @cached_property
    def matched(self) -> pd.DataFrame:
        """All points: their axes, where they are (``both``, ``left_only``, ``right_only``), and the cells of both."""
        cells = [*self.axes, "time_s", "status", "error", "constants", "version", "inputs"]
        one, two = (self._all(each).reindex(columns=cells).astype(object) for each in (self.a, self.b))
        one, two = (each.where(each.notna(), None) for each in (one, two))
        return one.merge(two, how="outer", on=self.axes, suffixes=("_a", "_b"), indicator="where", sort=False)

    @staticmethod
    def _all(folder: StudyFolder) -> pd.DataFrame:
        import pandas as pd

        return pd.concat([folder.rows(), folder.unanswered()], ignore_index=True)

    def only(self, side: str) -> list[dict[str, Any]]:
        """The points of one study only: ``left_only`` of `a`, ``right_only`` of `b`."""
        return records_of(self.matched.loc[self.matched["where"] == side, self.axes])

    @cached_property
    def _both(self) -> pd.DataFrame:
        return self.matched[self.matched["where"] == "both"]

    def changed_times(self) -> list[dict[str, Any]]:
        """Points whose time changed: both times and `change`, the second over the first less one; largest first."""
        import pandas as pd

        found = self._both
        one, two = (pd.to_numeric(found[name]) for name in ("time_s_a", "time_s_b"))
        found = found.assign(change=two / one - 1)[[*self.axes, "time_s_a", "time_s_b", "change"]]
        found = found[found["change"].abs() > SAME]
        return records_of(found.sort_values("change", key=lambda column: -column.abs(), kind="stable"))

    def changed_statuses(self) -> list[dict[str, Any]]:
        """Points with another status in one study than in the other."""
        found = self._both[self._both["status_a"] != self._both["status_b"]]
        return records_of(found[[*self.axes, "status_a", "status_b", "error_a", "error_b"]])

    def changed_inputs(self) -> dict[str, int]:
        """The inputs that differ at the same point, by their path, and at how many points."""
        pairs = zip(self._both["inputs_a"], self._both["inputs_b"], strict=True)
        names = Counter(name for one, two in pairs if one != two for name in _differences(_inputs(one), _inputs(two)))
        return dict(names.most_common())

    def versions(self) -> tuple[list[str], list[str]]:
        """The versions of tasp-lab that made the rows of each study."""
        one, two = (sorted({str(each) for each in self._all(study)["version"].dropna()}) for study in (self.a, self.b))
        return one, two

    def changed_constants(self) -> list[dict[str, Any]]:
        """Constants whose value, interval or source differ; None where a study does not have them."""
        one, two = (_constants(each) for each in (self.a, self.b))
        keys = dict.fromkeys((*one, *two))
        return [
            {"machine": machine, "name": name, "a": one.get((machine, name)), "b": two.get((machine, name))}
            for machine, name in keys
            if one.get((machine, name)) != two.get((machine, name))
        ]

    def rows_with_other_constants(self) -> int:
        """At how many points the constants of the machine have another hash."""
        return int((self._both["constants_a"] != self._both["constants_b"]).sum())

    def changed_winners(self) -> list[dict[str, Any]]:
        """Questions of both studies with another winner, and whether either study finds the two too close to call."""
        axes = [each for each in self.axes if each != "schedule"]
        if not axes:
            axes = ["machine"]
        one, two = (winners(selected(each).rows).reindex(columns=[*axes, "schedule", "margin", "too_close"])
                    for each in (self.a, self.b))  # fmt: skip
        found = one.astype(dict.fromkeys(axes, object)).merge(
            two.astype(dict.fromkeys(axes, object)), on=axes, suffixes=("_a", "_b"), sort=False
        )
        found = found[found["schedule_a"] != found["schedule_b"]]
        found["too_close"] = [b in a_close or a in b_close for a, b, a_close, b_close in zip(
            found["schedule_a"], found["schedule_b"], found["too_close_a"], found["too_close_b"], strict=True
        )]  # fmt: skip
        return records_of(found[[*axes, "schedule_a", "schedule_b", "margin_a", "margin_b", "too_close"]])

    @property
    def is_same(self) -> bool:
        """Whether both have the same points with the same times, winners and statuses."""
        found = self.to_dict()
        kept = ("only_a", "only_b", "held", "changed_times", "changed_statuses", "changed_winners")
        return not any(found[name] for name in kept)

    def to_dict(self) -> dict[str, object]:
        one, two = self.versions()
        return {
            "a": str(self.a.path),
            "b": str(self.b.path),
            "axes": self.axes,
            "points": {"both": len(self._both), "a": len(self._all(self.a)), "b": len(self._all(self.b))},
            "only_a": self.only("left_only"),
            "only_b": self.only("right_only"),
            "held": {name: {"a": a, "b": b} for name, (a, b) in self.held.items()},
            "versions": {"a": one, "b": two},
            "changed_inputs": self.changed_inputs(),
            "changed_constants": self.changed_constants(),
            "points_with_other_constants": self.rows_with_other_constants(),
            "changed_times": self.changed_times(),
            "changed_statuses": self.changed_statuses(),
            "changed_winners": self.changed_winners(),
        }

    def records(self) -> Sequence[Mapping[str, Any]]:
        return self.changed_times()

    def parts(self) -> list[Part]:
        return [*self._lines(), *self._tables()]

    def _lines(self) -> Iterator[str]:
        """What differs as a whole, a line each."""
        one, two = self.versions()
        for name, each in (("a", self.a), ("b", self.b)):
            yield f"{name}: {each.path}, {len(self._all(each)):,} points"
        alone = len(self.only("left_only")), len(self.only("right_only"))
        yield f"in both {len(self._both):,}, only in a {alone[0]:,}, only in b {alone[1]:,}"
        if one != two:
            yield f"version: {listed(one)} in a, {listed(two)} in b"
        for name, (a, b) in self.held.items():
            yield f"{title_of(name)}: {text_of(name, a)} in a, {text_of(name, b)} in b"
        for name, points in self.changed_inputs().items():
            yield f"input {name} differs at {points:,} points"
        if other := self.rows_with_other_constants():
            yield f"constants of the machine differ at {other:,} points"
        if self.is_same:
            yield "the same points with the same times and winners"

    def _tables(self) -> Iterator[Table]:
        yield from self._table("only in a", self.only("left_only"), self.axes)
        yield from self._table("only in b", self.only("right_only"), self.axes)
        constants = [{"machine": each["machine"], "name": each["name"], **_texts_of(each)}
                     for each in self.changed_constants()]  # fmt: skip
        yield from self._table("constants that differ", constants, ["machine", "name", "a", "b"])
        statuses = [*self.axes, "status_a", "status_b", "error_a", "error_b"]
        yield from self._table("other ends", self.changed_statuses(), statuses)
        times = [{**each, "change": f"{each['change']:+.2%}"} for each in self.changed_times()]
        yield from self._table("times that changed", times, [*self.axes, "time_s_a", "time_s_b", "change"])
        questions = [each for each in self.axes if each != "schedule"]
        columns = [*questions, "schedule_a", "schedule_b", "too_close"]
        yield from self._table("winners that changed", self.changed_winners(), columns)

    def _table(self, title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[Table]:
        """A table of the first rows; none without any."""
        if not rows:
            return
        more = f", the first {MAX_ROWS} of {len(rows):,}" if len(rows) > MAX_ROWS else f", {len(rows):,}"
        cells = [[_text(each, row.get(each)) for each in columns] for row in rows[:MAX_ROWS]]
        texts = [place for place, each in enumerate(columns) if isinstance(rows[0].get(each), str) and each != "change"]
        yield Table(f"{title}{more}", [_title(each) for each in columns], cells, texts)


def _title(column: str) -> str:
    base, _, side = column.rpartition("_")
    return f"{title_of(base)} in {side}" if side in ("a", "b") and base else title_of(column)


def _text(column: str, value: Any) -> str:
    base, _, side = column.rpartition("_")
    return text_of(base if side in ("a", "b") and base else column, value)


def _inputs(text: Any) -> Any:
    return json.loads(text) if isinstance(text, str) else None


def _differences(one: Any, two: Any, path: str = "") -> Iterator[str]:
    """The paths at which two JSON values differ.

    >>> list(_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}))
    ['a.c', 'd']
    """
    if isinstance(one, dict) and isinstance(two, dict):
        for name in dict.fromkeys((*one, *two)):
            yield from _differences(one.get(name), two.get(name), f"{path}.{name}" if path else name)
    elif one != two:
        yield path or "inputs"


def _constants(study: StudyFolder) -> dict[tuple[str, str], dict[str, Any]]:
    """The constants of a study by machine and name, with what can differ."""
    return {
        (each["machine"], each["name"]): {name: each.get(name) for name in ("value", "low", "high", "source")}
        for each in study.provenance().get("constants", ())
    }


def _texts_of(changed: Mapping[str, Any]) -> dict[str, str]:
    """The value of a constant in both studies."""
    return {side: NO_VALUE if changed[side] is None else str(plain(changed[side]["value"])) for side in ("a", "b")}


def diff(a: StudyFolder, b: StudyFolder) -> StudyDiff:
    """What differs between two studies. Raises `StudyError` for a folder that cannot be read."""
    found = StudyDiff(a, b)
    found.axes  # noqa: B018  reads both folders
    return found
