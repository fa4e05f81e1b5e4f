"""``tasp-lab compare``: every schedule of attention on a machine, best first."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tasp_lab.cli.console import Progress, print_json, print_parts
from tasp_lab.cli.memory import limited_memory
from tasp_lab.cli.options import PASSES, RUN, WORK, Csv, Json, Scale, TopologyText, Wide, whole
from tasp_lab.cli.options_layer import DEFAULT_PREDICTION, PredictionChoice
from tasp_lab.cli.outputs import write_rows
from tasp_lab.core.choices import FabricKind, Preference
from tasp_lab.core.errors import QuantityError
from tasp_lab.core.files import check_writable

if TYPE_CHECKING:
    from tasp_lab.prediction.compare import Ranking, Rankings


def compare(
    topology: TopologyText,
    /,
    *,
    schedule: Annotated[
        list[str] | None,
        Parameter(name="--schedule", negative=(), group=WORK, help="Compare only these; repeatable."),
    ] = None,
    question: PredictionChoice = DEFAULT_PREDICTION,
    tune: Annotated[
        bool,
        Parameter(
            negative=(),
            show_default=False,
            group=PASSES,
            help="Search the options of each schedule for the shortest time; dtypes are not varied.",
        ),
    ] = False,
    prefer: Annotated[
        Preference,
        Parameter(group=PASSES, help="What decides between schedules that are expected to be equally fast."),
    ] = "memory",
    validate: Annotated[
        int, whole("Also run this many of the fastest schedules, and the fastest single ring.", RUN)
    ] = 0,
    fabric: Annotated[FabricKind, Parameter(group=RUN, help="Where --validate runs ranks, see validate.")] = "emulated",
    scale: Scale = None,
    repeat: Annotated[int, whole("Timed repetitions of each schedule that is run.", RUN)] = 5,
    csv: Csv = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Recommend a schedule of attention for a layer, from predictions of all that apply; or stacks of a hybrid.

    Example: tasp-lab compare mi300x-8 --seq 32Ki --heads 32 --kv-heads 8 --mask causal --pass both

    Example: tasp-lab compare full-mesh:8 --seq 4Ki --heads 8 --compute timed:1000TFLOP/s --validate 2

    Example: tasp-lab compare h100-2x4 --seq 16Ki --heads 8 --mask causal --tune

    Example: tasp-lab compare h100-8 --seq 64Ki --kv-heads 8 --mask causal --kind all --layers LLSLLS
    """
    from tasp_lab.machines.overrides import overridden_layer
    from tasp_lab.prediction import compare as comparison
    from tasp_lab.validation.fabric_runs import FabricRuns

    if validate < 0:
        raise QuantityError(f"validate: {validate}, expected 0 or more schedules to run")
    if csv is not None:
        check_writable(csv)
    # Processes that run schedules would inherit the limit.
    limit: AbstractContextManager[None] = nullcontext() if validate else limited_memory()
    with limit, Progress(lines_only=json) as shown:
        layer = question.layer
        machine, layers = question.numbers.load(topology, question.library), layer.workloads()
        settings = question.settings() | {"tune": tune, "prefer": prefer, "progress": shown.line, "count": shown.count}
        runs = FabricRuns(validate, fabric, scale, repeat)
        for each in layers:
            runs.check(overridden_layer(each, question.overrides), layer.compute)
        found: Ranking | Rankings
        if layer.kind == "all":
            found = comparison.compare_kinds(machine, layers, schedule, **settings)
        else:
            found = comparison.compare(machine, layers[0], schedule, **settings)
        found = runs.run(found, shown.line) if validate else found
        # What only the output needs is simulated while it is made.
        if csv is not None and found.is_reporter:
            write_rows(found.records(), csv)
        output = (found.to_dict() if json else found.parts()) if found.is_reporter else None
    if isinstance(output, dict):
        print_json(output)
    elif output is not None:
        print_parts(output, wide=wide)
