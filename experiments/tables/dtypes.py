"""Every registered schedule in other dtypes and in other memory, right ones and changed ones, against int64.

``python -m experiments.tables.dtypes`` writes ``dtypes.md`` and ``dtypes.json`` in ``experiments/results``, and fails
if a schedule is accepted that differs from the one in int64 or is refused there, or ends in a traceback.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from functools import partial

from experiments.common import RESULTS, markdown_table, write_record
from tasp_lab.core.files import write_whole
from tests.support.dtypes import (
    DTYPES,
    NAMES,
    RIGHT,
    TRACEBACK,
    VERDICTS,
    WRONG,
    WRONG_DTYPES,
    Array,
    built,
    judge,
    mutated,
)

RANKS, DRAWS = (4, 8), 2
"""World sizes of each schedule, and how often its dtypes are drawn."""

KINDS = ("right", "changed, right in int64", "changed, refused in int64", "with columns of no whole numbers")


def main() -> int:
    """Judge all schedules, write the table, and return 1 if a verdict is wrong."""
    count: Counter[tuple[str, str]] = Counter()
    for name in NAMES:
        for ranks in RANKS[: 1 if ":" in name else None]:  # variants are of 4 ranks
            for schedule in built(name, ranks):
                draw, steps = random.Random(f"{schedule.name} {ranks}"), list(schedule.steps)
                for _ in range(DRAWS):
                    count[KINDS[0], judge(schedule, steps, draw)[1]] += 1
                    accepted, verdict = judge(schedule, mutated(schedule, draw), draw)
                    count[KINDS[1 if accepted else 2], verdict] += 1
                    spoilt = partial(_spoilt, dtype=draw.choice(WRONG_DTYPES))
                    count[KINDS[3], judge(schedule, steps, draw, spoilt)[1]] += 1
        print(name, flush=True)
    rows = [[kind, *(str(count[kind, verdict]) for verdict in VERDICTS)] for kind in KINDS]
    head = (
        f"Passes of {len(NAMES)} registered schedules on {' and '.join(map(str, RANKS))} ranks. Each array of steps, "
        f"calls, blocks, copies and tasks is cast to one of {', '.join(DTYPES)} that has room for its numbers, and is "
        "placed in memory of its own, in every second row of other memory, or in reverse. A change is that of a "
        f"transfer or call. In the last row a tenth of the arrays are cast to one of {', '.join(WRONG_DTYPES)}. "
        "Accepted is right if digest, traffic, dependencies and predicted time are those of int64. "
        "Made by `python -m experiments.tables.dtypes`."
    )
    write_whole(RESULTS / "dtypes.md", f"{head}\n\n{markdown_table(('schedules', *VERDICTS), rows)}\n".encode())
    write_record(RESULTS / "dtypes.json", {"columns": VERDICTS, "rows": rows})
    print(*map(", ".join, rows), sep="\n")
    return int(any(count[kind, verdict] for kind in KINDS for verdict in (WRONG, TRACEBACK)) or count[KINDS[2], RIGHT])


def _spoilt(values: Array, draw: random.Random, dtype: str) -> Array:
    return values.astype(dtype) if draw.random() < 0.1 else values


if __name__ == "__main__":
    sys.exit(main())
