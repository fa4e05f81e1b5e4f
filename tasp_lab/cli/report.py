"""What commands print: tables for people, plain objects for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tasp_lab.cli import layer_report
from tasp_lab.cli.predicted import CollectivePrediction, LayerPrediction, Prediction, ratio
from tasp_lab.collectives import describe
from tasp_lab.explanation import critical_path, kind_of
from tasp_lab.quantities import format_bandwidth, format_time
from tasp_lab.timeline import SEND
from tasp_lab.topology import Topology

if TYPE_CHECKING:  # at run time a broken engine must not keep `doctor` from saying so
    from runtime.calibration import ClassFit, Spread
    from tasp_lab.cli.accuracy import TableAccuracy
    from tasp_lab.cli.comparison import Comparison, Run
    from tasp_lab.decomposition import Decomposition
    from tasp_lab.timeline import Timeline

Document = dict[str, object]

LEAST_SHARE = 0.0005
"""What takes less of the time is not shown to people."""

_WIDTH_OF_A_FILE = 170
"""Columns of a table that no terminal limits."""


def say(line: str) -> None:
    """A line of progress, for people only."""
    print(on_one_line(line), file=sys.stderr, flush=True)


def on_one_line(text: str) -> str:
    """The text without line breaks, and with an escape for each character that cannot be printed."""
    joined = " ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in joined)


def print_json(document: Document) -> None:
    """One JSON object on standard output."""
    print(json.dumps(document, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int] = (0,)) -> None:
    """A table on standard output; the columns at the positions `texts` are text, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position in texts else "right", no_wrap=position == 0)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    Console(width=width, markup=False, emoji=False).print(table)


def decomposition_document(decomposition: Decomposition) -> Document:
    return {
        "topology": decomposition.topology.name,
        "world_size": decomposition.world_size,
        "fold": decomposition.fold,
        "reason": decomposition.reason,
        "rings": decomposition.rings.tolist(),
        "shares": [float(share) for share in decomposition.shares],
        "links_used": decomposition.links_used,
        "links_total": decomposition.links_total,
        "rate_bytes_per_s": float(decomposition.rate_bytes_per_s),
        "ring_limit_bytes_per_s": float(decomposition.ring_limit_bytes_per_s),
        "bound_bytes_per_s": float(decomposition.bound_bytes_per_s),
        "share_of_bound": decomposition.share_of_bound,
        "proved_optimal": decomposition.proved_optimal,
        "beyond_rings": decomposition.beyond_rings,
    }


def print_decomposition(found: Decomposition) -> None:
    """The rings, each with its share where these differ, and how far they are from what is possible."""
    plural = "s" if len(found.rings) != 1 else ""
    print(
        f"{found.topology.name}: {len(found.rings)} ring{plural} of fold {found.fold}, "
        f"{found.links_used} of {found.links_total} links used"
    )
    print(found.reason)
    if len(found.rings):
        proof = "as much as such rings can" if found.proved_optimal else "not proved to be the most for rings"
        print(
            f"{format_bandwidth(found.rate_bytes_per_s)} into every rank ({proof}): "
            f"{found.share_of_bound:.1%} of the AllGather bound of {format_bandwidth(found.bound_bytes_per_s)}"
        )
    if found.beyond_rings:
        print("no rings reach the bound: all shards pass every cut with each ring, with trees only those that must")
    equal = len(set(found.shares)) <= 1
    for ring, share in zip(found.rings.tolist(), found.shares, strict=True):
        print(("" if equal else f"{float(share):6.2%}  ") + " ".join(str(rank) for rank in ring))


def prediction_document(prediction: Prediction) -> Document:
    if isinstance(prediction, LayerPrediction):
        return layer_report.layer_document(prediction)
    assert isinstance(prediction, CollectivePrediction), "there is no third kind"
    return {
        "schedule": prediction.schedule,
        "collective": prediction.collective,
        "topology": prediction.topology,
        "world_size": prediction.world_size,
        "shard_bytes": prediction.shard_bytes,
        "time_s": float(prediction.time_s),
        "bound_s": float(prediction.bound_s),
        "busbw_bytes_per_s": prediction.busbw_bytes_per_s,
    }


def print_predictions(predictions: Sequence[Prediction], library: str) -> None:
    """A table of predictions of one work, sent by a communication library."""
    by = "" if library == "ideal" else f", {library}"
    if layers := [p for p in predictions if isinstance(p, LayerPrediction)]:
        p = layers[0]
        where = f"{p.topology}, {p.world_size} ranks at {layer_report.format_rate(p)}{by}"
        title, (columns, texts) = layer_report.layer_title(p, where), layer_report.columns_of(layers)
        print_table(title, columns, layer_report.layer_rows(layers), texts)
        return
    collectives = [p for p in predictions if isinstance(p, CollectivePrediction)]
    first = collectives[0]
    rows = [
        (
            p.schedule,
            format_time(p.time_s),
            f"{ratio(first.time_s, p.time_s):.2f}x",
            format_bandwidth(p.busbw_bytes_per_s),
            format_time(p.bound_s),
            f"{ratio(p.bound_s, p.time_s):.1%}",
        )
        for p in collectives
    ]
    what = describe(first.collective, first.world_size, first.shard_bytes)
    title = f"{what} on {first.topology}, {first.world_size} ranks{by}"
    print_table(title, ("schedule", "time", "speed-up", "busbw", "bound", "share of bound"), rows)


def print_explanation(timeline: Timeline, topology: Topology) -> None:
    """What the time of a schedule went to, and what bound its transfers and kernel calls for how much of theirs."""
    whole_s = float(timeline.time_s) or 1.0
    parts = [(what, s) for what, s in _path(timeline, topology) if s / whole_s >= LEAST_SHARE]
    chain = [(what, format_time(s), f"{s / whole_s:.1%}") for what, s in parts]
    print_table(f"where the time of {timeline.schedule} went", ("the chain that ends last", "time", "share"), chain)
    total = sum(float(event.end_s - event.start_s) for event in timeline.events) or 1.0
    by_bound: dict[str, tuple[int, float]] = {}
    for event in timeline.events:
        count, seconds = by_bound.get(event.bound_by, (0, 0.0))
        by_bound[event.bound_by] = (count + 1, seconds + float(event.end_s - event.start_s))
    ranked = sorted(by_bound.items(), key=lambda item: -item[1][1])
    rows = [(name, str(count), format_time(s / count), f"{s / total:.1%}") for name, (count, s) in ranked[:20]]
    if len(ranked) > 20:
        rest = [values for _, values in ranked[20:]]
        count, seconds = sum(c for c, _ in rest), sum(s for _, s in rest)
        rows.append((f"{len(rest)} others", str(count), format_time(seconds / count), f"{seconds / total:.1%}"))
    counted = "transfers" if all(event.kind == SEND for event in timeline.events) else "events"
    print_table(f"what bound {timeline.schedule}", ("bound by", counted, "mean time", "share of time"), rows)


def _path(timeline: Timeline, topology: Topology) -> list[tuple[str, float]]:
    """The kinds of what the time went to, in seconds, most first."""
    spent: dict[str, float] = {}
    for what, seconds in critical_path(timeline):
        kind = kind_of(what, topology)
        spent[kind] = spent.get(kind, 0.0) + float(seconds)
    return sorted(spent.items(), key=lambda item: -item[1])


def explain(document: Document, prediction: Prediction, topology: Topology) -> None:
    """Add what the time went to, the transfers, and the kernel calls of a layer; nothing for two passes."""
    if prediction.is_sum:
        return
    document["explanation"] = [
        {"kind": kind, "seconds": seconds} for kind, seconds in _path(prediction.timeline, topology)
    ]
    document["transfers"] = explanation_document(prediction.timeline)
    if isinstance(prediction, LayerPrediction):
        document["calls"] = layer_report.calls_document(prediction.timeline)


def explanation_document(timeline: Timeline) -> list[Document]:
    return [
        {
            "step": e.step,
            "rank": e.rank,
            "peer": e.peer,
            "lane": e.lane,
            "block": e.block,
            "bytes": e.bytes,
            "start_s": float(e.start_s),
            "end_s": float(e.end_s),
            "bound_by": e.bound_by,
            "waited_for": e.waited_for,
            "spent": [{"what": what, "seconds": float(seconds)} for what, seconds in e.spent],
        }
        for e in timeline.events
        if e.kind == SEND
    ]


def accuracy_document(tables: Sequence[TableAccuracy]) -> Document:
    """The account of the error; `median_relative_error` is of the mean errors of the tables in scope."""
    return {"median_relative_error": _median_error(tables), "tables": [table.document() for table in tables]}


def _median_error(tables: Sequence[TableAccuracy]) -> float | None:
    means = [float(abs(table.errors).mean()) for table in tables if table.in_scope]
    return median(means) if means else None


def print_accuracy(tables: Sequence[TableAccuracy]) -> None:
    """The account of the error for people."""
    judged, others = [t for t in tables if t.in_scope], [t for t in tables if not t.in_scope]
    rows = [
        (
            Path(table.table.name).name,
            str(table.table.profile),
            str(table.table.collective),
            str(table.table.ranks),
            str(len(table.errors)),
            f"{abs(table.errors).mean():.1%}",
            f"{abs(table.errors).max():.1%}",
            f"{table.errors.mean():+.1%}",
            table.dominant_rule,
        )
        for table in judged
    ]
    heads = ("table", "profile", "collective", "ranks", "sizes", "mean error", "worst", "bias", "mostly")
    if judged:
        print_table("predicted over measured", heads, rows, texts=(0, 1, 2, 8))
    if others:
        left_out = [(Path(table.table.name).name, table.reason) for table in others]
        print_table("not compared", ("table", "reason"), left_out, texts=(0, 1))
    if judged:
        print(f"median of the mean errors of {len(judged)} tables: {_median_error(tables):.1%}")
    else:
        print("no table to compare")


def comparison_document(comparison: Comparison) -> Document:
    return {
        "fabric": comparison.fabric,
        "scale": comparison.scale,
        "calibration": [
            *(_fit_document(fit) for fit in comparison.calibration.fits),
            *(_kernel_document(run) for run in comparison.runs if run.compute == "real" and not run.prediction.is_sum),
        ],
        "runs": [run_document(run) for run in comparison.runs],
    }


def run_document(run: Run) -> Document:
    computed = {"compute": run.compute} if isinstance(run.prediction, LayerPrediction) else {}
    return (
        prediction_document(run.prediction)
        | computed
        | {
            "predicted_s": float(run.prediction.time_s),
            "nominal_s": float(run.nominal_s),
            "measured_s": run.measured_s,
            "measured_spread_s": run.measured_spread_s,
            "measured_repeats_s": list(run.measured),
            "relative_error": run.relative_error,
            "cpu_busy_share": run.cpu_busy_share,
        }
    )


def _fit_document(fit: ClassFit) -> Document:
    return {
        "pairs": [list(pair) for pair in fit.route_class.pairs],
        "links_per_route": fit.route_class.links,
        "nominal_bandwidth_bytes_per_s": fit.route_class.nominal_bandwidth_bytes_per_s,
        "bandwidth_bytes_per_s": _spread_document(fit.bandwidth_bytes_per_s),
        "latency_s": _spread_document(fit.latency_s),
        "launch_s": _spread_document(fit.launch_s),
    }


def _kernel_document(run: Run) -> Document:
    """The rate of a schedule's kernel calls."""
    prediction = prediction_document(run.prediction)
    return {key: prediction[key] for key in ("schedule", "pass", "compute_flops_per_s")}


def _spread_document(spread: Spread) -> Document:
    return {"value": spread.value, "low": spread.low, "high": spread.high}


def print_comparison(comparison: Comparison) -> None:
    scale = f", scale {comparison.scale:.3g}" if comparison.fabric == "emulated" else ""
    fabric = f"{comparison.fabric} fabric{scale}"
    if layers := [(run.prediction, run) for run in comparison.runs if isinstance(run.prediction, LayerPrediction)]:
        p, run = layers[0]
        computing = "real kernels" if run.compute == "real" else f"timed at {layer_report.format_rate(p)}"
        title = layer_report.layer_title(p, f"{p.topology}, {fabric}, {computing}")
        columns, texts = layer_report.columns_of([p for p, _ in layers], layer_report.COMPARED_COLUMNS)
        print_table(title, columns, layer_report.compared_rows(layers), texts)
        return
    first = comparison.runs[0]
    rows = [
        (
            run.prediction.schedule,
            format_time(run.prediction.time_s),
            format_time(run.nominal_s),
            f"{format_time(run.measured_s)} ± {format_time(run.measured_spread_s / 2)}",
            f"{run.relative_error:+.1%}",
            f"{ratio(first.prediction.time_s, run.prediction.time_s):.2f}x",
            f"{ratio(first.measured_s, run.measured_s):.2f}x",
            f"{ratio(run.prediction.bound_s, run.measured_s):.1%}",
            f"{run.cpu_busy_share:.0%}",
        )
        for run in comparison.runs
    ]
    found = first.prediction
    assert isinstance(found, CollectivePrediction), "there is no third kind"
    title = f"{describe(found.collective, found.world_size, found.shard_bytes)} on {found.topology}, {fabric}"
    columns = ("schedule", "predicted", "nominal", "measured", "error", "speed-up predicted", "speed-up measured",
               "share of bound", "cores busy")  # fmt: skip
    print_table(title, columns, rows)
