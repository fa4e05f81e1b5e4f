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
from tasp_lab.core.units import format_size
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.collectives.conditions import check_collective, collectives_of
from tasp_lab.schedules.collectives.kinds import CollectiveKind, with_article
from tasp_lab.schedules.files import parts_of
from tasp_lab.schedules.registry import (
    ATTENTION,
    COLLECTIVES,
    KINDS,
    check_names,
    follows,
    is_own,
    kind_of,
    known_attention,
    linear_spec,
    names_of,
    options_for_layer,
    options_of,
    registered_name,
)
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Work, Workload

if TYPE_CHECKING:
    from tasp_lab.workload.sequence_layout import SequenceLayout


def collective(name: str, topology: Topology, shard_bytes: int, decomposition: Decomposition | None = None) -> Schedule:
    """The schedule of a collective, by name; `decomposition` is ignored by schedules without rings.

    Raises `ScheduleError` for an unknown name, and for what is no schedule of the collective.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> collective("ring-all-reduce", full_mesh(8), 64).transfers
    112
    """
    kind = kind_of([name])
    rings = [decomposition] if COLLECTIVES[name].uses_rings else []
    schedule: Schedule = COLLECTIVES[name].builder(topology, shard_bytes, *rings)
    check_collective(schedule, kind, shard_bytes)
    return schedule


def attention_schedules(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Schedule, ...]:
    """The attention schedules of a name, of a family with a split (``usp:2x4``), as of `build_schedules`.

    Raises `ScheduleError` for an unknown name, a split of another world size, a layer of linear attention, options that
    do not apply, and if there are too many blocks to verify.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> layer, options = Workload(sequence=64, mask="causal"), AttentionOptions("both", dataflow="rotate-kv")
    >>> [schedule.transfers for schedule in attention_schedules("ring-attention", full_mesh(4), layer, None, options)]
    [6, 12]
    """
    spec, family = known_attention(name, topology.world_size)
    if workload.kind != "softmax":
        raise ScheduleError(
            f"schedule {name!r}: a layer of {workload.kind} attention, expected one of softmax attention"
        )
    options.check_known(name, options_of(name))
    options.check_layer(workload)
    rings = {"decomposition": decomposition} if spec.uses_rings else {}
    if not spec.split:
        passes: tuple[Schedule, ...] = spec.builder(name, topology, workload, options, **rings)
        return passes

    from tasp_lab.schedules.attention.rank_order import in_order  # families alone have groups

    def build(renumbered: Topology) -> tuple[Schedule, ...]:
        asked = replace(options, groups="auto")
        passes: tuple[Schedule, ...] = spec.builder(name, renumbered, workload, asked, **rings, **family)
        return passes

    return in_order(build, topology, _order(name, topology, options))


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

    Raises `ScheduleError` for an unknown name, options that do not apply, and what the schedule cannot do.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> layer = Workload(sequence=64, mask="causal", kind="linear", decay="scalar")
    >>> found = linear_schedules("lasp", full_mesh(4), layer, None, AttentionOptions("both"))
    >>> [schedule.transfers for schedule in found]
    [3, 3]
    """
    spec = linear_spec(name)
    options.check_known(name, spec.options)
    rings = {"decomposition": decomposition} if spec.uses_rings else {}
    passes: tuple[Schedule, ...] = spec.builder(name, topology, workload, options, decays, **rings)
    return passes


def hybrid_schedules(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Schedule, ...]:
    """The schedules of a hybrid, one per pass of the whole stack, as of `build_schedules`.

    Layers of both kinds have the same rings, and each option applies to the layers that know it.

    Raises `ScheduleError` for an unknown name, options that neither kind of layer knows, a workload of another kind,
    what a layer cannot do, and if there are too many blocks to verify.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> layer = Workload(sequence=64, mask="causal", kind="hybrid", layers="LLS")
    >>> (forward,) = hybrid_schedules("lasp-2+ring-attention", full_mesh(4), layer)
    >>> forward.transfers == 2 * 6 + 6
    True
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
    spec, family = known_attention(name, None)
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
    known_attention(name, topology.world_size)
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
    spec, family = known_attention(name, world_size)
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
            kind = with_article(kind_of([name]))
            raise ScheduleError(f"schedule {name!r} is {kind}, expected no options of attention")
        return (collective(name, topology, work, decomposition),)
    try:
        builders = {"softmax": attention_schedules, "linear": linear_schedules, "hybrid": hybrid_schedules}
        built = builders[work.kind](name, topology, work, decomposition, options)
        for each in () if is_own(name) or work.kind == "hybrid" else built:
            _check_layer(each, work)
        return built
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
    # A layer that is given by name needs none of these.
    from tasp_lab.schedule.stacked_task import StackedTask
    from tasp_lab.schedules.attention.task import AttentionTask
    from tasp_lab.schedules.hybrid.relayout import RelayoutTask
    from tasp_lab.schedules.hybrid.stack import layers_of
    from tasp_lab.schedules.linear.task import LinearTask

    task, where = schedule.task, f"schedule {schedule.name!r}"
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
