"""Faults that are planted in a run of ranks on one device, to show that the run finds them.

Each is a function from a schedule and a device to the line by which `tests.support.one_device.run_on_one_device`
reports it; None if the fault is not found.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from runtime.executor.copies import Action
from runtime.executor.executor import Executor
from runtime.executor.messages import Message, Wait
from runtime.executor.per_step import AFTER, FINISH, JOIN, POST, PerStep
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.rank_part import CallRow
from tasp_lab.schedule.schedule import Schedule
from tests.support.loopback import Loopback
from tests.support.one_device import run_on_one_device

RANK = 1
"""The rank whose fault it is."""


class _SwappedSends(Loopback):
    """Rank 1 posts two messages to one rank in the wrong order."""

    def send(self, messages: Sequence[Message]) -> list[Wait]:
        order = list(range(len(messages)))
        for first, second in ((a, b) for a in order for b in order[a + 1 :]):
            if self.rank == RANK and messages[first].peer == messages[second].peer:
                order[first], order[second] = second, first
                break
        waits = super().send([messages[each] for each in order])
        return [waits[order.index(each)] for each in range(len(messages))]


Edit = Callable[[list[tuple[int, int, Any]]], bool]
"""A change of the actions of a plan - stream, kind, and what it is done with -; returns whether it found a place."""


def _lose_a_send(actions: list[tuple[int, int, Any]]) -> bool:
    """Leave out the last message that is sent."""
    for at, (stream, kind, batch) in reversed(list(enumerate(actions))):
        if kind == POST and batch.sends:
            *sends, lost = batch.sends
            actions[at] = stream, POST, batch._replace(sends=tuple(sends), nodes=batch.nodes[:-1])
            actions[:] = [
                (stream, kind, tuple(each for each in what if each != lost) if kind == FINISH else what)
                for stream, kind, what in actions
            ]
            return True
    return False


def _reuse_early(actions: list[tuple[int, int, Any]]) -> bool:
    """Post messages without a wait for the calls that read the memory, else for the messages that are sent from it."""
    for kind in (AFTER, FINISH):
        before: dict[int, list[int]] = {}
        for at, (stream, what, _) in enumerate(actions):
            if what == kind:
                before.setdefault(stream, []).append(at)
            elif what == JOIN:
                before.pop(stream, None)
            elif what == POST and (waits := before.get(stream)):
                moved = [actions.pop(each) for each in reversed(waits)]
                actions += moved * (kind == FINISH)
                return True
    return False


def _compute_early(actions: list[tuple[int, int, Any]]) -> bool:
    """Make a call without a wait for what it reads."""
    at = next((at for at, (stream, kind, _) in enumerate(actions) if kind == AFTER and stream < 0), None)
    if at is not None:
        del actions[at]
    return at is not None


def _run_edited(edit: Edit, schedule: Schedule, device: torch.device) -> None:
    """Run a schedule in which the plan of rank 1 is edited, in several orders: not all of them show a missing wait."""

    def change(executor: Executor) -> None:
        strategy = executor.strategy
        if executor.part.rank == RANK and isinstance(strategy, PerStep):
            actions = [(stream, *action) for stream, actions in strategy.plan.runs for action in actions]
            if not edit(actions):
                raise RunError(NO_PLACE)
            strategy.plan = strategy.plan._replace(runs=tuple((stream, ((k, what),)) for stream, k, what in actions))

    for seed in range(SEEDS):
        run_on_one_device(schedule, device, seed, change=change)


SEEDS = 8
NO_PLACE = "the plan has no place for this fault"


def _exhaust_memory(schedule: Schedule, device: torch.device) -> None:
    """Let a kernel call of rank 1 fail for lack of memory. Raises `RunError` if memory of a run stays in use."""
    memories: list[weakref.ref[torch.UntypedStorage]] = []

    def changed(executor: Executor) -> None:
        memories.append(weakref.ref(executor.memory.untyped_storage()))
        if executor.part.rank == RANK:
            executor.copies.call = fail  # type: ignore[method-assign]

    def fail(row: CallRow) -> Action:
        def compute() -> None:
            raise torch.OutOfMemoryError(f"rank {RANK}, step {row.step}: a planted lack of memory")

        return compute

    try:
        run_on_one_device(schedule, device, change=changed)
    except torch.OutOfMemoryError as error:
        line = str(error)
    gc.collect()  # the frames of the error refer to each other
    left = sum(each() is not None for each in memories)
    raise RunError(f"{left} memories stay in use after: {line}" if left else line)


FAULTS: Mapping[str, Callable[[Schedule, torch.device], None]] = {
    "lost send": partial(_run_edited, _lose_a_send),
    "swapped order": lambda schedule, device: run_on_one_device(schedule, device, transports=_SwappedSends),
    "early reuse of a buffer": partial(_run_edited, _reuse_early),
    "call before its message": partial(_run_edited, _compute_early),
    "lack of memory": _exhaust_memory,
}
"""Runs of a schedule of attention with a fault of rank 1; all of them should raise `RunError`."""


def report(fault: str, schedule: Schedule, device: torch.device) -> str | None:
    """The line by which a fault is reported; None if it is not found."""
    try:
        FAULTS[fault](schedule, device)
    except RunError as error:
        return str(error)
    return None
