"""Schedules by name: of a collective, of the passes of a layer of softmax or linear attention, or of a hybrid.

The *work* is a number of bytes per rank, or a `tasp_lab.workload.layer.Workload`. Each kind of work has schedules of
its own, and a name of another kind is refused. The name of a schedule determines the collective.
`tasp_lab.schedules.attention.options.AttentionOptions` select the passes of a layer and their dataflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import get_args

from tasp_lab.core.choices import AttentionKind
from tasp_lab.core.choices import Pass as Pass
from tasp_lab.core.errors import (
    NoDecompositionError,
    NoRouteError,
    ScheduleError,
    TooManyBlocksError,
    first_line,
    nearest,
    unknown,
)
from tasp_lab.core.units import format_size
from tasp_lab.rings.decompose import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.stacked_task import StackedTask
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.attention.registry import USES_RINGS as ATTENTION_OVER_RINGS
from tasp_lab.schedules.attention.registry import (
    attention_names,
    attention_names_on,
    attention_schedules,
    check_attention,
    is_attention,
    is_own_attention,
)
from tasp_lab.schedules.attention.registry import options_of as attention_options_of
from tasp_lab.schedules.attention.task import AttentionTask
from tasp_lab.schedules.collectives.conditions import collectives_of
from tasp_lab.schedules.collectives.kinds import CollectiveKind, with_article
from tasp_lab.schedules.collectives.registry import COLLECTIVES, collective, kind_of, schedules_of
from tasp_lab.schedules.hybrid import registry as hybrid
from tasp_lab.schedules.hybrid.relayout import RelayoutTask
from tasp_lab.schedules.hybrid.stack import hybrid_schedules, layers_of
from tasp_lab.schedules.linear.registry import LINEAR, is_own_linear, linear_schedules
from tasp_lab.schedules.linear.registry import USES_RINGS as LINEAR_OVER_RINGS
from tasp_lab.schedules.linear.task import LinearTask
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

Work = int | Workload
"""The bytes that each rank owns of a collective (`tasp_lab.schedules.collectives.registry`), or an attention layer."""

AnySchedule = str | Schedule
"""A schedule by its name, or one that was built."""

USES_RINGS = (
    *(name for name, spec in COLLECTIVES.items() if spec.uses_rings),
    *ATTENTION_OVER_RINGS,
    *LINEAR_OVER_RINGS,
)
"""The schedules of single layers and of collectives that accept a decomposition."""


COLLECTIVE, SOFTMAX, LINEAR_KIND, HYBRID = "a collective", "softmax attention", "linear attention", "a hybrid"
"""Kinds of work, in messages."""

KINDS: Mapping[AttentionKind, str] = {"softmax": SOFTMAX, "linear": LINEAR_KIND, "hybrid": HYBRID}
"""Those of layers."""

LAYERS = (AttentionTask, LinearTask, RelayoutTask)
"""The tasks of layers, and of what lies between those of a hybrid, whose times are known."""

NOT_APPLICABLE = (ScheduleError, NoRouteError, NoDecompositionError)
"""What building or simulating a schedule raises if the layer, the topology or the options contradict it."""


def reason_of(error: Exception, name: str) -> str:
    """Why a schedule does not apply, as text that stands beside its name.

    >>> reason_of(ScheduleError("schedule 'direct', step 0: rank 3 sends to rank 4"), "direct")
    'step 0: rank 3 sends to rank 4'
    """
    return first_line(error).removeprefix(f"schedule {name!r}").lstrip(":, ")


def build_schedules(
    name: str,
    topology: Topology,
    work: Work,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Schedule, ...]:
    """The schedules of a name, one for each requested pass, in the order of execution.

    Parameters
    ----------
    name : a name in `COLLECTIVES` for bytes, for a layer one of `tasp_lab.schedules.attention.registry` or of
        `tasp_lab.schedules.linear.registry`, for a hybrid one of each (`tasp_lab.schedules.hybrid.registry`).
    topology : the ranks and links.
    work : bytes per rank, or the layer.
    decomposition : the rings of schedules that use some (`uses_rings`), if not the topology's own.
    options : of a layer, see `tasp_lab.schedules.attention.registry.attention_schedules`.

    Raises `ScheduleError` for an unknown name, one of the other kind, options of a collective, and more than can be
    proved.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> [schedule.transfers for schedule in build_schedules("ring", full_mesh(4), 64)]
    [12]
    >>> layer, both = Workload(sequence=64, mask="causal", heads=1), AttentionOptions("both", dataflow="rotate-kv")
    >>> [schedule.transfers for schedule in build_schedules("ring-attention", full_mesh(4), layer, options=both)]
    [6, 12]
    """
    check_names([name], work)
    if not isinstance(work, Workload):
        if options != DEFAULT_OPTIONS:
            kind = with_article(COLLECTIVES[name].kind)
            raise ScheduleError(f"schedule {name!r} is {kind}, expected no options of attention")
        return (collective(name, topology, work, decomposition),)
    build = {"softmax": attention_schedules, "linear": linear_schedules, "hybrid": hybrid_schedules}[work.kind]
    try:
        return build(name, topology, work, decomposition, options)
    except TooManyBlocksError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None


def names_in(schedules: Iterable[AnySchedule]) -> list[str]:
    """The schedules that are given by name."""
    return [each for each in schedules if isinstance(each, str)]


def built_in(schedules: Iterable[AnySchedule]) -> list[Schedule]:
    """The schedules that are given as objects."""
    return [each for each in schedules if isinstance(each, Schedule)]


def name_of(schedule: AnySchedule) -> str:
    """The name of a schedule."""
    return schedule if isinstance(schedule, str) else schedule.name


def uses_rings(name: str) -> bool:
    """Whether a schedule accepts a decomposition.

    >>> uses_rings("multi-ring"), uses_rings("lasp-2+tasp"), uses_rings("usp:2x4")
    (True, True, False)
    """
    return hybrid.uses_rings(name) if hybrid.is_hybrid(name) else name in USES_RINGS


def is_own(name: str) -> bool:
    """Whether tasp-lab itself builds the schedules of a name of a layer, so that its sources say when they change.

    >>> is_own("lasp-2+tasp"), is_own("ring-attention"), is_own("mine")
    (True, True, False)
    """
    if hybrid.is_hybrid(name):
        linear, _, softmax = name.partition("+")
        return is_own_linear(linear) and is_own_attention(softmax)
    return is_own_linear(name) or is_own_attention(name)


def layer_names_on(world_size: int, work: Workload, *, variants: bool = False) -> list[str]:
    """The names of all schedules for the kind of a layer, of families each split of a number of ranks.

    With `variants` also each split of a family with each of its variants. None of hybrids, which have too many: those
    to compare follow from the schedules of their layers (`tasp_lab.prediction.compare`).

    >>> layer_names_on(8, Workload(sequence=64, kind="linear"))[:2]
    ['lasp', 'lasp-2']
    """
    if work.kind == "hybrid":
        return []
    return list(LINEAR) if work.kind == "linear" else attention_names_on(world_size, variants=variants)


def options_for(name: str, options: AttentionOptions) -> AttentionOptions:
    """The options with the defaults in place of those that do not apply to a schedule of a layer.

    >>> options_for("ulysses", AttentionOptions("both", buffers=4, gradient_dtype="input")).buffers
    3
    """
    return options.only(options_of(name))


def options_of(name: str) -> tuple[str, ...]:
    """The fields of `AttentionOptions`, without the passes, that apply to a schedule of a layer.

    >>> options_of("all-scan")
    ('pieces',)
    """
    if hybrid.is_hybrid(name):
        return hybrid.options_of(name)
    return LINEAR[name].options if name in LINEAR else attention_options_of(name)


def check_names(names: Iterable[str], work: Work) -> None:
    """Raise `ScheduleError` for the first name that is no schedule for this work.

    All schedules of one call must implement the same collective.

    >>> check_names(["ring"], Workload(sequence=64, heads=1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tasp_lab.core.errors.ScheduleError: schedule 'ring' is an AllGather, expected one for softmax attention: ...
    """
    names, wanted = list(names), _kind_of_work(work)
    of_layers = {SOFTMAX: attention_names(), LINEAR_KIND: list(LINEAR), HYBRID: [hybrid.EXPECTED]}
    right: Sequence[str] = of_layers.get(wanted, list(COLLECTIVES))
    for name in names:
        if "," in name:
            each = " ".join(f"--schedule {part.strip()}" for part in name.split(","))
            raise ScheduleError(f"schedule {name!r}: expected one name; for several give {each}")
        kind = _kind_of_name(name)
        if kind and kind != wanted:
            what = with_article(COLLECTIVES[name].kind) if kind == COLLECTIVE else f"for {kind}"
            expected = wanted if wanted == COLLECTIVE else f"one for {wanted}"
            other = "; or --kind linear" if (kind, wanted) == (LINEAR_KIND, SOFTMAX) else ""
            raise ScheduleError(f"schedule {name!r} is {what}, expected {expected}: {', '.join(right)}{other}")
        if not kind:
            meant = [each for each in get_args(CollectiveKind) if nearest(name, [each], at_least=1)]
            if meant and wanted == COLLECTIVE:
                raise ScheduleError(f"schedule {name!r} is a collective, expected one of its schedules: "
                                    f"{', '.join(schedules_of(meant[0]))}")  # fmt: skip
            raise ScheduleError(unknown("schedule", name, right))
    if wanted == HYBRID:
        for name in names:
            hybrid.names_of(name)
    elif wanted == SOFTMAX:
        check_attention(names)
    elif wanted == COLLECTIVE and names:
        kind_of(names)


def check_schedules(schedules: Sequence[AnySchedule], work: Work, passes: Pass) -> CollectiveKind | None:
    """Raise `ScheduleError` for the first schedule that computes something else than this work, in this pass.

    Returns the collective that all schedules implement; None of a layer.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> check_schedules(build_schedules("ring-all-reduce", full_mesh(4), 64), 128, "forward")
    Traceback (most recent call last):
    tasp_lab.core.errors.ScheduleError: schedule 'ring-all-reduce' is an AllReduce of 64 B per rank, expected 128 B
    """
    names = names_in(schedules)
    check_names(names, work)
    found = None if isinstance(work, Workload) or not names else kind_of(names)
    for schedule in built_in(schedules):
        where, task = f"schedule {schedule.name!r}", schedule.task
        if not isinstance(work, Workload):
            if task is not None:
                raise ScheduleError(f"{where} computes with {type(task).__name__}, expected a collective")
            found = collective_of(schedule, work, found)
        elif task is None:
            raise ScheduleError(f"{where} computes nothing, expected one for {KINDS[work.kind]}")
        else:
            _check_layer(schedule, work)
            if task.passing != passes:
                raise ScheduleError(f"{where} is a {task.passing} pass, requested is {passes!r}: expected the pass "
                                    f"{task.passing!r}, as a schedule object is one pass")  # fmt: skip
    return found


def _check_layer(schedule: Schedule, work: Workload) -> None:
    """Raise `ScheduleError` unless the task of a schedule is this layer, or the layers of this hybrid."""
    task, where = schedule.task, f"schedule {schedule.name!r}"
    known = {"softmax": AttentionTask, "linear": LinearTask, "hybrid": StackedTask}[work.kind]
    parts = task.layers if isinstance(task, StackedTask) else (task,)
    if not isinstance(task, known) or not all(isinstance(each, LAYERS) for each in parts):
        raise ScheduleError(f"{where} computes with {type(task).__name__}, expected {known.__name__} for "
                            f"{KINDS[work.kind]}; sim.simulate.simulate takes any task")  # fmt: skip
    own = [each.workload for each, _ in layers_of(schedule)]
    letters = work.layers if work.kind == "hybrid" else "L" if work.kind == "linear" else "S"
    wanted = [work.of(letter) if work.kind == "hybrid" else work for letter in letters]
    wanted = wanted[::-1] if isinstance(task, StackedTask) and task.passing == "backward" else wanted
    if len(own) != len(wanted):
        raise ScheduleError(f"{where} has {len(own)} layers, expected {len(wanted)}")
    for number, (layer, expected) in enumerate(zip(own, wanted, strict=True)):
        if layer != expected:
            name = next(f.name for f in fields(layer) if getattr(layer, f.name) != getattr(expected, f.name))
            values = f"{getattr(layer, name)}, expected {getattr(expected, name)}"
            of_layer = f"layer {number} has " if len(own) > 1 else "is for a layer with "
            raise ScheduleError(f"{where} {of_layer}{name.replace('_', ' ')} {values}")


def collective_of(schedule: Schedule, shard_bytes: int, beside: CollectiveKind | None = None) -> CollectiveKind:
    """The collective of `shard_bytes` that a schedule implements, by what ranks have at its start and at its end.

    Where several fit, as AllGather and SendRecv do on two ranks, it is `beside` if that is one of them.

    Raises `ScheduleError` where none fits, and where it is another one than `beside`.
    """
    found = collectives_of(schedule)
    where = f"schedule {schedule.name!r}"
    if not found:
        raise ScheduleError(f"{where} is no collective of equal shards, expected an AllGather, a ReduceScatter, an "
                            "AllReduce, an AllToAll or a SendRecv by its initial and final copies")  # fmt: skip
    fitting = [kind for kind, size in found.items() if size == shard_bytes]
    if not fitting:
        kind, size = next(iter(found.items()))
        raise ScheduleError(f"{where} is {with_article(kind)} of {format_size(size)} per rank, "
                            f"expected {format_size(shard_bytes)}")  # fmt: skip
    if beside is not None and beside not in fitting:
        raise ScheduleError(f"{where} is {with_article(fitting[0])}, expected {with_article(beside)} as the others are")
    return fitting[0] if beside is None else beside


def by_kind(names: Sequence[str], kinds: Sequence[AttentionKind]) -> dict[AttentionKind, list[str]]:
    """The names of schedules of each of these kinds of layers. Raises `ScheduleError` for one of no such kind.

    >>> by_kind(["tasp", "lasp"], ["softmax", "linear", "hybrid"])
    {'softmax': ['tasp'], 'linear': ['lasp'], 'hybrid': []}
    """
    of_kinds = {kind: [name for name in names if _kind_of_name(name) == KINDS[kind]] for kind in kinds}
    for name in names:
        if not any(name in each for each in of_kinds.values()):
            known = [*attention_names(), *LINEAR]
            what = _kind_of_name(name)
            if not what:
                raise ScheduleError(unknown("schedule", name, known))
            what = with_article(COLLECTIVES[name].kind) if what == COLLECTIVE else f"for {what}"
            expected = " or ".join(KINDS[kind] for kind in kinds)
            raise ScheduleError(f"schedule {name!r} is {what}, expected one for {expected}")
    return of_kinds


def _kind_of_work(work: Work) -> str:
    if not isinstance(work, Workload):
        return COLLECTIVE
    return KINDS[work.kind]


def _kind_of_name(name: str) -> str:
    """What a schedule is for; empty for an unknown name."""
    if hybrid.is_hybrid(name):
        return HYBRID
    if name in COLLECTIVES or name in LINEAR:
        return COLLECTIVE if name in COLLECTIVES else LINEAR_KIND
    return SOFTMAX if is_attention(name) else ""
