"""The per-step executor: for transports of whole steps, and for single messages where one thread is enough.

The messages of a step are posted together, those of each channel as one batch, when all that they wait for has
happened. Its kernel calls are made while its messages are in flight. On a GPU nothing is waited for by the host: what
happens is queued on streams, one per channel and one per lane of calls, which wait for each other (`step_plan`). On a
host all is done by the calling thread, lane after lane. Receives of single messages are posted some steps ahead.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from runtime.executor.actions import Actions
from runtime.executor.copies import Action
from runtime.executor.messages import no_wait
from runtime.executor.plans import Plan, PlannedMessage, lanes_are_alike
from runtime.executor.streams import Mark
from tasp_lab.schedule.dependencies import RESIDENT
from tasp_lab.schedule.rank_part import CallRow, Join


class PerStep:
    """Executes the actions of a plan in one order: on a host one after another, on a GPU each in its stream."""

    def __init__(self, actions: Actions, plan: StepPlan) -> None:
        self._actions, self.plan = actions, plan
        self._marks: list[Mark | None] = [None] * plan.marks
        self._first = self._made([(POST, plan.first)] if plan.first.receives else [])
        queues = actions.streams.queues
        self._on_host = self._made(plan.on_host if not queues else ())
        self._runs = [(stream, self._made(of_run)) for stream, of_run in plan.runs if queues]

    def prepare(self) -> None:
        """Post the receives that wait for nothing, if they may be posted ahead of their steps."""
        for post in self._first:
            post()

    def run(self) -> None:
        for action in self._on_host:
            action()
        for stream, actions in self._runs:
            with self.context(stream):
                for action in actions:
                    action()

    def _made(self, planned: Iterable[tuple[int, Any]]) -> list[Action]:
        return [action for each in planned if (action := self.action(*each)) is not no_wait]

    def action(self, kind: int, what: Any) -> Action:
        """One of the plan's actions."""
        make, marks = self._actions, self._marks
        if kind == POST:
            return make.post(what.receives, what.sends, what.channel)
        if kind in (RECEIVE, FINISH):
            return make.wait("in" if kind == RECEIVE else "out", what)
        if kind == JOIN:
            return make.join(what)
        if kind == CALLS:
            return make.compute(what)

        def mark() -> None:
            marks[what] = make.streams.mark()

        def after() -> None:
            before = marks[what]
            assert before is not None, "marks are set before they are waited for"
            make.streams.wait(before)

        return mark if kind == MARK else after

    def context(self, stream: int) -> AbstractContextManager[object]:
        """The context in which the actions of a stream are issued."""
        streams = self._actions.streams
        return streams.communicating(stream) if stream > COMPUTING else streams.computing(COMPUTING - stream)


# What the per-step executor does, in which stream and in which order, prepared once per rank's part.
#
# Each channel of messages (`tasp_lab.schedule.dependencies`) has a communication stream, and each lane of calls has a
# stream. What a message, a join or a call waits for is reached in the stream to which it belongs; another stream then
# waits for a mark in that stream. So a stream waits only for what its own operations need, and channels do not wait
# for each other.
#
# Batches are issued in the order of steps and channels, the same at all ranks, as NCCL asks for where several
# communicators are used. What a batch waits for was issued before it, so neither a device that runs one batch at a
# time nor one that begins them in this order gets a deadlock.


POST, RECEIVE, FINISH, JOIN, CALLS, MARK, AFTER = range(7)
"""Post a batch, wait until messages have arrived or been sent, join, make calls, set a mark, wait for a mark."""

COMPUTING = -1
"""The stream of kernel calls on lane 0; lane k has ``COMPUTING - k``. Communication has the numbers of channels."""


class Batch(NamedTuple):
    """The messages of a channel that are posted together, and their nodes."""

    channel: int
    receives: tuple[PlannedMessage, ...]
    sends: tuple[PlannedMessage, ...]
    nodes: tuple[int, ...]


Planned = tuple[int, Batch | tuple[PlannedMessage, ...] | tuple[Join, ...] | tuple[CallRow, ...] | int]
"""One of the actions above and what it is done with; marks are numbered."""


class StepPlan(NamedTuple):
    """Runs of actions, each in one stream, in the order in which they are issued; and the number of marks.

    `first` are the receives that are posted before the run begins. `on_host` are the actions of a host, which has no
    streams: no marks.
    """

    first: Batch
    runs: tuple[tuple[int, tuple[Planned, ...]], ...]
    marks: int
    on_host: tuple[tuple[int, Any], ...]


@lru_cache(maxsize=16)
def step_plan(
    plan: Plan, steps: int, channels: Sequence[int], every_step: bool, prompt: bool = False, ahead: int = 0
) -> StepPlan:
    """The plan of a rank; `channels` is the channel of each lane.

    `every_step`: a batch is posted in every step, also without messages. `prompt`: what nothing waits for is received
    once the next batch of its channel is posted, not at the end, so that its time is known. As the batches of a channel
    run one after another, that delays none of them where the host goes on. `ahead`: receives are posted up to so many
    steps early, as soon as their memory is free, by a transport of single messages, which has one channel.
    """
    return _StepPlan(plan, steps, channels, every_step, prompt, ahead).found


class _StepPlan:
    """A plan as it is made, by walking the steps once in the order in which the host issues.

    Rank 0 of 3 in ring attention, with one channel (stream 0) and one lane of calls (stream -1)::

        stream  0   POST (receive block 2, send block 0)
        stream -1   CALLS on its own keys, block 0, while the batch is in flight
        stream  0   RECEIVE block 2, POST (receive block 1, send block 2), MARK 1
        stream -1   AFTER 1, CALLS on block 2
        stream  0   RECEIVE block 1, MARK 3
        stream -1   AFTER 3, CALLS on block 1
        stream  0   FINISH the sends of blocks 0 and 2

    Every CALLS is followed by a mark, too; those for which no stream waits, here 0, 2 and 4, are dropped at the end.
    """

    def __init__(
        self, plan: Plan, steps: int, channels: Sequence[int], every_step: bool, prompt: bool, ahead: int
    ) -> None:
        self._plan, self._channels, self._ahead = plan, channels, ahead
        self._actions: list[tuple[int, Planned]] = []
        self._home: dict[int, int] = {}
        self._marks = 0
        self._marked: dict[int, tuple[int, int]] = {}  # the last mark of each stream, and after how many actions
        self._count: defaultdict[int, int] = defaultdict(int)
        self._waited: set[tuple[int, int]] = set()  # streams and marks that they wait for
        self._ended: dict[int, int] = {}  # marks after calls, by node
        self._changed: dict[int, tuple[int, int | None]] = {}  # by block: the stream of its last change, a mark after
        self._unposted: Sequence[PlannedMessage] = plan.receives
        self._in_order, self._received = bool(ahead) and lanes_are_alike(plan), 0
        batches, calls = _batches(plan, steps, channels, every_step), _calls(plan, steps)
        first = self._early(0) if ahead else _batch(0, (), ())
        before: dict[int, tuple[PlannedMessage, ...]] = {}  # by channel: what the last batch receives
        for step in range(steps):
            for batch in batches[step]:
                for message in (*batch.sends, *batch.receives):
                    self._need(batch.channel, plan.waits[message.node])
            for of_step in batches[step]:
                batch = self._early(step, of_step.sends) if ahead else of_step
                if batch.nodes or every_step:
                    self._do(batch.channel, (POST, batch))
                for message in before.pop(batch.channel, ()):
                    self._reach(message.node, 0)
                if prompt:
                    before[batch.channel] = batch.receives
            for lane, of_lane in sorted(calls[step].items()):
                self._call(COMPUTING - lane, of_lane)
        for message in plan.receives:
            self._reach(message.node, 0)
        for node in range(plan.first_join, len(plan.waits)):
            self._reach(node, 0)
        for message in plan.sends:
            self._reach(message.node, 0)
        awaited = {mark for _, mark in self._waited}
        needed = [each for each in self._actions if each[1][0] != MARK or each[1][1] in awaited]
        runs = tuple((stream, _in_rows(_joined_together(actions))) for stream, actions in _in_runs(needed))
        on_host = _in_rows(each for _, actions in runs for each in actions if each[0] not in (MARK, AFTER))
        self.found = StepPlan(first, runs, self._marks, on_host)

    def _early(self, step: int, sends: Sequence[PlannedMessage] = ()) -> Batch:
        """The batch of a step, with what is received in later steps, too, if its memory is free.

        The receives of a lane are posted in order, as several of one step may have one peer and tag.
        """
        early, later = list[PlannedMessage](), list[PlannedMessage]()
        held = set[int]()  # lanes whose next receive must wait
        end = bisect(self._unposted, step + self._ahead, key=lambda message: message.step)
        for message in self._unposted[:end]:
            if message.lane in held or not self._may_post(message.node):
                held.add(message.lane)
                later.append(message)
            else:
                early.append(message)
        self._unposted = [*later, *self._unposted[end:]]
        return _batch(0, early, sends)

    def _may_post(self, node: int) -> bool:
        """Whether all that a message waits for has happened."""
        first, end = self._plan.first_buffer, self._plan.first_join
        return all(
            before in self._home or (first <= before < end and self._may_post(before))
            for before in self._plan.waits[node]
        )

    def _do(self, stream: int, action: Planned) -> None:
        self._actions.append((stream, action))
        self._count[stream] += 1

    def _call(self, stream: int, calls: Sequence[tuple[int, CallRow]]) -> None:
        changed = [place.block for _, row in calls for place in row.adds if place.since == RESIDENT]
        for node, _ in calls:
            self._need(stream, self._plan.waits[node])
        self._change(stream, changed)
        self._do(stream, (CALLS, tuple(row for _, row in calls)))
        ended = self._mark(stream)
        self._ended |= {node: ended for node, _ in calls}
        self._home |= {node: stream for node, _ in calls}
        self._changed |= dict.fromkeys(changed, (stream, ended))

    def _need(self, stream: int, nodes: Iterable[int]) -> None:
        """Make a stream wait until nodes have happened: for calls of theirs, else for all that is in their streams."""
        homes = {node: self._reach(node, stream) for node in nodes}
        for mark in sorted({self._ended[node] for node in homes if node in self._ended and homes[node] != stream}):
            self._wait(stream, mark)
        for home in sorted({home for node, home in homes.items() if home is not None and node not in self._ended}):
            if home != stream:
                self._wait(stream, self._mark(home))

    def _mark(self, stream: int) -> int:
        """A mark after all that is in a stream so far."""
        if stream in self._marked and self._marked[stream][1] == self._count[stream]:
            return self._marked[stream][0]
        self._do(stream, (MARK, self._marks))
        self._marked[stream] = self._marks, self._count[stream]
        self._marks += 1
        return self._marks - 1

    def _wait(self, stream: int, mark: int) -> None:
        if (stream, mark) not in self._waited:
            self._waited.add((stream, mark))
            self._do(stream, (AFTER, mark))

    def _reach(self, node: int, asking: int) -> int | None:
        """Let a node happen, if it has not: wait for a message, or join; returns the stream in which it has.

        The release of a buffer has no stream: it happens in all streams of what it waits for, which is then needed by
        the asking stream.
        """
        plan = self._plan
        if node in self._home:
            return self._home[node]
        if node < plan.first_call:
            return self._finish(plan.sends[node]) if node < plan.first_receive else self._receive(node)
        if node < plan.first_join:
            assert node >= plan.first_buffer, "calls are made before what waits for them"
            self._need(asking, plan.waits[node])
            return None
        return self._join(node, asking)

    def _finish(self, message: PlannedMessage, action: int = FINISH) -> int:
        home = self._home[message.node] = self._channels[message.lane]
        self._do(home, (action, (message,)))
        return home

    def _receive(self, node: int) -> int:
        """Wait for a message. Lanes that are alike progress together, so what is due before it is received first.

        The time of what nothing waits for is then known.
        """
        index = node - self._plan.first_receive
        first = self._received if self._in_order else index
        self._received = index + 1
        return [self._finish(message, RECEIVE) for message in self._plan.receives[first : index + 1]][-1]

    def _join(self, node: int, asking: int) -> int:
        plan, join = self._plan, self._plan.joins[node - self._plan.first_join]
        arrivals = [before for before in plan.waits[node] if plan.first_receive <= before < plan.first_call]
        channels = [self._channels[plan.receives[each - plan.first_receive].lane] for each in arrivals]
        home = channels[0] if channels else max(asking, 0)
        self._home[node] = home
        self._need(home, plan.waits[node])
        if join.place.since == RESIDENT:
            self._change(home, [join.place.block])
        self._do(home, (JOIN, (join,)))
        return home

    def _change(self, stream: int, blocks: Iterable[int]) -> None:
        """Make changes of resident copies follow one another."""
        for block in blocks:
            before, mark = self._changed.get(block, (stream, None))
            if before != stream:
                self._wait(stream, self._mark(before) if mark is None else mark)
            self._changed[block] = stream, None


def _batches(plan: Plan, steps: int, channels: Sequence[int], every_step: bool) -> list[list[Batch]]:
    """The batches of each step, in the order of channels."""
    count = max(channels, default=0) + 1
    receives, sends = ([[[] for _ in range(count)] for _ in range(steps)] for _ in range(2))  # type: ignore[var-annotated]
    for found, messages in ((receives, plan.receives), (sends, plan.sends)):
        for message in messages:
            found[message.step][channels[message.lane]].append(message)
    return [
        [
            _batch(channel, receives[step][channel], sends[step][channel])
            for channel in range(count)
            if every_step or receives[step][channel] or sends[step][channel]
        ]
        for step in range(steps)
    ]


def _batch(channel: int, receives: Sequence[PlannedMessage], sends: Sequence[PlannedMessage]) -> Batch:
    return Batch(channel, tuple(receives), tuple(sends), tuple(each.node for each in (*receives, *sends)))


def _calls(plan: Plan, steps: int) -> list[dict[int, list[tuple[int, CallRow]]]]:
    """The calls of each step by lane, with their nodes."""
    found: list[dict[int, list[tuple[int, CallRow]]]] = [{} for _ in range(steps)]
    for node, row in enumerate(plan.calls, plan.first_call):
        found[row.step].setdefault(row.lane, []).append((node, row))
    return found


def _in_runs(actions: Sequence[tuple[int, Planned]]) -> tuple[tuple[int, tuple[Planned, ...]], ...]:
    runs: list[tuple[int, list[Planned]]] = []
    for stream, action in actions:
        if not runs or runs[-1][0] != stream:
            runs.append((stream, []))
        runs[-1][1].append(action)
    return tuple((stream, tuple(found)) for stream, found in runs)


def _joined_together(actions: Sequence[Planned]) -> tuple[Planned, ...]:
    """Actions of a stream with joins in one, as late as the last of them: one kernel joins several.

    A join may be later than what only waits, for a message or a mark, and must come before a mark, a batch or calls.
    """
    found: list[Planned] = []
    joins: list[Join] = []
    for index, (kind, what) in enumerate(actions):
        if kind == JOIN:
            joins += what  # type: ignore[arg-type]
        if joins and not any(later == JOIN for later in _until_used(actions[index + 1 :])):
            found += [] if kind == JOIN else [(kind, what)]
            found.append((JOIN, tuple(joins)))
            joins = []
        elif kind != JOIN:
            found.append((kind, what))
    return tuple(found)


def _until_used(actions: Sequence[Planned]) -> Iterator[int]:
    """The kinds of actions that joins before them may follow."""
    for kind, _ in actions:
        if kind not in (RECEIVE, FINISH, JOIN, AFTER):
            return
        yield kind


def _in_rows(actions: Iterable[tuple[int, Any]]) -> tuple[tuple[int, Any], ...]:
    """Actions with waits for messages, of one kind and in a row, in one."""
    found: list[tuple[int, Any]] = []
    for kind, of_kind in groupby(actions, key=lambda action: action[0]):
        if kind in (RECEIVE, FINISH):
            found.append((kind, tuple(message for _, what in of_kind for message in what)))
        else:
            found += of_kind
    return tuple(found)
