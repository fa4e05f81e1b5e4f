"""Host models: how long the host of a rank takes to issue the kernel calls and messages of a layer.

The host of a rank issues in program order: at each step the messages of the step, as one or more batches, then its
kernel calls. It never waits for the GPU, so what it issues starts at once, or later if the GPU is not ready; and
nothing starts before it was issued. Small layers are bound by their hosts. `tasp_lab.machines.stack` has the numbers of
each library, and `sim.host` follows from them when each message and call of a schedule is issued.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from tasp_lab.core.errors import QuantityError
from tasp_lab.core.units import Number

Batches = Literal["step", "kind"]
"""Messages of a step are one batch together, or one per kind of block: keys, gradients of keys, queries, ..."""

Communicators = Literal["all", "pairs"]
"""Messages go through a communicator of all ranks, or through one per pair of ranks."""


def _check(what: str, record: Passes | HostModel, ending: str, unit: str) -> None:
    """Raise `QuantityError` for a negative or infinite number among the fields with this ending."""
    for name in (field.name for field in fields(record) if field.name.endswith(ending)):
        value = getattr(record, name)
        if not (math.isfinite(value) and value >= 0):
            raise QuantityError(f"{what}: {name} is {value}, expected 0 or more {unit}")


@dataclass(frozen=True)
class Passes:
    """Passes over memory beside the kernel calls of a layer: bytes read and written per element, at every call.

    Parameters
    ----------
    output_bytes : forward, per element of the output, which is merged into the sum of earlier steps.
    slice_bytes : the same of a call with fewer queries than keys, which are a slice of the output.
    key_bytes : forward, per element of K: pieces of K and of V are joined to one tensor each before the call.
    query_gradient_bytes : backward, per element of Q, whose gradient is added to the sum of earlier steps.
    key_gradient_bytes : backward, per element of K: gradients of K and V together.
    source : the code that says so.

    Raises `QuantityError` for bytes that are negative or not finite.
    """

    output_bytes: float = 0
    slice_bytes: float = 0
    key_bytes: float = 0
    query_gradient_bytes: float = 0
    key_gradient_bytes: float = 0
    source: str = ""

    def __post_init__(self) -> None:
        _check("passes", self, "_bytes", "bytes")

    def __bool__(self) -> bool:
        # asked at every call of a kernel, so no loop over fields
        gradients = self.query_gradient_bytes or self.key_gradient_bytes
        return bool(self.output_bytes or self.slice_bytes or self.key_bytes or gradients)


NO_PASSES = Passes()
"""Results are merged in the kernels, or not at all."""


@dataclass(frozen=True)
class HostModel:
    """What a library takes to run a layer, and how it sends.

    Parameters
    ----------
    name : its name.
    call_s : host time per kernel call of a forward pass, with all small kernels around it.
    backward_call_s : the same of a backward pass.
    batch_s : host time per batch of messages.
    batches : which messages of a step are a batch.
    overlaps : whether messages run beside the kernel calls that are ready at the same time. Without priority over
        kernels they wait until thread blocks of the call have been handed out
        (`sim.host`).
    waits_for_sends : whether the calls of a step wait until what their rank has sent before has left, not only until
        what they need has arrived; gradients are waited for later.
    communicators : which ranks a communicator has; with few ranks a message has more channels.
    separate : the passes in which keys and values, or their gradients, are two messages, one after the other.
    passes : what merges of partial results read and write besides.
    sources : where each number comes from, by the name of the field.

    Raises `QuantityError` for times that are negative or not finite.

    >>> INSTANT_HOST.is_instant, HostModel("eager", call_s=1e-4).is_instant
    (True, False)
    """

    name: str = "none"
    call_s: Number = 0
    backward_call_s: Number = 0
    batch_s: Number = 0
    batches: Batches = "step"
    overlaps: bool = True
    waits_for_sends: bool = False
    communicators: Communicators = "all"
    separate: tuple[str, ...] = ()
    passes: Passes = NO_PASSES
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check(f"host model {self.name!r}", self, "_s", "seconds")

    def with_instant_host(self) -> HostModel:
        """The same with a host that takes no time."""
        return replace(self, call_s=0, backward_call_s=0, batch_s=0)

    @property
    def is_instant(self) -> bool:
        """Whether the host takes no time."""
        return not (self.call_s or self.backward_call_s or self.batch_s)

    def of_call_s(self, passing: str) -> Number:
        """The host time per kernel call of a pass."""
        return self.backward_call_s if passing == "backward" else self.call_s


INSTANT_HOST = HostModel()
"""The host takes no time."""
