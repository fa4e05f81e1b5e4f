"""Every single change of every small world, judged by the proof and by real numbers.

``python -m experiments.tables.mutations`` writes ``experiments/results/mutations.md``. It takes half an hour, and
fails if the proof accepts a schedule that yields wrong numbers.
"""

from __future__ import annotations

import sys

from experiments.common import RESULTS, markdown_table
from tasp_lab.core.files import write_whole
from tests.support.mutations import Findings, campaign
from tests.support.worlds import WORLDS

DOUBLE, ORDERS = 100, 2
"""Double changes of each world, chosen at random, and random orders in which each is executed."""


def main() -> int:
    """Judge all changes, write the table, and return 1 if a wrong one is accepted."""
    total, rows = Findings(), []
    for name, make in WORLDS.items():
        found = campaign(make(), double=DOUBLE, orders=ORDERS)
        print(f"{name}: {found.verdicts()}", *found.survivors, sep="\n  ", flush=True)
        total.count += found.count
        total.survivors += found.survivors
        rows.append(_row(name, found))
    head = (
        f"All single changes of {len(WORLDS)} small schedules, and {DOUBLE} double ones of each: wrong are those after "
        "which an executor of real numbers, step by step or in one of "
        f"{ORDERS} random orders, does not find right all that the unchanged schedule and the changed one promise, "
        "where nothing is there at the start but what the unchanged one has there; or of which there are no blocks or "
        "no task. The rest are harmless. The proof must refuse all wrong ones. "
        "Made by `python -m experiments.tables.mutations`."
    )
    by_world = markdown_table(("schedule", *COLUMNS), [*rows, _row("all", total)])
    by_kind = markdown_table(("change", *COLUMNS), [_row(kind, total, kind) for kind in total.kinds])
    write_whole(RESULTS / "mutations.md", f"{head}\n\n{by_world}\n\n{by_kind}\n".encode())
    print(f"all: {total.verdicts()}")
    return int(bool(total.survivors))


COLUMNS = ("wrong", "refused", "accepted", "harmless", "refused", "accepted")


def _row(name: str, found: Findings, kind: str | None = None) -> list[str]:
    verdicts = [(right, accepted) for right in (False, True) for accepted in (None, False, True)]
    return [name, *(str(found.of(right=right, accepted=accepted, kind=kind)) for right, accepted in verdicts)]


if __name__ == "__main__":
    sys.exit(main())
