"""Make the committed tables anew and print which figures moved.

    python -m experiments                                  # all of them, some hours
    python -m experiments tables.contention reproductions  # some of them, by module
    python -m experiments tables.contention --over 0.05    # only figures that moved by more than 5 %

Each table is a module that writes its page below ``experiments``. This command runs the modules one after the other,
then compares the numbers of every page with those that it had before.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tasp_lab.core.errors import unknown

FOLDER = Path(__file__).parent

TABLES: Mapping[str, tuple[str, ...]] = {
    # Predicted.
    "tables.checks": (),
    "tables.contention": (),
    "tables.decomposition": (),
    "tables.failures": (),
    "tables.kernel_accuracy": (),
    "tables.search": (),
    "tables.search_optimum": (),
    "tables.tpu_steps": (),
    "tables.whole_steps": (),
    "reproductions": ("all",),
    "accuracy.report": (),
    "accuracy.step_curve": (),
    # Measured on the emulated fabric, which needs network namespaces.
    "tables.fabric": (),
    "tables.found_on_the_fabric": (),
    # Executed and compared with exact results.
    "tables.hybrids": (),
    "tables.ported_cases": (),
    "tables.astra_sim": (),
    "tables.against_simgrid": (),
    # Times of our own code, for idle machines.
    "benchmarks.commands": (),
    "benchmarks.structure": (),
    "benchmarks.executor_cost": (),
    "benchmarks.beside_others": (),
    "benchmarks.peers": (),
}
"""The modules that write tables, with their arguments."""

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


class Moved(NamedTuple):
    """A figure of a page before and after."""

    row: str
    column: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """Relative to the larger of both; 0 if they are equal, 1 where the sign changes or one is 0."""
        most = max(abs(self.before), abs(self.after))
        return min(1.0, abs(self.after - self.before) / most) if most else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tables and compare; 1 if one of them fails, 2 if one is unknown."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Make the committed tables anew.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"one of: {', '.join(TABLES)}; all if none is given")
    parser.add_argument("--over", type=float, default=0.02, help="print relative changes above this one (default 0.02)")
    chosen = parser.parse_args(arguments)
    for name in chosen.tables:
        if name not in TABLES:
            print(unknown("table", name, TABLES), file=sys.stderr)
            return 2
    before, failed = pages(), []
    for name in chosen.tables or TABLES:
        print(f"-- {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"experiments.{name}", *TABLES[name]], check=False).returncode:
            failed.append(name)
    print(*report(before, pages(), chosen.over), sep="\n")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def pages() -> dict[str, str]:
    """The text of every page of results, by its path below this folder."""
    return {str(path.relative_to(FOLDER)): path.read_text() for path in sorted(FOLDER.rglob("*.md"))}


def report(before: Mapping[str, str], after: Mapping[str, str], over: float) -> Iterator[str]:
    """A line for each page that changed, and one for each figure of it that moved by more than `over`."""
    changed = [name for name in after if after[name] != before.get(name)]
    if not changed:
        yield "no page changed"
    for name in changed:
        old, new = figures(before.get(name, "")), figures(after[name])
        common = [Moved(row, column, old[row, column, at], value) for (row, column, at), value in new.items()
                  if (row, column, at) in old]  # fmt: skip
        moved = sorted((each for each in common if each.change > over), key=lambda each: -each.change)
        added = len(new) - len(common)
        yield f"{name}: {len(moved)} of {len(common)} figures moved by more than {over:.0%}, {added} are new"
        for each in moved:
            yield f"  {each.row} | {each.column}: {each.before:g} -> {each.after:g}"


def figures(page: str) -> dict[tuple[str, str, int], float]:
    """The numbers in the tables of a page, by the row's first cell, the column, and their place among equal ones.

    >>> figures("| what | time |\\n| :-- | --: |\\n| ring | 5 s, +1.2% |")
    {('ring', 'time', 0): 5.0, ('ring', 'time', 1): 1.2}
    """
    found: dict[tuple[str, str, int], float] = {}
    columns: list[str] = []
    for cells in map(_cells, page.splitlines()):
        if not cells:
            columns = []
        elif not columns:
            columns = cells
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            for column, cell in zip(columns[1:], cells[1:], strict=False):
                _number(found, cells[0], column, _NUMBER.findall(cell))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def _number(found: dict[tuple[str, str, int], float], row: str, column: str, numbers: Iterable[str]) -> None:
    # Rows of several tables of a page may have the same name, so their numbers are counted on.
    at = sum(key[:2] == (row, column) for key in found)
    for place, text in enumerate(numbers, start=at):
        found[row, column, place] = float(text.replace(",", ""))


if __name__ == "__main__":
    sys.exit(main())
