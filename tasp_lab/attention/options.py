"""Options of attention passes, shared by predictions and execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, get_args

from tasp_lab.choices import DEFAULT_BUFFERS, Dataflow, Pass, WireDtype
from tasp_lab.errors import ScheduleError

if TYPE_CHECKING:
    from tasp_lab.schedule.schedule import Schedule


@dataclass(frozen=True)
class AttentionOptions:
    """Which passes of a layer to compute, and how.

    Parameters
    ----------
    passes : ``forward``, ``backward``, or ``both``, one after the other.
    trim, buffers : see `tasp_lab.attention.forward.attention`.
    dataflow : of the backward pass, see `tasp_lab.attention.backward`.
    gradient_dtype, result_dtype : on the wire: ``fp32``, ``input`` for that of the layer, or ``auto``: sums that grow
        on their way, and would be rounded at each rank, in float32; what is sent once in the dtype of the layer.
    tail_chunks : in how many pieces the last results of TokenRing return, see `tasp_lab.attention.token_ring`; 1, as
        published, unless given: every piece is a message at each step.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", index(self.buffers))
        object.__setattr__(self, "tail_chunks", index(self.tail_chunks))
        if self.tail_chunks < 1:
            raise ScheduleError(f"tail chunks: {self.tail_chunks}, expected 1 or more")
        choices = {"passes": Pass, "dataflow": Dataflow, "gradient_dtype": WireDtype, "result_dtype": WireDtype}
        for name, choice in choices.items():
            given, known = getattr(self, name), get_args(choice)
            if given not in known:
                what = "pass" if name == "passes" else name.replace("_", " ")
                raise ScheduleError(f"unknown {what} {given!r}, expected one of {', '.join(known)}")
        if self.passes == "forward" and (self.dataflow, self.gradient_dtype) != ("auto", "auto"):
            raise ScheduleError(
                f"dataflow {self.dataflow!r} and gradient dtype {self.gradient_dtype!r} without a backward pass, "
                "expected the pass backward or both"
            )

    @property
    def forward_only(self) -> AttentionOptions:
        """The same options for the forward pass only.

        >>> AttentionOptions("both", buffers=2, dataflow="rotate-q").forward_only == AttentionOptions(buffers=2)
        True
        """
        return replace(self, passes="forward", dataflow="auto", gradient_dtype="auto")

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
