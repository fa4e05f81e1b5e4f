"""``tasp-lab accuracy`` and ``calibrate``: measured tables beside their predictions, and constants from them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group

from tasp_lab.cli.console import Progress, print_json, print_parts, tell
from tasp_lab.cli.options import (
    DEFAULT_SAMPLES,
    MACHINE,
    OUTPUT,
    RUN,
    WORK,
    Backend,
    Json,
    SamplingChoice,
    Scale,
    Wide,
    flag,
    of,
    plot,
    whole,
)
from tasp_lab.cli.outputs import check_outputs, write_picture
from tasp_lab.core.choices import FabricKind
from tasp_lab.core.errors import OutputError, QuantityError
from tasp_lab.core.files import check_writable
from tasp_lab.core.process import usable_cores
from tasp_lab.core.progress import print_progress

if TYPE_CHECKING:
    from tasp_lab.measure.fit.acceptance import Fitted


def accuracy(
    *paths: Annotated[Path, of(WORK)],
    profile: Annotated[str | None, of(MACHINE)] = None,
    plot: Annotated[Path | None, plot("the errors of predictions")] = None,
    pairs: Annotated[bool, flag(OUTPUT)] = False,
    jobs: Annotated[int | None, whole(RUN)] = None,
    sampling: SamplingChoice = DEFAULT_SAMPLES,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Compare measured tables with their predictions.

    A table of a collective is a log of nccl-tests, or a CSV with the columns size_B and time_us under header lines: #
    profile: h100-2x8, # collective: all_gather, # ranks: 16, # source: ... Tables of attention layers and of kernels
    are recognised by their columns. Tables that cannot be compared are listed with the reason.

    Example: tasp-lab accuracy my-cluster/

    Example: tasp-lab accuracy all_gather.log --profile h100-8

    Args:
        paths: Files and folders. Default: the tables of tasp-lab.
        profile: The machine of tables and logs that do not name one: h100-8, h100 or my.toml:2x8.
        pairs: With --json, list all pairs of rows that did the same work, with both ratios and the probability.
        jobs: Worker processes. Default: the number of cores.
    """
    from tasp_lab.machines.sampling import FEW_SAMPLES, Sampling
    from tasp_lab.measure import accuracy as report

    check_outputs(plot=plot)
    workers = usable_cores() if jobs is None else jobs
    if workers < 1:
        raise QuantityError(f"jobs: {workers}, expected 1 or more")
    chosen = Sampling(FEW_SAMPLES.samples if sampling.samples is None else sampling.samples, sampling.seed)
    with Progress(lines_only=json) as shown:
        found = report.accuracy(*paths, profile=profile, sampling=chosen, pairs=pairs, jobs=workers, count=shown.count)
    if plot is not None:
        from tasp_lab.plots.accuracy import draw_tables

        write_picture(draw_tables(found), plot)
    tell(found, json, wide=wide)


_FILES = Group("Files", help="Without --fabric.", sort_key=2)


def calibrate(
    *measurements: Annotated[str, of(WORK)],
    profile: Annotated[str | None, of(_FILES)] = None,
    fit: Annotated[tuple[str, ...], flag(_FILES)] = (),
    algorithm: Annotated[Literal["ring"] | None, of(_FILES)] = None,
    in_place: Annotated[bool, flag(_FILES)] = False,
    kernels: Annotated[tuple[str, ...], flag(_FILES, consume_multiple=True)] = (),
    fabric: Annotated[FabricKind | None, of(RUN)] = None,
    scale: Scale = None,
    backend: Backend = "auto",
    output: Annotated[Path | None, of(OUTPUT)] = None,
    force: Annotated[bool, flag(OUTPUT)] = False,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Fit a profile to your own measurements, or measure a machine.

    Prints the parameters that the measurements identify, with confidence intervals. A fit that predicts no better
    than the profile, on all rows or on held-out rows, is not written; the exit code is 2. With --fabric, it measures
    links and launch cost between pairs of ranks and writes a machine.

    Example: tasp-lab calibrate all_gather.log sendrecv.log --profile h100-8 --output my.toml

    Example: tasp-lab calibrate --kernels times.csv --profile h100-8 --output kernel.toml

    Example: tasp-lab calibrate full-mesh:4 --fabric emulated --output my.json

    Args:
        measurements: Logs of nccl-tests, rccl-tests, TransferBench or p2pBandwidthLatencyTest, CSV tables, or folders
            of them; with --fabric a machine.
        profile: The profile to start from, and the machine of logs: h100-8, h100-2x8 or my.toml:2x8.
        fit: A parameter to fit, repeatable. Default: all that the measurements identify.
        algorithm: The algorithm of AllReduce if the measurement does not name it.
        in_place: Use in-place columns of logs.
        kernels: Fit an attention kernel to tables of its times, or live: time it on this machine.
        fabric: Measure running ranks instead of reading files, see validate.
        output: File of the profile (.toml), or with --fabric of the machine (.toml, .json).
        force: Also write a fit that predicts no better than the profile.
    """
    from tasp_lab.measure.calibrate import calibrate as calibrate_files
    from tasp_lab.prediction.inputs import wires
    from tasp_lab.validation.fabrics import measure_fabric

    of_files: dict[str, Any] = {"profile": profile, "fit": fit, "algorithm": algorithm, "in_place": in_place}
    if force and (output is None or fabric is not None):
        raise QuantityError("--force: for a fit to files that --output writes")
    _check_output((*measurements, *kernels), output, (".toml",) if fabric is None else (".toml", ".json"))
    if kernels:
        from tasp_lab.measure.calibrate_kernels import calibrate_kernels

        not_taken = {"measurements": measurements, "--fit": fit, "--algorithm": algorithm, "--fabric": fabric}
        _refuse(not_taken, "not with --kernels, which takes tables of kernel times only")
        _finish(calibrate_kernels(kernels, profile, print_progress), output, json, wide, "kernel", force)
        return
    if fabric is None:
        _refuse({"scale": scale is not None, "backend": backend != "auto"}, "applies to a fabric only")
        fitted = calibrate_files(*measurements, **of_files, progress=print_progress)
        _finish(fitted, output, json, wide, "profile", force)
        return
    given = {name.replace("_", "-"): value for name, value in of_files.items()}
    _refuse(given, "for measurements in files only, not with a fabric")
    if len(measurements) != 1:
        raise QuantityError(f"fabric {fabric}: {len(measurements)} machines, expected one")
    measured = measure_fabric(wires(measurements[0]), fabric, scale, print_progress, backend)
    if measured.is_reporter:
        _finish(measured, output, json, wide, "machine")


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise `QuantityError` for options that are given but not taken."""
    if given := [name for name, value in options.items() if value]:
        raise QuantityError(f"{', '.join(given)}: {why}")


def _finish(found: Fitted[Any], output: Path | None, json: bool, wide: bool, what: str, force: bool = False) -> None:
    """Show what was found, and write it if there is an output."""
    if not json:
        print_parts(found.parts(), wide=wide)
    if output is not None:
        found.save(output, force)
    if json:
        print_json(found.to_dict() | {"output": None if output is None else str(output)})
    elif output is not None:
        print_progress(f"{what}: {output}")


def _check_output(measurements: Sequence[str], output: Path | None, endings: tuple[str, ...]) -> None:
    if output is None:
        return
    if output.suffix.lower() not in endings:
        raise OutputError(f"cannot write {output}: expected a name that ends in {' or '.join(endings)}")
    if os.path.realpath(output) in {os.path.realpath(text) for text in measurements}:
        raise OutputError(f"cannot write {output}: --output would replace what it is made from")
    check_writable(output)
