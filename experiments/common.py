"""Machine records, and writing of results as JSON and Markdown tables."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tasp_lab.core.files import write_whole
from tasp_lab.core.process import usable_cores
from tasp_lab.core.tables import Formats as Formats
from tasp_lab.core.tables import Part, cells_of

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


def read_record(path: Path) -> Record:
    """A result that `write_record` wrote."""
    found: Record = json.loads(path.read_text())
    return found


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


def table(rows: Iterable[Any], columns: Formats) -> str:
    """A Markdown table of rows by field, with a format for each column.

    >>> print(table([{"what": "ring", "time_s": 5}], {"what": "{what}", "time": "{time_s:time}"}))
    | what | time |
    | :-- | --: |
    | ring | 5 s |
    """
    return markdown_table(tuple(columns), [cells_of(row, columns) for row in rows])


def markdown(parts: Iterable[Part]) -> str:
    """Tables and lines of a report of tasp-lab."""
    return "\n\n".join(
        part if isinstance(part, str) else f"**{part.title}**\n\n{markdown_table(part.columns, part.rows)}"
        for part in parts
    )


TIMES: Formats = {
    "predicted s": "{predicted_s:.3f}", "measured s": "{measured_s:.3f}", "spread s": "{measured_spread_s:.3f}",
    "error": "{relative_error:+.1%}",
}  # fmt: skip
"""The times of a run on the emulated fabric; spread is the slowest repeat minus the fastest."""

BUSY: Formats = {"cores busy": "{cpu_busy_share:.0%}"}
