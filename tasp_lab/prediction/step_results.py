"""The prediction of a whole step as numbers, a table and an object of ``--json``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from tasp_lab.core.report import Report, flat
from tasp_lab.core.tables import Part, Table
from tasp_lab.core.units import format_count, format_flops, format_four_digits, format_size_about, format_time
from tasp_lab.machines.machine import Machine
from tasp_lab.machines.stack import load_stack
from tasp_lab.prediction.captions import interval_line, software, software_line
from tasp_lab.prediction.columns import Column
from tasp_lab.prediction.interval import Interval, residual_interval
from tasp_lab.prediction.provenance import Provenance
from tasp_lab.prediction.recommend import Recommendation
from tasp_lab.prediction.residuals import STEPS
from tasp_lab.prediction.training_step.layout import Layout, StepPlan, describe
from tasp_lab.prediction.training_step.memory import MemoryUse, least_memory
from tasp_lab.prediction.training_step.rates import RESERVED_BYTES, StepRates
from tasp_lab.workload.models.parameters import parameter_count

LESS_CHECKED = (
    "Whole steps are less checked than layers: hosts take no time beside attention, and few published steps were "
    "compared (docs/whole_steps.md)."
)
"""Shown with every step."""

LOGIT_CHUNKS = 8
"""Parts of the logits where computing them in parts may make a step fit."""

SEQUENCE_UNIT, MOST_UNITS = 1024, 2**20
"""The longest sequence that fits is a multiple of so many positions, and at most so many times as long."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step; the parts add up to the whole.

    Parameters
    ----------
    forward_s, backward_s : the phases of all micro-batches, of the busiest stage of a pipeline.
    pipeline_s : how long that stage waits for others, and for what they send; 0 without pipeline.
    embedding_s : embedding and output gathered before the layers, and their gradients reduced behind them; and so all
        parameters that do not move beside layers.
    optimizer_s : the update of the states.
    compute_s : kernel calls of the busiest rank in both phases; the rest of the phases waits for messages, or is slowed
        by them.
    """

    forward_s: float
    backward_s: float
    pipeline_s: float
    embedding_s: float
    optimizer_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        """The time of the step."""
        return self.forward_s + self.backward_s + self.pipeline_s + self.embedding_s + self.optimizer_s

    @property
    def exposed_s(self) -> float:
        """What messages add to the compute of the phases, and the messages around them."""
        return max(0.0, self.forward_s + self.backward_s - self.compute_s) + self.embedding_s


class RankedStep(NamedTuple):
    """The step of one of several schedules."""

    schedule: str
    time_s: float
    memory_bytes: int
    fits: bool | None


@dataclass(frozen=True, repr=False)
class StepPrediction(Report):
    """A whole step on a machine.

    Parameters
    ----------
    plan, machine : what was predicted, and where.
    rates : of what is no attention.
    times : the parts of the time.
    model_flops : FLOPs of a step by the convention of MFU: 6 per parameter of a matrix and token, 3 times those of
        attention forward, masked pairs not counted; without training 2 and 1. What is computed again does not count.
    memory : of the GPU that needs most.
    attention_buffers : bytes of the buffers of attention, of the rank and the pass that need most.
    simulated_layers : how many layers were simulated of each run of equal ones; others take as long as the last ones.
    provenance : version, inputs, constants with their sources.
    recommendation : that of the schedule, for one layer; None if the schedule was given.
    ranked : the steps of several schedules, first the fastest that fits; empty if the schedule was given.
    """

    plan: StepPlan
    machine: Machine
    rates: StepRates
    times: StepTimes
    model_flops: int
    memory: MemoryUse
    attention_buffers: int
    simulated_layers: tuple[tuple[int, int], ...]
    provenance: Provenance
    recommendation: Recommendation | None = None
    ranked: tuple[RankedStep, ...] = ()

    @property
    def time_s(self) -> float:
        """The time of the step."""
        return self.times.total_s

    @property
    def interval(self) -> Interval:
        """What measured times of published steps say of the time."""
        return residual_interval(self.time_s, STEPS, "")

    @property
    def ranks(self) -> int:
        """The number of GPUs."""
        return self.machine.topology.world_size

    @property
    def layout(self) -> Layout:
        """How ranks share the step."""
        return self.plan.layout

    @property
    def tokens(self) -> int:
        """Positions of a step, over all replicas and micro-batches."""
        return self.plan.sequence * self.plan.batch * (self.layout.dp or 1) * self.layout.microbatches

    @property
    def tokens_per_s(self) -> float:
        """Positions per second, over all GPUs."""
        return self.tokens / self.time_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Positions per second of one GPU."""
        return self.tokens_per_s / self.ranks

    @property
    def flops_per_s(self) -> float:
        """Model FLOPs per second and GPU."""
        return self.model_flops / self.time_s / self.ranks

    @property
    def mfu(self) -> float | None:
        """Model FLOPs per second over the dense peak of the matrices' dtype; None where the peak is unknown."""
        peak = self.rates.peak_flops_per_s
        return None if peak is None else self.flops_per_s / peak

    @property
    def fits(self) -> bool | None:
        """Whether the GPU that needs most memory has it; None where it is unknown."""
        return self.rates.holds(self.memory.total)

    @property
    def would_fit(self) -> dict[str, int]:
        """If the step does not fit, the fewest options of ``step`` with which it does, by their memory in bytes.

        Empty if it fits, and if all options together do not suffice.
        """
        changes: dict[str, dict[str, Any]] = {
            "--checkpointing full": {"checkpointing": "full"},
            "--checkpointing offload": {"checkpointing": "offload"},
            "--fsdp": {"zero": 3},
            f"--logit-chunks {LOGIT_CHUNKS}": {"logit_chunks": LOGIT_CHUNKS},
            "--offload": {"offload": True},
        }
        if self.fits is not False:
            return {}
        for count in range(1, len(changes) + 1):
            found = dict[str, int]()
            for names in combinations(changes, count):
                options = {key: value for name in names for key, value in changes[name].items()}
                other = replace(self.layout, **options)
                memory = least_memory(replace(self.plan, layout=other), self.attention_buffers)
                if self.rates.holds(memory.total):
                    found[" ".join(names)] = memory.total
            if found:
                return found
        return {}

    @cached_property
    def longest_sequence(self) -> int | None:
        """The most positions of a sequence, in multiples of `SEQUENCE_UNIT`, with which this layout fits; 0 if none do,
        None where the memory of a GPU is unknown. Buffers of attention are taken as proportional to the sequence.
        """
        if self.rates.capacity_bytes is None:
            return None

        def is_too_long(units: int) -> bool:
            longer = replace(self.plan, sequence=units * SEQUENCE_UNIT)
            buffers = self.attention_buffers * longer.sequence // self.plan.sequence
            return not self.rates.holds(least_memory(longer, buffers).total)

        return SEQUENCE_UNIT * bisect_left(range(1, MOST_UNITS), True, key=is_too_long)

    def to_dict(self) -> dict[str, object]:
        found = {column.name: column.of(self) for column in STEP_COLUMNS}
        return found if self.recommendation is None else found | self.recommendation.record

    def records(self) -> list[dict[str, object]]:
        """One row."""
        return [flat(self.to_dict()) | {f"memory_{name}": size for name, size in self.memory._asdict().items()}]

    def parts(self) -> list[Part]:
        software = software_line(self.machine, self.plan.layer, self.plan.trained)
        steps = [
            (each.schedule, format_time(each.time_s),
             format_size_about(each.memory_bytes) + (", does not fit" if each.fits is False else ""))
            for each in self.ranked
        ]  # fmt: skip
        return [
            *self._answer(),
            *([software] if software else []),
            self._title(),
            *([Table("Whole steps", ("attention", "step", "memory"), steps)] if steps else []),
            Table("Time", ("part", "time", "share"), self._time_rows()),
            Table("Per GPU", ("quantity", "value"), self._gpu_rows()),
            self.memory_table(),
            *self._of_a_layer(),
            *self._lines(),
        ]

    @property
    def memory_text(self) -> str:
        """The memory of the fullest GPU, of what it has."""
        usable = self.rates.usable_bytes
        room = "" if usable is None else f" of {format_size_about(usable)}"
        return f"{format_size_about(self.memory.total)}{room} per GPU"

    def _answer(self) -> list[str]:
        """What to use, how long that takes, and whether it fits; else what would."""
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        takes = (
            f"{format_time(self.time_s)} per step, in runs {self.interval.text}, "
            f"{format_four_digits(self.tokens_per_s_per_gpu)} tokens/s per GPU{mfu}"
        )
        if self.fits is False:
            options = [f"{name} ({format_size_about(size)})" for name, size in self.would_fit.items()]
            fitting = f"It fits with {', or '.join(options)}." if options else "No option of step makes it fit."
            return [f"Does not fit: {self.memory_text}. {fitting}", f"With more memory it would take {takes}."]
        use = f"Use {self.plan.schedule}: " if self.ranked else ""
        return [f"{use}{takes}, {self.memory_text}."]

    def _of_a_layer(self) -> list[str]:
        """What `compare` recommends for a layer alone."""
        if self.recommendation is None:
            return []
        first, *others = self.recommendation.lines()
        return [f"For the attention of one layer alone: {first[0].lower()}{first[1:]}", *others]

    def _title(self) -> str:
        plan, model = self.plan, self.plan.model.name
        what = "Training step" if plan.trains else "Forward step"
        eager = "" if plan.software.fused else ", eager"
        matrices = f", matrices in {plan.matrix_dtype}" if plan.matrix_dtype != "bf16" else ""
        where = f"{self.machine.topology.name}{software(self.machine)}"
        return f"{what} of {model}, {plan.sequence} positions, {describe(plan)}{eager}{matrices}, on {where}"

    def _time_rows(self) -> list[tuple[str, str, str]]:
        shown = {
            "forward": self.times.forward_s,
            "backward": self.times.backward_s,
            "pipeline, waiting": self.times.pipeline_s,
            "parameters and gradients, messages": self.times.embedding_s,
            "optimiser": self.times.optimizer_s,
            "whole step": self.time_s,
        }
        rows = [(name, format_time(each), f"{each / self.time_s:.1%}") for name, each in shown.items() if each]
        return [*rows, ("interval", self.interval.text, "")]

    def _gpu_rows(self) -> list[tuple[str, str]]:
        rows = [
            ("tokens per second", format_four_digits(self.tokens_per_s_per_gpu)),
            ("model FLOP/s", format_flops(self.flops_per_s)),
        ]
        if self.mfu is not None:
            rows.append(("MFU", f"{self.mfu:.1%} of {format_flops(self.rates.peak_flops_per_s or 0)}"))
        exposed = f"{format_time(self.times.exposed_s)}, {self.times.exposed_s / self.time_s:.1%}"
        return [*rows, ("exposed messages", exposed)]

    def memory_table(self) -> Table:
        """The memory of the fullest GPU, item by item."""
        rows = [
            (name.replace("_", " "), format_size_about(size)) for name, size in self.memory._asdict().items() if size
        ]
        rows.append(("all", format_size_about(self.memory.total)))
        if self.rates.capacity_bytes is not None:
            fits = "fits" if self.fits else "does not fit"
            rows.append(("context and communication library", format_size_about(RESERVED_BYTES)))
            rows.append(("the GPU has", f"{format_size_about(self.rates.capacity_bytes)}: {fits}"))
            longest = f"{format_count(self.longest_sequence)} positions" if self.longest_sequence else "none"
            rows.append(("longest sequence that fits", longest))
        return Table("Memory of the fullest GPU", ("part", "size"), rows)

    def _lines(self) -> list[str]:
        rate = self.rates.matrices
        simulated = ", ".join(f"{few} of {every}" for few, every in self.simulated_layers)
        elementwise = "element-wise work takes no time, as no memory bandwidth is known"
        if self.rates.memory_bytes_per_s is not None:
            elementwise = f"element-wise work at {float(self.rates.memory_bytes_per_s) / 1e12:.3g} TB/s"
        shapes = "" if self.rates.shapes is None else f", by shape as on {self.rates.shapes.of}"
        saves = load_stack(self.machine.stack).memory if self.machine.stack else ""
        return [
            *([f"left out of the memory: {saves}"] if saves else []),
            f"matrices: {format_flops(float(rate.flops_per_s or 0))} in {self.plan.matrix_dtype}{shapes}, {rate.source}"
            f"; {elementwise}; set --matrix-rate",
            f"layers simulated: {simulated}; the others take as long as the last of them",
            interval_line(self.interval),
            LESS_CHECKED,
        ]


STEP_COLUMNS: tuple[Column[StepPrediction], ...] = (
    Column("model", "its name", lambda step: step.plan.model.name),
    Column("parameters", "of the model", lambda step: parameter_count(step.plan.model)),
    Column("topology", "the name of the topology", lambda step: step.machine.topology.name),
    Column("world_size", "the number of ranks", lambda step: step.ranks),
    Column("library", "communication library", lambda step: step.machine.comm_library.name),
    Column("schedule", "of attention", lambda step: step.plan.schedule),
    Column("seq", "positions of a sequence", lambda step: step.plan.sequence),
    Column("batch", "sequences of a replica in a micro-batch", lambda step: step.plan.batch),
    Column("tp", "ranks that share heads and MLP", lambda step: step.layout.tp),
    Column("cp", "ranks that share a sequence", lambda step: step.layout.cp),
    Column("pp", "pipeline stages", lambda step: step.layout.pp),
    Column("dp", "replicas, with sequences of their own", lambda step: step.layout.dp),
    Column("zero", "ZeRO stage of the states, 3 is FSDP", lambda step: step.layout.zero),
    Column("interleave", "parts of the model per stage", lambda step: step.layout.interleave),
    Column("microbatches", "of a step", lambda step: step.layout.microbatches),
    Column("checkpointing", "what is recomputed", lambda step: step.layout.checkpointing),
    Column("logit_chunks", "parts in which logits are computed", lambda step: step.layout.logit_chunks),
    Column("offload", "whether optimizer states are on the host", lambda step: step.layout.offload),
    Column("ep", "ranks that share experts", lambda step: step.layout.ep),
    Column("overlap", "whether parameters and gradients move beside layers, or null for yes",
           lambda step: step.layout.overlap),
    Column("order", "of ranks, neighbours first", lambda step: step.layout.order),
    Column("pass", "`both`, or `forward` without training", lambda step: step.plan.options.passes),
    Column("matrix_dtype", "of matrix products", lambda step: step.plan.matrix_dtype),
    Column("fused", "whether element-wise work is fused, or eager", lambda step: step.plan.software.fused),
    Column("time_s", "sum of the next five"),
    Column("time_low_s", "lower end of the [interval](whole_steps.md#accuracy)", lambda step: step.interval.low_s),
    Column("time_high_s", "upper end of the interval", lambda step: step.interval.high_s),
    Column("interval", "its `median_s`, `regime`, and the measured `rows` and sources",
           lambda step: step.interval.record),
    Column("forward_s", "forward phases of all micro-batches, of the busiest stage", lambda step: step.times.forward_s),
    Column("backward_s", "backward phases likewise", lambda step: step.times.backward_s),
    Column("pipeline_s", "what that stage waits for other stages", lambda step: step.times.pipeline_s),
    Column("embedding_s", "messages of embedding and output, and of all parameters that do not move beside layers",
           lambda step: step.times.embedding_s),
    Column("optimizer_s", "update of the states", lambda step: step.times.optimizer_s),
    Column("compute_s", "kernel calls of the busiest rank in both phases", lambda step: step.times.compute_s),
    Column("exposed_s", "phases and `embedding_s`, less `compute_s`", lambda step: step.times.exposed_s),
    Column("tokens", "positions of a step"),
    Column("tokens_per_s", "over all GPUs"),
    Column("tokens_per_s_per_gpu", "of one GPU"),
    Column("model_flops", "FLOPs by the [convention](whole_steps.md#mfu)"),
    Column("flops_per_s_per_gpu", "model FLOPs per second and GPU", lambda step: step.flops_per_s),
    Column("peak_flops_per_s", "dense peak of a GPU in `matrix_dtype`, or null",
           lambda step: step.rates.peak_flops_per_s),
    Column("mfu", "`flops_per_s_per_gpu` / `peak_flops_per_s`, or null"),
    Column("memory_bytes", "of the fullest GPU", lambda step: step.memory.total),
    Column("memory", "object of " + ", ".join(f"`{name}`" for name in MemoryUse._fields),
           lambda step: dict(step.memory._asdict())),
    Column("capacity_bytes", "memory that the driver reports, or null", lambda step: step.rates.capacity_bytes),
    Column("reserved_bytes", "for the context and the communication library, or null",
           lambda step: None if step.rates.capacity_bytes is None else RESERVED_BYTES),
    Column("fits", "whether `memory_bytes` fits, or null"),
    Column("longest_sequence", "positions, a multiple of 1024, with which this layout fits, or null"),
    Column("would_fit", "if it does not fit, an object of the fewest options with which it does: "
           "`memory_bytes` with each"),
    Column("simulated_layers", "list of `simulated`, `of`: layers simulated of each run of equal ones",
           lambda step: [{"simulated": few, "of": every} for few, every in step.simulated_layers]),
    Column("ranked", "without `--schedule` a list of `schedule`, `time_s`, `memory_bytes`, `fits`: the fastest that "
           "fits first", lambda step: [each._asdict() for each in step.ranked]),
    Column("less_checked", "true", lambda step: True),
    Column("provenance", "as above", lambda step: step.provenance.to_dict()),
)  # fmt: skip
"""The fields of ``step --json`` and columns of its data frame; `docs/json.md` follows from them."""


def plan_inputs(plan: StepPlan) -> dict[str, object]:
    """What determines a step, besides the machine, as plain JSON."""
    import msgspec

    options = asdict(plan.options)
    model = msgspec.to_builtins(plan.model)
    names = ("sequence", "batch", "schedule", "matrix_dtype")
    layout = asdict(plan.layout)
    return {"model": model, "options": options, "layout": layout, **{name: getattr(plan, name) for name in names}}
