"""Answers in words: titles of tables and pictures, what is assumed, what intervals are made of, where time went."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import get_args

from sim.array.max_min import MANY
from tasp_lab.core.choices import Pass
from tasp_lab.core.tables import Part, Table
from tasp_lab.core.units import format_flops, format_time
from tasp_lab.machines.compute import PARTS, KernelCompute
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.machines.stack import stack_of
from tasp_lab.prediction.answer import Answer
from tasp_lab.prediction.interval import IDEAL_LINKS, Interval
from tasp_lab.prediction.passes import PASS_NAMES
from tasp_lab.prediction.provenance import (
    Provenance,
    UsedConstant,
    compute_constants,
    host_constants,
    machine_constants,
    machine_inputs,
    overrides_inputs,
    plain,
    rings_inputs,
    schedules_inputs,
)
from tasp_lab.prediction.question import NO_SAMPLES, Question
from tasp_lab.schedules.build import AnySchedule
from tasp_lab.schedules.collectives.kinds import describe
from tasp_lab.timeline.events import CONTENTION, SEND, Timeline
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.kernel_shapes import Passing
from tasp_lab.workload.layer import Workload

MIN_SHARE = 0.0005
"""Parts of the critical path with a smaller share of the time are left out of the table."""


def software(machine: Machine) -> str:
    """The communication library and the stack of a machine, as the end of a title.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> software(load_machine("h100-8")), software(load_machine("full-mesh:8"))
    (', nccl', '')
    """
    names = [machine.comm_library.name] if machine.comm_library.name != "ideal" else []
    names += [f"stack {machine.stack}"] if machine.stack else []
    return "".join(f", {name}" for name in names)


def title_of(answer: Answer, where: str) -> str:
    """The work and the place, on one line."""
    if not answer.computes:
        return f"{describe(answer.collective, answer.world_size, answer.shard_bytes)} on {where}"
    return f"{layer_text(answer.layer, answer.options.passes)}, on {where}"


def layer_text(layer: Workload, passes: Pass) -> str:
    """An attention layer, or a hybrid, and its passes in words.

    >>> layer_text(Workload(8, batch=2, documents=(3, 5), dtype="fp32", heads=1), "both")
    'Causal attention, forward and backward, 2 x 8 positions in 2 documents, 1 heads of 128, fp32'
    >>> layer_text(Workload(8192, kind="hybrid", layers="2xLLS", decay="scalar", kv_heads=8), "forward")
    'Causal hybrid LLSLLS (decay: scalar), forward, 8192 positions, 32 heads (8 KV) of 128, bf16'
    >>> layer_text(Workload(8, ranges="0:4/0:4/causal,4:8/0:8", heads=1), "forward")
    'Attention in 2 ranges, forward, 8 positions, 1 heads of 128, bf16'
    """
    decay = f" (decay: {layer.decay})"
    attention = "attention" if layer.kind == "softmax" else f"linear attention{decay}"
    if layer.kind == "hybrid":
        attention = f"hybrid {layer.layers}{decay if 'L' in layer.layers else ''}"
    linear = "" if layer.linear_kv_heads is None else f", {layer.linear_kv_heads} in linear layers"
    kv_heads = "" if layer.kv_head_count == layer.heads and not linear else f" ({layer.kv_head_count} KV{linear})"
    batch = "" if layer.batch == 1 else f"{layer.batch} x "
    of_mask = f"{layer.mask} {attention}"
    if layer.ranges is not None:
        of_mask = f"{attention} in {len(layer.ranges)} range{'s' if len(layer.ranges) > 1 else ''}"
    window = "" if layer.window is None else f" in a window of {layer.window}"
    if isinstance(layer.window, tuple):
        before, after = ("all" if side is None else side for side in layer.window)
        window = f" in a window of {before} keys before and {after} after"
    sinks = " with sinks" if layer.sinks else ""
    documents = "" if layer.documents is None else f" in {len(layer.documents)} documents"
    cached = f", {layer.cached_keys} of them cached" if layer.cached_keys else ""
    heads = f"{layer.heads} heads{kv_heads} of {layer.widths}{', values in keys' if layer.values_in_keys else ''}"
    if layer.decode:
        return f"Decode attention, {batch or '1 x '}1 query after {layer.cached_keys} keys, {heads}, {layer.dtype}"
    return (
        f"{of_mask[0].upper()}{of_mask[1:]}{window}{sinks}, {PASS_NAMES[passes]}, {batch}{layer.sequence} positions"
        f"{documents}{cached}, {heads}, {layer.dtype}"
    )


def ranks_text(answer: Answer) -> str:
    """The number of ranks, and how fast they compute."""
    return f"{answer.world_size} ranks" + (f" {_computing(answer)}" if answer.computes else "")


def kernels_text(answer: Answer, real: bool) -> tuple[str, ...]:
    """A description of the kernel calls of a run; empty where ranks do not compute."""
    return ("real kernels" if real else f"timed {_computing(answer)}",) if answer.computes else ()


def _computing(answer: Answer) -> str:
    """The kernel, and the rate that no call of it exceeds; or the rate of all calls; one per pass where they differ."""
    rates = {passing: _flops_text(rate) for passing, rate in answer.rates.items()}
    text = " and ".join(f"{rate} {passing}" for passing, rate in rates.items())
    text = next(iter(rates.values())) if len(set(rates.values())) == 1 else text
    kernels = " and ".join(dict.fromkeys(rate.kernel for rate in answer.rates.values() if rate.kernel))
    return f"with {kernels}, up to {text}" if kernels else f"at {text}"


def _flops_text(rate: ComputeRate) -> str:
    return "no time" if rate.flops_per_s is None else format_flops(rate.flops_per_s)


def assumptions(answer: Answer) -> list[str]:
    """A line for each assumed compute rate: the rate, its dtype, its passes and its source."""
    assumed = {passing: rate for passing, rate in answer.rates.items() if rate.assumed}
    return [
        f"compute: {_flops_text(rate)} in {answer.layer.dtype}, "
        f"{' and '.join(passing for passing in assumed if assumed[passing] == rate)}, {rate.source}; "
        f"set --{'kernel or --' if rate.kernel else ''}compute timed:RATE"
        for rate in dict.fromkeys(assumed.values())
    ]


def whole(answers: Iterable[Answer]) -> Answer | None:
    """The first answer that covers all requested passes; None if there is none."""
    return next((each for each in answers if each.applies and each.is_all), None)


def compute_of_passes(answers: Iterable[Answer]) -> dict[str, object] | None:
    """The dtype, and the compute rate of each pass with its source, as JSON; None where ranks do not compute."""
    first = whole(answers)
    if first is None or not first.computes:
        return None
    return {"dtype": first.layer.dtype} | {
        passing: {
            "flops_per_s": None if rate.flops_per_s is None else float(rate.flops_per_s),
            "source": rate.source,
            "assumed": rate.assumed,
            **({"kernel": rate.kernel} if rate.kernel else {}),
        }
        for passing, rate in first.rates.items()
    }


def layer_constants(answers: Iterable[Answer]) -> tuple[UsedConstant, ...]:
    """The compute rates of the passes of a layer; none of a collective."""
    first = whole(answers)
    return () if first is None or not first.computes else compute_constants(first.layer.dtype, first.rates)


def provenance_of(
    question: Question,
    schedules: Sequence[AnySchedule],
    machine: Machine,
    answers: Sequence[Answer],
    *,
    rings: bool,
    engines: tuple[str, ...] = (),
    search_complete: bool | None = None,
    more: Mapping[str, object] = MappingProxyType({}),
) -> Provenance:
    """Where the answers come from that some schedules give to a question on its machine.

    `rings` is whether the rings that are sought matter, and `more` are further inputs.
    """
    is_layer = isinstance(question.work, Workload)
    sought = plain(question.rings) if rings else None
    inputs: dict[str, object] = {
        "machine": machine_inputs(machine, compute=is_layer),
        "schedules": schedules_inputs(schedules),
        "work": plain(question.work),
        "options": plain(question.options) if is_layer else None,
        "rings": rings_inputs(question.rings) if isinstance(question.rings, tuple) else sought,
        "engine": question.engine,
        "sampling": plain(question.sampling or NO_SAMPLES),
        **more,
        **overrides_inputs(question.overrides),
    }
    constants = (*machine_constants(machine.parameters.values()), *host_constants(machine.host))
    return Provenance(inputs, constants + layer_constants(answers), engines, search_complete)


def interval_line(interval: Interval) -> str:
    """What an interval is made of, on one line."""
    found, count = interval.residual, len(interval.samples_s)
    if found.is_exact:
        return f"interval: {count} samples of kernel rates; {IDEAL_LINKS}" if count else IDEAL_LINKS
    measured = f"{found.rows} measured rows, {found.machines} machine{'s' * (found.machines > 1)}"
    borrowed = f"; borrowed: {found.borrowed}" if found.borrowed else ""
    return f"interval: median and 9 of 10 runs ({measured}: {found.regime}){borrowed}"


def rates_line(answers: Iterable[Answer]) -> list[str]:
    """For which of some answers rates of messages are not those of the exact simulation, and by how much."""
    found = {each.schedule: each.rates_within for each in answers if each.rates_within}
    if not found:
        return []
    return [f"rates: {MANY} messages or more may share a link of {', '.join(found)}, which is filled to within "
            f"{max(found.values()):.1%} of its capacity"]  # fmt: skip


TILES_AND_WAVES = (
    f"{PARTS['waves_s']}: a GPU computes whole tiles of queries and keys, some of which are part-filled or cut by the "
    "mask, and some multiprocessors idle while the last tiles are computed"
)


def explanation_parts(timeline: Timeline, topology: Topology) -> list[Part]:
    """The critical path of a schedule, whose shares add up to its time, and what its calls lose to contention."""
    from tasp_lab.timeline.critical_path import time_by_kind

    whole_s = float(timeline.time_s) or 1.0
    parts = [(what, s) for what, s in time_by_kind(timeline, topology) if s / whole_s >= MIN_SHARE]
    path = [(what, format_time(s), f"{s / whole_s:.1%}") for what, s in parts]
    went = Table(f"where the time of {timeline.schedule} went", ("critical path", "time", "share of time"), path)
    found: list[Part] = [went, *([TILES_AND_WAVES] if PARTS["waves_s"] in dict(parts) else [])]
    calls = [event for event in timeline.events if event.kind != SEND]
    lost = [float(seconds) for event in calls for what, seconds in event.spent if what == CONTENTION]
    if lost:
        took_s = sum(float(event.end_s - event.start_s) for event in calls)
        found.append(
            f"contention: {len(lost)} of {len(calls)} kernel calls lose {format_time(sum(lost) / len(lost))} on "
            f"average to messages in flight, {sum(lost) / took_s:.1%} of the time of all calls"
        )
    return found


LIBRARY_VERSIONS = {"nccl": "NCCL 2.29", "rccl": "RCCL 2.27"}
"""Whose constants ``tasp_lab/machines/libraries/constants`` has, by name of the library."""


def software_of(answer: Answer) -> list[str]:
    """The line about the software of an answer; none of a collective."""
    if not answer.computes:
        return []
    line = software_line(answer.on, answer.layer, answer.rates)
    return [line] if line else []


def software_line(machine: Machine, layer: Workload, passes: Collection[str]) -> str:
    """What runs a layer: its kernel, which library runs it, and what was measured; empty where no kernel is known.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> software_line(load_machine("h100-8"), Workload(8192), ["forward"])
    'Software: cudnn, measured on h100, which PyTorch 2.13.0 runs; NCCL 2.29; no host times.'
    """
    compute = machine.compute
    if not isinstance(compute, KernelCompute) or layer.kind == "linear":
        return ""
    asked = [each for each in get_args(Passing) if each in passes]
    heads = layer.head_dim, layer.value_dim
    assumed = {each: compute.rate(layer.dtype, each, "softmax", *heads).assumed for each in asked}
    gpu = machine.accelerator
    known = {True: f"assumed on {gpu}", False: f"measured on {gpu}"}
    found = [known[each] for each in dict.fromkeys(assumed.values())]
    if len(found) > 1:
        found = [f"{passing} {known[each]}" for passing, each in assumed.items()]
    stack = stack_of(machine.stack, layer)
    runs, version = ", as named", f"{stack.library} {stack.version.split(' (')[0]}"
    if compute.by_stack:
        is_assumed = any(rule.source.startswith("assum") for rule in stack.rules(gpu, layer))
        runs = f", in place of what {version} runs" if is_assumed else f", which {version} runs"
    library = LIBRARY_VERSIONS.get(machine.comm_library.name, machine.comm_library.name)
    sources = [source for _, source in machine.host.sources]
    hosts = "assumed" if all(each.startswith("assum") for each in sources) else "partly measured"
    host = f"host times {hosts}" if sources else "no host times"
    return f"Software: {compute.kernel.name}, {', '.join(found)}{runs}; {library}; {host}."
