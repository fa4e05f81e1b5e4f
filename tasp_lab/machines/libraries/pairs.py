"""NCCL and RCCL with a communicator of two ranks per pair, as isend and irecv of PyTorch have them outside a batch.

How many channels a message gets depends on the ranks of its communicator (`tasp_lab.machines.libraries.channels`): in
one of all ranks each peer has few at first, in one of two ranks all. A pair inside a domain knows no network either, so
its chunks are those of one domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from tasp_lab.core.arrays import IntArray
from tasp_lab.machines.libraries.channels import INTRA_DOMAIN, ChannelLibrary
from tasp_lab.machines.libraries.library import CommLibrary, Message

if TYPE_CHECKING:
    from tasp_lab.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class PairLibrary(CommLibrary):
    """A library with channels whose point-to-point messages have a communicator per pair.

    Parameters
    ----------
    world : the library with one communicator of all ranks, which collectives keep.
    inside : that of two ranks of a domain; None if domains have one rank.
    between : that of two ranks of different domains; None with one domain.
    """

    serial_launch: ClassVar[bool] = False

    world: ChannelLibrary
    inside: ChannelLibrary | None
    between: ChannelLibrary | None

    def bind(self, schedule: Schedule) -> CommLibrary:
        """See `CommLibrary.bind`."""
        return self if schedule.task is not None else self.world.bind(schedule)

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        """See `CommLibrary.places`."""
        return self.world.places(source, destination)

    @property
    def payload_shares(self) -> tuple[Fraction, ...]:
        """See `CommLibrary.payload_shares`."""
        return self.world.payload_shares

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        """See `CommLibrary.message`."""
        library = self.inside if place == INTRA_DOMAIN else self.between
        assert library is not None, "a place has pairs"
        return library.message(place, size_bytes, peers, first=first)
