"""Calibration: a profile fitted to measurements in files; and its test, which predicts each collective by the others.

A fit is accepted if it predicts better than the profile it began with, also rows that it was not fitted to
(`tasp_lab.measure.fit.acceptance`). One that is not accepted is saved with `force` only.

Tables of pairs give the effective bandwidth of links: a single active pair uses a link, or a GPU's port into a switch,
alone. With all pairs active, the figures of a mesh are those of its links; on a switch, the figure of a port is the sum
of a row.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError, QuantityError, TableError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import flat
from tasp_lab.core.tables import Formats, Part, Table
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.profile import Profile, profile_document
from tasp_lab.measure.fit.acceptance import Acceptance, Fitted, folds
from tasp_lab.measure.fit.cases import Case, Simulated, cases_of, file_of, measured
from tasp_lab.measure.fit.fit_profile import Calibrated, Finding, candidates, checked_names, with_findings
from tasp_lab.measure.fit.fit_profile import calibrate as fit_profile
from tasp_lab.measure.inputs import table_inputs
from tasp_lab.measure.profiles import choose, choose_for
from tasp_lab.measure.readers import (
    MeasuredTable,
    PairTable,
    find_tables,
    parse_nccl_tests,
    parse_p2p_bandwidth,
    parse_transfer_bench,
)
from tasp_lab.measure.readers.file_position import check_is_text, read_text
from tasp_lab.prediction.provenance import Provenance, machine_constants, plain, sha256

_EXPECTED = "a CSV table (.csv), or a log of nccl-tests, rccl-tests, TransferBench or p2pBandwidthLatencyTest"


@dataclass(frozen=True)
class PairFigure:
    """Median of one table's `count` figures, with the interval of 95 % of them, in SI units.

    `what` is the table's kind, or ``latency``. `constant` is the constant that it identifies, empty for information
    only; `note` describes how the figures were measured.
    """

    table: str
    what: str
    constant: str
    note: str
    count: int
    value: float
    low: float
    high: float


def pair_figures(table: PairTable, profile: Profile) -> list[PairFigure]:
    """Figures of a table of pairs on a machine of this profile.

    One transfer at a time identifies `link_payload`, all at once `link_many_payload`. Transfers in both directions,
    those through host memory, and latencies are for information: the tools measure the latency of a waiting kernel, not
    of a wire.

    Raises `FitError` for more GPUs than a node of the profile has, and for a figure above the rate of its links.
    """
    count = len(table.bandwidth_bytes_per_s)
    if count > profile.ranks_per_node:
        raise FitError(f"{table.name}: {count} GPUs, but a node of {profile.name} has {profile.ranks_per_node}")
    constant, note = _identified(table, profile)
    others = _others(table.bandwidth_bytes_per_s)
    is_port = constant == "link_many_payload" and profile.inside == "switch"
    figures = np.nansum(others, axis=1) if is_port else others
    found = _figure(table, table.kind, constant if constant in profile.parameters else "", note, figures)
    if any(figure.constant for figure in found):
        _check_line_rate(found[0], profile)
    if table.latency_s is not None:
        note = "of a kernel that waits, not of the link"
        found += _figure(table, "latency", "", note, _others(table.latency_s))
    return found


def _identified(table: PairTable, profile: Profile) -> tuple[str, str]:
    """The constant that a table identifies, empty for none, and how its figures were measured."""
    if table.peer_to_peer is False:
        return "", "without peer access, through the host's memory"
    alone = table.kind == "transfers" and np.isfinite(_others(table.bandwidth_bytes_per_s)).sum() == 1
    if table.kind == "unidirectional" or alone:
        return "link_payload", "one transfer at a time"
    if table.kind == "all-to-all":
        what = "link" if profile.inside == "full-mesh" else "GPU's port"
        return "link_many_payload", f"each {what}, all transfers at once"
    return "", "several transfers at once"


def _others(matrix: FloatArray) -> FloatArray:
    """The figures between different GPUs; nan on the diagonal."""
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)


def _figure(table: PairTable, what: str, constant: str, note: str, figures: FloatArray) -> list[PairFigure]:
    """The figure in a list; empty without measurements."""
    known = figures[np.isfinite(figures)]
    if not len(known):
        return []
    low, middle, high = np.quantile(known, [0.025, 0.5, 0.975]).tolist()
    return [PairFigure(table.name, what, constant, note, len(known), middle, low, high)]


def _check_line_rate(figure: PairFigure, profile: Profile) -> None:
    line = profile.parameters.numbers["link_bandwidth"]
    if figure.value > line:
        texts = [CONSTANTS["link_bandwidth"].format(value, 4) for value in (figure.value, line)]
        raise FitError(f"{figure.table}: {texts[0]} between GPUs, but links of {profile.name} carry {texts[1]}")


def pair_findings(figures: Iterable[PairFigure], profile: Profile) -> Sequence[Finding]:
    """The constants that these figures identify; of several figures of a constant, the last."""
    found = {}
    for figure in figures:
        if figure.constant:
            before, origin = profile.parameters.numbers[figure.constant], f"{file_of(figure.table)} ({figure.note})"
            found[figure.constant] = Finding(
                figure.constant, before, figure.value, figure.low, figure.high, origin=origin
            )
    return list(found.values())


def _fitted(read: Measurements, found: Calibrated, acceptance: Acceptance | None = None) -> Fitted[Calibrated]:
    """A profile fitted to measurements in files; without tables of collectives there is no acceptance."""
    sources = {each.name: each.source for each in found.profile.parameters.values()}
    constants = [_constant_document(finding, sources[finding.name]) for finding in found.findings]
    tables = _table_documents(found) if len(found.cases) else []
    acceptances = () if acceptance is None else (acceptance,)
    document = {
        "profile": found.profile.name,
        "library": found.profile.library,
        "accepted": acceptance is None or acceptance.accepted,
        "acceptance": None if acceptance is None else acceptance.to_dict(),
        "constants": constants,
        "tables": tables,
        "pairs": [
            {
                "file": figure.table,
                "what": figure.what,
                "unit": "s" if figure.what == "latency" else "bytes/s",
                "constant": figure.constant or None,
                "note": figure.note,
                **{key: getattr(figure, key) for key in ("count", "value", "low", "high")},
            }
            for figure in read.figures
        ],
        "notes": list(read.left_out),
        "provenance": read.provenance.to_dict(),
    }
    columns = ("constant", "before", "found", "95 % from", "to", "fitted to")
    rows = [
        (each.name, *_texts(each, each.before, each.value, each.low, each.high), each.origin)
        for each in found.findings
        if each.identifiable
    ]
    parts: list[Part] = [
        *_pairs(read.figures),
        Table(f"{found.profile.name}: fitted parameters", columns, rows, (0, 5)),
        *_unidentified([finding for finding in found.findings if not finding.identifiable]),
        *Table.of("predicted against measured", tables, _ERRORS, (0, 1, 2)),
        *(each.line() for each in acceptances),
    ]
    return Fitted(
        document, [flat(each) for each in constants], parts, found,
        lambda _: profile_document(found.profile).encode(), acceptances, read.left_out,
    )  # fmt: skip


def _table_documents(found: Calibrated) -> list[dict[str, object]]:
    """The tables of collectives with their mean errors before and after, and of rows by fits without them."""
    known = [found.before_s, found.after_s, *([found.held_out_s] if len(found.held_out_s) else [])]
    means = [[float(abs(errors).mean()) for errors in found.errors(times_s)] for times_s in known]
    held_out = means[2] if len(means) > 2 else [None] * len(found.cases)
    return [
        {
            "file": case.table.name,
            "profile": f"{found.profile.name}-{case.size}",
            "collective": case.collective,
            "ranks": case.table.ranks,
            "rows": len(case.rows),
            "mean_relative_error_before": before,
            "mean_relative_error": after,
            "mean_relative_error_held_out": held_out,
        }
        for case, before, after, held_out in zip(found.cases, means[0], means[1], held_out, strict=True)
    ]


def calibrate(
    *measurements: Path | str,
    profile: str | None = None,
    fit: Sequence[str] = (),
    algorithm: Literal["ring"] | None = None,
    in_place: bool = False,
    progress: ProgressCallback = no_progress,
) -> Fitted[Calibrated]:
    """Fit a profile to measurements in files; `tasp_lab.validation.fabrics.measure_fabric` measures running ranks.

    Parameters
    ----------
    measurements : logs of nccl-tests, rccl-tests, TransferBench or p2pBandwidthLatencyTest, CSV tables, and folders of
        them. Tables of pairs come first: the fit to tables of collectives starts from their findings.
    profile : the profile to start from and, for logs, the machine: ``h100-8``, ``h100-2x8`` or ``my.toml:2x8``.
    fit : the constants to fit; all that the measurements identify when empty.
    algorithm : ``ring`` if AllReduce used rings and the measurement does not state its algorithm.
    in_place : whether to read the in-place columns of logs.
    progress : called with lines of progress.

    Raises `TableError`, `ProfileError` and `FitError`, and `QuantityError` for what is no file.
    """
    if not measurements:
        raise QuantityError("nothing to calibrate from: expected logs or CSV tables, or a fabric and a machine")
    if objects := [each for each in measurements if not isinstance(each, (str, Path))]:
        raise QuantityError(f"{type(objects[0]).__name__}: expected files of measurements")
    paths = [Path(each) for each in dict.fromkeys(map(str, measurements))]
    read = read_measurements(paths, profile, fit, by_rings=algorithm == "ring", in_place=in_place)
    cases, date = read.cases, datetime.date.today().isoformat()
    if not cases:
        if not read.of_pairs:
            why = [f"{figure.table}: {figure.what}, {figure.note}" for figure in read.figures] + list(read.left_out)
            raise FitError(f"these measurements identify no constant: {'; '.join(why) or 'there are none'}")
        return _fitted(read, Calibrated(read.start, read.of_pairs))
    for line in read.left_out:
        progress(line)
    predict = Simulated(read.profile, cases)
    found = fit_profile(read.start, cases, predict, fit, date=date, progress=progress)
    fitted = {finding.name for finding in found.findings if finding.identifiable}
    kept = tuple(finding for finding in read.of_pairs if finding.name not in fitted)
    others = tuple(finding for finding in found.findings if finding.name not in {each.name for each in kept})
    held_out_s, too_few = _held_out(read, predict, fit, progress)
    found = replace(found, findings=kept + others, before_s=predict(read.profile.parameters), held_out_s=held_out_s)
    held_out = held_out_s if len(held_out_s) else None
    acceptance = Acceptance.of(measured(cases), found.before_s, found.after_s, held_out, too_few)
    return _fitted(read, found, acceptance)


def _held_out(
    read: Measurements, predict: Simulated, names: Sequence[str], progress: ProgressCallback
) -> tuple[FloatArray, str]:
    """The seconds of each row by a fit to other rows; none, with the reason, if there are too few rows for such fits.

    The rows of all tables, one table after the other, are in `folds`, so that each fit has all tables and sizes.
    """
    rows = [(case, row) for case in read.cases for row in case.rows]
    found, date = np.zeros(len(rows)), datetime.date.today().isoformat()
    for number, aside in enumerate(parts := folds(len(rows)), 1):
        progress(f"fit {number} of {len(parts)} without {len(aside)} of {len(rows)} rows, which are held out")
        kept = [place for place in range(len(rows)) if place not in aside]
        chosen = {id(rows[place][1]) for place in kept}
        cases = [replace(case, rows=tuple(row for row in case.rows if id(row) in chosen)) for case in read.cases]
        try:
            fit = fit_profile(
                read.start, [case for case in cases if case.rows], predict.of_rows(kept), names, date=date
            )
        except FitError as error:
            return np.zeros(0), f"too few rows for a fit to {len(kept)} of {len(rows)}: {error}"
        found[aside] = predict.of_rows(aside)(fit.profile.parameters)
    return found, ""


def leave_one_out(
    *measurements: Path | str,
    profile: str | None = None,
    fit: Sequence[str] = (),
    algorithm: str | None = None,
    in_place: bool = False,
    progress: ProgressCallback = no_progress,
) -> Fitted[tuple[Mapping[str, object], ...]]:
    """Predict each collective by a profile that was fitted to all others: a row per collective, and no profile.

    Parameters
    ----------
    measurements : folders and files of one family of machines; tables of pairs help with every fit.
    fit : constants to fit, of each fit those that its collectives may identify.
    profile, algorithm, in_place, progress : see `calibrate`.

    Raises `TableError`, `ProfileError`, and `FitError` for fewer than two collectives or if there is no fit.
    """
    if not measurements:
        raise QuantityError("no tables: expected a folder with tables of two collectives or more")
    paths = [Path(each) for each in dict.fromkeys(map(str, measurements))]
    read = read_measurements(paths, profile, fit, by_rings=algorithm == "ring", in_place=in_place)
    collectives = list(dict.fromkeys(case.collective for case in read.cases))
    if len(collectives) < 2:
        others = f" ({'; '.join(read.left_out)})" if read.left_out else ""
        raise FitError(
            f"{', '.join(map(str, paths))}: {', '.join(collectives) or 'no collective'} to predict, "
            f"expected tables of two collectives or more{others}"
        )
    names = checked_names(fit, read.start, read.cases)
    for line in read.left_out:
        progress(line)
    predict, found = Simulated(read.profile, read.cases), list[dict[str, object]]()
    for number, collective in enumerate(collectives, 1):
        progress(f"{number} of {len(collectives)}: {collective} is left out")
        found.append(_without(read, predict, collective, names, progress))
    reasons = [(each["collective"], each["reason"]) for each in found if each["reason"]]
    if len(reasons) == len(found):
        raise FitError("; ".join(f"without {collective}: {reason}" for collective, reason in reasons))
    document = {
        "profile": read.profile.name,
        "library": read.profile.library,
        "collectives": found,
        "notes": list(read.left_out),
        "provenance": read.provenance.to_dict(),
    }
    title = f"{read.profile.name}: each collective predicted by a fit to the others"
    parts: list[Part] = [*Table.of(title, found, _LEFT_OUT, (0, 1, 2)), *(f"{name}: {why}" for name, why in reasons)]
    return Fitted(document, [flat(row) for row in found], parts, tuple(found), notes=read.left_out)


_LEFT_OUT: Formats = {
    "left out": "{collective}", "fitted from": "{fitted_from}", "constants fitted": "{constants}",
    "rows": "{rows}", "median error before": "{median_relative_error_before:.1%}",
    "median error after": "{median_relative_error:.1%}", "worst before": "{worst_relative_error_before:.1%}",
    "worst after": "{worst_relative_error:.1%}",
}  # fmt: skip


def _without(
    read: Measurements, predict: Simulated, collective: str, names: Sequence[str], progress: ProgressCallback
) -> dict[str, object]:
    """One collective by a fit to the others: absolute errors before and after, None without a fit, and why there is
    none."""
    of_rows = [case.collective == collective for case in read.cases for _ in case.rows]
    aside, kept = ([place for place, is_aside in enumerate(of_rows) if is_aside is wanted] for wanted in (True, False))
    judging, measured_s = predict.of_rows(aside), measured(read.cases)[aside]
    others = [case for case in read.cases if case.collective != collective]
    fitted_from = tuple(dict.fromkeys(case.collective for case in others))

    def errors(profile: Profile, suffix: str = "") -> dict[str, object]:
        found = np.abs(judging(profile.parameters) / measured_s - 1)
        return {f"median_relative_error{suffix}": float(np.median(found)),
                f"worst_relative_error{suffix}": float(found.max())}  # fmt: skip

    row = {"collective": collective, "rows": len(aside), "fitted_from": fitted_from, "constants": ()}
    row |= errors(read.profile, "_before")
    try:
        asked = [name for name in names if name in candidates(read.start, fitted_from)]
        if names and not asked:
            raise FitError(f"{', '.join(fitted_from)} cannot identify {', '.join(names)}")
        today = datetime.date.today().isoformat()
        fit = fit_profile(read.start, others, predict.of_rows(kept), asked, date=today, progress=progress)
    except FitError as error:
        return row | {"median_relative_error": None, "worst_relative_error": None, "reason": str(error)}
    fitted = [*read.of_pairs, *(each for each in fit.findings if each.identifiable)]
    return (
        row | {"constants": tuple(dict.fromkeys(each.name for each in fitted))} | errors(fit.profile) | {"reason": None}
    )


class Measurements(NamedTuple):
    """What a calibration from files starts from.

    Attributes
    ----------
    profile : as chosen; `start` has what tables of pairs tell.
    cases : the tables of collectives; `left_out` are lines about others.
    figures, of_pairs : of tables of pairs, and the constants that they identify.
    """

    profile: Profile
    start: Profile
    cases: tuple[Case, ...]
    left_out: tuple[str, ...]
    figures: tuple[PairFigure, ...]
    of_pairs: tuple[Finding, ...]
    provenance: Provenance


def read_measurements(
    paths: Sequence[Path], profile: str | None, names: Sequence[str], *, by_rings: bool, in_place: bool
) -> Measurements:
    """Read the measurements in files and folders; the parameters are those of `calibrate`."""
    tables, pairs = _read(paths, in_place)
    choice = choose(profile) if profile is not None else choose_for(tables)
    left_out: list[str] = []
    cases = cases_of(tables, choice, by_rings=by_rings, progress=left_out.append)
    figures = [figure for table in pairs for figure in pair_figures(table, choice.profile)]
    of_pairs = [each for each in pair_findings(figures, choice.profile) if not names or each.name in names]
    inputs = {
        "profile": {"name": choice.profile.name, "sha256": sha256(plain(tuple(choice.profile.parameters.values())))},
        "size": choice.size,
        "tables": [table_inputs(table) for table in tables],
        "pairs": [{"file": Path(table.name).name, "sha256": sha256(plain(replace(table, name="")))} for table in pairs],
        "fit": list(names),
        "by_rings": by_rings,
    }
    return Measurements(
        choice.profile,
        choice.profile.with_parameters(
            with_findings(choice.profile.parameters, of_pairs, datetime.date.today().isoformat())
        ),
        cases,
        tuple(left_out),
        tuple(figures),
        tuple(of_pairs),
        Provenance(inputs, machine_constants(choice.profile.parameters.values()), ("array",) if cases else ()),
    )


def _read(paths: Sequence[Path], in_place: bool) -> tuple[list[MeasuredTable], list[PairTable]]:
    """Read the tables of collectives and of pairs in files and folders."""
    tables: list[MeasuredTable] = []
    pairs: list[PairTable] = []
    for path in paths:
        if path.is_dir() or path.suffix.lower() == ".csv":
            tables += find_tables([path], in_place=in_place)
            continue
        check_is_text(path)
        text, name = read_text(path), str(path)
        if runs := parse_nccl_tests(text, name, in_place=in_place):
            tables += runs
        elif found := parse_p2p_bandwidth(text, name) + parse_transfer_bench(text, name):
            pairs += found
        else:
            raise TableError(f"{path}: no measurement in it, expected {_EXPECTED}")
    if not tables and not pairs:
        raise TableError(f"{', '.join(map(str, paths))}: no measurement in it, expected {_EXPECTED}")
    return tables, pairs


def _constant_document(finding: Finding, source: str) -> dict[str, object]:
    return {
        "name": finding.name,
        "unit": CONSTANTS[finding.name].unit,
        "before": finding.before,
        "value": finding.value,
        "low": finding.low,
        "high": finding.high if math.isfinite(finding.high) else None,
        "identifiable": finding.identifiable,
        "why": finding.why or None,
        "needs": None if finding.identifiable else finding.needs,
        "source": source,
    }


_ERRORS: Formats = {
    "table": lambda row: Path(row["file"]).name, "machine": "{profile}", "collective": "{collective}", "rows": "{rows}",
    "mean error before": "{mean_relative_error_before:.1%}", "after the fit": "{mean_relative_error:.1%}",
    "held out": "{mean_relative_error_held_out:.1%}",
}  # fmt: skip


def _unidentified(findings: Sequence[Finding]) -> list[Part]:
    """The constants that stay as they were; one row for all with the same reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in findings:
        text = f"{each.name} {CONSTANTS[each.name].format(each.before, 4)}"
        groups.setdefault((each.why, each.needs), []).append(text)
    columns = ("parameters, unchanged", "why", "measurement that would identify them")
    rows = [(", ".join(texts), why, needs) for (why, needs), texts in groups.items()]
    return [Table("not identified", columns, rows, (0, 1, 2))] if rows else []


def _texts(finding: Finding, *values: float) -> tuple[str, ...]:
    return tuple(CONSTANTS[finding.name].format(value, 4) for value in values)


def _pairs(figures: Sequence[PairFigure]) -> list[Part]:
    columns = ("table of pairs", "what", "median", "95 % from", "to", "figures", "tells")
    rows = []
    for each in figures:
        name = "link_latency" if each.what == "latency" else "link_bandwidth"
        texts = (CONSTANTS[name].format(value, 4) for value in (each.value, each.low, each.high))
        tells = f"{each.constant or 'for information'}: {each.note}"
        rows.append((Path(each.table).name, each.what, *texts, str(each.count), tells))
    return [Table("pairs", columns, rows, (0, 1, 6))] if rows else []
