"""What a prediction is put together from, and that it takes each event once."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.prediction.answer import one_after_the_other
from tasp_lab.prediction.compare import compare
from tasp_lab.prediction.predict import predict
from tasp_lab.timeline.events import SEND, Event, Timeline
from tasp_lab.workload.layer import Workload


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


def test_answers_say_where_rates_are_nearly_fair() -> None:
    """Where so many lanes go through a port: a ring has one, on however many ranks."""
    many, few = (predict("switch:128", name, "4KiB") for name in ("direct", "ring"))
    assert [each[0].rates_within for each in (many, few)] == [1e-3, 0.0]
    line = "rates: 100 messages or more may share a link of direct, which is filled to within 0.1% of its capacity"
    assert line in many.parts()
    assert not any(str(part).startswith("rates: ") for part in few.parts())
    layer = Workload(2**14, heads=128, mask="full")
    found = compare("switch:128", layer, ["direct-attention", "ring-attention"])
    assert line.replace("direct,", "direct-attention,") in found.parts()
    assert [row["rates_within"] for row in found.to_dict()["results"]] == [  # type: ignore[attr-defined]
        1e-3 if each.schedule == "direct-attention" else 0.0 for each in found.candidates
    ]
