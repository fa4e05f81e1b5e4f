"""What ``tasp-lab calibrate`` prints: tables for people, plain objects for scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tasp_lab.calibrate import Calibrated, Case, Finding, constant_text
from tasp_lab.calibrate_pairs import PairFigure
from tasp_lab.cli import report
from tasp_lab.cli.comparison import Comparison
from tasp_lab.cli.live import between, pairs_of
from tasp_lab.profile import MEANINGS
from tasp_lab.quantities import format_bandwidth, format_time


def document(
    found: Calibrated, figures: Sequence[PairFigure], notes: Sequence[str], output: Path | None
) -> dict[str, object]:
    """What was found, for a script."""
    sources = {constant.name: constant.source for constant in found.profile.constants}
    return {
        "profile": found.profile.name,
        "library": found.profile.library,
        "constants": [_constant_document(finding, sources[finding.name]) for finding in found.findings],
        "tables": [
            {
                "file": case.table.name,
                "profile": _machine_name(found, case),
                "collective": case.collective,
                "ranks": case.table.ranks,
                "rows": len(case.rows),
                "mean_relative_error_before": before,
                "mean_relative_error": after,
            }
            for case, before, after in _errors(found)
        ],
        "pairs": [
            {
                "file": figure.table,
                "what": figure.what,
                "unit": "s" if figure.what == "latency" else "bytes/s",
                "constant": figure.constant or None,
                "note": figure.note,
                **{key: getattr(figure, key) for key in ("count", "value", "low", "high")},
            }
            for figure in figures
        ],
        "notes": list(notes),
        "output": None if output is None else str(output),
    }


def _constant_document(finding: Finding, source: str) -> dict[str, object]:
    return {
        "name": finding.name,
        "unit": MEANINGS[finding.name].unit,
        "before": finding.before,
        "value": finding.value,
        "low": finding.low,
        "high": finding.high if math.isfinite(finding.high) else None,
        "identifiable": finding.identifiable,
        "why": finding.why or None,
        "needs": None if finding.identifiable else finding.needs,
        "source": source,
    }


def _machine_name(found: Calibrated, case: Case) -> str:
    return f"{found.profile.name}-{case.size}"


def _errors(found: Calibrated) -> list[tuple[Case, float, float]]:
    """The mean relative error of each table before and after."""
    both = zip(found.cases, found.errors(found.before_s), found.errors(found.after_s), strict=True)
    return [(case, float(abs(before).mean()), float(abs(after).mean())) for case, before, after in both]


def print_calibrated(found: Calibrated, figures: Sequence[PairFigure]) -> None:
    """What was found, for people."""
    _print_pairs(figures)
    sure = [finding for finding in found.findings if finding.identifiable]
    columns = ("constant", "before", "found", "95 % from", "to", "fitted to")
    rows = [(each.name, *_texts(each, each.before, each.value, each.low, each.high), each.origin) for each in sure]
    report.print_table(f"{found.profile.name}: what the measurements tell", columns, rows, texts=(0, 5))
    if unsure := [finding for finding in found.findings if not finding.identifiable]:
        _print_unsure(unsure)
    _print_errors(found)


def _print_unsure(findings: Sequence[Finding]) -> None:
    """One row for those of which the same can be said."""
    alike: dict[tuple[str, str], list[str]] = {}
    for each in findings:
        text = f"{each.name} {constant_text(each.name, each.before, 4)}"
        alike.setdefault((each.why, each.needs), []).append(text)
    columns = ("constants, as they were", "why", "what would tell them")
    rows = [(", ".join(texts), why, needs) for (why, needs), texts in alike.items()]
    report.print_table("what they do not tell", columns, rows, texts=(0, 1, 2))


def _texts(finding: Finding, *values: float) -> tuple[str, ...]:
    return tuple(constant_text(finding.name, value, 4) for value in values)


def _print_pairs(figures: Sequence[PairFigure]) -> None:
    columns = ("table of pairs", "what", "median", "95 % from", "to", "figures", "tells")
    rows = []
    for each in figures:
        name = "link_latency" if each.what == "latency" else "link_bandwidth"
        texts = (constant_text(name, value, 4) for value in (each.value, each.low, each.high))
        tells = f"{each.constant or 'for information'}: {each.note}"
        rows.append((Path(each.table).name, each.what, *texts, str(each.count), tells))
    if rows:
        report.print_table("pairs", columns, rows, texts=(0, 1, 6))


def _print_errors(found: Calibrated) -> None:
    columns = ("table", "machine", "collective", "rows", "mean error before", "now")
    rows = [
        (Path(case.table.name).name, _machine_name(found, case), case.collective, str(len(case.rows)),
         f"{before:.1%}", f"{after:.1%}")
        for case, before, after in _errors(found)
    ]  # fmt: skip
    if rows:
        report.print_table("predicted against measured, of what was fitted to", columns, rows, texts=(0, 1, 2))


def print_live(measured: Comparison, title: str) -> None:
    """What was found on ranks that run, for people."""
    columns = ("measured", "nominal", "bandwidth", "95 %", "latency", "quartiles", "launch", "quartiles")
    rows = []
    for each in measured.calibration.fits:
        rate, nominal = each.bandwidth_bytes_per_s, each.route_class.nominal_bandwidth_bytes_per_s
        rates = (format_bandwidth(nominal), format_bandwidth(rate.value), between(rate, format_bandwidth))
        latency, launch = (
            (format_time(spread.value), between(spread, format_time)) for spread in (each.latency_s, each.launch_s)
        )
        rows.append((pairs_of(each), *rates, *latency, *launch))
    report.print_table(title, columns, rows)


def live_document(measured: Comparison, output: Path | None) -> dict[str, object]:
    """What was found on ranks that run, for a script."""
    document = report.comparison_document(measured)
    del document["runs"]
    return document | {
        "launch_s": float(measured.calibration.machine.transport.launch_s),
        "output": None if output is None else str(output),
    }
