"""A study as one page of HTML that needs no network: assumptions, findings, pictures, every point, every constant::

    report(study).write()

The page is the template ``report.html.j2``, which has its style and script, and the data of its tables and pictures.
Cells of tables are texts as people read them, those of numbers with the number, by which they sort and filter. Pictures
are traces of plotly, of which one panel at a time is shown.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasp_lab.core.files import write_whole
from tasp_lab.study.folder import REPORT, StudyFolder
from tasp_lab.study.frames import (
    NO_VALUE,
    Cells,
    counts_text,
    held_constant,
    least_times,
    needed,
    plain,
    records_of,
    text_of,
    title_of,
    varying,
)
from tasp_lab.study.point import PREDICTED
from tasp_lab.study.table import (
    AT_LEAST,
    AT_MOST,
    TIE_RULE,
    Selection,
    View,
    is_open,
    range_of,
    selected,
    so_far_lines,
    table,
    winners_of,
)

if TYPE_CHECKING:
    import pandas as pd

TEMPLATE = "report.html.j2"

Cell = str | list[Any]
"""A text, or a text and the number it stands for."""

PageTable = dict[str, Any]
"""``columns``: their titles; ``rows``: cells; ``numeric``: the places of columns of numbers."""

Figure = dict[str, Any]
"""``axes``: titles of the columns that panels differ in; ``keys``: their values for each panel, as texts; ``panels``:
the traces of each; ``layout``: that of all."""


@dataclass(frozen=True, repr=False)
class StudyReport(View):
    """The report of a study: the table of winners, and a page. Equal folders give equal pages."""

    folder: Path
    tables: Mapping[str, PageTable]
    figures: Mapping[str, Figure]
    texts: Mapping[str, Any]

    def html(self) -> str:
        """The page. Raises `MissingPackageError` without jinja2, plotly or itables."""
        jinja2 = needed("jinja2", "a report")
        loader = jinja2.FunctionLoader(lambda name: files("tasp_lab.study").joinpath(name).read_text("utf-8"))
        environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined,
                                         trim_blocks=True, lstrip_blocks=True)  # fmt: skip
        markup = needed("markupsafe", "a report").Markup
        # The page carries its libraries: plotly, and DataTables as itables packs it.
        bundle = files(needed("itables", "a report")).joinpath("html")
        return str(
            environment.get_template(TEMPLATE).render(
                **self.texts,
                tables=self.tables,
                choices={
                    name: [(axis, list(dict.fromkeys(key[place] for key in figure["keys"])))
                           for place, axis in enumerate(figure["axes"])]
                    for name, figure in self.figures.items()
                },
                plotly=markup(needed("plotly.offline", "a report").get_plotlyjs()),
                datatables=base64.b64encode(bundle.joinpath("dt_bundle.js").read_bytes()).decode(),
                datatables_style=markup(bundle.joinpath("dt_bundle.css").read_text("utf-8")),
                data=markup(script_json({"tables": self.tables, "figures": self.figures})),
            )
        )  # fmt: skip

    def write(self, path: Path | None = None) -> Path:
        """Write the page, by default into the folder of the study. Raises `OutputError`; no partial file remains."""
        target = self.folder / REPORT if path is None else path
        write_whole(target, self.html().encode())
        return target


def script_json(data: object) -> str:
    """JSON that may stand in a script element.

    >>> script_json({"a": "</script><!--"})
    '{"a":"\\\\u003c/script>\\\\u003c!--"}'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def report(folder: StudyFolder, *, where: str | None = None, baseline: str | None = None) -> StudyReport:
    """The report of a study; `where` and `baseline` as in `tasp_lab.study.table.table`. Raises `StudyError`."""
    covered, view = selected(folder, where, baseline), table(folder, where=where, baseline=baseline)
    axes, frame = winners_of(covered)
    winners, along = records_of(frame), numeric_axis(covered.rows)
    unanswered = covered.unanswered
    tables = {"scores": score_table(frame, axes), "winners": winner_table(winners, axes)}
    if along in axes and (changes := change_table(frame, axes, along))["rows"]:
        tables["changes"] = changes
    tables["points"] = point_table(covered)
    if len(unanswered):
        tables["reasons"] = reason_table(unanswered)
        tables["unanswered"] = unanswered_table(unanswered, folder.study.axes)
    tables |= {"constants": constant_table(folder), "settled": settled_table(covered)}
    colors = schedule_colors(frame, covered.rows)
    figures = {}
    if along in axes and len(axes) > 1:
        other = next(axis for axis in axes if axis != along)
        figures["map"] = winner_map(frame, axes, along, other, colors)
    if along is not None:
        figures["curves"] = curves(covered.rows, along, colors)
    sizes = {
        "questions": len(frame),
        "tables": {name: len(each["rows"]) for name, each in tables.items()},
        "figures": {name: len(each["panels"]) for name, each in figures.items()},
    }
    return StudyReport(
        covered.to_dict(axes) | sizes,
        view.rows,
        view.shown,
        folder.path,
        tables,
        figures,
        _texts(covered, frame, unanswered, along, colors),
    )


def _texts(
    covered: Selection, frame: pd.DataFrame, unanswered: pd.DataFrame, along: str | None, colors: Mapping[str, str]
) -> dict[str, Any]:
    """What the page states besides its tables."""
    told = covered.folder.provenance()
    constants, winning = told.get("constants", ()), set(frame["schedule"])
    return {
        "study": covered.folder.study,
        "told": told,
        "unanswered": len(unanswered),
        "counts_text": "; ".join([counts_text(covered.counts), *so_far_lines(covered.folder)]),
        "questions": len(frame),
        "close": sum(map(is_open, records_of(frame))),
        "tie_rule": TIE_RULE,
        "along": None if along is None else title_of(along),
        "baseline": covered.baseline,
        "where": covered.where,
        "held": [(title_of(name), text_of(name, value)) for name, value in held_constant(covered.rows).items()],
        "assumed": [constant for constant in constants if constant.get("assumed")],
        "constants": len(constants),
        "winning": {name: color for name, color in colors.items() if name in winning},
    }


def numeric_axis(rows: pd.DataFrame) -> str | None:
    """The first axis with numbers, along which curves are drawn and changes are listed."""
    for axis in varying(rows):
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in map(plain, rows[axis])):
            return axis
    return None


def schedule_colors(winners: pd.DataFrame, rows: pd.DataFrame) -> dict[str, str]:
    """The colour of each schedule, the same in all pictures; those that win most often have the first ones."""
    from tasp_lab.plots.study import ALL_COLORS

    names = dict.fromkeys([*winners["schedule"].value_counts().index, *rows["schedule"]])
    return {str(name): ALL_COLORS[place % len(ALL_COLORS)] for place, name in enumerate(names)}


def by_values(rows: Iterable[Cells], axes: Sequence[str]) -> dict[tuple[str, ...], list[Cells]]:
    """Rows by the values of some axes, as texts, in the order of the rows."""
    groups: dict[tuple[str, ...], list[Cells]] = {}
    for row in rows:
        groups.setdefault(tuple(text_of(axis, row[axis]) for axis in axes), []).append(row)
    return groups


# ------------------------------------------------------------------------------------------------------- tables


def page_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> PageTable:
    """A table that sorts and filters."""
    numeric = [place for place in range(len(columns)) if any(isinstance(row[place], list) for row in rows)]
    return {"columns": list(columns), "rows": rows, "numeric": numeric}


def cell(column: str, value: Any) -> Cell:
    """The cell of a value.

    >>> cell("seq", 65536), cell("machine", "h100-8"), cell("seq", None)
    (['64Ki', 65536], 'h100-8', '-')
    """
    value = plain(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return [text_of(column, value), value] if is_number else text_of(column, value)


def score_table(winners: pd.DataFrame, axes: Sequence[str]) -> PageTable:
    """How often each schedule is the fastest, and where it is so by most."""
    rows: list[list[Cell]] = []
    for name in winners["schedule"].value_counts().index:
        won = winners[winners["schedule"] == name]
        clear = sum(not is_open(row) for row in records_of(won))
        best = won.sort_values("speedup", ascending=False, kind="stable").iloc[0]
        of_baseline: tuple[Cell, ...] = (NO_VALUE,) * 3
        if plain(best["speedup"]) is not None:
            over, there = int((won["speedup_low"] > 1).sum()), ", ".join(text_of(axis, best[axis]) for axis in axes)
            of_baseline = cell("", over), cell("speedup", best["speedup"]), there
        rows.append([name, cell("", len(won)), cell("", clear), *of_baseline])
    columns = ("schedule", "fastest", "decided", "faster than the baseline for sure", "largest speed-up", "there")
    return page_table(columns, rows)


def winner_table(winners: Iterable[Cells], axes: Sequence[str]) -> PageTable:
    """The winners."""
    columns = [*map(title_of, axes), "winner", "time", "interval", "speed-up", "interval",
               "recommended", "expected regret", "bottleneck", "share of bound", "exposed share"]  # fmt: skip
    rows = [
        [
            *(cell(axis, row[axis]) for axis in axes),
            row["schedule"],
            cell("time_s", row["time_s"]),
            range_of("time_s", row["time_low_s"], row["time_high_s"]),
            cell("speedup", row["speedup"]),
            range_of("speedup", row["speedup_low"], row["speedup_high"]),
            cell("recommended", row["recommended"]),
            cell("expected_regret", row["expected_regret"]),
            *(cell(column, row[column]) for column in ("bottleneck", "bound_share", "exposed_share")),
        ]
        for row in winners
    ]
    return page_table(columns, rows)


def change_table(winners: pd.DataFrame, axes: Sequence[str], along: str) -> PageTable:
    """Where another schedule becomes the fastest along an axis, between two neighbouring values of the study."""
    others = [axis for axis in axes if axis != along]
    in_order = records_of(winners.sort_values(along, kind="stable"))

    def end(row: Cells) -> tuple[Cell, Cell, Cell]:
        return cell(along, row[along]), row["schedule"], cell("bottleneck", row["bottleneck"])

    def clear(before: Cells, after: Cells) -> str:
        """At which ends the order of both schedules is not too close to call."""
        ends = after["schedule"] not in before["too_close"], before["schedule"] not in after["too_close"]
        return {(True, True): "at both ends", (True, False): "before", (False, True): "after"}.get(ends, "no")

    rows = [
        [*(cell(axis, before[axis]) for axis in others), *end(before), *end(after), clear(before, after)]
        for line in by_values(in_order, others).values()
        for before, after in pairwise(line)
        if before["schedule"] != after["schedule"]
    ]
    titles = f"from {title_of(along)}", "fastest", "bound by", f"to {title_of(along)}", "fastest then", "bound by"
    return page_table([*map(title_of, others), *titles, "clear"], rows)


POINT_CELLS = ("speedup", "compute_s", "communication_s", "exposed_s", "bound_s", "bottleneck", "memory_bytes", "fits",
               "settled_by", "engine", "key")  # fmt: skip


def point_table(covered: Selection) -> PageTable:
    """Every row with a time or a bound."""
    axes = varying(covered.rows)

    def bounded(column: str, row: Cells) -> Cell:
        """A time or a speed-up; of a row that a bound settled at least or at most that."""
        if row["status"] != "settled":
            return cell(column, row[column])
        if column == "time_s":
            return [f"{AT_LEAST} {text_of('bound_s', row['bound_s'])}", plain(row["bound_s"])]
        found = cell(column, row[column])
        return [f"{AT_MOST} {found[0]}", found[1]] if isinstance(found, list) else found

    rows = [
        [
            *(cell(axis, row[axis]) for axis in axes),
            bounded("time_s", row),
            range_of("time_s", row["time_low_s"], row["time_high_s"]),
            bounded("speedup", row),
            *(cell(column, row[column]) for column in POINT_CELLS[1:]),
        ]
        for row in records_of(covered.rows)
    ]
    return page_table([*map(title_of, axes), "time", "interval", *map(title_of, POINT_CELLS)], rows)


def reason_table(unanswered: pd.DataFrame) -> PageTable:
    """Why points have no answer, and how many."""
    counts = unanswered[["status", "error"]].value_counts(sort=True)
    rows = [[str(status), str(error), cell("", int(points))] for (status, error), points in counts.items()]
    return page_table(("status", "reason", "points"), rows)


def unanswered_table(unanswered: pd.DataFrame, axes: Sequence[str], most: int = 90) -> PageTable:
    """The points without an answer, with the beginning of the reason; the table of reasons has all of it."""
    rows = []
    for row in records_of(unanswered):
        reason = str(row["error"])
        short = reason if len(reason) <= most else f"{reason[:most].rstrip()} ..."
        rows.append([*(cell(axis, row[axis]) for axis in axes), row["status"], short])
    return page_table([*map(title_of, axes), "status", "reason"], rows)


def constant_table(folder: StudyFolder) -> PageTable:
    """The constants of all machines, with interval and source."""

    def text(value: Any) -> str:
        return f"{value:.6g}" if isinstance(value, float) else NO_VALUE if value is None else str(value)

    rows: list[list[Cell]] = [
        [
            str(each["machine"]),
            str(each["name"]),
            [text(each.get("value")), each["value"]]
            if isinstance(each.get("value"), (int, float))
            else text(each.get("value")),
            NO_VALUE if each.get("low") == each.get("high") else f"{text(each.get('low'))} to {text(each.get('high'))}",
            "assumed" if each.get("assumed") else "no",
            str(each.get("source") or NO_VALUE),
        ]
        for each in folder.provenance().get("constants", ())
    ]
    return page_table(("machine", "constant", "value", "interval", "assumed", "source"), rows)


def settled_table(covered: Selection) -> PageTable:
    """How many rows each engine simulated, and how many a bound pruned."""
    frame = covered.rows.astype(object)
    counts = frame.where(frame.notna(), NO_VALUE).groupby(["settled_by", "engine"], sort=False).size()
    rows: list[list[Cell]] = [[str(by), str(engine), cell("", int(points))] for (by, engine), points in counts.items()]
    rows += [[status, NO_VALUE, cell("", count)] for status, count in covered.counts.items()
             if count and status not in PREDICTED]  # fmt: skip
    return page_table(("decided by", "engine", "points"), rows)


# ----------------------------------------------------------------------------------------------------- pictures

STRONG, PALE = 0.75, 0.32
"""How strong the colour of a winner is of a decided question, and of an open one."""


def figure(axes: Iterable[str], panels: Mapping[tuple[str, ...], Any], layout: dict[str, Any]) -> Figure:
    """A picture in the style of the page."""
    clear = "rgba(0,0,0,0)"
    style = {"margin": {"l": 70, "r": 12, "t": 12, "b": 50}, "paper_bgcolor": clear, "plot_bgcolor": "#ffffff",
             "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#222222"},
             "hoverlabel": {"align": "left", "bgcolor": "#ffffff"}}  # fmt: skip
    axis = {"gridcolor": "#e6e6e6", "linecolor": "#999999", "zeroline": False}
    layout = {**style, **layout, "xaxis": {**axis, **layout["xaxis"]}, "yaxis": {**axis, **layout["yaxis"]}}
    return {"axes": list(map(title_of, axes)), "keys": list(panels), "panels": list(panels.values()), "layout": layout}


def hover_text(row: Cells) -> str:
    """What a point tells of itself, as lines of HTML."""
    lines = [f"<b>{html.escape(str(row['schedule']))}</b>"]
    if row["status"] == "settled":
        lines.append(f"at least {text_of('bound_s', row['bound_s'])}, by a bound")
    else:
        ends = range_of("time_s", row["time_low_s"], row["time_high_s"])
        lines.append(f"{text_of('time_s', row['time_s'])} ({ends})")
    for name in ("speedup", "bottleneck", "exposed_share", "bound_share", "memory_bytes"):
        if row[name] is not None:
            lines.append(f"{title_of(name)} {html.escape(text_of(name, row[name]))}")
    return "<br>".join(lines)


def curves(rows: pd.DataFrame, x: str, colors: Mapping[str, str]) -> Figure:
    """Times over an axis, a line per schedule with interval and bound; a panel per values of all other axes."""
    axes = [axis for axis in varying(rows) if axis not in (x, "schedule")]
    rows = rows.assign(least_s=least_times(rows)).sort_values(x, kind="stable")
    values = sorted(set(rows[x]))
    ticks = values[:: -max(1, len(values) // 12)][::-1]
    decades = range(math.floor(math.log10(rows["least_s"].min())), math.ceil(math.log10(rows["least_s"].max())) + 1)
    panels = {
        key: [
            trace
            for (name,), line in by_values(panel, ["schedule"]).items()
            for trace in _line(name, line, x, colors[name])
        ]
        for key, panel in by_values(records_of(rows), axes).items()
    }
    layout = {
        "xaxis": {"title": {"text": title_of(x)}, "type": "log" if min(values) > 0 else "linear",
                  "tickvals": ticks, "ticktext": [text_of(x, value) for value in ticks]},
        "yaxis": {"title": {"text": "time"}, "type": "log",
                  "tickvals": [10.0**decade for decade in decades],
                  "ticktext": [text_of("time_s", 10.0**decade) for decade in decades]},
        "hovermode": "closest", "height": 520,
        "legend": {"orientation": "h", "y": -0.18, "title": {"text": ""}},
    }  # fmt: skip
    return figure(axes, panels, layout)


def _line(name: str, line: Sequence[Cells], x: str, color: str) -> Iterator[dict[str, Any]]:
    """The traces of a schedule: its interval, its bound, and its points, which tell all about themselves."""
    series = {
        column: [row[column] for row in line] for column in (x, "time_low_s", "time_high_s", "bound_s", "least_s")
    }
    around = {"type": "scatter", "x": series[x], "mode": "lines", "line": {"width": 0}, "legendgroup": name,
              "showlegend": False, "hoverinfo": "skip"}  # fmt: skip
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    yield around | {"y": series["time_low_s"]}
    yield around | {"y": series["time_high_s"], "fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.12)"}
    yield around | {"y": series["bound_s"], "line": {"width": 1, "dash": "dash", "color": color}}
    symbols = ["circle-open" if row["status"] == "settled" else "circle" for row in line]
    yield {
        "type": "scatter",
        "x": series[x],
        "y": series["least_s"],
        "mode": "lines+markers",
        "name": html.escape(name),
        "legendgroup": name,
        "line": {"color": color, "width": 2},
        "marker": {"size": 7, "symbol": symbols},
        "text": [hover_text(row) for row in line],
        "hovertemplate": "%{text}<extra></extra>",
    }


def winner_map(winners: pd.DataFrame, axes: Sequence[str], x: str, y: str, colors: Mapping[str, str]) -> Figure:
    """The fastest schedule over two axes, in its colour; a panel per values of the others."""
    others = [axis for axis in axes if axis not in (x, y)]
    panels = {key: [_heat_map(panel, x, y, colors)] for key, panel in by_values(records_of(winners), others).items()}
    layout = {"xaxis": {"title": {"text": title_of(x)}, "type": "category", "fixedrange": True},
              "yaxis": {"automargin": True, "type": "category", "autorange": "reversed", "fixedrange": True},
              "height": 140 + 34 * winners[y].nunique()}  # fmt: skip
    return figure(others, panels, layout)


def _heat_map(rows: Sequence[Cells], x: str, y: str, colors: Mapping[str, str]) -> dict[str, Any]:
    """One map. A cell has the place of its colour, of which each schedule has a strong and a pale one."""
    columns, lines = sorted({row[x] for row in rows}), list(dict.fromkeys(row[y] for row in rows))
    cells = {(row[y], row[x]): row for row in rows}
    places = {name: 2 * place for place, name in enumerate(colors)}
    shades = [blended(color, share) for color in colors.values() for share in (STRONG, PALE)]

    def grid(what: Any, empty: object) -> list[list[Any]]:
        return [
            [what(cells[line, column]) if (line, column) in cells else empty for column in columns] for line in lines
        ]

    def text(row: Cells) -> str:
        speedup = "" if row["speedup"] in (None, 1) else text_of("speedup", row["speedup"])
        return f"{speedup} ~".strip() if is_open(row) else speedup

    def hover(row: Cells) -> str:
        then = "" if row["second"] is None else f"<br>then {html.escape(row['second'])}, {row['margin'] - 1:.1%} slower"
        regret = "" if row["expected_regret"] is None else f", expected regret {row['expected_regret']:.1%}"
        taken = "" if row["recommended"] is None else f"<br>recommended: {html.escape(row['recommended'])}{regret}"
        return hover_text({**row, "status": "ok"}) + then + taken

    return {
        "type": "heatmap",
        "x": [text_of(x, column) for column in columns],
        "y": [text_of(y, line) for line in lines],
        "z": grid(lambda row: places[row["schedule"]] + is_open(row), None),
        "zmin": 0,
        "zmax": len(shades) - 1,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
        "colorscale": [[place / (len(shades) - 1), shade] for place, shade in enumerate(shades)],
        "text": grid(text, ""),
        "customdata": grid(hover, ""),
        "texttemplate": "%{text}",
        "textfont": {"color": "#222222"},
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def blended(color: str, share: float) -> str:
    """A colour mixed with white.

    >>> blended("#000000", 0.5), blended("#4477aa", 1)
    ('rgb(128,128,128)', 'rgb(68,119,170)')
    """
    parts = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgb({','.join(str(round(255 + share * (part - 255))) for part in parts)})"
