"""Time and memory of the ring decomposition of a complete digraph by number of ranks.

``python -m experiments.benchmarks.decomposition_speed`` builds and verifies the rings for powers of two and, near 1000
and 4000, for one size of each class. Results: ``experiments/benchmarks/results/decomposition_speed.json``, ``.md``.
"""

from __future__ import annotations

import statistics
import timeit
import tracemalloc
from pathlib import Path
from typing import NamedTuple

from experiments.common import markdown_table, write_record
from tasp_lab.core.files import write_whole
from tasp_lab.rings.complete_digraph import hamiltonian_cycles

CASES = (
    (8, "0 mod 4"),
    (64, "0 mod 4"),
    (256, "0 mod 4"),
    (1021, "prime"),
    (1022, "2 mod 4"),
    (1023, "odd"),
    (1024, "0 mod 4"),
    (2048, "0 mod 4"),
    (4093, "prime"),
    (4094, "2 mod 4"),
    (4095, "odd"),
    (4096, "0 mod 4"),
)
REPEATS = 5
RESULTS = Path(__file__).parent / "results"


class _Row(NamedTuple):
    n: int
    kind: str
    median_s: float
    answer_bytes: int
    peak_bytes: int

    @property
    def entries(self) -> int:
        return self.n * (self.n - 1)


def main() -> None:
    """Measure all cases and write the table."""
    rows = [_measure(n, kind) for n, kind in CASES]
    write_record(RESULTS / "decomposition_speed.json", {"repeats": REPEATS, "rows": [row._asdict() for row in rows]})
    columns = ("n", "kind", "ms", "ns per entry", "answer MB", "peak MB", "peak over answer")
    cells = [
        [f"{row.n}", row.kind, f"{row.median_s * 1e3:.2f}", f"{row.median_s * 1e9 / row.entries:.0f}",
         f"{row.answer_bytes / 1e6:.3f}", f"{row.peak_bytes / 1e6:.3f}", f"{row.peak_bytes / row.answer_bytes:.1f}"]
        for row in rows
    ]  # fmt: skip
    made = "python -m experiments.benchmarks.decomposition_speed"
    head = (
        f"`hamiltonian_cycles(n)`, verified, medians of {REPEATS} runs, made by `{made}`. The answer has n (n - 1) "
        "entries; peak is what Python and NumPy hold at most during one call, the answer included."
    )
    table = f"{head}\n\n{markdown_table(columns, cells)}"
    write_whole(RESULTS / "decomposition_speed.md", (table + "\n").encode())
    print(table)


def _measure(n: int, kind: str) -> _Row:
    median_s = statistics.median(timeit.repeat(lambda: hamiltonian_cycles(n), number=1, repeat=REPEATS))
    return _Row(n, kind, median_s, *_memory(n))


def _memory(n: int) -> tuple[int, int]:
    """Bytes of the result and peak memory; measured separately from time, since tracing is slow."""
    tracemalloc.start()
    answer_bytes = hamiltonian_cycles(n).nbytes
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return answer_bytes, peak_bytes


if __name__ == "__main__":
    main()
