"""``tasp-lab predict``: simulated times of schedules."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.memory import limited_memory
from tasp_lab.cli.options import OUTPUT, RUN, Json, Plot, Schedules, ShardBytes, TopologyText, Trace, Wide
from tasp_lab.cli.options_layer import DEFAULT_PREDICTION, PredictionChoice
from tasp_lab.cli.outputs import check_outputs, write_timelines
from tasp_lab.core.progress import print_progress


def predict(
    topology: TopologyText,
    /,
    *,
    schedule: Schedules,
    shard_bytes: ShardBytes = None,
    question: PredictionChoice = DEFAULT_PREDICTION,
    engine: Annotated[
        Literal["auto", "simpy", "array"],
        Parameter(
            group=RUN, help="Simulation engine, of equal times; array is for large worlds; auto: the faster one."
        ),
    ] = "auto",
    trace: Trace = None,
    plot: Plot = None,
    explain: Annotated[
        bool,
        Parameter(
            negative=(),
            show_default=False,
            group=OUTPUT,
            help="Show the critical path and the bottleneck of each transfer.",
        ),
    ] = False,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Predict how long a collective or an attention layer takes.

    Example: tasp-lab predict full-mesh:8 --schedule ring --schedule multi-ring --shard-bytes 64MiB

    Example: tasp-lab predict full-mesh:8 --schedule ring-attention --schedule tasp --seq 128Ki --kv-heads 8 --pass both
    """
    from tasp_lab.prediction import predict as prediction
    from tasp_lab.prediction.captions import caption
    from tasp_lab.schedules.registry import check_names

    with limited_memory():
        layer = question.layer
        machine, work = question.numbers.load(topology, question.library), layer.work(shard_bytes)
        check_names(schedule, work)
        check_outputs(trace=trace, plot=plot, topology=topology)
        found = prediction.predict(
            machine,
            schedule,
            work,
            engine=engine,
            explain=explain,
            events=trace is not None or plot is not None,
            progress=print_progress,
            **question.settings(),
        )
    shown = [each for each in found if each.is_all]
    intervals = ["" if each.interval is None else each.interval.text for each in shown]
    title = caption(work, schedule, found.machine.topology, found.library)
    write_timelines([each.timeline for each in shown], trace, plot, title, intervals)
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts(), wide=wide)
