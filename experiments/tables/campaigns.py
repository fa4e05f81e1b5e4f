"""Campaigns against the proof of schedules and the reader of plans: thousands of changes, each judged by execution.

``python -m experiments.tables.campaigns`` writes the pages of `CAMPAIGNS` to ``experiments/results``; ``--only NAME``
runs some. They take about an hour, and fail if a schedule or plan is accepted that yields wrong numbers. The tests
judge a sample of the same changes.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from experiments.common import RESULTS, markdown_table, write_page
from tests.support import dtypes, plan_changes
from tests.support.mutations import Findings, campaign
from tests.support.worlds import WORLDS


class Found(NamedTuple):
    """Tables, each of its columns and rows, and the number of wrong verdicts."""

    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]]
    failures: int


# -- changed schedules ------------------------------------------------------------------------------------------------
DOUBLE, ORDERS = 100, 2
"""Double changes of each schedule, chosen at random, and random orders in which each is executed."""

MUTATIONS = f"""\
All single changes of {len(WORLDS)} small schedules, and {DOUBLE} double ones of each. A change is *wrong* if an
executor of real numbers, step by step or in one of {ORDERS} random orders, does not find all results that the unchanged
and the changed schedule promise, or if there are no blocks or no task. The rest are harmless. The proof must refuse all
wrong ones."""


def mutations() -> Found:
    """Every change of every small schedule, judged by the proof and by real numbers."""
    total, rows = Findings(), []
    for name, make in WORLDS.items():
        found = campaign(make(), double=DOUBLE, orders=ORDERS)
        print(f"{name}: {found.verdicts()}", *found.survivors, sep="\n  ", flush=True)
        total.count += found.count
        total.survivors += found.survivors
        rows.append(_verdicts(name, found))
    columns = ("wrong", "refused", "accepted", "harmless", "refused", "accepted")
    by_world = ("schedule", *columns), [*rows, _verdicts("all", total)]
    by_kind = ("change", *columns), [_verdicts(kind, total, kind) for kind in total.kinds]
    return Found([by_world, by_kind], len(total.survivors))


def _verdicts(name: str, found: Findings, kind: str | None = None) -> list[str]:
    verdicts = [(right, accepted) for right in (False, True) for accepted in (None, False, True)]
    return [name, *(str(found.of(right=right, accepted=accepted, kind=kind)) for right, accepted in verdicts)]


# -- plans without one of their dependencies --------------------------------------------------------------------------
DROPPED = f"""\
All collectives on six small topologies as plans in MSCCL XML, and small plans of the structure of published ones, each
without one of its dependencies in turn. Wrong are those that end with wrong data in one of {plan_changes.ORDERS} random
orders of steps, executed by an interpreter that shares no code with the reader; the rest were right in all. The reader
must refuse all wrong ones. Plans without dependencies are left out."""

_KINDS = [(wrong, refused) for wrong in (True, False) for refused in (True, False)]


def dropped_dependencies() -> Found:
    """Every dependency of every plan left out, judged by the reader and by executions in random orders."""
    rows, total = [], Counter[tuple[bool, bool]]()
    for name, text in plan_changes.exported():
        found: Counter[tuple[bool, bool]] = Counter()
        for what, changed in plan_changes.changes(text):
            if what.endswith("no dependency"):
                message, wrong = plan_changes.refusal(changed), plan_changes.fault(changed)
                found[bool(wrong), bool(message)] += 1
                if bool(wrong) != bool(message):
                    print(f"{name}, line {what}: {message or 'accepted'}; {wrong or 'right'}", flush=True)
        if found:
            rows.append(_counts(name, found))
            total += found
    columns = ("plan", "dropped", "wrong, refused", "wrong, accepted", "right, refused", "right, accepted")
    return Found([(columns, [*rows, _counts("all", total)])], total[True, False])


def _counts(name: str, found: Counter[tuple[bool, bool]]) -> list[str]:
    return [name, str(found.total()), *(str(found[kind]) for kind in _KINDS)]


# -- arrays of other dtypes -------------------------------------------------------------------------------------------
RANKS, DRAWS = (4, 8), 2
"""World sizes of each schedule, and how often its dtypes are drawn."""

CAST = f"""\
Passes of {len(dtypes.NAMES)} registered schedules on {" and ".join(map(str, RANKS))} ranks. Each array of steps, calls,
blocks, copies and tasks is cast to one of {", ".join(dtypes.DTYPES)} that has room for its numbers, and is placed in
memory of its own, in every second row of other memory, or in reverse. A change is that of a transfer or call. In the
last row a tenth of the arrays are cast to one of {", ".join(dtypes.WRONG_DTYPES)}. Accepted is right if digest,
traffic, dependencies and predicted time are those of int64."""

_CASTS = ("right", "changed, right in int64", "changed, refused in int64", "with columns of no whole numbers")


def casts() -> Found:
    """Every registered schedule in other dtypes and in other memory, right ones and changed ones, against int64."""
    count: Counter[tuple[str, str]] = Counter()
    for name in dtypes.NAMES:
        for ranks in RANKS[: 1 if ":" in name else None]:  # variants are of 4 ranks
            for schedule in dtypes.built(name, ranks):
                draw, steps = random.Random(f"{schedule.name} {ranks}"), list(schedule.steps)
                for _ in range(DRAWS):
                    count[_CASTS[0], dtypes.judge(schedule, steps, draw)[1]] += 1
                    accepted, verdict = dtypes.judge(schedule, dtypes.mutated(schedule, draw), draw)
                    count[_CASTS[1 if accepted else 2], verdict] += 1
                    corrupted = partial(_corrupted, dtype=draw.choice(dtypes.WRONG_DTYPES))
                    count[_CASTS[3], dtypes.judge(schedule, steps, draw, corrupted)[1]] += 1
        print(name, flush=True)
    rows = [[kind, *(str(count[kind, verdict]) for verdict in dtypes.VERDICTS)] for kind in _CASTS]
    wrong = sum(count[kind, verdict] for kind in _CASTS for verdict in (dtypes.WRONG, dtypes.TRACEBACK))
    return Found([(("schedules", *dtypes.VERDICTS), rows)], wrong + count[_CASTS[2], dtypes.RIGHT])


def _corrupted(values: dtypes.Array, draw: random.Random, dtype: str) -> dtypes.Array:
    return values.astype(dtype) if draw.random() < 0.1 else values


# -- all --------------------------------------------------------------------------------------------------------------
CAMPAIGNS = {
    "mutations": (MUTATIONS, mutations),
    "dropped_dependencies": (DROPPED, dropped_dependencies),
    "dtypes": (CAST, casts),
}
"""By page: what stands above its tables, and the campaign."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaigns, write their pages, and return 1 if one accepts what is wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", action="append", choices=list(CAMPAIGNS), help="run this one only; several times")
    failures = 0
    for name in parser.parse_args(arguments).only or CAMPAIGNS:
        about, run = CAMPAIGNS[name]
        found = run()
        made = f"Made by `python -m experiments.tables.campaigns --only {name}`."
        tables = (markdown_table(columns, rows) for columns, rows in found.tables)
        write_page(RESULTS / f"{name}.md", "\n\n".join([f"{about}\n{made}", *tables]))
        failures += found.failures
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
