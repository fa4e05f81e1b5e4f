"""Repeated simulation of one schedule on machines that differ in numbers alone: points of a study, samples, fits.

    run = RepeatedRun(schedule, machine)
    times_s = [run.time_s(each) for each in samples]
    time_s(schedule, machine)                   # keeps what it found for the next machine

What waits for what, which messages and calls there are and which of them are alike depends on the schedule and on the
routes of its messages, not on numbers. So these are found once, with messages and calls that only have numbers; a
simulation then costs no more than its events. Which constraints can saturate (`Incidence.that_can_saturate`) and have
equal capacities does depend on numbers: there is a program for each such set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, cast

import numpy as np

from sim.array import engine
from sim.array.engine import MANY, check_fits, operations_of
from sim.array.event_loop import Run
from sim.array.from_schedule import hops_of
from sim.array.operations import Cost, Incidence, capacities_of
from sim.array.quotient import Program, program_of
from sim.array.symmetry import classes_of
from sim.messages import call_facts
from tasp_lab.core.arrays import FloatArray, IntArray, numbered
from tasp_lab.core.process import without_garbage_collection
from tasp_lab.core.progress import ShareCallback, no_share
from tasp_lab.machines.contention import Contention
from tasp_lab.machines.libraries.channels import ChannelLibrary, Ring
from tasp_lab.machines.libraries.library import CallFacts, CommLibrary, Message
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.schedule.schedule import Schedule, remembered
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_shapes import KernelShape

MOST_RUNS = 4
"""Runs that are kept of a schedule: machines of so many forms, such as meshes and switches, take turns in a study."""


MOST_KNOWN = 1024
"""Times that a run keeps."""


def time_s(schedule: Schedule, machine: Machine, progress: ShareCallback = no_share) -> float:
    """The end of the last message or call, in seconds; arguments and errors as of `sim.array.engine.run`.

    What does not depend on numbers of the machine is found once for a schedule of up to `MANY` transfers, unless hosts
    launch its messages in turn: that depends on whether launches take time.
    """
    if schedule.transfers > MANY or machine.rank_speeds or machine.comm_library.serial_launch:
        return engine.time_s(schedule, machine, progress)
    runs = _runs(schedule)
    for run in runs:
        if (found := run.time_if_alike_s(machine)) is not None:
            return found
    runs.insert(0, RepeatedRun(schedule, machine))
    del runs[MOST_RUNS:]
    return runs[0].time_s(machine)


@remembered(most=256, transfers=1_500_000)  # of all candidates of a comparison
def _runs(schedule: Schedule) -> list[RepeatedRun]:
    return []


def known_runs(schedule: Schedule) -> list[RepeatedRun]:
    """What `time_s` has found of a schedule, to be kept for another process."""
    return cast(list[RepeatedRun], _runs.__dict__["known"](schedule) or [])


def use_runs(schedule: Schedule, runs: Sequence[RepeatedRun]) -> None:
    """Let `time_s` use what it has found in another process."""
    if runs:
        _runs(schedule)[:] = runs


class RepeatedRun:
    """The time of a schedule on any number of machines that differ in numbers alone.

    Parameters
    ----------
    schedule : what is simulated.
    machine : one of them, whose ranks compute equally fast.

    Raises `ScheduleError` if the topology lacks ranks or links of the schedule, and for too many transfers.

    >>> from tasp_lab.schedules.build import collective
    >>> from tasp_lab.topology.builders import full_mesh
    >>> mesh = full_mesh(8, 50e9, 1e-6)
    >>> fast, slow = Machine(mesh, CommLibrary("fast")), Machine(full_mesh(8, 25e9, 1e-6), CommLibrary("slow", 1e-6))
    >>> run = RepeatedRun(collective("multi-ring", mesh, 7 * 2**20), fast)
    >>> [round(run.time_s(machine) * 1e6, 3) for machine in (fast, slow)]
    [153.801, 313.601]
    """

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        assert not machine.rank_speeds, "ranks compute equally fast"
        schedule.check_routes(machine.topology)
        self.schedule, self._call, self._first = schedule, call_facts(schedule), machine
        self._kinds, self._instant = list[_Kind | _CallKind](), list[_CallKind]()
        library = machine.comm_library.bind(self._call)
        numbers = (_Numbered if library.serial_launch else _NumberedApart)("numbered", of=library, kinds=self._kinds)
        compute = _NumberedCompute(of=machine, kinds=self._kinds, instant=self._instant)
        # how long messages wait is one of the numbers, whether they do is not
        host, contention = replace(machine.host, overlaps=machine.overlaps), replace(machine.contention, waits=0)
        of_numbers = replace(machine, comm_library=numbers, compute=compute, host=host, contention=contention)
        with without_garbage_collection():
            self._operations, derived = operations_of(schedule, of_numbers)
        source, destination = derived.messages[1:3] if derived is not None else hops_of(schedule)
        hops, hop = np.unique(source * schedule.world_size + destination, return_inverse=True)
        self._hops = np.divmod(hops, schedule.world_size)
        self._hop_of_cost = np.full(len(self._operations.costs), len(hops))
        self._hop_of_cost[self._operations.cost[:, : len(hop)]] = hop
        self._places = library.places(*self._hops)
        self._last: _Network | None = self._network_of(machine.topology)
        self._fixed, self._alike = _fixed(machine), self._last.alike
        self._programs: dict[object, Program] = {}
        self._known: dict[object, float] = {}

    def __getstate__(self) -> dict[str, object]:
        """All but the first machine, which `RepeatedRuns` alone asks for, and networks, of which another one is new."""
        return vars(self) | {"_first": None, "_last": None}

    def time_s(self, machine: Machine) -> float:
        """The time on a machine that differs from the first one in numbers alone, in seconds."""
        found = self.time_if_alike_s(machine)
        assert found is not None, "machines differ in numbers alone"
        return found

    def time_if_alike_s(self, machine: Machine) -> float | None:
        """The time in seconds, simulated once per set of numbers; None if the machine differs in more than these."""
        if _fixed(machine) != self._fixed:
            return None
        library, network = machine.comm_library.bind(self._call), self._last
        if network is None or machine.topology is not network.topology:  # samples often have one
            network = self._last = self._network_of(machine.topology)
        if network.alike != self._alike or not np.array_equal(library.places(*self._hops), self._places):
            return None
        costs = self._costs(library, machine, network)
        if costs is None:
            return None
        key = costs, network.capacity_bytes_per_s.tobytes(), machine.contention
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            program = self._program(costs, network.capacity_bytes_per_s, machine.contention)
            self._known[key] = Run(program).end_s()
        return self._known[key]

    def _network_of(self, topology: Topology) -> _Network:
        """What the messages meet on a topology."""
        routes, latency_s = topology.routes(*self._hops)
        alike = routes.tobytes(), numbered(latency_s)[1].tobytes()
        capacity = capacities_of(topology, self._operations.constraints)
        return _Network(topology, alike, np.append(latency_s, 0.0), capacity)

    def _costs(self, library: CommLibrary, machine: Machine, network: _Network) -> tuple[Cost, ...] | None:
        """The costs on a machine; None if other calls take time there, or other messages slow calls, than on the first.

        Those of buffers and hosts have no number.
        """
        if any(kind.time_s(machine) for kind in self._instant):
            return None
        costs = []
        for cost, latency_s in zip(self._operations.costs, network.latency_s[self._hop_of_cost], strict=True):
            if (number := int(cost.launch_s) - _FIRST) >= 0:
                kind, slows = self._kinds[number], cost.channels > 0
                if isinstance(kind, _CallKind):
                    cost = cost._replace(launch_s=kind.time_s(machine))
                    alike = cost.launch_s > 0
                else:
                    cost = Cost.of(kind.message(library), float(latency_s))
                    alike = slows == (cost.channels > 0)
                if machine.contention.slows and not alike:
                    return None
            costs.append(cost)
        return tuple(costs)

    def _program(self, costs: Sequence[Cost], capacity_bytes_per_s: FloatArray, contention: Contention) -> Program:
        operations = self._operations
        limits = np.array([np.inf if each.max_bytes_per_s is None else each.max_bytes_per_s for each in costs])
        passes = Incidence(
            operations.constraints, capacity_bytes_per_s, operations.passing, operations.passed
        ).that_can_saturate(limits[operations.cost].max(axis=0))
        key = passes.constraints.tobytes(), numbered(passes.capacity_bytes_per_s)[1].tobytes()
        if key not in self._programs:
            used = replace(operations, **passes._asdict())
            self._programs[key] = program_of(used, classes_of(used))
            check_fits(self.schedule, self._programs[key].plan.size)
        return self._programs[key].with_numbers(costs, passes.capacity_bytes_per_s, contention)


class RepeatedRuns:
    """The times of schedules on machines that are mostly alike: `RepeatedRun` for a list, all made for one machine.

    Rings of a library with channels that differ in sizes alone are computed together, with arrays of one element per
    schedule, if no two of their hops share a link.
    """

    def __init__(self, runs: Sequence[RepeatedRun]) -> None:
        self._runs, self._first = runs, runs[0]._first
        groups: dict[object, list[int]] = {}
        if isinstance(self._first.comm_library, ChannelLibrary):
            for place, run in enumerate(self._runs):
                groups.setdefault(_likeness(run), []).append(place)
        rings = [(places, _Rings.of([self._runs[place] for place in places])) for places in groups.values()]
        self._rings = [(places, together) for places, together in rings if together is not None]

    @classmethod
    def of(cls, schedules: Sequence[Schedule], machine: Machine) -> RepeatedRuns:
        """The runs of these schedules."""
        return cls([RepeatedRun(schedule, machine) for schedule in schedules])

    def times_s(self, machine: Machine) -> FloatArray:
        """The time of each schedule on a machine, in seconds; a float array (schedules,)."""
        found = np.full(len(self._runs), np.nan)
        library, first = machine.comm_library, self._first
        same_links = machine.topology is first.topology or machine.topology == first.topology
        if same_links and isinstance(library, ChannelLibrary) and type(library) is type(first.comm_library):
            for places, rings in self._rings:
                found[places] = rings.times_s(library)
        for place in np.flatnonzero(np.isnan(found)).tolist():
            time_s = self._runs[place].time_if_alike_s(machine)
            found[place] = engine.time_s(self._runs[place].schedule, machine) if time_s is None else time_s
        return found


def _likeness(run: RepeatedRun) -> object:
    """What rings have in common that are computed together: all but their sizes."""
    operations, call = run._operations, run._call
    return (
        tuple(kind._replace(size_bytes=0) if isinstance(kind, _Kind) else kind for kind in run._kinds),
        tuple((each.launch_s, each.latency_s) for each in operations.costs),
        operations.cost.tobytes(),
        call._replace(total_bytes=0, own_bytes=0),
    )


@dataclass(frozen=True, eq=False)
class _Rings:
    """Fused rings whose hops share no link and no host, whatever the library; all have the same costs but for sizes.

    So a message has the rate of its narrowest link or of its own limit. It starts when the previous one of its hop has
    left and the hop before has delivered its block, `lag` steps earlier: the ends of a step are maxima and sums of
    those of earlier steps, for all hops and all sizes at once.

    Attributes
    ----------
    calls : the rings.
    kinds : of each kind of message its place, the bytes that it has in each ring, and whether it belongs to step 0.
    kind, route_s : of each operation its kind of message and the latency of its route; arrays (variants, classes).
    narrowest_bytes_per_s : of each class, the capacity of its narrowest link.
    variants : the variant of each step, see `Operations.variant`.
    before, lag : for each class the one whose block it forwards, and how many steps earlier that has it.
    """

    calls: Sequence[CallFacts]
    kinds: Sequence[tuple[int, FloatArray, bool]]
    kind: IntArray
    route_s: FloatArray
    narrowest_bytes_per_s: FloatArray
    variants: Sequence[int]
    before: IntArray
    lag: int

    @classmethod
    def of(cls, runs: Sequence[RepeatedRun]) -> _Rings | None:
        """The rings of these runs, which are alike but for sizes; None if they are no such rings."""
        first, operations = runs[0], runs[0]._operations
        if not (first._call.fused and first._call.steps):
            return None
        # with all constraints, so that it holds whatever the rates are
        program = program_of(operations, classes_of(operations))
        plan, rows = program.plan, program.plan.rows
        passes = np.bincount(plan.passes["constraint"], plan.passes["count"])
        numbers = np.array([each.launch_s for each in operations.costs]).astype(np.int64) - _FIRST
        is_ring = operations.repeats > 1 and rows["host"][:-1].max(initial=-1) < 0
        if not is_ring or passes.max(initial=0) > 1 or (numbers < 0).any():
            return None
        shape = plan.variants, plan.classes
        capacity = np.append(program.capacity_bytes_per_s[plan.passes["constraint"]], np.inf)
        narrowest = np.minimum.reduceat(capacity, rows["first_pass"][:-1])
        # What follows an arrival is the next hop, `lag` steps later; see `sim.array.quotient` for offsets.
        later = np.arange(plan.classes) + plan.after["offset"][rows["if_arrived"][:-1]]
        before = np.zeros(plan.classes, dtype=np.int64)
        before[later % plan.classes] = np.arange(plan.classes)
        kinds = [[kind for kind in run._kinds if isinstance(kind, _Kind)] for run in runs]
        sizes = [np.array([each.size_bytes for each in same], float) for same in zip(*kinds, strict=True)]
        return cls(
            [run._call for run in runs],
            [(each.place, size, each.first) for each, size in zip(kinds[0], sizes, strict=True)],
            numbers[plan.cost].reshape(shape),
            np.array([each.latency_s for each in operations.costs])[plan.cost].reshape(shape),
            narrowest,
            [operations.variant(step) for step in range(operations.repeats)],
            before,
            int(later[0]) // plan.classes,
        )

    def times_s(self, library: ChannelLibrary) -> FloatArray:
        """The time of each ring, in seconds."""
        numbers = np.zeros((4, len(self.kinds), len(self.calls)))
        rings = [library.ring_of(call)[1:] for call in self.calls]
        columns: list[Any] = [np.array(column, float).T for column in zip(*rings, strict=True)]
        together = Ring("", *columns)
        for kind, (place, size_bytes, first) in enumerate(self.kinds):
            for row, number in enumerate(together.message(place, size_bytes, first=first)[:4]):
                numbers[row, kind] = number
        launch_s, latency_s, wire_bytes, limit = numbers[:, self.kind]
        rates = np.minimum(self.narrowest_bytes_per_s[:, None], limit)
        sending_s, delivering_s = launch_s + wire_bytes / rates, self.route_s[..., None] + latency_s
        ends: deque[FloatArray] = deque(maxlen=self.lag)
        sent_s = latest_s = np.zeros(sending_s.shape[1:])
        for step, variant in enumerate(self.variants):
            start_s = np.maximum(sent_s, ends[0][self.before]) if step >= self.lag else sent_s
            sent_s = start_s + sending_s[variant]
            ends.append(sent_s + delivering_s[variant])
            latest_s = np.maximum(latest_s, ends[-1])
        return np.asarray(latest_s.max(axis=0))


class _Network(NamedTuple):
    """What the messages of a schedule meet on a topology.

    Attributes
    ----------
    alike : equal for topologies that differ in numbers: routes, and which of them have one latency.
    latency_s : of the route of each hop, then 0 for what is no message; float array (hops + 1,).
    capacity_bytes_per_s : of each constraint that a message passes.
    """

    topology: Topology
    alike: tuple[bytes, ...]
    latency_s: FloatArray
    capacity_bytes_per_s: FloatArray


def _fixed(machine: Machine) -> tuple[object, ...]:
    """What machines have in common that differ in numbers, whatever the schedule."""
    library, topology = machine.comm_library, machine.topology
    links = topology.world_size, len(topology.links), len(topology.shared)
    return links, machine.contention.slows, machine.overlaps, machine.host, machine.rank_speeds, type(library)


_FIRST = 2**40
"""Kinds of messages and calls have numbers from this one on instead of times: no host takes so many seconds."""


class _Kind(NamedTuple):
    """What a message depends on; see `CommLibrary.message`."""

    place: int
    size_bytes: int
    peers: int
    first: bool

    def message(self, library: CommLibrary) -> Message:
        return library.message(self.place, self.size_bytes, self.peers, first=self.first)


class _CallKind(NamedTuple):
    """What the time of a kernel call depends on: its shape, and whether it is that until it has been handed out."""

    shape: KernelShape
    handed_out: bool

    def time_s(self, machine: Machine) -> float:
        return float(machine.handed_out_s(self.shape) if self.handed_out else machine.compute.time_s(self.shape))


@dataclass(frozen=True)
class _Numbered(CommLibrary):
    """A library whose messages have a number instead of a launch time, one per kind."""

    of: CommLibrary = field(kw_only=True)
    kinds: list[_Kind | _CallKind] = field(kw_only=True)

    def bind(self, call: CallFacts) -> Self:
        return self

    def places(self, source: IntArray, destination: IntArray) -> IntArray:
        return self.of.places(source, destination)

    def message(self, place: int, size_bytes: int, peers: int, *, first: bool) -> Message:
        kind = _Kind(place, size_bytes, peers, first)
        self.kinds.append(kind)
        channels = kind.message(self.of).channels  # with which it slows kernel calls; without any it slows none
        return Message(_FIRST + len(self.kinds) - 1, 0, 1, channels=channels)


class _NumberedApart(_Numbered):
    """A `_Numbered` library whose launches are independent."""

    serial_launch = False


@dataclass(frozen=True, kw_only=True)
class _NumberedCompute(ComputeRate):
    """Kernel calls that have a number instead of a time, unless they take none."""

    of: Machine
    kinds: list[_Kind | _CallKind]
    instant: list[_CallKind]

    def time_s(self, shape: KernelShape) -> int:
        return self._number(_CallKind(shape, handed_out=False))

    def handed_out_s(self, shape: KernelShape) -> int:
        return self._number(_CallKind(shape, handed_out=True))

    def _number(self, kind: _CallKind) -> int:
        if not kind.time_s(self.of):
            self.instant.append(kind)
            return 0
        self.kinds.append(kind)
        return _FIRST + len(self.kinds) - 1
