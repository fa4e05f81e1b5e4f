"""How often a search finds a schedule that is faster than all that have a name: ``experiments/results/search.md``.

    python -m experiments.tables.search                # all questions, 400 simulated passes each
    python -m experiments.tables.search --effort 100 --only h100

Half of the questions are inside a node, a third on broken or odd machines. Lengths are such that communication is not
hidden altogether. The record ``search.json`` has the time of the best named schedule, of the one that was found, the
bound, and exposed communication, and the processor time, that of `compare` included.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common import RESULTS, Formats, Record, read_record, table, write_page, write_record
from tasp_lab import Workload, search

LEARNED = ("staged-ulysses",)
"""Named schedules that came out of these searches, which those of others are compared with."""

JSON, PAGE = RESULTS / "search.json", RESULTS / "search.md"


class Case(NamedTuple):
    """A layer on a machine; `kind` is where the machine is from: a node, nodes, or odd."""

    kind: str
    machine: str
    sequence: int
    kv_heads: int
    mask: str
    passes: str
    settings: dict[str, Any] = {}  # noqa: RUF012

    @property
    def name(self) -> str:
        """The question in words."""
        changes = " ".join(str(each) for values in self.settings.values() for each in values)
        layer = f"{self.sequence // 1024}Ki, {self.kv_heads} KV heads, {self.mask}, {self.passes}"
        return f"{self.machine}{f' ({changes})' if changes else ''}: {layer}"


CASES = [
    Case(each["kind"], each["machine"], 1024 * length, kv_heads, mask, passes, each.get("settings", {}))
    for each in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["questions"]
    for length, kv_heads, mask, passes in each["layers"]
]


def ask(case: Case, effort: int) -> Record:
    """Search once."""
    layer = Workload(
        case.sequence, heads=32, kv_heads=case.kv_heads, mask="causal" if case.mask == "causal" else "full"
    )
    settings: Any = {"passes": case.passes, **case.settings}
    began_s = time.process_time()
    found = search(case.machine, layer, effort=effort, **settings)
    named = next(each for each in found.ranking.candidates if each.applies and each.schedule not in LEARNED)
    return {
        "kind": case.kind, "question": case.name, "named": named.schedule, "named_s": float(named.time_s),
        "found_s": found.time_s, "bound_s": found.bound_s, "named_exposed_s": float(named.exposed_s),
        "exposed_s": float(found.answer.exposed_s), "simulated": found.spent,
        "processor_s": round(time.process_time() - began_s, 1), "explained": found.explained,
    }  # fmt: skip


def publish() -> None:
    """Write the page from the record."""
    record = read_record(JSON)
    rows = record["rows"]
    for row in rows:
        row["gain"] = 1 - row["found_s"] / row["named_s"]
        row["before"], row["after"] = (max(row[name] / row["bound_s"] - 1, 0) for name in ("named_s", "found_s"))
    wide = [row for row in rows if row["before"] > 0.1]
    eight, twenty = (sum(row["gain"] >= least for row in wide) for least in (0.08, 0.2))
    left, exposed, waits = (
        sum(map(share, wide)) / max(len(wide), 1)
        for share in (
            lambda row: row["after"] / row["before"],
            lambda row: row["exposed_s"] / row["named_exposed_s"],
            lambda row: min(row["exposed_s"] / (row["found_s"] - row["bound_s"]), 1),
        )
    )
    seconds = sum(row["processor_s"] for row in rows) / len(rows)
    head = (
        f"# Schedules that were found\n\n{len(rows)} of {len(CASES)} questions, at most {record['effort']} simulated "
        "passes each, 32 heads of 128, bf16;\nmade by `python -m experiments.tables.search`. Times are predictions. "
        f"Named are all schedules but `{'`, `'.join(LEARNED)}`,\nwhich came out of these searches.\n\n"
        f"- Found is faster than every named schedule on {sum(row['gain'] > 1e-9 for row in rows)} of {len(rows)} "
        f"questions, and never slower.\n- On {len(wide)} questions the best named schedule is more than 10 % above the "
        f"bound. There found saves 8 % or more on {eight}, 20 % or\n  more on {twenty}, and of the gap to the bound "
        f"{left:.0%} is left on average.\n  Exposed communication is {1 - exposed:.0%} less. "
        f"Of what is left of the gap, {waits:.0%} is exposed communication; in the rest ranks compute:\n"
        "  the bound assumes the highest rate of the kernel, which calls of this size need not reach.\n"
        f"- A question takes {seconds:.0f} s of processor time, the prediction of all "
        "named schedules included.\n"
    )
    columns: Formats = {
        "question": "{question}",
        "best named": "{named}",
        "its time": "{named_s:time}",
        "found": "{found_s:time}",
        "saved": "{gain:.1%}",
        "bound": "{bound_s:time}",
        "gap before": "{before:.0%}",
        "after": "{after:.0%}",
        "passes": "{simulated}",
        "CPU s": "{processor_s}",
    }
    words = "\n".join(f"- {row['question']}: {'; '.join(row['explained'])}." for row in rows if row["gain"] > 0.02)
    write_page(PAGE, f"{head}\n{table(rows, columns)}\n\n## What was found\n\nWhere it saves more than 2 %.\n\n{words}")


def main() -> None:
    """Ask all questions, and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", type=int, default=400)
    parser.add_argument("--only", default="")
    parser.add_argument("--resume", action="store_true", help="keep the answers of the record")
    given = parser.parse_args()
    rows = read_record(JSON)["rows"] if given.resume else []
    known = {row["question"] for row in rows}
    for case in CASES:
        if given.only in case.name and case.name not in known:
            rows.append(ask(case, given.effort))
            print(json.dumps(rows[-1]), flush=True)
            if not given.only:
                write_record(JSON, {"effort": given.effort, "rows": rows})
    if not given.only:
        publish()


if __name__ == "__main__":
    main()
