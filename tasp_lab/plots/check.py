"""The picture of a check: the measured bus bandwidth of each collective over the band that is expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from tasp_lab.core.units import format_size
from tasp_lab.plots.timelines import MEASURED, MUTED, PREDICTED, new_figure

if TYPE_CHECKING:
    from tasp_lab.core.report import View

BAND = "#bcd3e8"
MOST_COLUMNS = 3


def draw_check(found: View) -> Figure:
    """A panel for each collective of `tasp_lab.check`; of pairs of GPUs the share that each pair reaches."""
    rows = found.rows
    title = str(found.document["text"][0])  # type: ignore[index]
    if rows and "source" in rows[0]:
        return _pairs(found, title)
    names = list(dict.fromkeys(row.get("collective", "calls") for row in rows))
    columns = min(len(names), MOST_COLUMNS)
    figure = new_figure(title, 3.2 * -(-len(names) // columns) + 0.6)
    grid = figure.subplots(-(-len(names) // columns), columns, squeeze=False).ravel()
    for name, axes in zip(names, grid, strict=False):
        own = sorted((row for row in rows if row.get("collective", "calls") == name), key=lambda row: row["size_bytes"])
        sizes = [row["size_bytes"] for row in own]
        if "expected_s" in own[0]:
            rates = [row["expected_busbw_bytes_per_s"] / 1e9 for row in own]
            low = [rate * row["expected_s"] / row["expected_high_s"] for rate, row in zip(rates, own, strict=True)]
            high = [rate * row["expected_s"] / row["expected_low_s"] for rate, row in zip(rates, own, strict=True)]
            if len(own) > 1:
                axes.fill_between(sizes, low, high, color=BAND, linewidth=0, label="expected, 5 to 95 %")
            else:  # a band of one size has no width
                axes.vlines(sizes, low, high, color=BAND, linewidth=6, label="expected, 5 to 95 %")
            axes.plot(sizes, rates, color=PREDICTED, marker="_", linewidth=1.2, label="expected")
        measured = [row.get("measured_busbw_bytes_per_s", row["size_bytes"] / row["measured_s"]) / 1e9 for row in own]
        axes.plot(sizes, measured, color=MEASURED, marker="o", markersize=4, linewidth=1, label="measured")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
        axes.yaxis.set_major_formatter(plain := FuncFormatter(lambda rate, _: f"{rate:g}"))
        bottom, top = axes.get_ylim()
        axes.yaxis.set_minor_formatter(plain if top < 10 * bottom else NullFormatter())
        axes.tick_params(axis="x", labelrotation=30)
        axes.set(title=name, xlabel="size", ylabel="bus bandwidth, GB/s")
        axes.grid(color=MUTED, alpha=0.2)
    for axes in grid[len(names) :]:
        axes.set_visible(False)
    grid[0].legend(frameon=False, fontsize=8)
    return figure


def _pairs(found: View, title: str) -> Figure:
    n = 1 + max(max(row["source"], row["destination"]) for row in found.rows)
    shares = [[float("nan")] * n for _ in range(n)]
    for row in found.rows:
        shares[row["source"]][row["destination"]] = row["share"]
    figure = new_figure(title, 4.5)
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1.1, cmap="cividis")
    axes.set(xlabel="to GPU", ylabel="from GPU", xticks=range(n), yticks=range(n))
    figure.colorbar(image, ax=axes, label="share of what is expected")
    return figure
