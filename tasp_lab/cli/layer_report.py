"""What commands say of attention layers: the fields of `--json`, and the tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasp_lab.cli.predicted import PASS_NAMES, LayerPrediction, ratio
from tasp_lab.quantities import format_flops, format_size_about, format_time
from tasp_lab.timeline import SEND, Timeline

if TYPE_CHECKING:
    from tasp_lab.cli.comparison import Run

Document = dict[str, object]

COLUMNS = ("schedule", "time", "speed-up", "CCR", "compute", "communication", "bytes sent", "bound", "share of bound")

COMPARED_COLUMNS = ("schedule", "predicted", "nominal", "measured", "error", "speed-up predicted", "speed-up measured",
                    "CCR", "cores busy")  # fmt: skip


def layer_document(prediction: LayerPrediction) -> Document:
    """The row of a layer."""
    p, layer = prediction, prediction.layer
    return {
        "schedule": p.schedule,
        "topology": p.topology,
        "world_size": p.world_size,
        "seq": layer.sequence,
        "batch": layer.batch,
        "heads": layer.heads,
        "kv_heads": layer.kv_head_count,
        "head_dim": layer.head_dim,
        "dtype": layer.dtype,
        "mask": layer.mask,
        "window": layer.window,
        "documents": None if layer.documents is None else list(layer.documents),
        "pass": p.passing,
        "way": p.way,
        "gradient_dtype": p.gradient_dtype,
        "trim": p.options.trim,
        "rooms": p.options.rooms,
        "compute_flops_per_s": None if p.compute_flops_per_s is None else float(p.compute_flops_per_s),
        "time_s": float(p.time_s),
        "bound_s": float(p.bound_s),
        "compute_s": float(p.compute_s),
        "communication_s": float(p.communication_s),
        "ccr": p.ccr,
        "bytes_sent": p.bytes_sent,
        "buffer_bytes": p.buffer_bytes,
        "flops": p.flops,
    }


def calls_document(timeline: Timeline) -> list[Document]:
    """The kernel calls of a timeline."""
    return [
        {
            "step": e.step,
            "rank": e.rank,
            "start_s": float(e.start_s),
            "end_s": float(e.end_s),
            "flops": e.flops,
            "waited_for": e.waited_for,
        }
        for e in timeline.events
        if e.kind != SEND
    ]


def layer_title(prediction: LayerPrediction, where: str) -> str:
    """The layer and where it is computed, on one line."""
    layer = prediction.layer
    heads = f"{layer.heads} heads" + ("" if layer.kv_head_count == layer.heads else f" ({layer.kv_head_count} KV)")
    batch = "" if layer.batch == 1 else f"{layer.batch} x "
    window = "" if layer.window is None else f" in a window of {layer.window}"
    documents = "" if layer.documents is None else f" in {len(layer.documents)} documents"
    return (
        f"{layer.mask.capitalize()} attention{window}, {PASS_NAMES[prediction.options.passes]}, "
        f"{batch}{layer.sequence} positions{documents}, {heads} of {layer.head_dim}, {layer.dtype}, on {where}"
    )


def format_rate(prediction: LayerPrediction) -> str:
    rate = prediction.compute_flops_per_s
    return "no time" if rate is None else format_flops(rate)


def columns_of(
    predictions: Sequence[LayerPrediction], columns: tuple[str, ...] = COLUMNS
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The columns with one for the pass where it is not plainly forward, and the positions of those with text."""
    if not _names_passes(predictions):
        return columns, (0,)
    return (columns[0], "pass", *columns[1:]), (0, 1)


def layer_rows(predictions: Sequence[LayerPrediction]) -> list[tuple[str, ...]]:
    """A row per prediction, with `COLUMNS`; speed-ups are over the first schedule's same pass."""
    first = {p.passing: p for p in reversed(predictions)}
    return [
        (
            *_head(p, predictions),
            format_time(p.time_s),
            f"{ratio(first[p.passing].time_s, p.time_s):.2f}x",
            format_ccr(p),
            format_time(p.compute_s),
            format_time(p.communication_s),
            format_size_about(p.bytes_sent),
            format_time(p.bound_s),
            f"{ratio(p.bound_s, p.time_s):.1%}",
        )
        for p in predictions
    ]


def compared_rows(runs: Sequence[tuple[LayerPrediction, Run]]) -> list[tuple[str, ...]]:
    """A row per run, with `COMPARED_COLUMNS`; speed-ups are over the first schedule's same pass."""
    predictions = [p for p, _ in runs]
    first = {p.passing: (p, run) for p, run in reversed(runs)}
    return [
        (
            *_head(p, predictions),
            format_time(p.time_s),
            format_time(run.nominal_s),
            f"{format_time(run.measured_s)} ± {format_time(run.measured_spread_s / 2)}",
            f"{run.relative_error:+.1%}",
            f"{ratio(first[p.passing][0].time_s, p.time_s):.2f}x",
            f"{ratio(first[p.passing][1].measured_s, run.measured_s):.2f}x",
            format_ccr(p),
            f"{run.cpu_busy_share:.0%}",
        )
        for p, run in runs
    ]


def _names_passes(predictions: Sequence[LayerPrediction]) -> bool:
    return any(p.passing != "forward" for p in predictions)


def _head(prediction: LayerPrediction, predictions: Sequence[LayerPrediction]) -> tuple[str, ...]:
    """The schedule, and the pass and its way where passes are named."""
    if not _names_passes(predictions):
        return (prediction.schedule,)
    way = f", {prediction.way}" if prediction.passing == "backward" else ""
    return prediction.schedule, prediction.passing + way


def format_ccr(prediction: LayerPrediction) -> str:
    return "-" if prediction.ccr is None else f"{prediction.ccr:.3g}"
