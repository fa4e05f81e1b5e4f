"""Published figures of linear attention beside predictions, to which nothing was tuned.

The records in ``experiments/published/linear`` are what the papers on LASP-2 and ZeCO report. Few of these numbers are
times of attention, so each is split into what communication can be, by prediction, and what must be something else.
``python -m experiments.tables.published_linear`` writes ``experiments/results/published_linear.json`` and its table
``.md`` in two minutes.
"""

from __future__ import annotations

from pathlib import Path

from experiments.common import markdown_table, write_record
from experiments.tables import published_lasp2, published_zeco
from experiments.tables.published_rows import Check, Row, checks_text, rows_text
from tasp_lab.files import write_whole
from tasp_lab.progress import print_progress as progress

RESULTS = Path(__file__).parents[1] / "results"

HEAD = """\
Published figures of linear attention beside predictions, made by `python -m experiments.tables.published_linear`. \
Nothing was tuned to them. Error: predicted over published quantity, less one. Communication: what exchanges take of \
the published quantity; overhead: the rest, below zero where more communication is predicted than there is time. \
Kernels have the rates of softmax attention, an assumption. Records with their sources: \
`experiments/published/linear`."""

LASP2 = """\
Linear-Llama3-1B, 16 layers of 16 heads of 128, batch 1, 64 A100. Gains are published in percent of an iteration; \
rows have them as time, with an iteration from Table 6 or, at 2097152 positions, where it has none, between that of \
half the positions and twice as long. The fabric is not stated: predictions are for one to eight NICs of 200 Gbit/s \
per node. LASP-2 is taken as released, NCCL's AllGather and then the kernels.

Verdict: part of the gain over LASP is communication, about half at 524288 positions and at most a quarter at 2097152; \
the rest grows with the sequence, as kernels between the hops of a blocking chain do. The gain over Ring Attention is \
not that over a ring of 64 GPUs, which would take longer than the whole published iteration."""

ZECO = """\
Communication of one exchange of states of 2 MiB: 32 heads of 128, float32, batch 1; H100 with eight NICs of 400 \
Gbit/s per node. The model of NCCL's own AllGather is 3 % off for one node and up to 58 % too fast for ten \
(`experiments/accuracy`), and these errors are larger.

Verdict: missed. The AllGather takes four to six times as long as predicted and three times as long as measurements of \
others, on one node as on ten, so more than these bytes must have been moved or more than the gather timed. All-Scan \
is predicted up to four times too long by NCCL's messages, and 5 to 23 times too short by wires alone. A hop of \
All-Scan takes 7 to 9 us, on NVLink as on the network: software, less than a launched NCCL message and more than \
wires."""

OPERATOR = """\
What sequence parallelism adds to the operator of gated linear attention, 16384 positions per GPU. Which passes were \
timed is not known: communication is one to two of the published exchanges, for `lasp1` of the predicted chain; \
predicted are NCCL's AllGather, `all-scan` with the best number of pieces, and `lasp`.

Verdict: for LASP and LASP-2 most of it is no communication, already inside one node; ZeCO's is small because its \
operator is otherwise that without sequence parallelism."""


def main() -> None:
    """Predict everything, and write the record and the table."""
    progress("LASP-2")
    headline, tables, layers = published_lasp2.headline_rows(), published_lasp2.checks(), published_lasp2.layer_table()
    progress("ZeCO")
    gathers, scans = published_zeco.gather_rows(), published_zeco.scan_rows()
    operator, claims, schedules = (
        published_zeco.operator_rows(),
        published_zeco.checks(),
        published_zeco.schedule_table(),
    )
    text = "\n\n".join([
        HEAD,
        "## LASP-2: gains on 64 A100", LASP2, rows_text(headline),
        "Both passes of one layer, ms. LASP-2 as released is NCCL's AllGather, others are messages.",
        markdown_table(_per_fabric(), layers),
        "## LASP-2: Tables 5 and 6", checks_text(tables),
        "## ZeCO: gathers and scans on H100", ZECO, rows_text([*gathers, *scans]),
        "All schedules, ms; of All-Scan with the best number of pieces.", markdown_table(_SCHEDULES, schedules),
        "## ZeCO: operator", OPERATOR, rows_text(operator),
        "## ZeCO: tables held against each other", checks_text(claims),
    ])  # fmt: skip
    write_record(RESULTS / "published_linear.json", {
        "rows": {"lasp2": _records(headline), "zeco": _records([*gathers, *scans, *operator])},
        "checks": {"lasp2": _records(tables), "zeco": _records(claims)},
    })  # fmt: skip
    write_whole(RESULTS / "published_linear.md", f"{text}\n".encode())
    print(text)


_SCHEDULES = (
    "GPUs", "AllGather published", "NCCL's AllGather", *published_zeco.SCHEDULES, "All-Scan published",
    "all-scan, NCCL (pieces)", "all-scan, wires (pieces)",
)  # fmt: skip


def _per_fabric() -> list[str]:
    parts = [f"{fabric}, {part}" for fabric in published_lasp2.FABRICS for part in ("time", "communication")]
    return ["schedule, positions", *parts]


def _records(parts: list[Row] | list[Check]) -> list[dict[str, object]]:
    return [each.record() for each in parts]


if __name__ == "__main__":
    main()
