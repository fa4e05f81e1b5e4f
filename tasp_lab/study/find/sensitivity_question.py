"""What is asked of a study's sensitivity: its section ``[find] sensitivity``, and what is given in place of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from tasp_lab.core.errors import StudyError, unknown
from tasp_lab.machines.sampling import Sampling
from tasp_lab.study.find.effects import check_samples
from tasp_lab.study.find.factors import BY_SOURCE, OWN_WIDTHS, Width

Of = Literal["speedup", "time"]
Method = Literal["one-at-a-time", "sobol"]
OFS: tuple[Of, ...] = get_args(Of)
METHODS: tuple[Method, ...] = get_args(Method)

_Text = TypeVar("_Text", bound=str)

FIELDS = ("of", "by", "top", "at", "between", "method", "samples")


@dataclass(frozen=True)
class SensitivityQuestion:
    """Which constants move an answer.

    Parameters
    ----------
    of : the speed-up of the first schedule of `between` over the second, or its time.
    between : these two schedules; empty for the first schedule of the study and its baseline.
    at : the question, see `tasp_lab.study.find.chosen.chosen`.
    width : of the intervals of constants.
    top : as many constants are listed.
    method, samples, seed : the design, see `tasp_lab.study.find.effects`.
    """

    of: Of = "speedup"
    between: tuple[str, ...] = ()
    at: str = ""
    width: Width = OWN_WIDTHS
    top: int = 5
    method: Method = "one-at-a-time"
    samples: int = 64
    seed: int = 0


def sensitivity_question(
    find: Mapping[str, object],
    *,
    of: str | None = None,
    between: Sequence[str] = (),
    at: str | None = None,
    by: str | None = None,
    top: int | None = None,
    method: str | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> SensitivityQuestion:
    """The question of a section of a study, with what is given in place of it.

    >>> found = sensitivity_question({"of": "speedup", "by": "source interval, else 20%"}, at="seq=8Ki", top=3)
    >>> found.width.otherwise, found.at, found.top
    (0.2, 'seq=8Ki', 3)

    Raises `StudyError` for an unknown field and an impossible value, `QuantityError` for an impossible seed.
    """
    for name in find:
        if name not in FIELDS:
            raise StudyError(f"find.sensitivity: {unknown('field', name, FIELDS)}")
    pair = between or find.get("between") or ()
    if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) not in (0, 1, 2):
        raise StudyError(f"between {pair!r}: expected one schedule, or two")
    if len(pair) == 2 and pair[0] == pair[1]:
        raise StudyError(f"between {pair[0]!r} and itself, expected two schedules")
    Sampling(seed=seed)
    chosen = _one_of("method", method or find.get("method", "one-at-a-time"), METHODS)
    count = _count("samples", find.get("samples", 64) if samples is None else samples)
    if chosen == "sobol":
        check_samples(count)
    return SensitivityQuestion(
        _one_of("of", of or find.get("of", "speedup"), OFS),
        tuple(map(str, pair)),
        str(find.get("at", "") if at is None else at),
        Width.parse(str(by or find.get("by", BY_SOURCE))),
        _count("top", find.get("top", 5) if top is None else top),
        chosen,
        count,
        seed,
    )


def _one_of(what: str, given: object, known: Sequence[_Text]) -> _Text:
    for each in known:
        if each == given:
            return each
    raise StudyError(unknown(what, str(given), known))


def _count(what: str, given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise StudyError(f"{what}: {given!r}, expected 1 or more")
    return given
