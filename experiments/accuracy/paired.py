"""The errors of ratios of predicted times, which the order of two schedules depends on.

``python -m experiments.accuracy.paired`` compares every pair of measured rows of one question with its prediction, fits
`tasp_lab.prediction.paired` to all sources and without each of them, and writes
``tasp_lab/prediction/paired_errors.toml``. What picks would have cost by them is in ``layers.md``, beside this module.

A fit has two parts. First the shape of the errors: the likelihood of the measured ratios, with equal weight for each
source. Then their scale: the least one with which calls at 95 % are right in 95 % of the sources that were left out of
the shape, one after another. A source decides nothing that it is judged by: what judges it is fitted without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

import tasp_lab.prediction
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.measure.accuracy.decisions import measured, questions_of
from tasp_lab.measure.accuracy.layer import LayerEvaluator
from tasp_lab.measure.accuracy.report import own_tables
from tasp_lab.measure.accuracy.table_accuracy import TableAccuracy
from tasp_lab.measure.readers import LayerTable, find_all_tables
from tasp_lab.measure.scores import CALLED
from tasp_lab.prediction.paired import FREEDOM, PairedErrors, Setting, paired_document
from tasp_lab.schedules.registry import family_of

FILE = Path(next(iter(tasp_lab.prediction.__path__))) / "paired_errors.toml"

START = PairedErrors(own=0.06, family=0.05, exposed=0.3, steps=0.03, links_alone=4.0, pairs=0, sources=0)
"""Where fits start, and what they are drawn to where a source says little: by half a unit of each logarithm."""

MOST_PAIRS = 60
"""Pairs of a source beyond this many add no weight: they are of few machines and kernels."""

SCALES = np.exp(np.linspace(math.log(0.4), math.log(1.5), 45))


class Rows(NamedTuple):
    """Pairs as arrays (pairs,): logarithms of ratios, differences of exposed shares, and where they are from.

    `predicted`, `measured` and `steps` are logarithms of ratios. `differ` and `families` are whether the schedules and
    their families differ.
    """

    predicted: np.ndarray
    measured: np.ndarray
    differ: np.ndarray
    families: np.ndarray
    exposed: np.ndarray
    steps: np.ndarray
    setting: np.ndarray
    source: np.ndarray

    def of(self, which: np.ndarray) -> Rows:
        """Some of them."""
        return Rows(*(each[which] for each in self))


def main() -> None:
    """Fit the errors, and write them."""
    evaluator = LayerEvaluator()
    tables: list[TableAccuracy] = []
    for table in find_all_tables([own_tables() / "layers"]):
        assert isinstance(table, LayerTable), "the folder has tables of layers"
        progress(Path(table.name).name)
        tables.append(evaluator.evaluate(table))
    rows = rows_of(tables)
    sources = sorted(set(rows.source))
    without = {source: fit(rows.of(rows.source != source)) for source in sources}
    write_whole(FILE, paired_document(fit(rows), without))


def rows_of(tables: Sequence[TableAccuracy]) -> Rows:
    """All pairs of all questions."""
    found = []
    for question in (question for table in tables for question in questions_of(table)):
        for place, first in enumerate(question.rows):
            for other, second in enumerate(question.rows[place + 1 :], place + 1):
                one, two, costs = question.rivals[place], question.rivals[other], first.costs
                assert costs is not None, "rows of questions have costs"
                found.append((
                    math.log(one.time_s / two.time_s), math.log(measured(first) / measured(second)),
                    one[:2] != two[:2], family_of(one.schedule) != family_of(two.schedule),
                    one.exposed_share - two.exposed_share, math.log(one.steps / two.steps),
                    costs.setting, question.source,
                ))  # fmt: skip
    return Rows(*(np.array(each) for each in zip(*found, strict=True)))


def fit(rows: Rows) -> PairedErrors:
    """Shape and scale of the errors of some pairs."""
    shape, scale = fit_shape(rows), fit_scale(rows)
    return PairedErrors(
        own=_short(scale * shape.own), family=_short(scale * shape.family), exposed=_short(scale * shape.exposed),
        steps=_short(scale * shape.steps), links_alone=_short(shape.links_alone),
        pairs=len(rows.source), sources=len(set(rows.source)),
    )  # fmt: skip


def fit_scale(rows: Rows) -> float:
    """The least factor of the shape from which on calls keep their promise; 1 for a single source.

    A call is an order with a probability of at least `CALLED` in a source that the shape was fitted without. Each
    source has the weight of at most `MOST_PAIRS` pairs.
    """
    sources = sorted(set(rows.source))
    if len(sources) == 1:
        return 1.0
    called, right = np.zeros(len(SCALES)), np.zeros(len(SCALES))
    for source in sources:
        inside = rows.of(rows.source == source)
        spread = np.maximum(spreads(fit_shape(rows.of(rows.source != source)), inside), 1e-9)
        chances = stats.t.cdf(-inside.predicted / (SCALES[:, None] * spread), FREEDOM)
        sure = np.maximum(chances, 1 - chances) >= CALLED
        weight = min(1.0, MOST_PAIRS / len(inside.source))
        called += weight * sure.sum(axis=1)
        right += weight * (sure & ((chances > 0.5) == (inside.measured < 0))).sum(axis=1)
    broken = np.flatnonzero(right < CALLED * called)
    first = min(broken[-1] + 1, len(SCALES) - 1) if len(broken) else 0
    return float(SCALES[first])


def fit_shape(rows: Rows) -> PairedErrors:
    """The likeliest shape; each source has the weight of at most `MOST_PAIRS` pairs."""
    counts = {source: int((rows.source == source).sum()) for source in set(rows.source)}
    weights = np.array([min(1.0, MOST_PAIRS / counts[source]) for source in rows.source])
    start = np.log(_numbers(START))
    error = rows.predicted - rows.measured

    def loss(logs: np.ndarray) -> float:
        spread = np.maximum(spreads(_errors(logs), rows), 0.005)
        likely = stats.t.logpdf(error / spread, FREEDOM) - np.log(spread)
        return float(-(weights * likely).sum() + ((logs - start) ** 2).sum() / 4)

    return _errors(optimize.minimize(loss, start, method="L-BFGS-B").x)


def spreads(errors: PairedErrors, rows: Rows) -> np.ndarray:
    """The scale of each pair's error, an array (pairs,)."""
    settings: dict[Setting, float] = {each: errors.factor(each) for each in ("exact", "library", "links alone")}
    factor = np.array([settings[each] for each in rows.setting])
    own = errors.own**2 * rows.differ + errors.family**2 * rows.families
    found: np.ndarray = factor * np.sqrt(own + (errors.exposed * rows.exposed) ** 2 + (errors.steps * rows.steps) ** 2)
    return found


def _numbers(errors: PairedErrors) -> tuple[float, ...]:
    return errors.own, errors.family, errors.exposed, errors.steps, errors.links_alone


def _errors(logs: np.ndarray) -> PairedErrors:
    own, family, exposed, steps, links_alone = map(float, np.exp(logs))
    return PairedErrors(own, family, exposed, steps, links_alone, pairs=0, sources=0)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
