"""A schedule: which rank sends which block to which rank at each step, and what it computes. Proven when built.

**Blocks** are sums of parts (`tasp_lab.schedule.blocks`). At the start ranks have copies of some blocks, complete ones
or single parts; at the end they must have the complete copies that are promised. A **step** is a set of transfers and
kernel calls that may run concurrently. A transfer copies what its source has of a block, or *gives* it, and then the
source has nothing of it. A kernel call reads complete blocks and adds parts. What arrives or is added joins the copy
that is there. A **lane** is a sequence of transfers: a rank's transfers on one lane run one after another, those on
different lanes independently; the same holds for compute lanes. There is no barrier between steps.

**Residents and buffers.** A copy is *resident* if it is there at the start, promised at the end, in `kept`, or of a
kind without a pool: it stays at its rank. Any other copy comes at one step s into buffer s mod b of its kind's pool,
which has b buffers, and is overwritten at step s + b. So it may be used at steps s + 1 to s + b - 1, and communication
may run b - 1 steps ahead of compute; b = 2 is double buffering.
A schedule says of every copy that is there at the end why: it was there at the start, is promised, or is in `kept`.

**What a step does.** 1. The buffers of step s - b are emptied. 2. Transfers take what their source has when the step
begins; calls read copies as they are then. 3. What was given is gone. 4. Calls add their parts. 5. Arrivals join.
`tasp_lab.schedule.proof` states the rules, `tasp_lab.schedule.dependencies` what waits for what.

Steps are generated lazily (a 511-ring AllGather on 512 ranks has 134 million transfers), each as arrays. Constructing a
`Schedule` replays all of them once, unless a theorem proves them (`LazySteps.prove`). A broken rule raises
`ScheduleError` with step, rank and block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray
from tasp_lab.core.errors import NoLinkError, ScheduleError, of_type
from tasp_lab.core.tables import brief
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.calls import Task
from tasp_lab.schedule.proof import prove
from tasp_lab.schedule.step import LazySteps, Step
from tasp_lab.topology.graph import Topology


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A valid schedule.

    Parameters
    ----------
    name : the schedule's name, as on the command line.
    world_size : number of ranks.
    lanes : number of lanes.
    blocks : the blocks.
    initial : bool array (world_size, blocks), the copies that ranks have at the start.
    final : bool array (world_size, blocks), the copies that ranks must have complete at the end.
    steps : the steps, possibly lazy; any sequence of `Step`.
    task : what the kernel calls compute; None for a schedule without kernel calls.
    fused : whether all steps are one call of the communication library, as its own collectives are; else one per step.
    initial_part : int array that broadcasts to (world_size, blocks), the one part that an initial copy has, or -1 for
        all parts; None if all initial copies are complete.
    kept : bool array (world_size, blocks), further copies that stay where they arrive; None for none.

    Attributes
    ----------
    transfers : the number of transfers of all steps.
    """

    name: str
    world_size: int
    lanes: int
    blocks: Blocks
    initial: BoolArray
    final: BoolArray
    steps: Sequence[Step]
    task: Task | None = None
    fused: bool = False
    initial_part: IntArray | None = None
    kept: BoolArray | None = None
    transfers: int = field(init=False)

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "steps", tuple(self.steps) if isinstance(self.steps, list) else self.steps)
        if self.world_size < 1:
            raise ScheduleError(f"schedule {self.name!r} is for {self.world_size} ranks, expected 1 or more")
        shape = (self.world_size, len(self.blocks))
        for name in ("initial", "final", "kept"):
            values = getattr(self, name)
            if values is not None and values.shape != shape:
                raise ScheduleError(f"schedule {self.name!r}: {name} has the shape {values.shape}, expected {shape}")
            if values is not None:
                if values.dtype != np.bool_:
                    raise ScheduleError(f"schedule {self.name!r}: {name} is of {values.dtype}, expected bool")
                values.flags.writeable = False
        if self.task is not None:
            try:
                self.task.check(self.blocks)
                self.task.contract.check(self.blocks, self.initial, self.final)
            except ScheduleError as error:
                raise ScheduleError(f"schedule {self.name!r}: {error}") from None
        proved = self.steps.prove(self) if isinstance(self.steps, LazySteps) else None
        object.__setattr__(self, "transfers", prove(self) if proved is None else proved)

    def __repr__(self) -> str:
        size = f"{self.world_size} ranks, {len(self.steps)} steps, {self.transfers:,} transfers"
        task = () if self.task is None else (f"{type(self.task).__name__} {self.task.passing}",)
        return brief(self, self.name, size, *task)

    def _check_types(self) -> None:
        """Raise `ScheduleError` for an argument that is of no type that this class takes."""
        array, optional = "an array of shape (ranks, blocks)", (np.ndarray, type(None))
        expected: tuple[tuple[str, tuple[type, ...], str], ...] = (
            ("name", (str,), "a text"),
            ("world_size", (int, np.integer), "a whole number"),
            ("lanes", (int, np.integer), "a whole number"),
            ("blocks", (Blocks,), "Blocks, such as Blocks.of_data(sizes)"),
            ("initial", (np.ndarray,), array),
            ("final", (np.ndarray,), array),
            ("steps", (Sequence,), "a list of Step"),
            ("initial_part", optional, array),
            ("kept", optional, array),
        )
        for name, types, what in expected:
            value = getattr(self, name)
            if not isinstance(value, types) or isinstance(value, bool) or (name == "steps" and isinstance(value, str)):
                raise ScheduleError(of_type(f"schedule {self.name!r}: {name}", value, what))
        members = ("contract", "check", "effects", "existing_parts", "flops", "shapes")
        if self.task is not None and not all(hasattr(type(self.task), each) for each in members):
            what = f"a tasp_lab.schedule.calls.Task, which has {', '.join(members)}"
            raise ScheduleError(of_type(f"schedule {self.name!r}: task", self.task, what))

    @property
    def block_bytes(self) -> IntArray:
        """The size of each block on the wire, int array (blocks,)."""
        return self.blocks.bytes

    def is_resident(self, rank: IntArray, block: IntArray) -> BoolArray:
        """Whether copies of these blocks stay at these ranks."""
        found: BoolArray = (self.blocks.buffers[block] == 0) | self.initial[rank, block] | self.final[rank, block]
        return found if self.kept is None else found | self.kept[rank, block]

    def bytes_sent(self) -> IntArray:
        """The bytes that each rank sends on each lane at each step, as an int array (steps, world_size, lanes)."""
        ledger = np.zeros((len(self.steps), self.world_size, self.lanes), dtype=np.int64)
        for index, step in enumerate(self.steps):
            np.add.at(ledger[index], (step.source, step.lane), self.block_bytes[step.block])
        return ledger

    def flops(self) -> IntArray:
        """The FLOPs that each rank computes at each step, as an int array (steps, world_size)."""
        ledger = np.zeros((len(self.steps), self.world_size), dtype=np.int64)
        for index, step in enumerate(self.steps):
            for calls in step.calls:
                assert self.task is not None, "a schedule with calls has a task"
                np.add.at(ledger[index], calls.rank, self.task.flops(calls))
        return ledger

    @cached_property
    def digest(self) -> str:
        """A short hash of the schedule: its blocks, its task, what stays where, and every step."""
        task = self.task and self.task.content
        found = hashlib.sha256(repr((self.name, self.initial.shape, self.lanes, self.fused, task)).encode())
        found.update(repr(self.blocks.kinds).encode())
        for values in (self.blocks.kind, self.blocks.bytes, self.blocks.parts):
            found.update(values.tobytes())
        if self.blocks.home_bytes is not self.blocks.bytes:
            found.update(self.blocks.home_bytes.tobytes())
        for rows in (self.initial, self.final, () if self.kept is None else self.kept):
            for row in rows:
                found.update(row.tobytes())
        if self.initial_part is not None:
            found.update(self.initial_part.tobytes())
        for step in self.steps:
            found.update(repr((len(step), len(step.calls))).encode())
            for values in (step.source, step.destination, step.lane, step.block):
                found.update(values.tobytes())
            found.update(step.gives.tobytes())
            for calls in step.calls:
                found.update(repr((calls.kernel, calls.lane, calls.params.shape)).encode())
                for values in (
                    calls.rank,
                    calls.params,
                    *(x for each in calls.operands for x in (each.offset, each.block)),
                ):
                    found.update(values.tobytes())
        return found.hexdigest()[:16]

    def check_routes(self, topology: Topology) -> None:
        """Raise `ScheduleError` for a topology of another world size, `NoLinkError` for a transfer without a route."""
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
                where = f"schedule {self.name!r}, step {index}"
                raise NoLinkError(where, int(step.source[at]), int(step.destination[at]), topology.name)
