"""Stand-ins that cost a rank nothing, so that tests count what the executor itself does: a library, and calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from runtime.executor.messages import Message, Transport, Wait
from runtime.executor.sums import Parts
from runtime.executor.views import Views
from runtime.kernels.partials import Gradients, Kernel, Partial
from tasp_lab.schedule.rank_part import CallRow
from tasp_lab.schedule.schedule import Schedule


class Nothing(Transport):
    """A library that sends nothing and waits for nothing."""

    channels = False
    short_bytes = 0

    def __init__(self, whole_steps: bool) -> None:
        self.whole_steps, self.receives_ahead = whole_steps, 0 if whole_steps else 4
        self.sent = 0

    @property
    def key(self) -> Hashable:
        return type(self)

    def receive(self, messages: Sequence[Message]) -> list[Wait]:
        return [_at_once] * len(messages)

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        self.sent += len(messages)
        return [_at_once] * len(messages)


def _at_once() -> None:
    """A wait that is over."""


class Zeros:
    """Kernel calls on bytes that add zeros, made beforehand."""

    def __init__(self, schedule: Schedule) -> None:
        self._zeros = [torch.zeros(size, dtype=torch.uint8) for size in schedule.block_bytes.tolist()]

    def compute(self, row: CallRow, operands: Sequence[Views]) -> Sequence[Parts]:
        return [Parts((place.block,), (self._zeros[place.block],)) for place in row.adds]

    def arranged(self, fields: Views) -> Views:
        return fields

    def bound(self, blocks: Sequence[int]) -> Views:
        return [self._zeros[blocks[0]]]

    def sent(self, block: int) -> Views:
        return [self._zeros[block]]


class FreeKernel(Kernel):
    """An attention kernel whose results are zeros, made once."""

    def __init__(self) -> None:
        self._zeros: dict[torch.Size, torch.Tensor] = {}

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, low: int, high: int
    ) -> Partial:
        return Partial(self._of(q.shape), self._of(q.shape[:3]))

    def backward(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, *, scale: float, low: int, high: int,
    ) -> Gradients:  # fmt: skip
        return Gradients(self._of(q.shape), self._of(k.shape), self._of(v.shape))

    def _of(self, shape: torch.Size) -> torch.Tensor:
        if shape not in self._zeros:
            self._zeros[shape] = torch.zeros(shape)
        return self._zeros[shape]
