"""The steps of ``tasp-lab gpu-check``, in their order; `tasp_lab.validation.gpu_check` runs them on every rank.

Most steps run what other commands and tests run, too: checks of `runtime.checks`, calibration, the jobs of `validate`.
Limits of speed apply on GPUs only; elsewhere those steps are skipped after they have run.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from runtime.calibration import Calibration, calibrate, calibrate_shared_medium
from runtime.checks import hardware, training
from runtime.checks.delays import DelayedRuns
from runtime.checks.kernels import check_kernels, check_linear_kernels
from runtime.checks.lost_ranks import lose_rank
from runtime.checks.one_device import Device
from runtime.checks.watch import CheckedGroup
from runtime.executor.transports import TRANSPORTS, make_transport
from runtime.linux import host_environment
from runtime.protocol.jobs import KernelTimes, MeasureCompute, Ranks, RunSchedule
from runtime.protocol.records import duration_s
from tasp_lab.core.errors import RunError, TaspLabError
from tasp_lab.core.progress import ProgressCallback, no_progress
from tasp_lab.machines.machine import INSTANT, Machine
from tasp_lab.measure.readers.nccl_tests import parse_nccl_tests
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import COLLECTIVES, layer_names_on
from tasp_lab.topology.graph import Topology
from tasp_lab.validation.fabrics import fit_document
from tasp_lab.validation.validate import Trials
from tasp_lab.workload.layer import Work, Workload

KIB, MIB = 2**10, 2**20
BOTH = AttentionOptions("both")
NEEDS_GPU = "needs a GPU"
NOT_JUDGED = f"{NEEDS_GPU}: the numbers are those of this host, and no limit applies to them"
SILENCE_S = 120.0


class Sizes(NamedTuple):
    """Sizes and counts of all steps.

    Sizes of the library's own collectives ascend by powers of 8, the steps of nccl-tests; the largest one is what
    others are held against. Of `aligned_bytes`, the rings of multi-ring divide the first without rest, not the second.
    """

    message_bytes: tuple[int, ...] = (MIB, 64 * MIB, 512 * MIB)
    peer_bytes: tuple[int, ...] = (MIB, 16 * MIB, 256 * MIB)
    calls: int = 10
    kernel_rows: int = 300
    head_dims: tuple[int, ...] = (64, 128)
    delayed_bytes: int = 64 * KIB
    seeds: int = 1
    delayed_masks: tuple[str, ...] = ("causal",)
    aligned_bytes: tuple[int, int] = (56 * MIB, 64 * MIB)
    timed_layer: Workload = Workload(16384, heads=32, kv_heads=8, head_dim=128, dtype="bf16", mask="full")
    overlap_sequences: tuple[int, ...] = (16384,)
    table_sequences: tuple[int, ...] = (16384,)
    table_bytes: tuple[int, ...] = (64 * MIB,)
    recipe: training.Recipe = training.Recipe(4096, heads=16, head_dim=64)
    repeats: int = 5
    loss_limit_s: float = 10.0
    step_limit_s: float = 300.0


QUICK = Sizes()
"""Meant for 5 minutes on 8 GPUs; not measured."""

FULL = Sizes(
    message_bytes=(MIB, 8 * MIB, 64 * MIB, 512 * MIB), calls=20,
    peer_bytes=tuple(MIB << power for power in range(9)), kernel_rows=1000, head_dims=(64, 96, 128, 256),
    delayed_bytes=MIB, seeds=20, delayed_masks=("causal", "full"), overlap_sequences=(8192, 16384, 65536),
    table_sequences=(16384, 65536), table_bytes=(MIB, 8 * MIB, 64 * MIB, 448 * MIB),
    recipe=training.Recipe(16384, heads=16, head_dim=64), repeats=10, step_limit_s=1800.0,
)  # fmt: skip
"""Meant for 45 minutes on 8 GPUs; not measured."""

HOST = Sizes(
    message_bytes=(64 * KIB, MIB), calls=2, peer_bytes=(64 * KIB,),
    kernel_rows=48, head_dims=(32,), delayed_bytes=2 * KIB,
    aligned_bytes=(56 * KIB, 64 * KIB), timed_layer=Workload(256, heads=4, head_dim=16, dtype="fp32", mask="full"),
    overlap_sequences=(256,), table_sequences=(256,), table_bytes=(64 * KIB,),
    recipe=training.Recipe(64, heads=2, head_dim=8), repeats=2, loss_limit_s=60.0, step_limit_s=240.0,
)  # fmt: skip
"""On processors with gloo: small, since nothing is held against a limit of speed."""


@dataclass
class Context:
    """What steps work with, and what earlier steps have measured.

    `ceilings` are the library's own times in seconds by operation and size, `calibration` is that of this group.
    """

    group: CheckedGroup
    machine: Machine
    sizes: Sizes
    progress: ProgressCallback = no_progress
    ceilings: dict[tuple[str, int], float] = field(default_factory=dict)
    calibration: Calibration | None = None

    @property
    def device(self) -> Device:
        return self.group.device


_Run = TypeVar("_Run", bound=Callable[[Any], Any])

Numbers = Mapping[str, object]
"""What a step has measured, as plain JSON: values, lists of values, objects, or lists of objects (a table)."""


@dataclass(frozen=True)
class Outcome:
    """What a step has measured on this rank; it failed if there is a `failure`. Numbers are taken from rank 0."""

    numbers: Numbers
    failure: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Step:
    """One step; `run` is called on all ranks at once. An error that it raises on one rank ends the whole check.

    A step with fewer than `min_ranks` ranks is skipped, as is one `on_gpu` where there is none.
    """

    number: int
    name: str
    proves: str
    if_it_fails: str
    run: Callable[[Any], Outcome]
    min_ranks: int = 1
    on_gpu: bool = False


def add_to(steps: list[Step]) -> Callable[..., Callable[[_Run], _Run]]:
    """The decorator that adds a function to a list of steps; its arguments are the fields of `Step`."""

    def described(name: str, proves: str, if_it_fails: str, **limits: Any) -> Callable[[_Run], _Run]:
        def add(run: _Run) -> _Run:
            steps.append(Step(len(steps), name, proves, if_it_fails, run, **limits))
            return run

        return add

    return described


STEPS: list[Step] = []
"""All steps, in the order in which they are defined below and run."""

_step = add_to(STEPS)


@_step(
    "inventory",
    "the ranks run on the machine that is named: one GPU each, all of one kind, with peer access",
    "The job does not have the GPUs that you think it has, or NCCL cannot use them. Compare --nproc-per-node with "
    "nvidia-smi or rocm-smi, look at CUDA_VISIBLE_DEVICES, and run again with NCCL_DEBUG=INFO.",
)
def take_inventory(context: Context) -> Outcome:
    """Compare the inventories of all ranks before the library is started."""
    group = context.group
    ranks = group.gather(hardware.inventory_of_rank(group.rank, group.device, group.local_world_size))
    buses = [rank.pci_bus for rank in ranks if rank.host == ranks[0].host]
    order = "as the PCI bus" if buses == sorted(buses) else (
        "not as the PCI bus: set CUDA_DEVICE_ORDER=PCI_BUS_ID for imported machines"
    )  # fmt: skip
    numbers: dict[str, object] = {
        "device": group.device.type,
        "environment": {**host_environment(), **group.ranks.environment},
        "ranks": list(map(asdict, ranks)),
        "gpu_order": order if all(buses) else "unknown",
    }
    if group.rank == 0 and group.on_gpu:
        numbers["topology"] = hardware.topology_text() or "neither nvidia-smi, rocm-smi nor amd-smi is installed"
    try:
        hardware.check_same_gpus(ranks)
    except TaspLabError as error:
        return Outcome(numbers, failure=str(error))
    hardware.check_library(group.device, group.world_size)
    return Outcome(numbers)


@_step(
    "library ceiling",
    "how fast the communication library is without us; later steps are held against it",
    "NCCL or RCCL by itself fails or delivers wrong bytes. Run nccl-tests or rccl-tests; nothing of tasp-lab is "
    "involved yet.",
    min_ranks=2,
)
def measure_ceiling(context: Context) -> Outcome:
    """Time the library's own collectives by our clock and, on one host, by nccl-tests; the faster is the ceiling."""
    group, n = context.group, context.group.world_size
    measured: list[tuple[str, int, float, str]] = []
    for operation in hardware.OPERATIONS:
        for size in context.sizes.message_bytes:
            time_s = hardware.measure_operation(group, operation, size - size % n, context.sizes.calls)
            context.ceilings[operation, size] = time_s
            measured.append((operation, size - size % n, time_s, "own calls"))
    numbers: dict[str, object] = {}
    if group.on_gpu and group.local_world_size == n:
        faster: dict[tuple[str, int], float] = {}
        if group.rank == 0:  # the programs use the GPUs of all ranks, which wait for rank 0 without a kernel
            notes: list[str] = []
            for operation, size_bytes, time_s in _by_nccl_tests(context, notes):
                measured.append((operation, size_bytes, time_s, "nccl-tests"))
                for size in context.sizes.message_bytes:  # nccl-tests rounds sizes to elements of all ranks
                    if abs(size - size_bytes) < n * 16 and time_s < context.ceilings[operation, size]:
                        faster[operation, size] = time_s
            numbers["nccl_tests"] = notes or "used"
        for operation, size, time_s in group.gather([(*key, time_s) for key, time_s in faster.items()])[0]:
            context.ceilings[operation, size] = time_s
    rows = [
        {"operation": operation, "bytes": size, "time_s": time_s,
         "busbw_bytes_per_s": hardware.bus_bandwidth(operation, size, time_s, n), "by": by}
        for operation, size, time_s, by in measured
    ]  # fmt: skip
    by_peers: list[dict[str, object]] = []  # whether a ring, which has one peer, has all of the bandwidth
    for peers in (each for each in PEERS if each < n):
        for size in context.sizes.peer_bytes:
            time_s = hardware.measure_peers(group, peers, size, context.sizes.calls)
            by_peers.append(
                {"peers": peers, "bytes": size, "time_s": time_s, "sent_bytes_per_s": peers * size / time_s}
            )
    return Outcome({"library": rows, "peers": by_peers, **numbers})


PEERS = (1, 2, 4, 7)
"""NCCL serves them with different numbers of channels each; 7 are all peers of a rank of 8."""


def _by_nccl_tests(context: Context, notes: list[str]) -> Iterator[tuple[str, int, float]]:
    """Operation, size and time of every row that the installed programs print; why others are missing in `notes`."""
    programs = {operation: shutil.which(f"{operation}_perf") for operation in hardware.OPERATIONS}
    if not any(programs.values()):
        notes.append("not on the path: the ceiling is that of our own calls")
    for operation, path in programs.items():
        if path is None:
            continue
        try:
            text = hardware.run_program(path, context.group.world_size, context.sizes.message_bytes)
            tables = parse_nccl_tests(text, f"{operation}_perf")
        except TaspLabError as error:
            notes.append(str(error))
            continue
        yield from ((operation, row.size_bytes, row.time_s) for table in tables for row in table.rows)


@_step(
    "kernels",
    "every attention kernel, dtype, mask and pass, and those of linear attention, agree with float64",
    "A kernel of this torch or flash-attn differs from the mathematics, or returns log-sum-exp in another form. "
    "Do not use results of this machine; send the record, with the versions in step 0.",
)
def check_all_kernels(context: Any) -> Outcome:
    """Check the kernels on the device of every rank, or on the one of `tasp_lab.validation.one_gpu`."""
    device, sizes = context.device, context.sizes
    kernels = [checked._asdict() for checked in check_kernels(device, sizes.kernel_rows, sizes.head_dims)]
    return Outcome({"kernels": kernels, "linear_attention": check_linear_kernels(device, sizes.kernel_rows)})


@_step(
    "schedules",
    "every schedule over every transport delivers every bit, also when messages and kernels are delayed at random",
    "Without delays: messages are matched wrongly. Only with delays: a dependency between streams is missing. "
    "Either is a fault of tasp-lab; send the record.",
)
def check_schedules(context: Context) -> Outcome:
    """Run every schedule that applies to this machine, over every transport, with and without delays."""
    group = context.group
    unapplied: list[dict[str, object]] = []
    runs, schedules = 0, 0
    # symmetric-memory has never run on GPUs: what fails in it would end the check for all other transports
    left_out = {"symmetric-memory", "p2p"} if group.on_gpu else {"symmetric-memory"}
    transports = [name for name in TRANSPORTS if name not in left_out]
    for name, schedule in all_schedules(context, unapplied):
        context.progress(f"{name}: {schedule.transfers} transfers over {' and '.join(transports)}")
        schedules += 1
        for transport in transports:
            made = DelayedRuns(group, schedule, make_transport(transport, SILENCE_S, device=group.device))
            for seed in (None, *range(context.sizes.seeds)):
                try:
                    made.run(seed)
                except RunError as error:
                    how = "without delays" if seed is None else f"with random delays, seed {seed}"
                    raise RunError(f"{name} over {transport}, {how}: {error}") from None
                runs += 1
    return Outcome(
        {"schedules": schedules, "transports": transports, "runs": runs, "do_not_apply": unapplied or "none"}
    )  # fmt: skip


def all_schedules(context: Context, unapplied: list[dict[str, object]]) -> Iterator[tuple[str, Schedule]]:
    """All schedules by name, both passes of layers; the reasons of those that do not apply are added to a list.

    The shards of keys and values of layers have about the size of the collectives' blocks, and there are heads for all
    ranks.
    """
    n, sizes = context.group.world_size, context.sizes
    head_dim = 64 if context.group.on_gpu else 8
    per_rank = max(16, sizes.delayed_bytes // (4 * n * head_dim))
    layer = Workload(n * per_rank, heads=2 * n, kv_heads=n, head_dim=head_dim, dtype="bf16", mask="full")
    layers = [replace(layer, mask=mask) for mask in sizes.delayed_masks]
    layers.append(replace(layer, mask="causal", kind="linear", decay="head"))
    named: list[tuple[str, Work]] = [(name, sizes.delayed_bytes) for name in COLLECTIVES]
    named += [(name, layer) for layer in layers for name in layer_names_on(n, layer)]
    for name, work in named:
        of_layer = isinstance(work, Workload)
        options = BOTH if of_layer else AttentionOptions()
        try:
            built = build_schedules(name, context.machine.topology, work, options=options)
        except TaspLabError as error:
            unapplied.append({"schedule": name, "reason": str(error)})
            continue
        label = f"{name} ({work.mask})" if isinstance(work, Workload) else name
        yield from ((label, schedule) for schedule in built)


@_step(
    "clock",
    "the executor times one message as the library does, and takes next to no time for nothing",
    "Measured times are those of our host code rather than of messages. Other processes on the cores, or a GPU "
    "whose clock is low, show up here, too: run again on an idle node before you send the record.",
    min_ranks=2,
)
def check_clock(context: Context) -> Outcome:
    """Time one message around the ring, and a schedule of nothing."""
    limit, empty_limit_s, size = 0.05, 50e-6, context.sizes.message_bytes[-1]
    (message,) = build_schedules("send-recv", context.machine.topology, size)
    (small,) = build_schedules("send-recv", context.machine.topology, 1)
    empty = replace(small, name="empty", steps=[], final=small.initial)
    executor_s, empty_s = measured_s(context, message), measured_s(context, empty)
    library_s = context.ceilings["sendrecv", size]
    difference = executor_s / library_s - 1
    numbers = {
        "message_bytes": size, "executor_s": executor_s, "library_s": library_s, "difference": difference,
        "limit": limit, "empty_schedule_s": empty_s, "empty_limit_s": empty_limit_s,
    }  # fmt: skip
    failures = []
    if not abs(difference) <= limit:
        failures.append(f"a message takes {difference:+.1%} of the library's time, expected at most 5 % off")
    if not empty_s <= empty_limit_s:
        failures.append(f"an empty schedule takes {empty_s * 1e6:.0f} us, expected at most 50 us")
    return judged(context, numbers, failures)


def measured_s(context: Context, schedule: Schedule, ranks: Ranks | None = None) -> float:
    """The median over repeats of the time of a run, in seconds, after one that is checked."""
    repeats = context.sizes.repeats
    results = (ranks or context.group.ranks).perform(RunSchedule(schedule, "auto", repeats, warm_ups=1), SILENCE_S)
    records = [of_rank for of_rank in results if isinstance(of_rank, list)]
    return statistics.median(duration_s([of_rank[run] for of_rank in records]) for run in range(repeats))


def judged(context: Context, numbers: Numbers, failures: Sequence[str]) -> Outcome:
    """An outcome with limits, which apply on GPUs only; `failures` are those that are exceeded."""
    if not context.group.on_gpu:
        return Outcome(numbers, skipped=NOT_JUDGED)
    return Outcome(numbers, failure="; ".join(failures))


@_step(
    "calibration",
    "the bandwidth that predictions start from is that of the library",
    "Predictions of this machine would be wrong by as much. Look whether pairs of ranks differ (the routes in the "
    "record): another job on the links, or GPUs that the named machine connects otherwise.",
    min_ranks=2,
)
def check_calibration(context: Context) -> Outcome:
    """Compare the calibrated bandwidth between neighbours with the ring of messages of step 1."""
    limit, size = 0.10, context.sizes.message_bytes[-1]
    measure = calibrate if context.group.on_gpu else calibrate_shared_medium
    calibration = context.calibration = measure(context.machine.topology, context.group.ranks, context.progress)
    ceiling = size / context.ceilings["sendrecv", size]
    calibrated = neighbours_bandwidth(calibration.machine.topology)
    difference = calibrated / ceiling - 1
    numbers = {
        "calibrated_bytes_per_s": calibrated, "ceiling_bytes_per_s": ceiling, "difference": difference, "limit": limit,
        "launch_s": float(calibration.machine.comm_library.launch_s),
        "routes": list(map(fit_document, calibration.fits)),
    }  # fmt: skip
    message = f"the calibrated bandwidth is {difference:+.1%} of the library's, expected at most 10 % off"
    return judged(context, numbers, [] if abs(difference) <= limit else [message])


def neighbours_bandwidth(topology: Topology) -> float:
    """The slowest route from a rank to the next one, in bytes/s: what bounds a ring of messages."""
    n = topology.world_size
    routes = [topology.route(rank, (rank + 1) % n) for rank in range(n)]
    return min(float(topology.links[link].bandwidth_bytes_per_s) for route in routes for link in route.links)


@_step(
    "alignment",
    "multi-ring is as fast where its rings do not divide a shard as where they do",
    "Messages start at addresses that the library copies slowly, so multi-ring is measured too slow. A fault of "
    "tasp-lab; send the record.",
    min_ranks=2,
)
def check_alignment(context: Context) -> Outcome:
    """Time shards that the rings of multi-ring divide without rest, and shards that they do not."""
    limit, rows, speeds = 0.05, [], []
    for size in context.sizes.aligned_bytes:
        (schedule,) = build_schedules("multi-ring", context.machine.topology, size)
        time_s = measured_s(context, schedule)
        speeds.append(size / time_s)
        rows.append({"shard_bytes": size, "time_s": time_s, "shard_bytes_per_s": speeds[-1]})
    difference = speeds[1] / speeds[0] - 1
    message = f"the shard that the rings do not divide is {-difference:.1%} slower per byte, expected at most 5 %"
    numbers = {"multi_ring": rows, "difference": difference, "limit": limit}
    return judged(context, numbers, [] if difference >= -limit else [message])


PAIRS = (("ring-attention", "ring"), ("tasp", "multi-ring"))
"""Layers, and the AllGather that sends the same keys and values along the same paths if the mask is full."""

SLOWER_TOGETHER = -0.1
"""The least share of communication that may be hidden: less means slower together than one after the other."""


@_step(
    "overlap",
    "how much of communication kernels hide, with normal and with high priority of messages",
    "Kernels and messages slow each other down more than they gain. Try CUDA_DEVICE_MAX_CONNECTIONS=1, compare the "
    "variables in step 0 with those in the guide to GPU nodes, and send both records.",
    min_ranks=2,
)
def check_overlap(context: Context) -> Outcome:
    """Time kernels alone, messages alone and both together."""
    topology, rows, failures = context.machine.topology, [], []
    for sequence in context.sizes.overlap_sequences:
        layer = replace(context.sizes.timed_layer, sequence=sequence)
        for name, gather in PAIRS:
            (attention,) = build_schedules(name, topology, layer)
            shard_bytes = layer.kv_bytes_per_position * sequence // topology.world_size
            (messages,) = build_schedules(gather, topology, shard_bytes)
            context.progress(f"overlap of {name} at {sequence} positions")
            for priority, ranks in hardware.ranks_by_priority(context.group):
                times_s = measured_s(context, messages, ranks), measured_s(context, attention, ranks)
                overlap = Overlap(priority, kernels_s(context, attention, ranks), *times_s)
                rows.append({
                    "schedule": name, "sequence": sequence, **overlap._asdict(), "hidden_share": overlap.hidden_share,
                })  # fmt: skip
                if overlap.hidden_share < SLOWER_TOGETHER:
                    failures.append(
                        f"{name} at {sequence} positions, priority {priority}: hides {overlap.hidden_share:.2f} of "
                        "the shorter part, so both together are slower than one after the other"
                    )
    return judged(context, {"overlap": rows}, failures)


class Overlap(NamedTuple):
    """Times in seconds, of kernels the slowest rank's; `priority` is that of NCCL's stream, ``host`` without one."""

    priority: str
    compute_s: float
    communication_s: float
    together_s: float

    @property
    def hidden_share(self) -> float:
        """The share of the shorter one that is hidden: 1 if it costs nothing, 0 if they run one after the other.

        >>> Overlap("high", 3.0, 2.0, 4.0).hidden_share
        0.5
        """
        shorter = min(self.compute_s, self.communication_s)
        return (self.compute_s + self.communication_s - self.together_s) / shorter if shorter else 0.0


def kernels_s(context: Context, schedule: Schedule, ranks: Ranks) -> float:
    """The time of the kernel calls of the slowest rank, in seconds, without messages."""
    times = ranks.perform(MeasureCompute(schedule, context.sizes.repeats), SILENCE_S)
    return max(each.time_s for each in times if isinstance(each, KernelTimes))


TRAINING_LIMITS = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 5e-2)}
"""Largest relative differences of a loss, and of what the weights before attention have learnt in all steps.

Sums are taken in another order, and in bf16 attention and its gradients are rounded.
"""

SETTLED_STEP = 3
"""From this step on the reserved memory must not grow."""


@_step(
    "training",
    "20 steps of training on all ranks have the losses of one process, and memory stays flat",
    "Gradients are wrong (losses differ), or buffers are not reused (memory grows). A fault of tasp-lab; send the "
    "record.",
)
def check_training(context: Context) -> Outcome:
    """Train the same model on all ranks and on this rank alone."""
    rows: list[dict[str, object]] = []
    failures: list[str] = []
    recipe, device = context.sizes.recipe, context.group.device
    for dtype, (loss_limit, learnt_limit) in TRAINING_LIMITS.items():
        together, alone = (train(recipe, dtype, device) for train in (training.train_together, training.train_alone))
        loss, learnt = training.difference_of_losses(together, alone), training.difference_learnt(together, alone)
        rows.append({
            "dtype": dtype, "first_loss": together.losses[0], "last_loss": together.losses[-1], "loss_difference": loss,
            "loss_limit": loss_limit, "learnt_difference": learnt, "learnt_limit": learnt_limit,
            "reserved_bytes": together.reserved_bytes[-1] if context.group.on_gpu else NEEDS_GPU,
        })  # fmt: skip
        if not loss <= loss_limit:
            failures.append(f"{dtype}: losses differ by {loss:.2g}, expected at most {loss_limit:g}")
        if not learnt <= learnt_limit:
            failures.append(
                f"{dtype}: gradients through attention differ by {learnt:.2g}, expected at most {learnt_limit:g}"
            )
        if grown := training.grows_after(together.reserved_bytes, SETTLED_STEP):
            failures.append(f"{dtype}: reserved memory grew by {grown} bytes after step {SETTLED_STEP}")
    return Outcome({"training": rows, "losses": list(together.losses)}, failure="; ".join(failures))


@_step(
    "lost ranks",
    "a rank that raises and one that is killed are named within seconds, and no process is left",
    "A failing job would hang here. The record has the output of the group; look for processes on the GPUs "
    "before you start the next job.",
    min_ranks=2,
)
def check_losses(context: Context) -> Outcome:
    """Let rank 0 start groups on this host of which a rank raises an error, and of which one is killed."""
    group, limit_s = context.group, context.sizes.loss_limit_s
    if group.rank:
        return Outcome({})
    rows: list[dict[str, object]] = []
    failures = []
    for how in ("raise", "kill"):
        loss = lose_rank(how, group.backend, max(2, group.local_world_size), limit_s)
        rows.append({
            "how": how, "ended_s": loss.ended_s, "limit_s": limit_s, "exit_code": loss.end.exit_code,
            "named": loss.named, "orphans": len(loss.end.orphans),
        })  # fmt: skip
        if problem := loss.problem(limit_s):
            failures.append(problem)
            rows[-1]["output"] = loss.end.output[-2000:]
    return Outcome({"losses": rows}, failure="; ".join(failures))


GATHERS = ("ring", "multi-ring", "direct")
LAYERS = ("ring-attention", "zigzag-ring-attention", "tasp")


@_step(
    "table",
    "predictions beside measured times, of ring and multi-ring and of attention schedules",
    "A schedule fails outside of the checks before; the message names it. Large errors are no failure: they are "
    "what the record is for.",
    min_ranks=2,
)
def compare_schedules(context: Context) -> Outcome:
    """Predict from the calibration of step 5 and measure; no limit applies."""
    questions: list[tuple[Work, Sequence[str], AttentionOptions]]
    questions = [(size, GATHERS, AttentionOptions()) for size in context.sizes.table_bytes]
    for sequence in context.sizes.table_sequences:
        layer = replace(context.sizes.timed_layer, sequence=sequence)
        questions.append((layer, [name for name in LAYERS if name != "zigzag-ring-attention"], BOTH))
        questions.append((replace(layer, mask="causal"), LAYERS, BOTH))
    rows = [row for work, names, options in questions for row in _rows(context, work, names, options)]
    return Outcome({"predicted_and_measured": rows})


def _rows(context: Context, work: Work, names: Sequence[str], options: AttentionOptions) -> Iterator[dict[str, object]]:
    assert context.calibration is not None, "an earlier step calibrates"
    topology, calibrated, group = context.machine.topology, context.calibration.machine, context.group
    nominal = Machine(topology if group.on_gpu else calibrated.topology)
    trials = Trials(
        group.ranks, work, options, INSTANT, isinstance(work, Workload), calibrated, nominal, context.sizes.repeats,
        "auto", context.progress,
    )  # fmt: skip
    schedules = [each for name in names for each in build_schedules(name, topology, work, options=options)]
    for run in trials.run_all(schedules):
        yield {
            "schedule": run.prediction.schedule,
            "work": f"{work} bytes" if isinstance(work, int) else f"{work.sequence} positions, {work.mask}",
            "pass": run.to_dict().get("pass", ""),
            "predicted_s": float(run.prediction.time_s),
            "measured_s": run.measured_s,
            "spread_s": run.measured_spread_s,
            "relative_error": run.relative_error,
        }
