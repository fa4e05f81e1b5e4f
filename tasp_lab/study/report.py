"""A study as one page of HTML that needs no network: a sentence and a map, then tables, pictures, and all sources::

    report(study).write()

The page is the template ``report.html.j2``, which has its style and script, and the data of its tables and pictures.
The map is that of `tasp_lab.study.live_map`. Cells of tables are texts as people read them, those of numbers with the
number, by which they sort and filter. Pictures are traces of plotly, of which one panel at a time is shown.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasp_lab.core.files import write_whole
from tasp_lab.core.report import View
from tasp_lab.prediction.paired import paired_errors
from tasp_lab.study.folder import REPORT, StudyFolder
from tasp_lab.study.frames import (
    NO_VALUE,
    Cells,
    counts_text,
    held_constant,
    is_number,
    listed,
    needed,
    plain,
    questions_of,
    records_of,
    rival_of,
    text_of,
    title_of,
    varying,
)
from tasp_lab.study.live_map import Grid, live_map, map_library, map_script
from tasp_lab.study.table import (
    AT_LEAST,
    AT_MOST,
    TIE_RULE,
    TIME_INTERVAL,
    Cell,
    Column,
    cell,
    cells_of,
    is_open,
    range_of,
    selected,
    so_far_lines,
    titled,
    winner_columns,
    winner_table,
    winners_of,
)

if TYPE_CHECKING:
    import pandas as pd

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
    grid: Grid | None
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
        data = {"tables": self.tables, "figures": self.figures}
        return str(
            environment.get_template("report.html.j2").render(
                **self.texts,
                tables=self.tables,
                choices={
                    name: [(axis, list(dict.fromkeys(key[place] for key in figure["keys"])))
                           for place, axis in enumerate(figure["axes"])]
                    for name, figure in self.figures.items()
                },
                live_map=markup("" if self.grid is None else map_library() + script_safe(map_script(self.grid))),
                plotly=markup(needed("plotly.offline", "a report").get_plotlyjs()),
                datatables=base64.b64encode(bundle.joinpath("dt_bundle.js").read_bytes()).decode(),
                datatables_style=markup(bundle.joinpath("dt_bundle.css").read_text("utf-8")),
                data=markup(script_safe(json.dumps(data, separators=(",", ":"), allow_nan=False))),
            )
        )  # fmt: skip

    def write(self, path: Path | None = None) -> Path:
        """Write the page, by default into the folder of the study. Raises `OutputError`; no partial file remains."""
        target = self.folder / REPORT if path is None else path
        write_whole(target, self.html().encode())
        return target


def script_safe(text: str) -> str:
    """JSON, or a call of it, in which no text can end the script element.

    >>> script_safe('["</script>"]')
    '["\\\\u003c/script>"]'
    """
    return text.replace("<", "\\u003c")


def report(folder: StudyFolder, *, where: str | None = None, baseline: str | None = None) -> StudyReport:
    """The report of a study; `where` and `baseline` as in `tasp_lab.study.table.table`. Raises `StudyError`."""
    covered = selected(folder, where, baseline)
    axes, frame = winners_of(covered)
    view = winner_table(covered, axes, frame)
    rows, unanswered, told = covered.rows, records_of(covered.unanswered), folder.provenance
    winners, constants = records_of(frame), told.get("constants", ())
    tables = {
        "winners": page_table(winners, winner_columns(covered, axes)),
        "points": page_table(records_of(rows), point_columns_of(rows)),
        "constants": page_table(constants, CONSTANT_COLUMNS),
    }
    if unanswered:
        tables["unanswered"] = page_table(unanswered, titled([*folder.axes, "status", "error"]))
    colors = schedule_colors(frame, rows)
    along = next((axis for axis in varying(rows) if all(map(is_number, map(plain, rows[axis])))), None)
    figures = {} if along is None else {"ratios": ratios(rows, along, colors)}
    sizes = {
        "questions": len(frame),
        "tables": {name: len(made["rows"]) for name, made in tables.items()},
        "figures": {name: len(made["panels"]) for name, made in figures.items()},
    }
    texts = {
        "study": folder.name,
        "told": told,
        "summary": summary(winners, axes),
        "unanswered": len(unanswered),
        "counts_text": counts_text(covered.counts),
        "so_far": so_far_lines(folder),
        "tie_rule": TIE_RULE,
        "baseline": covered.baseline,
        "where": where,
        "held": [(title_of(name), text_of(name, value)) for name, value in held_constant(rows).items()],
        "constants": len(constants),
    }
    document = covered.document(axes) | sizes
    return StudyReport(document, view.rows, view.shown, folder.path, tables, figures, live_map(rows, colors), texts)


def summary(winners: Sequence[Cells], axes: Sequence[str]) -> str:
    """What to take where, and how much is decided, in two sentences.

    >>> picked = {"a100-8": "ulysses", "h100-8": "ulysses", "gaudi2-8": "tasp"}
    >>> rows = [{"machine": name, "recommended": taken, "schedule": taken, "expected_regret": 0.01 * place}
    ...         for place, (name, taken) in enumerate(picked.items(), 1)]
    >>> summary(rows, ["machine"])
    'Take ulysses at 2 of 3 points (machine a100-8, h100-8), tasp at 1 (gaudi2-8). 2 of 3 are decided.'
    """
    taken = [(row["recommended"] or row["schedule"], row) for row in winners]
    total, counts = len(taken), Counter(name for name, _ in taken)
    decided = sum(not is_open(row) for row in winners)
    last = "All are decided." if decided == total else f"{decided} of {total} are decided."
    last = last if total > 1 else "It is decided." if decided else "It is open."
    if len(counts) == 1:
        return f"Take {taken[0][0]} at {'all ' if total > 1 else 'the '}{total} point{'s' * (total > 1)}. {last}"
    # The axis that tells best which one to take: at each of its values most points agree.
    by_axis = {
        axis: {value: Counter(name for name, row in taken if row[axis] == value) for value in
               dict.fromkeys(row[axis] for row in winners)}
        for axis in axes
    }  # fmt: skip
    agreeing = {axis: sum(max(found.values()) for found in values.values()) for axis, values in by_axis.items()}
    axis = max(axes, key=lambda name: agreeing[name])
    parts = list[str]()
    for name, count in counts.most_common(3):
        led = [text_of(axis, value) for value, found in by_axis[axis].items() if found.most_common(1)[0][0] == name]
        title = "" if parts else f"{title_of(axis)} "
        where = f" ({title}{listed(led, 4)})" if led else ""
        parts.append(f"{name} at {count}{'' if parts else f' of {total} points'}{where}")
    more = (
        "" if len(counts) <= 3 else f", {len(counts) - 3} others at {total - sum(n for _, n in counts.most_common(3))}"
    )
    return f"Take {', '.join(parts)}{more}. {last}"


def schedule_colors(winners: pd.DataFrame, rows: pd.DataFrame) -> dict[str, str]:
    """The colour of each schedule, the same in all pictures; those that win most often have the first ones."""
    from tasp_lab.plots.study import ALL_COLORS

    names = dict.fromkeys([*winners["schedule"].value_counts().index, *rows["schedule"]])
    return {str(name): ALL_COLORS[place % len(ALL_COLORS)] for place, name in enumerate(names)}


# ------------------------------------------------------------------------------------------------------- tables


def page_table(rows: Iterable[Cells], columns: Sequence[Column]) -> PageTable:
    """A table that sorts and filters."""
    cells = cells_of(rows, columns)
    numeric = [place for place in range(len(columns)) if any(isinstance(row[place], list) for row in cells)]
    return {"columns": [title for title, _ in columns], "rows": cells, "numeric": numeric}


POINT_CELLS = ("compute_s", "exposed_s", "bound_s", "bottleneck", "memory_bytes", "fits", "settled_by", "engine")


def point_columns_of(rows: pd.DataFrame) -> list[Column]:
    """The columns of every row with a time or a bound. A row that a bound settled takes at least that long."""

    def bounded(column: str, of: str, mark: str) -> Callable[[Cells], Cell]:
        """The cells of a column; of a row that a bound settled those that follow from it, with a mark."""

        def made(row: Cells) -> Cell:
            is_bound = row["status"] == "settled" and row[of] is not None
            return [f"{mark} {text_of(of, row[of])}", row[of]] if is_bound else cell(column, row[column])

        return made

    time = ("time", bounded("time_s", "bound_s", AT_LEAST)), TIME_INTERVAL
    speedup = (title_of("speedup"), bounded("speedup", "speedup", AT_MOST))
    return [*titled(varying(rows)), *time, speedup, *titled(POINT_CELLS)]


CONSTANT_COLUMNS: list[Column] = [
    ("machine", "machine"),
    ("constant", "name"),
    ("value", "value"),
    ("interval", lambda row: NO_VALUE if row["low"] == row["high"] else f"{row['low']} to {row['high']}"),
    ("assumed", lambda row: "assumed" if row["assumed"] else "no"),
    ("source", "source"),
]


# ----------------------------------------------------------------------------------------------------- pictures


LARGEST_RATIO = 10.0
"""The vertical axis of ratios ends there at first; a double click on it shows all."""

RATIO_TICKS = (1, 1.1, 1.25, 1.5, 2, 3, 4, 6, 10, 20, 50, 100, 200, 500, 1000)


def ratios(rows: pd.DataFrame, x: str, colors: Mapping[str, str]) -> Figure:
    """Times over that of the fastest, over an axis, a line per schedule; a panel per values of all other axes."""
    axes = [axis for axis in varying(rows) if axis not in (x, "schedule")]
    panels: dict[tuple[str, ...], dict[str, list[tuple[Cells, Cells]]]] = {}
    for rivals in questions_of(rows.sort_values(x, kind="stable"), [*axes, x]).values():
        fastest = min((row for row in rivals if row["time_s"] is not None), key=lambda row: row["time_s"])
        lines = panels.setdefault(tuple(text_of(axis, fastest[axis]) for axis in axes), {})
        for row in rivals:
            lines.setdefault(row["schedule"], []).append((row, fastest))
    values = sorted(set(map(plain, rows[x])))
    ticks = values[:: -max(1, len(values) // 12)][::-1]
    traces = [[_line(name, line, x, colors[name]) for name, line in lines.items()] for lines in panels.values()]
    largest = max(value for lines in traces for line in lines for value in line["y"])
    axis = {"gridcolor": "#e6e6e6", "linecolor": "#999999", "zeroline": False}
    clear = "rgba(0,0,0,0)"
    layout = {
        "margin": {"l": 70, "r": 12, "t": 12, "b": 50}, "paper_bgcolor": clear, "plot_bgcolor": "#ffffff",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#222222"},
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff"},
        "xaxis": {**axis, "title": {"text": title_of(x)}, "type": "log" if min(values) > 0 else "linear",
                  "tickvals": ticks, "ticktext": [text_of(x, value) for value in ticks]},
        "yaxis": {**axis, "title": {"text": "time over that of the fastest"}, "type": "log",
                  "range": [math.log10(0.97), math.log10(1.05 * min(max(largest, 1.2), LARGEST_RATIO))],
                  "tickvals": list(RATIO_TICKS), "ticktext": [f"{tick:g}x" for tick in RATIO_TICKS]},
        "hovermode": "closest", "height": 440,
        "legend": {"orientation": "h", "y": -0.2, "title": {"text": ""}},
    }  # fmt: skip
    return {"axes": list(map(title_of, axes)), "keys": list(panels), "panels": traces, "layout": layout}


def _line(name: str, line: Sequence[tuple[Cells, Cells]], x: str, color: str) -> dict[str, Any]:
    """The trace of a schedule: rows beside the fastest at their points, which tell all about themselves."""
    return {
        "type": "scatter",
        "x": [row[x] for row, _ in line],
        "y": [(row["time_s"] or row["bound_s"]) / fastest["time_s"] for row, fastest in line],
        "mode": "lines+markers",
        "name": html.escape(name),
        "line": {"color": color, "width": 2},
        "marker": {"size": 7, "symbol": ["circle-open" if row["status"] == "settled" else "circle" for row, _ in line]},
        "text": [hover_text(row, fastest) for row, fastest in line],
        "hovertemplate": "%{text}<extra></extra>",
    }


def hover_text(row: Cells, fastest: Cells) -> str:
    """What a point tells of itself, as lines of HTML; beside the fastest with the interval of the ratio."""
    lines = [f"<b>{html.escape(str(row['schedule']))}</b>"]
    if row["status"] == "settled":
        lines.append(f"at least {text_of('bound_s', row['bound_s'])}, by a bound")
    else:
        ends = range_of("time_s", row["time_low_s"], row["time_high_s"])
        lines.append(f"{text_of('time_s', row['time_s'])} ({ends})")
    for name in ("speedup", "bottleneck", "exposed_share", "bound_share", "memory_bytes"):
        if row[name] is not None:
            lines.append(f"{title_of(name)} {html.escape(text_of(name, row[name]))}")
    one, other = rival_of(row), rival_of(fastest)
    if row["schedule"] != fastest["schedule"] and one is not None and other is not None:
        low, high = paired_errors().ratio(one, other, row["setting"])
        ratio, name = row["time_s"] / fastest["time_s"], html.escape(fastest["schedule"])
        lines.append(f"{ratio:.2f}x ({low:.2f} to {high:.2f}) the time of {name}")
    return "<br>".join(lines)
