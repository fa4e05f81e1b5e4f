"""What an executor prepares once per rank's part: its messages, and what each operation releases.

Operations are numbered anew as *nodes*: messages sent, messages received, kernel calls, buffers, joins. A message
happens as a whole, so it waits for all that its rows wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tasp_lab.schedule.buffer_layout import OUTSIDE
from tasp_lab.schedule.dependencies import RESIDENT
from tasp_lab.schedule.rank_part import CallRow, Join, RankPart, Row
from tasp_lab.schedule.schedule import Schedule


class PlannedMessage(NamedTuple):
    """A message of one or several rows, and its node.

    Its data lie at `offset`, or are gathered first, if it is `OUTSIDE`; such a message has one row.
    `given` are the blocks that are no more resident when it has been sent.
    """

    node: int
    rows: tuple[Row, ...]
    step: int
    lane: int
    peer: int
    tag: int
    offset: int
    size_bytes: int
    given: tuple[int, ...]

    @property
    def is_gathered(self) -> bool:
        """Whether its data are gathered first."""
        return self.offset == OUTSIDE

    @property
    def block_numbers(self) -> tuple[int, ...]:
        """The blocks in the order in which they lie."""
        return tuple(row.block for row in self.rows)

    @property
    def blocks(self) -> str:
        """The blocks as text."""
        numbers = ", ".join(map(str, self.block_numbers))
        return f"block{'s' * (len(self.rows) > 1)} {numbers}"


@dataclass(frozen=True, eq=False)
class Plan:
    """The nodes of a rank's part.

    `waits` lists the nodes for which each node waits, `releases` those that wait for it.
    """

    sends: tuple[PlannedMessage, ...]
    receives: tuple[PlannedMessage, ...]
    calls: tuple[CallRow, ...]
    joins: tuple[Join, ...]
    waits: tuple[tuple[int, ...], ...]
    releases: tuple[tuple[int, ...], ...]
    first_receive: int
    first_call: int
    first_buffer: int
    first_join: int


@lru_cache(maxsize=16)
def plan_of(schedule: Schedule, part: RankPart) -> Plan:
    """The plan of a rank's part of a schedule."""
    sizes: list[int] = schedule.block_bytes.tolist()
    first_receive = len(part.messages_out)
    first_call = first_receive + len(part.messages_in)
    node_of = {row.operation: node for node, rows in enumerate((*part.messages_out, *part.messages_in)) for row in rows}
    shift = first_call - part.first_call
    first_buffer, first_join = part.first_buffer + shift, part.first_join + shift
    waits: list[dict[int, None]] = [{} for _ in range(first_join + len(part.joins))]
    for operation, conditions in part.waits.items():
        found = waits[node_of.get(operation, operation + shift)]
        for before, _ in conditions:
            found[node_of.get(before, before + shift)] = None
    releases: list[list[int]] = [[] for _ in waits]
    for node, before_it in enumerate(waits):
        for before in before_it:
            releases[before].append(node)
    return Plan(
        _planned(part.messages_out, 0, sizes, schedule.lanes),
        _planned(part.messages_in, first_receive, sizes, schedule.lanes),
        part.calls,
        part.joins,
        tuple(map(tuple, waits)),
        tuple(map(tuple, releases)),
        first_receive,
        first_call,
        first_buffer,
        first_join,
    )


@lru_cache(maxsize=16)
def lanes_are_alike(plan: Plan) -> bool:
    """Whether all lanes of a rank are waited for in the same steps, for messages of the same sizes.

    A thread that waits for them in the order of steps then delays none: each link carries as much for each lane, so
    the slowest link sets the pace either way. Receives are always waited for, sends where something needs their memory.
    """
    awaited = plan.receives + tuple(each for each in plan.sends if plan.releases[each.node])
    lanes: dict[int, list[tuple[int, int, bool]]] = {}
    for each in awaited:
        lanes.setdefault(each.lane, []).append((each.step, each.size_bytes, each.node < plan.first_receive))
    return len({tuple(sorted(messages)) for messages in lanes.values()}) <= 1


def _planned(
    messages: Sequence[tuple[Row, ...]], first: int, sizes: Sequence[int], lanes: int
) -> tuple[PlannedMessage, ...]:
    return tuple(
        PlannedMessage(
            node,
            rows,
            rows[0].step,
            rows[0].lane,
            rows[0].peer,
            rows[0].step * lanes + rows[0].lane,
            rows[0].offset,
            sum(sizes[row.block] for row in rows),
            tuple(row.block for row in rows if row.gives and row.since == RESIDENT),
        )
        for node, rows in enumerate(messages, first)
    )
