"""All schedules by name: of collectives, of softmax and linear attention, and of hybrids.

A schedule is one file of ``collectives/``, ``attention/`` or ``linear/`` that registers itself beside its builder, and
one entry of `FILES`, so that help and completion list its name without importing the file::

    @schedule("burst", "softmax", layout="balanced", options=("trim", "buffers", "gradient_dtype"))
    def burst(name, topology, workload, options=DEFAULT_OPTIONS): ...

A family has a split of the ranks in its names, such as ``usp:2x4``, and may have variants, such as ``usp:2x4:tasp``. A
hybrid is named after one schedule of linear and one of softmax attention, such as ``lasp-2+tasp``.

Schedules of users register in the same way: in a file, whose schedules are called ``mine.py:burst``, in a notebook, or
in an installed package that offers them as entry points (`tasp_lab.schedules.files`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from tasp_lab.core.choices import AttentionKind
from tasp_lab.core.errors import (
    NoDecompositionError,
    NoRouteError,
    ScheduleError,
    first_line,
    nearest,
    unknown,
)
from tasp_lab.core.lazy import from_above
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.collectives.kinds import CollectiveKind, NcclTestsName, with_article
from tasp_lab.schedules.files import (
    READERS,
    file_of,
    load_entry_point,
    module_of,
    names_in,
    parts_of,
    run_file,
)
from tasp_lab.workload.layer import Work, Workload

if TYPE_CHECKING:
    from tasp_lab.workload.sequence_layout import SequenceLayout

Kind = CollectiveKind | Literal["softmax", "linear"]
"""What a schedule computes."""

Follows = Literal["ranks", "structure", "rates"]
FOLLOWS: tuple[Follows, ...] = get_args(Follows)
"""What schedules depend on, apart from their rings and from which ranks are a group: the number of ranks alone, the
`tasp_lab.topology.graph.Topology.structure`, or bandwidths and latencies, too."""

COLLECTIVE, SOFTMAX, LINEAR_KIND, HYBRID = "a collective", "softmax attention", "linear attention", "a hybrid"
"""Kinds of work, in messages."""

KINDS: Mapping[AttentionKind, str] = {"softmax": SOFTMAX, "linear": LINEAR_KIND, "hybrid": HYBRID}
"""Those of layers."""

NOT_APPLICABLE = (ScheduleError, NoRouteError, NoDecompositionError)
"""What building or simulating a schedule raises if the layer, the topology or the options contradict it."""


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule, or a family of them.

    Parameters
    ----------
    kind : what it computes.
    builder : of a collective, builds the schedule from a topology and `shard_bytes`, and a decomposition if it uses
        rings. Of attention, the schedules, one per pass, from its name, a topology, a workload and `AttentionOptions`
        (of linear attention also from decays); with the keyword `decomposition` if it uses rings, `split` if it is a
        family, and `variant` if that has variants.
    moves : what moves in a forward pass, for the tables of the documents.
    layout : of attention, a name of `tasp_lab.workload.sequence_layout.LAYOUTS`, or ``balanced`` for that of the mask;
        or a function of a workload and a number of ranks, with the keywords `split` and `variant` as above.
    options : the fields of `AttentionOptions` that apply to it; `passes` applies to all.
    uses_rings : whether it accepts a decomposition.
    follows : what it depends on where all ranks are linked, see `Follows`.
    is_baseline : whether it goes around one ring, or is plain tensor parallelism; speed-ups are over the fastest of
        these.
    moves_states : of linear attention, whether states move, so that a sequence may begin with one and leave one.
    library_call : nccl-tests' name of the call, if the schedule is one call of the communication library; else empty.
    split : what the split of a family stands for, as shown to users: ``UxR``; empty if it is none.
    fits : whether there is a schedule of a split, of its two numbers; if not given, there is of any.
    variants : the schedules whose names may follow the split after a colon; without one the variant is "".
    of_variant : options that apply with a variant only if they apply to the schedule of this name.
    members : which number of the split is that of the ranks of a group. Builder and layout have groups of consecutive
        ranks; other groups follow from the option `groups`, see `tasp_lab.schedules.attention.rank_order`.
    same_as : the schedule that a split and a variant of a family amount to; "" if they are one of their own.
    decode : whether it is for decode layers, and only for these.
    """

    kind: Kind
    builder: Callable[..., Any]
    moves: str = ""
    layout: str | Callable[..., SequenceLayout] = "balanced"
    options: tuple[str, ...] = ()
    uses_rings: bool = False
    follows: Follows = "rates"
    is_baseline: bool = False
    moves_states: bool = False
    library_call: NcclTestsName | Literal[""] = ""
    split: str = ""
    fits: Callable[[int, int], bool] = lambda first, second: True
    variants: tuple[str, ...] = ()
    of_variant: tuple[str, ...] = ()
    members: int = 0
    same_as: Callable[[tuple[int, int], str], str] | None = None
    decode: bool = False

    def layout_on(self, workload: Workload, world_size: int, **family: object) -> SequenceLayout:
        """The sequence layout of a workload on a number of ranks."""
        if callable(self.layout):
            return self.layout(workload, world_size, **family)
        from tasp_lab.workload.sequence_layout import layout_named

        name = workload.visible.balanced_layout if self.layout == "balanced" else self.layout
        return layout_named(name, workload, world_size)


# -- the registry -----------------------------------------------------------------------------------------------------
FILES = (
    ("AllGather", "collectives.all_gather", "ring multi-ring direct"),
    ("AllGather", "collectives.library_rings", "library-ring"),
    ("AllGather", "collectives.tree_all_gather", "trees"),
    ("ReduceScatter", "collectives.library_rings", "library-ring-reduce-scatter"),
    ("ReduceScatter", "collectives.ring_reductions", "ring-reduce-scatter multi-ring-reduce-scatter"),
    ("AllReduce", "collectives.in_switch", "library-switch-all-reduce"),
    ("AllReduce", "collectives.library_rings", "library-ring-all-reduce"),
    ("AllReduce", "collectives.ring_reductions", "ring-all-reduce multi-ring-all-reduce"),
    ("AllReduce", "collectives.tree_all_reduce", "library-tree-all-reduce library-nvls-tree-all-reduce"),
    ("AllToAll", "collectives.point_to_point", "all-to-all"),
    ("SendRecv", "collectives.point_to_point", "send-recv"),
    ("softmax", "attention.backward", "ring-attention zigzag-ring-attention striped-ring-attention half-each-way tasp"),
    ("softmax", "attention.burst", "burst"),
    ("softmax", "attention.decode", "decode-heads decode-reduce-scatter decode-all-to-all decode-tree"),
    ("softmax", "attention.direct_attention", "direct-attention"),
    ("softmax", "attention.double_ring", "double-ring:WxR"),
    ("softmax", "attention.grid", "grid:YxX"),
    ("softmax", "attention.kv_all_gather", "kv-all-gather multi-ring-kv-all-gather direct-kv-all-gather"),
    ("softmax", "attention.kv_all_gather", "trees-kv-all-gather"),
    ("softmax", "attention.kv_and_q_rings", "kv-and-q-rings"),
    ("softmax", "attention.star_trail", "startrail:CxT"),
    ("softmax", "attention.token_ring", "token-ring zigzag-token-ring token-multi-ring"),
    ("softmax", "attention.ulysses", "ulysses staged-ulysses"),
    ("softmax", "attention.usp", "usp:UxR"),
    ("linear", "linear.lasp", "lasp all-scan"),
    ("linear", "linear.lasp2", "lasp-2 multi-ring-lasp-2 direct-lasp-2 trees-lasp-2"),
    ("linear", "linear.ring", "ring-linear-attention ring-linear-attention-right"),
)
"""Kind, file and names of the schedules of this package; a family has its split behind a colon."""


class Listed(NamedTuple):
    """What is known of a schedule of this package before its file is imported."""

    kind: str
    split: str
    module: str


_OURS = {
    name.partition(":")[0]: Listed(kind, name.partition(":")[2], f"{__package__}.{file}")
    for kind, file, names in FILES
    for name in names.split()
}

SCHEDULES: dict[str, ScheduleSpec | Listed] = {**_OURS}
"""By name, of families without split: those of this package, and those that others have entered."""

_FROM_FILES: dict[str, dict[str, ScheduleSpec]] = {}
"""By the module of a user's file, the schedules that it registers."""

Builder = TypeVar("Builder", bound=Callable[..., Any])


def schedule(name: str, kind: Kind, **settings: Any) -> Callable[[Builder], Builder]:
    """Register the decorated builder; `settings` are the other fields of `ScheduleSpec`.

    A family has its split behind a colon.
    """
    family, _, split = name.partition(":")

    def register(builder: Builder) -> Builder:
        into: dict[str, Any] = SCHEDULES
        if not is_ours(builder):
            _check_outside(family, kind, builder, settings)
            into = _FROM_FILES.get(builder.__module__, SCHEDULES)
        elif not isinstance(SCHEDULES.get(family), Listed | None):
            return builder  # somebody has entered another one of this name
        into[family] = ScheduleSpec(kind, builder, split=split, **settings)
        return builder

    return register


def is_ours(builder: Callable[..., Any]) -> bool:
    """Whether a builder is one of tasp-lab; others are run with care, and what they return is checked."""
    return str(builder.__module__).startswith("tasp_lab.")


def _check_outside(family: str, kind: Kind, builder: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise `ScheduleError` for what a user's file, a notebook or an installed package cannot register."""
    if kind not in (known := [*get_args(CollectiveKind), "softmax", "linear"]):
        raise ScheduleError(unknown("kind of schedule", kind, known))
    if wrong := [setting for setting in settings if setting not in ScheduleSpec.__dataclass_fields__]:
        raise ScheduleError(unknown("setting of a schedule", wrong[0], [*ScheduleSpec.__dataclass_fields__][2:]))
    if not re.fullmatch(r"[\w-]+", family):
        raise ScheduleError(f"schedule {family!r}: expected a name of letters, digits and hyphens")
    of_file = _FROM_FILES.get(builder.__module__)
    if of_file is not None and family in of_file:
        raise ScheduleError(f"schedule {family!r} is registered twice, expected one of this name")
    if of_file is None and family in _OURS:
        raise ScheduleError(f"schedule {family!r} is one of tasp-lab's own, expected another name")


def registered_name(builder: Callable[..., Any]) -> str:
    """The name of the schedule of a registered builder. Raises `ScheduleError` for none, and for several."""
    names = [name for name, spec in SCHEDULES.items() if isinstance(spec, ScheduleSpec) and spec.builder is builder]
    for name, spec in _FROM_FILES.get(builder.__module__, {}).items():
        if spec.builder is builder:
            names.append(f"{builder.__code__.co_filename}:{name}")
    if len(names) != 1:
        what = getattr(builder, "__name__", repr(builder))
        several = f"builds {', '.join(names)}, expected one of these names"
        missing = 'is not registered, expected a function below @schedule("NAME", "KIND") of ' + __name__
        raise ScheduleError(f"schedule builder {what} {several if names else missing}")
    return names[0]


def _outside(name: str) -> ScheduleSpec | None:
    """The schedule of a user's file or of an installed package; None for another name. Raises `ScheduleError`."""
    if parts_of(name)[0] != name:
        return None  # usp:2x4 is registered as its family usp
    if not (file := file_of(name)):
        is_name = re.fullmatch(r"(?!\d+x\d+$)[\w-]+", name)  # neither a split nor a hybrid
        found = SCHEDULES.get(name) if is_name and load_entry_point(name) else None
        return found if isinstance(found, ScheduleSpec) else None
    if (end := Path(file).suffix) in READERS:
        spec: ScheduleSpec = from_above(f"schedule of {end}")(file)
        return spec
    module, own = module_of(file), name[len(file) + 1 :]
    if module not in _FROM_FILES:
        _FROM_FILES[module] = {}
        try:
            run_file(file, module)
        except BaseException:
            del _FROM_FILES[module]
            raise
    specs = _FROM_FILES[module]
    if own in specs:
        return specs[own]
    if not specs:
        raise ScheduleError(f'{file} registers no schedule, expected @schedule("NAME", "KIND") of {__name__}')
    if not own:
        raise ScheduleError(f"schedule {name!r}: expected the name of a schedule behind a colon: "
                            f"{', '.join(f'{file}:{other}' for other in specs)}")  # fmt: skip
    raise ScheduleError(f"{file}: {unknown('schedule', own, specs)}")


class SchedulesOf(Mapping[str, ScheduleSpec]):
    """The schedules of some kinds, a view of the registry. Listing names imports nothing, looking one up its file."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds

    def find(self, name: str) -> ScheduleSpec | Listed | None:
        """What is known of a name, which has the kind and the split of its schedule; None for no name of the view."""
        found = SCHEDULES.get(name) or _outside(name)
        return found if found is not None and found.kind in self._kinds else None

    def __iter__(self) -> Iterator[str]:
        return (name for name, known in [*SCHEDULES.items()] if known.kind in self._kinds)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def __getitem__(self, name: str) -> ScheduleSpec:
        found = self.find(name)
        if isinstance(found, Listed):
            import_module(found.module)
            found = SCHEDULES[name]
        if not isinstance(found, ScheduleSpec):
            raise KeyError(name)
        return found


COLLECTIVES, ATTENTION, LINEAR = SchedulesOf(*get_args(CollectiveKind)), SchedulesOf("softmax"), SchedulesOf("linear")
"""The schedules of collectives, of softmax and of linear attention, by name as on the command line."""

LAYERS = SchedulesOf("softmax", "linear")
ALL = SchedulesOf(*get_args(CollectiveKind), "softmax", "linear")


def follows(name: str) -> Follows:
    """What the schedules of a name depend on where all ranks are linked.

    >>> follows("ulysses"), follows("token-multi-ring"), follows("usp:2x4"), follows("usp:2x4:tasp")
    ('ranks', 'structure', 'ranks', 'rates')
    """
    family, parts = parts_of(name)
    found = [FOLLOWS.index(ALL[each].follows) for each in (family, *parts) if each in ALL]
    return FOLLOWS[max(found)] if found and not any(map(uses_rings, parts)) else "rates"


def uses_rings(name: str) -> bool:
    """Whether a schedule accepts a decomposition.

    >>> uses_rings("multi-ring"), uses_rings("lasp-2+tasp"), uses_rings("usp:2x4")
    (True, True, False)
    """
    if is_hybrid(name):
        return any(map(uses_rings, names_of(name)))
    spec = ALL.get(parts_of(name)[0])
    return spec is not None and spec.uses_rings


def state_schedules() -> list[str]:
    """The schedules of linear attention that move states, so that a sequence may begin with one and leave one."""
    return [name for name, spec in LINEAR.items() if spec.moves_states]


def baselines() -> list[str]:
    """The schedules that speed-ups are over: those over one ring, LASP-2H, and `decode-heads`."""
    return [*(name for name, spec in LAYERS.items() if spec.is_baseline), LASP_2H]


def is_own(name: str) -> bool:
    """Whether tasp-lab itself builds the schedules of a name of a layer, so that its sources say when they change.

    >>> is_own("lasp-2+tasp"), is_own("ring-attention"), is_own("usp:2x4"), is_own("mine")
    (True, True, True, False)
    """
    if is_hybrid(name):
        return all(map(is_own, names_in(name)))
    family, parts = parts_of(name)
    used = [each for each in (family, *parts) if each in LAYERS]
    return family in used and all(each in _OURS and is_ours(LAYERS[each].builder) for each in used)


@cache
def family_of(name: str) -> str:
    """What the schedules of one builder have in common: the file that registers it; of any other schedule its name.

    >>> family_of("zigzag-ring-attention") == family_of("tasp"), family_of("usp:8x4"), family_of("mine")
    (True, 'usp', 'mine')
    """
    if is_hybrid(name):
        return "+".join(map(family_of, names_in(name)))
    ours = _OURS.get(name.partition(":")[0])
    return ours.module.rpartition(".")[2] if ours else name


def one_name(name: str) -> str:
    """The one name of schedules that are the same: USP with one group is Ulysses, with groups of one its ring.

    >>> one_name("usp:8x1:striped-ring-attention"), one_name("usp:1x8:striped-ring-attention"), one_name("burst")
    ('ulysses', 'striped-ring-attention', 'burst')
    """
    spec = ATTENTION.get(parts_of(name)[0])
    if spec is None or spec.same_as is None:
        return name
    _, family = spec_of(name, SOFTMAX)
    return spec.same_as(family["split"], family.get("variant", "")) or name


# -- names of softmax attention ---------------------------------------------------------------------------------------
def attention_names() -> list[str]:
    """The names as shown to users.

    >>> [name for name in attention_names() if ":" in name]
    ['double-ring:WxR', 'grid:YxX', 'startrail:CxT', 'usp:UxR']
    """
    found = ((name, ATTENTION.find(name)) for name in ATTENTION)
    return [f"{name}:{each.split}" if each is not None and each.split else name for name, each in found]


def attention_names_on(world_size: int, *, variants: bool = False, decode: bool = False) -> list[str]:
    """All names on a number of ranks: of a family each split into two factors of which none is 1, if there is one.

    With `variants` also each split of a family with each of its variants; with `decode` those for decode layers.

    >>> attention_names_on(8)[-2:]
    ['usp:2x4', 'usp:4x2']
    """
    splits = [(each, world_size // each) for each in range(2, world_size // 2 + 1) if world_size % each == 0]
    found = []
    for name, spec in ATTENTION.items():
        suffixes = ["", *(f":{variant}" for variant in _variants(spec) if variants)]
        if spec.decode != decode:
            continue
        of_family = [f"{name}:{a}x{b}{suffix}" for a, b in splits if spec.fits(a, b) for suffix in suffixes]
        found += of_family if spec.split else [name]
    return found


def _variants(spec: ScheduleSpec) -> list[str]:
    """The variants of a family; those whose schedules are there."""
    return [each for each in spec.variants if each in ATTENTION or each in COLLECTIVES]


def balanced_ring(workload: Workload) -> str:
    """The schedule over one ring that gives all ranks equal work: that of the layout that the mask names."""
    layout = workload.visible.balanced_layout
    rings = (name for name, spec in ATTENTION.items() if spec.is_baseline and spec.layout == layout)
    return next(rings)


# -- names of hybrids -------------------------------------------------------------------------------------------------
LASP_2H = "lasp-2+kv-all-gather"
"""The schedule of hybrids that was published with LASP-2 (arXiv:2502.07563): the states of linear layers and the keys
of softmax layers are gathered. There all layers have contiguous shards; here those of softmax layers are zigzag under a
causal mask, which balances the work but moves hidden states."""

EXPECTED = f"LINEAR+SOFTMAX, such as {LASP_2H}"
"""The form of names, in messages."""


class Names(NamedTuple):
    """The names of the schedules of linear and of softmax layers."""

    linear: str
    softmax: str

    def of(self, letter: str) -> str:
        """The schedule of a layer of a pattern."""
        return self.linear if letter == "L" else self.softmax


def is_hybrid(name: str) -> bool:
    """Whether a name has the form of one of a hybrid."""
    return "+" in name and len(names_in(name)) > 1


def names_of(name: str) -> Names:
    """The schedules of the layers of a hybrid, by its name.

    >>> names_of("lasp+usp:2x4")
    Names(linear='lasp', softmax='usp:2x4')

    Raises `ScheduleError` for a name of another form, and for unknown schedules or those of the other side.
    """
    parts = names_in(name)
    if len(parts) != 2 or not all(parts):
        raise ScheduleError(f"schedule {name!r}, expected one for a hybrid: {EXPECTED}")
    try:
        for part, kind in zip(parts, (LINEAR_KIND, SOFTMAX), strict=True):
            spec_of(part, kind)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None
    return Names(*parts)


# -- names of any kind ------------------------------------------------------------------------------------------------
def schedules_of(kind: CollectiveKind) -> list[str]:
    """The schedules of a collective that are not a single library call.

    >>> schedules_of("AllGather")
    ['ring', 'multi-ring', 'direct', 'trees']
    """
    return [name for name, spec in COLLECTIVES.items() if spec.kind == kind and not spec.library_call]


def kind_of(names: Iterable[str]) -> CollectiveKind:
    """The collective that the schedules, one or more, implement. Raises `ScheduleError` if they differ in it.

    >>> kind_of(["ring", "ring-all-reduce"])
    Traceback (most recent call last):
    tasp_lab.core.errors.ScheduleError: schedule 'ring-all-reduce' is an AllReduce, 'ring' an AllGather: expected \
schedules of one collective
    """
    kinds: dict[str, CollectiveKind] = {}
    for name in names:
        if (known := COLLECTIVES.find(name)) is None:
            raise ScheduleError(unknown("schedule", name, COLLECTIVES))
        kinds[name] = known.kind  # type: ignore[assignment]  # the view has no others
    (first, kind), *others = kinds.items()
    for name, other in others:
        if other != kind:
            raise ScheduleError(f"schedule {name!r} is {with_article(other)}, {first!r} {with_article(kind)}: "
                                "expected schedules of one collective")  # fmt: skip
    return kind


def layer_names_on(world_size: int, work: Workload, *, variants: bool = False) -> list[str]:
    """The names of all schedules for the kind of a layer, of families each split of a number of ranks.

    With `variants` also each split of a family with each of its variants. None of hybrids, which have too many: those
    to compare follow from the schedules of their layers (`tasp_lab.prediction.compare`).

    >>> layer_names_on(8, Workload(sequence=64, kind="linear"))[:2]
    ['lasp', 'all-scan']
    """
    if work.kind == "hybrid":
        return []
    if work.kind == "linear":
        return list(LINEAR)
    return attention_names_on(world_size, variants=variants, decode=work.decode)


def options_of(name: str) -> tuple[str, ...]:
    """The fields of `AttentionOptions`, without the passes, that apply to a schedule of a layer.

    >>> options_of("all-scan"), options_of("usp:2x4:token-ring")
    (('pieces',), ('buffers', 'gradient_dtype', 'result_dtype', 'groups', 'padded_heads'))
    >>> options_of("all-scan+ulysses")
    ('pieces', 'gradient_dtype', 'result_dtype', 'padded_heads')
    """
    if is_hybrid(name):
        return tuple(dict.fromkeys(option for each in names_of(name) for option in options_of(each)))
    if name in LINEAR:
        return LINEAR[name].options
    spec, family = spec_of(name, SOFTMAX)
    variant = ATTENTION.get(family.get("variant", ""))
    left_out = () if variant is None else {*spec.of_variant}.difference(variant.options)
    return tuple(each for each in spec.options if each not in left_out)


def options_for(name: str, options: AttentionOptions) -> AttentionOptions:
    """The options with the defaults in place of those that do not apply to a schedule of a layer.

    >>> options_for("ulysses", AttentionOptions("both", buffers=4, gradient_dtype="input")).buffers
    3
    """
    return options.only(options_of(name))


def options_for_layer(name: str, letter: str, options: AttentionOptions) -> AttentionOptions:
    """The options that a layer of a pattern knows. Raises `ScheduleError` for one that neither kind of layer knows."""
    options.check_known(name, options_of(name))
    return options_for(names_of(name).of(letter), options)


def check_names(names: Iterable[str], work: Work) -> None:
    """Raise `ScheduleError` for the first name that is no schedule for this work.

    All schedules of one call must implement the same collective.

    >>> check_names(["ring"], Workload(sequence=64, heads=1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tasp_lab.core.errors.ScheduleError: schedule 'ring' is an AllGather, expected one for softmax attention: ...
    """
    names, wanted = list(names), KINDS[work.kind] if isinstance(work, Workload) else COLLECTIVE
    for name in names:
        if "," in name:
            each = " ".join(f"--schedule {part.strip()}" for part in name.split(","))
            raise ScheduleError(f"schedule {name!r}: expected one name; for several give {each}")
        if wanted == HYBRID and is_hybrid(name):
            names_of(name)
        else:
            spec, _ = spec_of(name, wanted, hint="; or --kind linear" if wanted == SOFTMAX and name in LINEAR else "")
            if isinstance(work, Workload) and spec.decode != work.decode:
                what = "for decode layers alone, expected a layer with decode (--decode)"
                if work.decode:
                    known = ", ".join(each for each, own in ATTENTION.items() if own.decode)
                    what = f"not for decode layers, expected one of {known}"
                raise ScheduleError(f"schedule {name!r} is {what}")
    if wanted == COLLECTIVE and names:
        kind_of(names)


def spec_of(
    name: str, wanted: str, world_size: int | None = None, *, hint: str = ""
) -> tuple[ScheduleSpec, dict[str, Any]]:
    """The spec of a name for a kind of work, and of a family the keywords `split` and `variant`.

    `wanted` is a value of `KINDS`, or `COLLECTIVE`; any world size is accepted if None. Raises `ScheduleError` for an
    unknown name, one of another kind of work, with `hint` at its end, and for a split of another form or world size.

    >>> spec_of("usp:2x4:tasp", SOFTMAX, 8)[1]
    {'split': (2, 4), 'variant': 'tasp'}
    """
    kind = _kind_of_name(name)
    if kind and kind != wanted:
        expected = wanted if wanted == COLLECTIVE else f"one for {wanted}"
        known = ", ".join(_names_for(wanted))
        raise ScheduleError(f"schedule {name!r} is {_what(name)}, expected {expected}: {known}{hint}")
    for collective in get_args(CollectiveKind) if not kind and wanted == COLLECTIVE else ():
        if nearest(name, [collective], at_least=1):
            raise ScheduleError(f"schedule {name!r} is a collective, expected one of its schedules: "
                                f"{', '.join(schedules_of(collective))}")  # fmt: skip
    family, parts = parts_of(name)
    spec = ALL.get(family)
    if spec is None or len(parts) > bool(spec.split) + bool(spec.variants):
        raise ScheduleError(unknown("schedule", name, _names_for(wanted)))
    if not spec.split:
        return spec, {}
    text, variant = (*parts, "", "")[:2]
    numbers = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if numbers is None:
        raise ScheduleError(f"schedule {name!r}: expected {family}:{spec.split} with two numbers, like {family}:2x4")
    if len(parts) > 1 and variant not in _variants(spec):
        raise ScheduleError(f"schedule {name!r}: {unknown('variant', variant, _variants(spec))}")
    first, second = int(numbers[1]), int(numbers[2])
    if world_size not in (None, first * second):
        raise ScheduleError(f"schedule {name!r} is for {first * second} ranks, expected a split of {world_size}")
    return spec, {"split": (first, second)} | ({"variant": variant} if spec.variants else {})


def _names_for(wanted: str) -> list[str]:
    of_layers = {SOFTMAX: attention_names(), LINEAR_KIND: list(LINEAR), HYBRID: [EXPECTED]}
    return of_layers.get(wanted, list(COLLECTIVES))


def by_kind(names: Sequence[str], kinds: Sequence[AttentionKind]) -> dict[AttentionKind, list[str]]:
    """The names of schedules of each of these kinds of layers. Raises `ScheduleError` for one of no such kind.

    >>> by_kind(["tasp", "lasp"], ["softmax", "linear", "hybrid"])
    {'softmax': ['tasp'], 'linear': ['lasp'], 'hybrid': []}
    """
    of_names = {name: _kind_of_name(name) for name in names}
    for name, found in of_names.items():
        if not found:
            known = [each for each in attention_names() if not ATTENTION[parts_of(each)[0]].decode]
            raise ScheduleError(unknown("schedule", name, [*known, *LINEAR]))
        if found not in (wanted := [KINDS[kind] for kind in kinds]):
            raise ScheduleError(f"schedule {name!r} is {_what(name)}, expected one for {' or '.join(wanted)}")
    return {kind: [name for name in names if of_names[name] == KINDS[kind]] for kind in kinds}


def _kind_of_name(name: str) -> str:
    """What a schedule is for; empty for an unknown name."""
    if is_hybrid(name):
        return HYBRID
    family = parts_of(name)[0]
    found = ALL.find(family)
    if found is None or (family != name and found.kind != "softmax"):  # others have no splits
        return ""
    return {"softmax": SOFTMAX, "linear": LINEAR_KIND}.get(found.kind, COLLECTIVE)


def _what(name: str) -> str:
    """What a known schedule is, in messages."""
    return with_article(kind_of([name])) if name in COLLECTIVES else f"for {_kind_of_name(name)}"


def reason_of(error: Exception, name: str) -> str:
    """Why a schedule does not apply, as text that stands beside its name.

    >>> reason_of(ScheduleError("schedule 'direct', step 0: rank 3 sends to rank 4"), "direct")
    'step 0: rank 3 sends to rank 4'
    """
    return first_line(error).removeprefix(f"schedule {name!r}").lstrip(":, ")
