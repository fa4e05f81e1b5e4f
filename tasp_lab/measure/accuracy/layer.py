"""Tables of whole layers beside their predictions.

A row is predicted as its system runs it on the machine of its header: ``systems.toml`` maps system and variant of a
table to a schedule, options, a stack and a kernel, with a source for each entry; what cannot be simulated has a
reason there. Rows that cannot be predicted, or should not count, are kept with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import msgspec

from sim.bounds.schedules import link_rates
from sim.host import busy_s
from sim.simulate import simulate
from tasp_lab.core.choices import WHAT_IF_DTYPE, Pass
from tasp_lab.core.errors import ScheduleError, TableError, TaspLabError, WorkloadError, first_line
from tasp_lab.machines.compute import with_kernel
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.sampling import NO_SAMPLES, NORMAL_95, Sampling, rate_ends
from tasp_lab.machines.stack import load_stack
from tasp_lab.measure.accuracy.table_accuracy import Costs, MeasuredRow, Regime, TableAccuracy
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.profiles import machine_with
from tasp_lab.measure.readers import LayerRow, LayerTable
from tasp_lab.measure.readers.kernel_table import PASSES, attention_flops
from tasp_lab.prediction.inputs import with_compute, with_host
from tasp_lab.prediction.interval import residual_interval
from tasp_lab.prediction.kept import build_once
from tasp_lab.prediction.paired import layouts_of, setting_of
from tasp_lab.prediction.residuals import layer_regime
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import SOFTMAX, one_name, spec_of
from tasp_lab.workload.kernel_shapes import Passing
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.mask import MASKS

_FIELD = re.compile(r"\{(\w+)(?:/(\w+))?\}")


class LibraryRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a library runs for a row of a table: an entry of ``systems.toml``, whose head says what its texts may have.

    Parameters
    ----------
    systems, variants, sources : regular expressions of the rows that it is for.
    schedule : the name of an attention schedule; empty if none of ours is the same.
    fields : fields of `AttentionOptions` other than those of its stack, in the file ``options``.
    stack : the stack with whose options and host model it runs (`tasp_lab.machines.stack`); none if empty.
    stacks : the same by accelerator, where it is another one.
    kernels : attention kernels by accelerator; ``default`` is that of all others.
    source : the place in the library's code.
    reason : why it cannot be simulated; empty if it can.
    """

    systems: str
    variants: str
    sources: str = ".*"
    schedule: str = ""
    fields: dict[str, bool | int | str] = msgspec.field(default_factory=dict, name="options")
    stack: str = ""
    stacks: dict[str, str] = {}
    kernels: dict[str, str] = {}
    source: str = ""
    reason: str = ""

    def options(self, passes: Pass) -> AttentionOptions:
        """The options for these passes; without those of the backward pass if they have none."""
        of_stack = load_stack(self.stack).options(self.schedule) if self.stack else {}
        return AttentionOptions(passes).with_defaults({**of_stack, **self.fields})

    def kernel(self, accelerator: str | None) -> str | None:
        """The attention kernel on an accelerator, like ``h100``; None if nothing is known."""
        return self.kernels.get(accelerator or "", self.kernels.get("default"))


class _SystemsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rings: dict[str, str]
    directions: dict[str, str]
    entries: tuple[LibraryRun, ...]


@cache
def _systems() -> _SystemsFile:
    return msgspec.toml.decode((files("tasp_lab.measure.accuracy") / "systems.toml").read_bytes(), type=_SystemsFile)


def library_run(system: str, variant: str, *, causal: bool, ranks: int, source: str = "") -> LibraryRun:
    """What the library of a table runs, from the columns ``system`` and ``variant``, under a mask on so many ranks.

    `source` is the header of the table: some have changed the library that they name.

    >>> library_run("TE", "ring p2p (zigzag for causal)", causal=True, ranks=8).schedule
    'zigzag-ring-attention'
    >>> library_run("USP (yunchang)", "ulysses 4 x striped 2; qkv packed", causal=True, ranks=8).schedule
    'usp:4x2:striped-ring-attention'

    Raises `TableError` for a system or a variant that is not listed, and for ranks that its groups do not divide.
    """
    known = _systems()
    for entry in known.entries:
        if not (re.fullmatch(entry.systems, system, re.IGNORECASE) and re.fullmatch(entry.sources, source)):
            continue
        if match := re.fullmatch(entry.variants, variant, re.IGNORECASE):
            break
    else:
        raise TableError(
            f"system {system!r}, variant {variant!r}: not known, "
            "expected one that tasp_lab/measure/accuracy/systems.toml lists"
        )
    fields = {name: known.rings.get((value or "").lower(), value or "") for name, value in match.groupdict().items()}
    fields |= {"ring": known.rings["zigzag" if causal else "ring"], "ranks": str(ranks)}
    fields["direction"] = known.directions.get(fields.get("kind", fields["ring"]), "auto")

    def filled(text: str) -> str:
        return _FIELD.sub(lambda found: _value(fields, found[1], found[2]), text)

    name = filled(entry.schedule)
    if name:
        spec_of(name, SOFTMAX)
    options = {field: filled(value) if isinstance(value, str) else value for field, value in entry.fields.items()}
    return msgspec.structs.replace(entry, schedule=name, fields=options)


def _value(fields: Mapping[str, str], name: str, divisor: str | None) -> str:
    """A field, or its quotient by another one."""
    if not divisor:
        return fields[name]
    whole, part = int(fields[name]), int(fields[divisor])
    if whole % part:
        raise TableError(f"{name} {whole}: expected a multiple of {part}, the {divisor} of its variant")
    return str(whole // part)


WHOLE_MODEL = ("training", "step", "inference", "prefill", "ttft", "decode")
"""Words of passes in which more than one attention call was timed."""


@dataclass(frozen=True)
class RowRun:
    """What a row is predicted as.

    Parameters
    ----------
    machine : with the kernel and the host model of the library.
    schedule : the name of the schedule.
    options : how the library runs it.
    layers : the layer; of packed documents one for each packing, which are averaged.
    stack, kernel : their names, None for none.
    """

    machine: Machine
    schedule: str
    options: AttentionOptions
    layers: tuple[Workload, ...]
    stack: str | None
    kernel: str | None

    def passes(self, layer: Workload) -> tuple[Schedule, ...]:
        """The schedules of the passes of a layer."""
        return build_once(self.schedule, self.machine.topology, layer, None, self.options)

    def key(self, layer: Workload) -> tuple[object, ...]:
        """What the time of a layer depends on."""
        named = (self.machine.topology.name, self.schedule, self.options, layer, self.kernel)
        return (*named, self.machine.host)

    def with_instant_host(self) -> RowRun:
        """The run with a host that issues in no time."""
        return replace(self, machine=replace(self.machine, host=self.machine.host.with_instant_host()))


def row_run(table: LayerTable, row: LayerRow, layers: tuple[Workload, ...]) -> RowRun:
    """What a checked row is predicted as. Raises `TaspLabError` for an unknown machine, system or kernel."""
    assert row.gpus is not None, "a checked row has GPUs"
    source = table.headers.get("source", "")
    run = library_run(row.system, row.variant, causal=layers[0].visible.is_causal, ranks=row.gpus, source=source)
    if run.reason:
        raise ScheduleError(run.reason)
    profile = table.profile or row.gpu.casefold()
    machine = with_compute(machine_with(profile, row.gpus, row.nodes or 1, Path(table.name).parent))
    run = msgspec.structs.replace(run, stack=run.stacks.get(machine.accelerator, run.stack))
    kernel = table.kernel or run.kernel(machine.accelerator)
    machine = with_kernel(machine, kernel) if machine.accelerator else machine
    machine = with_host(machine, load_stack(run.stack).host(run.schedule)) if run.stack else machine
    passes = PASSES[row.passing]
    options = run.options(passes[0] if len(passes) == 1 else "both")
    return RowRun(machine, run.schedule, options, layers, run.stack or None, kernel)


def check_row(table: LayerTable, row: LayerRow) -> tuple[Workload, ...]:
    """The layer of a row; of packed documents one for each packing.

    Raises `WorkloadError` for what is missing or unknown, and for layers that are none.
    """
    if is_whole_model(row):
        raise WorkloadError(f"pass {row.passing!r}: a whole model, not one attention layer")
    if row.passing not in PASSES:
        raise WorkloadError(f"unknown pass {row.passing!r}, expected forward, backward or forward+backward")
    gpus, nodes = _needed(row.gpus, "gpus"), _needed(row.nodes, "nodes")
    sequence, heads, head_dim = (
        _needed(row.sequence, "seq_total"), _needed(row.heads, "heads"), _needed(row.head_dim, "head_dim")
    )  # fmt: skip
    if gpus % nodes:
        raise WorkloadError(f"{gpus} GPUs on {nodes} nodes, expected a multiple of the nodes")
    if table.profile is None and not row.gpu:
        raise WorkloadError("no header 'profile' and no column 'gpu', so the machine is unknown")
    mask = row.mask.removeprefix("varlen").strip()
    if mask not in MASKS:
        raise WorkloadError(f"unknown mask {row.mask!r}, expected {' or '.join(MASKS)}")
    if row.dtype == WHAT_IF_DTYPE:
        raise WorkloadError(f"dtype {row.dtype!r}: no kernel has constants of it")
    layer = Workload(sequence, row.batch or 1, heads, row.kv_heads, head_dim, row.dtype, mask)
    if not row.mask.startswith("varlen"):
        return (layer,)
    if not table.documents:
        raise WorkloadError("packed documents whose lengths no header 'documents' states")
    layers = []
    for lengths in table.documents:  # those of a shorter sequence are shares of this one
        times, rest = divmod(sequence, sum(lengths))
        if rest:
            raise WorkloadError(f"documents of {sum(lengths)} positions together, expected a divisor of {sequence}")
        layers.append(replace(layer, documents=tuple(length * times for length in lengths)))
    return tuple(layers)


def _needed(cell: int | None, column: str) -> int:
    if cell is None:
        raise WorkloadError(f"no {column} in the row")
    return cell


def measured_time_s(table: LayerTable, row: LayerRow, layer: Workload) -> float:
    """The time of a row, from its rate if it has none. Raises `WorkloadError` where that is not known."""
    if row.time_s:
        return row.time_s
    if row.time_s == 0:
        raise WorkloadError("a time of 0")
    if not row.flops_per_s:
        raise WorkloadError("neither a time nor a rate of the attention")
    if table.counted is None and not layer.visible.is_full:
        raise WorkloadError("a rate without its convention: no header 'flops', expected causal halved or causal full")
    if layer.documents is not None:
        raise WorkloadError("a rate of packed documents, expected a time")
    causal = layer.visible.is_causal and table.counted != "full"
    flops = attention_flops(
        PASSES[row.passing], layer.batch, layer.heads, layer.head_dim, layer.sequence, causal=causal
    )
    return flops / (row.flops_per_s * (row.gpus or 1))


def is_whole_model(row: LayerRow) -> bool:
    """Whether more than one attention call was timed."""
    return row.passing not in PASSES and any(word in row.passing.casefold() for word in WHOLE_MODEL)


def shape_of(table: LayerTable, row: LayerRow) -> dict[str, object]:
    """The columns of a row for a report, and room for what it is predicted as."""
    named = {"passing": "pass", "sequence": "seq_total"}
    left_out = ("time_s", "flops_per_s", "gpu")
    shape = {named.get(name, name): value for name, value in asdict(row).items() if name not in left_out}
    return {"profile": table.profile or row.gpu or None, **shape, "schedule": None, "stack": None, "kernel": None}


HOST_SHARE = 0.1
"""A row is host-bound if its host times make its predicted time longer by more than this share."""


class Sums(NamedTuple):
    """Of all passes of a layer: seconds, those of the kernel calls of the busiest rank, the most bytes that a rank
    sends, and steps."""

    time_s: float
    compute_s: float
    bytes_per_rank: float
    steps: float


@dataclass
class LayerEvaluator:
    """Predicts the rows of tables of layers; what several rows have in common is simulated once."""

    sampling: Sampling = NO_SAMPLES
    known: dict[tuple[object, ...], Sums] = field(default_factory=dict)

    def evaluate(self, table: LayerTable) -> TableAccuracy:
        """A table beside its prediction; rows without one keep the reason."""
        if table.reason:
            return TableAccuracy(table, table.reason, ())
        return TableAccuracy.of(table, (self._row(table, row) for row in table.rows))

    def _row(self, table: LayerTable, row: LayerRow) -> MeasuredRow:
        """A row with its prediction, or with as much as is known."""
        shape, stated = shape_of(table, row), table.headers.get("out_of_scope", "")
        regime: Regime | None = "whole-model" if is_whole_model(row) else None
        measured_s = row.time_s or None
        try:
            layers = check_row(table, row)
            measured_s = measured_time_s(table, row, layers[0])
            if stated:
                return MeasuredRow(measured_s, None, stated, regime, shape)
            run = row_run(table, row, layers)
            sums = self.sums(run)
            predicted_s = sums.time_s
            # with any host it takes at least as long as its calls, so that its time alone may show that none matters
            host_matters = predicted_s > (1 + HOST_SHARE) * sums.compute_s
            device_s = self.time_s(run.with_instant_host()) if host_matters else predicted_s
        except TaspLabError as error:
            return MeasuredRow(measured_s, None, stated or first_line(error), regime, shape)
        reason, regime = _regime(table, layers[0], run.machine.topology.world_size, predicted_s / device_s - 1)
        shape |= {"schedule": run.schedule, "stack": run.stack, "kernel": run.kernel}
        work = (run.machine.topology.name, run.options.passes, *layers)
        costs = costs_of(run, sums) if regime == "gpu-bound" else None
        interval = None
        if costs is not None and self.sampling.samples:
            within = layer_regime(run.machine, costs.exposed_share)
            interval = residual_interval(predicted_s, within, left_out_with(table))
        return MeasuredRow(
            measured_s, predicted_s, reason, regime, shape, work, one_name(run.schedule), interval, costs
        )

    def time_s(self, run: RowRun) -> float:
        """The predicted time of all passes, the mean of all packings."""
        return self.sums(run).time_s

    def sums(self, run: RowRun) -> Sums:
        """The means of all packings."""
        return Sums(*map(mean, zip(*(self._sums(run, layer) for layer in run.layers), strict=True)))

    def _sums(self, run: RowRun, layer: Workload) -> Sums:
        key, machine = run.key(layer), run.machine
        if key not in self.known:
            schedules = run.passes(layer)
            self.known[key] = Sums(
                sum(float(simulate(each, machine, "array", events=False).time_s) for each in schedules),
                sum(float(max(busy_s(each, machine.compute, machine.rank_speeds))) for each in schedules),
                sum(float(each.bytes_by_rank().max()) for each in schedules),
                float(sum(len(each.steps) for each in schedules)),
            )
        return self.known[key]


def costs_of(run: RowRun, sums: Sums) -> Costs:
    """What decisions need of a row."""
    exposed = max(0.0, 1 - sums.compute_s / sums.time_s)
    slowest = float(min(link_rates(run.machine.topology), default=math.inf))
    passing: Passing = "forward" if run.options.passes == "forward" else "backward"  # of both, the longer one
    layer = run.layers[0]
    rate = run.machine.rate_of(layer, passing)
    low, high = rate_ends(run.machine, rate, layer.dtype, passing)
    of_rate = 0.0 if rate.assumed else ((1 - exposed) * (high - low) / 2 / NORMAL_95) ** 2
    layouts = layouts_of(one_name(run.schedule), run.kernel or "", run.options.passes, run.stack or "")
    setting = setting_of(run.machine)
    return Costs(exposed, sums.bytes_per_rank, sums.steps, slowest, setting, of_rate, tuple(layouts))


def _regime(table: LayerTable, layer: Workload, ranks: int, host_share: float) -> tuple[str, Regime]:
    """Why a predicted row does not count, empty if it does, and its regime.

    `host_share` is how much longer its predicted time is with its host times, if that matters.
    """
    if layer.sequence < table.from_sequence:
        return f"shorter than {table.from_sequence} positions, from which on the table counts", "gpu-bound"
    if layer.batch * layer.sequence * layer.heads // ranks < table.host_bound_below:
        return f"host-bound: fewer than {table.host_bound_below} positions x heads per GPU, by its header", "host-bound"
    if layer.heads == 1 and layer.sequence <= table.fits_host_up_to:
        return "gave the host times of its library", "host-bound"
    if host_share > HOST_SHARE:
        return f"host-bound: predicted {host_share:.0%} longer than with a host that takes no time", "host-bound"
    return "", "gpu-bound"
