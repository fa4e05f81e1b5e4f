"""What tables of pairs tell of a profile: what protocols leave of its links.

A pair alone has a link, or a GPU's port into a switch, for itself. With all pairs at once a mesh shows what each of its
links carries then, and a switch what a port does, which is the sum of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tasp_lab.arrays import FloatArray
from tasp_lab.calibrate import Finding, constant_text, file_of
from tasp_lab.errors import FitError
from tasp_lab.measurements import PairTable
from tasp_lab.profile import Profile


@dataclass(frozen=True)
class PairFigure:
    """What one table says: the median of `count` figures, and between what 95 % of them lie, in SI units.

    `what` is the table's kind, or ``latency``. `constant` is the one that it tells, empty if it is for information
    only; `note` says how the figures came about.
    """

    table: str
    what: str
    constant: str
    note: str
    count: int
    value: float
    low: float
    high: float


def pair_figures(table: PairTable, profile: Profile) -> list[PairFigure]:
    """What a table of pairs says of a machine of this profile.

    It tells `link_payload` if one transfer was under way at a time, `link_many_payload` if all were. Transfers in both
    directions, those that went through a host's memory, and latencies are for information: what the tools call latency
    is that of a kernel that waits, not of a wire.

    Raises `FitError` for more GPUs than a node of the profile has, and for more than its links carry.
    """
    count = len(table.bandwidth_bytes_per_s)
    if count > profile.ranks_per_node:
        raise FitError(f"{table.name}: {count} GPUs, but a node of {profile.name} has {profile.ranks_per_node}")
    constant, note = _told(table, profile)
    others = _others(table.bandwidth_bytes_per_s)
    is_port = constant == "link_many_payload" and profile.inside == "switch"
    figures = np.nansum(others, axis=1) if is_port else others
    found = _figure(table, table.kind, constant if profile.has(constant) else "", note, figures)
    if any(figure.constant for figure in found):
        _check(found[0], profile)
    if table.latency_s is not None:
        note = "of a kernel that waits, not of the wire"
        found += _figure(table, "latency", "", note, _others(table.latency_s))
    return found


def _told(table: PairTable, profile: Profile) -> tuple[str, str]:
    """The constant that a table tells, empty for none, and how its figures came about."""
    if table.peer_to_peer is False:
        return "", "without peer access, through the host's memory"
    alone = table.kind == "transfers" and np.isfinite(_others(table.bandwidth_bytes_per_s)).sum() == 1
    if table.kind == "unidirectional" or alone:
        return "link_payload", "one transfer at a time"
    if table.kind == "all-to-all":
        what = "link" if profile.inside == "full-mesh" else "GPU's port"
        return "link_many_payload", f"each {what}, all transfers at once"
    return "", "several transfers at once"


def _others(matrix: FloatArray) -> FloatArray:
    """The figures between different GPUs; nan on the diagonal."""
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)


def _figure(table: PairTable, what: str, constant: str, note: str, figures: FloatArray) -> list[PairFigure]:
    """The figure in a list, which is empty where nothing was measured."""
    known = figures[np.isfinite(figures)]
    if not len(known):
        return []
    low, middle, high = np.quantile(known, [0.025, 0.5, 0.975]).tolist()
    return [PairFigure(table.name, what, constant, note, len(known), middle, low, high)]


def _check(figure: PairFigure, profile: Profile) -> None:
    line = profile.number("link_bandwidth")
    if figure.value > line:
        texts = [constant_text("link_bandwidth", value, 4) for value in (figure.value, line)]
        raise FitError(f"{figure.table}: {texts[0]} between GPUs, but links of {profile.name} carry {texts[1]}")


def pair_findings(figures: Iterable[PairFigure], profile: Profile) -> Sequence[Finding]:
    """The constants that such figures tell; where several tell the same, the last of them."""
    found = {}
    for figure in figures:
        if figure.constant:
            before, origin = profile.number(figure.constant), f"{file_of(figure.table)} ({figure.note})"
            found[figure.constant] = Finding(
                figure.constant, before, figure.value, figure.low, figure.high, origin=origin
            )
    return list(found.values())
