"""Options of attention passes, shared by predictions and execution."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from operator import index
from shlex import quote
from typing import TYPE_CHECKING, get_args

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
from tasp_lab.core.errors import ScheduleError, of_type

if TYPE_CHECKING:
    from tasp_lab.schedule.schedule import Schedule
    from tasp_lab.workload.layer import Workload

GROUPS = ("auto", "consecutive", "strided")
"""Groups of ranks that have a name."""

_LISTS = re.compile(r"\d{1,6}(,\d{1,6})*(\|\d{1,6}(,\d{1,6})*)*", re.ASCII)


@dataclass(frozen=True)
class AttentionOptions:
    """Which passes of a layer to compute, and how.

    Parameters
    ----------
    passes : ``forward``, ``backward``, or ``both``, one after the other.
    trim, buffers : see `tasp_lab.schedules.attention.forward.attention`.
    dataflow : of the backward pass, see `tasp_lab.schedules.attention.backward`.
    direction : of a schedule over one ring; gradients then go around it, too. ``auto`` takes the one that sends fewer
        bytes, and gradients may take a shortcut to their owner.
    gradient_dtype, result_dtype : on the wire: ``fp32``, ``input`` for that of the layer, or ``auto``: sums that grow
        on their way, and would be rounded at each rank, in float32; what is sent once in the dtype of the layer.
    tail_chunks : in how many pieces the last results of TokenRing return, see
        `tasp_lab.schedules.attention.token_ring`; 1, as published, unless given: every piece is a message at each step.
    stages : in how many parts keys arrive, see `tasp_lab.schedules.attention.direct_attention`.
    groups : the ranks of each group of a family with a split such as ``usp:UxR``: ``consecutive`` ranks; ``strided``,
        of R groups the ranks r, r + R, r + 2 R, ...; or lists of ranks such as ``0,2|1,3``, group by group. ``auto``
        chooses by the topology, see `tasp_lab.schedules.attention.rank_order`, and without one is ``consecutive``.
    travels : ``keys``, ``queries``, ``both`` or ``auto``, see `tasp_lab.schedules.attention.kv_and_q_rings`.
    pieces : in how many groups of KV heads the states of All-Scan travel, see `tasp_lab.schedules.linear.lasp`; the
        best number by latency and bandwidth of links if None.

    Raises `ScheduleError` for an unknown value, and for a dataflow or gradient dtype without a backward pass.

    >>> AttentionOptions("both", dataflow="rotate-q").dataflow
    'rotate-q'
    """

    passes: Pass = "forward"
    trim: bool = True
    buffers: int = DEFAULT_BUFFERS
    dataflow: Dataflow = "auto"
    gradient_dtype: WireDtype = "auto"
    result_dtype: WireDtype = "auto"
    tail_chunks: int = 1
    stages: int = DEFAULT_STAGES
    groups: str = "auto"
    travels: Travelling = "auto"
    pieces: int | None = None
    direction: Direction = "auto"

    def __post_init__(self) -> None:
        for name in ("buffers", "tail_chunks", "stages", "pieces"):
            if name == "pieces" and self.pieces is None:
                continue
            try:
                object.__setattr__(self, name, index(getattr(self, name)))
            except TypeError:
                raise ScheduleError(of_type(name.replace("_", " "), getattr(self, name), "a whole number")) from None
            if name == "buffers" and self.buffers < 2:
                raise ScheduleError(f"{self.buffers} buffers, expected 2 or more")
            if getattr(self, name) < 1:
                raise ScheduleError(f"{name.replace('_', ' ')}: {getattr(self, name)}, expected 1 or more")
        choices = {
            "passes": Pass,
            "dataflow": Dataflow,
            "gradient_dtype": WireDtype,
            "result_dtype": WireDtype,
            "travels": Travelling,
            "direction": Direction,
        }
        for name, choice in choices.items():
            given, known = getattr(self, name), get_args(choice)
            if given not in known:
                what = "pass" if name == "passes" else name.replace("_", " ")
                unknown = what if name == "travels" else f"unknown {what}"
                raise ScheduleError(f"{unknown} {given!r}, expected one of {', '.join(known)}")
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

    def only(self, names: Iterable[str]) -> AttentionOptions:
        """The same passes and these options; the defaults in place of all others.

        >>> AttentionOptions("both", buffers=4, stages=8).only(["stages"]) == AttentionOptions("both", stages=8)
        True
        """
        return AttentionOptions(self.passes, **{name: getattr(self, name) for name in names})

    def check_known(self, schedule: str, names: Iterable[str]) -> None:
        """Raise `ScheduleError` if any but these options, which a schedule has, are other than the defaults."""
        known = {"passes", *names}
        for field in fields(self):
            given, default = getattr(self, field.name), field.default
            if given != default and field.name not in known:
                what = field.name.replace("_", " ")
                expected = "none" if default is None else repr(default)
                raise ScheduleError(
                    f"schedule {schedule!r}: {what} {given!r} does not apply to it, expected {expected}"
                )

    def check_layer(self, layer: Workload) -> None:
        """Raise `ScheduleError` for a backward pass of a layer with cached keys, which are for inference, or in fp8."""
        if layer.cached_keys and self.passes != "forward":
            raise ScheduleError(f"pass {self.passes!r} with {layer.cached_keys} cached keys, expected 'forward'")
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

    def build(self, one_pass: Callable[[bool], Schedule]) -> tuple[Schedule, ...]:
        """The schedules of the requested passes, in execution order; `one_pass` is given whether it is the backward."""
        backward = {"forward": (False,), "backward": (True,), "both": (False, True)}[self.passes]
        return tuple(one_pass(each) for each in backward)


DEFAULT_OPTIONS = AttentionOptions()
