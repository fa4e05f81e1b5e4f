"""Which stacks of a hybrid are compared: those of the schedules that are fastest for single layers.

There are 168 pairs of a schedule of linear and one of softmax attention on eight ranks, and a stack takes as long to
simulate as all its layers. So the schedules of each kind are predicted for one layer alone, and only the `FASTEST` of
each kind are stacked, each with each. One may be added: the fastest schedule of softmax layers of those
that need no re-layout. So may LASP-2H, the published stack. Nothing is drawn and no time is taken, so the choice is
the same everywhere. A pair that is chosen so need not be the fastest of all pairs: re-layouts count in stacks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from tasp_lab.core.choices import AttentionKind
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.hybrid.stack import layouts_differ
from tasp_lab.schedules.linear.passes import chunk_layout
from tasp_lab.schedules.registry import LASP_2H, Names, names_of
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import LAYER_KINDS, Workload

FASTEST = 3
"""Schedules of each kind of layer that are stacked."""

TimeOf = Callable[[Workload, str], float | None]
"""The time of a schedule of a single layer in seconds; None if it does not apply."""


@dataclass(frozen=True)
class StackChoice:
    """The schedules of single layers by kind, the fastest first, with their times in seconds, and the chosen stacks.

    The time of a schedule that does not apply is None.
    """

    alone: Mapping[AttentionKind, tuple[tuple[str, float | None], ...]]
    names: tuple[str, ...]

    @property
    def stacked(self) -> Mapping[AttentionKind, tuple[str, ...]]:
        """The schedules of each kind that are in a stack, the fastest first."""
        sides = [names_of(name) for name in self.names]
        used = {"linear": {each.linear for each in sides}, "softmax": {each.softmax for each in sides}}
        return {kind: tuple(name for name, _ in rows if name in used[kind]) for kind, rows in self.alone.items()}

    def to_dict(self) -> dict[str, object]:
        """The field `layer_schedules` of ``--json``."""
        return {
            kind: [{"schedule": name, "time_s": time_s, "stacked": name in self.stacked[kind]} for name, time_s in rows]
            for kind, rows in self.alone.items()
        }

    def __str__(self) -> str:
        """What was chosen, on one line."""
        of_kinds = (f"{', '.join(names)} of {kind} layers" for kind, names in self.stacked.items())
        return (
            f"stacks of the schedules that are fastest for a layer alone, {FASTEST} of each kind, of the fastest "
            f"without a re-layout, and {LASP_2H}: {'; '.join(of_kinds)}"
        )


def choose_stacks(
    work: Workload,
    topology: Topology,
    names: Mapping[AttentionKind, Sequence[str]],
    options: AttentionOptions,
    time_of: TimeOf,
) -> StackChoice:
    """The stacks to compare for a hybrid.

    Parameters
    ----------
    work : the hybrid; kinds without a layer in it have the schedule of LASP-2H.
    topology, options : they decide the sequence layouts of families with groups.
    names : the schedules of each kind of layer.
    time_of : how long one takes for one layer.
    """
    alone: dict[AttentionKind, tuple[tuple[str, float | None], ...]] = {}
    chosen: dict[str, list[str]] = {}
    published = names_of(LASP_2H)
    for letter, kind in LAYER_KINDS.items():
        if letter not in work.layers:
            chosen[letter] = [published.of(letter)]
            continue
        layer = work.of(letter)
        times_s = {name: time_of(layer, name) for name in names[kind]}
        rows = sorted(times_s.items(), key=lambda row: inf if row[1] is None else row[1])
        alone[kind] = tuple(rows)
        applying = [name for name, time_s in rows if time_s is not None]
        chosen[letter] = applying[:FASTEST]
        if letter == "S" and "L" in work.layers:
            chosen[letter] += [name for name in applying if not _moves(name, work, topology, options)][:1]
    stacks = [Names(linear, softmax).together for linear in chosen["L"] for softmax in chosen["S"]]
    return StackChoice(alone, tuple(dict.fromkeys([*stacks, LASP_2H])))


def _moves(name: str, work: Workload, topology: Topology, options: AttentionOptions) -> bool:
    """Whether hidden states move between linear layers and those of this schedule."""
    layout = attention_layout(name, work.of("S"), topology, options)
    return layouts_differ(chunk_layout(work, topology.world_size), layout)
