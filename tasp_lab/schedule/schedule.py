"""A schedule: which rank sends which block to which rank at each step, and what it computes. Proven when built.

Two ranks swap their blocks in one step. Without the second transfer there is no such schedule:

>>> from tasp_lab.schedule.model import Step
>>> blocks, own, everything = Blocks.of_data(np.array([4, 4])), np.eye(2, dtype=bool), np.ones((2, 2), dtype=bool)
>>> swap = Schedule("swap", 2, 1, blocks, own, everything, [Step.of([(0, 1, 0, 0), (1, 0, 0, 1)])])
>>> swap.transfers
2
>>> Schedule("half", 2, 1, blocks, own, everything, [Step.of([(0, 1, 0, 0)])])
Traceback (most recent call last):
tasp_lab.core.errors.ScheduleError: after step 0: rank 0 never received block 1

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
Every copy that is there at the end has a reason: it was there at the start, is promised, or is in `kept`.

**What a step does.** 1. The buffers of step s - b are emptied. 2. Transfers take what their source has when the step
begins; calls read copies as they are then. 3. What was given is gone. 4. Calls add their parts. 5. Arrivals join.
`tasp_lab.schedule.proof` states the rules, `tasp_lab.schedule.dependencies` what waits for what.

Steps are generated lazily (a 511-ring AllGather on 512 ranks has 134 million transfers), each as arrays. Constructing a
`Schedule` replays all of them once, unless a theorem proves them (`LazySteps.prove`). A broken rule raises
`ScheduleError` with step, rank and block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, update_wrapper, wraps
from threading import Lock
from typing import Generic, TypeVar, cast

import numpy as np

from tasp_lab.core.arrays import IntArray, first_true, freeze, whole
from tasp_lab.core.errors import NoLinkError, ScheduleError, of_type
from tasp_lab.core.tables import brief
from tasp_lab.schedule.blocks import Blocks
from tasp_lab.schedule.model import LazySteps, ScheduleModel, checked
from tasp_lab.topology.graph import Topology

MAX_LANES = 2**24
"""Assumption: no schedule needs more. Tables have an entry per lane, and keys are products of a lane and ranks."""


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(ScheduleModel):
    """A valid schedule.

    Parameters
    ----------
    Those of `ScheduleModel`.

    Attributes
    ----------
    transfers : the number of transfers of all steps.
    reordered : the schedule that this is with its ranks in another order, and the order; None if it is none.
    """

    transfers: int = field(init=False)
    reordered: tuple[Schedule, IntArray] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._check_types()
        if self.world_size < 1:
            raise ScheduleError(f"schedule {self.name!r} is for {self.world_size} ranks, expected 1 or more")
        if self.lanes > MAX_LANES:
            raise ScheduleError(f"schedule {self.name!r} has {self.lanes} lanes, expected at most {MAX_LANES}")
        shape, array = (self.world_size, len(self.blocks)), "an array of shape (ranks, blocks)"
        tables = [name for name in ("initial", "final", "kept") if name != "kept" or self.kept is not None]
        freeze(self, tables, f"schedule {self.name!r}: ", np.bool_, 2, array)
        for name in tables:
            if (found := getattr(self, name).shape) != shape:
                raise ScheduleError(f"schedule {self.name!r}: {name} has the shape {found}, expected {shape}")
        if self.initial_part is not None:
            freeze(self, ("initial_part",), f"schedule {self.name!r}: ", np.int64, None, array)
        object.__setattr__(self, "steps", checked(self.steps))
        if self.task is not None:
            try:
                self.task.check(self.blocks)
                self.task.contract.check(self.blocks, self.initial, self.final)
            except ScheduleError as error:
                raise ScheduleError(f"schedule {self.name!r}: {error}") from None
        proved = None
        if isinstance(self.steps, LazySteps) and (proved := self.steps.prove(self)) is not None:
            object.__setattr__(self, "reordered", self.steps.reordered)
        if proved is None:
            from tasp_lab.schedule.proof import prove  # no theorem holds

            proved = prove(self)
        object.__setattr__(self, "transfers", proved)

    def __repr__(self) -> str:
        size = f"{self.world_size} ranks, {len(self.steps)} steps, {self.transfers:,} transfers"
        task = () if self.task is None else (f"{type(self.task).__name__} {self.task.passing}",)
        return brief(self, self.name, size, *task)

    def _check_types(self) -> None:
        """Raise `ScheduleError` for an argument that is of no type that this class takes."""
        expected: tuple[tuple[str, type, str], ...] = (
            ("name", str, "a text"),
            ("blocks", Blocks, "Blocks, such as Blocks.of_data(sizes)"),
            ("steps", Sequence, "a list of Step"),
        )
        for name, kind, what in expected:
            value = getattr(self, name)
            if not isinstance(value, kind) or (name == "steps" and isinstance(value, str)):
                raise ScheduleError(of_type(f"schedule {self.name!r}: {name}", value, what))
        for name in ("world_size", "lanes", "own_bytes"):
            object.__setattr__(self, name, whole(f"schedule {self.name!r}: {name}", getattr(self, name)))
        members = ("contract", "check", "effects", "existing_parts", "flops", "shapes")
        if self.task is not None and not all(hasattr(type(self.task), member) for member in members):
            what = f"a tasp_lab.schedule.calls.Task, which has {', '.join(members)}"
            raise ScheduleError(of_type(f"schedule {self.name!r}: task", self.task, what))

    def renamed(self, name: str) -> Schedule:
        """The same schedule under another name. It is not proven again, as `dataclasses.replace` would do."""
        schedule = copy(self)
        for cached in ("digest", "facts"):  # values that may depend on the name
            schedule.__dict__.pop(cached, None)
        object.__setattr__(schedule, "name", name)
        return schedule

    @cached_property
    def facts(self) -> dict[str, object]:
        """The results of `OncePerSchedule`, by the name of the function. They travel with the schedule."""
        return {}

    @cached_property
    def digest(self) -> str:
        """A short hash of the schedule: its blocks, its task, what stays where, and every step."""
        task = self.task and self.task.content
        library_call = (self.fused, self.algorithm, self.own_bytes)
        digest = hashlib.sha256(repr((self.name, self.initial.shape, self.lanes, *library_call, task)).encode())
        digest.update(repr(self.blocks.kinds).encode())
        for values in (self.blocks.kind, self.blocks.bytes, self.blocks.parts):
            digest.update(values.tobytes())
        if self.blocks.home_bytes is not self.blocks.bytes:
            digest.update(self.blocks.home_bytes.tobytes())
        for rows in (self.initial, self.final, () if self.kept is None else self.kept):
            for row in rows:
                digest.update(row.tobytes())
        if self.initial_part is not None:
            digest.update(self.initial_part.tobytes())
        for step in self.steps:
            for content in step.content():
                digest.update(content)
        return digest.hexdigest()[:16]

    def on(self, topology: Topology) -> Schedule:
        """The schedule, whose transfers all have routes on a topology; raises as `check_routes` does."""
        self.check_routes(topology)
        return self

    def check_routes(self, topology: Topology) -> None:
        """Raise `ScheduleError` for a topology of another world size, `NoLinkError` for a transfer without a route."""
        if topology.world_size != self.world_size:
            raise ScheduleError(
                f"schedule {self.name!r} is for {self.world_size} ranks, {topology.name} has {topology.world_size}"
            )
        if topology.reaches_all:
            return
        repeat = isinstance(self.steps, LazySteps) and self.steps.hops_repeat
        for index, step in enumerate(self.steps[:1] if repeat else self.steps):
            if (at := first_true(~topology.have_routes(step.source, step.destination))) is not None:
                where = f"schedule {self.name!r}, step {index}"
                raise NoLinkError(
                    where, int(step.source[at]), int(step.destination[at]), topology.name, topology.forwarding.limit
                )


Function = TypeVar("Function", bound=Callable[..., object])
Result = TypeVar("Result")


class OncePerSchedule(Generic[Result]):
    """A function of a schedule alone, whose result is kept as long as the schedule: it must be small, and without it.

    Times, bounds and reports need it again, and questions that differ in numbers of their machines have one schedule.
    """

    def __init__(self, function: Callable[[Schedule], Result]) -> None:
        self._function = function
        self._name = f"{function.__module__}.{function.__qualname__}"
        update_wrapper(self, function)

    def __call__(self, schedule: Schedule) -> Result:
        if self._name not in schedule.facts:
            schedule.facts[self._name] = self._function(schedule)
        return cast(Result, schedule.facts[self._name])

    def keep(self, schedule: Schedule, result: Callable[[], Result]) -> None:
        """Keep a result that was found on the way to something else, unless it is known."""
        if self._name not in schedule.facts:
            schedule.facts[self._name] = result()


KEPT_TRANSFERS = 200_000
"""Transfers of all schedules whose results a `remembered` function keeps, where it names no other number."""


def remembered(most: int, transfers: int = KEPT_TRANSFERS) -> Callable[[Function], Function]:
    """Let a function of a schedule keep its last results: at most so many, of schedules with so many transfers or one.

    Both passes of a layer are simulated several times, a comparison returns to some of its schedules, and points of a
    study often have equal schedules on machines of two kinds.
    """

    def keeping(function: Function) -> Function:
        kept: dict[tuple[Schedule, Hashable], object] = {}
        keeps = Lock()  # both passes of a large layer are simulated at once

        @wraps(function)
        def recall(schedule: Schedule, *arguments: Hashable, **named: Hashable) -> object:
            key = schedule, (arguments, tuple(named.items()))
            with keeps:
                if key in kept:
                    kept[key] = result = kept.pop(key)  # the last one used is last
                    return result
                room = transfers - schedule.transfers
                # before the next result takes memory, too
                while kept and (len(kept) >= most or sum(each.transfers for each, _ in kept) > room):
                    del kept[next(iter(kept))]
            result = function(schedule, *arguments, **named)
            with keeps:
                kept[key] = result
            return result

        def known(schedule: Schedule, *arguments: Hashable, **named: Hashable) -> object:
            """The result if it is kept, else None; that does not count as a use."""
            return kept.get((schedule, (arguments, tuple(named.items()))))

        recall.__dict__["known"] = known
        return cast(Function, recall)

    return keeping
