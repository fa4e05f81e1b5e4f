"""``tasp-lab study``: check and run studies, and show their results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter

from tasp_lab.cli.console import Progress, print_json, tell
from tasp_lab.cli.options import OUTPUT, RUN, WORK, Json, Wide, flag, of, quantity, whole
from tasp_lab.core.progress import print_progress

study = App(name="study", sort_key=7, help="Studies of many points: the fastest schedules, crossovers, sensitivity.")

# ------------------------------------------------------------------------------------------------ check and run

StudyFile = Annotated[Path, Parameter(help="The file of a study, see docs/studies.md.")]


@study.command
def check(
    file: StudyFile,
    /,
    *,
    estimate: Annotated[bool, of(RUN)] = True,
    json: Json = False,
) -> None:
    """Check the file of a study: names, number of points, estimated run time.

    Example: tasp-lab study check longctx.toml

    Args:
        estimate: Estimate the run time, by some points of each schedule.
    """
    from tasp_lab.study.check import check_study
    from tasp_lab.study.file import load_study

    tell(check_study(load_study(file), estimate=estimate, progress=print_progress), json)


@study.command
def run(
    file: StudyFile,
    /,
    *,
    output: Annotated[Path | None, of(OUTPUT)] = None,
    jobs: Annotated[int | None, whole(RUN)] = None,
    dask: Annotated[str | None, of(RUN)] = None,
    screen: Annotated[bool, flag(RUN)] = False,
    yes: Annotated[bool, flag(RUN)] = False,
    json: Json = False,
) -> None:
    """Predict all points of a study that have no row yet; after an interrupt, run it again to go on.

    Example: tasp-lab study run longctx.toml --jobs 2

    Args:
        output: The folder of rows and reports. Default: the name of the study.
        jobs: Worker processes. Default: the number of cores.
        dask: Scheduler of a Dask cluster, such as tcp://host:8786, instead of --jobs.
        screen: Do not simulate a schedule whose lower bound exceeds the time of another.
        yes: Run also more than 100,000 points.
    """
    from tasp_lab.core.errors import StudyError
    from tasp_lab.core.process import usable_cores
    from tasp_lab.study.check import check_size, check_study
    from tasp_lab.study.file import load_study
    from tasp_lab.study.run import run_study

    if dask is not None and jobs is not None:
        raise StudyError("--jobs and --dask: expected one of them")
    study = load_study(file)
    folder = Path(study.name) if output is None else output
    check_size(study, yes=yes)
    if not yes:
        check_study(study, estimate=False)
    with ExitStack() as stack:
        workers: dict[str, Any] = {"jobs": usable_cores() if jobs is None else jobs}
        if dask is not None:
            from tasp_lab.study.run import dask_executor

            workers["executor"], workers["jobs"] = stack.enter_context(dask_executor(dask))
        shown = stack.enter_context(Progress(lines_only=json))
        command = shlex.join(["tasp-lab", "study", "run", str(file), "--output", str(folder)])
        try:
            found = run_study(study, folder, screen=screen, command=command, done=shown.points, **workers)
        except KeyboardInterrupt:
            shown.stop()
            points = f"{shown.ended:,} of {shown.total:,} points" if shown.total else "points that have ended"
            print_progress(f"{points} are kept in {folder}; the same command goes on")
            raise
    tell(found, json)
    sys.stdout.flush()


# ------------------------------------------------------------------------------------- tables, pictures, reports

SHOWN = Group("Shown", sort_key=1)
FILTER = Group("Rows", sort_key=2)

Folder = Annotated[Path, Parameter(help="The folder of a study.")]
Where = Annotated[
    str | None,
    of(FILTER, "Only these rows, like 'seq >= 64Ki and machine == \"h100-8\"': columns, numbers, texts in quotes, "
       "comparisons, in, and, or, not, + - * /."),
]  # fmt: skip
Baseline = Annotated[
    str | None,
    of(FILTER, "What speed-ups refer to: a schedule, or COLUMN=VALUE such as machine=h100-8. Default: that of the "
       "study."),
]  # fmt: skip


def split(given: Iterable[str] | None) -> list[str]:
    """Names with commas between them, one by one.

    >>> split(["machine,model", "seq"]), split(None)
    (['machine', 'model', 'seq'], [])
    """
    return [name.strip() for text in given or () for name in text.split(",") if name.strip()]


@study.command
def show(
    folder: Folder,
    /,
    *,
    rows: Annotated[list[str] | None, flag(SHOWN)] = None,
    columns: Annotated[list[str] | None, flag(SHOWN)] = None,
    value: Annotated[str | None, of(SHOWN)] = None,
    where: Where = None,
    baseline: Baseline = None,
    sort: Annotated[str | None, of(FILTER, allow_leading_hyphen=True)] = None,
    limit: Annotated[int | None, whole(FILTER)] = None,
    csv: Annotated[Path | None, of(OUTPUT)] = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Show the fastest schedules of a study, or a pivot table.

    Example: tasp-lab study show longctx

    Example: tasp-lab study show longctx --rows machine,model --columns seq --value winner --where "seq >= 64Ki"

    Example: tasp-lab study show longctx --rows schedule --columns seq --where "machine == 'h100-8'" --sort 64Ki

    Args:
        rows: Columns that become the rows of a pivot table. Several with commas.
        columns: Columns that become its columns. Several with commas.
        value: What its cells are: a column such as time_s, speedup, exposed_share, bound_share or memory_bytes, or
            winner. If not given, time_s where schedules are among rows or columns, else winner.
        sort: Column to sort by; -NAME for descending order.
        limit: Maximum number of rows.
        csv: Also write the table to this CSV file.
    """
    from tasp_lab.cli.outputs import write_rows
    from tasp_lab.core.files import check_writable
    from tasp_lab.study.folder import StudyFolder
    from tasp_lab.study.table import table

    if csv is not None:
        check_writable(csv)
    found = table(
        StudyFolder(folder), split(rows), split(columns), value, where=where, baseline=baseline, sort=sort, limit=limit
    )
    if csv is not None:
        write_rows(found.rows, csv)
    tell(found, json, wide=wide)


@study.command
def plot(
    folder: Folder,
    /,
    *,
    x: Annotated[str | None, of(SHOWN)] = None,
    y: Annotated[str, of(SHOWN)] = "time_s",
    lines: Annotated[str, of(SHOWN)] = "schedule",
    panels: Annotated[list[str] | None, flag(SHOWN)] = None,
    where: Where = None,
    baseline: Baseline = None,
    output: Annotated[Path | None, of(OUTPUT)] = None,
    json: Json = False,
) -> None:
    """Plot times with intervals and bounds, or a map of the fastest schedules over two axes.

    Example: tasp-lab study plot longctx --x seq --y time_s --panels machine,model --output times.svg

    Example: tasp-lab study plot longctx --x seq --y machine --output winners.png

    Args:
        x: The horizontal axis. Default: the first with numbers.
        y: A quantity such as time_s, speedup or exposed_share, or a second axis such as machine, for a map of the
            fastest schedules.
        lines: The column with one line per value.
        panels: Columns with one panel per value. Default: all others that vary. Several with commas.
        output: The file (.png, .svg or .pdf). Default: an SVG in the folder plots of the study.
    """
    from tasp_lab.cli.outputs import check_outputs, write_picture
    from tasp_lab.study.chart import chart
    from tasp_lab.study.folder import StudyFolder

    if output is not None:
        check_outputs(plot=output)
    several = None if panels is None else split(panels)
    found = chart(StudyFolder(folder), x, y, lines, several, where=where, baseline=baseline)
    path = found.default_path() if output is None else output
    write_picture(found.figure(), path)
    if json:
        print_json(found.to_dict() | {"output": str(path)})


@study.command
def report(
    folder: Folder,
    /,
    *,
    where: Where = None,
    baseline: Baseline = None,
    output: Annotated[Path | None, of(OUTPUT)] = None,
    json: Json = False,
) -> None:
    """Write a report of a study, one page of HTML that needs no network: tables, plots, sources.

    Example: tasp-lab study report longctx --output longctx.html

    Args:
        output: The file. Default: report.html in the folder of the study.
    """
    from tasp_lab.core.errors import OutputError
    from tasp_lab.core.files import check_writable
    from tasp_lab.study.folder import REPORT, StudyFolder
    from tasp_lab.study.report import report as report_of

    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise OutputError(f"cannot write {output}: expected a name that ends in .html")
    run = StudyFolder(folder)
    check_writable(run.path / REPORT if output is None else output)
    found = report_of(run, where=where, baseline=baseline)
    path = found.write(output)
    print_progress(f"report: {path}")
    if json:
        print_json(found.to_dict() | {"output": str(path)})


# -------------------------------------------------------------------------------- crossovers and sensitivities

FIND = Group("Question", help="Instead of [find] in the file of the study.", sort_key=2)

StudyPath = Annotated[Path, of(WORK, "The file or the folder of a study.")]
Between = Annotated[list[str] | None, flag(FIND, "One of the two schedules; given twice.", name="--between")]
At = Annotated[
    str | None,
    of(FIND, "Values of axes that select points, such as machine=h100-8,seq=128Ki; names are optional."),
]


@study.command
def crossover(
    path: StudyPath,
    /,
    *,
    at: At = None,
    along: Annotated[str | None, of(FIND)] = None,
    between: Between = None,
    margin: Annotated[str | None, quantity(FIND)] = None,
    from_: Annotated[str | None, of(FIND, name="--from", allow_leading_hyphen=True)] = None,
    to: Annotated[str | None, quantity(FIND)] = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Find the values of an axis at which the faster of two schedules changes.

    It tries the values of the study, then bisects between them. The interval contains the crossover with 95 %
    probability.

    Example: tasp-lab study crossover longctx.toml

    Example: tasp-lab study crossover longctx/ --at h100-8x8 --between tasp --between ulysses --margin 5%

    Example: tasp-lab study crossover longctx/ --along nic.bandwidth --from x0.25 --to x4

    Args:
        along: A numeric axis: seq, batch, heads, kv_heads, head_dim, nodes, buffers, nic.bandwidth, ...
        margin: Times that differ by less count as equal, like 5%; 0 if not given.
        from_: Lower end of the axis, such as 8Ki, or x0.5 for an override.
        to: Upper end of the axis.
    """
    from tasp_lab.study.crossover import find_crossovers
    from tasp_lab.study.lookup import study_at

    asked, evaluate = study_at(path)
    options = {"along": along, "between": between, "margin": margin, "from": from_, "to": to, "at": at}
    find = asked.find.get("crossover", {}) | {name: value for name, value in options.items() if value is not None}
    with Progress(lines_only=json) as shown:
        found = find_crossovers(asked.points(), evaluate, find, shown.line)
    tell(found, json, wide=wide)


@study.command
def sensitivity(
    path: StudyPath,
    /,
    *,
    at: At = None,
    quantity: Annotated[str | None, of(FIND, name="--of")] = None,
    between: Between = None,
    by: Annotated[str | None, of(FIND)] = None,
    top: Annotated[int | None, whole(OUTPUT)] = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """List the parameters of a machine that change the result most at one point of a study.

    Example: tasp-lab study sensitivity longctx.toml --at machine=h100-8x8,model=llama-3-8b,seq=128Ki

    Example: tasp-lab study sensitivity longctx/ --at h100-8x8,128Ki --of time --between tasp

    Args:
        quantity: What varies: speedup over the baseline of the study, or time.
        by: Intervals of parameters: 'source interval', 'source interval, else 20%', or 20% for all.
        top: Number of parameters shown, the largest effects first. Default: 5.
    """
    from tasp_lab.study.lookup import study_at
    from tasp_lab.study.sensitivity import find_sensitivity

    asked, _ = study_at(path)
    options = {"of": quantity, "between": between, "at": at, "by": by, "top": top}
    find = asked.find.get("sensitivity", {}) | {name: value for name, value in options.items() if value is not None}
    with Progress(lines_only=json) as shown:
        found = find_sensitivity(asked.points(), find, asked.baseline, shown.line)
    tell(found, json, wide=wide)
