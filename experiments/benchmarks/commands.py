"""Time and memory of whole commands, as users call them: the process from its start to its end.

``python -m experiments.benchmarks.commands [PAGE ...]`` runs each command of ``commands.toml`` in a process of its own,
with bytecode kept as that of an installed package is, and writes ``experiments/benchmarks/results/PAGE.md`` and
``.json``. First answers are those of a new virtual environment with the package and its dependencies, and without
machine code: the folder where that is kept is emptied before each run, but not where a row `is_again`. Schedules that
earlier commands left on disk are used where a row says `after` which command.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from experiments.common import Formats, Record, read_record, table, write_page, write_record
from tasp_lab import load_study

SHORT_S = 30.0
"""Commands that take longer are run once."""

RESULTS = Path(__file__).parent / "results"
CASES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PAGES = ("commands", "first_answers", "again", "scale", "study_speed")
BYTECODE = Path(tempfile.gettempdir()) / "tasp-lab-bytecode"

COLUMNS: Formats = {
    "command": lambda row: f"`{row['command']}`",
    "s": "{seconds:.2f}",
    "CPU s": "{cpu_s:.2f}",
    "peak MB": lambda row: f"{row['peak_bytes'] / 1e6:,.0f}",
}
RANKS: Formats = {"ranks": "{ranks:,}", "exponent": lambda row: f"{row['exponent']:.2f}" if row["exponent"] else ""}
POINTS: Formats = {
    "points": "{points:,}",
    "CPU ms per point": lambda row: f"{1e3 * row['cpu_s'] / row['points']:.0f}",
}


AGAIN: Formats = {"machine code": lambda row: "kept" if row["is_again"] else "none yet"}
AFTER: Formats = {"asked before": lambda row: f"`{row['after']}`" if row["after"] else ""}


class Run(NamedTuple):
    """One run of a command: time from start to end, processor time, and the largest resident memory."""

    seconds: float
    cpu_s: float
    peak_bytes: int


def main(names: Iterable[str]) -> None:
    """Time the commands of these pages, by default of all, and write them."""
    for name in list(names) or PAGES:
        rows: list[Record] = []
        with tempfile.TemporaryDirectory() as folder:
            if "first" in name:
                install(Path(folder))
            for row in CASES[name]["rows"]:
                if "is_again" in row:
                    rows.append(_command(row, CASES[name]["runs"], Path(folder)))
                else:
                    rows.append(_study(**row) if "study" in row else _command(row, CASES[name]["runs"]))
                print(rows[-1], flush=True)
        write_record(RESULTS / f"{name}.json", {"rows": list(with_exponents(rows))})
        write_page(RESULTS / f"{name}.md", page(name, read_record(RESULTS / f"{name}.json")))


def install(folder: Path) -> None:
    """Install this package and its dependencies in a new virtual environment."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip: list[str | Path] = [folder / "bin/pip", "install", "--quiet", "--constraint", root / "constraints.txt", root]
    subprocess.run(pip, check=True)


def _command(row: Mapping[str, Any], most: int, installed: Path | None = None) -> Record:
    """The medians of several runs of a command, of the package here or of that which is `installed` in a folder."""
    arguments, before = (row.get(name, "").format(layer=CASES["layer"]) for name in ("command", "after"))

    def run() -> Run:
        if "after" in row:
            with tempfile.TemporaryDirectory() as shelf:
                if before:
                    run_command(before.split(), shelf=shelf)
                return run_command(arguments.split(), shelf=shelf)
        if installed is not None and not row["is_again"]:
            shutil.rmtree(installed / "machine_code", ignore_errors=True)
        return run_command(arguments.split(), installed)

    runs = [run()]
    while len(runs) < most and runs[0].seconds < SHORT_S:
        runs.append(run())
    row = {**row, "after": before} if "after" in row else row
    return {**row, "command": arguments, **_medians(runs), "runs_s": [run.seconds for run in runs]}


def _study(study: str, options: str) -> Record:
    """One run of a study, from an empty folder."""
    question = {"study": {"name": study}, **CASES["studies"][study]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{study}.toml"
        file.write_bytes(tomli_w.dumps(question).encode())
        run = run_command(["study", "run", str(file), "--output", f"{folder}/run", *options.split(), "--yes"])
    command = f"study run {study}.toml {options}"
    return {"command": command, "points": load_study(question).count, **_medians([run])}


def _medians(runs: Iterable[Run]) -> Record:
    return dict(zip(Run._fields, map(statistics.median, zip(*runs, strict=True)), strict=True))


def run_command(arguments: Iterable[str], installed: Path | None = None, shelf: str | None = None) -> Run:
    """Run a command in a process of its own, with the schedules that are kept in a folder, `shelf`, or none.

    Raises `SystemExit` if it fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["OMP_NUM_THREADS"] = "1"
    program = [sys.executable, "-m", "tasp_lab.cli"]
    if installed is None:
        environment["PYTHONPYCACHEPREFIX"] = str(BYTECODE)
    else:
        program = [str(installed / "bin/tasp-lab")]
        environment.pop("PYTHONPATH", None)
        environment["TASP_LAB_CACHE"] = str(installed / "machine_code")
    if shelf is None:
        environment["TASP_LAB_CACHE_SIZE"] = "0"  # a new question each time
    else:
        environment["XDG_CACHE_HOME"] = shelf
    started_s = time.perf_counter()
    process = subprocess.Popen([*program, *arguments], stdout=subprocess.DEVNULL, env=environment)
    # Not getrusage of all children: its peak memory is that of the largest child so far.
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"tasp-lab {' '.join(arguments)}: exit code {process.returncode}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def with_exponents(rows: Iterable[Record]) -> Iterator[Record]:
    """Rows with the exponent of processor time against ranks, from the row before if that has fewer ranks.

    >>> [row["exponent"] for row in with_exponents([{"ranks": 8, "cpu_s": 1.0}, {"ranks": 16, "cpu_s": 4.0}])]
    [None, 2.0]
    """
    before: Record = {}
    for row in rows:
        if "ranks" in row:
            grows = before.get("ranks", math.inf) < row["ranks"]
            exponent = math.log(row["cpu_s"] / before["cpu_s"], row["ranks"] / before["ranks"]) if grows else None
            yield (before := row | {"exponent": exponent})
        else:
            yield row


def page(name: str, record: Record) -> str:
    """The page of a record."""
    case, rows, made = CASES[name], record["rows"], record["machine"]
    columns = {**COLUMNS, **(RANKS if "ranks" in rows[0] else {}), **(POINTS if "points" in rows[0] else {})}
    columns |= AGAIN if "is_again" in rows[0] else {}
    columns |= AFTER if "after" in rows[0] else {}
    runs = "one run each" if case["runs"] == 1 else f"medians of {case['runs']} runs, one above {SHORT_S:g} s"
    head = (
        f"Whole commands of `tasp-lab`, {runs}, made by `python -m experiments.benchmarks.commands {name}` on "
        f"{made['cores']} cores ({made['processor']}, Python {made['python']}, {made['date']})."
    )
    if "ranks" in rows[0]:
        head += " The exponent is that of processor time against ranks, from the row above."
    return f"# {case['title']}\n\n{head}\n\n{table(rows, columns)}\n{case.get('notes', '')}"


if __name__ == "__main__":
    main(sys.argv[1:])
