"""ZeCO's tables held against each other and against measurements of others."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from experiments.reproductions.ranges import Check
from experiments.reproductions.zeco.exchanges import GPUS, ONE_NODE, TEN_NODES, library_gather_ms, published
from tasp_lab.measure.accuracy import own_tables
from tasp_lab.measure.readers.table import read_table


def checks() -> list[Check]:
    """The tables held against each other and against measurements of others."""
    gathers, scans = published("allgather_ms"), published("allscan_ms")
    one_node_ms, ten_nodes_ms = measured_ms(ONE_NODE, 2**25), measured_ms(TEN_NODES, 2**27)
    of_8_mib = ", ".join(f"{library_gather_ms(gpus, 2**23):.2f}" for gpus in GPUS)
    lasp2, zeco = (
        ", ".join(f"{each:.0f}" for each in exchanges(published(system), published("data_parallel_bound"), exchange))
        for system, exchange in (("lasp2", gathers), ("zeco", scans))
    )
    return [
        Check("8 GPUs gather 2 MiB each in 0.375 ms, 64 in 2.543 ms.",
              f"nccl-tests on 8 other H100 gathered twice the bytes in {one_node_ms:.3f} ms, and 80 H100 as many bytes "
              f"as these 64 in {ten_nodes_ms:.2f} ms.",
              "At least three times a bare AllGather, in a node and between nodes, so slower links do not explain it."),
        Check("Bytes of the gather.",
              f"From 128 to 256 GPUs each rank's share takes {1e3 * (gathers[256] - gathers[128]) / 128:.1f} us; NCCL "
              f"is predicted to gather 8 MiB per rank instead of 2 MiB in {of_8_mib} ms.",
              "An inference, not a prediction: four to eight times the bytes would fit, as would other work per rank."),
        Check("A hop of All-Scan.",
              f"From 8 to 256 GPUs each further GPU adds {', '.join(f'{x:.1f}' for x in _steps_us(scans))} us, of "
              "which a NIC needs 1.3 us for a piece of 64 KiB, and NVLink 0.15 us.",
              "Latency, alike inside nodes and between them; NCCL's model counts 15 to 22 us to launch a message."),
        Check("tau + (P - 1) tau / K for All-Scan.",
              f"Times of P - 2 + K equal hops fit with K = {fitted_pieces(scans):.0f}, within "
              f"{_worst_fit(scans):.0%}.",
              "Confirmed: the published times have the form of a pipeline, as `all-scan` has."),
        Check("Tokens per second and GPU, 32768 positions per GPU, against data parallelism alone.",
              f"What an iteration takes longer, beyond that on 8 GPUs, is as long as {lasp2} published gathers (LASP-2 "
              f"on 64, 128 and 256 GPUs), and {zeco} scans (ZeCO).",
              "The exchange explains the growth if there are that many exchanges, two for each of 16 to 30 layers."),
    ]  # fmt: skip


def measured_ms(table: str, size_bytes: int) -> float:
    """The measured time of the size that comes closest."""
    rows = read_table(own_tables() / f"{table}.csv").rows
    return 1e3 * min(rows, key=lambda row: abs(row.size_bytes - size_bytes)).time_s


def _steps_us(times_ms: dict[int, float]) -> list[float]:
    sizes = sorted(times_ms)
    return [1e3 * (times_ms[b] - times_ms[a]) / (b - a) for a, b in pairwise(sizes)]


def fitted_pieces(times_ms: dict[int, float]) -> float:
    """The pieces K with which the first and the last time are those of P - 2 + K equal hops."""
    first, last = min(times_ms), max(times_ms)
    ratio = times_ms[last] / times_ms[first]
    return (last - 2 - ratio * (first - 2)) / (ratio - 1)


def _worst_fit(times_ms: dict[int, float]) -> float:
    pieces, last = fitted_pieces(times_ms), max(times_ms)
    hop_ms = times_ms[last] / (last - 2 + pieces)
    return max(abs((gpus - 2 + pieces) * hop_ms / time - 1) for gpus, time in times_ms.items())


def exchanges(
    tokens_per_s: Mapping[int, float], bound_tokens_per_s: Mapping[int, float], exchange_ms: Mapping[int, float]
) -> list[float]:
    """How many exchanges take as long as an iteration's loss against data parallelism grows from 8 GPUs on.

    Throughputs are per GPU, with 32768 positions on each.
    """
    loss_ms = {gpus: 32768e3 * (1 / tokens_per_s[gpus] - 1 / bound_tokens_per_s[gpus]) for gpus in tokens_per_s}
    return [(loss_ms[n] - loss_ms[8]) / (exchange_ms[n] - exchange_ms[8]) for n in sorted(loss_ms) if n > 8]
