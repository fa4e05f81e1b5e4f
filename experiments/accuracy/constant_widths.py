"""How far a constant is from the same constant of other sources: the widths of `tasp_lab.machines.intervals`.

Each constant of the profiles, libraries and accelerators is predicted by the median of the same one elsewhere, itself
left out; those proportional to a line rate as shares of it. ``python -m experiments.accuracy.constant_widths`` writes
``experiments/accuracy/constant_widths.md``: the 90th percentile of the absolute error, by what a constant is and the
kind of its source. Two kinds of errors are added: backward kernel rates where the forward one would be assumed, and
the account of messages below `SMALL_BYTES` on documented networks, which latencies of the library's code decide.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common import markdown_table
from tasp_lab.core.files import write_whole
from tasp_lab.machines.compute import accelerator_names, accelerator_parameters
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.intervals import WIDTHS, dimension, source_kind
from tasp_lab.machines.parameters import library_parameters
from tasp_lab.machines.profile import load_profile, profile_names

FOLDER = Path(__file__).parent
SMALL_BYTES = 2**20


class Value(NamedTuple):
    """One constant as one source states it: what it is, the kind of its source, and what values it is compared with."""

    what: str
    kind: str
    group: str
    source: str
    value: float


def main() -> None:
    """Write the table of widths."""
    errors = by_kind(found := list(values()))
    rows = [
        (
            f"{what}, {kind}",
            str(len(errors.get((what, kind), ()))),
            f"{math.expm1(np.quantile(errors[what, kind], 0.9)):.0%}" if (what, kind) in errors else "",
            f"{width:.0%}",
        )
        for (what, kind), width in WIDTHS.items()
    ]
    table = markdown_table(("constant, source", "compared", "90th percentile", "width taken"), rows)
    text = (
        f"{' '.join(str(__doc__).split())}\n\n{len(found)} values of {len({each.group for each in found})} constants. "
        "Where fewer than three values can be compared, the width is that of the next more certain kind, or of the "
        f"other one of the dimension.\n\n{table}\n"
    )
    write_whole(FOLDER / "constant_widths.md", text.encode())
    print(text)


def by_kind(found: list[Value]) -> dict[tuple[str, str], list[float]]:
    """Absolute logarithmic errors against the median of the other sources, by what constants are and their source."""
    groups: defaultdict[str, list[Value]] = defaultdict(list)
    for each in found:
        groups[each.group].append(each)
    errors: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for group in groups.values():
        for each in group:
            others = [other.value for other in group if other.source != each.source]
            if others and (each.what, each.kind) != ("time", "code"):
                errors[each.what, each.kind].append(abs(math.log(each.value / statistics.median(others))))
    for of, error in _other_errors():
        errors[of].append(error)
    return errors


def values() -> Iterator[Value]:
    """All values, each source once."""
    seen = set()
    for each in (*_of_profiles(), *_of_libraries(), *_of_kernels()):
        if (each.group, each.source, each.value) not in seen:
            seen.add((each.group, each.source, each.value))
            yield each


def _of_profiles() -> Iterator[Value]:
    """Constants that are proportional to a line rate, as shares of it; ring rates only behind a switch."""
    for name in profile_names():
        profile = load_profile(name)
        for constant in profile.parameters.values():
            spec = CONSTANTS[constant.name]
            if not spec.is_part and not (constant.name == "ring_rate" and profile.inside == "switch"):
                continue
            share = profile.parameters.numbers[constant.name] / profile.parameters.numbers[spec.depends_on]
            kind = source_kind(constant.source)
            yield Value("rate", kind, f"{constant.name}, {profile.library}", constant.source, share)


def _of_libraries() -> Iterator[Value]:
    """Latencies and launches of both libraries: what the code of each states is no error of the other's."""
    for library in ("nccl", "rccl"):
        for constant in library_parameters(library):
            kind = source_kind(constant.source)
            if dimension(CONSTANTS[constant.name]) == "time":
                yield Value("time", kind, constant.name, library, constant.number)


def _of_kernels() -> Iterator[Value]:
    """Rates of kernels: measured by several sources, and backward taken from forward."""
    lines = [line for line in (FOLDER / "kernel_rates.csv").read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        group = f"FlashAttention-2 {row['gpu']} {row['pass']} {row['mask']}"
        yield Value("compute", "measured", group, row["source"], float(row["tflops"]))


def _other_errors() -> Iterator[tuple[tuple[str, str], float]]:
    """Errors that no second source tells, by what constants are and their source."""
    for name in accelerator_names():
        rates = {each.name: each.number for each in accelerator_parameters(name)}
        if {"compute_rate", "compute_rate_backward"} <= set(rates):
            yield ("compute", "assumed"), abs(math.log(rates["compute_rate"] / rates["compute_rate_backward"]))
    for table in json.loads((FOLDER / "accuracy.json").read_text())["tables"]:
        if table["in_scope"] and load_profile(table["profile"].partition("-")[0]).network == "documented":
            for row in table["rows"]:
                if row["in_scope"] and row["size_bytes"] < SMALL_BYTES:
                    yield ("time", "code"), abs(math.log1p(row["relative_error"]))


if __name__ == "__main__":
    main()
