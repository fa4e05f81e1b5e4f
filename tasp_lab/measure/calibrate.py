"""Calibration: a profile fitted to measurements in files::

    calibrate("all_gather.log", "sendrecv.log", profile="h100-8").save("my.toml")

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
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasp_lab.core.arrays import FloatArray
from tasp_lab.core.errors import FitError, QuantityError, TableError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.core.report import flat
from tasp_lab.core.tables import Formats, Part, Row, Table
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.profile import Profile, profile_document
from tasp_lab.measure.fit.acceptance import Acceptance, Fitted, held_out
from tasp_lab.measure.fit.cases import Simulated, cases_of, measured
from tasp_lab.measure.fit.fit_profile import Calibrated, Finding, with_findings
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
    names = dict.fromkeys(map(str, measurements))
    read = read_files(map(Path, names), in_place=in_place)
    tables = [each for each in read if isinstance(each, MeasuredTable)]
    pairs = [each for each in read if isinstance(each, PairTable)]
    if not tables and not pairs:
        raise TableError(f"{', '.join(names)}: no measurement in it, expected {EXPECTED}")
    choice = choose(profile) if profile is not None else choose_for(tables)
    before, notes, by_rings = choice.profile, list[str](), algorithm == "ring"
    cases = cases_of(tables, choice, by_rings=by_rings, progress=notes.append)
    figures = [pair_figure(table, before) for table in pairs]
    of_pairs = tuple(each for each in pair_findings(figures, before) if not fit or each.name in fit)
    inputs = {
        "profile": {"name": before.name, "sha256": sha256(plain(tuple(before.parameters.values())))},
        "size": choice.size,
        "tables": [table_inputs(table) for table in tables],
        "pairs": [{"file": Path(each.name).name, "sha256": sha256(plain(each[1:]))} for each in pairs],
        "fit": list(fit),
        "by_rings": by_rings,
    }
    provenance = Provenance(inputs, machine_constants(before.parameters.values()), ("array",) if cases else ())
    today = datetime.date.today().isoformat()
    start = before.with_parameters(with_findings(before.parameters, of_pairs, today))
    if not cases:
        if not of_pairs:
            why = [*("{file}: {what}, {note}".format(**figure) for figure in figures), *notes]
            raise FitError(f"these measurements identify no constant: {'; '.join(why) or 'there are none'}")
        return _fitted(Calibrated(start, of_pairs), figures, notes, provenance)
    for line in notes:
        progress(line)
    predict, times_s = Simulated(before, cases), measured(cases)
    every = range(len(times_s))

    def fitted_to(rows: Sequence[int], predict: Simulated, progress: ProgressCallback = no_progress) -> Calibrated:
        """The fit to some rows of all cases, by their places, which `predict` predicts. Raises `FitError`."""
        kept, some, first = frozenset(rows), [], 0
        for case in cases:
            some.append(replace(case, rows=tuple(row for n, row in enumerate(case.rows, first) if n in kept)))
            first += len(case.rows)
        return fit_profile(start, [case for case in some if case.rows], predict, fit, date=today, progress=progress)

    def without(kept: Sequence[int], aside: Sequence[int]) -> FloatArray:
        try:
            fitted = fitted_to(kept, predict.of_rows(kept))
        except FitError as error:
            raise FitError(f"too few rows for a fit to {len(kept)} of {len(every)}: {error}") from error
        return predict.of_rows(aside)(fitted.profile.parameters)

    found, before_s = fitted_to(every, predict, progress), predict(before.parameters)
    # the rows of all tables, one table after the other, so that each fit has all tables and sizes
    held_out_s, too_few = held_out(every, without, progress)
    fitted = {finding.name for finding in found.findings if finding.identifiable}
    # what tables of collectives identify replaces what those of pairs told of the same constant
    kept = tuple(finding for finding in of_pairs if finding.name not in fitted)
    others = tuple(finding for finding in found.findings if finding.name not in {each.name for each in kept})
    acceptance = Acceptance.of(times_s, before_s, found.after_s, held_out_s, too_few)
    held_out_s = np.zeros(0) if held_out_s is None else held_out_s
    found = replace(found, findings=kept + others, before_s=before_s, held_out_s=held_out_s)
    return _fitted(found, figures, notes, provenance, (acceptance,))


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


def _fitted(
    found: Calibrated, figures: Sequence[Figure], notes: Sequence[str], provenance: Provenance,
    acceptances: tuple[Acceptance, ...] = (),
) -> Fitted[Calibrated]:  # fmt: skip
    """A profile fitted to measurements in files; without tables of collectives there is no acceptance."""
    sources = {each.name: each.source for each in found.profile.parameters.values()}
    constants: list[Row] = [
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
        "pairs": list(figures), "notes": list(notes), "provenance": provenance.to_dict(),
    }  # fmt: skip
    unknown: dict[tuple[str, str], list[str]] = {}  # one row for all constants with the same reason
    for each in found.findings:
        if not each.identifiable:
            text = f"{each.name} {CONSTANTS[each.name].format(each.before, 4)}"
            unknown.setdefault((each.why, each.needs), []).append(text)
    unchanged = [{"names": texts, "why": why, "needs": needs} for (why, needs), texts in unknown.items()]
    fitted = [vars(finding) for finding in found.findings if finding.identifiable]
    parts: list[Part] = [
        *Table.of("pairs", figures, _PAIRS, (0, 1, 6)),
        *Table.of(f"{found.profile.name}: fitted parameters", fitted, _FITTED, (0, 5)),
        *Table.of("not identified", unchanged, _UNCHANGED, (0, 1, 2)),
        *Table.of("predicted against measured", tables, _ERRORS, (0, 1, 2)),
        *(each.line() for each in acceptances),
    ]
    return Fitted(
        document, [flat(each) for each in constants], parts, found,
        lambda _: profile_document(found.profile).encode(), acceptances, tuple(notes),
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
