"""Which part of a large test `make test` runs; `make test-all` runs all of it.

Three kinds of tests have parts. Of property tests a fifth of the examples is drawn (`tests/conftest.py`), and of loops
over seeds a fifth of the seeds (`fifth`). Of tests of all combinations of some values, a part in which every value
occurs, or every pair of values (`covering`). Tests that have no parts and take long are marked ``full``::

    @pytest.mark.parametrize(("name", "world_size"), covering(product(SCHEDULES, range(2, 9))))

The part is the same in every run. A fault has to be tied to one combination (of two values, or of three where all
pairs occur) to escape from it, and no other test may run that combination.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import combinations
from typing import TypeVar

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
