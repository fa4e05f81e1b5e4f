"""The errors of ratios of predicted times, which the order of two schedules depends on.

``python -m experiments.accuracy.paired`` compares every pair of measured rows of one question with its prediction, fits
`tasp_lab.prediction.paired` to all sources and without each of them, and writes
``tasp_lab/prediction/paired_errors.toml``, and ``decisions.md`` beside this module: what the picks cost on stacks that
were left out. Takes two minutes.

Leaving a source out leaves out all stacks that it measured, in other sources, too: a stack decides nothing that it is
judged by. A fit has three parts.

1. The shape of the errors: the likelihood of the measured ratios, with equal weight for each source.
2. Its scale: the least one that keeps two promises for pairs of one family, in sources that were left out of the shape
   one after another. Calls at 95 % are right in 95 %, and the losses that are expected of taking the likelier one of
   two are not below the actual ones. Calls alone would do with half of the scale: most of them are not close.
3. *layout*, the error of a family in a stack that was not seen: its likelihood in the pairs of two families of the
   sources that were left out. Nothing in a prediction is fitted to a family in a stack but the time of some hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from scipy import optimize, stats

import tasp_lab.prediction
from experiments.common import Formats, table, write_page
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.measure.accuracy.decisions import Question, decision_figures, questions_of
from tasp_lab.measure.accuracy.layer import LayerEvaluator
from tasp_lab.measure.accuracy.report import own_tables
from tasp_lab.measure.accuracy.table_accuracy import MeasuredRow, TableAccuracy
from tasp_lab.measure.readers import LayerTable, find_all_tables
from tasp_lab.measure.scores import CALLED, figures_of
from tasp_lab.prediction.paired import FREEDOM, PairedErrors, Setting, paired_document
from tasp_lab.schedules.registry import family_of

FILE = Path(next(iter(tasp_lab.prediction.__path__))) / "paired_errors.toml"
PAGE = Path(__file__).parent / "decisions.md"

START = PairedErrors(own=0.06, family=0.05, exposed=0.3, steps=0.03, links_alone=4.0, pairs=0, sources=0, layout=0.05)
"""Where fits start, and what they are drawn to where a source says little: by half a unit of each logarithm."""

MOST_PAIRS = 60
"""Pairs of a source beyond this many add no weight: they are of few machines and kernels."""

NO_REGRET = 1e-4
"""A mean regret below this has no ratio."""

ABOUT = (
    "Made by `python -m experiments.accuracy.paired`. Picks among measured schedules, by errors fitted without all "
    "stacks of the source of each question, in other sources, too. Actual: measured time of the pick over the measured "
    "best, less one; expected: what was predicted of that; pairs: those with a schedule of the stack. A question with "
    "several stacks counts for each."
)

COLUMNS: Formats = {
    "stack left out": "{stack}", "links": "{setting}", "questions": "{questions}", "expected": "{expected_regret:.1%}",
    "actual": "{mean_regret:.1%}", "expected over actual": "{ratio:.2f}", "largest": "{worst_regret:.1%}",
    "decided": "{decided:.0%}", "pairs": "{pairs}", "called at 95 %": "{called:.1%}",
    "of these right": "{called_right:.1%}", "Brier": "{brier:.3f}",
}  # fmt: skip

SCALES = np.exp(np.linspace(math.log(0.4), math.log(1.5), 45))
LAYOUTS = math.log(0.01), math.log(0.5)
"""Between these logarithms *layout* is sought."""


class Rows(NamedTuple):
    """Pairs as arrays (pairs,): logarithms of ratios, differences of exposed shares, and where they are from.

    `predicted`, `measured` and `steps` are logarithms of ratios. `differ` and `families` are whether the schedules and
    their families differ. `stacks` are those of both schedules, an array (pairs, 2), and `layouts` what both measure.
    """

    predicted: np.ndarray
    measured: np.ndarray
    differ: np.ndarray
    families: np.ndarray
    exposed: np.ndarray
    steps: np.ndarray
    setting: np.ndarray
    source: np.ndarray
    stacks: np.ndarray
    layouts: np.ndarray

    def of(self, which: np.ndarray) -> Rows:
        """Some of them."""
        return Rows(*(each[which] for each in self))

    def without(self, source: str) -> Rows:
        """Those of other sources, and of no stack that this source measured."""
        mine = self.source == source
        return self.of(~mine & ~np.isin(self.stacks, np.unique(self.stacks[mine])).any(axis=1))


class LeftOut(NamedTuple):
    """The pairs of a source, the weight of each, and the shape that was fitted without the source and its stacks."""

    rows: Rows
    weight: float
    shape: PairedErrors


def main() -> None:
    """Fit the errors, and write them and what picks by them cost."""
    evaluator = LayerEvaluator()
    tables: list[TableAccuracy] = []
    for measurements in find_all_tables([own_tables() / "layers"]):
        assert isinstance(measurements, LayerTable), "the folder has tables of layers"
        progress(Path(measurements.name).name)
        tables.append(evaluator.evaluate(measurements))
    questions = [question for each in tables for question in questions_of(each)]
    rows = rows_of(questions)
    without = {source: fit(rows.without(source)) for source in sorted(set(rows.source))}
    write_whole(FILE, paired_document(fit(rows), without))
    write_page(PAGE, decisions_page([replace(each, errors=without[each.source]) for each in questions]))


def rows_of(questions: Iterable[Question]) -> Rows:
    """All pairs of all questions."""
    found = []
    for question in questions:
        for place, first in enumerate(question.rows):
            for other, second in enumerate(question.rows[place + 1 :], place + 1):
                one, two = question.rivals[place], question.rivals[other]
                (first_s, _, costs), (second_s, _, others) = first.known(), second.known()
                found.append((
                    math.log(one.time_s / two.time_s), math.log(first_s / second_s),
                    one[:2] != two[:2], family_of(one.schedule) != family_of(two.schedule),
                    one.exposed_share - two.exposed_share, math.log(one.steps / two.steps),
                    costs.setting, question.source, [stack_of(first), stack_of(second)],
                    "\n".join((*costs.layouts, *others.layouts)),
                ))  # fmt: skip
    return Rows(*(np.array(each) for each in zip(*found, strict=True)))


def stack_of(row: MeasuredRow) -> str:
    """The stack that a row measured."""
    return str(row.shape["stack"] or "")


def decisions_page(questions: Sequence[Question]) -> str:
    """What picks cost among the schedules of each stack, by errors fitted without all stacks of the source."""
    stacks = sorted({stack_of(row) for question in questions for row in question.rows})
    rows = []
    for setting, stack in product(("library", "links alone"), stacks):
        mine = [each for each in questions if _is_of(each, setting, stack)]
        if mine:
            rows.append({"stack": stack, "setting": setting, **_figures_of(mine, stack)})
    every = [each for each in questions if each.rows[0].costs and each.rows[0].costs.setting == "library"]
    rows.append({"stack": "all", "setting": "library", **_figures_of(every)})
    rows.append({"stack": "all", "setting": "all", **_figures_of(questions)})
    return f"{ABOUT}\n\n{table(rows, COLUMNS)}"


def _is_of(question: Question, setting: str, stack: str) -> bool:
    costs = question.rows[0].costs
    return costs is not None and costs.setting == setting and stack in map(stack_of, question.rows)


def _figures_of(questions: Sequence[Question], stack: str = "") -> dict[str, object]:
    """The figures of questions, and of their pairs with a row of the stack."""
    decisions = decision_figures(questions)
    found = []
    for question in questions:
        stacks = {int(str(row.shape["line"])): stack_of(row) for row in question.rows}
        found += [each for each in question.pairs if not stack or stack in (stacks[each.first], stacks[each.second])]
    expected, actual = decisions["expected_regret"], decisions["mean_regret"]
    assert isinstance(expected, float)
    assert isinstance(actual, float)
    ratio = expected / actual if actual > NO_REGRET else None
    scores = figures_of([], found)
    kept = {name: scores[name] for name in ("pairs", "called", "called_right", "brier")}
    return {**decisions, **kept, "ratio": ratio}


def fit(rows: Rows) -> PairedErrors:
    """The errors of some pairs."""
    shape, parts = fit_shape(rows), left_out(rows)
    scale = fit_scale(parts)
    return PairedErrors(
        own=_short(scale * shape.own), family=_short(scale * shape.family), layout=_short(fit_layout(parts, scale)),
        exposed=_short(scale * shape.exposed), steps=_short(scale * shape.steps),
        links_alone=_short(shape.links_alone), pairs=len(rows.source), sources=len(set(rows.source)),
        layouts=layouts_in(rows),
    )  # fmt: skip


def layouts_in(rows: Rows) -> tuple[str, ...]:
    """What was measured, with each stack and with any."""
    named = {each for both in rows.layouts for each in both.splitlines()}
    return tuple(sorted(named | {each.partition(" ")[2] for each in named}))


def left_out(rows: Rows) -> list[LeftOut]:
    """Each source with the shape fitted without it and its stacks, where another one is left.

    Only pairs for which the library is modelled: on PCIe the few tables contradict each other, and one of them loses
    more than all others together.
    """
    found = []
    for source in sorted(set(rows.source)):
        inside = rows.of((rows.source == source) & (rows.setting == "library"))
        others = rows.without(source)
        if len(inside.source) and len(others.source):
            found.append(LeftOut(inside, min(1.0, MOST_PAIRS / len(inside.source)), fit_shape(others)))
    return found


def fit_scale(parts: Sequence[LeftOut]) -> float:
    """The least scale of the shape from which on both promises are kept within families; 1 where nothing tells."""
    broken = [place for place, scale in enumerate(SCALES) if not _keeps(parts, float(scale))]
    if not parts or len(broken) == len(SCALES):
        return 1.0
    return float(SCALES[min(broken[-1] + 1, len(SCALES) - 1)] if broken else SCALES[0])


def _keeps(parts: Sequence[LeftOut], scale: float) -> bool:
    """Whether calls are right as often as they should be, and losses are not above what is expected."""
    called = right = expected = actual = 0.0
    for inside, weight, shape in parts:
        rows = inside.of(~inside.families.astype(bool) & inside.differ.astype(bool))
        spread = np.maximum(scale * spreads(shape, rows), 1e-9)
        chances = stats.t.cdf(-rows.predicted / spread, FREEDOM)
        sure = np.maximum(chances, 1 - chances) >= CALLED
        called += weight * sure.sum()
        right += weight * (sure & ((chances > 0.5) == (rows.measured < 0))).sum()
        expected += weight * expected_losses(np.abs(rows.predicted), spread).sum()
        actual += weight * np.maximum(-np.sign(rows.predicted) * rows.measured, 0).sum()
    return bool(right >= CALLED * called and expected >= actual)


def fit_layout(parts: Sequence[LeftOut], scale: float) -> float:
    """The likeliest *layout*: the error between families of stacks that were left out of the shape."""

    def loss(log: float) -> float:
        likely = (log - math.log(START.layout)) ** 2 / -4
        for inside, weight, shape in parts:
            rows, named = inside.of(inside.families.astype(bool)), msgspec.structs.asdict(shape)
            of_stack = {name: scale * named[name] for name in ("own", "exposed", "steps")} | {"family": math.exp(log)}
            likely += weight * _log_likelihood(rows, msgspec.structs.replace(shape, **of_stack)).sum()
        return float(-likely)

    return math.exp(optimize.minimize_scalar(loss, bounds=LAYOUTS, method="bounded").x)


def expected_losses(leads: np.ndarray, spreads: np.ndarray) -> np.ndarray:
    """What taking the likelier one of two is expected to lose: the mean of max(spread * t - lead, 0), of logarithms."""
    reach = leads / spreads
    tail = stats.t.pdf(reach, FREEDOM) * (FREEDOM + reach**2) / (FREEDOM - 1)
    found: np.ndarray = spreads * (tail - reach * stats.t.sf(reach, FREEDOM))
    return found


def fit_shape(rows: Rows) -> PairedErrors:
    """The likeliest shape; each source has the weight of at most `MOST_PAIRS` pairs."""
    counts = {source: int((rows.source == source).sum()) for source in set(rows.source)}
    weights = np.array([min(1.0, MOST_PAIRS / counts[source]) for source in rows.source])
    start = np.log(_numbers(START))

    def loss(logs: np.ndarray) -> float:
        likely = _log_likelihood(rows, _errors(logs))
        return float(-(weights * likely).sum() + ((logs - start) ** 2).sum() / 4)

    return _errors(optimize.minimize(loss, start, method="L-BFGS-B").x)


def spreads(errors: PairedErrors, rows: Rows) -> np.ndarray:
    """The scale of each pair's error, an array (pairs,)."""
    settings: dict[Setting, float] = {each: errors.factor(each) for each in ("exact", "library", "links alone")}
    factor = np.array([settings[each] for each in rows.setting])
    own = errors.own**2 * rows.differ + errors.family**2 * rows.families
    found: np.ndarray = factor * np.sqrt(own + (errors.exposed * rows.exposed) ** 2 + (errors.steps * rows.steps) ** 2)
    return found


def _log_likelihood(rows: Rows, errors: PairedErrors) -> np.ndarray:
    """Of each measured ratio, an array (pairs,)."""
    spread = np.maximum(spreads(errors, rows), 0.005)
    found: np.ndarray = stats.t.logpdf((rows.predicted - rows.measured) / spread, FREEDOM) - np.log(spread)
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
