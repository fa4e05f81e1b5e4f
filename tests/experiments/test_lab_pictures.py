"""The lab's overview: predicted and measured times as bars, bounds as lines."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from fractions import Fraction

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from experiments.lab import ComparisonBar, draw_comparison
from tasp_lab.plots.timelines import render


def lines_of(axes: Axes) -> list[LineCollection]:
    return [collection for collection in axes.collections if isinstance(collection, LineCollection)]


def writings(panel: Axes) -> list[str]:
    return [child.get_text() for child in panel.get_children() if isinstance(child, Annotation)]


def test_bars_whiskers_and_bounds() -> None:
    rows = [
        ComparisonBar("full-mesh:8, ring", Fraction(168, 100), 1.75, 0.05, 0.24),
        ComparisonBar("full-mesh:8, multi-ring", 0.24, 0.257, 0.02, 0.24),
    ]
    (axes,) = draw_comparison(rows, "AllGather").axes
    widths = [patch.get_width() for patch in axes.patches if isinstance(patch, Rectangle)]
    assert widths == [1.68, 0.24, 1.75, 0.257]
    whiskers, bounds = [
        [np.asarray(path.vertices)[:, 0].tolist() for lines in group for path in lines.get_paths()]
        for group in (lines_of(axes)[:2], lines_of(axes)[2:])
    ]
    assert whiskers == [pytest.approx([1.70, 1.80]), pytest.approx([0.237, 0.277])]
    assert bounds == [[0.24, 0.24], [0.24, 0.24]]
    assert sorted(writings(axes)) == ["1.68 s", "1.75 s", "240 ms", "257 ms"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.label for row in rows]
    assert axes.get_xscale() == "linear"
    assert axes.get_xlabel() == "time (s)"


@pytest.mark.parametrize(("longest_s", "scale"), [(20.0, "linear"), (20.1, "log"), (1e6, "log")])
def test_a_wide_range_gets_a_logarithmic_axis(longest_s: float, scale: str) -> None:
    (axes,) = draw_comparison([ComparisonBar("a", 1.0), ComparisonBar("b", longest_s)], "").axes
    assert axes.get_xscale() == scale
    assert axes.get_xlim()[0] < 1.0
    assert axes.get_xlim()[1] > longest_s


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [ComparisonBar("nothing", None)],
        [ComparisonBar("zero", 0, 0, 0, 0)],
        [ComparisonBar("zero and more", 0, 1e-6, 1e-3, 1.0)],
        [ComparisonBar("only measured", None, 2.0, 5.0)],
        [ComparisonBar("only a bound", None, None, None, 1e-9), ComparisonBar("long " * 30, 5)],
        [ComparisonBar(f"row {index}", 10.0**index) for index in range(-9, 4)],
    ],
)
def test_whatever_is_unknown_or_zero_can_be_drawn(rows: list[ComparisonBar]) -> None:
    figure = draw_comparison(rows, "AllGather")
    assert render(figure, "pdf")
    ElementTree.fromstring(render(figure, "svg"))
