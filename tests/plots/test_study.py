"""Pictures of studies: what is drawn, and what the legend says of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tasp_lab.plots.study import MAX_LINES, Scale, Words, draw_curves, draw_maps
from tasp_lab.plots.timelines import render

NONE = (math.nan, math.nan)
LENGTHS = Scale("length", "{:.0f}".format, True)
TIMES = Scale("time", "{:.2g} s".format, True)
WORDS = Words("a study: time by length", "all with mask causal\n2 rows", "length", "machine")


def curve(line: str, y: tuple[float, float] = (1.0, 3.0), panel: str = "", **changed: Any) -> pd.DataFrame:
    points = {"panel": panel, "line": line, "x": (8192.0, 16384.0), "y": y}
    return pd.DataFrame(points | dict.fromkeys(("low", "high", "bound", "limit"), NONE) | changed)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for each in figure.legends for text in each.get_texts()]


def test_lines_have_one_style_in_all_panels() -> None:
    names = [f"schedule-{number}" for number in range(MAX_LINES)]
    one, two = [curve(name, panel="one") for name in names], [curve(name, panel="two") for name in reversed(names)]
    figure = draw_curves(pd.concat([*one, *two]), LENGTHS, TIMES, WORDS)
    assert legend(figure) == names
    styles = [
        [(line.get_color(), line.get_marker()) for line in axes.get_lines() if line.get_linestyle() == "-"]
        for axes in figure.axes[:2]
    ]
    assert styles[0] == styles[1][::-1]
    assert len(set(styles[0])) == MAX_LINES


@settings(max_examples=15)
@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), min_size=1, max_size=4))
def test_points_are_where_their_values_are(values: list[tuple[float, float]]) -> None:
    figure = draw_curves(pd.concat([curve(f"s{n}", y) for n, y in enumerate(values)]), LENGTHS, TIMES, WORDS)
    drawn = [tuple(line.get_ydata()) for line in figure.axes[0].get_lines() if line.get_linestyle() == "-"]
    assert drawn == values
    low, high = figure.axes[0].get_ylim()
    assert low < min(map(min, values)) <= max(map(max, values)) < high


@pytest.mark.parametrize(
    ("changed", "entry"),
    [
        ({"low": (0.5, 1.0), "high": (2.0, 4.0)}, "interval"),
        ({"bound": (0.5, 1.0)}, "bound"),
        ({"limit": (5.0, math.nan)}, "pruned by its bound"),
    ],
)
def test_the_legend_names_what_is_drawn_and_nothing_else(changed: dict[str, tuple[float, float]], entry: str) -> None:
    assert legend(draw_curves(curve("tasp"), LENGTHS, TIMES, WORDS)) == ["tasp"]
    assert legend(draw_curves(curve("tasp", **changed), LENGTHS, TIMES, WORDS)) == ["tasp", entry]


def test_a_bound_that_all_share_is_drawn_once() -> None:
    def dashed(*lines: pd.DataFrame) -> int:
        axes = draw_curves(pd.concat(lines), LENGTHS, TIMES, WORDS).axes[0]
        return sum(line.get_linestyle() == "--" for line in axes.get_lines() if np.isfinite(line.get_ydata()).any())

    one = curve("tasp", bound=(0.5, 1.0))
    assert dashed(one, curve("ulysses", bound=(0.5, 1.0))) == 1
    assert dashed(one, curve("ulysses", bound=(0.5, 2.0))) == 2


def test_categories_are_points_beside_each_other() -> None:
    names = Scale("machine", str, False, ("h100-8", "mi300x-8"))
    two = [curve(name, (1.0, 2.0), x=(0.0, 1.0)) for name in ("tasp", "ulysses")]
    axes = draw_curves(pd.concat(two), names, TIMES, WORDS).axes[0]
    places = [tuple(line.get_xdata()) for line in axes.get_lines() if np.isfinite(line.get_ydata()).any()]
    assert len(places) == 2
    assert places[0][0] < 0 < places[1][0] < 0.5 < places[0][1] < 1 < places[1][1]


def test_a_map_has_a_colour_per_name_paler_where_it_is_not_sure() -> None:
    rows = [("h100-8", "8Ki", "tasp", "1.5x", False), ("h100-8", "16Ki", "tasp", "1.1x ~", True),
            ("mi300x-8", "8Ki", "ulysses", "", False)]  # fmt: skip
    cells = pd.DataFrame(rows, columns=["row", "column", "value", "text", "open"]).assign(panel="")
    figure = draw_maps(cells, ["8Ki", "16Ki"], WORDS)
    (image,) = figure.axes[0].get_images()
    pixels = np.asarray(image.get_array())
    strength = 1 - pixels
    assert np.allclose(strength[0, 1] / strength[0, 0], 0.32 / 0.75)
    assert np.allclose(pixels[1, 1], 1)
    assert not np.allclose(pixels[1, 0], pixels[0, 0])
    assert legend(figure) == ["tasp", "ulysses", "pale, ~: open"]
    assert {text.get_text() for text in figure.axes[0].texts} == {"1.5x", "1.1x ~", ""}


def test_title_and_caption_are_in_every_picture() -> None:
    cells = pd.DataFrame(columns=["panel", "row", "column", "value", "text", "open"])
    for figure in (draw_curves(curve("tasp")[:0], LENGTHS, TIMES, WORDS), draw_maps(cells, [], WORDS),
                   draw_curves(curve("$1$", panel="$x$"), LENGTHS, TIMES, WORDS)):  # fmt: skip
        assert figure.get_suptitle() == WORDS.title
        assert WORDS.caption in [text.get_text() for text in figure.texts]
        assert render(figure, "png").startswith(b"\x89PNG")
