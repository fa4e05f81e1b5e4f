"""Plots, each a matplotlib `Figure` of given data; imported when first used::

    from tasp_lab.plots import draw_decomposition, draw_timelines

    draw_timelines([each.timeline for each in tasp_lab.predict("h100-8", ["ring", "multi-ring"], "1MiB")], "AllGather")
    draw_decomposition(tasp_lab.decompose("full-mesh:8"), "rings of a full mesh")

`Answer.plot` and `Timeline.plot` draw one of them.
"""

from importlib import import_module

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from tasp_lab.plots.accuracy import draw_rows, draw_tables
    from tasp_lab.plots.rings import draw_decomposition
    from tasp_lab.plots.study import draw_curves, draw_maps
    from tasp_lab.plots.timelines import draw_timelines

__all__ = ["draw_curves", "draw_decomposition", "draw_maps", "draw_rows", "draw_tables", "draw_timelines"]

_MODULES = {
    "draw_timelines": "timelines",
    "draw_decomposition": "rings",
    "draw_curves": "study",
    "draw_maps": "study",
    "draw_rows": "accuracy",
    "draw_tables": "accuracy",
}


def __getattr__(name: str) -> object:
    """Import a plot when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
