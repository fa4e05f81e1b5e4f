"""The attention schedules, by name: what builds each one, its sequence layout, and the options that apply to it.

A family of schedules has a split of the ranks in its names, such as ``usp:2x4``, and may have variants, such as
``usp:2x4:tasp``. Builders and layouts are imported on first call, so help and completion list the names without
importing numpy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tasp_lab.core.errors import ScheduleError, unknown
from tasp_lab.core.lazily import lazily
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions

if TYPE_CHECKING:
    from tasp_lab.core.arrays import IntArray
    from tasp_lab.rings.decompose import Decomposition
    from tasp_lab.schedule.schedule import Schedule
    from tasp_lab.topology.graph import Topology
    from tasp_lab.workload.layer import Workload
    from tasp_lab.workload.sequence_layout import SequenceLayout


@dataclass(frozen=True)
class AttentionSpec:
    """An attention schedule, or a family of them.

    Parameters
    ----------
    builder : builds the schedules, one per pass, from its name, a topology, a workload and `AttentionOptions`; with the
        keyword `decomposition` if it uses rings, `split` if it is a family, and `variant` if that has variants.
    layout : the sequence layout of a workload on a number of ranks; with the keywords `split` and `variant` as above.
    options : the fields of `AttentionOptions` that apply to it; `passes` applies to all.
    uses_rings : whether it accepts a decomposition.
    split : what the split of a family stands for, as shown to users: ``UxR``; empty if it is none.
    variants : what may follow the split after a colon; without it the variant is "".
    of_variant : options that apply with a variant only if they apply to the schedule of this name.
    members : which number of the split is that of the ranks of a group. Builder and layout have groups of consecutive
        ranks; other groups follow from the option `groups`, see `tasp_lab.schedules.attention.rank_order`.
    """

    builder: Callable[..., tuple[Schedule, ...]]
    layout: Callable[..., SequenceLayout]
    options: tuple[str, ...]
    uses_rings: bool = False
    split: str = ""
    variants: tuple[str, ...] = ()
    of_variant: tuple[str, ...] = ()
    members: int = 0


def _layout(name: str) -> Callable[..., SequenceLayout]:
    """A layout function, the same for all splits and variants of a family; ``balanced`` is the layout of the mask."""

    def layout(workload: Workload, world_size: int, **family: object) -> SequenceLayout:
        from tasp_lab.workload.sequence_layout import LAYOUTS  # names are listed without numpy

        function = LAYOUTS[workload.visible.balanced_layout if name == "balanced" else name]
        return function(workload.sequence, world_size, workload.parts)

    return layout


def _circulation(layout: str, uses_rings: bool = False) -> AttentionSpec:
    options = ("trim", "buffers", "dataflow", "gradient_dtype", *(() if uses_rings else ("direction",)))
    builder = lazily("tasp_lab.schedules.attention.backward", "circulation_schedules")
    return AttentionSpec(builder, _layout(layout), options, uses_rings)


STRAIGHT_HOME = ("buffers", "gradient_dtype", "result_dtype")
"""The options of schedules whose results return straight to their owners."""


def _token_ring(layout: str) -> AttentionSpec:
    builder = lazily("tasp_lab.schedules.attention.token_ring", "token_ring")
    return AttentionSpec(builder, _layout(layout), (*STRAIGHT_HOME, "tail_chunks"))


def _straight_home(module: str, builder: str, *more: str) -> AttentionSpec:
    """A schedule over many rings; `more` are further options."""
    options = (*STRAIGHT_HOME, *more)
    layout = _layout("balanced")
    return AttentionSpec(lazily(f"tasp_lab.schedules.attention.{module}", builder), layout, options, uses_rings=True)


def _kv_all_gather(uses_rings: bool = False) -> AttentionSpec:
    builder = lazily("tasp_lab.schedules.attention.kv_all_gather", "kv_all_gather")
    return AttentionSpec(builder, _layout("balanced"), ("trim", "gradient_dtype"), uses_rings)


ATTENTION: Mapping[str, AttentionSpec] = {
    "ring-attention": _circulation("contiguous"),
    "zigzag-ring-attention": _circulation("zigzag"),
    "striped-ring-attention": _circulation("striped"),
    "tasp": _circulation("balanced", uses_rings=True),
    "token-ring": _token_ring("contiguous"),
    "zigzag-token-ring": _token_ring("zigzag"),
    "token-multi-ring": _straight_home("token_ring", "token_multi_ring"),
    "kv-and-q-rings": _straight_home("kv_and_q_rings", "kv_and_q_rings", "travels"),
    "ulysses": AttentionSpec(
        lazily("tasp_lab.schedules.attention.ulysses", "ulysses"),
        _layout("contiguous"),
        ("gradient_dtype", "result_dtype"),
    ),
    "usp": AttentionSpec(
        lazily("tasp_lab.schedules.attention.usp", "usp"),
        lazily("tasp_lab.schedules.attention.usp", "usp_layout"),
        ("trim", "buffers", "dataflow", "gradient_dtype", "result_dtype", "groups", "direction"),
        split="UxR",
        variants=(
            "ring-attention",
            "zigzag-ring-attention",
            "striped-ring-attention",
            "tasp",
            "token-ring",
            "zigzag-token-ring",
            "token-multi-ring",
            "kv-and-q-rings",
            "burst",
        ),
        of_variant=("trim", "dataflow", "direction"),
    ),
    "kv-all-gather": _kv_all_gather(),
    "multi-ring-kv-all-gather": _kv_all_gather(uses_rings=True),
    "direct-kv-all-gather": _kv_all_gather(),
    "trees-kv-all-gather": _kv_all_gather(),
    "direct-attention": AttentionSpec(
        lazily("tasp_lab.schedules.attention.direct_attention", "direct_attention"),
        _layout("balanced"),
        ("buffers", "gradient_dtype", "stages"),
    ),
    "burst": AttentionSpec(
        lazily("tasp_lab.schedules.attention.burst", "burst"),
        _layout("balanced"),
        ("trim", "buffers", "gradient_dtype"),
    ),
    "double-ring": AttentionSpec(
        lazily("tasp_lab.schedules.attention.double_ring", "double_ring"),
        _layout("balanced"),
        ("trim", "buffers", "gradient_dtype", "groups"),
        split="WxR",
        variants=("tasp",),
    ),
    "grid": AttentionSpec(
        lazily("tasp_lab.schedules.attention.grid", "grid"),
        _layout("balanced"),
        ("gradient_dtype", "result_dtype", "groups"),
        split="YxX",
        variants=("ring", "multi-ring", "trees"),
        members=1,
    ),
}
"""Attention schedules by name, as on the command line without the split; new schedules are registered here only."""

_OWN = dict(ATTENTION)
"""As this file registers them: others may add to `ATTENTION`, or replace what is there."""

CIRCULATIONS = tuple(name for name, spec in ATTENTION.items() if "dataflow" in spec.options and not spec.split)
"""The schedules whose passes are circulations, see `tasp_lab.schedules.attention.circulation`."""

USES_RINGS = tuple(name for name, spec in ATTENTION.items() if spec.uses_rings)
"""The attention schedules that accept a decomposition."""


def attention_names() -> list[str]:
    """The names as shown to users.

    >>> attention_names()[-2:]
    ['double-ring:WxR', 'grid:YxX']
    """
    return [f"{name}:{spec.split}" if spec.split else name for name, spec in ATTENTION.items()]


def attention_names_on(world_size: int, *, variants: bool = False) -> list[str]:
    """All names on a number of ranks: of a family each split into two factors of which none is 1.

    With `variants` also each split of a family with each of its variants.

    >>> attention_names_on(8)[-2:]
    ['grid:2x4', 'grid:4x2']
    """
    splits = [f"{each}x{world_size // each}" for each in range(2, world_size // 2 + 1) if world_size % each == 0]
    found = []
    for name, spec in ATTENTION.items():
        suffixes = ["", *(f":{variant}" for variant in spec.variants if variants)]
        found += [f"{name}:{split}{suffix}" for split in splits for suffix in suffixes] if spec.split else [name]
    return found


def is_attention(name: str) -> bool:
    """Whether a name, with or without a split and a variant, is one of an attention schedule.

    >>> is_attention("usp:2x4"), is_attention("multi-ring")
    (True, False)
    """
    return name.partition(":")[0] in ATTENTION


def is_own_attention(name: str) -> bool:
    """Whether the schedules of a name are built by tasp-lab, not by a spec that was registered from elsewhere.

    >>> is_own_attention("usp:2x4"), is_own_attention("mine")
    (True, False)
    """
    families = [each for each in name.split(":") if each in ATTENTION]
    return name.partition(":")[0] in families and all(ATTENTION[each] is _OWN.get(each) for each in families)


def attention_schedules(
    name: str,
    topology: Topology,
    workload: Workload,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[Schedule, ...]:
    """The attention schedules of a name, one per pass, in execution order.

    Parameters
    ----------
    name : a name in `ATTENTION`, of a family with a split: ``usp:2x4``.
    topology : the ranks and links; transfers use its routes.
    workload : the layer.
    decomposition : the rings of the schedules in `USES_RINGS`; by default those of `decompose(topology)`. Others ignore
        it.
    options : which passes, and how.

    Raises `ScheduleError` for an unknown name, a split of another world size, a layer of linear attention, options that
    do not apply, and if there are too many blocks to verify.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.workload.layer import Workload
    >>> layer, options = Workload(sequence=64, mask="causal"), AttentionOptions("both", dataflow="rotate-kv")
    >>> [schedule.transfers for schedule in attention_schedules("ring-attention", full_mesh(4), layer, None, options)]
    [6, 12]
    """
    spec, family = _known(name, topology.world_size)
    if workload.kind != "softmax":
        raise ScheduleError(
            f"schedule {name!r}: a layer of {workload.kind} attention, expected one of softmax attention"
        )
    options.check_known(name, options_of(name))
    options.check_layer(workload)
    rings = {"decomposition": decomposition} if spec.uses_rings else {}
    if not spec.split:
        return spec.builder(name, topology, workload, options, **rings)

    def build(renumbered: Topology) -> tuple[Schedule, ...]:
        return spec.builder(name, renumbered, workload, replace(options, groups="auto"), **rings, **family)

    found: tuple[Schedule, ...] = _in_order(build, topology, _order(name, topology, options))
    return found


_rank_order = lazily("tasp_lab.schedules.attention.rank_order", "rank_order")
_in_order = lazily("tasp_lab.schedules.attention.rank_order", "in_order")
_listed = lazily("tasp_lab.schedules.attention.rank_order", "listed")


def _members(name: str) -> int:
    """The number of ranks of each group of a family."""
    spec, family = _known(name, None)
    members: int = family["split"][spec.members]
    return members


def _order(name: str, ranks: int | Topology, options: AttentionOptions) -> IntArray:
    """The order of ranks in which the groups of a family are consecutive."""
    order: IntArray = _rank_order(name, options.groups, _members(name), ranks)
    return order


def groups_on(name: str, ranks: int | Topology, options: AttentionOptions = DEFAULT_OPTIONS) -> str:
    """The groups of a family as lists of ranks, which are a value of the option `groups`. Raises `ScheduleError`.

    >>> groups_on("usp:2x2", 4, AttentionOptions(groups="strided"))
    '0,2|1,3'
    """
    lists: str = _listed(_order(name, ranks, options), _members(name))
    return lists


def options_of(name: str) -> tuple[str, ...]:
    """The fields of `AttentionOptions`, without the passes, that apply to a schedule.

    >>> options_of("usp:2x4:token-ring")
    ('buffers', 'gradient_dtype', 'result_dtype', 'groups')
    """
    spec, family = _known(name, None)
    variant = ATTENTION.get(family.get("variant", ""))
    left_out = () if variant is None else {*spec.of_variant}.difference(variant.options)
    return tuple(each for each in spec.options if each not in left_out)


def balanced_ring(workload: Workload) -> str:
    """The schedule over one ring that gives all ranks equal work: that of the layout that the mask names."""
    layout = workload.visible.balanced_layout
    return "ring-attention" if layout == "contiguous" else f"{layout}-ring-attention"


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
    spec, family = _known(name, world_size)
    layout = spec.layout(workload, world_size, **family)
    return layout.on_ranks(_order(name, ranks, options)) if spec.split else layout


def check_attention(names: Iterable[str]) -> None:
    """Raise `ScheduleError` for the first name that is not known, or whose split or variant is none."""
    for name in names:
        _known(name, None)


def _known(name: str, world_size: int | None) -> tuple[AttentionSpec, dict[str, Any]]:
    """The spec of a name, and of a family the keywords `split` and `variant`. Any world size is accepted if None."""
    family, *parts = name.split(":")
    spec = ATTENTION.get(family)
    if spec is None or len(parts) > bool(spec.split) + bool(spec.variants):
        raise ScheduleError(unknown("schedule", name, attention_names()))
    if not spec.split:
        return spec, {}
    text, variant = (*parts, "", "")[:2]
    numbers = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if numbers is None:
        raise ScheduleError(f"schedule {name!r}: expected {family}:{spec.split} with two numbers, like {family}:2x4")
    if len(parts) > 1 and variant not in spec.variants:
        raise ScheduleError(f"schedule {name!r}: {unknown('variant', variant, spec.variants)}")
    first, second = int(numbers[1]), int(numbers[2])
    if world_size not in (None, first * second):
        raise ScheduleError(f"schedule {name!r} is for {first * second} ranks, expected a split of {world_size}")
    return spec, {"split": (first, second)} | ({"variant": variant} if spec.variants else {})
