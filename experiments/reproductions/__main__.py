"""``python -m experiments.reproductions NAME|all``: predict published results and write their pages."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from experiments.reproductions import report
from experiments.reproductions.registry import NAMES, reproduction
from tasp_lab.core.progress import print_progress as progress


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict one result, or all; the index is made of the records of all."""
    parser = argparse.ArgumentParser(prog="python -m experiments.reproductions", description=__doc__)
    parser.add_argument("name", choices=[*NAMES, "all"], help="a folder, or all of them")
    chosen = parser.parse_args(arguments).name
    for name in NAMES if chosen == "all" else (chosen,):
        progress(name)
        each = reproduction(name)
        found = each.found()
        report.write(each, found)
        print(f"{name}: {report.counts(found.figures)}")
    report.write_index(NAMES)


if __name__ == "__main__":
    main()
