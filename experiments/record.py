"""What a committed result says about where it comes from, and how it is written."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from runtime.host import usable_cores
from tasp_lab.output import write_whole

LIBRARIES = ("torch", "simpy", "numpy", "pyroute2")


def machine_record() -> dict[str, object]:
    """Processor, cores, kernel, versions and date."""
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
    """Write a result as JSON together with the record of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps({"machine": machine_record()} | document, indent=1) + "\n").encode())


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, the first column to the left and the others to the right.

    >>> print(markdown_table(["what", "time"], [["ring", "5 s"]]))
    | what | time |
    | :-- | --: |
    | ring | 5 s |
    """
    rule = [":--", *["--:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, rule, *rows))
