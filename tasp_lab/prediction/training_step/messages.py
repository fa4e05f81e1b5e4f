"""Messages of states: parameters gathered from all ranks, gradients reduced to them.

Each rank has a shard. Within a node shards go straight to every other rank. Between nodes they go around a ring, from
rank to rank with the same number in its node, and from each of these on within its node while the next one is under
way. So a NIC carries as much as in the rings of NCCL and RCCL. A reduction goes the same ways backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import NoLinkError, ScheduleError
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.calls import Contract, NoCalls, Passing, check_blocks
from tasp_lab.schedule.composition import in_sequence, over_groups
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.all_gather import direct_all_gather, ring_all_gather
from tasp_lab.schedules.collectives.ring_reductions import ring_reduce_scatter
from tasp_lab.topology.builders import full_mesh
from tasp_lab.topology.graph import Topology

Builder = Callable[[Topology, int], Schedule]
"""Builds a collective of so many bytes per rank."""


def gather(topology: Topology, total_bytes: int) -> Schedule:
    """An AllGather of so many bytes in equal shards, each rounded up.

    >>> from tasp_lab.topology.builders import nodes
    >>> [len(step) for step in gather(nodes(2, 4, "switch"), 800).steps]
    [32, 24]
    """
    return _on_levels(topology, total_bytes, direct_all_gather, ring_all_gather)


def reduce_scatter(topology: Topology, total_bytes: int) -> Schedule:
    """A ReduceScatter of so many bytes to equal shards, each rounded up."""
    return _on_levels(topology, total_bytes, _direct_reduce_scatter, ring_reduce_scatter, inner_first=True)


def all_reduce(topology: Topology, total_bytes: int) -> Schedule:
    """A ReduceScatter, then an AllGather."""
    return in_sequence(reduce_scatter(topology, total_bytes), gather(topology, total_bytes))


def _on_levels(
    topology: Topology, total_bytes: int, within: Builder, between: Builder, *, inner_first: bool = False
) -> Schedule:
    """A collective within nodes and, if there are several, between them."""
    sizes = _node_sizes(topology)
    shard_bytes = -(-total_bytes // topology.world_size)
    found = within(full_mesh(sizes[-1]), shard_bytes)
    if len(sizes) > 1:
        found = over_groups(found, between(full_mesh(sizes[0]), shard_bytes * sizes[1]), inner_first=inner_first)
    _check_routes(found, topology)
    return found


def send(topology: Topology, places: IntArray, size_bytes: int) -> Schedule:
    """So many bytes from each rank of a pipeline to the one in its place in the next stage, all at once.

    `places` are the ranks by place, an int array (stages, ...).
    """
    ranks = places.reshape(len(places), -1)
    source, destination = ranks[:-1].ravel(), ranks[1:].ravel()
    initial, final = np.zeros((2, ranks.size, source.size), dtype=np.bool_)
    block = np.arange(source.size)
    initial[source, block] = final[destination, block] = True
    step = Step(source, destination, np.zeros_like(block), block, np.zeros(source.size, dtype=np.bool_))
    blocks = Blocks.of_data(np.full(source.size, size_bytes))
    found = Schedule("send", ranks.size, 1, blocks, initial, final, [step])
    _check_routes(found, topology)
    return found


def _check_routes(messages: Schedule, topology: Topology) -> None:
    """Raise `ScheduleError` where ranks that exchange parameters or gradients have no route."""
    try:
        messages.check_routes(topology)
    except NoLinkError as error:
        raise ScheduleError(
            "parameters, gradients and hidden states go straight from rank to rank, but "
            f"{error.topology} has no link {error.source}->{error.destination}, and {error.why}: expected another "
            "topology or order, --routes all, or --no-fsdp --pass forward, a step that exchanges none"
        ) from None


def _node_sizes(topology: Topology) -> tuple[int, ...]:
    """Nodes and ranks per node; without equal nodes of consecutive ranks the ranks alone."""
    n, count = topology.world_size, len({*topology.node_of_rank})
    of_rank = tuple(rank // (n // count) for rank in range(n)) if n % count == 0 else ()
    return (count, n // count) if 1 < count < n and topology.node_of_rank == of_rank else (n,)


def _direct_reduce_scatter(topology: Topology, shard_bytes: int) -> Schedule:
    """Each rank gives its part of each shard to the owner of the shard, all at one step, a lane per distance."""
    ranks = topology.world_size
    lane, source = np.divmod(np.arange(ranks * (ranks - 1)), ranks)
    owner = (source + lane + 1) % ranks
    step = Step(source, owner, lane, owner.copy(), np.ones(len(source), dtype=np.bool_))
    return Schedule(
        name="direct-reduce-scatter",
        world_size=ranks,
        lanes=max(ranks - 1, 1),
        blocks=Blocks.of_sums(np.full(ranks, shard_bytes), ranks),
        initial=np.ones((ranks, ranks), dtype=np.bool_),
        final=np.eye(ranks, dtype=np.bool_),
        steps=[step] if ranks > 1 else [],
        initial_part=np.arange(ranks)[:, None],
    )


@dataclass(frozen=True, eq=False)
class StatesTask(NoCalls):
    """The task of blocks that are only moved, gathered or added up: parameters and gradients.

    `starts_at` and `ends_at` are those of `contract`.
    """

    blocks: Blocks
    dtype: str
    starts_at: IntArray
    ends_at: IntArray

    @classmethod
    def of(cls, blocks: Blocks, dtype: str, initial: BoolArray, final: BoolArray) -> StatesTask:
        """The task of blocks each of which is at one rank at the start, if any, and is promised to one, if any."""
        starts_at, ends_at = (np.where(each.any(axis=0), each.argmax(axis=0), -1) for each in (initial, final))
        return cls(blocks, dtype, starts_at, ends_at)

    @property
    def contract(self) -> Contract:
        none = np.full_like(self.starts_at, -1)
        return Contract(none, self.starts_at, self.ends_at, np.zeros(len(none), dtype=np.bool_))

    @property
    def passing(self) -> Passing:
        return "forward"

    @property
    def content(self) -> tuple[object, ...]:
        return "states", tuple(self.blocks.bytes.tolist()), tuple(self.blocks.parts.tolist())

    def check(self, blocks: Blocks) -> None:
        """Raise `ScheduleError` unless these are the blocks of the task, up to their pools."""
        check_blocks(blocks, self.blocks)

    def existing_parts(self, blocks: IntArray) -> BoolArray:
        """All parts."""
        parts = self.blocks.parts[blocks]
        found: BoolArray = np.arange(int(parts.max(initial=1))) < parts[:, None]
        return found
