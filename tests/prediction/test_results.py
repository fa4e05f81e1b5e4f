"""What a prediction is put together from, and that it takes each event once."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.prediction.answer import one_after_the_other
from tasp_lab.timeline.events import SEND, Event, Timeline


class CountedEvents(tuple[Event, ...]):
    """Events that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Iterator[Event]:
        self.times += 1
        return super().__iter__()


def sends(ends: list[Fraction]) -> CountedEvents:
    return CountedEvents(Event(0, 0, step, SEND, 1, 0, 8, 0, end, "", "") for step, end in enumerate(ends))


times = st.lists(st.fractions(Fraction(0), Fraction(10)), min_size=1, max_size=20)


@given(times, times)
def test_the_second_begins_when_the_first_has_ended(first: list[Fraction], second: list[Fraction]) -> None:
    both = one_after_the_other(
        *(Timeline("predicted", "a", "pair", 2, sends(ends)) for ends in (first, second)), "both"
    )
    ends = [event.end_s for event in both.events]
    assert ends == [*first, *(max(first) + end for end in second)]
    assert [event.step for event in both.events] == list(range(len(first) + len(second)))


@pytest.mark.parametrize("count", [10, 1000])
def test_all_events_are_gone_through_equally_often_however_many_there_are(count: int) -> None:
    events = sends([Fraction(1)] * count)
    one = Timeline("predicted", "a", "pair", 2, events)
    assert len(one_after_the_other(one, one, "twice").events) == 2 * count
    assert events.times <= 6
