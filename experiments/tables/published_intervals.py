"""Published speed-ups and times beside the intervals of their predictions: held, or why not.

Both schedules of a speed-up are predicted with the same samples of the machine's constants, so errors that they share
cancel. Nothing is tuned. ``python -m experiments.tables.published_intervals`` writes
``experiments/results/published_intervals.json`` and its table ``.md``, in a minute.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from experiments.common import Record, markdown_table, write_record
from sim.simulate import simulate
from tasp_lab import Workload, predict
from tasp_lab.analysis.interval import Interval
from tasp_lab.analysis.registry import options_for
from tasp_lab.analysis.residual_fit import residual_of
from tasp_lab.analysis.results import LayerPrediction
from tasp_lab.analysis.uncertainty import Uncertainty
from tasp_lab.attention.options import AttentionOptions
from tasp_lab.choices import Pass
from tasp_lab.collectives.library_calls import library_schedule
from tasp_lab.files import write_whole
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.sampling import DEFAULT_SAMPLING, machine_samples
from tasp_lab.progress import print_progress as progress

PUBLISHED = Path(__file__).parents[1] / "published"
RESULTS = Path(__file__).parents[1] / "results"

TASP_HEADS = 32
"""Of 128 each; neither is in the summaries of the paper. So are the mask (full) and the pass (forward)."""

TASP_REASON = (
    "the shape of heads and the kernel are not published, and one rate stands for kernels of all lengths; "
    "what hosts need to launch short ones is not modelled"
)
TOKEN_RING_REASON = (
    "the ring takes 7.6 ms a step for 98.3 MB: one connection does not fill the PCIe lanes, which a model of wires "
    "lacks; TokenRing gains by a second one"
)
LASP2_REASON = (
    "an iteration has more than exchanges: the gain grows with the sequence, as kernels between the hops of a blocking "
    "chain do, and the fabric is not stated"
)
ZECO_REASON = (
    "three times as long as nccl-tests on 8 other H100 for twice the bytes: more than these bytes moved, or more than "
    "the gather was timed"
)
SCAN_REASON = "a hop of the paper's own kernels takes 7 to 9 us: less than a launched message of NCCL"


@dataclass(frozen=True)
class Row:
    """A published number beside the 5, 50 and 95 % points of its prediction, and why it is not held."""

    what: str
    published: float
    predicted: tuple[float, float, float]
    reason: str

    @property
    def held(self) -> bool:
        """Whether the interval holds the published number."""
        return self.predicted[0] <= self.published <= self.predicted[2]

    def to_dict(self) -> Record:
        """The row of the record."""
        low, middle, high = self.predicted
        return {
            "what": self.what, "published": self.published, "low": low, "middle": middle, "high": high,
            "held": self.held, "reason": None if self.held else self.reason,
        }  # fmt: skip


def main() -> None:
    """Predict everything, and write the record and the table."""
    rows = []
    for row in chain(tasp(), token_ring(), lasp2(), zeco()):
        progress(row.what)
        rows.append(row)
    write_record(RESULTS / "published_intervals.json", {"rows": [row.to_dict() for row in rows]})
    write_whole(RESULTS / "published_intervals.md", f"{text(rows)}\n".encode())
    print(text(rows))


def text(rows: list[Row]) -> str:
    """The table, in Markdown."""
    cells = [
        (row.what, f"{row.published:.3g}", "{:.3g} ({:.3g} to {:.3g})".format(*(row.predicted[i] for i in (1, 0, 2))),
         "held" if row.held else row.reason)
        for row in rows
    ]  # fmt: skip
    return (
        f"{' '.join(str(__doc__).split())}\n\n{sum(row.held for row in rows)} of {len(rows)} are held. Predicted: 50 % "
        "point (5 to 95 %).\n\n" + markdown_table(("what", "published", "predicted", "held, or why not"), cells)
    )


def tasp() -> Iterator[Row]:
    """TASP over Ring Attention on 8 MI300X, and the CCR of Ring Attention."""
    for row in _records("speed_ups/tasp_mi300x"):
        sequence = int(row["sequence"])
        layer = Workload(sequence - sequence % 8, 48, TASP_HEADS, TASP_HEADS, 128, "bf16", "full")
        ring, fast = (_both("mi300x-8", name, layer) for name in ("ring-attention", "tasp"))
        yield Row(f"TASP, speed-up, {sequence} positions", float(row["speedup"]), _over(ring, fast), TASP_REASON)
        ccr = ring.ccr
        assert ccr is not None, "a ring communicates"
        yield Row(f"Ring Attention, CCR, {sequence} positions", float(row["ccr"]), _ccr(ring, ccr), TASP_REASON)


def _ccr(ring: LayerPrediction, ccr: float) -> tuple[float, float, float]:
    """Compute over communication: the interval of the kernels' rate over that of the messages alone."""
    machine = load_machine("mi300x-8")
    rate = ring.rates["forward"]
    factors = machine_samples(machine, DEFAULT_SAMPLING).of_rate(rate, ring.layer.dtype, "forward")
    assert ring.interval is not None, "intervals were asked for"
    spread = ring.interval.residual
    found = Interval(1.0, 1 / factors, spread)
    return ccr * found.quantile_s(0.05), ccr * found.quantile_s(0.5), ccr * found.quantile_s(0.95)


def token_ring() -> Iterator[Row]:
    """TokenRing over Ring Attention on 4 A10, from the pictures of its repository."""
    layer = Workload(24000, 1, 32, 32, 128, "fp16", "full")
    ring, token = (
        _without("token_ring_a10", _both("a10-4-pcie", name, layer)) for name in ("ring-attention", "token-ring")
    )
    yield Row("TokenRing, speed-up of attention", 26.7 / 17.1, _over(ring, token), TOKEN_RING_REASON)
    yield Row("Ring Attention on A10, ms", 26.7, _ms(ring), TOKEN_RING_REASON)
    yield Row("TokenRing on A10, ms", 17.1, _ms(token), TOKEN_RING_REASON)


def lasp2() -> Iterator[Row]:
    """LASP-2 over LASP on 64 A100: gains of whole iterations beside those of the exchanges and kernels of a layer."""
    for sequence, gain in ((524288, 0.073), (2097152, 0.152)):
        layer = Workload(sequence, 1, 16, 16, 128, "bf16", "causal", kind="linear")
        lasp, gathered = (_both("a100-8x8", name, layer, passes="both") for name in ("lasp", "lasp-2"))
        yield Row(f"LASP-2 over LASP, {sequence} positions", 1 + gain, _over(lasp, gathered), LASP2_REASON)


def zeco() -> Iterator[Row]:
    """The AllGather and the All-Scan of ZeCO's paper on H100, 2 MiB per rank."""
    published = {8: (0.375, 0.226), 64: (2.543, 0.739), 256: (8.514, 2.165)}
    for gpus, (gather_ms, scan_ms) in published.items():
        machine = load_machine("h100-8" if gpus == 8 else f"h100-{gpus // 8}x8")
        schedule = library_schedule("all_gather", machine.topology, 2**21 * gpus)
        time_s = float(simulate(schedule, machine, events=False).time_s)
        found = Uncertainty(machine, DEFAULT_SAMPLING).interval(schedule, time_s)
        assert found is not None, "intervals were asked for"
        yield Row(f"AllGather of 2 MiB, {gpus} H100, ms", gather_ms, _scaled(found), ZECO_REASON)
        if gpus == 8:
            layer = Workload(65536, 1, 32, 32, 128, "bf16", "causal", kind="linear")
            scan = _both("h100-8", "all-scan", layer, compute=1e30)
            yield Row("All-Scan of 2 MiB, 8 H100, ms", scan_ms, _ms(scan), SCAN_REASON)


def _both(
    machine: str, schedule: str, layer: Workload, passes: Pass = "forward", compute: float | None = None
) -> LayerPrediction:
    """The last prediction of a schedule, nothing trimmed where that is an option: published code sends all blocks."""
    options = options_for(schedule, AttentionOptions(passes, trim=False))
    found = predict(machine, schedule, layer, events=False, options=options, compute=compute)[-1]
    assert isinstance(found, LayerPrediction), "only layers are predicted"
    return found


def _without(source: str, prediction: LayerPrediction) -> LayerPrediction:
    """The prediction with an interval whose residuals are without those of a source."""
    assert prediction.interval is not None, "intervals were asked for"
    residual = residual_of(prediction.interval.residual.asked, source)
    return replace(prediction, interval=replace(prediction.interval, residual=residual))


def _over(one: LayerPrediction, other: LayerPrediction) -> tuple[float, float, float]:
    assert one.interval is not None, "intervals were asked for"
    assert other.interval is not None, "intervals were asked for"
    return one.interval.over(other.interval)


def _ms(prediction: LayerPrediction) -> tuple[float, float, float]:
    assert prediction.interval is not None, "intervals were asked for"
    return _scaled(prediction.interval)


def _scaled(found: Interval) -> tuple[float, float, float]:
    return 1e3 * found.low_s, 1e3 * found.quantile_s(0.5), 1e3 * found.high_s


def _records(name: str) -> list[dict[str, str]]:
    lines = (PUBLISHED / f"{name}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


if __name__ == "__main__":
    main()
