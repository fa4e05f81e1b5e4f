"""Options of attention passes, shared by predictions and execution."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

from tasp_lab.attention.backward import attention_passes
from tasp_lab.attention.forward import attention
from tasp_lab.choices import DEFAULT_BUFFERS, Dataflow, Pass
from tasp_lab.decomposition.decompose import Decomposition
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload


@dataclass(frozen=True)
class AttentionOptions:
    """Which passes of a layer to compute, and how.

    Parameters
    ----------
    passes : ``forward``, ``backward``, or ``both``, one after the other.
    trim, buffers : see `tasp_lab.attention.forward.attention`.
    dataflow, gradient_dtype : of the backward pass, see `tasp_lab.attention.backward.attention_passes`.

    Raises `ScheduleError` for an unknown pass, and for a dataflow or gradient dtype without a backward pass.

    >>> AttentionOptions("both", dataflow="rotate-q")
    AttentionOptions(passes='both', trim=True, buffers=3, dataflow='rotate-q', gradient_dtype='fp32')
    """

    passes: Pass = "forward"
    trim: bool = True
    buffers: int = DEFAULT_BUFFERS
    dataflow: Dataflow = "auto"
    gradient_dtype: str = "fp32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", index(self.buffers))
        if self.passes not in ("forward", "backward", "both"):
            raise ScheduleError(f"unknown pass {self.passes!r}, expected forward, backward or both")
        if self.passes == "forward" and (self.dataflow, self.gradient_dtype) != ("auto", "fp32"):
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
        return AttentionOptions(trim=self.trim, buffers=self.buffers)


DEFAULT_OPTIONS = AttentionOptions()


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
    name, topology, workload, decomposition : see `tasp_lab.attention.forward.attention`.
    options : which passes, and how; with ``rotate-kv-back`` the forward pass of ``both`` is not trimmed.

    Raises `ScheduleError` for an unknown name and if there are too many blocks to verify.

    >>> from tasp_lab.topology.builders import full_mesh
    >>> layer, options = Workload(sequence=64, mask="causal"), AttentionOptions("both", dataflow="rotate-kv")
    >>> [schedule.transfers for schedule in attention_schedules("ring-attention", full_mesh(4), layer, None, options)]
    [6, 12]
    """
    if options.passes == "forward":
        return (attention(name, topology, workload, decomposition, trim=options.trim, buffers=options.buffers),)
    passes = attention_passes(
        name,
        topology,
        workload,
        decomposition,
        dataflow=options.dataflow,
        gradient_dtype=options.gradient_dtype,
        trim=options.trim,
        buffers=options.buffers,
    )
    return passes if options.passes == "both" else (passes.backward,)
