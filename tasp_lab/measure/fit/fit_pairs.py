"""Fit the effective bandwidth of links to tables of pairs.

A single active pair uses a link, or a GPU's port into a switch, alone. With all pairs active, the figures of a mesh are
those of its links; on a switch, the figure of a port is the sum of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.profile import Profile
from tasp_lab.measure.fit.cases import file_of
from tasp_lab.measure.fit.fit_profile import Finding
from tasp_lab.measure.readers import PairTable


@dataclass(frozen=True)
class PairFigure:
    """Median of one table's `count` figures, with the interval of 95 % of them, in SI units.

    `what` is the table's kind, or ``latency``. `constant` is the constant that it identifies, empty for information
    only; `note` describes how the figures were measured.
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
    """Figures of a table of pairs on a machine of this profile.

    One transfer at a time identifies `link_payload`, all at once `link_many_payload`. Transfers in both directions,
    those through host memory, and latencies are for information: the tools measure the latency of a waiting kernel, not
    of a wire.

    Raises `FitError` for more GPUs than a node of the profile has, and for a figure above the rate of its links.
    """
    count = len(table.bandwidth_bytes_per_s)
    if count > profile.ranks_per_node:
        raise FitError(f"{table.name}: {count} GPUs, but a node of {profile.name} has {profile.ranks_per_node}")
    constant, note = _identified(table, profile)
    others = _others(table.bandwidth_bytes_per_s)
    is_port = constant == "link_many_payload" and profile.inside == "switch"
    figures = np.nansum(others, axis=1) if is_port else others
    found = _figure(table, table.kind, constant if constant in profile.parameters else "", note, figures)
    if any(figure.constant for figure in found):
        _check(found[0], profile)
    if table.latency_s is not None:
        note = "of a kernel that waits, not of the link"
        found += _figure(table, "latency", "", note, _others(table.latency_s))
    return found


def _identified(table: PairTable, profile: Profile) -> tuple[str, str]:
    """The constant that a table identifies, empty for none, and how its figures were measured."""
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
    """The figure in a list; empty without measurements."""
    known = figures[np.isfinite(figures)]
    if not len(known):
        return []
    low, middle, high = np.quantile(known, [0.025, 0.5, 0.975]).tolist()
    return [PairFigure(table.name, what, constant, note, len(known), middle, low, high)]


def _check(figure: PairFigure, profile: Profile) -> None:
    line = profile.parameters.numbers["link_bandwidth"]
    if figure.value > line:
        texts = [CONSTANTS["link_bandwidth"].format(value, 4) for value in (figure.value, line)]
        raise FitError(f"{figure.table}: {texts[0]} between GPUs, but links of {profile.name} carry {texts[1]}")


def pair_findings(figures: Iterable[PairFigure], profile: Profile) -> Sequence[Finding]:
    """The constants that these figures identify; of several figures of a constant, the last."""
    found = {}
    for figure in figures:
        if figure.constant:
            before, origin = profile.parameters.numbers[figure.constant], f"{file_of(figure.table)} ({figure.note})"
            found[figure.constant] = Finding(
                figure.constant, before, figure.value, figure.low, figure.high, origin=origin
            )
    return list(found.values())
