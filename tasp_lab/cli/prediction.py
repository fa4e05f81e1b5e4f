"""Prediction: what the simulator says of named schedules on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.simulation import Engine, simulate
from tasp_lab.attention_backward import way_of
from tasp_lab.attention_bound import attention_bound_s, rank_flops
from tasp_lab.bound import collective_bound_s
from tasp_lab.cli.predicted import CollectivePrediction as CollectivePrediction
from tasp_lab.cli.predicted import LayerPrediction as LayerPrediction
from tasp_lab.cli.predicted import Prediction as Prediction
from tasp_lab.cli.predicted import label, pass_of, together
from tasp_lab.collectives import kind_of
from tasp_lab.decomposition import Decomposition
from tasp_lab.machine import INSTANT, Compute, Machine
from tasp_lab.quantities import Number
from tasp_lab.rings import Say, say_nothing
from tasp_lab.rooms import buffer_bytes
from tasp_lab.schedule import Schedule
from tasp_lab.schedules import USUAL_OPTIONS, AttentionOptions, Work, build_schedules, check_names
from tasp_lab.workload import Workload

MANY_TRANSFERS = 10_000
"""From how many transfers on SimPy may take more than a few seconds, and is announced."""

MANY_EVENTS = 200_000
"""Of more events no timeline is kept unless it is wanted."""

USUAL_COMPUTE = Compute(300e12)
"""How fast a rank of a machine that does not say so computes attention: about what one H100 or MI300X does forward.

FlashAttention-2 was measured at 327.9 and 328.6 TFLOP/s there (Azure/AI-benchmarking-guide).
"""


def predict(
    machine: Machine,
    schedules: Sequence[str],
    work: Work,
    *,
    decomposition: Decomposition | None = None,
    options: AttentionOptions = USUAL_OPTIONS,
    engine: Engine = "auto",
    explain: bool = False,
    events: bool = False,
    say: Say = say_nothing,
) -> list[Prediction]:
    """Predict a collective of so many bytes per rank, or an attention layer, by each of the named schedules.

    Parameters
    ----------
    machine : what to run on; ranks of one without a compute rate have `USUAL_COMPUTE`, in every pass.
    schedules : names of schedules.
    work : bytes per rank, or the layer.
    decomposition, options : see `tasp_lab.schedules.build_schedules`.
    engine : ``auto``, ``simpy`` or ``array``, see `sim.simulation.simulate`.
    explain : timelines say what their time went to.
    events : whether every event is wanted; else timelines of more than `MANY_EVENTS` have a time only.
    say : told of simulations that take long.

    Returns a `CollectivePrediction` or a `LayerPrediction` per schedule; where both passes are asked for, three:
    forward, backward, and both together.

    >>> from tasp_lab.catalogue import load_machine
    >>> [round(p.time_s * 1e6) for p in predict(load_machine("full-mesh:8"), ["ring", "multi-ring"], 2**20)]
    [154, 28]
    """
    check_names(schedules, work)
    machine, predictions = with_compute(machine), []
    for name in schedules:
        passes = []
        for schedule in build_schedules(name, machine.topology, work, decomposition, options):
            if schedule.transfers > MANY_TRANSFERS and engine == "simpy":
                say(f"simulating {schedule.transfers:,} transfers of {label(schedule, options)}; this may take a while")
            keep = events or explain or schedule.transfers <= MANY_EVENTS
            passes.append(predict_schedule(machine, schedule, work, options, engine, explain=explain, events=keep))
        predictions += passes
        if options.passes == "both":
            predictions.append(together(*passes))
    return predictions


def with_compute(machine: Machine) -> Machine:
    """The machine with `USUAL_COMPUTE` where it has no compute rate of its own."""
    return replace(machine, compute=USUAL_COMPUTE) if machine.compute == INSTANT else machine


def predict_schedule(
    machine: Machine,
    schedule: Schedule,
    work: Work,
    options: AttentionOptions = USUAL_OPTIONS,
    engine: Engine = "auto",
    *,
    explain: bool = False,
    events: bool = True,
) -> Prediction:
    """Predict one schedule that is already built, of this work; `options` say how it was built."""
    timeline = simulate(schedule, machine, engine, explain=explain, events=events)
    head = (schedule.name, machine.topology.name, machine.topology.world_size, timeline.time_s)
    bound = bound_s(machine, schedule, work)
    if not isinstance(work, Workload):
        return CollectivePrediction(*head, bound, timeline, kind_of([schedule.name]), work)
    task = schedule.task
    assert task is not None, "a schedule of a layer has a task"
    flops = rank_flops(task)
    return LayerPrediction(
        *head,
        bound,
        replace(timeline, schedule=label(schedule, options)),
        layer=work,
        options=options,
        passing=pass_of(schedule),
        way=way_of(schedule) if task.is_backward else None,
        compute_flops_per_s=machine.compute.flops_per_s,
        compute_s=machine.compute.time_s(max(flops)),
        communication_s=simulate(schedule, replace(machine, compute=INSTANT), engine, events=False).time_s,
        bytes_sent=int(schedule.bytes_sent().sum()),
        buffer_bytes=int(buffer_bytes(schedule).max()),
        flops=sum(flops),
    )


def bound_s(machine: Machine, schedule: Schedule, work: Work) -> Number:
    """What the work takes at least on a machine; a layer, where the schedule places it."""
    if not isinstance(work, Workload):
        return collective_bound_s(kind_of([schedule.name]), machine.topology, work)
    assert schedule.task is not None, "a schedule of a layer has a task"
    return attention_bound_s(machine, schedule.task, schedule.initial)
