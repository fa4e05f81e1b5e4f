"""Communicators of groups: a program with several kinds of parallelism has a communicator for each group of ranks.

    library = machine.system.group_library(machine.parameters.numbers, node_of_rank, [(tensor_groups, True)])

How many channels NCCL and RCCL give a message depends on the ranks of its communicator (`channel_rule`). A tensor group
of one node has a communicator without a network, however many nodes the program runs on, and collective calls have all
channels of theirs, while sends and receives share them among peers. The isend and irecv of PyTorch have a communicator
per pair of ranks outside a batch: in one of all ranks each peer has few channels at first, in one of two ranks all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.machines.libraries.channels import INTRA_DOMAIN, ChannelLibrary, ChannelRule
from tasp_lab.machines.libraries.library import CallFacts, CommLibrary, Message


@dataclass(frozen=True, eq=False)
class Communicators:
    """The communicators of the groups of one kind.

    Parameters
    ----------
    library : of one of them; groups are equal.
    group_of_rank : the number of the group of each rank, an int array (world_size,).
    channels : those of a collective call, if its messages are of such calls; None for sends and receives.
    """

    library: ChannelLibrary
    group_of_rank: IntArray
    channels: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupLibrary(CommLibrary):
    """A library with a communicator per group; a message belongs to the first kind with a group that has both ends.

    Parameters
    ----------
    kinds : the communicators of each kind, the smallest groups first.
    domain_of_rank : int array (world_size,).
    world : where calls without computation keep the communicator of all ranks: its library.
    """

    serial_launch: ClassVar[bool] = False
    is_of_links: ClassVar[bool] = False

    kinds: tuple[Communicators, ...]
    domain_of_rank: IntArray
    world: ChannelLibrary | None = None

    def bind(self, call: CallFacts) -> CommLibrary:
        """See `CommLibrary.bind`."""
        return self if call.computes or self.world is None else self.world.bind(call)

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        """Twice the number of the kind, plus one between domains."""
        source, destination = np.broadcast_arrays(source, destination)
        together = [kind.group_of_rank[source] == kind.group_of_rank[destination] for kind in self.kinds]
        away = self.domain_of_rank[source] != self.domain_of_rank[destination]
        found: IntArray = 2 * np.argmax(together, axis=0) + away
        return found

    @property
    def payload_shares(self) -> tuple[Fraction, ...]:
        """See `CommLibrary.payload_shares`."""
        shares = [kind.library.payload_shares for kind in self.kinds]
        return tuple(share for each in shares for share in (each[INTRA_DOMAIN], each[-1]))

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        """See `CommLibrary.message`; a collective call divides its channels among peers, rounded up."""
        kind = self.kinds[place // 2]
        library = kind.library
        if kind.channels is not None:
            share = -(-kind.channels // peers)
            library = replace(library, rule=ChannelRule(share, share))
        return library.message(min(place % 2, len(library.media) - 1), size_bytes, peers, first=first)
