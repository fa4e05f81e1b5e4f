"""Schedules built from their names, for any work; and schedules given as objects, which are checked to do it.

    build_schedules("ring", full_mesh(4), 64)                          # 64 bytes per rank
    build_schedules("tasp", full_mesh(4), layer, options=AttentionOptions("both"))

The *work* is a number of bytes per rank, or a `tasp_lab.workload.layer.Workload`. Each kind of work has schedules of
its own (`tasp_lab.schedules.registry`), and a name of another kind is refused. The name of a schedule determines the
collective. `tasp_lab.schedules.attention.options.AttentionOptions` select the passes of a layer and their dataflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import ScheduleError, TooManyBlocksError
from tasp_lab.core.lazy import from_above
from tasp_lab.core.units import format_size
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.collectives.conditions import check_collective, collectives_of
from tasp_lab.schedules.collectives.kinds import CollectiveKind, with_article
from tasp_lab.schedules.files import careful, parts_of
from tasp_lab.schedules.registry import (
    ATTENTION,
    COLLECTIVE,
    KINDS,
    LINEAR_KIND,
    SOFTMAX,
    ScheduleSpec,
    check_names,
    follows,
    is_ours,
    kind_of,
    names_of,
    options_for_layer,
    options_of,
    registered_name,
    spec_of,
)
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Work, Workload

if TYPE_CHECKING:
    from tasp_lab.schedule.calls import Task
    from tasp_lab.workload.kernel_shapes import Passing
    from tasp_lab.workload.sequence_layout import SequenceLayout


def collective(name: str, topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None) -> Schedule:
    """The schedule of a collective, by name; `decomposition` is ignored by schedules without rings.

    Raises `ScheduleError` for an unknown name, and for what is no schedule of the collective.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> collective("ring-all-reduce", full_mesh(8), 64).transfers
    112
    """
    spec, _ = spec_of(name, COLLECTIVE)
    rings = [decomposition] if spec.uses_rings else []
    (schedule,) = _run(name, spec, topology, ("forward",), topology, shard_bytes, *rings)
    check_collective(schedule, kind_of([name]), shard_bytes)
    return schedule


def attention_schedules(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Schedule, ...]:
    """The schedules of softmax attention of a name, of a family with a split (``usp:2x4``), as of `build_schedules`."""
    return _of_layer(name, SOFTMAX, topology, workload, decomposition, options)


def linear_schedules(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
    decays: tuple[float, ...] = (),
) -> tuple[Schedule, ...]:
    """The schedules of linear attention of a name, as of `build_schedules`.

    With decay ``head``, `decays` are the decay per position of each KV head, see `tasp_lab.schedules.linear.chunks`.
    """
    return _of_layer(name, LINEAR_KIND, topology, workload, decomposition, options, decays)


def _of_layer(
    name: str,
    kind: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None,
    options: AttentionOptions,
    *decays: tuple[float, ...],
) -> tuple[Schedule, ...]:
    """The schedules of a layer of one kind; builders of linear attention are given decays, too."""
    spec, keywords = spec_of(name, kind, topology.world_size)
    if KINDS[workload.kind] != kind:
        raise ScheduleError(f"schedule {name!r}: a layer of {workload.kind} attention, expected one of {kind}")
    options.check_known(name, options_of(name))
    options.check_layer(workload)
    if spec.uses_rings:
        keywords["decomposition"] = decomposition

    def build(on: Topology, asked: AttentionOptions) -> tuple[Schedule, ...]:
        passes = options.each_pass
        built = _run(name, spec, on, passes, name, on, workload, asked, *decays, **keywords)
        for schedule, passing in zip(built, () if is_ours(spec.builder) else passes, strict=False):
            if (found := _check_layer(schedule, workload).passing) != passing:
                raise ScheduleError(f"schedule {name!r} is a {found} pass, expected the pass {passing}")
        return built

    if not spec.split:
        return build(topology, options)
    from tasp_lab.schedules.attention.rank_order import in_order  # families alone have groups

    return in_order(lambda on: build(on, replace(options, groups="auto")), topology, _order(name, topology, options))


def _run(
    name: str, spec: ScheduleSpec, topology: Topology, passes: tuple[Passing, ...], *given: Any, **more: Any
) -> tuple[Schedule, ...]:
    """What a builder returns for these arguments, a schedule per pass.

    That of a user is run with care. It may return one schedule where one is asked for, and need not name its schedules;
    of softmax attention a `tasp_lab.schedules.attention.program.Program` instead.
    """
    if is_ours(spec.builder):
        ours = spec.builder(*given, **more)
        return (ours,) if isinstance(ours, Schedule) else tuple(ours)
    with careful(f"schedule {name!r}", spec.builder.__code__.co_filename):
        found = spec.builder(*given, **more)
        if spec.kind == "softmax":
            found = from_above("schedules of a program")(found, *given)
    built = (found,) if isinstance(found, Schedule) else found
    if not isinstance(built, tuple | list) or not all(isinstance(each, Schedule) for each in built):
        raise ScheduleError(f"schedule {name!r}: the builder returned {type(found).__name__}, expected a Schedule")
    if len(built) != len(passes):
        raise ScheduleError(f"schedule {name!r}: the builder returned {len(built)} schedules, expected {len(passes)} "
                            f"({' and '.join(passes)})")  # fmt: skip
    for each in built:
        each.renamed(name).check_routes(topology)
    return tuple(each.renamed(name) for each in built)


def hybrid_schedules(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Schedule, ...]:
    """The schedules of a hybrid, one per pass of the whole stack, as of `build_schedules`.

    Layers of both kinds have the same rings, and each option applies to the layers that know it.
    """
    from tasp_lab.schedules.hybrid.stack import stacked_layers  # with the tasks of both kinds of layers

    names = names_of(name)
    if workload.kind != "hybrid":
        raise ScheduleError(f"schedule {name!r}: a layer of {workload.kind} attention, expected a hybrid")
    build = {"L": linear_schedules, "S": attention_schedules}
    kinds: dict[str, tuple[Schedule, ...]] = {}
    for letter in sorted(set(workload.layers)):
        used = options_for_layer(name, letter, options)
        kinds[letter] = build[letter](names.of(letter), topology, workload.of(letter), decomposition, used)

    def one_pass(backward: bool) -> Schedule:
        number = int(backward and options.passes == "both")
        layers = [kinds[letter][number] for letter in (reversed(workload.layers) if backward else workload.layers)]
        return stacked_layers(name, topology, workload, layers)

    return options.build(one_pass)


def _members(name: str) -> int:
    """The number of ranks of each group of a family."""
    spec, family = spec_of(name, SOFTMAX)
    members: int = family["split"][spec.members]
    return members


def _order(name: str, ranks: int | Topology, options: AttentionOptions) -> IntArray:
    """The order of ranks in which the groups of a family are consecutive."""
    from tasp_lab.schedules.attention.rank_order import rank_order

    return rank_order(name, options.groups, _members(name), ranks)


def groups_on(name: str, ranks: int | Topology, options: AttentionOptions = DEFAULT_OPTIONS) -> str:
    """The groups of a family as lists of ranks, which are a value of the option `groups`. Raises `ScheduleError`.

    >>> groups_on("usp:2x2", 4, AttentionOptions(groups="strided"))
    '0,2|1,3'
    """
    from tasp_lab.schedules.attention.rank_order import listed

    return listed(_order(name, ranks, options), _members(name))


def followed(name: str, topology: Topology, options: AttentionOptions = DEFAULT_OPTIONS) -> object:
    """What the schedules of a name follow from on a topology: where it is equal, equal rings give equal schedules.

    Raises `ScheduleError` for an unknown name.

    >>> from tasp_lab.topology.builders import full_mesh, switch
    >>> [followed("ulysses", each) for each in (full_mesh(4), switch(4))]
    [4, 4]
    """
    what = follows(name)
    if what == "rates" or not topology.is_complete:  # rates decide which rings a search finds
        return topology
    seen = topology.world_size if what == "ranks" else topology.structure
    family, _ = parts_of(name)
    if family not in ATTENTION or not ATTENTION[family].split:
        return seen
    spec_of(name, SOFTMAX, topology.world_size)
    return seen, groups_on(name, topology, options)


def order_of_names(name: str, topology: Topology, options: AttentionOptions) -> IntArray | None:
    """The order in which ranks act in the schedules that a name has with consecutive groups, if that is all that the
    groups of these options change; else None. Raises `ScheduleError`.

    >>> from tasp_lab.topology.builders import switch
    >>> order_of_names("usp:2x2", switch(4), AttentionOptions(groups="strided")).tolist()
    [0, 2, 1, 3]
    """
    family, _ = parts_of(name)
    if follows(name) != "ranks" or not topology.is_complete or not ATTENTION[family].split:
        return None
    return _order(name, topology, options)


def attention_layout(
    name: str, workload: Workload, ranks: int | Topology, options: AttentionOptions = DEFAULT_OPTIONS
) -> SequenceLayout:
    """The sequence layout of an attention schedule: that of `attention_schedules` with the same topology and options.

    Parameters
    ----------
    name, workload, options : as there; of the options only `groups` matters.
    ranks : the number of ranks; or the topology, which decides of which ranks groups are `auto`.

    Raises `ScheduleError` for an unknown name, a split of another world size and groups that are none of it.
    """
    world_size = ranks if isinstance(ranks, int) else ranks.world_size
    spec, family = spec_of(name, SOFTMAX, world_size)
    layout = spec.layout_on(workload, world_size, **family)
    return layout.on_ranks(_order(name, ranks, options)) if spec.split else layout


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
    name : a name of `tasp_lab.schedules.registry`.
    topology : the ranks and links; transfers use its routes.
    work : bytes per rank, or the layer.
    decomposition : the rings of schedules that use some; by default those of `decompose(topology)`. Others ignore
        it.
    options : of a layer: which passes, and how.

    Raises `ScheduleError` for an unknown name, one of the other kind, a split of another world size, options that do
    not apply, what the schedule cannot do, and more than can be proved.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> [schedule.transfers for schedule in build_schedules("ring", full_mesh(4), 64)]
    [12]
    >>> layer, both = Workload(sequence=64, mask="causal", heads=1), AttentionOptions("both", dataflow="rotate-kv")
    >>> [schedule.transfers for schedule in build_schedules("ring-attention", full_mesh(4), layer, options=both)]
    [6, 12]
    >>> layers = Workload(sequence=64, mask="causal", kind="hybrid", layers="LLS")
    >>> [schedule.transfers for schedule in build_schedules("lasp-2+ring-attention", full_mesh(4), layers)]
    [18]
    """
    check_names([name], work)
    if not isinstance(work, Workload):
        if options != DEFAULT_OPTIONS:
            kind = with_article(kind_of([name]))
            raise ScheduleError(f"schedule {name!r} is {kind}, expected no options of attention")
        return (collective(name, topology, work, decomposition),)
    try:
        builders = {"softmax": attention_schedules, "linear": linear_schedules, "hybrid": hybrid_schedules}
        return builders[work.kind](name, topology, work, decomposition, options)
    except TooManyBlocksError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None


AnySchedule = str | Schedule
"""A schedule by its name, or one that was built."""

GivenSchedule = AnySchedule | Callable[..., Any]
"""A schedule by name or object, or the registered function that builds it, which stands for its name."""


def as_schedule(schedule: GivenSchedule) -> AnySchedule:
    """A builder by its name; anything else as it is. Raises `ScheduleError` for a builder that is not registered."""
    return registered_name(schedule) if callable(schedule) else schedule


def names_in(schedules: Iterable[AnySchedule]) -> list[str]:
    """The schedules that are given by name."""
    return [schedule for schedule in schedules if isinstance(schedule, str)]


def built_in(schedules: Iterable[AnySchedule]) -> list[Schedule]:
    """The schedules that are given as objects."""
    return [schedule for schedule in schedules if isinstance(schedule, Schedule)]


def name_of(schedule: AnySchedule) -> str:
    """The name of a schedule."""
    return schedule if isinstance(schedule, str) else schedule.name


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
        where = f"schedule {schedule.name!r}"
        if isinstance(work, Workload):
            if (passing := _check_layer(schedule, work).passing) != passes:
                raise ScheduleError(f"{where} is a {passing} pass, requested is {passes!r}: expected the pass "
                                    f"{passing!r}, as a schedule object is one pass")  # fmt: skip
        elif schedule.task is not None:
            raise ScheduleError(f"{where} computes with {type(schedule.task).__name__}, expected a collective")
        else:
            found = collective_of(schedule, work, found)
    return found


def _check_layer(schedule: Schedule, work: Workload) -> Task:
    """The task of a schedule. Raises `ScheduleError` unless it is this layer, or the layers of this hybrid."""
    # A layer that is given by name needs none of these.
    from tasp_lab.schedule.stacked_task import StackedTask
    from tasp_lab.schedules.attention.task import AttentionTask
    from tasp_lab.schedules.hybrid.relayout import RelayoutTask
    from tasp_lab.schedules.hybrid.stack import layers_of
    from tasp_lab.schedules.linear.task import LinearTask

    task, where = schedule.task, f"schedule {schedule.name!r}"
    if task is None:
        raise ScheduleError(f"{where} computes nothing, expected one for {KINDS[work.kind]}")
    timed = AttentionTask | LinearTask | RelayoutTask  # whose times are known
    known = {"softmax": AttentionTask, "linear": LinearTask, "hybrid": StackedTask}[work.kind]
    parts = task.layers if isinstance(task, StackedTask) else (task,)
    if not isinstance(task, known) or not all(isinstance(each, timed) for each in parts):
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
    return task


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
