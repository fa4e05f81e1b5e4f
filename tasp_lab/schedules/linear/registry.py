"""The schedules of linear attention, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tasp_lab.core.errors import ScheduleError, unknown
from tasp_lab.core.lazily import lazily
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.attention.registry import AttentionSpec, is_attention

if TYPE_CHECKING:
    from tasp_lab.rings.decompose import Decomposition
    from tasp_lab.schedule.schedule import Schedule
    from tasp_lab.topology.graph import Topology
    from tasp_lab.workload.layer import Workload


def _spec(module: str, builder: str, *options: str, uses_rings: bool = False) -> AttentionSpec:
    layout = lazily("tasp_lab.schedules.linear.passes", "chunk_layout")
    return AttentionSpec(lazily(f"tasp_lab.schedules.linear.{module}", builder), layout, options, uses_rings)


def _ring() -> AttentionSpec:
    return _spec("ring", "ring_linear_attention", "trim", "buffers", "gradient_dtype")


_MOVE_STATES: Mapping[str, AttentionSpec] = {
    "lasp": _spec("lasp", "lasp"),
    "lasp-2": _spec("lasp2", "lasp2", "trim"),
    "multi-ring-lasp-2": _spec("lasp2", "lasp2", "trim", uses_rings=True),
    "direct-lasp-2": _spec("lasp2", "lasp2", "trim"),
    "trees-lasp-2": _spec("lasp2", "lasp2", "trim"),
    "all-scan": _spec("lasp", "lasp", "pieces"),
}
_MOVE_KEYS: Mapping[str, AttentionSpec] = {"ring-linear-attention": _ring(), "ring-linear-attention-right": _ring()}

MOVES_STATES = tuple(_MOVE_STATES)
"""The schedules that move states, so that a sequence may begin with a state and leave one."""

LINEAR: Mapping[str, AttentionSpec] = {**_MOVE_STATES, **_MOVE_KEYS}
"""Schedules of linear attention by name, as on the command line; new schedules are registered here only."""

_OWN = dict(LINEAR)
"""As this file registers them: others may add to `LINEAR`, or replace what is there."""

USES_RINGS = tuple(name for name, spec in LINEAR.items() if spec.uses_rings)
"""The schedules of linear attention that accept a decomposition."""


def linear_schedules(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
    decays: tuple[float, ...] = (),
) -> tuple[Schedule, ...]:
    """The schedules of linear attention of a name, one per pass, in execution order.

    Parameters
    ----------
    name : a name in `LINEAR`.
    topology : the ranks and links; transfers use its routes.
    workload : the layer, whose kind is ``linear``.
    decomposition : the rings of the schedules in `USES_RINGS`; by default those of `decompose(topology)`. Others ignore
        it.
    options : which passes, and how.
    decays : with decay ``head`` the decay per position of each KV head, see `tasp_lab.schedules.linear.chunks`.

    Raises `ScheduleError` for an unknown name, options that do not apply, and what the schedule cannot do.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.workload.layer import Workload
    >>> layer = Workload(sequence=64, mask="causal", kind="linear", decay="scalar")
    >>> found = linear_schedules("lasp", full_mesh(4), layer, None, AttentionOptions("both"))
    >>> [schedule.transfers for schedule in found]
    [3, 3]
    """
    spec = linear_spec(name)
    options.check_known(name, spec.options)
    rings = {"decomposition": decomposition} if spec.uses_rings else {}
    return spec.builder(name, topology, workload, options, decays, **rings)


def is_own_linear(name: str) -> bool:
    """Whether the schedules of a name are built by tasp-lab, not by a spec that was registered from elsewhere."""
    return name in _OWN and LINEAR.get(name) is _OWN[name]


def linear_spec(name: str) -> AttentionSpec:
    """The spec of a name. Raises `ScheduleError` for an unknown one."""
    if is_attention(name):
        raise ScheduleError(
            f"schedule {name!r} is for softmax attention, expected one for linear attention: {', '.join(LINEAR)}"
        )
    if name not in LINEAR:
        raise ScheduleError(unknown("schedule", name, LINEAR))
    return LINEAR[name]
