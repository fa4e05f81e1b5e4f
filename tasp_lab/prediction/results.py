"""Predictions as numbers, rows of a table and objects of `--json`. Needs no simulator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, overload

from tasp_lab.core.choices import Dataflow, Pass
from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Part, Table, brief
from tasp_lab.core.units import Number, format_bandwidth, format_flops, format_size_about, format_time
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.captions import software
from tasp_lab.prediction.explanation import explanation_parts
from tasp_lab.prediction.interval import IDEAL_LINKS, Interval
from tasp_lab.prediction.provenance import Provenance, UsedConstant, compute_constants
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.collectives.kinds import CollectiveKind, busbw_bytes_per_s, describe
from tasp_lab.timeline.critical_path import time_by_kind
from tasp_lab.timeline.events import CONTENTION, SEND, Event, Timeline
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

PASS_NAMES: dict[Pass, str] = {"forward": "forward", "backward": "backward", "both": "forward and backward"}


@dataclass(frozen=True, repr=False)
class Prediction(ABC):
    """The prediction of a schedule on a machine; times in seconds.

    `interval` holds the time of a real machine in 90 of 100 cases; None where it was not asked for, and on fabrics.
    """

    schedule: str
    topology: str
    world_size: int
    time_s: Number
    bound_s: Number
    timeline: Timeline
    interval: Interval | None = field(default=None, kw_only=True, compare=False)

    computes: ClassVar[bool]
    """Whether ranks compute, so that a rate and kernels matter."""

    def __repr__(self) -> str:
        return brief(self, f"{self.schedule} on {self.topology}", format_time(self.time_s))

    @property
    def time_low_s(self) -> float | None:
        """The 5 % point of the time on a real machine; None without an interval."""
        return None if self.interval is None else self.interval.low_s

    @property
    def time_high_s(self) -> float | None:
        """The 95 % point."""
        return None if self.interval is None else self.interval.high_s

    def interval_fields(self) -> dict[str, object]:
        """The fields of `--json` about the interval."""
        made_of = None if self.interval is None else self.interval.to_dict()
        return {"time_low_s": self.time_low_s, "time_high_s": self.time_high_s, "interval": made_of}

    def interval_cell(self) -> dict[str, str]:
        """The column of the interval, where there is one."""
        text = "" if self.interval is None else self.interval.text
        return {"5 to 95 %": text} if text else {}

    @property
    def compared_by(self) -> str:
        """A key: speed-ups are over the first prediction with the same key."""
        return ""

    @property
    def is_all(self) -> bool:
        """Whether it covers all requested passes, not one of two."""
        return True

    @property
    def is_sum(self) -> bool:
        """Whether it is the sum of two passes, one after the other."""
        return False

    @property
    def ranks(self) -> str:
        """The number of ranks and their compute rate."""
        return f"{self.world_size} ranks"

    def constants(self) -> tuple[UsedConstant, ...]:
        """The compute rates of its passes; none where ranks do not compute."""
        return ()

    def kernels(self, real: bool) -> tuple[str, ...]:
        """A description of the kernel calls of a run; empty where ranks do not compute."""
        return ()

    @abstractmethod
    def title(self, where: str) -> str:
        """The work and the place, on one line."""

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """The fields of `--json`."""

    @abstractmethod
    def row(self, first: Prediction) -> dict[str, str]:
        """Texts by column; the speed-up is over `first`."""

    @abstractmethod
    def measured_cells(self, measured_s: float) -> dict[str, str]:
        """The columns of this kind of work beside a measured time in seconds."""

    def head(self) -> dict[str, str]:
        """The columns that identify the prediction."""
        return {"schedule": self.schedule}

    def assumptions(self) -> list[str]:
        """A line for each assumed constant that affects the prediction."""
        return []

    def compute(self) -> dict[str, object] | None:
        """The compute rate of each pass and its source; None where ranks do not compute."""
        return None

    def explained(self) -> list[Timeline]:
        """The timelines to explain; none for a sum of two passes, each of which is explained on its own."""
        return [] if self.is_sum else [self.timeline]

    def explanation(self, topology: Topology) -> dict[str, object]:
        """The fields of `--json --explain`: the parts of the critical path, and every transfer."""
        if self.is_sum:
            return {}
        spent = time_by_kind(self.timeline, topology)
        return {
            "explanation": [{"kind": kind, "seconds": seconds} for kind, seconds in spent],
            "transfers": _transfers(self.timeline),
        }


@dataclass(frozen=True, repr=False)
class CollectivePrediction(Prediction):
    """A collective of which each rank owns `shard_bytes`."""

    collective: CollectiveKind
    shard_bytes: int

    computes: ClassVar[bool] = False

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bus bandwidth as nccl-tests defines it."""
        return busbw_bytes_per_s(self.world_size, self.shard_bytes, self.time_s, self.collective)

    def title(self, where: str) -> str:
        return f"{describe(self.collective, self.world_size, self.shard_bytes)} on {where}"

    def to_dict(self) -> dict[str, object]:
        return {
            "schedule": self.schedule,
            "collective": self.collective,
            "topology": self.topology,
            "world_size": self.world_size,
            "shard_bytes": self.shard_bytes,
            "time_s": float(self.time_s),
            **self.interval_fields(),
            "bound_s": float(self.bound_s),
            "busbw_bytes_per_s": self.busbw_bytes_per_s,
        }

    def row(self, first: Prediction) -> dict[str, str]:
        return self.head() | {
            "time": format_time(self.time_s),
            **self.interval_cell(),
            "speed-up": f"{ratio(first.time_s, self.time_s):.2f}x",
            "busbw": format_bandwidth(self.busbw_bytes_per_s),
            "bound": format_time(self.bound_s),
            "share of bound": f"{ratio(self.bound_s, self.time_s):.1%}",
        }

    def measured_cells(self, measured_s: float) -> dict[str, str]:
        return {"share of bound": f"{ratio(self.bound_s, measured_s):.1%}"}


@dataclass(frozen=True, repr=False)
class LayerPrediction(Prediction):
    """A pass of an attention layer, or both, one after the other (see `together`).

    `options` are the requested ones, `passing` is the pass of this prediction, and `dataflow` that of its backward
    pass, if one side circulates. `gradient_dtype` is that of gradients on the wire, None in a forward pass. `compute_s`
    is the compute time of the busiest rank, `communication_s` the time of the same schedule with instant compute.
    `bytes_sent` and `flops` are of all ranks; `memory_bytes` is the largest memory of a rank for blocks of others and
    sums that are sent. `rates` has the compute rate of each pass, `compute_flops_per_s` that of this row; None when
    computing takes no time; with a kernel the rates are the highest ones, and that of the row is what its busiest rank
    reaches. `relayout_bytes` are those of `bytes_sent` that re-layouts of a hybrid send; None of a layer.
    `contention_s` is by how much `time_s` would be less without contention; None if messages slow nothing.
    """

    layer: Workload
    options: AttentionOptions
    passing: Pass
    dataflow: Dataflow | None
    gradient_dtype: str | None
    rates: Mapping[str, ComputeRate]
    compute_flops_per_s: Number | None
    compute_s: Number
    communication_s: Number
    bytes_sent: int
    memory_bytes: int
    flops: int
    relayout_bytes: int | None = None
    contention_s: Number | None = None

    computes: ClassVar[bool] = True

    def __repr__(self) -> str:
        return brief(self, f"{self.schedule} {self.passing} on {self.topology}", format_time(self.time_s))

    @property
    def compared_by(self) -> str:
        return self.passing

    @property
    def is_all(self) -> bool:
        return self.passing == self.options.passes

    @property
    def is_sum(self) -> bool:
        return self.passing == "both"

    @property
    def ccr(self) -> float | None:
        """Compute time over communication time; None when there is no communication."""
        return float(self.compute_s / self.communication_s) if self.communication_s else None

    @property
    def rate(self) -> str:
        """The compute rate of a rank as text; one per pass where they differ."""
        rates = {passing: _format_flops(rate) for passing, rate in self.rates.items()}
        if len(set(rates.values())) == 1:
            return next(iter(rates.values()))
        return " and ".join(f"{rate} {passing}" for passing, rate in rates.items())

    @property
    def ranks(self) -> str:
        return f"{self.world_size} ranks {self._computing}"

    @property
    def _computing(self) -> str:
        """The kernel, and the rate that no call of it exceeds; or the rate of all calls."""
        kernels = " and ".join(dict.fromkeys(rate.kernel for rate in self.rates.values() if rate.kernel))
        return f"with {kernels}, up to {self.rate}" if kernels else f"at {self.rate}"

    def constants(self) -> tuple[UsedConstant, ...]:
        return compute_constants(self.layer.dtype, self.rates)

    def kernels(self, real: bool) -> tuple[str, ...]:
        return ("real kernels" if real else f"timed {self._computing}",)

    def assumptions(self) -> list[str]:
        """A line for each assumed compute rate: the rate, its dtype, its passes and its source."""
        assumed = {passing: rate for passing, rate in self.rates.items() if rate.assumed}
        return [
            f"compute: {_format_flops(rate)} in {self.layer.dtype}, "
            f"{' and '.join(passing for passing in assumed if assumed[passing] == rate)}, {rate.source}; "
            f"set --{'kernel or --' if rate.kernel else ''}compute timed:RATE"
            for rate in dict.fromkeys(assumed.values())
        ]

    def compute(self) -> dict[str, object]:
        return {"dtype": self.layer.dtype} | {
            passing: {
                "flops_per_s": None if rate.flops_per_s is None else float(rate.flops_per_s),
                "source": rate.source,
                "assumed": rate.assumed,
                **({"kernel": rate.kernel} if rate.kernel else {}),
            }
            for passing, rate in self.rates.items()
        }

    def title(self, where: str) -> str:
        layer = self.layer
        linear = "" if layer.linear_kv_heads is None else f", {layer.linear_kv_heads} in linear layers"
        kv_heads = "" if layer.kv_head_count == layer.heads and not linear else f" ({layer.kv_head_count} KV{linear})"
        heads = f"{layer.heads} heads{kv_heads}"
        batch = "" if layer.batch == 1 else f"{layer.batch} x "
        window = "" if layer.window is None else f" in a window of {layer.window}"
        documents = "" if layer.documents is None else f" in {len(layer.documents)} documents"
        cached = f", {layer.cached_keys} of them cached" if layer.cached_keys else ""
        positions = f"{batch}{layer.sequence} positions{documents}{cached}"
        return (
            f"{layer.mask.capitalize()} {_attention_text(layer)}{window}, {PASS_NAMES[self.options.passes]}, "
            f"{positions}, {heads} of {layer.head_dim}, {layer.dtype}, on {where}"
        )

    def to_dict(self) -> dict[str, object]:
        layer, rate = self.layer, self.compute_flops_per_s
        return {
            "schedule": self.schedule,
            "topology": self.topology,
            "world_size": self.world_size,
            "seq": layer.sequence,
            "batch": layer.batch,
            "heads": layer.heads,
            "kv_heads": layer.kv_head_count,
            "head_dim": layer.head_dim,
            "dtype": layer.dtype,
            "computes": layer.kind,
            "decay": layer.decay,
            **(
                {"layers": layer.layers, "linear_kv_heads": layer.of("L").kv_head_count}
                if layer.kind == "hybrid"
                else {}
            ),
            "mask": layer.mask,
            "window": layer.window,
            "documents": None if layer.documents is None else list(layer.documents),
            **({"cached_keys": layer.cached_keys} if layer.cached_keys else {}),
            "pass": self.passing,
            "dataflow": self.dataflow,
            "gradient_dtype": self.gradient_dtype,
            "trim": self.options.trim,
            "buffers": self.options.buffers,
            "compute_flops_per_s": None if rate is None else float(rate),
            "time_s": float(self.time_s),
            **self.interval_fields(),
            "bound_s": float(self.bound_s),
            "compute_s": float(self.compute_s),
            "communication_s": float(self.communication_s),
            "contention_s": None if self.contention_s is None else float(self.contention_s),
            "ccr": self.ccr,
            "bytes_sent": self.bytes_sent,
            **({} if self.relayout_bytes is None else {"relayout_bytes": self.relayout_bytes}),
            "memory_bytes": self.memory_bytes,
            "flops": self.flops,
        }

    def head(self) -> dict[str, str]:
        """The schedule, and unless only a forward pass is requested, the pass with its dataflow."""
        if self.options.passes == "forward":
            return super().head()
        dataflow = f", {self.dataflow}" if self.passing == "backward" and self.dataflow else ""
        return super().head() | {"pass": self.passing + dataflow}

    def row(self, first: Prediction) -> dict[str, str]:
        return self.head() | {
            "time": format_time(self.time_s),
            **self.interval_cell(),
            "speed-up": f"{ratio(first.time_s, self.time_s):.2f}x",
            "CCR": self._ccr_text(),
            "compute": format_time(self.compute_s),
            "communication": format_time(self.communication_s),
            **({} if self.contention_s is None else {"contention": self._contention_text()}),
            "bytes sent": format_size_about(self.bytes_sent),
            **({} if self.relayout_bytes is None else {"re-layout": format_size_about(self.relayout_bytes)}),
            "bound": format_time(self.bound_s),
            "share of bound": f"{ratio(self.bound_s, self.time_s):.1%}",
        }

    def measured_cells(self, measured_s: float) -> dict[str, str]:
        return {"CCR": self._ccr_text()}

    def _contention_text(self) -> str:
        assert self.contention_s is not None, "only with contention"
        return f"{ratio(self.contention_s, self.time_s):.1%}" if self.time_s else "-"

    def _ccr_text(self) -> str:
        return "-" if self.ccr is None else f"{self.ccr:.3g}"

    def explanation(self, topology: Topology) -> dict[str, object]:
        found = super().explanation(topology)
        return found | {"calls": _calls(self.timeline)} if found else found


def _attention_text(layer: Workload) -> str:
    """The kind of attention of a layer, or of the layers of a hybrid."""
    decay = f" (decay: {layer.decay})"
    if layer.kind == "hybrid":
        return f"hybrid {layer.layers}{decay if 'L' in layer.layers else ''}"
    return "attention" if layer.kind == "softmax" else f"linear attention{decay}"


def _transfers(timeline: Timeline) -> list[dict[str, object]]:
    return [
        {
            "step": e.step,
            "rank": e.rank,
            "peer": e.peer,
            "lane": e.lane,
            "block": e.block,
            "blocks": list(e.blocks),
            "bytes": e.bytes,
            "start_s": float(e.start_s),
            "end_s": float(e.end_s),
            "bound_by": e.bound_by,
            "waited_for": e.waited_for,
            "spent": [{"what": what, "seconds": float(seconds)} for what, seconds in e.spent],
        }
        for e in timeline.events
        if e.kind == SEND
    ]


def _calls(timeline: Timeline) -> list[dict[str, object]]:
    return [
        {
            "step": e.step,
            "rank": e.rank,
            "start_s": float(e.start_s),
            "end_s": float(e.end_s),
            "contention_s": float(dict(e.spent).get(CONTENTION, 0)),
            "flops": e.flops,
            "waited_for": e.waited_for,
        }
        for e in timeline.events
        if e.kind != SEND
    ]


def _format_flops(rate: ComputeRate) -> str:
    return "no time" if rate.flops_per_s is None else format_flops(rate.flops_per_s)


def whole(predictions: Iterable[Prediction]) -> Prediction | None:
    """The first prediction that covers all requested passes; None if there is none."""
    return next((each for each in predictions if each.is_all), None)


def compute_of_passes(predictions: Iterable[Prediction]) -> dict[str, object] | None:
    """The compute rates of predictions of one work, see `Prediction.compute`."""
    first = whole(predictions)
    return None if first is None else first.compute()


def pass_of(schedule: Schedule) -> Pass:
    """The pass of a layer that a schedule computes."""
    return "forward" if schedule.task is None else schedule.task.passing


def label(schedule: Schedule, options: AttentionOptions) -> str:
    """The name of a schedule, with its pass unless only a forward pass is requested."""
    return schedule.name if options.passes == "forward" else f"{schedule.name} {PASS_NAMES[pass_of(schedule)]}"


def together(forward: Prediction, backward: Prediction) -> LayerPrediction:
    """Both passes of a schedule, one after the other: later layers run between them.

    All numbers are sums, but for the memory, which is the larger one, and the rate, which gives the sum of the times.
    """
    assert isinstance(forward, LayerPrediction), "only layers have passes"
    assert isinstance(backward, LayerPrediction), "only layers have passes"
    lost_s = backward.contention_s
    return replace(
        backward,
        passing="both",
        time_s=forward.time_s + backward.time_s,
        bound_s=forward.bound_s + backward.bound_s,
        timeline=one_after_the_other(forward.timeline, backward.timeline, f"{forward.schedule} {PASS_NAMES['both']}"),
        rates={**forward.rates, **backward.rates},
        compute_flops_per_s=_common_rate_flops_per_s(forward, backward),
        compute_s=forward.compute_s + backward.compute_s,
        communication_s=forward.communication_s + backward.communication_s,
        bytes_sent=forward.bytes_sent + backward.bytes_sent,
        memory_bytes=max(forward.memory_bytes, backward.memory_bytes),
        flops=forward.flops + backward.flops,
        relayout_bytes=_sum(forward.relayout_bytes, backward.relayout_bytes),
        contention_s=None if lost_s is None else lost_s + (forward.contention_s or 0),
        interval=_sum_of(forward.interval, backward.interval),
    )


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


def _sum_of(first: Interval | None, second: Interval | None) -> Interval | None:
    return None if first is None or second is None else first + second


def _common_rate_flops_per_s(forward: LayerPrediction, backward: LayerPrediction) -> Number | None:
    rates = forward.compute_flops_per_s, backward.compute_flops_per_s
    if rates[0] == rates[1] or rates[0] is None or rates[1] is None:
        return rates[0]
    return (forward.flops + backward.flops) / (forward.flops / rates[0] + backward.flops / rates[1])


def one_after_the_other(first: Timeline, second: Timeline, schedule: str) -> Timeline:
    """Two timelines as one, with the given name of a schedule. The steps of the second follow those of the first.

    >>> from tasp_lab.timeline.events import SEND
    >>> one = Timeline("predicted", "a", "pair", 2, (Event(0, 0, 0, SEND, 1, 0, 8, 1.0, 3.0, "0->1", ""),))
    >>> [(event.step, event.start_s, event.end_s) for event in one_after_the_other(one, one, "twice").events]
    [(0, 1.0, 3.0), (1, 4.0, 6.0)]
    """
    steps = 1 + max((event.step for event in first.events), default=-1)
    time_s = first.time_s  # a maximum over all events
    later = tuple(_later(event, time_s, steps) for event in second.events)
    return replace(first, schedule=schedule, events=first.events + later)


def _later(event: Event, time_s: Number, steps: int) -> Event:
    return event._replace(step=event.step + steps, start_s=event.start_s + time_s, end_s=event.end_s + time_s)


def ratio(a: Number, b: Number) -> float:
    """a / b for times; 1 when b is 0."""
    return float(a) / float(b) if float(b) else 1.0


@dataclass(frozen=True)
class Refused:
    """A schedule that does not apply to the work or the topology, and why, on one line."""

    schedule: str
    reason: str


def refused_table(rows: Iterable[tuple[str, str]]) -> Table:
    """The table of the schedules that do not apply, each with the reason."""
    return Table("do not apply", ("schedule", "reason"), list(rows), (0, 1))


@dataclass(frozen=True, repr=False)
class Predictions(Report, Sequence[Prediction]):
    """The predictions of one work on one machine, a sequence of `Prediction`.

    Parameters
    ----------
    items : in the order of the schedules, without those that do not apply.
    machine : as it was simulated: with changed links and compute rates.
    provenance : version, inputs and their hash, constants, engine, search and date.
    explain : whether `to_dict` and the tables include what the time was spent on.
    refused : the schedules that do not apply.
    """

    items: tuple[Prediction, ...]
    machine: Machine
    provenance: Provenance
    explain: bool = False
    refused: tuple[Refused, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prediction, ...]: ...
    def __getitem__(self, index: int | slice) -> Prediction | tuple[Prediction, ...]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def library(self) -> str:
        """The name of the communication library."""
        return self.machine.comm_library.name

    def to_dict(self) -> dict[str, object]:
        return {
            "library": self.library,
            "runtime": self.machine.runtime.name,
            "changes": list(self.machine.changes),
            "compute": compute_of_passes(self),
            "predictions": [
                *(each | {"status": "ok", "reason": None} for each in map(self._fields, self.items)),
                *map(self._refused_fields, self.refused),
            ],
            "provenance": self.provenance.to_dict(),
        }

    def _fields(self, each: Prediction) -> dict[str, object]:
        return each.to_dict() | (each.explanation(self.machine.topology) if self.explain else {})

    def _refused_fields(self, each: Refused) -> dict[str, object]:
        where = {"topology": self.machine.topology.name, "world_size": self.machine.topology.world_size}
        return {"schedule": each.schedule, **where, "time_s": None, "status": "does not apply", "reason": each.reason}

    def records(self) -> list[dict[str, object]]:
        """A row per schedule and pass; of a schedule that does not apply one row without numbers."""
        rows = [each.to_dict() | {"status": "ok", "reason": None} for each in self.items]
        rows += map(self._refused_fields, self.refused)
        return [flat(row) | {"library": self.library} for row in rows]

    def parts(self) -> list[Part]:
        if not self.items:
            return []
        p = whole(self) or self.items[0]
        first = {p.compared_by: p for p in reversed(self.items)}
        rows = [p.row(first[p.compared_by]) for p in self.items]
        title = p.title(f"{p.topology}, {p.ranks}{software(self.machine)}")
        parts: list[Part] = [rows_table(title, rows), *self.machine.changes, *p.assumptions()]
        parts += [interval_line(p.interval)] if p.interval is not None else []
        if self.explain:
            for timeline in (timeline for each in self.items for timeline in each.explained()):
                parts += explanation_parts(timeline, self.machine.topology)
        if self.refused:
            parts.append(refused_table((each.schedule, each.reason) for each in self.refused))
        return parts


def rows_table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """A table of rows that all have the same columns."""
    columns = [column for column in rows[0] if all(column in row for row in rows)]
    texts = [position for position, column in enumerate(columns) if column in ("schedule", "pass", "options")]
    return Table(title, columns, [[row[column] for column in columns] for row in rows], texts)


def interval_line(interval: Interval) -> str:
    """What an interval is made of, on one line."""
    found, count = interval.residual, len(interval.samples_s)
    if found.is_exact:
        return f"5 to 95 %: {count} samples of kernel rates; {IDEAL_LINKS}" if count else IDEAL_LINKS
    constants = f"{count} samples of constants" if count else "no samples of constants"
    measured = f"{found.rows} rows, {found.machines} machine{'s' * (found.machines > 1)}"
    borrowed = f"; borrowed: {found.borrowed}" if found.borrowed else ""
    return f"5 to 95 %: {constants}, beside errors of {found.regime} ({measured}){borrowed}"


def layer_constants(predictions: Iterable[Prediction]) -> tuple[UsedConstant, ...]:
    """The compute rates of predictions of one work."""
    first = whole(predictions)
    return () if first is None else first.constants()
