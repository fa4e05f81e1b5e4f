"""The questions, submissions and scores of the ranking benchmark::

    python -m experiments.ranking_benchmark mine.csv --pairs mine_pairs.csv

No simulator is needed: ``questions.csv`` has the measured times, a submission is a table of predicted ones. The scores
are those of ``tasp-lab accuracy`` (`tasp_lab.measure.scores`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path

from tasp_lab.core.errors import TableError, nearest
from tasp_lab.core.tables import Formats
from tasp_lab.measure.readers.file_position import FilePosition, parse_csv, read_text
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
            Way(cells["schedule"], *(place.positive(cells[name], name) for name in WAY)),
            place.positive(cells["measured_s"], "measured_s"),
        )
        for place, cells in _lines(path, ("question", "row", "schedule", *WAY, "measured_s"))
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
    for place, cells in _lines(path, ("row", "time_s")):
        name = _known(place, cells["row"], names)
        if name in times_s:
            raise TableError(f"{place}: row {name!r} occurs twice")
        times_s[name] = place.positive(cells["time_s"], "time_s")
        if cells.get("time_low_s") or cells.get("time_high_s"):
            low_s, high_s = (place.positive(cells.get(end, ""), end) for end in ("time_low_s", "time_high_s"))
            if low_s > high_s:
                raise TableError(f"{place}: time_low_s {low_s:g} is above time_high_s {high_s:g}")
            intervals_s[name] = low_s, high_s
        if cells.get("expected_regret"):
            regrets[name] = _share(place, cells["expected_regret"], "expected_regret")
    if not times_s:
        raise TableError(f"{path}: no rows, expected a predicted time for rows of {QUESTIONS.name}")
    return Submission(times_s, intervals_s, regrets, {} if pairs is None else _probabilities(pairs, names))


def _probabilities(path: Path, questions: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """The probabilities of pairs, in both orders; `questions` are those of the rows by name."""
    chances: dict[tuple[str, str], float] = {}
    for place, cells in _lines(path, ("first", "second", "probability_first_faster")):
        first, second = (_known(place, cells[end], questions) for end in ("first", "second"))
        if first == second or questions[first] != questions[second]:
            raise place.error(f"{first!r} and {second!r}", "two rows of one question")
        chance = _share(place, cells["probability_first_faster"], "probability_first_faster", most=1.0)
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


COLUMNS: Formats = {
    "predictor": "{predictor}", "questions": "{questions:.0f}", "mean regret": "{mean_regret:.1%}",
    "90 %": "{p90_regret:.1%}", "largest": "{worst_regret:.1%}", "within 2 %": "{within_2:.1%}",
    "decided": "{decided:.1%}", "their regret": "{mean_regret_of_decided:.1%}", "pairs": "{pairs:.0f}",
    "right": "{right:.1%}", "called at 95 %": "{called:.1%}", "of these right": "{called_right:.1%}",
    "Brier": "{brier:.3f}", "inside": "{inside:.1%}", "interval score": "{interval_score:.2f}",
}  # fmt: skip
"""The scores that are shown."""


def _lines(path: Path, required: Sequence[str]) -> Iterator[tuple[FilePosition, dict[str, str]]]:
    """The cells of each line of a CSV file by column, with its place."""
    content = parse_csv(read_text(path), str(path))
    if missing := [name for name in required if name not in content.columns]:
        raise FilePosition(str(path), 1).error(f"no column {missing[0]!r}", ", ".join(required))
    return content.rows()


def _known(place: FilePosition, name: str, names: Mapping[str, object]) -> str:
    if name in names:
        return name
    near = "".join(f", did you mean {each!r}?" for each in nearest(name, names))
    raise TableError(f"{place}: no row {name!r} in {QUESTIONS.name}{near}")


def _share(place: FilePosition, text: str, what: str, most: float = math.inf) -> float:
    """A number from 0 to `most`."""
    value = place.number(text, what)
    if not 0 <= value <= most:
        raise place.error(f"{what} {text!r}", "a number from 0" + f" to {most:g}" * math.isfinite(most))
    return value
