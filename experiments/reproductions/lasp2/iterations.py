"""Published iterations of LASP-2 (arXiv:2502.07563), and how much longer those of other systems take."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from experiments.reproductions.lasp2.exchanges import GPUS
from experiments.reproductions.ranges import Range, read_record

FOLDER = Path(__file__).parent


@cache
def iterations_s() -> dict[tuple[int, int], float]:
    """The time of an iteration by sequence and GPUs, from Table 6: positions over throughput."""
    return {
        (int(row["seqlen"] or 0), gpus): (row["seqlen"] or 0) / tokens_per_s
        for row in read_record(FOLDER / "throughput.csv")
        for gpus in (16, 32, 64, 128)
        if (tokens_per_s := row[f"gpus{gpus}"]) is not None
    }


def iteration_s(sequence: int) -> Range:
    """An iteration of LASP-2 on 64 GPUs; where Table 6 has none, from that of half the positions to twice its time.

    More positions take no less time, and in Table 6 the throughput never falls with the length, as `checks` finds. Of
    1048576 positions there are two times, in Tables 5 and 6.
    """
    times = iterations_s()
    if (sequence, GPUS) in times:
        return Range.of(times[sequence, GPUS])
    half = sequence // 2
    by_table5 = half / max(row["tokens_per_s"] or 0 for row in read_record(FOLDER / "split.csv"))
    return Range(by_table5, 2 * times[half, GPUS])


def gap_ms(sequence: int, column: str) -> Range:
    """How much longer than LASP-2's an iteration of another system takes."""
    row = next(each for each in read_record(FOLDER / "headline.csv") if each["seqlen"] == sequence)
    return iteration_s(sequence).scaled(10 * (row[column] or 0))
