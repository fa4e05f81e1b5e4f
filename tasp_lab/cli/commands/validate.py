"""``tasp-lab validate``: schedules executed on real processes and compared with their predictions."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.options import RUN, Backend, Json, Plot, Scale, Schedules, ShardBytes, TopologyText, Trace, whole
from tasp_lab.cli.options_layer import DEFAULT_QUESTION, QuestionChoice
from tasp_lab.cli.outputs import check_outputs, write_timelines
from tasp_lab.core.choices import FabricKind, TransportKind
from tasp_lab.core.errors import ProfileError
from tasp_lab.core.progress import print_progress


def validate(
    topology: TopologyText,
    /,
    *,
    schedule: Schedules,
    shard_bytes: ShardBytes = None,
    question: QuestionChoice = DEFAULT_QUESTION,
    fabric: Annotated[
        FabricKind,
        Parameter(
            group=RUN,
            help="Where ranks run. emulated: network namespaces with shaped links; local: plain processes; torchrun: "
            "the processes of a torchrun job.",
        ),
    ] = "emulated",
    scale: Scale = None,
    repeat: Annotated[int, whole("Timed repetitions of each schedule.", RUN)] = 5,
    transport: Annotated[TransportKind, Parameter(group=RUN, help="How ranks send blocks.")] = "auto",
    backend: Backend = "auto",
    trace: Trace = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Run a collective or an attention layer on real processes and compare it with its prediction.

    Example: tasp-lab validate full-mesh:8 --schedule ring --schedule multi-ring --shard-bytes 1MiB

    Example: tasp-lab validate full-mesh:8 --schedule ring-attention --schedule tasp --seq 8192 --compute timed:2e9
    """
    from tasp_lab.prediction.captions import caption
    from tasp_lab.prediction.inputs import edited
    from tasp_lab.schedules.registry import check_names
    from tasp_lab.validation import validate as comparison

    layer, changes = question.layer, question.changes
    machine = question.numbers.load(topology, "ideal")  # the fabric has a library of its own
    work = layer.work(shard_bytes)
    check_names(schedule, work)
    if layer.runtime is not None:
        raise ProfileError(f"runtime {layer.runtime!r}: ranks run on their own, expected none; see predict and compare")
    check_outputs(trace=trace, plot=plot, topology=topology)
    found = comparison.validate(
        machine,
        schedule,
        work,
        **question.settings(),
        fabric=fabric,
        scale=scale,
        repeats=repeat,
        transport=transport,
        backend=backend,
        progress=print_progress,
    )
    if not found.is_reporter:
        return
    shown = [run for run in found.runs if run.prediction.is_all]
    timelines = [line for run in shown for line in (run.prediction.timeline, run.measured_timeline)]
    title = caption(work, schedule, edited(machine.topology, changes.without_link, changes.link))
    write_timelines(timelines, trace, plot, f"{title}: predicted and measured")
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
