"""ZeCO's figures as ranges: what communication can be of them."""

from __future__ import annotations

from experiments.reproductions.ranges import Range, Row, read_record
from experiments.reproductions.zeco.exchanges import FOLDER, best_scan_ms, forward_ms, library_gather_ms, published


def gather_rows() -> list[Row]:
    """The published AllGather beside NCCL's own as predicted."""
    rows = []
    for gpus, time_ms in published("allgather_ms").items():
        own = Range.of(library_gather_ms(gpus))
        rows.append(Row(
            f"AllGather, {gpus} GPUs", Range.of(time_ms), own, own,
            f"{time_ms / own.low:.1f} times NCCL's own of these bytes, so not that alone was timed."
        ))  # fmt: skip
    return rows


def scan_rows() -> list[Row]:
    """The published All-Scan beside All-Scan on wires alone, and by NCCL's messages."""
    rows = []
    for gpus, time_ms in published("allscan_ms").items():
        (wires, _), (messages, pieces) = best_scan_ms(gpus, "ideal"), best_scan_ms(gpus)
        rows.append(Row(
            f"All-Scan, {gpus} GPUs", Range.of(time_ms), Range(wires, messages), Range.of(wires),
            f"Between wires alone and NCCL's messages ({pieces} pieces): a hop costs less than a launched message.",
        ))  # fmt: skip
    return rows


def operator_rows() -> list[Row]:
    """What sequence parallelism adds to the published operator, and one to two exchanges, one for each pass."""
    gathers, scans = published("allgather_ms"), published("allscan_ms")
    rows = []
    for row in read_record(FOLDER / "operator.csv"):
        gpus = int(row["gpus"] or 0)
        chain = forward_ms(gpus, "lasp")
        alone = row["no_sp"] or 0
        for system, once, own, verdict in (
            (
                "lasp1",
                chain,
                chain,
                "Predicted messages are {} of it; the rest likely is kernels that wait for each other.",
            ),
            (
                "lasp2",
                library_gather_ms(gpus),
                gathers[gpus],
                "The published gathers are {} of it; the rest, 12 ms even inside one node, is not communication.",
            ),
            (
                "zeco",
                best_scan_ms(gpus)[0],
                scans[gpus],
                "The published scans are {} of it; the rest is not communication.",
            ),
        ):
            added, exchange = Range.of((row[system] or 0) - alone), Range(own, 2 * own)
            rows.append(Row(
                f"{system} operator less no_sp, {gpus} GPUs", added, Range(once, 2 * once), exchange,
                verdict.format((exchange / added).text(".0%")),
            ))  # fmt: skip
    return rows
