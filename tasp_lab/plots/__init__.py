"""Plots, each a matplotlib `Figure` of given data; imported when first used::

    from tasp_lab.plots import draw_decomposition, draw_timelines

    draw_timelines([each.timeline for each in tasp_lab.predict("h100-8", ["ring", "multi-ring"], "1MiB")], "AllGather")
    draw_decomposition(tasp_lab.decompose("full-mesh:8"), "rings of a full mesh")

`Answer.plot` and `Timeline.plot` draw one of them.
"""

from tasp_lab.core.lazy import lazy_names

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from tasp_lab.plots.accuracy import draw_tables
    from tasp_lab.plots.rings import draw_decomposition
    from tasp_lab.plots.study import draw_curves, draw_maps
    from tasp_lab.plots.timelines import draw_timelines

__all__ = ["draw_curves", "draw_decomposition", "draw_maps", "draw_tables", "draw_timelines"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "draw_timelines": "tasp_lab.plots.timelines",
        "draw_decomposition": "tasp_lab.plots.rings",
        "draw_curves": "tasp_lab.plots.study",
        "draw_maps": "tasp_lab.plots.study",
        "draw_tables": "tasp_lab.plots.accuracy",
    },
)
