"""``tasp-lab predict``, ``compare``, ``search`` and ``step``: simulated times of schedules, and of whole steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tasp_lab.cli.console import Progress, print_json, print_parts, tell
from tasp_lab.cli.memory import limited_memory
from tasp_lab.cli.options import (
    DEFAULT_STEP_MACHINE,
    OUTPUT,
    PASSES,
    RUN,
    WORK,
    Csv,
    Json,
    Plot,
    Scale,
    Schedules,
    ShardBytes,
    StepMachine,
    TopologyText,
    Trace,
    Wide,
    flag,
    of,
    quantity,
    shown,
    whole,
)
from tasp_lab.cli.options_layer import DEFAULT_LAYOUT, DEFAULT_PREDICTION, LayoutChoice, PredictionChoice
from tasp_lab.cli.outputs import check_outputs, check_schedule_file, write_picture, write_rows, write_timelines
from tasp_lab.core.choices import DEFAULT_BUFFERS, FabricKind, Preference
from tasp_lab.core.errors import QuantityError, ScheduleError
from tasp_lab.core.files import check_writable
from tasp_lab.core.process import usable_cores
from tasp_lab.core.progress import print_progress

if TYPE_CHECKING:
    from tasp_lab.core.report import Reports
    from tasp_lab.prediction.compare import Ranking


def predict(
    topology: TopologyText,
    /,
    *,
    schedule: Schedules,
    shard_bytes: ShardBytes = None,
    question: PredictionChoice = DEFAULT_PREDICTION,
    engine: Annotated[Literal["auto", "simpy", "array"], of(RUN)] = "auto",
    trace: Trace = None,
    plot: Plot = None,
    explain: Annotated[bool, flag(OUTPUT)] = False,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Predict how long a collective or an attention layer takes.

    Example: tasp-lab predict full-mesh:8 --schedule ring --schedule multi-ring --shard-bytes 64MiB

    Example: tasp-lab predict full-mesh:8 --schedule ring-attention --schedule tasp --seq 128Ki --kv-heads 8 --pass both

    Args:
        engine: Simulation engine, of equal times; array is for large worlds; auto: the faster one.
        explain: Show the critical path, the times without kernel calls and without contention, and each transfer.
    """
    from tasp_lab.prediction import predict as prediction

    check_outputs(trace=trace, plot=plot, topology=topology)
    with limited_memory():
        machine, work = question.load(topology), question.work(shard_bytes)
        found = prediction.predict(
            machine, schedule, work, engine=engine, explain=explain,
            events=trace is not None or plot is not None, progress=print_progress, **question.settings(),
        )  # fmt: skip
    if trace is not None or plot is not None:
        from tasp_lab.prediction.captions import software, title_of

        whole_passes = [each for each in found if each.is_all]
        intervals = ["" if each.interval is None else each.interval.text for each in whole_passes]
        title = title_of(found[0], f"{found.machine.topology.name}{software(found.machine)}")
        write_timelines([each.timeline for each in whole_passes], trace, plot, title, intervals)
    tell(found, json, wide=wide)


def compare(
    topology: TopologyText,
    /,
    *,
    schedule: Annotated[list[str] | None, flag(WORK, name="--schedule")] = None,
    shard_bytes: ShardBytes = None,
    question: PredictionChoice = DEFAULT_PREDICTION,
    tune: Annotated[bool, flag(PASSES)] = False,
    every: Annotated[bool, flag(RUN, name="--all")] = False,
    prefer: Annotated[Preference, of(PASSES)] = "memory",
    versus: Annotated[list[str] | None, flag(PASSES, name="--versus")] = None,
    failures: Annotated[bool, flag(PASSES)] = False,
    search: Annotated[Path | None, shown(RUN)] = None,
    validate: Annotated[int, whole(RUN)] = 0,
    fabric: Annotated[FabricKind, of(RUN)] = "emulated",
    scale: Scale = None,
    repeat: Annotated[int, whole(RUN)] = 5,
    explain: Annotated[str | None, shown(PASSES)] = None,
    plot: Annotated[Path | None, of(OUTPUT)] = None,
    csv: Csv = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Recommend an attention schedule for a layer or a hybrid, and rank all that apply by time; or rank collectives.

    Example: tasp-lab compare mi300x-8 --seq 32Ki --heads 32 --kv-heads 8 --mask causal --pass both

    Example: tasp-lab compare mi300x-8 --seq 16Ki --kv-heads 8 --mask causal --pass both --explain tasp --plot why.png

    Example: tasp-lab compare full-mesh:8 --seq 4Ki --heads 8 --compute timed:1000TFLOP/s --validate 2

    Example: tasp-lab compare h100-2x4 --seq 16Ki --heads 8 --mask causal --tune

    Example: tasp-lab compare h100-8 --seq 64Ki --kv-heads 8 --mask causal --kind all --layers LLSLLS

    Example: tasp-lab compare h100-2x8 --seq 64Ki --kv-heads 8 --versus nic.bandwidth=x0.5 --versus b200-2x8

    Example: tasp-lab compare h100-4x8 --seq 128Ki --heads 32 --kv-heads 8 --failures

    Example: tasp-lab compare torus:4x4 --shard-bytes 4MiB

    Args:
        schedule: Compare only these; repeatable.
        tune: Search the options of each schedule for the shortest time; dtypes are not varied.
        every: Also simulate schedules that cannot be recommended, by their lower bounds or as they do not fit.
        prefer: What decides between schedules that are expected to be equally fast.
        versus: Compare with a change: overrides as in --set and "without nic.3" as in --without, several with commas,
            or another machine; repeatable.
        failures: Instead show what each failure of a GPU, NIC, port, link or node costs, and what to replace first.
        search: Also search a schedule as in search, write it to this file, such as found.json, and compare it.
        validate: Also run this many of the fastest schedules, and the fastest single ring.
        fabric: Where --validate runs ranks, see validate.
        repeat: Timed repetitions of each schedule.
        explain: Also show where this schedule, such as tasp, spends its time beside the recommended one.
        plot: Plot the two timelines of --explain to this file (.png, .svg or .pdf).
    """
    if validate < 0:
        raise QuantityError(f"validate: {validate}, expected 0 or more schedules to run")
    if csv is not None:
        check_writable(csv)
    if search is not None:
        check_schedule_file("search", search)
    if plot is not None and explain is None:
        raise QuantityError("plot: draws two schedules, expected --explain NAME beside it")
    check_outputs(plot=plot, topology=topology)
    further = {"tune": tune, "all": every, "versus": versus, "validate": validate, "search": search is not None,
               "explain": explain is not None}  # fmt: skip
    if shard_bytes is not None:
        layered = further | {"prefer": prefer != "memory", "failures": failures}
        for name in (name for name, given in layered.items() if given):
            raise QuantityError(f"{name}: applies to layers, not to a collective of --shard-bytes {shard_bytes}")
        _compare_collectives(topology, shard_bytes, schedule, question, csv, wide, json)
        return
    if failures:
        for name in (name for name, given in further.items() if given):
            raise QuantityError(f"failures: beside --{name}, expected one of them")
        if question.layer.kind == "all":
            raise ScheduleError("failures: kind all has several rankings, expected softmax, linear or hybrid")
        from tasp_lab.prediction.failures import failures as costs

        with limited_memory(), Progress(lines_only=json) as progress:
            cost = costs(question.load(topology), question.layer.workloads()[0], schedule, prefer=prefer,
                         jobs=min(2, usable_cores()), progress=progress.line, count=progress.count,
                         **question.settings())  # fmt: skip
        if csv is not None:
            write_rows(cost.records(), csv)
        tell(cost, json, wide=wide)
        return
    from tasp_lab.prediction import compare as comparison
    from tasp_lab.prediction.question import question_of
    from tasp_lab.prediction.versus import is_change
    from tasp_lab.workload.models.catalogue import load_model

    # Processes that run schedules would inherit the limit.
    limit: AbstractContextManager[None] = nullcontext() if validate else limited_memory()
    with limit, Progress(lines_only=json) as progress:
        layer, asked = question.layer, question.settings()
        machine, layers = question.load(topology), layer.workloads()
        if explain is not None:
            if layer.kind == "all":
                raise ScheduleError("explain: kind all has several rankings, expected softmax, linear or hybrid")
            if search is None or explain != str(search):  # a file that the search will write
                comparison.question_about(explain, question_of(machine, layers[0], asked))
        # what runs ranks may have started threads, which copies of this process would lack
        jobs = 1 if validate else min(2, usable_cores())
        settings: dict[str, Any] = asked | {
            "tune": tune, "screen": not every, "prefer": prefer, "jobs": jobs,
            "progress": progress.line, "count": progress.count,
            "versus": [each if is_change(each) else question.load(each) for each in versus or ()],
        }  # fmt: skip
        if validate:
            from tasp_lab.machines.overrides import overridden_layer
            from tasp_lab.validation.fabric_runs import check_best, run_best

            for each in layers:
                work = overridden_layer(each, question.machine.overrides)
                check_best(work, question.machine.compute, validate, fabric, scale, repeat)
        if search is not None:
            from tasp_lab.schedules.registry import layer_names_on
            from tasp_lab.synthesis.search import search as find

            if layer.kind == "all":
                raise ScheduleError("kind all with a search, expected softmax")
            searched = find(machine, layers[0], progress=progress.line, **asked)
            settings["known"] = searched.ranking.candidates
            searched.save(search)  # first: the comparison reads the file as any other schedule
            schedule = [*(schedule or layer_names_on(searched.answer.world_size, layers[0])), str(search)]
        found: Ranking | Reports[Ranking]
        if layer.kind == "all":
            found = comparison.compare_kinds(machine, layers, schedule, **settings)
        else:
            found = comparison.compare(machine, layers[0], schedule, **settings)
            found = found if layer.model is None else replace(found, model=load_model(layer.model))
        found = run_best(found, validate, fabric, scale, repeat, progress.line) if validate else found
        if not all(each.is_reporter for each in ([found] if isinstance(found, comparison.Ranking) else found)):
            return
        explained = None
        if isinstance(found, comparison.Ranking):
            if jobs > 1 and found.recommendation:
                found.recommendation.look_further(jobs)  # what only the output needs
            explained = None if explain is None else found.explain(explain)
        if csv is not None:
            write_rows(found.records(), csv)
        if explained is not None and plot is not None:
            write_picture(explained.plot(), plot)
        # Results simulate more while they are printed, so this is inside of the limit.
        document = found.to_dict() if json else {}
        parts = [] if json else [*found.parts()]
        if explained is not None:
            document |= {"explained": explained.to_dict()} if json else {}
            parts += [] if json else explained.parts()
    if json:
        print_json(document)
    else:
        print_parts(parts, wide=wide)


def _compare_collectives(
    topology: str, shard_bytes: str, schedules: list[str] | None, question: PredictionChoice, csv: Path | None,
    wide: bool, json: bool,
) -> None:  # fmt: skip
    from tasp_lab.prediction.predict import compare_collectives

    with limited_memory(), Progress(lines_only=json) as progress:
        size = question.work(shard_bytes)
        assert isinstance(size, int), "a collective"
        found = compare_collectives(question.load(topology), size, schedules, progress=progress.line,
                                    **question.settings())  # fmt: skip
        if csv is not None:
            write_rows(found.records(), csv)
        tell(found, json, wide=wide)


EFFORT = 400
"""Simulated passes, as in `tasp_lab.synthesis.search`, which help does not import."""


def search(
    topology: TopologyText,
    /,
    *,
    question: PredictionChoice = DEFAULT_PREDICTION,
    effort: Annotated[int, whole(RUN)] = EFFORT,
    jobs: Annotated[int, whole(RUN)] = 1,
    output: Annotated[Path | None, shown(OUTPUT)] = None,
    plot: Plot = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Find an attention schedule for a layer that is faster than all that have a name.

    Example: tasp-lab search h100-2x8 --seq 64Ki --kv-heads 8 --mask causal --pass both --output found.json

    Example: tasp-lab predict h100-2x8 --schedule found.json --seq 64Ki --kv-heads 8 --mask causal --pass both

    Args:
        effort: The most passes that are simulated, besides those of named schedules.
        jobs: Processes; the result does not depend on their number.
        output: Write the schedule to this file, such as found.json: a name for --schedule in every command.
    """
    from tasp_lab.prediction.captions import software, title_of
    from tasp_lab.synthesis.search import NAME
    from tasp_lab.synthesis.search import search as find

    if output is not None:
        check_schedule_file("output", output)
    check_outputs(trace=None, plot=plot, topology=topology)
    with limited_memory(), Progress(lines_only=True) as progress:
        machine, work = question.load(topology), question.layer.workload()
        found = find(machine, work, effort=effort, workers=jobs, progress=progress.line, events=plot is not None,
                     name=NAME if output is None else str(output), **question.settings())  # fmt: skip
        document = found.to_dict() if json else {}
    if output is not None:
        found.save(output)
        progress.line(f"schedule: {output}")
    if plot is not None:
        timelines = [each.timeline for each in found.answers]
        title = title_of(found.answer, f"{found.answer.topology}{software(found.answer.on)}")
        write_timelines(timelines, None, plot, title, [""] * len(timelines))
    if json:
        print_json(document)
    else:
        print_parts(found.parts(), wide=wide)


def step(
    topology: TopologyText,
    /,
    *,
    model: Annotated[str, of(WORK)],
    seq: Annotated[str, quantity(WORK)],
    schedule: Annotated[str | None, of(WORK)] = None,
    batch: Annotated[int, whole(WORK)] = 1,
    layout: LayoutChoice = DEFAULT_LAYOUT,
    passes: Annotated[Literal["both", "forward"], of(WORK, name="--pass")] = "both",
    setting: StepMachine = DEFAULT_STEP_MACHINE,
    fused: Annotated[bool | None, of(WORK)] = None,
    buffers: Annotated[int, whole(PASSES)] = DEFAULT_BUFFERS,
    stages: Annotated[int | None, whole(PASSES)] = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Predict a whole step of a model: time, tokens per second, MFU and GPU memory. Less checked than layers.

    Example: tasp-lab step h100-8 --model llama-3-8b --seq 128Ki

    Example: tasp-lab step h100-8 --model llama-3-8b --seq 128Ki --schedule tasp

    Example: tasp-lab step h100-2x8 --model qwen3-8b --seq 64Ki --schedule ulysses --cp 8 --checkpointing none

    Example: tasp-lab step mi300x-8 --model llama-3-8b --seq 32Ki --schedule ulysses --no-fsdp --microbatches 4

    Example: tasp-lab step h100-8x8 --model llama-3-70b --seq 64Ki --schedule ulysses --tp 4 --cp 2 --pp 4

    Args:
        model: The model, such as llama-3-8b, or a model file.
        seq: Positions of a sequence: 8192 or 128Ki (131072).
        schedule: The attention schedule of each context group, as in predict; of a hybrid such as lasp-2+ulysses.
            Default: the one that compare recommends for a layer.
        batch: Sequences of a replica in a micro-batch.
        passes: both: a training step; forward: all layers once, without optimiser states.
        fused: Whether norms, rotary positions and activations are fused, by a compiler or by kernels of a library, or
            eager. Default: as with the stack; without one fused.
        buffers: Receive buffers of a rank, as in predict.
        stages: Parts in which the keys of direct-attention arrive, or the heads of staged-ulysses.
    """
    from tasp_lab.prediction.predict_step import predict_step
    from tasp_lab.schedules.attention.options import AttentionOptions

    with limited_memory():
        found = predict_step(
            model=model, sequence=seq, schedule=schedule, layout=layout.layout(), batch=batch, passes=passes,
            options=AttentionOptions(buffers=buffers, stages=stages), fused=fused, progress=print_progress,
            **setting.settings(topology),
        )  # fmt: skip
    tell(found, json, wide=wide)
