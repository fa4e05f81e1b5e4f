"""The schedules of collectives, by name; `tasp_lab.schedules.collectives.kinds` defines the collectives.

Builders are imported on first call, so help and completion list the names without importing numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tasp_lab.core.errors import ScheduleError, unknown
from tasp_lab.core.lazily import lazily
from tasp_lab.schedules.collectives.kinds import CollectiveKind, NcclTestsName, with_article

if TYPE_CHECKING:
    from tasp_lab.rings.decompose import Decomposition
    from tasp_lab.schedule.schedule import Schedule
    from tasp_lab.topology.graph import Topology


@dataclass(frozen=True)
class CollectiveSpec:
    """A schedule of a collective.

    Parameters
    ----------
    kind : the collective.
    builder : builds the schedule from a topology and `shard_bytes`, and from a decomposition if it uses one.
    uses_rings : whether `builder` accepts a decomposition.
    library_call : nccl-tests' name of the call, if the schedule is one call of the communication library; else empty.
    """

    kind: CollectiveKind
    builder: Callable[..., Schedule]
    uses_rings: bool = False
    library_call: str = ""

    def build(self, topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None) -> Schedule:
        """The schedule on a topology; `decomposition` is ignored unless `uses_rings`.

        Raises `ScheduleError` for what is no schedule of the collective.
        """
        rings = [decomposition] if self.uses_rings else []
        found = self.builder(topology, shard_bytes, *rings)
        _check_collective(found, self.kind, shard_bytes)
        return found


_check_collective = lazily("tasp_lab.schedules.collectives.conditions", "check_collective")


def _spec(kind: CollectiveKind, module: str, function: str, uses_rings: bool = False) -> CollectiveSpec:
    return CollectiveSpec(kind, lazily(f"tasp_lab.schedules.collectives.{module}", function), uses_rings)


def _library_call(name: str, kind: CollectiveKind, call: NcclTestsName) -> CollectiveSpec:
    build = lazily("tasp_lab.schedules.collectives.library_rings", "named_library_ring")
    return CollectiveSpec(kind, partial(build, name, call), library_call=call)


COLLECTIVES: Mapping[str, CollectiveSpec] = {
    "ring": _spec("AllGather", "all_gather", "ring_all_gather"),
    "multi-ring": _spec("AllGather", "all_gather", "multi_ring_all_gather", uses_rings=True),
    "direct": _spec("AllGather", "all_gather", "direct_all_gather"),
    "trees": _spec("AllGather", "tree_all_gather", "tree_all_gather"),
    "ring-reduce-scatter": _spec("ReduceScatter", "ring_reductions", "ring_reduce_scatter"),
    "multi-ring-reduce-scatter": _spec(
        "ReduceScatter", "ring_reductions", "multi_ring_reduce_scatter", uses_rings=True
    ),
    "ring-all-reduce": _spec("AllReduce", "ring_reductions", "ring_all_reduce"),
    "multi-ring-all-reduce": _spec("AllReduce", "ring_reductions", "multi_ring_all_reduce", uses_rings=True),
    "library-ring": _library_call("library-ring", "AllGather", "all_gather"),
    "library-ring-reduce-scatter": _library_call("library-ring-reduce-scatter", "ReduceScatter", "reduce_scatter"),
    "library-ring-all-reduce": _library_call("library-ring-all-reduce", "AllReduce", "all_reduce"),
    "all-to-all": _spec("AllToAll", "point_to_point", "all_to_all"),
    "send-recv": _spec("SendRecv", "point_to_point", "send_recv"),
}
"""All schedules of collectives, by name as on the command line; new schedules are registered here only."""


def schedules_of(kind: CollectiveKind) -> list[str]:
    """The schedules of a collective that are not a single library call.

    >>> schedules_of("AllGather")
    ['ring', 'multi-ring', 'direct', 'trees']
    """
    return [name for name, spec in COLLECTIVES.items() if spec.kind == kind and not spec.library_call]


def collective(name: str, topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None) -> Schedule:
    """The schedule of a collective, by name; `decomposition` is ignored by schedules without rings.

    Raises `ScheduleError` for an unknown name.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> collective("ring-all-reduce", full_mesh(8), 64).transfers
    112
    """
    return _known(name).build(topology, shard_bytes, decomposition)


def kind_of(names: Iterable[str]) -> CollectiveKind:
    """The collective that the schedules, one or more, implement. Raises `ScheduleError` if they differ in it.

    >>> kind_of(["ring", "ring-all-reduce"])
    Traceback (most recent call last):
    tasp_lab.core.errors.ScheduleError: schedule 'ring-all-reduce' is an AllReduce, 'ring' an AllGather: expected \
schedules of one collective
    """
    first, *others = names
    kind = _known(first).kind
    for name in others:
        if _known(name).kind != kind:
            raise ScheduleError(
                f"schedule {name!r} is {with_article(_known(name).kind)}, {first!r} {with_article(kind)}: "
                "expected schedules of one collective"
            )
    return kind


def _known(name: str) -> CollectiveSpec:
    if name not in COLLECTIVES:
        raise ScheduleError(unknown("schedule", name, COLLECTIVES))
    return COLLECTIVES[name]
