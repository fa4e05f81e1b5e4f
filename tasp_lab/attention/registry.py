"""The attention schedules, by name: what builds each one, its sequence layout, and the options that apply to it.

A family of schedules has a split of the ranks in its names, such as ``usp:2x4``. Builders and layouts are imported on
first call, so help and completion list the names without importing numpy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tasp_lab.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.errors import ScheduleError, unknown
from tasp_lab.lazily import lazily

if TYPE_CHECKING:
    from tasp_lab.decomposition.decompose import Decomposition
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
        keyword `decomposition` if it uses rings, and `split` if it is a family.
    layout : the sequence layout of a workload on a number of ranks; with `split` if it is a family.
    options : the fields of `AttentionOptions` that apply to it; each family of passes has `passes`.
    uses_rings : whether it accepts a decomposition.
    split : what the split of a family stands for, as shown to users: ``UxR``; empty if it is none.
    """

    builder: Callable[..., tuple[Schedule, ...]]
    layout: Callable[..., SequenceLayout]
    options: tuple[str, ...]
    uses_rings: bool = False
    split: str = ""


def _layout(full: str, causal: str) -> Callable[..., SequenceLayout]:
    """A layout function per mask, the same for all splits of a family."""
    functions = {
        "full": lazily("tasp_lab.workload.sequence_layout", full),
        "causal": lazily("tasp_lab.workload.sequence_layout", causal),
    }

    def layout(workload: Workload, world_size: int, split: tuple[int, int] | None = None) -> SequenceLayout:
        found: SequenceLayout = functions[workload.mask](workload.sequence, world_size, workload.documents)
        return found

    return layout


def _circulation(full: str, causal: str, uses_rings: bool = False) -> AttentionSpec:
    options = ("trim", "buffers", "dataflow", "gradient_dtype")
    builder = lazily("tasp_lab.attention.backward", "circulation_schedules")
    return AttentionSpec(builder, _layout(full, causal), options, uses_rings)


STRAIGHT_HOME = ("buffers", "gradient_dtype", "result_dtype")
"""The options of schedules whose results return straight to their owners."""


def _token_ring(full: str, causal: str) -> AttentionSpec:
    builder = lazily("tasp_lab.attention.token_ring", "token_ring")
    return AttentionSpec(builder, _layout(full, causal), (*STRAIGHT_HOME, "tail_chunks"))


def _straight_home(module: str, builder: str) -> AttentionSpec:
    """A schedule over many rings."""
    return AttentionSpec(
        lazily(f"tasp_lab.attention.{module}", builder), _layout("contiguous", "zigzag"), STRAIGHT_HOME, uses_rings=True
    )


def _kv_all_gather(uses_rings: bool = False) -> AttentionSpec:
    builder = lazily("tasp_lab.attention.kv_all_gather", "kv_all_gather")
    return AttentionSpec(builder, _layout("contiguous", "zigzag"), ("trim", "gradient_dtype"), uses_rings)


ATTENTION: Mapping[str, AttentionSpec] = {
    "ring-attention": _circulation("contiguous", "contiguous"),
    "zigzag-ring-attention": _circulation("zigzag", "zigzag"),
    "striped-ring-attention": _circulation("striped", "striped"),
    "tasp": _circulation("contiguous", "zigzag", uses_rings=True),
    "token-ring": _token_ring("contiguous", "contiguous"),
    "zigzag-token-ring": _token_ring("zigzag", "zigzag"),
    "token-multi-ring": _straight_home("token_ring", "token_multi_ring"),
    "kv-and-q-rings": _straight_home("kv_and_q_rings", "kv_and_q_rings"),
    "ulysses": AttentionSpec(
        lazily("tasp_lab.attention.ulysses", "ulysses"),
        _layout("contiguous", "contiguous"),
        ("gradient_dtype", "result_dtype"),
    ),
    "usp": AttentionSpec(
        lazily("tasp_lab.attention.usp", "usp"),
        lazily("tasp_lab.attention.usp", "usp_layout"),
        ("trim", "buffers", "dataflow", "gradient_dtype", "result_dtype"),
        split="UxR",
    ),
    "kv-all-gather": _kv_all_gather(),
    "multi-ring-kv-all-gather": _kv_all_gather(uses_rings=True),
    "direct-kv-all-gather": _kv_all_gather(),
    "trees-kv-all-gather": _kv_all_gather(),
    "burst": AttentionSpec(
        lazily("tasp_lab.attention.burst", "burst"),
        _layout("contiguous", "zigzag"),
        ("trim", "buffers", "gradient_dtype"),
    ),
    "double-ring": AttentionSpec(
        lazily("tasp_lab.attention.double_ring", "double_ring"),
        _layout("contiguous", "zigzag"),
        ("trim", "buffers", "gradient_dtype"),
        split="WxR",
    ),
    "grid": AttentionSpec(
        lazily("tasp_lab.attention.grid", "grid"),
        _layout("contiguous", "zigzag"),
        ("gradient_dtype", "result_dtype"),
        split="YxX",
    ),
}
"""Attention schedules by name, as on the command line without the split; new schedules are registered here only."""

CIRCULATIONS = tuple(name for name, spec in ATTENTION.items() if "dataflow" in spec.options and not spec.split)
"""The schedules whose passes are circulations, see `tasp_lab.attention.circulation`."""

USES_RINGS = tuple(name for name, spec in ATTENTION.items() if spec.uses_rings)
"""The attention schedules that accept a decomposition."""


def attention_names() -> list[str]:
    """The names as shown to users.

    >>> attention_names()[-2:]
    ['double-ring:WxR', 'grid:YxX']
    """
    return [f"{name}:{spec.split}" if spec.split else name for name, spec in ATTENTION.items()]


def attention_names_on(world_size: int) -> list[str]:
    """All names on a number of ranks: of a family each split into two factors of which none is 1.

    >>> attention_names_on(8)[-2:]
    ['grid:2x4', 'grid:4x2']
    """
    splits = [f"{each}x{world_size // each}" for each in range(2, world_size // 2 + 1) if world_size % each == 0]
    found = []
    for name, spec in ATTENTION.items():
        found += [f"{name}:{split}" for split in splits] if spec.split else [name]
    return found


def is_attention(name: str) -> bool:
    """Whether a name, with or without a split, is one of an attention schedule.

    >>> is_attention("usp:2x4"), is_attention("multi-ring")
    (True, False)
    """
    return name.partition(":")[0] in ATTENTION


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

    Raises `ScheduleError` for an unknown name, a split of another world size, options that do not apply, and if there
    are too many blocks to verify.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> from tasp_lab.workload.layer import Workload
    >>> layer, options = Workload(sequence=64, mask="causal"), AttentionOptions("both", dataflow="rotate-kv")
    >>> [schedule.transfers for schedule in attention_schedules("ring-attention", full_mesh(4), layer, None, options)]
    [6, 12]
    """
    spec, split = _known(name, topology.world_size)
    for field in fields(options):
        given, default = getattr(options, field.name), field.default
        if given != default and field.name not in ("passes", *spec.options):
            what = field.name.replace("_", " ")
            raise ScheduleError(f"schedule {name!r}: {what} {given!r} does not apply to it, expected {default!r}")
    rings = {"decomposition": decomposition} if spec.uses_rings else {}
    return spec.builder(name, topology, workload, options, **rings, **split)


def options_for(name: str, options: AttentionOptions) -> AttentionOptions:
    """The options with the defaults in place of those that do not apply to a schedule.

    >>> options_for("ulysses", AttentionOptions("both", buffers=4, gradient_dtype="input")).buffers
    3
    """
    known = ("passes", *_known(name, None)[0].options)
    return AttentionOptions(
        **{field.name: getattr(options, field.name) for field in fields(options) if field.name in known}
    )


def balanced_ring(workload: Workload) -> str:
    """The schedule over one ring that gives all ranks equal work: of contiguous shards, under a causal mask zigzag."""
    return "ring-attention" if workload.mask == "full" else "zigzag-ring-attention"


def attention_layout(name: str, workload: Workload, world_size: int) -> SequenceLayout:
    """The sequence layout of an attention schedule.

    Raises `ScheduleError` for an unknown name and a split of another world size.
    """
    spec, split = _known(name, world_size)
    return spec.layout(workload, world_size, **split)


def check_attention(names: Iterable[str]) -> None:
    """Raise `ScheduleError` for the first name that is not known, or whose split is none."""
    for name in names:
        _known(name, None)


def _known(name: str, world_size: int | None) -> tuple[AttentionSpec, dict[str, tuple[int, int]]]:
    """The spec of a name, and the keyword `split` of a family. Any world size is accepted if None."""
    family, _, text = name.partition(":")
    spec = ATTENTION.get(family)
    if spec is None or (text and not spec.split):
        raise ScheduleError(unknown("schedule", name, attention_names()))
    if not spec.split:
        return spec, {}
    numbers = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if numbers is None:
        raise ScheduleError(f"schedule {name!r}: expected {family}:{spec.split} with two numbers, like {family}:2x4")
    first, second = int(numbers[1]), int(numbers[2])
    if world_size not in (None, first * second):
        raise ScheduleError(f"schedule {name!r} is for {first * second} ranks, expected a split of {world_size}")
    return spec, {"split": (first, second)}
