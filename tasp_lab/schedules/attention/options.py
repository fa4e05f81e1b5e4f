"""Options of attention passes, shared by predictions and execution."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from operator import index
from shlex import quote
from typing import TYPE_CHECKING, Annotated, get_args

from tasp_lab.core.arguments import Option, arguments_of, check_arguments
from tasp_lab.core.choices import (
    DEFAULT_BUFFERS,
    DEFAULT_STAGES,
    WHAT_IF_DTYPE,
    Dataflow,
    Direction,
    Pass,
    Travelling,
    WireDtype,
)
from tasp_lab.core.errors import ScheduleError, unknown

if TYPE_CHECKING:
    from tasp_lab.schedule.schedule import Schedule
    from tasp_lab.workload.kernel_shapes import Passing
    from tasp_lab.workload.layer import Workload

GROUPS = ("auto", "consecutive", "strided")
"""Groups of ranks that have a name."""


_LISTS = re.compile(r"\d{1,6}(,\d{1,6})*(\|\d{1,6}(,\d{1,6})*)*", re.ASCII)


@dataclass(frozen=True)
class AttentionOptions:
    """Which passes of a layer to compute, and how.

    What is not in the help, beside the types of the fields:

    Parameters
    ----------
    trim, buffers : see `tasp_lab.schedules.attention.forward.attention`.
    dataflow : of the backward pass, see `tasp_lab.schedules.attention.backward`.
    direction : gradients go around the ring in it, too; ``auto`` may let them take a shortcut to their owner.
    gradient_dtype, result_dtype : by ``auto`` sums that grow on their way, and would be rounded at each rank, are in
        float32; what is sent once is in the dtype of the layer.
    tail_chunks : 1, as published, unless given: every piece is a message at each step, see
        `tasp_lab.schedules.attention.token_ring`.
    stages : where no machine is known, `DEFAULT_STAGES`.
    groups : ``strided``: of R groups the ranks r, r + R, r + 2 R, ...; ``auto`` chooses by the topology, see
        `tasp_lab.schedules.attention.rank_order`, and without one is ``consecutive``.
    travels, pieces : see `tasp_lab.schedules.attention.kv_and_q_rings` and `tasp_lab.schedules.linear.lasp`.

    Raises `ScheduleError` for an unknown value, and for a dataflow or gradient dtype without a backward pass.

    >>> AttentionOptions("both", dataflow="rotate-q").dataflow
    'rotate-q'
    """

    passes: Annotated[Pass, Option("both: forward, then backward.", flag="pass")] = "forward"
    trim: Annotated[bool, Option("Stop a block after the last rank whose mask needs it.", tried=(True, False))] = True
    buffers: Annotated[
        int, Option("Receive buffers of a rank, each for the arrivals of one step.", least=2, tried=(2, 3, 4, 6))
    ] = DEFAULT_BUFFERS
    dataflow: Annotated[
        Dataflow,
        Option(
            "What circulates in the backward pass. rotate-kv: keys and values again, followed by their gradients; "
            "rotate-kv-back: the same, backwards from where an untrimmed forward pass ends; rotate-q: queries; auto: "
            "the fastest.",
            open=get_args(Dataflow)[1:],
        ),
    ] = "auto"
    gradient_dtype: Annotated[
        WireDtype, Option("Dtype of gradients that are sent; input: --dtype; auto: fp32 for sums that are sent on.")
    ] = "auto"
    result_dtype: Annotated[WireDtype, Option("Dtype of results that are sent, as --gradient-dtype.")] = "auto"
    tail_chunks: Annotated[int, Option("Pieces of the last results of TokenRing.", least=1, tried=(1, 2, 4))] = 1
    stages: Annotated[
        int | None,
        Option(
            "Parts in which the keys of direct-attention arrive, or the heads of staged-ulysses: the fastest of 1, 2, "
            "4 and 8 unless given.",
            least=1,
            open=(1, 2, 4, 8),
        ),
    ] = None
    groups: Annotated[
        str,
        Option(
            "Groups of schedules such as usp:2x4: consecutive (0,1|2,3|...), strided (0,4|1,5|...), lists, or auto: "
            "near ranks, or strided where that is faster.",
            open=("auto", "strided"),
        ),
    ] = "auto"
    padded_heads: Annotated[
        bool,
        Option("Pad heads that the ranks which share them do not divide with heads of zeros, as some libraries do."),
    ] = False
    travels: Annotated[
        Travelling,
        Option(
            "What travels around the rings of kv-and-q-rings. both: per pair of ranks the one with fewer bytes; auto: "
            "the fastest.",
            open=get_args(Travelling)[1:],
        ),
    ] = "auto"
    pieces: Annotated[
        int | None,
        Option(
            "Pieces in which All-Scan sends states. Default: the best by latency and bandwidth of the links.",
            least=1,
            tried=(None, 1, 2, 4, 8),
        ),
    ] = None
    direction: Annotated[
        Direction,
        Option(
            "Direction around one ring: to the next higher or lower rank; auto: the fewest bytes, and direct returns "
            "of gradients to their owners."
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        known = arguments_of(AttentionOptions, ScheduleError)
        check_arguments(vars(self), known)
        for name, argument in known.items():
            value, what = getattr(self, name), name.replace("_", " ")
            if argument.option.least is not None and value is not None:  # None: the best number, by the topology
                object.__setattr__(self, name, index(value))  # a plain int
                if value < argument.option.least:
                    found = f"{value} {what}" if name == "buffers" else f"{what}: {value}"
                    raise ScheduleError(f"{found}, expected {argument.option.least} or more")
            if argument.choices and value not in argument.choices:
                wrong = {"passes": "unknown pass", "travels": what}.get(name, f"unknown {what}")
                raise ScheduleError(f"{wrong} {value!r}, expected one of {', '.join(argument.choices)}")
        self._check_groups()
        if self.passes == "forward" and (self.dataflow, self.gradient_dtype) != ("auto", "auto"):
            raise ScheduleError(
                f"dataflow {self.dataflow!r} and gradient dtype {self.gradient_dtype!r} without a backward pass, "
                "expected the pass backward or both"
            )

    def _check_groups(self) -> None:
        if self.groups in GROUPS:
            return
        if not isinstance(self.groups, str) or not _LISTS.fullmatch(self.groups):
            raise ScheduleError(f"groups {self.groups!r}, expected {', '.join(GROUPS)} or lists of ranks like 0,2|1,3")
        lists = [each.split(",") for each in self.groups.split("|")]
        ranks = sorted(int(rank) for each in lists for rank in each)
        if len({len(each) for each in lists}) > 1 or ranks != list(range(len(ranks))):
            raise ScheduleError(
                f"groups {self.groups!r}, expected equally long lists with each rank once, from 0 on, like 0,2|1,3"
            )

    @property
    def stage_count(self) -> int:
        """The stages, `DEFAULT_STAGES` where their number is left open."""
        return DEFAULT_STAGES if self.stages is None else self.stages

    @property
    def forward_only(self) -> AttentionOptions:
        """The same options for the forward pass only.

        >>> AttentionOptions("both", buffers=2, dataflow="rotate-q").forward_only == AttentionOptions(buffers=2)
        True
        """
        return replace(self, passes="forward", dataflow="auto", gradient_dtype="auto")

    @property
    def arguments(self) -> str:
        """The fields with other values than their defaults as options of the command line; without `passes`.

        >>> AttentionOptions("both", trim=False, buffers=4, dataflow="rotate-q").arguments
        '--no-trim --buffers 4 --dataflow rotate-q'
        >>> AttentionOptions(groups="0,2|1,3").arguments
        "--groups '0,2|1,3'"
        """
        found = []
        for each in fields(self):
            value, name = getattr(self, each.name), each.name.replace("_", "-")
            if each.name != "passes" and value != each.default:
                found.append(
                    f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name} {quote(str(value))}"
                )
        return " ".join(found)

    @property
    def expression(self) -> str:
        """The Python expression of these options.

        >>> AttentionOptions("both", dataflow="rotate-q").expression
        'AttentionOptions("both", dataflow="rotate-q")'
        """
        changed = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        passes = [f'"{changed.pop("passes")}"'] if "passes" in changed else []
        given = [
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in changed.items()
        ]
        return f"AttentionOptions({', '.join(passes + given)})"

    def only(self, names: Iterable[str]) -> AttentionOptions:
        """The same passes and these options; the defaults in place of all others.

        >>> AttentionOptions("both", buffers=4, stages=8).only(["stages"]) == AttentionOptions("both", stages=8)
        True
        """
        return AttentionOptions(self.passes, **{name: getattr(self, name) for name in names})

    def with_defaults(self, values: Mapping[str, object]) -> AttentionOptions:
        """These values in place of defaults, without those of a backward pass if there is none.

        >>> AttentionOptions("both", buffers=4).with_defaults({"buffers": 2, "dataflow": "rotate-kv"}).arguments
        '--buffers 4 --dataflow rotate-kv'
        """
        open_now = {name for name in values if getattr(self, name) == getattr(DEFAULT_OPTIONS, name)}
        open_now -= {"dataflow", "gradient_dtype"} if self.passes == "forward" else set()
        return replace(self, **{name: values[name] for name in open_now})  # type: ignore[arg-type]

    def opened(self, names: Iterable[str]) -> list[AttentionOptions]:
        """The options with each combination of the values that are `open`, of these names.

        >>> [each.dataflow for each in AttentionOptions("both").opened(["buffers", "dataflow"])]
        ['rotate-kv', 'rotate-kv-back', 'rotate-q']
        """
        found = [self]
        for name in names:
            changed = [each.with_defaults({name: value}) for each in found for value in OPTIONS[name].open]
            found = list(dict.fromkeys(changed)) or found
        return found

    def check_known(self, schedule: str, names: Iterable[str]) -> None:
        """Raise `ScheduleError` if any but these options, which a schedule has, are other than the defaults."""
        known = {"passes", *names}
        for own in fields(self):
            given, default = getattr(self, own.name), own.default
            if given != default and own.name not in known:
                what = own.name.replace("_", " ")
                expected = "none" if default is None else repr(default)
                raise ScheduleError(
                    f"schedule {schedule!r}: {what} {given!r} does not apply to it, expected {expected}"
                )

    def check_layer(self, layer: Workload) -> None:
        """Raise `ScheduleError` for a backward pass in fp8, or for inference: cached keys, or values in keys."""
        if layer.cached_keys and self.passes != "forward":
            raise ScheduleError(f"pass {self.passes!r} with {layer.cached_keys} cached keys, expected 'forward'")
        if layer.values_in_keys and self.passes != "forward":
            raise ScheduleError(f"pass {self.passes!r} with values in keys, expected 'forward'")
        if layer.dtype == WHAT_IF_DTYPE and self.passes != "forward":
            raise ScheduleError(
                f"pass {self.passes!r} in {layer.dtype}, whose backward pass is not established: expected 'forward'"
            )

    def wire_dtype(self, layer_dtype: str, *, backward: bool, sums: bool) -> str:
        """The dtype on the wire of results, or backward of gradients; `sums` if these grow on their way.

        >>> AttentionOptions().wire_dtype("bf16", backward=False, sums=True)
        'fp32'
        """
        chosen = self.gradient_dtype if backward else self.result_dtype
        in_float32 = chosen == "fp32" or (chosen == "auto" and sums)
        return "fp32" if in_float32 else layer_dtype

    @property
    def each_pass(self) -> tuple[Passing, ...]:
        """The requested passes one by one, in execution order."""
        return ("forward", "backward") if self.passes == "both" else (self.passes,)

    def build(self, one_pass: Callable[[bool], Schedule]) -> tuple[Schedule, ...]:
        """The schedules of the requested passes, in execution order; `one_pass` is given whether it is the backward."""
        return tuple(one_pass(each == "backward") for each in self.each_pass)


OPTIONS: Mapping[str, Option] = {name: each.option for name, each in arguments_of(AttentionOptions).items()}
"""The options of `AttentionOptions`, in the order of its fields."""


def check_options(given: Mapping[str, object]) -> None:
    """Raise `ScheduleError` for an option by name that no schedule has, and for one of a wrong type.

    >>> check_options({"stage": 4})
    Traceback (most recent call last):
    tasp_lab.core.errors.ScheduleError: unknown option 'stage', did you mean 'stages'? expected one of trim, buffers, \
dataflow, gradient_dtype, result_dtype, tail_chunks, stages, groups, padded_heads, travels, pieces, direction
    """
    known = [name for name in OPTIONS if name != "passes"]
    for name in given:
        if name not in known:
            raise ScheduleError(unknown("option", name, known))
    check_arguments(given, arguments_of(AttentionOptions, ScheduleError))


NUMBERS = tuple(sorted(name for name, option in OPTIONS.items() if option.least is not None))
"""The options that are numbers."""

DEFAULT_OPTIONS = AttentionOptions()
