"""The residuals of the account, which intervals of predictions are made of.

``python -m experiments.accuracy.residuals`` compares every measured table of collectives by its library and by links
alone, and every table of layers. Kernels are those of tables predicted from other tables
(``experiments/results/kernel_accuracy.json``), and of tables that gave no constants; steps are those of
``experiments/results/whole_steps.json``. It writes
``tasp_lab/prediction/residuals.json``: a group per regime and measured machine. ``--only PART`` keeps those of others.
`tasp-lab accuracy` then checks the intervals, those of a table without its own source or provider.
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

import tasp_lab.prediction
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.sampling import DEFAULT_SAMPLING, FEW_SAMPLES
from tasp_lab.measure.accuracy.collective import evaluate_collective
from tasp_lab.measure.accuracy.kernel import evaluate_kernel
from tasp_lab.measure.accuracy.layer import LayerEvaluator
from tasp_lab.measure.accuracy.report import own_tables
from tasp_lab.measure.inputs import left_out_with
from tasp_lab.measure.readers import KernelTable, LayerTable, find_all_tables, find_tables
from tasp_lab.prediction.residuals import KERNELS, STEPS, Group, Regime, WorkKind, groups

FILE = Path(next(iter(tasp_lab.prediction.__path__))) / "residuals.json"
RESULTS = Path(__file__).parents[1] / "results"
KERNEL_ACCURACY, WHOLE_STEPS = RESULTS / "kernel_accuracy.json", RESULTS / "whole_steps.json"

HALF = "every second row"
"""What `experiments.tables.kernel_accuracy` calls a fit to the other half of the same table."""

ABOUT = (
    "Residuals of the account by regime and measured machine: log(measured / predicted). Made by "
    "python -m experiments.accuracy.residuals"
)


class Row(NamedTuple):
    """One measured time: its regime, what it is left out with, its machine, log(measured / predicted), and the
    variance of log(predicted) by the constants. Of collectives `step` is how much the error differs from that of the
    next smaller size of the table, for a doubling of the size; None of others."""

    regime: Regime
    key: str
    machine: str
    error: float
    constants: float
    step: float | None = None


PARTS: Mapping[str, tuple[Callable[[], Iterator[Row]], tuple[WorkKind, ...]]] = {
    "collectives": (lambda: chain(collectives("auto"), collectives("ideal")), ("collective",)),
    "layers": (lambda: layers(), ("layer",)),
    "kernels": (lambda: kernels(), ("kernel", "eager call")),
    "steps": (lambda: steps(), ("step",)),
}
"""What makes the rows of each part, and the works that they are of."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the data file."""
    parser = ArgumentParser(description="Write the residuals of the account.")
    parser.add_argument("--only", action="append", choices=PARTS, help="make these anew and keep others; several times")
    chosen = parser.parse_args(arguments).only or list(PARTS)
    made = groups_of([row for name in chosen for row in PARTS[name][0]()])
    kept = [each for each in groups() if each.regime.work not in {work for name in chosen for work in PARTS[name][1]}]
    write_whole(FILE, file_of((*kept, *made)))
    print(f"{FILE.name}: {sum(each.rows for each in made)} new rows in {len(made)} groups, {len(kept)} groups kept")


def file_of(groups: Sequence[Group]) -> bytes:
    """The data file, a group on each line."""
    about, lines = json.dumps(ABOUT).encode(), b",\n".join(map(msgspec.json.encode, groups))
    return b'{"about":' + about + b',"groups":[\n' + lines + b"\n]}\n"


def groups_of(rows: list[Row]) -> tuple[Group, ...]:
    """The rows by regime, source and machine."""
    found: defaultdict[tuple[Regime, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row.regime, row.key, row.machine].append(row)
    return tuple(
        Group(
            *key,
            len(each),
            *_moments([row.error for row in each]),
            _mean([row.constants for row in each]),
            _mean([row.step**2 for row in each if row.step is not None] or [0.0]),
        )
        for key, each in found.items()
    )


def collectives(library: str) -> Iterator[Row]:
    """The rows in scope of all measured tables of tasp-lab."""
    for table in find_tables([own_tables()]):
        progress(f"{library}: {Path(table.name).name}")
        before: tuple[int, float] | None = None
        for row in evaluate_collective(table, DEFAULT_SAMPLING, library).rows:
            if row.in_scope and row.interval is not None and row.relative_error is not None:
                error = -math.log1p(row.relative_error)
                samples_s = row.interval.samples_s
                variance = float(np.log(samples_s).var()) if len(samples_s) else 0.0
                machine = table.headers.get("system") or str(table.profile)
                step = None
                if before is not None and row.size_bytes > before[0]:  # a random walk over doublings of the size
                    step = (error - before[1]) / math.sqrt(math.log2(row.size_bytes / before[0]))
                before = row.size_bytes, error
                yield Row(row.interval.residual.asked, left_out_with(table), machine, error, variance, step)


def layers() -> Iterator[Row]:
    """Measured layers that count, which GPUs and links bound; a machine is a family, in whatever number of nodes."""
    evaluator = LayerEvaluator(FEW_SAMPLES)
    for table in find_all_tables([own_tables() / "layers"]):
        assert isinstance(table, LayerTable), "the folder has tables of layers"
        progress(Path(table.name).name)
        for row in evaluator.evaluate(table).rows:
            if row.in_scope and row.interval is not None and row.costs is not None and row.measured_s:
                assert row.predicted_s is not None, "an interval is that of a prediction"
                error, machine = math.log(row.measured_s / row.predicted_s), str(row.shape["profile"])
                yield Row(row.interval.residual.asked, left_out_with(table), machine, error, row.costs.rate_variance)


def kernels() -> Iterator[Row]:
    """Rows of kernels whose table gave no constant: tables predicted from others, and those that fitted nothing.

    Every second row of a table is no source of its own, so tables predicted by their other half are not among them.
    """
    for group in json.loads(KERNEL_ACCURACY.read_text())["kept_aside"]:
        if group["fitted_to"] != HALF:
            table = _kernel_table(group["table"])
            machine, variance = f"{group['gpu']} {group['kernel']}", _variance(group["table"])
            for _, measured_s, predicted_s in group["measured_and_predicted_s"]:
                yield Row(KERNELS, left_out_with(table), machine, math.log(measured_s / predicted_s), variance)
    for each in find_all_tables([own_tables() / "kernels"]):
        assert isinstance(each, KernelTable), "the folder has tables of kernels"
        yield from _unfitted(each)


def steps() -> Iterator[Row]:
    """Published steps, each source a machine of its own."""
    for row in json.loads(WHOLE_STEPS.read_text())["rows"]:
        if row["error"] is not None:
            yield Row(STEPS, row["source"], row["source"], -math.log1p(row["error"]), 0.0)


def _unfitted(table: KernelTable) -> Iterator[Row]:
    for row in evaluate_kernel(table, FEW_SAMPLES).rows:
        if row.in_scope and row.interval is not None and row.measured_s and row.predicted_s:
            machine, error = f"{row.shape['gpu']} {row.shape['kernel']}", math.log(row.measured_s / row.predicted_s)
            variance = float(np.log(row.interval.samples_s).var())
            yield Row(row.interval.residual.asked, left_out_with(table), machine, error, variance)


@cache
def _kernel_table(name: str) -> KernelTable:
    (found,) = find_all_tables([own_tables() / "kernels" / f"{name}.csv"])
    assert isinstance(found, KernelTable), "the folder has tables of kernels"
    return found


@cache
def _variance(name: str) -> float:
    """What the intervals of a kernel's constants give: the mean over the rows of a table."""
    intervals = [
        row.interval for row in evaluate_kernel(_kernel_table(name), FEW_SAMPLES).rows if row.interval is not None
    ]
    return float(np.mean([np.log(each.samples_s).var() for each in intervals])) if intervals else 0.0


def _moments(errors: list[float]) -> tuple[float, float]:
    return _mean(errors), round(float(np.var(errors)), 6)


def _mean(values: list[float]) -> float:
    return round(float(np.mean(values)), 6)


if __name__ == "__main__":
    main()
