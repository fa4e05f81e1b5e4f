"""Steps 4 to 7: the clock, the calibration, alignment and overlap, each held against the library's own speed."""

from __future__ import annotations

import statistics
from dataclasses import replace

from runtime.calibration import calibrate, calibrate_shared_medium
from runtime.gpu_check.overlap import measure_overlap
from runtime.protocol.jobs import RunSchedule
from runtime.protocol.records import duration_s
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import build_schedules
from tasp_lab.validation.gpu_check.hardware import neighbours_bandwidth
from tasp_lab.validation.gpu_check.steps import Context, Outcome, judged
from tasp_lab.workload.layer import Workload

CLOCK_LIMIT = 0.05
EMPTY_LIMIT_S = 50e-6
CALIBRATION_LIMIT = 0.10
ALIGNMENT_LIMIT = 0.05
SLOWER_TOGETHER = -0.1
"""The least share of communication that may be hidden: less means slower together than one after the other."""

SILENCE_S = 120.0


def measured_s(context: Context, schedule: Schedule) -> float:
    """The median over repeats of the time of a run, in seconds, after one that is checked."""
    repeats = context.sizes.repeats
    results = context.group.ranks.perform(RunSchedule(schedule, "auto", repeats, warm_ups=1), SILENCE_S)
    records = [each for each in results if isinstance(each, list)]
    return statistics.median(duration_s([of_rank[run] for of_rank in records]) for run in range(repeats))


def check_clock(context: Context) -> Outcome:
    """Step 4: one message around the ring by the executor, and a schedule of nothing."""
    topology, size = context.machine.topology, context.sizes.message_bytes[-1]
    (message,) = build_schedules("send-recv", topology, size)
    (small,) = build_schedules("send-recv", topology, 1)
    empty = replace(small, name="empty", steps=[], final=small.initial)
    ours_s, empty_s, library_s = measured_s(context, message), measured_s(context, empty), context.ceilings[
        "sendrecv", size
    ]  # fmt: skip
    difference = ours_s / library_s - 1
    numbers = {
        "message_bytes": size,
        "executor_s": ours_s,
        "library_s": library_s,
        "difference": difference,
        "limit": CLOCK_LIMIT,
        "empty_schedule_s": empty_s,
        "empty_limit_s": EMPTY_LIMIT_S,
    }
    failures = []
    if not abs(difference) <= CLOCK_LIMIT:
        failures.append(f"a message takes {difference:+.1%} of the library's time, expected at most 5 % off")
    if not empty_s <= EMPTY_LIMIT_S:
        failures.append(f"an empty schedule takes {empty_s * 1e6:.0f} us, expected at most 50 us")
    return judged(context, numbers, failures)


def check_calibration(context: Context) -> Outcome:
    """Step 5: the calibrated bandwidth between neighbours against the ring of messages of step 1."""
    measure = calibrate if context.group.on_gpu else calibrate_shared_medium
    found = context.calibration = measure(context.machine.topology, context.group.ranks, context.progress)
    size = context.sizes.message_bytes[-1]
    ceiling = size / context.ceilings["sendrecv", size]
    calibrated = neighbours_bandwidth(found.machine.topology)
    difference = calibrated / ceiling - 1
    numbers: dict[str, object] = {
        "calibrated_bytes_per_s": calibrated,
        "ceiling_bytes_per_s": ceiling,
        "difference": difference,
        "limit": CALIBRATION_LIMIT,
        "launch_s": float(found.machine.comm_library.launch_s),
        "routes": [
            {
                "pairs": " ".join(f"{source}->{destination}" for source, destination in fit.route_class.pairs),
                "links": fit.route_class.links,
                "bandwidth_bytes_per_s": fit.bandwidth_bytes_per_s.value,
                "low": fit.bandwidth_bytes_per_s.low,
                "high": fit.bandwidth_bytes_per_s.high,
                "latency_s": fit.latency_s.value,
                "launch_s": fit.launch_s.value,
            }
            for fit in found.fits
        ],
    }
    told = f"the calibrated bandwidth is {difference:+.1%} of the library's, expected at most 10 % off"
    return judged(context, numbers, [] if abs(difference) <= CALIBRATION_LIMIT else [told])


def check_alignment(context: Context) -> Outcome:
    """Step 6: shards that the rings of multi-ring divide without rest, and shards that they do not."""
    rows, speeds = [], []
    for size in context.sizes.aligned_bytes:
        (schedule,) = build_schedules("multi-ring", context.machine.topology, size)
        time_s = measured_s(context, schedule)
        speeds.append(size / time_s)
        rows.append({"shard_bytes": size, "time_s": time_s, "shard_bytes_per_s": speeds[-1]})
    difference = speeds[1] / speeds[0] - 1
    numbers = {"multi_ring": rows, "difference": difference, "limit": ALIGNMENT_LIMIT}
    told = f"the shard that the rings do not divide is {-difference:.1%} slower per byte, expected at most 5 %"
    return judged(context, numbers, [] if difference >= -ALIGNMENT_LIMIT else [told])


PAIRS = (("ring-attention", "ring"), ("tasp", "multi-ring"))
"""Layers, and the AllGather that sends the same keys and values along the same paths if the mask is full."""


def check_overlap(context: Context) -> Outcome:
    """Step 7: kernels alone, messages alone and both together, with normal and high priority of messages."""
    topology, rows, failures = context.machine.topology, [], []
    for sequence in context.sizes.overlap_sequences:
        layer = timed_layer(context, sequence)
        shard_bytes = layer.kv_bytes_per_position * sequence // topology.world_size
        for name, gather in PAIRS:
            (attention,) = build_schedules(name, topology, layer)
            (messages,) = build_schedules(gather, topology, shard_bytes)
            context.progress(f"overlap of {name} at {sequence} positions")
            for found in measure_overlap(context.group, attention, messages, context.sizes.repeats):
                rows.append({"schedule": name, "sequence": sequence} | found.to_dict())
                if found.hidden_share < SLOWER_TOGETHER:
                    failures.append(
                        f"{name} at {sequence} positions, priority {found.priority}: hides {found.hidden_share:.2f} of "
                        "the shorter part, so both together are slower than one after the other"
                    )
    return judged(context, {"overlap": rows}, failures)


def timed_layer(context: Context, sequence: int) -> Workload:
    """The layer whose time is measured, with a full mask."""
    sizes = context.sizes
    return Workload(
        sequence,
        heads=sizes.layer_heads,
        kv_heads=sizes.layer_kv_heads,
        head_dim=sizes.layer_head_dim,
        dtype=sizes.layer_dtype,
    )
