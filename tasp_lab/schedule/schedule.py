"""A schedule: which rank sends which block to which rank at each step, and what it computes. Validated on construction.

**Blocks** are numbered; each has a size in bytes. At the start a rank holds some blocks (`initial`), at the end
it must hold what the collective promises (`final`). A **step** is a set of transfers and kernel calls that may run
concurrently; they use only blocks that the rank held when the step began. A **lane** is a sequence of transfers: a
rank's transfers on one lane run one after another, those on different lanes independently. A rank's kernel calls run
one after another. There is no barrier between steps.

**Buffers** limit how long a rank keeps the blocks it receives. Without buffers it keeps them until the end. With b
buffers, the arrivals of step s occupy buffer s mod b until those of step s + b overwrite them: they may be sent and
computed with at steps s + 1 to s + b - 1, and the transfers of step s + b wait for these uses. So communication may run
b - 1 steps ahead of compute; b = 2 is double buffering. Blocks held at the start are kept. A gradient computed at step
s is added to the gradient that arrives at step s, in the same buffer.

Steps are generated lazily (a 511-ring AllGather on 512 ranks has 134 million transfers), each as arrays. Constructing a
`Schedule` replays all of them once, unless a theorem proves them (`LazySteps.prove`). A broken rule raises
`ScheduleError` with step, rank and block. The rules:

- a rank sends only what it held when the step began, and never to itself;
- no block is delivered to a rank that holds it;
- a rank computes only with blocks that it held when the step began;
- the calls compute the schedule's attention task, each tile once (`tasp_lab.schedule.coverage`);
- a gradient block carries all parts that its sender holds, one step behind, and every part ends at its owner;
- blocks that are sums follow the rules of `tasp_lab.schedule.reduction` instead;
- at the end every rank holds exactly what the collective promises, not counting buffers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tasp_lab.arrays import BoolArray, IntArray
from tasp_lab.errors import ScheduleError
from tasp_lab.schedule.reduction import Reduction
from tasp_lab.schedule.replay import Replay
from tasp_lab.schedule.step import LazySteps, Step
from tasp_lab.timeline.events import ATTEND, DIFFERENTIATE
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.attention_task import AttentionTask
from tasp_lab.workload.kernel_calls import Call


@dataclass(frozen=True, eq=False)
class Schedule:
    """A valid schedule.

    Parameters
    ----------
    name : the schedule's name, as on the command line.
    world_size : number of ranks.
    lanes : number of lanes.
    block_bytes : int array (blocks,), the size of each block.
    initial : bool array (world_size, blocks), what each rank holds at the start.
    final : bool array (world_size, blocks), what each rank must hold at the end.
    steps : the steps, possibly lazy; any sequence of `Step`.
    buffers : number of buffers per rank, 2 or more; None to keep all arrivals (not in a backward pass).
    task : the attention task that the kernel calls compute; None for a schedule without kernel calls.
    fused : whether all steps are one call of the communication library, as its own collectives are; else one per step.
    reduction : which transfers add and which copy, if blocks are sums; then `buffers` and `task` are None.

    Attributes
    ----------
    transfers : the number of transfers of all steps.
    """

    name: str
    world_size: int
    lanes: int
    block_bytes: IntArray
    initial: BoolArray
    final: BoolArray
    steps: Sequence[Step]
    buffers: int | None = None
    task: AttentionTask | None = None
    fused: bool = False
    reduction: Reduction | None = None
    transfers: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps) if isinstance(self.steps, list) else self.steps)
        for values in (self.block_bytes, self.initial, self.final):
            values.flags.writeable = False
        proved = self.steps.prove(self) if isinstance(self.steps, LazySteps) else None
        object.__setattr__(self, "transfers", Replay(self).run() if proved is None else proved)

    def bytes_sent(self) -> IntArray:
        """The bytes that each rank sends on each lane at each step, as an int array (steps, world_size, lanes)."""
        ledger = np.zeros((len(self.steps), self.world_size, self.lanes), dtype=np.int64)
        for index, step in enumerate(self.steps):
            np.add.at(ledger[index], (step.source, step.lane), self.block_bytes[step.block])
        return ledger

    @cached_property
    def digest(self) -> str:
        """A short hash of the schedule: its task, its layout and every step."""
        task = self.task and self.task.content
        found = hashlib.sha256(
            repr((self.name, self.initial.shape, self.lanes, self.buffers, self.fused, task)).encode()
        )
        found.update(self.block_bytes.tobytes())
        for row in (*self.initial, *self.final):
            found.update(row.tobytes())
        if self.reduction is not None:
            found.update(self.reduction.first_copy_step.tobytes())
        for step in self.steps:
            found.update(repr((len(step), len(step.calls))).encode())
            for values in (step.source, step.destination, step.lane, step.block):
                found.update(values.tobytes())
            for call in step.calls:
                found.update(repr((call.rank, call.queries.tolist(), call.keys.tolist(), call.low, call.high)).encode())
        return found.hexdigest()[:16]

    def flops(self) -> IntArray:
        """The FLOPs that each rank computes at each step, as an int array (steps, world_size)."""
        ledger = np.zeros((len(self.steps), self.world_size), dtype=np.int64)
        for index, step in enumerate(self.steps):
            for call in step.calls:
                ledger[index, call.rank] += self.call_flops(call)
        return ledger

    @property
    def call_kind(self) -> str:
        """The event kind of its kernel calls in a timeline."""
        return DIFFERENTIATE if self.task is not None and self.task.is_backward else ATTEND

    def call_flops(self, call: Call) -> int:
        """The FLOPs of a kernel call."""
        assert self.task is not None, "a schedule with calls has a task"
        return self.task.flops(call)

    def check_routes(self, topology: Topology) -> None:
        """Raise `ScheduleError` unless the topology has the same world size and a route for every transfer."""
        if topology.world_size != self.world_size:
            raise ScheduleError(
                f"schedule {self.name!r} is for {self.world_size} ranks, {topology.name} has {topology.world_size}"
            )
        if topology.is_complete:
            return
        repeat = isinstance(self.steps, LazySteps) and self.steps.hops_repeat
        for index, step in enumerate(self.steps[:1] if repeat else self.steps):
            missing = ~topology.have_routes(step.source, step.destination)
            if missing.any():
                at = int(missing.argmax())
                raise ScheduleError(
                    f"step {index}: rank {step.source[at]} sends to rank {step.destination[at]}, "
                    f"but {topology.name} has no such link"
                )
