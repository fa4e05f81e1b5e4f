"""The page: what it states, and the file it becomes."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasp_lab.core.files import write_whole
from tasp_lab.core.report import Report
from tasp_lab.core.tables import Part
from tasp_lab.study.captions import counts_text, held_constant
from tasp_lab.study.columns import text_of, title_of
from tasp_lab.study.folder import REPORT, StudyFolder
from tasp_lab.study.needed import needed
from tasp_lab.study.report import tables
from tasp_lab.study.report.curves import curves, numeric_axis
from tasp_lab.study.report.winner_map import winner_map
from tasp_lab.study.show import TIE_RULE, Selection, WinnerTable, selected, show, so_far_lines

if TYPE_CHECKING:
    from tasp_lab.study.report.choice import Choice
    from tasp_lab.study.report.tables import PageTable

HERE = "tasp_lab.study.report"


@dataclass(frozen=True, repr=False)
class StudyReport(Report):
    """The report of a study. Equal folders give equal pages."""

    selection: Selection
    winners: WinnerTable

    @cached_property
    def along(self) -> str | None:
        """The axis of numbers along which curves are drawn and changes are listed."""
        return numeric_axis(self.selection.rows)

    @cached_property
    def tables(self) -> list[PageTable]:
        """All tables, in the order of the page."""
        found, unanswered = self.selection, self.selection.unanswered
        axes = found.folder.study.axes
        return [
            tables.score_table(self.winners),
            tables.winner_table(self.winners),
            *self._changes(),
            tables.point_table(found),
            *([tables.reason_table(unanswered), tables.unanswered_table(unanswered, axes)] if len(unanswered) else []),
            tables.constant_table(found.folder),
            tables.settled_table(found),
        ]

    def _changes(self) -> list[PageTable]:
        """Where the fastest schedule changes; nothing where it never does."""
        if self.along is None or self.along not in self.winners.axes:
            return []
        found = tables.change_table(self.winners, self.along)
        return [found] if found.rows else []

    @cached_property
    def figures(self) -> list[Choice]:
        """All pictures: curves along an axis of numbers, and a map over it and another axis, if there are these."""
        made, x = [], self.along
        if x is None:
            return []
        others = [each for each in self.winners.axes if each != x]
        if others and x in self.winners.axes:
            made.append(winner_map(self.winners, x, others[0], self.colors))
        return [*made, curves(self.selection, x, self.colors)]

    @cached_property
    def colors(self) -> dict[str, str]:
        """The colour of each schedule, the same in all pictures; those that win most often have the first ones."""
        from tasp_lab.plots.study import ALL_COLORS

        names = dict.fromkeys([*self.winners.table["schedule"].value_counts().index, *self.selection.rows["schedule"]])
        return {str(name): ALL_COLORS[place % len(ALL_COLORS)] for place, name in enumerate(names)}

    def html(self) -> str:
        """The page. Raises `MissingPackageError` without jinja2, plotly or itables."""
        jinja2 = needed("jinja2", "a report")
        loader = jinja2.FunctionLoader(lambda name: files(HERE).joinpath(name).read_text("utf-8"))
        environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined,
                                         trim_blocks=True, lstrip_blocks=True)  # fmt: skip
        return str(environment.get_template("page.html.j2").render(**self._texts(), **self._scripts()))

    def _texts(self) -> dict[str, Any]:
        """What the page states besides its tables."""
        found, told = self.selection, self.selection.folder.provenance()
        constants = told.get("constants", ())
        held, winning = held_constant(found.rows), set(self.winners.table["schedule"])
        return {
            "study": found.folder.study,
            "told": told,
            "unanswered": len(found.unanswered),
            "counts_text": "; ".join([counts_text(found.counts), *so_far_lines(found.folder)]),
            "questions": len(self.winners.table),
            "close": int(self.winners.table["too_close"].map(bool).sum()),
            "tie_rule": TIE_RULE,
            "along": None if self.along is None else title_of(self.along),
            "baseline": found.baseline,
            "where": found.where,
            "held": [(title_of(name), text_of(name, value)) for name, value in held.items()],
            "assumed": [each for each in constants if each.get("assumed")],
            "constants": len(constants),
            "tables": {each.name: each for each in self.tables},
            "figures": {each.name: each for each in self.figures},
            "winning": {name: color for name, color in self.colors.items() if name in winning},
        }

    def _scripts(self) -> dict[str, Any]:
        """The code and data of the page, and the libraries it carries: plotly, and DataTables as itables packs it."""
        markup = needed("markupsafe", "a report").Markup
        bundle = files(needed("itables", "a report")).joinpath("html/dt_bundle.js")
        style = files("itables").joinpath("html/dt_bundle.css").read_text("utf-8")
        data = {
            "tables": {each.name: each.to_dict() for each in self.tables},
            "figures": {each.name: each.to_dict() for each in self.figures},
        }
        return {
            "plotly": markup(needed("plotly.offline", "a report").get_plotlyjs()),
            "datatables": base64.b64encode(bundle.read_bytes()).decode(),
            "datatables_style": markup(style),
            "style": markup(files(HERE).joinpath("page.css").read_text("utf-8")),
            "script": markup(files(HERE).joinpath("page.js").read_text("utf-8")),
            "data": markup(script_json(data)),
        }

    def write(self, path: Path | None = None) -> Path:
        """Write the page, by default into the folder of the study. Raises `OutputError`; no partial file remains."""
        target = self.selection.folder.path / REPORT if path is None else path
        write_whole(target, self.html().encode())
        return target

    def to_dict(self) -> dict[str, object]:
        return {
            **self.selection.to_dict(self.winners.axes),
            "questions": len(self.winners.table),
            "tables": {each.name: len(each.rows) for each in self.tables},
            "figures": {each.name: len(each.panels) for each in self.figures},
        }

    def records(self) -> Sequence[dict[str, Any]]:
        return self.winners.records()

    def parts(self) -> list[Part]:
        return self.winners.parts()


def script_json(data: object) -> str:
    """JSON that may stand in a script element.

    >>> script_json({"a": "</script><!--"})
    '{"a":"\\\\u003c/script>\\\\u003c!--"}'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def report(folder: StudyFolder, *, where: str | None = None, baseline: str | None = None) -> StudyReport:
    """The report of a study; `where` and `baseline` as in `tasp_lab.study.show.show`. Raises `StudyError`."""
    winners = show(folder, where=where, baseline=baseline)
    assert isinstance(winners, WinnerTable)
    return StudyReport(selected(folder, where, baseline), winners)
