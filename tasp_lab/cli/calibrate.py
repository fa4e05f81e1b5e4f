"""``tasp-lab calibrate``: a profile from one's own measurements, or a machine file from ranks that run."""

from __future__ import annotations

import datetime
import json as text_of
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Parameter

from tasp_lab.catalogue import load_machine, topology_document
from tasp_lab.cli import report
from tasp_lab.cli.options import FabricKind, Json
from tasp_lab.errors import FitError, OutputError, QuantityError, TableError
from tasp_lab.output import check_writable, write_whole
from tasp_lab.profile import profile_document
from tasp_lab.rings import Say, say_nothing

if TYPE_CHECKING:
    from tasp_lab.calibrate import Calibrated
    from tasp_lab.calibrate_pairs import PairFigure
    from tasp_lab.measurements import MeasuredTable, PairTable


def calibrate(
    *measurements: Annotated[
        str,
        Parameter(
            help="Logs of nccl-tests, rccl-tests, TransferBench or p2pBandwidthLatencyTest, CSV tables, or folders of "
            "them; with --fabric a machine."
        ),
    ],
    profile: Annotated[
        str | None,
        Parameter(help="The profile to start from and, for logs, the machine: h100-8, h100-2x8, or my.toml:2x8."),
    ] = None,
    fit: Annotated[
        tuple[str, ...],
        Parameter(negative=(), help="A constant to fit, repeatable; all that the measurements tell, if not given."),
    ] = (),
    algorithm: Annotated[
        Literal["ring"] | None, Parameter(help="How AllReduce was made where the measurement does not say so.")
    ] = None,
    in_place: Annotated[bool, Parameter(negative=(), help="Use the in-place columns of logs.")] = False,
    fabric: Annotated[
        FabricKind | None, Parameter(help="Measure ranks that run, instead of reading files: see validate.")
    ] = None,
    scale: Annotated[
        float | None, Parameter(help="Bandwidth of the emulated fabric over the machine's; chosen when not given.")
    ] = None,
    output: Annotated[
        Path | None, Parameter(help="Write the profile (.toml), or with --fabric the machine (.toml, .json).")
    ] = None,
    json: Json = False,
) -> None:
    """Make a profile of one's own measurements: which constants they tell, and how surely.

    With --fabric, measure links and launch cost between pairs of ranks that run, and write them as a machine.

    Example: tasp-lab calibrate all_gather.log sendrecv.log --profile h100-8 --output my.toml

    Example: tasp-lab calibrate full-mesh:4 --fabric emulated --output my.json
    """
    _check_output(measurements, output, (".toml",) if fabric is None else (".toml", ".json"))
    if fabric is not None:
        given = {"--profile": profile, "--fit": fit, "--algorithm": algorithm, "--in-place": in_place}
        if unused := [option for option, value in given.items() if value]:
            raise QuantityError(f"{', '.join(unused)}: of measurements in files only, not with --fabric")
        _calibrate_live(measurements, fabric, scale, output, json)
        return
    if scale is not None:
        raise QuantityError("--scale: of --fabric emulated only")
    from tasp_lab.cli import calibrate_report

    paths = [Path(text) for text in dict.fromkeys(measurements)]
    found, figures, notes = calibrate_files(
        paths, profile, fit, by_rings=algorithm == "ring", in_place=in_place, say=report.say
    )
    if output is not None:
        write_whole(output, profile_document(found.profile).encode())
    if json:
        report.print_json(calibrate_report.document(found, figures, notes, output))
        return
    calibrate_report.print_calibrated(found, figures)
    if output is not None:
        report.say(f"profile: {output}")


def _check_output(measurements: Sequence[str], output: Path | None, endings: tuple[str, ...]) -> None:
    if not measurements:
        raise QuantityError("nothing to calibrate from: expected logs or CSV tables, or a machine with --fabric")
    if output is None:
        return
    if output.suffix.lower() not in endings:
        raise OutputError(f"cannot write {output}: expected a name that ends in {' or '.join(endings)}")
    if os.path.realpath(output) in {os.path.realpath(text) for text in measurements}:
        raise OutputError(f"cannot write {output}: --output would replace what it is made from")
    check_writable(output)


def calibrate_files(
    paths: Sequence[Path],
    profile: str | None,
    names: Sequence[str] = (),
    *,
    by_rings: bool = False,
    in_place: bool = False,
    say: Say = say_nothing,
) -> tuple[Calibrated, list[PairFigure], list[str]]:
    """The profile that follows from measurements in files, what tables of pairs say, and what was left out and why.

    Tables of pairs come first: what they tell is where the fit to tables of collectives starts. Without `names` all
    constants are fitted that the measurements tell; `by_rings` says that AllReduce went by rings, `in_place` that the
    in-place columns of logs are meant.

    Raises `TableError`, `ProfileError` and `FitError`.
    """
    from tasp_lab.calibrate import Calibrated, calibrate, cases_of, choose, choose_for, with_findings
    from tasp_lab.calibrate_pairs import pair_figures, pair_findings
    from tasp_lab.cli.simulated import Simulated

    tables, pairs = _read(paths, in_place)
    choice = choose(profile) if profile is not None else choose_for(tables)
    left_out: list[str] = []
    cases = cases_of(tables, choice, by_rings=by_rings, say=left_out.append)
    figures = [figure for table in pairs for figure in pair_figures(table, choice.profile)]
    of_pairs = [each for each in pair_findings(figures, choice.profile) if not names or each.name in names]
    date = datetime.date.today().isoformat()
    start = with_findings(choice.profile, of_pairs, date)
    if not cases:
        if not of_pairs:
            why = [f"{figure.table}: {figure.what}, {figure.note}" for figure in figures] + left_out
            raise FitError(f"these measurements tell no constant: {'; '.join(why) or 'there are none'}")
        return Calibrated(start, tuple(of_pairs)), figures, left_out
    for line in left_out:
        say(line)
    predict = Simulated(choice.profile, cases)
    found = calibrate(start, cases, predict, names, date=date, say=say)
    fitted = {finding.name for finding in found.findings if finding.identifiable}
    kept = tuple(finding for finding in of_pairs if finding.name not in fitted)
    others = tuple(finding for finding in found.findings if finding.name not in {each.name for each in kept})
    return replace(found, findings=kept + others, before_s=predict(choice.profile)), figures, left_out


def _read(paths: Sequence[Path], in_place: bool) -> tuple[list[MeasuredTable], list[PairTable]]:
    """The tables of collectives and of pairs in files and folders."""
    from tasp_lab.measurements import find_tables, read_nccl_tests, read_p2p_bandwidth, read_transfer_bench

    tables: list[MeasuredTable] = []
    pairs: list[PairTable] = []
    for path in paths:
        if path.is_dir() or path.suffix.lower() == ".csv":
            tables += find_tables([path], in_place=in_place)
        elif runs := read_nccl_tests(path, in_place=in_place):
            tables += runs
        elif found := read_p2p_bandwidth(path) + read_transfer_bench(path):
            pairs += found
        else:
            raise TableError(
                f"{path}: no measurement in it, expected a CSV table (.csv), or a log of nccl-tests, rccl-tests, "
                "TransferBench or p2pBandwidthLatencyTest"
            )
    return tables, pairs


def _calibrate_live(
    machines: Sequence[str], fabric: FabricKind, scale: float | None, output: Path | None, json: bool
) -> None:
    from tasp_lab.cli import calibrate_report
    from tasp_lab.cli.live import measure, measured_machine

    if len(machines) != 1:
        raise QuantityError(f"--fabric {fabric}: {len(machines)} machines, expected one")
    measured = measure(load_machine(machines[0]), fabric, scale, report.say)
    if not measured.speaks:
        return
    machine = measured_machine(measured, datetime.date.today().isoformat())
    if output is not None:
        plain = topology_document(machine)
        is_json = output.suffix.lower() == ".json"
        write_whole(output, text_of.dumps(plain, indent=1).encode() if is_json else msgspec.toml.encode(plain))
    if json:
        report.print_json(calibrate_report.live_document(measured, output))
        return
    calibrate_report.print_live(measured, machine.summary)
    if output is not None:
        report.say(f"machine: {output}")
