"""What schedules of attention gain where communication dominates: theory, prediction and measurement.

Eight processes run a forward pass with a full mask on an emulated mesh, behind an emulated switch and on two emulated
nodes of four; kernel calls take no time. ``python -m experiments.tables.schedules_on_the_fabric`` writes
``experiments/results/schedules_on_the_fabric.json`` after each part, and its table ``.md``. It takes about
fifteen minutes on two idle cores; ``--only PART``, several times, repeats some parts and keeps the others.

**Theory.** What a link carries takes as long as its bytes over its bandwidth. A schedule of one stage takes at least
the time of its busiest link, and as long if that link never waits. What is sent after a step without transfers waits
for kernel calls that need all that came before, so such a step ends a stage, and the times of the stages add up. Bytes
of log-sum-exps, 1/64 of a tensor with heads of 128 in 16 bits, are left out of the theory, not of the prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from experiments.common import BUSY, RESULTS, TIMES, Formats, Record, read_record, table, write_page
from experiments.tables import on_the_fabric
from experiments.tables.on_the_fabric import (
    NO_COMPUTE,
    Variant,
    chosen,
    layer_text,
    one_pass,
    replace_part,
    rows_on_fabric,
    verdict,
)
from tasp_lab import Workload
from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import NoDecompositionError, NoRouteError, ScheduleError
from tasp_lab.core.progress import print_progress as progress
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import attention_names_on, options_for
from tasp_lab.topology.graph import Topology

RING = "ring-attention"
ALIKE = {
    "zigzag-ring-attention": RING, "striped-ring-attention": RING, "burst": RING, "kv-all-gather": RING,
    "zigzag-token-ring": "token-ring", "multi-ring-kv-all-gather": "tasp",
}  # fmt: skip
"""Schedules that send the same forward, under a full mask, as another one; they are not run."""

BUFFERS = 4
"""With fewer, gloo may answer a receive of queries behind the returns that flow the other way (decision 17)."""

REPEATS = 5


@dataclass(frozen=True)
class Part(on_the_fabric.Part):
    """Of all schedules if `names` is empty, and of TokenRing with each of `tail_chunks`."""

    names: tuple[str, ...] = ()
    tail_chunks: tuple[int, ...] = ()


PARTS = {
    "mesh": Part("full-mesh:8", Workload(8 * 28 * 10, heads=8, head_dim=128, mask="full"), tail_chunks=(2, 4)),
    "switch": Part("switch:8", Workload(8 * 28 * 6, heads=8, head_dim=128, mask="full"), slow_motion=2.0),
    "nodes": Part("nodes:2x4", Workload(8 * 28 * 8, heads=8, head_dim=128, mask="full")),
    "few-kv-heads": Part(
        "full-mesh:8",
        Workload(8 * 28 * 20, heads=8, kv_heads=1, head_dim=128, mask="full"),
        names=(RING, "token-ring", "tasp"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the chosen parts, and write the record and the table."""
    for key in chosen("Schedules of attention on the emulated fabric, without compute.", PARTS, arguments):
        measure(key, PARTS[key])
    publish()


def measure(key: str, part: Part, repeats: int = REPEATS, folder: Path = RESULTS) -> None:
    """Run all schedules of a part and put them into the record, replacing those of an earlier one."""
    topology = load_machine(part.topology).topology
    variants, alike = applying(part)
    rows = rows_on_fabric(part, variants, NO_COMPUTE, repeats)
    tensor_s = shard_s(part.layer, topology)
    for row, variant in zip(rows, variants, strict=True):
        row["tensors"] = str(busiest_link_s(one_pass(variant, topology, part.layer), topology) / tensor_s)
    setting = {
        "topology": part.topology, "scale": part.scale, "repeats": repeats, "layer": layer_text(part.layer),
        "alike": alike,
    }  # fmt: skip
    replace_part(folder / "schedules_on_the_fabric.json", key, setting | {"rows": rows})


def applying(part: Part) -> tuple[list[Variant], dict[str, str]]:
    """The schedules of a part that its topology and layer allow; those left out, with the one that sends the same.

    Under a full mask these are the schedules of `ALIKE`, and members of families that load links as an earlier one.
    """
    topology = load_machine(part.topology).topology
    plain = AttentionOptions(buffers=BUFFERS)
    is_full = part.layer.mask == "full"
    names = part.names or attention_names_on(topology.world_size, variants=True)
    alike = {name: ALIKE[name] for name in names if is_full and name in ALIKE}
    found = [Variant(each, options_for(each, plain)) for each in names if each not in alike]
    found += [Variant("token-ring", replace(plain, tail_chunks=each, buffers=BUFFERS + 1)) for each in part.tail_chunks]
    kept, like = list[Variant](), dict[tuple[bytes, ...], str]()
    for variant in found:
        try:
            schedule = one_pass(variant, topology, part.layer)
            loads = tuple(np.sort(each).tobytes() for each in step_loads(schedule, topology, schedule.blocks.bytes))
        except (ScheduleError, NoRouteError, NoDecompositionError) as error:
            progress(f"{part.topology}: {error}")
            continue
        if is_full and ":" in variant.name and loads in like:
            alike[variant.name] = like[loads]
        else:
            like.setdefault(loads, variant.label)
            kept.append(variant)
    return kept, alike


def shard_s(layer: Workload, topology: Topology) -> Fraction:
    """The time of a shard of one tensor of queries on the slowest link, in seconds."""
    slowest = min(Fraction(each.bandwidth_bytes_per_s) for each in topology.constraints)
    return Fraction(layer.query_bytes_per_position * layer.sequence, topology.world_size) / slowest


def busiest_link_s(schedule: Schedule, topology: Topology) -> Fraction:
    """The time that the theory allows a forward pass in seconds, exact: see the head of this module."""
    total, loads = Fraction(0), np.zeros(len(topology.constraints), dtype=np.int64)
    bandwidths = [Fraction(each.bandwidth_bytes_per_s) for each in topology.constraints]
    for of_step in step_loads(schedule, topology, _tensor_bytes(schedule)):
        if not of_step.any():
            total += _longest_s(loads, bandwidths)
            loads[:] = 0
        loads += of_step
    return total + _longest_s(loads, bandwidths)


def step_loads(schedule: Schedule, topology: Topology, block_bytes: IntArray) -> Iterator[IntArray]:
    """The bytes on each link or port, an int array (constraints,) per step, if blocks have these bytes."""
    for step in schedule.steps:
        loads = np.zeros(len(topology.constraints), dtype=np.int64)
        routes, _ = topology.routes(step.source, step.destination)
        row, column = np.nonzero(routes >= 0)
        np.add.at(loads, routes[row, column], block_bytes[step.block][row])
        yield loads


def _longest_s(loads: IntArray, bandwidths: Sequence[Fraction]) -> Fraction:
    return max(int(load) / bandwidth for load, bandwidth in zip(loads, bandwidths, strict=True))


def _tensor_bytes(schedule: Schedule) -> IntArray:
    """The bytes of each block without its log-sum-exps, which are the only float32 fields beside 16 bits."""
    fields = [[(each.dtype != "fp32", each.size_bytes) for each in kind.fields] for kind in schedule.blocks.kinds]
    sizes = [[sum(size for tensor, size in kind if tensor), sum(size for _, size in kind)] for kind in fields]
    tensors, whole = np.array(sizes, dtype=np.int64)[schedule.blocks.kind].T
    found: IntArray = schedule.blocks.bytes * tensors // whole
    return found


def publish(folder: Path = RESULTS) -> None:
    """Write the table from the record."""
    record = read_record(folder / "schedules_on_the_fabric.json")
    parts = {key: record["parts"][key] for key in PARTS if key in record["parts"]}
    head = (
        "Forward passes of attention layers with a full mask, whose kernel calls take no time, on eight emulated "
        f"ranks; made by `python -m experiments.tables.schedules_on_the_fabric` on {record['machine']['cores']} cores "
        f"({record['machine']['date']}). On the busiest link: what the schedule sends over it, in shards of one tensor "
        "of queries without log-sum-exps; where a second stage waits for calls, both added up. Theory: that of "
        f"`{RING}` over that of the schedule, so the most that it can gain; less where transfers wait for each other, "
        f"as the ring of USP does for its all-to-all. Speed-ups are over `{RING}`."
    )
    text = "\n\n".join([head, *map(_part_text, parts.values()), verdict(parts.values())])
    write_page(folder / "schedules_on_the_fabric.md", text)


def _part_text(part: Record) -> str:
    ring = next(row for row in part["rows"] if row["schedule"] == RING)
    columns: Formats = {
        "schedule": "{schedule}",
        "on the busiest link": "{tensors}",
        "theory": lambda row: str(Fraction(ring["tensors"]) / Fraction(row["tensors"])),
        "speed-up predicted": lambda row: f"{ring['predicted_s'] / row['predicted_s']:.2f}",
        "speed-up measured": lambda row: f"{ring['measured_s'] / row['measured_s']:.2f}",
        **TIMES,
        **BUSY,
    }
    head = f"{part['topology']}, {part['layer']}, scale {part['scale']:.3g}, medians of {part['repeats']} repeats:"
    alike = ", ".join(f"{name} as {other}" for name, other in part["alike"].items())
    left_out = f"\n\nNot run, as they load links like another one: {alike}." if alike else ""
    return f"{head}\n\n{table(part['rows'], columns)}{left_out}"


if __name__ == "__main__":
    main()
