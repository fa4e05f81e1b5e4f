"""Answers and timelines draw themselves, and notebooks show answers as tables."""

from __future__ import annotations

import pytest

import tasp_lab
import tasp_lab.plots
from tasp_lab.core.errors import OutputError, ScheduleError
from tasp_lab.prediction.question import Question


def test_an_answer_and_its_timeline_draw_the_same_bars() -> None:
    """A ring of four ranks: three messages of each rank, so twelve bars."""
    (answer,) = tasp_lab.predict("full-mesh:4", "ring", "1MiB", samples=0)
    for figure in (answer.plot(), answer.timeline.plot("mine")):
        panel = next(axes for axes in figure.axes if "ring" in axes.get_title(loc="left"))
        assert 12 in [len(each.get_paths()) for each in panel.collections]  # beside the four rows in grey
    assert "mine" in str([text.get_text() for text in answer.timeline.plot("mine").texts] + [figure.get_suptitle()])


def test_a_timeline_without_events_and_an_answer_without_a_time_are_refused() -> None:
    (answer,) = tasp_lab.predict("full-mesh:4", "ring", "1MiB", samples=0, events=False, engine="array")
    with pytest.raises(OutputError, match=r"the timeline of ring has a time only, expected one with events"):
        answer.plot()
    with pytest.raises(ScheduleError, match="no such link"):
        tasp_lab.answer(Question("torus:4x4", "direct", 64, routes="direct")).plot()


def test_notebooks_show_an_answer_as_a_table() -> None:
    (answer,) = tasp_lab.predict("full-mesh:4", "ring", "1MiB", samples=0)
    html = answer._repr_html_()
    assert html.startswith("<table><caption>full-mesh:4")
    assert "ring" in html
    assert "does not apply" in tasp_lab.answer(Question("torus:4x4", "direct", 64, routes="direct"))._repr_html_()


def test_plots_are_exported_and_imported_when_used() -> None:
    assert all(callable(getattr(tasp_lab.plots, name)) for name in tasp_lab.plots.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'draw_nothing'"):
        _ = tasp_lab.plots.draw_nothing  # type: ignore[attr-defined]
