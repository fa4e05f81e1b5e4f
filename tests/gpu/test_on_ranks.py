"""Schedules, times and losses on the ranks of a torchrun job."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from runtime.executor.transports import TRANSPORTS, make_transport
from runtime.protocol.jobs import KernelTimes, MeasureCompute, Ranks, RunSchedule
from runtime.protocol.records import duration_s
from runtime.ranks.watch import CheckedGroup
from tasp_lab.core.errors import RunError, TaspLabError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import COLLECTIVES, layer_names_on
from tasp_lab.topology.graph import Topology
from tasp_lab.validation.fabrics import fit_document
from tasp_lab.validation.gpu_check import Check
from tasp_lab.workload.layer import Work, Workload
from tests.gpu import beside, hardware, training
from tests.gpu.delays import DelayedRuns
from tests.gpu.lost_ranks import lose_rank
from tests.gpu.sizes import SILENCE_S, Sizes

pytestmark = pytest.mark.gpu

BOTH = AttentionOptions("both")
Ceilings = Mapping[tuple[str, int], float]


def judge(check: Check, failures: list[str]) -> None:
    """Fail for limits that are exceeded, which apply on GPUs only."""
    if not check.on_gpu:
        pytest.skip("needs a GPU: the numbers are those of this host, and no limit applies to them")
    assert not failures, "; ".join(failures)


def measured_s(ranks: Ranks, schedule: Schedule, repeats: int) -> float:
    """The median over repeats of the time of a run, in seconds, after one that is checked."""
    results = ranks.perform(RunSchedule(schedule, "auto", repeats, warm_ups=1), SILENCE_S)
    records = [of_rank for of_rank in results if isinstance(of_rank, list)]
    return statistics.median(duration_s([of_rank[run] for of_rank in records]) for run in range(repeats))


def test_every_schedule_over_every_transport_delivers_every_bit(
    check: Check, group: CheckedGroup, sizes: Sizes, numbers: dict[str, object]
) -> None:
    """Without delays: messages are matched wrongly. Only with random delays of messages and kernels: a dependency
    between streams is missing. Either is a fault of tasp-lab; send the record.
    """
    unapplied, runs, schedules = list[dict[str, object]](), 0, 0
    # symmetric-memory has never run on GPUs: what fails in it would end the check for all other transports
    left_out = {"symmetric-memory", "p2p"} if group.on_gpu else {"symmetric-memory"}
    transports = [name for name in TRANSPORTS if name not in left_out]
    for name, schedule in all_schedules(check, group, sizes, unapplied):
        check.progress(f"{name}: {schedule.transfers} transfers over {' and '.join(transports)}")
        schedules += 1
        for transport in transports:
            made = DelayedRuns(group, schedule, make_transport(transport, SILENCE_S, device=group.device))
            for seed in (None, *range(sizes.seeds)):
                try:
                    made.run(seed)
                except RunError as error:
                    how = "without delays" if seed is None else f"with random delays, seed {seed}"
                    raise RunError(f"{name} over {transport}, {how}: {error}") from None
                runs += 1
    numbers |= {"schedules": schedules, "transports": transports, "runs": runs, "do_not_apply": unapplied or "none"}


def all_schedules(
    check: Check, group: CheckedGroup, sizes: Sizes, unapplied: list[dict[str, object]]
) -> Iterator[tuple[str, Schedule]]:
    """All schedules by name, both passes of layers; the reasons of those that do not apply are added to a list.

    The shards of keys and values of layers have about the size of the collectives' blocks, and there are heads for all
    ranks.
    """
    n, head_dim = group.world_size, 64 if group.on_gpu else 8
    per_rank = max(16, sizes.delayed_bytes // (4 * n * head_dim))
    layer = Workload(n * per_rank, heads=2 * n, kv_heads=n, head_dim=head_dim, dtype="bf16", mask="full")
    layers = [replace(layer, mask=mask) for mask in sizes.delayed_masks]  # type: ignore[arg-type]
    layers.append(replace(layer, mask="causal", kind="linear", decay="head"))
    named: list[tuple[str, Work]] = [(name, sizes.delayed_bytes) for name in COLLECTIVES]
    named += [(name, layer) for layer in layers for name in layer_names_on(n, layer)]
    for name, work in named:
        options = BOTH if isinstance(work, Workload) else AttentionOptions()
        try:
            built = build_schedules(name, check.machine.topology, work, options=options)
        except TaspLabError as error:
            unapplied.append({"schedule": name, "reason": str(error)})
            continue
        label = f"{name} ({work.mask})" if isinstance(work, Workload) else name
        yield from ((label, schedule) for schedule in built)


def test_the_clock_of_the_executor_is_that_of_the_library(
    check: Check, several: CheckedGroup, sizes: Sizes, ceilings: Ceilings, numbers: dict[str, object]
) -> None:
    """Measured times are those of our host code rather than of messages. Other processes on the cores, or a GPU whose
    clock is low, show up here, too: run again on an idle node before you send the record.
    """
    limit, empty_limit_s, size = 0.05, 50e-6, sizes.message_bytes[-1]
    (message,) = build_schedules("send-recv", check.machine.topology, size)
    (small,) = build_schedules("send-recv", check.machine.topology, 1)
    empty = replace(small, name="empty", steps=[], final=small.initial)
    executor_s, empty_s = (measured_s(several.ranks, each, sizes.repeats) for each in (message, empty))
    library_s = ceilings["sendrecv", size]
    difference = executor_s / library_s - 1
    numbers |= {
        "message_bytes": size, "executor_s": executor_s, "library_s": library_s, "difference": difference,
        "limit": limit, "empty_schedule_s": empty_s, "empty_limit_s": empty_limit_s,
    }  # fmt: skip
    failures = []
    if not abs(difference) <= limit:
        failures.append(f"a message takes {difference:+.1%} of the library's time, expected at most 5 % off")
    if not empty_s <= empty_limit_s:
        failures.append(f"an empty schedule takes {empty_s * 1e6:.0f} us, expected at most 50 us")
    judge(check, failures)


def test_the_calibrated_bandwidth_is_that_of_the_library(
    check: Check, several: CheckedGroup, sizes: Sizes, ceilings: Ceilings, numbers: dict[str, object]
) -> None:
    """Predictions of this machine would be wrong by as much. Look whether pairs of ranks differ (the routes in the
    record): another job on the links, or GPUs that the named machine connects otherwise.
    """
    limit, size, calibration = 0.10, sizes.message_bytes[-1], check.calibrate()
    ceiling = size / ceilings["sendrecv", size]
    calibrated = neighbours_bandwidth(calibration.machine.topology)
    difference = calibrated / ceiling - 1
    numbers |= {
        "calibrated_bytes_per_s": calibrated, "ceiling_bytes_per_s": ceiling, "difference": difference, "limit": limit,
        "launch_s": float(calibration.machine.comm_library.launch_s),
        "routes": list(map(fit_document, calibration.fits)),
    }  # fmt: skip
    message = f"the calibrated bandwidth is {difference:+.1%} of the library's, expected at most 10 % off"
    judge(check, [] if abs(difference) <= limit else [message])


def neighbours_bandwidth(topology: Topology) -> float:
    """The slowest route from a rank to the next one, in bytes/s: what bounds a ring of messages."""
    n = topology.world_size
    routes = [topology.route(rank, (rank + 1) % n) for rank in range(n)]
    return min(float(topology.links[link].bandwidth_bytes_per_s) for route in routes for link in route.links)


def test_shards_that_rings_do_not_divide_are_as_fast(
    check: Check, several: CheckedGroup, sizes: Sizes, numbers: dict[str, object]
) -> None:
    """Messages start at addresses that the library copies slowly, so multi-ring is measured too slow. A fault of
    tasp-lab; send the record.
    """
    limit, rows, speeds = 0.05, list[dict[str, object]](), []
    for size in sizes.aligned_bytes:
        (schedule,) = build_schedules("multi-ring", check.machine.topology, size)
        time_s = measured_s(several.ranks, schedule, sizes.repeats)
        speeds.append(size / time_s)
        rows.append({"shard_bytes": size, "time_s": time_s, "shard_bytes_per_s": speeds[-1]})
    difference = speeds[1] / speeds[0] - 1
    numbers |= {"multi_ring": rows, "difference": difference, "limit": limit}
    message = f"the shard that the rings do not divide is {-difference:.1%} slower per byte, expected at most 5 %"
    judge(check, [] if difference >= -limit else [message])


PAIRS = (("ring-attention", "ring"), ("tasp", "multi-ring"))
"""Layers, and the AllGather that sends the same keys and values along the same paths if the mask is full."""

SLOWER_TOGETHER = -0.1
"""The least share of communication that may be hidden: less means slower together than one after the other."""


def test_kernels_hide_messages_of_normal_and_of_high_priority(
    check: Check, several: CheckedGroup, sizes: Sizes, numbers: dict[str, object]
) -> None:
    """Kernels and messages slow each other down more than they gain. Try CUDA_DEVICE_MAX_CONNECTIONS=1, compare the
    variables in step 0 with those in the guide to GPU nodes, and send both records.
    """
    topology, failures = check.machine.topology, []
    rows = numbers["overlap"] = list[dict[str, object]]()
    for sequence in sizes.overlap_sequences:
        layer = replace(sizes.timed_layer, sequence=sequence)
        for name, gather in PAIRS:
            (attention,) = build_schedules(name, topology, layer)
            shard_bytes = layer.kv_bytes_per_position * sequence // topology.world_size
            (messages,) = build_schedules(gather, topology, shard_bytes)
            check.progress(f"overlap of {name} at {sequence} positions")
            for priority, ranks in hardware.ranks_by_priority(several):
                alone_s = measured_s(ranks, messages, sizes.repeats)
                together_s, kernels_s = (
                    measured_s(ranks, attention, sizes.repeats),
                    slowest_kernels_s(ranks, attention, sizes.repeats),
                )
                shorter = min(alone_s, kernels_s)  # hidden: 1 if it costs nothing, 0 if one runs after the other
                hidden = (kernels_s + alone_s - together_s) / shorter if shorter else 0.0
                rows.append({
                    "schedule": name, "sequence": sequence, "priority": priority, "compute_s": kernels_s,
                    "communication_s": alone_s, "together_s": together_s, "hidden_share": hidden,
                })  # fmt: skip
                if hidden < SLOWER_TOGETHER:
                    failures.append(
                        f"{name} at {sequence} positions, priority {priority}: hides {hidden:.2f} of the shorter part, "
                        "so both together are slower than one after the other"
                    )
    judge(check, failures)


def slowest_kernels_s(ranks: Ranks, schedule: Schedule, repeats: int) -> float:
    """The time of the kernel calls of the slowest rank, in seconds, without messages."""
    times = ranks.perform(MeasureCompute(schedule, repeats), SILENCE_S)
    return max(each.time_s for each in times if isinstance(each, KernelTimes))


TRAINING_LIMITS = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 5e-2)}
"""Largest relative differences of a loss, and of what the weights before attention have learnt in all steps.

Sums are taken in another order, and in bf16 attention and its gradients are rounded.
"""

SETTLED_STEP = 3
"""From this step on the reserved memory must not grow."""


def test_training_on_all_ranks_has_the_losses_of_one_process(
    check: Check, group: CheckedGroup, sizes: Sizes, numbers: dict[str, object]
) -> None:
    """Gradients are wrong (losses differ), or buffers are not reused (memory grows). A fault of tasp-lab; send the
    record.
    """
    rows, failures = list[dict[str, object]](), list[str]()
    for dtype, (loss_limit, learnt_limit) in TRAINING_LIMITS.items():
        ways = (training.train_together, training.train_alone)
        together, alone = (train(sizes.recipe, dtype, group.device) for train in ways)
        loss, learnt = training.difference_of_losses(together, alone), training.difference_learnt(together, alone)
        grown = training.grows_after(together.reserved_bytes, SETTLED_STEP)
        rows.append({
            "dtype": dtype, "first_loss": together.losses[0], "last_loss": together.losses[-1], "loss_difference": loss,
            "loss_limit": loss_limit, "learnt_difference": learnt, "learnt_limit": learnt_limit,
            "reserved_bytes": together.reserved_bytes[-1] if group.on_gpu else "needs a GPU",
        })  # fmt: skip
        limits: Any = (("losses", loss, loss_limit), ("gradients through attention", learnt, learnt_limit))
        failures += [f"{dtype}: {what} differ by {found:.2g}, expected at most {limit:g}"
                     for what, found, limit in limits if not found <= limit]  # fmt: skip
        failures += [f"{dtype}: reserved memory grew by {grown} bytes after step {SETTLED_STEP}"] if grown else []
    numbers |= {"training": rows, "losses": list(together.losses)}
    assert not failures, "; ".join(failures)


def test_attention_while_a_collective_of_another_group_runs(several: CheckedGroup, numbers: dict[str, object]) -> None:
    """If nothing ends here, programs with FSDP or tensor parallelism beside attention will hang, too: see the guide to
    GPU nodes on several communicators. A wrong result is a fault of tasp-lab; send the record.
    """
    numbers["rounds"] = COLLECTIVES_BESIDE
    assert beside.is_right_beside_a_collective(several.device, COLLECTIVES_BESIDE), "results differ from those alone"


COLLECTIVES_BESIDE = 50


def test_a_rank_that_fails_is_named_and_no_process_is_left(
    several: CheckedGroup, sizes: Sizes, numbers: dict[str, object]
) -> None:
    """A failing job would hang here. The record has the output of the group; look for processes on the GPUs before you
    start the next job.
    """
    if several.rank:
        return  # rank 0 starts groups on this host of which a rank raises an error, and of which one is killed
    rows, failures = list[dict[str, object]](), list[str]()
    for how in ("raise", "kill"):
        loss = lose_rank(how, several.backend, max(2, several.local_world_size), sizes.loss_limit_s)
        rows.append({
            "how": how, "ended_s": loss.ended_s, "limit_s": sizes.loss_limit_s, "exit_code": loss.end.exit_code,
            "named": loss.named, "orphans": len(loss.end.orphans),
        })  # fmt: skip
        if problem := loss.problem(sizes.loss_limit_s):
            failures.append(problem)
            rows[-1]["output"] = loss.end.output[-2000:]
    numbers["losses"] = rows
    assert not failures, "; ".join(failures)
