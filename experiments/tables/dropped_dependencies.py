"""Every dependency of every plan in MSCCL XML left out, judged by the reader and by executions in random orders.

``python -m experiments.tables.dropped_dependencies`` writes ``experiments/results/dropped_dependencies.md``. It takes
ten minutes, and fails if the reader accepts a plan that yields wrong numbers.
"""

from __future__ import annotations

import sys
from collections import Counter

from experiments.common import RESULTS, markdown_table, write_page
from tests.support.plan_changes import ORDERS, changes, exported, fault, refusal

ABOUT = f"""\
All collectives on six small topologies as plans in MSCCL XML, and small plans of the structure of published ones, each
without one of its dependencies in turn. Wrong are those that end with wrong data in one of {ORDERS} random orders of
steps, executed by an interpreter that shares no code with the reader; the rest were right in all. The reader must
refuse all wrong ones. Plans without dependencies are left out. Made by
`python -m experiments.tables.dropped_dependencies`.

"""

KINDS = [(wrong, refused) for wrong in (True, False) for refused in (True, False)]


def main() -> int:
    """Judge all plans, write the table, and return 1 if a wrong one is accepted."""
    rows, total = [], Counter[tuple[bool, bool]]()
    for name, text in exported():
        found: Counter[tuple[bool, bool]] = Counter()
        for what, changed in changes(text):
            if what.endswith("no dependency"):
                message, wrong = refusal(changed), fault(changed)
                found[bool(wrong), bool(message)] += 1
                if bool(wrong) != bool(message):
                    print(f"{name}, line {what}: {message or 'accepted'}; {wrong or 'right'}", flush=True)
        if found:
            rows.append(_row(name, found))
            total += found
    columns = ("plan", "dropped", "wrong, refused", "wrong, accepted", "right, refused", "right, accepted")
    write_page(RESULTS / "dropped_dependencies.md", ABOUT + markdown_table(columns, [*rows, _row("all", total)]))
    return int(total[True, False] > 0)


def _row(name: str, found: Counter[tuple[bool, bool]]) -> list[str]:
    return [name, str(found.total()), *(str(found[kind]) for kind in KINDS)]


if __name__ == "__main__":
    sys.exit(main())
