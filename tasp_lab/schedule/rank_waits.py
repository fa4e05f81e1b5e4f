"""What each operation of a rank waits for: the edges of its dependencies, with joins in place of what they join."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tasp_lab.schedule.buffer_layout import parts_of
from tasp_lab.schedule.dependencies import ARRIVED, BLOCK, LANE, RESIDENT, SENT, Dependencies, Uses

if TYPE_CHECKING:
    from tasp_lab.schedule.rank_part import Join

Condition = tuple[int, int]
"""An operation and its event, `SENT` or `ARRIVED`. For calls, joins and releases of buffers it is always `ARRIVED`."""


def waits_of(derived: Dependencies, joins: Sequence[Join]) -> Mapping[int, tuple[Condition, ...]]:
    """What each operation waits for: what the edges say, with joins in place of what they join."""
    joined = {(operation, join.place.block): join.operation for join in joins for operation in join.operations}
    joins_of: defaultdict[int, list[int]] = defaultdict(list)
    for (operation, _), number in joined.items():
        joins_of[operation].append(number)
    waits: defaultdict[int, dict[Condition, None]] = defaultdict(dict)
    adds, reads = _blocks_of(derived, derived.parts), _blocks_of(derived, derived.reads)
    edges = derived.edges
    chosen = edges.cause != LANE
    columns = (column[chosen].tolist() for column in (edges.before, edges.after, edges.event, edges.cause))
    for before, after, event, cause in zip(*columns, strict=True):
        if cause == BLOCK:
            numbers = [joined.get((before, block), before) for block in adds[before] & reads[after]]
        else:
            numbers = joins_of.get(before, [before]) if event == ARRIVED else [before]
        for number in numbers:
            waits[after][_condition(derived, number, event)] = None
    readers = _readers_of_residents(derived)
    for join in joins:
        waits[join.operation] |= {(operation, ARRIVED): None for operation in join.operations}
        if join.place.since == RESIDENT:
            for step, reader in readers.get(join.place.block, ()):
                if step <= join.step:
                    waits[join.operation][_condition(derived, reader, SENT)] = None
    for part in parts_of(derived):
        if (
            part.since == RESIDENT
            and part.operation < derived.first_call
            and (part.operation, part.block) not in joined
        ):
            for step, reader in readers.get(part.block, ()):
                if step < part.step:
                    waits[part.operation][_condition(derived, reader, SENT)] = None
    return {operation: tuple(conditions) for operation, conditions in waits.items()}


def _condition(derived: Dependencies, operation: int, event: int) -> Condition:
    return operation, event if operation < derived.first_call else ARRIVED


def _blocks_of(derived: Dependencies, uses: Uses) -> Mapping[int, set[int]]:
    found: defaultdict[int, set[int]] = defaultdict(set)
    for operation, block in zip(uses.operation.tolist(), uses.block.tolist(), strict=True):
        found[operation].add(block)
    return found


def _readers_of_residents(derived: Dependencies) -> Mapping[int, list[tuple[int, int]]]:
    """Those that read the resident copy of a block, each with its step."""
    reads, found = derived.reads, defaultdict(list)
    resident = reads.since == RESIDENT
    columns = (reads.block[resident].tolist(), reads.step[resident].tolist(), reads.operation[resident].tolist())
    for block, step, operation in zip(*columns, strict=True):
        found[block].append((step, operation))
    return found
