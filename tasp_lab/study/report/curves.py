"""Curves of the page: times along an axis of numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasp_lab.study.columns import plain, records_of, text_of, title_of
from tasp_lab.study.folder import varying
from tasp_lab.study.report.choice import Choice, groups, hover_text, styled
from tasp_lab.study.show import Selection
from tasp_lab.study.winners import Cells, least_times

if TYPE_CHECKING:
    import pandas as pd


def numeric_axis(rows: pd.DataFrame) -> str | None:
    """The first axis with numbers, along which curves are drawn."""
    for each in varying(rows):
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in map(plain, rows[each])):
            return each
    return None


def curves(found: Selection, x: str, colors: Mapping[str, str]) -> Choice:
    """Times over an axis, a line per schedule with interval and bound; a panel per values of all other axes."""
    axes = tuple(each for each in varying(found.rows) if each not in (x, "schedule"))
    rows = found.rows.assign(least_s=least_times(found.rows)).sort_values(x, kind="stable")
    panels = groups(records_of(rows), axes)
    values = sorted(set(rows[x]))
    shown = values[:: -max(1, len(values) // 12)][::-1]
    decades = range(math.floor(math.log10(rows["least_s"].min())), math.ceil(math.log10(rows["least_s"].max())) + 1)
    layout = {
        "xaxis": {"title": {"text": title_of(x)}, "type": "log" if min(values) > 0 else "linear",
                  "tickvals": shown, "ticktext": [text_of(x, each) for each in shown]},
        "yaxis": {"title": {"text": "time"}, "type": "log",
                  "tickvals": [10.0**each for each in decades],
                  "ticktext": [text_of("time_s", 10.0**each) for each in decades]},
        "hovermode": "closest", "height": 520,
        "legend": {"orientation": "h", "y": -0.18, "title": {"text": ""}},
    }  # fmt: skip
    traces = [
        [trace for (name,), line in groups(panel, ["schedule"]).items() for trace in _line(name, line, x, colors[name])]
        for panel in panels.values()
    ]
    return Choice("curves", tuple(map(title_of, axes)), list(panels), traces, styled(layout))


def _line(name: str, line: Sequence[Cells], x: str, color: str) -> Iterator[dict[str, Any]]:
    """The traces of a schedule: its interval, its bound, and its points, which tell all about themselves."""
    series = {
        column: [row[column] for row in line] for column in (x, "time_low_s", "time_high_s", "bound_s", "least_s")
    }
    around = {"type": "scatter", "x": series[x], "mode": "lines", "line": {"width": 0}, "legendgroup": name,
              "showlegend": False, "hoverinfo": "skip"}  # fmt: skip
    yield around | {"y": series["time_low_s"]}
    yield around | {"y": series["time_high_s"], "fill": "tonexty", "fillcolor": faint(color)}
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


def faint(color: str) -> str:
    """A colour that others show through.

    >>> faint("#4477aa")
    'rgba(68,119,170,0.12)'
    """
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.12)"
