"""Which part of a large test `make test` runs; `make test-all` runs all of it.

Three kinds of tests have parts. Of property tests a fifth of the examples is drawn (`tests/conftest.py`), and of loops
over seeds a fifth of the seeds (`fifth`). Of tests of all combinations of some values, a part in which every value
occurs, or every pair of values (`covering`). Tests that have no parts and take long are marked ``full``::

    @pytest.mark.parametrize(("name", "world_size"), covering(product(SCHEDULES, range(2, 9))))

Where several lists of parameters stand above one another, as decorators, such a part is taken of their product without
being asked for (`not_covering`).

The part is the same in every run. A fault has to be tied to one combination (of two values, or of three where all
pairs occur) to escape from it, and no other test may run that combination.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import pytest

IS_FULL = os.environ.get("TASP_LAB_TESTS") == "all"
"""Whether everything runs, as by ``make test-all``."""

LEAST_EXAMPLES = 3

Case = TypeVar("Case", bound=tuple[Hashable, ...])


def fifth(count: int) -> int:
    """A fifth of `count` examples, but at least three, or all of them."""
    return count if IS_FULL else max(count // 5, min(count, LEAST_EXAMPLES))


def covering(cases: Iterable[Case], together: int = 1) -> list[Case]:
    """Cases among which every value of every position occurs, with `together` 2 every pair of values; or all cases.

    Cases are tuples of equal lengths: a product, of which some may be missing.
    """
    return list(cases) if IS_FULL else least_covering(list(cases), together)


FEW = 4
"""Products of parameters with no more cases are run as they are."""


def not_covering(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests to leave out where parameters come from several lists: every value still occurs in another one."""
    tests = defaultdict[tuple[Path, str], list[pytest.Item]](list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.path, item.nodeid.partition("[")[0]].append(item)
    found = list[pytest.Item]()
    for same in tests.values():
        if len(same) > FEW:
            cases = [_rows_of(item) for item in same]
            kept = Counter(least_covering(cases, 1))
            for item, case in zip(same, cases, strict=True):
                kept[case] -= 1
                if kept[case] < 0:
                    found.append(item)
    return found


def _rows_of(item: pytest.Item) -> tuple[str, ...]:
    """The row of each list of parameters that a test has, as text: ids are equal for equal values only by chance."""
    params = item.callspec.params  # type: ignore[attr-defined]
    lists = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [each.replace(" ", "").split(",") if isinstance(each, str) else each for each in lists]
    return tuple(repr([params[name] for name in own]) for own in names)


def least_covering(cases: list[Case], together: int) -> list[Case]:
    """The case with the most values (or pairs) that no case before it has, until all occur; in their order.

    Of equal ones the first whose values were used least, so that values that are few meet as many others as they can.

    >>> least_covering([(letter, number) for letter in "ab" for number in (1, 2, 3)], 1)
    [('a', 1), ('a', 3), ('b', 2)]
    """
    values = [set(combinations(enumerate(case), together)) for case in cases]
    missing, uses = set().union(*values), Counter[tuple[int, Hashable]]()
    chosen = list[int]()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda at: (len(values[at] & missing), -sum(uses[value] for value in enumerate(cases[at]))),
        )
        chosen.append(best)
        missing -= values[best]
        uses.update(enumerate(cases[best]))
    return [cases[at] for at in sorted(chosen)]
