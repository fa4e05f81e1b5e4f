"""The lab's overview: predicted and measured times as bars, bounds as lines."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from experiments.lab import Bar, draw_comparison
from tasp_lab.plots.timelines import render


def lines_of(axes: Axes) -> list[LineCollection]:
    return [collection for collection in axes.collections if isinstance(collection, LineCollection)]


def writings(panel: Axes) -> list[str]:
    return [child.get_text() for child in panel.get_children() if isinstance(child, Annotation)]


def test_bars_whiskers_and_bounds() -> None:
    rows = [Bar("full-mesh:8, ring", 1.68, 1.75, 0.1, 0.24), Bar("full-mesh:8, multi-ring", 0.24, 0.257, 0.04, 0.24)]
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
    (axes,) = draw_comparison([Bar("a", 1.0, 1.0, 0.0, 1.0), Bar("b", longest_s, 2.0, 0.0, 2.0)], "").axes
    assert axes.get_xscale() == scale
    assert axes.get_xlim()[0] < 1.0
    assert axes.get_xlim()[1] > longest_s


def test_long_names_and_repeats_that_differ_a_lot_can_be_drawn() -> None:
    figure = draw_comparison([Bar("long " * 30, 1e-6, 1e-3, 1.0, 1e-9), Bar("b", 1e3, 1e3, 0.0, 1.0)], "AllGather")
    assert render(figure, "pdf")
    ElementTree.fromstring(render(figure, "svg"))
