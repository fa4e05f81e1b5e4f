"""Blocks cut into chunks that follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.composition.merged_steps import check_no_calls, joined
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedule.step import LazySteps, Step
from tasp_lab.workload.layer import MAX_SUM


def in_chunks(schedule: Schedule, chunks: int) -> Schedule:
    """A collective whose blocks are cut into chunks of about equal size, each sent a step after the one before it.

    A rank can then forward the first chunk of a block while it receives the next one. Chunk q of block b is block ``b *
    chunks + q``; it does at step s + q what the block did at step s. So every chunk follows the rules that the block
    follows, and the bytes are the same.

    Raises `ScheduleError` for a schedule with kernel calls, which read whole blocks, and for more chunks than bytes.

    >>> from tasp_lab.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> print(in_chunks(ring_all_gather(full_mesh(2), 5), 2).steps[0])
    0->1 lane 0 block 0
    1->0 lane 0 block 2
    """
    smallest = int(schedule.blocks.bytes.min(initial=MAX_SUM))
    if not 1 <= chunks <= smallest:
        raise ScheduleError(
            f"schedule {schedule.name!r} in {chunks} chunks, expected 1 to {smallest}: a chunk has a byte or more"
        )
    if chunks == 1:
        return schedule
    check_no_calls(schedule, "which read whole blocks, expected none")
    blocks, shape = schedule.blocks, schedule.initial.shape
    size, remainder = np.divmod(blocks.bytes[:, None], chunks)
    own_part = schedule.initial_part
    return Schedule(
        name=schedule.name,
        world_size=schedule.world_size,
        lanes=schedule.lanes,
        blocks=Blocks(
            blocks.kinds,
            blocks.kind.repeat(chunks),
            (size + (np.arange(chunks) < remainder)).ravel(),
            blocks.parts.repeat(chunks),
        ),
        initial=schedule.initial.repeat(chunks, axis=1),
        final=schedule.final.repeat(chunks, axis=1),
        steps=ChunkedSteps(schedule.steps, chunks),
        fused=schedule.fused,
        initial_part=None if own_part is None else np.broadcast_to(own_part, shape).repeat(chunks, axis=1),
        kept=None if schedule.kept is None else schedule.kept.repeat(chunks, axis=1),
    )


@dataclass(frozen=True, eq=False)
class ChunkedSteps(LazySteps):
    """At each step chunk q of the blocks does what the blocks did q steps before."""

    whole: Sequence[Step]
    chunks: int

    def __len__(self) -> int:
        return len(self.whole) + self.chunks - 1 if len(self.whole) else 0

    def step(self, index: int) -> Step:
        first, last = max(0, index - self.chunks + 1), min(index, len(self.whole) - 1)
        return joined([self._chunk(self.whole[each], index - each) for each in range(first, last + 1)])

    def _chunk(self, step: Step, chunk: int) -> Step:
        return Step(step.source, step.destination, step.lane, step.block * self.chunks + chunk, step.gives)
