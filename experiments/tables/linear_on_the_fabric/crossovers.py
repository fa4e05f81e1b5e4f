"""Where All-Scan and LASP pass gathers of states, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from experiments.common import Record, markdown_table
from experiments.tables.linear_on_the_fabric.layers import (
    LAYER,
    MESH,
    NODES,
    REPEATS,
    all_scan,
    kib,
    state_bytes,
    state_s,
    times_of,
)
from experiments.tables.on_the_fabric import (
    NO_COMPUTE,
    Part,
    Variant,
    rows_on_fabric,
)
from tasp_lab.schedules.attention.options import AttentionOptions

SCAN = "all-scan"
"""All-Scan in as many pieces as a sweep says."""


@dataclass(frozen=True)
class Sweep:
    """Schedules at several values of a quantity, and pairs of which the times cross; those of `fixed` do not change.

    `at` is the part at a value, and `swept` are the schedules there.
    """

    quantity: str
    values: tuple[float, ...]
    at: Callable[[float], Part]
    swept: Callable[[float], Sequence[Variant]]
    pairs: tuple[tuple[str, str], ...]
    fixed: tuple[Variant, ...] = ()


LARGER = replace(LAYER, head_dim=96)
"""Hops of smaller states are shortened by the bucket of an idle link, see `hops`."""


def _rings(count: int) -> Variant:
    return Variant("multi-ring-lasp-2", AttentionOptions(), count)


def _slower_nics(ratio: float) -> Part:
    return Part(NODES, LARGER, nics_slower_by=ratio)


SWEEPS = {
    "pieces": Sweep(
        "pieces",
        (2, 4, 7, 14),
        lambda _: Part(MESH, LARGER),
        lambda pieces: [all_scan(int(pieces), "forward")],
        tuple((SCAN, _rings(count).label) for count in (2, 4)),
        tuple(map(_rings, (2, 4))),
    ),
    "nics": Sweep(
        "times slower NICs",
        (1, 1.5, 2.5, 4),
        _slower_nics,
        lambda _: [
            *(all_scan(pieces, "forward") for pieces in (1, 7)),
            *(Variant(name, AttentionOptions()) for name in ("direct-lasp-2", "multi-ring-lasp-2")),
        ],
        (("lasp", "direct-lasp-2"), ("all-scan, 7 pieces", "multi-ring-lasp-2")),
    ),
}


def measure_sweep(sweep: Sweep, repeats: int = REPEATS) -> Record:
    """The forward passes of all schedules of a sweep, without compute."""
    rows = []
    for value in sweep.values:
        part, is_first = sweep.at(value), value == sweep.values[0]
        facts = {"value": value, "state_bytes": state_bytes(part.layer), "state_s": state_s(part)}
        for is_fixed, variants in ((False, sweep.swept(value)), (True, sweep.fixed if is_first else ())):
            found = rows_on_fabric(part, variants, NO_COMPUTE, repeats)
            rows += [facts | {"is_fixed": is_fixed} | row for row in found]
    return {"topology": part.topology, "scale": sweep.at(1).scale, "repeats": repeats, "rows": rows}


class Crossover(NamedTuple):
    """Where two curves cross: predicted, measured, and the interval of the repeats; NaN where they do not."""

    first: str
    second: str
    predicted: float
    measured: float
    low: float
    high: float


def crossing(values: Sequence[float], first: Sequence[float], second: Sequence[float]) -> float:
    """Where the ratio of two curves passes 1, its logarithm interpolated in that of the value; else NaN.

    >>> crossing([1, 4], [2, 1], [1, 2])
    2.0
    """
    x, y = np.log(values), np.log(np.array(first) / np.array(second))
    for at in range(len(x) - 1):
        if y[at] * y[at + 1] < 0 or (y[at] == 0) != (y[at + 1] == 0):
            return float(np.exp(x[at] - y[at] * (x[at + 1] - x[at]) / (y[at + 1] - y[at])))
    return float("nan")


Curve = Mapping[float, Record]
"""Rows of a schedule by the value of what is swept."""


def curve(rows: Sequence[Record], name: str) -> Curve:
    """The rows of a schedule, at all values if it does not depend on them; `SCAN` are those in any number of pieces."""
    fixed = [row for row in rows if row["is_fixed"] and row["schedule"] == name]
    if fixed:
        return dict.fromkeys((row["value"] for row in rows), fixed[0])
    swept = [row for row in rows if not row["is_fixed"]]
    return {row["value"]: row for row in swept if name in (SCAN, row["schedule"])}


def crossover(rows: Sequence[Record], pair: tuple[str, str]) -> Crossover:
    """Where two schedules cross: by medians, and the fastest repeats of one against the slowest of the other."""
    first, second = (curve(rows, name) for name in pair)

    def at(one: Callable[[Record], float], other: Callable[[Record], float]) -> float:
        return crossing(list(first), [one(each) for each in first.values()], [other(second[each]) for each in first])

    ends = at(_fastest, _slowest), at(_slowest, _fastest)
    return Crossover(*pair, at(_predicted, _predicted), at(_measured, _measured), min(ends), max(ends))


def _predicted(row: Record) -> float:
    return float(row["predicted_s"])


def _measured(row: Record) -> float:
    return float(row["measured_s"])


def _fastest(row: Record) -> float:
    return float(min(row["measured_repeats_s"]))


def _slowest(row: Record) -> float:
    return float(max(row["measured_repeats_s"]))


def sweep_text(sweep: Sweep, part: Record) -> str:
    columns = ("schedule", sweep.quantity, "theory, tau", "predicted s", "measured s", "spread s", "error",
               "cores busy")  # fmt: skip
    cells = [
        [
            row["schedule"],
            "" if row["is_fixed"] else f"{row['value']:g}",
            f"{row['nominal_s'] / row['state_s']:.3f}",
            *times_of(row),
        ]
        for row in part["rows"]
    ]
    found = "; ".join(
        f"{each.first} and {each.second} at {each.predicted:.2f} {sweep.quantity} predicted, {each.measured:.2f} "
        f"measured ({each.low:.2f} to {each.high:.2f})"
        for each in (crossover(part["rows"], pair) for pair in sweep.pairs)
    )
    size = kib(part["rows"][0]["state_bytes"])
    return (
        f"Forward on {part['topology']} without compute, states of {size}, by {sweep.quantity}, scale "
        f"{part['scale']:.3g}, medians of {part['repeats']}:\n\n{markdown_table(columns, cells)}\n\nCrossovers, "
        f"interpolated, with those of the fastest repeats of one against the slowest of the other: {found}."
    )
