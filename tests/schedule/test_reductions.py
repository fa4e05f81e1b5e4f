"""Blocks that are sums: the proof against the rules, followed with Python's sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tests.support.reductions import Case, Row, reductions


@st.composite
def spoilt(draw: st.DrawFn, case: Case) -> Case:
    """One thing is changed, which may or may not make it wrong."""
    ranks, blocks = case.part.shape
    what = draw(st.sampled_from(["final", "part", "rows"]))
    if what in ("final", "part"):
        values = getattr(case, what).copy()
        at = draw(st.integers(0, ranks - 1)), draw(st.integers(0, blocks - 1))
        values[at] = draw(st.integers(-1, case.parts[at[1]] - 1)) if what == "part" else not values[at]
        changes: dict[str, Any] = {what: values}
        return replace(case, **changes)
    steps = [list(rows) for rows in case.steps] or [[]]
    index = draw(st.integers(0, len(steps) - 1))
    if steps[index]:
        row = steps[index][draw(st.integers(0, len(steps[index]) - 1))]
        if draw(st.booleans()):
            steps[index].remove(row)
        rank = draw(st.integers(0, ranks - 1))
        changed_row = draw(
            st.sampled_from([row, (rank, *row[1:]), (row[0], rank, *row[2:]), (*row[:4], 1 - row[4])]),
        )
        if draw(st.booleans()):
            steps[draw(st.integers(0, len(steps) - 1))].append(changed_row)
    return replace(case, steps=tuple(map(tuple, steps)))


def is_right(case: Case) -> bool:
    """The rules, followed with sets of parts."""
    ranks, blocks = case.part.shape
    has = {(r, b): {int(case.part[r, b])} - {-1} for r in range(ranks) for b in range(blocks)}
    whole = [set(range(parts)) for parts in case.parts]
    for rows in case.steps:
        given = [(s, b) for s, _, _, b, gives in rows if gives]
        sent = [(d, b, has[s, b]) for s, d, _, b, _ in rows]
        if len(set(given)) < len(given) or not all(parts for *_, parts in sent):
            return False
        if any(source == destination for source, destination, *_ in rows):
            return False
        has |= {at: set[int]() for at in given}
        for d, b, parts in sent:
            if has[d, b] & parts:
                return False
            has[d, b] = has[d, b] | parts
    may_stay = case.final | (case.part >= 0)
    return all(
        parts == whole[b] if case.final[r, b] else not parts or (parts == whole[b] and may_stay[r, b])
        for (r, b), parts in has.items()
    )


@given(reductions())
def test_every_tree_of_sums_is_accepted(case: Case) -> None:
    assert is_right(case)
    assert case.schedule().transfers == sum(map(len, case.steps))


@settings(max_examples=120)
@given(reductions().flatmap(spoilt))
def test_the_proof_refuses_what_sets_of_parts_refuse(case: Case) -> None:
    if is_right(case):
        case.schedule()
    else:
        with pytest.raises(ScheduleError):
            case.schedule()


def schedule_of(steps: Sequence[Sequence[Row]], final: Sequence[int] = (2,)) -> Schedule:
    """One block that three ranks have parts of."""
    in_the_end = np.isin(np.arange(3), final)[:, None]
    return Case(np.arange(3)[:, None], in_the_end, tuple(map(tuple, steps)), (8,), (3,)).schedule()


GATHERED: list[Row] = [(0, 2, 0, 0, 1), (1, 2, 1, 0, 1)]
"""Rank 2 has the complete sum after it."""


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([[(0, 1, 0, 0, 1)]], "after the last step: rank 1 has 2 of the 3 parts of block 0 .*, expected none"),
        ([[(0, 2, 0, 0, 1)], [(0, 2, 0, 0, 1)]], "step 1: .* on lane 0: rank 0 holds no part of .* when the step"),
        ([[(0, 2, 0, 0, 1), (0, 1, 1, 0, 1)]], "step 0: .*: rank 0 gives it twice in this step"),
        ([[(0, 1, 0, 0, 0)], [(0, 1, 0, 0, 0)]], "step 1: .*: rank 1 already has part 0 of it"),
        ([GATHERED, [(2, 0, 0, 0, 0)], [(2, 0, 0, 0, 0)]], "step 2: .*: rank 0 already has part 0 of it"),
        ([GATHERED, [(2, 0, 0, 0, 0), (2, 0, 1, 0, 0)]], "step 1: .*: rank 0 receives part 0 of .* twice in this step"),
    ],
)
def test_what_breaks_a_rule_is_named(steps: list[list[Row]], told: str) -> None:
    with pytest.raises(ScheduleError, match=told):
        schedule_of(steps)


def test_a_sum_of_which_no_rank_has_a_part_is_refused() -> None:
    steps = [Step.of([GATHERED[0]])]
    with pytest.raises(ScheduleError, match=r"rank 2 has 2 of the 3 parts of block 0 .*, part 1 is missing"):
        replace(schedule_of([GATHERED]), initial=np.array([[True], [False], [True]]), steps=steps)


def test_whether_a_rank_gives_is_part_of_what_a_schedule_is() -> None:
    """Copies of complete sums may stay with the rank that sends them, or not."""
    one, other = (schedule_of([GATHERED, [(2, 0, 0, 0, given)]], final=(0,)) for given in (0, 1))
    assert one.digest != other.digest
