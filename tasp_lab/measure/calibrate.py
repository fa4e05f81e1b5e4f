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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError, QuantityError, TableError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import flat
from tasp_lab.core.tables import Formats, Part, Table
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.profile import Profile, profile_document
from tasp_lab.measure.fit.acceptance import Acceptance, Fitted, held_out
from tasp_lab.measure.fit.cases import Case, Simulated, cases_of, measured
from tasp_lab.measure.fit.fit_profile import Calibrated, Finding, candidates, checked_names, with_findings
from tasp_lab.measure.fit.fit_profile import calibrate as fit_profile
from tasp_lab.measure.inputs import table_inputs
from tasp_lab.measure.profiles import choose, choose_for
from tasp_lab.measure.readers import EXPECTED, MeasuredTable, PairTable, read_files
from tasp_lab.prediction.provenance import Provenance, machine_constants, plain, sha256


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
    read = Measurements.read(measurements, profile, fit, by_rings=algorithm == "ring", in_place=in_place)
    if not read.cases:
        if not read.of_pairs:
            why = [f"{figure['file']}: {figure['what']}, {figure['note']}" for figure in read.figures] + list(
                read.left_out
            )
            raise FitError(f"these measurements identify no constant: {'; '.join(why) or 'there are none'}")
        return _fitted(read, Calibrated(read.start, read.of_pairs))
    for line in read.left_out:
        progress(line)
    predict, count = Simulated(read.profile, read.cases), len(measured(read.cases))
    found = read.fitted_to(range(count), predict, fit, progress)

    def without(kept: Sequence[int], aside: Sequence[int]) -> FloatArray:
        try:
            fitted = read.fitted_to(kept, predict.of_rows(kept), fit)
        except FitError as error:
            raise FitError(f"too few rows for a fit to {len(kept)} of {count}: {error}") from error
        return predict.of_rows(aside)(fitted.profile.parameters)

    # the rows of all tables, one table after the other, so that each fit has all tables and sizes
    held_out_s, too_few = held_out(range(count), without, progress)
    fitted = {finding.name for finding in found.findings if finding.identifiable}
    kept = tuple(finding for finding in read.of_pairs if finding.name not in fitted)
    others = tuple(finding for finding in found.findings if finding.name not in {each.name for each in kept})
    before_s = predict(read.profile.parameters)
    acceptance = Acceptance.of(measured(read.cases), before_s, found.after_s, held_out_s, too_few)
    found = replace(
        found, findings=kept + others, before_s=before_s, held_out_s=np.zeros(0) if held_out_s is None else held_out_s
    )
    return _fitted(read, found, (acceptance,))


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
    read = Measurements.read(measurements, profile, fit, by_rings=algorithm == "ring", in_place=in_place)
    collectives = list(dict.fromkeys(case.collective for case in read.cases))
    if len(collectives) < 2:
        others = f" ({'; '.join(read.left_out)})" if read.left_out else ""
        raise FitError(
            f"{', '.join(dict.fromkeys(map(str, measurements)))}: {', '.join(collectives) or 'no collective'} to "
            f"predict, expected tables of two collectives or more{others}"
        )
    names = checked_names(fit, read.start, read.cases)
    for line in read.left_out:
        progress(line)
    predict, rows = Simulated(read.profile, read.cases), list[dict[str, Any]]()
    of_rows = np.array([case.collective for case in read.cases for _ in case.rows])
    for number, collective in enumerate(collectives, 1):
        progress(f"{number} of {len(collectives)}: {collective} is left out")
        aside, kept = (np.flatnonzero((of_rows == collective) == wanted).tolist() for wanted in (True, False))
        judging, measured_s = predict.of_rows(aside), measured(read.cases)[aside]
        fitted_from = tuple(each for each in collectives if each != collective)
        row = {"collective": collective, "rows": len(aside), "fitted_from": fitted_from, "constants": (),
               **_errors(judging, read.profile, measured_s, "_before")}  # fmt: skip
        try:
            asked = [name for name in names if name in candidates(read.start, fitted_from)]
            if names and not asked:
                raise FitError(f"{', '.join(fitted_from)} cannot identify {', '.join(names)}")
            fitted = read.fitted_to(kept, predict.of_rows(kept), asked, progress)
            known = [*read.of_pairs, *(each for each in fitted.findings if each.identifiable)]
            row |= {"constants": tuple(dict.fromkeys(each.name for each in known)),
                    **_errors(judging, fitted.profile, measured_s), "reason": None}  # fmt: skip
        except FitError as error:
            row |= {"median_relative_error": None, "worst_relative_error": None, "reason": str(error)}
        rows.append(row)
    reasons = [(row["collective"], row["reason"]) for row in rows if row["reason"]]
    if len(reasons) == len(rows):
        raise FitError("; ".join(f"without {collective}: {reason}" for collective, reason in reasons))
    document = {
        "profile": read.profile.name,
        "library": read.profile.library,
        "collectives": rows,
        "notes": list(read.left_out),
        "provenance": read.provenance.to_dict(),
    }
    title = f"{read.profile.name}: each collective predicted by a fit to the others"
    parts: list[Part] = [*Table.of(title, rows, _LEFT_OUT, (0, 1, 2)), *(f"{name}: {why}" for name, why in reasons)]
    return Fitted(document, [flat(row) for row in rows], parts, tuple(rows), notes=read.left_out)


def _errors(predict: Simulated, profile: Profile, measured_s: FloatArray, suffix: str = "") -> dict[str, object]:
    sizes = np.abs(predict(profile.parameters) / measured_s - 1)
    return {
        f"median_relative_error{suffix}": float(np.median(sizes)),
        f"worst_relative_error{suffix}": float(sizes.max()),
    }


Figure = Mapping[str, Any]
"""The median ``value`` of the figures of a table of pairs, with ``low`` and ``high`` ends of the interval of 95 % of
them, in SI units; ``constant`` is the one that it identifies, None where the profile has none of them."""


def pair_figure(table: PairTable, profile: Profile) -> Figure:
    """What a table of pairs tells of a machine of this profile.

    One transfer at a time identifies `link_payload`, all at once `link_many_payload`. Raises `FitError` for more GPUs
    than a node of the profile has, and for a figure above the rate of its links.
    """
    count = len(table.bandwidth_bytes_per_s)
    if count > profile.ranks_per_node:
        raise FitError(f"{table.name}: {count} GPUs, but a node of {profile.name} has {profile.ranks_per_node}")
    values = np.where(np.eye(count, dtype=bool), np.nan, table.bandwidth_bytes_per_s)
    constant, note = "link_payload", "one transfer at a time"
    if table.kind == "all-to-all":
        port = "link" if profile.inside == "full-mesh" else "GPU's port"
        constant, note = "link_many_payload", f"each {port}, all transfers at once"
        values = np.nansum(values, axis=1) if profile.inside == "switch" else values
    known = values[np.isfinite(values)]
    if not len(known):
        raise FitError(f"{table.name}: no bandwidth between two GPUs")
    low, middle, high = np.quantile(known, [0.025, 0.5, 0.975]).tolist()
    line, is_known = profile.parameters.numbers["link_bandwidth"], constant in profile.parameters
    if is_known and middle > line:
        found, carried = (CONSTANTS["link_bandwidth"].format(value, 4) for value in (middle, line))
        raise FitError(f"{table.name}: {found} between GPUs, but links of {profile.name} carry {carried}")
    return {
        "file": table.name, "what": table.kind, "unit": "bytes/s", "constant": constant if is_known else None,
        "note": note, "count": len(known), "value": middle, "low": low, "high": high,
    }  # fmt: skip


def pair_findings(figures: Iterable[Figure], profile: Profile) -> tuple[Finding, ...]:
    """The constants that these figures identify; of several figures of a constant, the last."""
    found = {}
    for each in figures:
        if name := each["constant"]:
            before, origin = profile.parameters.numbers[name], f"{Path(each['file']).name} ({each['note']})"
            found[name] = Finding(name, before, each["value"], each["low"], each["high"], origin=origin)
    return tuple(found.values())


@dataclass(frozen=True)
class Measurements:
    """What a calibration from files starts from.

    Parameters
    ----------
    profile : as chosen; `start` has what tables of pairs tell.
    cases : the tables of collectives; `left_out` are lines about others.
    figures, of_pairs : of tables of pairs, and the constants that they identify.
    """

    profile: Profile
    start: Profile
    cases: tuple[Case, ...]
    left_out: tuple[str, ...]
    figures: tuple[Figure, ...]
    of_pairs: tuple[Finding, ...]
    provenance: Provenance

    @classmethod
    def read(
        cls, files: Sequence[Path | str], profile: str | None, names: Sequence[str], *, by_rings: bool, in_place: bool
    ) -> Measurements:
        """Read the measurements in files and folders; the parameters are those of `calibrate`."""
        names_of_files = dict.fromkeys(map(str, files))
        read = read_files(map(Path, names_of_files), in_place=in_place)
        tables = [each for each in read if isinstance(each, MeasuredTable)]
        pairs = [each for each in read if isinstance(each, PairTable)]
        if not tables and not pairs:
            raise TableError(f"{', '.join(names_of_files)}: no measurement in it, expected {EXPECTED}")
        choice = choose(profile) if profile is not None else choose_for(tables)
        profile_, parameters = choice.profile, choice.profile.parameters
        left_out: list[str] = []
        cases = cases_of(tables, choice, by_rings=by_rings, progress=left_out.append)
        figures = tuple(pair_figure(table, profile_) for table in pairs)
        of_pairs = tuple(each for each in pair_findings(figures, profile_) if not names or each.name in names)
        inputs = {
            "profile": {"name": profile_.name, "sha256": sha256(plain(tuple(parameters.values())))},
            "size": choice.size,
            "tables": [table_inputs(table) for table in tables],
            "pairs": [{"file": Path(each.name).name, "sha256": sha256(plain(each[1:]))} for each in pairs],
            "fit": list(names),
            "by_rings": by_rings,
        }
        provenance = Provenance(inputs, machine_constants(parameters.values()), ("array",) if cases else ())
        start = profile_.with_parameters(with_findings(parameters, of_pairs, _today()))
        return cls(profile_, start, cases, tuple(left_out), figures, of_pairs, provenance)

    def fitted_to(
        self,
        rows: Sequence[int],
        predict: Simulated,
        names: Sequence[str],
        progress: ProgressCallback = no_progress,
    ) -> Calibrated:
        """The fit to some rows of all cases, by their places, which `predict` predicts. Raises `FitError`."""
        kept, cases, first = frozenset(rows), [], 0
        for case in self.cases:
            cases.append(replace(case, rows=tuple(row for n, row in enumerate(case.rows, first) if n in kept)))
            first += len(case.rows)
        cases = [case for case in cases if case.rows]
        return fit_profile(self.start, cases, predict, names, date=_today(), progress=progress)


def _today() -> str:
    return datetime.date.today().isoformat()


def _fitted(read: Measurements, found: Calibrated, acceptances: tuple[Acceptance, ...] = ()) -> Fitted[Calibrated]:
    """A profile fitted to measurements in files; without tables of collectives there is no acceptance."""
    sources = {each.name: each.source for each in found.profile.parameters.values()}
    constants: list[dict[str, object]] = [
        {
            "name": finding.name, "unit": CONSTANTS[finding.name].unit, "before": finding.before,
            "value": finding.value, "low": finding.low, "high": finding.high if math.isfinite(finding.high) else None,
            "identifiable": finding.identifiable, "why": finding.why or None,
            "needs": None if finding.identifiable else finding.needs, "source": sources[finding.name],
        }
        for finding in found.findings
    ]  # fmt: skip
    known = (found.before_s, found.after_s, found.held_out_s)
    means = [[float(abs(errors).mean()) for errors in found.errors(times_s)] for times_s in known if len(times_s)]
    tables = [
        {
            "file": case.table.name, "profile": f"{found.profile.name}-{case.size}", "collective": case.collective,
            "ranks": case.table.ranks, "rows": len(case.rows), "mean_relative_error_before": means[0][number],
            "mean_relative_error": means[1][number],
            "mean_relative_error_held_out": means[2][number] if len(means) > 2 else None,
        }
        for number, case in enumerate(found.cases)
    ]  # fmt: skip
    document = {
        "profile": found.profile.name, "library": found.profile.library,
        "accepted": all(each.accepted for each in acceptances),
        "acceptance": acceptances[0].to_dict() if acceptances else None, "constants": constants, "tables": tables,
        "pairs": list(read.figures), "notes": list(read.left_out), "provenance": read.provenance.to_dict(),
    }  # fmt: skip
    unknown: dict[tuple[str, str], list[str]] = {}  # one row for all constants with the same reason
    for each in found.findings:
        if not each.identifiable:
            text = f"{each.name} {CONSTANTS[each.name].format(each.before, 4)}"
            unknown.setdefault((each.why, each.needs), []).append(text)
    unchanged = [{"names": texts, "why": why, "needs": needs} for (why, needs), texts in unknown.items()]
    fitted = [vars(finding) for finding in found.findings if finding.identifiable]
    parts: list[Part] = [
        *Table.of("pairs", read.figures, _PAIRS, (0, 1, 6)),
        *Table.of(f"{found.profile.name}: fitted parameters", fitted, _FITTED, (0, 5)),
        *Table.of("not identified", unchanged, _UNCHANGED, (0, 1, 2)),
        *Table.of("predicted against measured", tables, _ERRORS, (0, 1, 2)),
        *(each.line() for each in acceptances),
    ]
    return Fitted(
        document, [flat(each) for each in constants], parts, found,
        lambda _: profile_document(found.profile).encode(), acceptances, read.left_out,
    )  # fmt: skip


def _text(field: str) -> Callable[[Mapping[str, Any]], str]:
    """A field of a constant, or of a figure of pairs, in its unit."""
    return lambda row: CONSTANTS[row.get("name", "link_bandwidth")].format(row[field], 4)


_PAIRS: Formats = {
    "table of pairs": lambda row: Path(row["file"]).name, "what": "{what}", "median": _text("value"),
    "95 % from": _text("low"), "to": _text("high"), "figures": "{count}",
    "tells": lambda row: f"{row['constant'] or 'for information'}: {row['note']}",
}  # fmt: skip
_FITTED: Formats = {
    "constant": "{name}", "before": _text("before"), "found": _text("value"), "95 % from": _text("low"),
    "to": _text("high"), "fitted to": "{origin}",
}  # fmt: skip
_UNCHANGED: Formats = {
    "parameters, unchanged": "{names}", "why": "{why}", "measurement that would identify them": "{needs}",
}  # fmt: skip
_ERRORS: Formats = {
    "table": lambda row: Path(row["file"]).name, "machine": "{profile}", "collective": "{collective}", "rows": "{rows}",
    "mean error before": "{mean_relative_error_before:.1%}", "after the fit": "{mean_relative_error:.1%}",
    "held out": "{mean_relative_error_held_out:.1%}",
}  # fmt: skip
_LEFT_OUT: Formats = {
    "left out": "{collective}", "fitted from": "{fitted_from}", "constants fitted": "{constants}",
    "rows": "{rows}", "median error before": "{median_relative_error_before:.1%}",
    "median error after": "{median_relative_error:.1%}", "worst before": "{worst_relative_error_before:.1%}",
    "worst after": "{worst_relative_error:.1%}",
}  # fmt: skip
