"""Pictures of the page that show one panel at a time: what they have in common."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tasp_lab.study.columns import text_of, title_of
from tasp_lab.study.show import range_of
from tasp_lab.study.winners import Cells

FAINT = "rgba(0,0,0,0)"


@dataclass(frozen=True)
class Choice:
    """A picture with one panel shown at a time.

    Parameters
    ----------
    name : its element on the page.
    axes : the columns that the panels differ in, by their titles.
    keys : for each panel its values of `axes`, as texts.
    panels : for each panel its traces, as plotly has them.
    layout : of all panels.
    """

    name: str
    axes: tuple[str, ...]
    keys: list[tuple[str, ...]]
    panels: list[list[dict[str, Any]]]
    layout: dict[str, Any]

    def to_dict(self) -> dict[str, object]:
        return {"axes": list(self.axes), "keys": self.keys, "panels": self.panels, "layout": self.layout}

    def options(self) -> list[tuple[str, list[str]]]:
        """For each axis its title and its values."""
        return [(axis, list(dict.fromkeys(key[place] for key in self.keys))) for place, axis in enumerate(self.axes)]


def groups(rows: Iterable[Cells], axes: Sequence[str]) -> dict[tuple[str, ...], list[Cells]]:
    """Rows by the values of some axes, as texts, in the order of the rows."""
    found: dict[tuple[str, ...], list[Cells]] = {}
    for row in rows:
        found.setdefault(tuple(text_of(axis, row[axis]) for axis in axes), []).append(row)
    return found


def hover_text(row: Cells) -> str:
    """What a point tells of itself, as lines of HTML."""
    said = [f"<b>{html.escape(str(row['schedule']))}</b>"]
    if row["status"] == "settled":
        said.append(f"at least {text_of('bound_s', row['bound_s'])}, by a bound")
    else:
        ends = range_of("time_s", row["time_low_s"], row["time_high_s"])
        said.append(f"{text_of('time_s', row['time_s'])} ({ends})")
    for name in ("speedup", "bottleneck", "exposed_share", "bound_share", "memory_bytes"):
        if row[name] is not None:
            said.append(f"{title_of(name)} {html.escape(text_of(name, row[name]))}")
    return "<br>".join(said)


def styled(layout: dict[str, Any]) -> dict[str, Any]:
    """A layout in the style of the page."""
    style = {"margin": {"l": 70, "r": 12, "t": 12, "b": 50}, "paper_bgcolor": FAINT, "plot_bgcolor": "#ffffff",
             "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#222222"},
             "hoverlabel": {"align": "left", "bgcolor": "#ffffff"}}  # fmt: skip
    axis = {"gridcolor": "#e6e6e6", "linecolor": "#999999", "zeroline": False}
    return {**style, **layout, "xaxis": {**axis, **layout["xaxis"]}, "yaxis": {**axis, **layout["yaxis"]}}
