"""``tasp-lab study check`` and ``tasp-lab study run``."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.options import OUTPUT, RUN, Json, whole
from tasp_lab.cli.study_progress import StudyProgress
from tasp_lab.core.progress import print_progress

StudyFile = Annotated[Path, Parameter(help="A study, see docs/studies.md.")]
Yes = Annotated[bool, Parameter(negative=(), show_default=False, group=RUN, help="Also run more than 100,000 points.")]


def check(
    file: StudyFile,
    /,
    *,
    estimate: Annotated[
        bool, Parameter(group=RUN, help="Time a point of each machine, what-if variant and schedule.")
    ] = True,
    json: Json = False,
) -> None:
    """Check a study without running it: names, the number of points, the time that they will take.

    Example: tasp-lab study check longctx.toml
    """
    from tasp_lab.study.check import check_study
    from tasp_lab.study.file import load_study

    found = check_study(load_study(file), estimate=estimate, progress=print_progress)
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())


def run(
    file: StudyFile,
    /,
    *,
    output: Annotated[
        Path | None, Parameter(group=OUTPUT, help="The folder of rows and reports; named after the study if not given.")
    ] = None,
    jobs: Annotated[int | None, whole("Worker processes; as many as there are cores if not given.", RUN)] = None,
    dask: Annotated[
        str | None,
        Parameter(group=RUN, help="Scheduler of a Dask cluster, like tcp://host:8786, instead of --jobs."),
    ] = None,
    screen: Annotated[
        bool,
        Parameter(
            negative=(),
            show_default=False,
            group=RUN,
            help="Do not simulate a schedule whose lower bound is above the time of another one.",
        ),
    ] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Answer all points of a study that have no row yet; the same command goes on after an interrupt.

    Example: tasp-lab study run longctx.toml --jobs 2
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
            from tasp_lab.study.dask_workers import dask_executor

            workers["executor"], workers["jobs"] = stack.enter_context(dask_executor(dask))
        shown = stack.enter_context(StudyProgress(lines_only=json))
        command = shlex.join(["tasp-lab", "study", "run", str(file), "--output", str(folder)])
        try:
            found = run_study(study, folder, screen=screen, command=command, done=shown.done, **workers)
        except KeyboardInterrupt:
            shown.stop()
            print_progress(f"{shown.ended:,} of {shown.total:,} points are kept in {folder}; the same command goes on")
            raise
    if json:
        print_json(found.to_dict())
    else:
        print_parts(found.parts())
    sys.stdout.flush()
