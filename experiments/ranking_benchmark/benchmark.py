"""The questions, submissions and scores of the ranking benchmark::

    python -m experiments.ranking_benchmark mine.csv --pairs mine_pairs.csv

No simulator is needed: ``questions.csv`` has the measured times, a submission is a table of predicted ones. The scores
are those of ``tasp-lab accuracy`` (`tasp_lab.measure.scores`).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path

from tasp_lab.core.errors import TableError, nearest
from tasp_lab.measure.scores import RULES, Decision, Pair, Span, Way, figures_of, regret_figures, regret_of

FOLDER = Path(__file__).parent
QUESTIONS = FOLDER / "questions.csv"
ENTRIES = FOLDER / "entries"
PAIRS = ".pairs.csv"
"""The ending of a table of probabilities beside the entry ``NAME.csv``."""

WAY = ("bytes_per_rank", "steps", "link_bytes_per_s")
"""The columns of what simple rules need beside the schedule."""

Figures = dict[str, float | None]


@dataclass(frozen=True)
class Row:
    """A measured time of a question; `name` is its table and line, like ``usp_8xa100:12``."""

    question: str
    name: str
    way: Way
    measured_s: float


@dataclass(frozen=True)
class Submission:
    """What a predictor states: times in seconds by row; intervals, expected regrets and probabilities if it has some.

    `probabilities` are those of the first row of a pair to be faster.
    """

    times_s: Mapping[str, float]
    intervals_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    expected_regrets: Mapping[str, float] = field(default_factory=dict)
    probabilities: Mapping[tuple[str, str], float] = field(default_factory=dict)


def load_questions(path: Path = QUESTIONS) -> list[list[Row]]:
    """The rows of each question, in the order of the file. Raises `TableError` for a file that cannot be read."""
    rows = [
        Row(
            cells["question"], cells["row"],
            Way(cells["schedule"], *(_number(path, line, cells, name) for name in WAY)),
            _number(path, line, cells, "measured_s"),
        )
        for line, cells in _lines(path, ("question", "row", "schedule", *WAY, "measured_s"))
    ]  # fmt: skip
    return [list(group) for _, group in groupby(rows, key=lambda row: row.question)]


def read_submission(path: Path, questions: Sequence[Sequence[Row]], pairs: Path | None = None) -> Submission:
    """A submission in CSV files.

    Parameters
    ----------
    path : columns ``row`` and ``time_s``; optional ``time_low_s`` and ``time_high_s``, and ``expected_regret``.
    questions : what rows and pairs may be of.
    pairs : columns ``first``, ``second`` and ``probability_first_faster``.

    Raises `TableError`, one line with file and line, for unknown or repeated rows, and for what is no positive number.
    """
    names = {row.name: row.question for rows in questions for row in rows}
    times_s: dict[str, float] = {}
    intervals_s: dict[str, tuple[float, float]] = {}
    regrets: dict[str, float] = {}
    for line, cells in _lines(path, ("row", "time_s")):
        name = _known(path, line, cells["row"], names)
        if name in times_s:
            raise TableError(f"{path}, line {line}: row {name!r} occurs twice")
        times_s[name] = _number(path, line, cells, "time_s")
        if cells.get("time_low_s") or cells.get("time_high_s"):
            low_s, high_s = (_number(path, line, cells, end) for end in ("time_low_s", "time_high_s"))
            if low_s > high_s:
                raise TableError(f"{path}, line {line}: time_low_s {low_s:g} is above time_high_s {high_s:g}")
            intervals_s[name] = low_s, high_s
        if cells.get("expected_regret"):
            regrets[name] = _number(path, line, cells, "expected_regret", least=0.0)
    if not times_s:
        raise TableError(f"{path}: no rows, expected a predicted time for rows of {QUESTIONS.name}")
    return Submission(times_s, intervals_s, regrets, {} if pairs is None else _probabilities(pairs, names))


def _probabilities(path: Path, questions: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """The probabilities of pairs, in both orders; `questions` are those of the rows by name."""
    chances: dict[tuple[str, str], float] = {}
    for line, cells in _lines(path, ("first", "second", "probability_first_faster")):
        first, second = (_known(path, line, cells[end], questions) for end in ("first", "second"))
        if first == second or questions[first] != questions[second]:
            raise TableError(f"{path}, line {line}: {first!r} and {second!r}, expected two rows of one question")
        chance = _number(path, line, cells, "probability_first_faster", least=0.0, most=1.0)
        chances[first, second], chances[second, first] = chance, 1 - chance
    return chances


def score(questions: Sequence[Sequence[Row]], submission: Submission) -> Figures:
    """The scores of a submission.

    Its pick is the row with the least expected regret, of one without expected regrets that with the least time. Rows
    without a time are not picked, but may be the measured best; a question without any time is not answered.
    """
    decisions, pairs, spans = [], [], []
    for rows in questions:
        known = [number for number, row in enumerate(rows) if row.name in submission.times_s]
        if not known:
            continue
        regrets = [submission.expected_regrets.get(rows[number].name) for number in known]
        costs = [submission.times_s[rows[number].name] for number in known] if None in regrets else regrets
        place = min(range(len(known)), key=lambda number: costs[number] or 0.0)
        measured_s = [row.measured_s for row in rows]
        decisions.append(Decision(regret_of(measured_s, known[place]), regrets[place]))
        pairs += [_pair(rows, one, two, submission) for one, two in combinations(known, 2)]
        named = [(submission.intervals_s.get(row.name), row) for row in rows]
        spans += [Span(*ends, row.measured_s) for ends, row in named if ends is not None]
    return figures_of(decisions, pairs, spans)


def _pair(rows: Sequence[Row], one: int, two: int, submission: Submission) -> Pair:
    first, second = rows[one], rows[two]
    predicted = submission.times_s[first.name] / submission.times_s[second.name]
    chance = submission.probabilities.get((first.name, second.name))
    return Pair(one, two, predicted, first.measured_s / second.measured_s, chance)


def score_rule(questions: Sequence[Sequence[Row]], rule: str) -> Figures:
    """The scores of a simple rule of `RULES`, which has picks alone."""
    picks = [(rows, RULES[rule]([row.way for row in rows])) for rows in questions]
    regrets = [regret_of([row.measured_s for row in rows], pick) for rows, pick in picks if pick is not None]
    return figures_of([]) | regret_figures(regrets)


def leaderboard(questions: Sequence[Sequence[Row]], entries: Path = ENTRIES) -> dict[str, Figures]:
    """The scores of all entries and rules, those that answer all questions first, then by mean regret."""
    found = {rule: score_rule(questions, rule) for rule in RULES}
    for path in sorted(entries.glob("*.csv")):
        if not path.name.endswith(PAIRS):
            pairs = path.with_name(path.stem + PAIRS)
            found[path.stem] = score(questions, read_submission(path, questions, pairs if pairs.exists() else None))
    return dict(sorted(found.items(), key=lambda each: (-(each[1]["questions"] or 0), each[1]["mean_regret"] or 0.0)))


COLUMNS = {
    "questions": "questions", "mean_regret": "mean regret", "p90_regret": "90 %", "worst_regret": "largest",
    "within_2": "within 2 %", "decided": "decided", "mean_regret_of_decided": "their regret", "pairs": "pairs",
    "right": "right", "called": "called at 95 %", "called_right": "of these right", "brier": "Brier",
    "inside": "inside", "interval_score": "interval score",
}  # fmt: skip
"""The scores that are shown, with their headings."""


def cells_of(name: str, figures: Figures) -> list[str]:
    """A line of the leaderboard."""
    plain = {"questions": "{:.0f}", "pairs": "{:.0f}", "brier": "{:.3f}", "interval_score": "{:.2f}"}
    values = ((figures[column], plain.get(column, "{:.1%}")) for column in COLUMNS)
    return [name, *("-" if value is None else form.format(value) for value, form in values)]


def _lines(path: Path, required: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The cells of each line of a CSV file by column, with the number of the line."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in required if name not in (reader.fieldnames or ())]
            if missing:
                raise TableError(f"{path}, line 1: no column {missing[0]!r}, expected {', '.join(required)}")
            for cells in reader:
                yield reader.line_num, {name: text or "" for name, text in cells.items() if name}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read: {error}") from None


def _known(path: Path, line: int, name: str, names: Mapping[str, object]) -> str:
    if name in names:
        return name
    near = "".join(f", did you mean {each!r}?" for each in nearest(name, names))
    raise TableError(f"{path}, line {line}: no row {name!r} in {QUESTIONS.name}{near}")


def _number(
    path: Path, line: int, cells: Mapping[str, str], column: str, least: float | None = None, most: float = math.inf
) -> float:
    """A number above 0, or from `least` to `most`."""
    try:
        value = float(cells[column])
    except (KeyError, ValueError):
        value = math.nan
    if math.isfinite(value) and (value > 0 if least is None else least <= value <= most):
        return value
    wanted = "a number above 0" if least is None else f"a number from {least:g}" + f" to {most:g}" * math.isfinite(most)
    raise TableError(f"{path}, line {line}: {column} {cells.get(column, '')!r}, expected {wanted}")
