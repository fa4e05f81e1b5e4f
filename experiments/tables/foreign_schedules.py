"""Public algorithms in MSCCL XML, ranked beside schedules of ours on the machine that they were made for.

``python -m experiments.tables.foreign_schedules FOLDER`` reads the files of `SOURCES` from a folder and writes
``experiments/results/foreign_schedules.md``. The files are no part of this repository; `WHERE` is where they are from.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import tasp_lab
from experiments.common import RESULTS, markdown_table, write_page
from tasp_lab.core.units import format_size, format_time

MACHINE = "mi300x-8"
WHERE = "ROCm/rccl at 0cbce2a, tools/msccl-algorithms"


class Source(NamedTuple):
    """A file, what it does, the schedules of ours beside it, and bytes per rank in the range that the file states."""

    file: str
    what: str
    own: tuple[str, ...]
    shard_bytes: tuple[int, ...]


_ALL_REDUCE = ("ring-all-reduce", "multi-ring-all-reduce", "library-ring-all-reduce")
SOURCES = (
    Source("allreduce-allpairs-8n-ll-32tb.xml", "AllReduce, all pairs, 4 channels", _ALL_REDUCE, (1024, 8192)),
    Source("allreduce-allpairs-8n-simple.xml", "AllReduce, all pairs, 8 channels", _ALL_REDUCE, (2**16, 2**20)),
    Source("alltoall-8n-512kb-7mb.xml", "AllToAll, direct, 32 channels", ("all-to-all",), (2**16, 2**19)),
)
PAGE = RESULTS / "foreign_schedules.md"

ABOUT = f"""\
Algorithms of others on {MACHINE}, read from MSCCL XML, proved and predicted beside ours, made by
`python -m experiments.tables.foreign_schedules FOLDER`; the files are those of {WHERE}.
Bytes are those of a shard; the range of each file has them. *Links*: ideal links. *RCCL*: as sends and receives of
RCCL, not as kernels of MSCCL, of which no constants are known; a schedule `library-…` is RCCL's own call.

"""

WHY = """

On ideal links all pairs end first: two steps, each over seven links at once. Several rings carry as many bytes in 14
steps, so what they lose is latency. As messages of RCCL, all pairs beat RCCL's own ring at 64 KiB only: below, two
groups of messages take longer to launch than one call, above, the call has the better rate. The AllToAll of 32 channels
is ours with each message cut into four.
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of the files")
    folder = parser.parse_args().folder
    rows = []
    for source in SOURCES:
        for size in source.shard_bytes:
            names = [str(folder / source.file), *source.own]
            ideal, rccl = (
                tasp_lab.predict(MACHINE, names, size, library=library, samples=0) for library in ("ideal", "auto")
            )
            times = sorted(
                (float(a.time_s), float(b.time_s), Path(name).name)
                for name, a, b in zip(names, ideal, rccl, strict=True)
            )
            first = f"{source.what}, {format_size(size)}"
            for links_s, rccl_s, name in times:
                rows.append([first, f"`{name}`", format_time(links_s), format_time(rccl_s)])
                first = ""
    write_page(PAGE, ABOUT + markdown_table(("collective", "schedule", "links", "RCCL"), rows) + WHY)


if __name__ == "__main__":
    main()
