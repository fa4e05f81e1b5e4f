"""Contention between messages and kernel calls for the multiprocessors of a GPU.

NCCL and RCCL copy messages with kernels of their own: a *channel* is a thread block, and takes a multiprocessor for
itself ("takes a whole SM, shares with no compute kernel", NVIDIA/nccl#689). A kernel call beside it has the others. So
while messages with c channels are in flight at a rank, its kernel calls run at the speed

    1 - min(c, max_channels) * sms_per_channel / sms

of a GPU left alone. The sends of a rank share thread blocks with its receives, since one piece of work of NCCL has one
of each and a range of channels for both (`ncclDevWorkP2p` in src/include/device.h, NVIDIA/nccl 0524aef7): c is the
larger of both sums. Copy engines and TCP take no multiprocessors; their messages have no channels.

A message that becomes ready together with a kernel call also *waits* for a multiprocessor where it has no priority: the
thread blocks of the call are handed out first (`sim.host`). Where it was measured how long, that share of the call is
the number `waits`.

Left out, as no source has numbers for attention kernels: the share of memory bandwidth and of caches that messages
take, which adds to this where a kernel is bound by memory; the whole waves in which a kernel's thread blocks run, which
turn a few missing multiprocessors into another wave; and messages that are slower beside kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number


@dataclass(frozen=True)
class Contention:
    """What messages take from the kernel calls of a rank.

    Parameters
    ----------
    sms : multiprocessors of a GPU: SMs of NVIDIA, compute units of AMD.
    sms_per_channel : how many of them a channel takes.
    max_channels : the most channels that a rank has at once.
    waits : the share of a kernel call until which messages wait, whatever the stack; 0 where only the stack tells.

    Shares are exact if `sms` or `sms_per_channel` is a fraction. Raises `TopologyError` for numbers below 0, and if
    channels could take all multiprocessors.
    """

    sms: Number
    sms_per_channel: Number
    max_channels: Number
    waits: Number = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value) or value < 0 or (name == "sms" and not value):
                least = "more than 0" if name == "sms" else "0 or more"
                raise TopologyError(f"contention: {name} is {value}, expected {least}")
        if self.waits > 1:
            raise TopologyError(f"contention: messages wait for {self.waits} of a call, expected a share from 0 to 1")
        # a call with no multiprocessor left would never end
        if self.max_channels * self.sms_per_channel >= self.sms:
            raise TopologyError(
                f"contention: {self.max_channels} channels take {self.max_channels * self.sms_per_channel} of "
                f"{self.sms} multiprocessors, expected fewer than all"
            )

    @property
    def slows(self) -> bool:
        """Whether any message slows any call."""
        return bool(self.sms_per_channel and self.max_channels)

    def share(self, sending: Number, receiving: Number) -> Number:
        """The share of the multiprocessors that so many channels of sends and receives take together.

        >>> from fractions import Fraction
        >>> Contention(Fraction(132), 1, 32).share(8, 4), Contention(Fraction(132), 1, 32).share(56, 56)
        (Fraction(2, 33), Fraction(8, 33))
        """
        # a thread block has a send and a receive, so the larger of both counts, not their sum
        return min(max(sending, receiving), self.max_channels) * self.sms_per_channel / self.sms


NONE = Contention(1, 0, 0)
"""Messages take nothing from kernel calls."""
