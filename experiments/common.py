"""Machine records, and writing of results as JSON and Markdown tables."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tasp_lab.core.files import write_whole
from tasp_lab.core.process import usable_cores

Record = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
"""The folder of records and tables."""

LIBRARIES = ("torch", "simpy", "numpy", "pyroute2")


def machine_record() -> dict[str, object]:
    """Processor, cores, kernel, versions and date of this machine."""
    return {
        "date": datetime.date.today().isoformat(),
        "cores": usable_cores(),
        "processor": _processor(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_record(path: Path, document: dict[str, object]) -> None:
    """Write a result as JSON, together with the record of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps({"machine": machine_record()} | document, indent=1) + "\n").encode())


def write_page(path: Path, text: str) -> None:
    """Write a page of Markdown, and print it."""
    write_whole(path, f"{text.rstrip()}\n".encode())
    print(text)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned.

    >>> print(markdown_table(["what", "time"], [["ring", "5 s"]]))
    | what | time |
    | :-- | --: |
    | ring | 5 s |
    """
    rule = [":--", *["--:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, rule, *rows))


def comparison_table(comparisons: Sequence[Record]) -> str:
    """A table of comparison documents of the command line, a row per schedule; speed-ups are over the first one."""
    columns = (
        "topology, schedule", "predicted s", "measured s", "spread s", "error", "speed-up predicted",
        "speed-up measured", "measured share of bound", "cores busy",
    )  # fmt: skip
    rows = [_row(run, comparison["runs"][0]) for comparison in comparisons for run in comparison["runs"]]
    return markdown_table(columns, rows)


def _row(run: Record, ring: Record) -> list[str]:
    return [
        f"{run['topology']}, {run['schedule']}",
        f"{run['predicted_s']:.3f}",
        f"{run['measured_s']:.3f}",
        f"{run['measured_spread_s']:.3f}",
        f"{run['relative_error']:+.1%}",
        f"{ring['predicted_s'] / run['predicted_s']:.2f}",
        f"{ring['measured_s'] / run['measured_s']:.2f}",
        f"{run['bound_s'] / run['measured_s']:.1%}",
        f"{run['cpu_busy_share']:.0%}",
    ]
