"""``tasp-lab validate``, ``gpu-check`` and ``doctor``: schedules on processes, GPUs step by step, and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasp_lab.cli.console import print_json, print_parts, tell
from tasp_lab.cli.options import (
    OUTPUT,
    RUN,
    WORK,
    Backend,
    Json,
    Plot,
    Scale,
    Schedules,
    ShardBytes,
    TopologyText,
    Trace,
    Wide,
    flag,
    of,
    whole,
)
from tasp_lab.cli.options_layer import DEFAULT_QUESTION, QuestionChoice
from tasp_lab.cli.outputs import check_outputs, write_timelines
from tasp_lab.core.choices import BackendKind, FabricKind, TransportKind
from tasp_lab.core.errors import ProfileError, RunError
from tasp_lab.core.progress import print_progress

if TYPE_CHECKING:
    from tasp_lab.validation.gpu_record import Record


def validate(
    topology: TopologyText,
    /,
    *,
    schedule: Schedules,
    shard_bytes: ShardBytes = None,
    question: QuestionChoice = DEFAULT_QUESTION,
    fabric: Annotated[FabricKind, of(RUN)] = "emulated",
    scale: Scale = None,
    repeat: Annotated[int, whole(RUN)] = 5,
    transport: Annotated[TransportKind, of(RUN)] = "auto",
    backend: Backend = "auto",
    trace: Trace = None,
    plot: Plot = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Run a collective or an attention layer on real processes and compare it with its prediction.

    Example: tasp-lab validate full-mesh:8 --schedule ring --schedule multi-ring --shard-bytes 1MiB

    Example: tasp-lab validate full-mesh:8 --schedule ring-attention --schedule tasp --seq 8192 --compute timed:2e9

    Args:
        fabric: Where ranks run. emulated: network namespaces with shaped links; local: plain processes; torchrun: the
            processes of a torchrun job.
        repeat: Timed repetitions of each schedule.
        transport: How ranks send blocks.
    """
    from tasp_lab.prediction.captions import title_of
    from tasp_lab.validation import validate as comparison

    settings = question.settings()
    machine = question.numbers.load(topology, "ideal")  # the fabric has a library of its own
    work = question.work(shard_bytes)
    if (stack := settings.pop("stack")) is not None:
        raise ProfileError(f"stack {stack!r}: ranks run on their own, expected none; see predict and compare")
    check_outputs(trace=trace, plot=plot, topology=topology)
    found = comparison.validate(
        machine,
        schedule,
        work,
        **settings,
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
    title = title_of(shown[0].prediction, shown[0].prediction.topology)
    write_timelines(timelines, trace, plot, f"{title}: predicted and measured")
    tell(found, json, wide=wide)


def gpu_check(
    machine: Annotated[str | None, of(WORK)] = None,
    /,
    *,
    one: Annotated[bool, flag(RUN)] = False,
    ranks: Annotated[int | None, whole(RUN)] = None,
    schedule: Annotated[list[str] | None, flag(WORK, name="--schedule")] = None,
    seed: Annotated[int | None, whole(RUN)] = None,
    quick: Annotated[bool, flag(RUN)] = False,
    measure: Annotated[bool, flag(RUN)] = False,
    minutes: Annotated[int | None, whole(RUN)] = None,
    backend: Annotated[BackendKind, of(RUN)] = "auto",
    output: Annotated[Path, of(OUTPUT)] = Path("gpu-check"),
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Check the GPUs of a torchrun job step by step, and stop at the first failure; or the runtime on one GPU or none.

    Example: torchrun --nproc-per-node 8 -m tasp_lab.cli gpu-check h100-8 --quick

    Example: tasp-lab gpu-check --one --schedule tasp

    Example: tasp-lab gpu-check h200-8 --one --measure --quick --output record

    Args:
        machine: The machine, such as h100-8, or a topology file. Default: a full mesh of the ranks.
        one: Check with all ranks in this process on one GPU, or on the processor; without torchrun.
        ranks: With --one: how many ranks. Default: those of the machine, else 4.
        schedule: With --one: run only these; repeatable.
        seed: With --one: seed of the orders of ranks. Default: 0.
        quick: Smaller sizes and fewer runs.
        measure: With --one, on a GPU: first write tables of what one GPU settles of predictions.
        minutes: With --measure: the time for all. Default: 15.
        backend: auto: nccl (RCCL on AMD); gloo checks the logic on CPUs.
        output: The folder of the record, gpu-check.json and gpu-check.txt.
    """

    def show(record: Record) -> None:
        tell(record, json, wide=wide)

    if minutes is not None and not measure:
        raise RunError("--minutes: only with --measure, see tasp-lab gpu-check --help")
    if one:
        from tasp_lab.validation.gpu_check import gpu_check_one
        from tasp_lab.validation.measurements import DEFAULT_MINUTES

        if backend != "auto":
            raise RunError(f"--backend {backend}: with --one no process is joined, expected none")
        found = gpu_check_one(
            machine, ranks=ranks, schedules=schedule or (), seed=seed or 0, quick=quick, output=output,
            minutes=(DEFAULT_MINUTES if minutes is None else minutes) if measure else None,
            progress=print_progress, show=show,
        )  # fmt: skip
        if found.error is not None:
            if not json:
                show(found)
            error = RunError(found.error)
            error.document = found.to_dict()
            raise error
        show(found)
        return
    from tasp_lab.validation.gpu_check import gpu_check as check

    for name, value in {"ranks": ranks, "schedule": schedule, "seed": seed, "measure": measure or None}.items():
        if value is not None:
            raise RunError(f"--{name}: only with --one, see tasp-lab gpu-check --help")
    found = check(machine, quick=quick, output=output, backend=backend, progress=print_progress, show=show)
    if found.is_reporter:
        show(found)


def doctor(*, json: Json = False) -> None:
    """Report installed libraries and what this machine can run.

    It also prints the folders of the imported packages.

    Example: tasp-lab doctor
    """
    from tasp_lab.validation.doctor import examine

    examination = examine()
    if json:
        print_json(examination)
        return
    for name, finding in examination.items():
        if isinstance(finding, dict):
            installed = (f"  {key}: {'not installed' if value is None else value}" for key, value in finding.items())
            print_parts([name, *installed])
        else:
            print_parts([f"{name}: {finding}"])
