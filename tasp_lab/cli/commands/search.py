"""``tasp-lab search``: a schedule that is found for one question."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import Progress, print_json, print_parts
from tasp_lab.cli.memory import limited_memory
from tasp_lab.cli.options import OUTPUT, RUN, Json, Plot, TopologyText, Wide, whole
from tasp_lab.cli.options_layer import DEFAULT_PREDICTION, PredictionChoice
from tasp_lab.cli.outputs import check_outputs, check_schedule_file, write_timelines

EFFORT = 400
"""Simulated passes, as in `tasp_lab.synthesis.search`, which help does not import."""


def search(
    topology: TopologyText,
    /,
    *,
    question: PredictionChoice = DEFAULT_PREDICTION,
    effort: Annotated[
        int, whole("The most passes that are simulated, besides those of named schedules.", RUN)
    ] = EFFORT,
    jobs: Annotated[
        int | None, whole("Processes. Default: two, or one per core. The result does not depend on it.", RUN)
    ] = None,
    output: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT,
            show_default=False,
            help="Write the schedule to this file, such as found.json: a name for --schedule in every command.",
        ),
    ] = None,
    plot: Plot = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Find an attention schedule for a layer that is faster than all that have a name.

    Example: tasp-lab search h100-2x8 --seq 64Ki --kv-heads 8 --mask causal --pass both --output found.json

    Example: tasp-lab predict h100-2x8 --schedule found.json --seq 64Ki --kv-heads 8 --mask causal --pass both
    """
    from tasp_lab.core.process import usable_cores
    from tasp_lab.prediction.captions import caption
    from tasp_lab.synthesis.search import search as find

    if output is not None:
        check_schedule_file("output", output)
    check_outputs(trace=None, plot=plot, topology=topology)
    with limited_memory(), Progress(lines_only=True) as shown:
        machine, work = question.numbers.load(topology, question.library), question.layer.workload()
        workers = min(2, usable_cores()) if jobs is None else jobs
        found = find(machine, work, effort=effort, workers=workers, progress=shown.line, events=plot is not None,
                     **question.settings())  # fmt: skip
        document = found.to_dict() if json else {}
    if output is not None:
        found.save(output)
        shown.line(f"schedule: {output}")
    if plot is not None:
        timelines = [each.timeline for each in found.answers]
        on = found.answer.passes[0].machine
        title = caption(work, [each.schedule for each in timelines], on.topology, on.comm_library.name)
        write_timelines(timelines, None, plot, title, [""] * len(timelines))
    if json:
        print_json(document)
    else:
        print_parts(found.parts(), wide=wide)
