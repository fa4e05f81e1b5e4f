"""Maps of the page: the fastest schedule over two axes."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from tasp_lab.study.columns import records_of, text_of, title_of
from tasp_lab.study.report.choice import Choice, groups, hover_text, styled
from tasp_lab.study.show import WinnerTable
from tasp_lab.study.winners import Cells

STRONG, PALE = 0.75, 0.32
"""How strong the colour of a winner is that is sure, and of one that is too close to call."""


def winner_map(found: WinnerTable, x: str, y: str, colors: Mapping[str, str]) -> Choice:
    """The fastest schedule over two axes, in its colour; a panel per values of the others."""
    axes = tuple(each for each in found.axes if each not in (x, y))
    panels = groups(records_of(found.table), axes)
    maps = [[_heat_map(panel, x, y, colors)] for panel in panels.values()]
    rows = found.table[y].nunique()
    layout = {"xaxis": {"title": {"text": title_of(x)}, "type": "category", "fixedrange": True},
              "yaxis": {"automargin": True, "type": "category", "autorange": "reversed", "fixedrange": True},
              "height": 140 + 34 * rows}  # fmt: skip
    return Choice("map", tuple(map(title_of, axes)), list(panels), maps, styled(layout))


def _heat_map(rows: Sequence[Cells], x: str, y: str, colors: Mapping[str, str]) -> dict[str, Any]:
    """One map; cells without a winner are empty."""
    columns, lines = sorted({row[x] for row in rows}), list(dict.fromkeys(row[y] for row in rows))
    cells = {(row[y], row[x]): row for row in rows}
    grid = [[cells.get((line, column)) for column in columns] for line in lines]
    places = {name: 2 * place for place, name in enumerate(colors)}
    shades = [blended(color, share) for color in colors.values() for share in (STRONG, PALE)]
    return {
        "type": "heatmap",
        "x": [text_of(x, each) for each in columns],
        "y": [text_of(y, each) for each in lines],
        "z": [[None if each is None else _place(each, places) for each in line] for line in grid],
        "zmin": 0,
        "zmax": len(shades) - 1,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
        "colorscale": [[place / (len(shades) - 1), shade] for place, shade in enumerate(shades)],
        "text": [["" if each is None else _cell_text(each) for each in line] for line in grid],
        "customdata": [["" if each is None else _cell_hover(each) for each in line] for line in grid],
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


def _place(row: Cells, places: Mapping[str, int]) -> int:
    """The place of a cell's colour among those of all schedules, a strong and a pale one each."""
    return places[row["schedule"]] + bool(row["too_close"])


def _cell_text(row: Cells) -> str:
    """The speed-up, with a mark where it is too close to call."""
    speedup = "" if row["speedup"] in (None, 1) else text_of("speedup", row["speedup"])
    return f"{speedup} ~".strip() if row["too_close"] else speedup


def _cell_hover(row: Cells) -> str:
    second = row["second"]
    then = "" if second is None else f"<br>then {html.escape(second)}, {row['margin'] - 1:.1%} slower"
    close = f"<br>too close to call: {html.escape(', '.join(row['too_close']))}" if row["too_close"] else ""
    return hover_text({**row, "status": "ok"}) + then + close
