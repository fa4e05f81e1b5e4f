"""All ranks in this process on one device, over a loopback with NCCL's rules; and one rank without the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tasp_lab.core.errors import RunError, TaspLabError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.build import build_schedules
from tasp_lab.schedules.registry import COLLECTIVES, LINEAR, reason_of
from tasp_lab.topology.builders import full_mesh
from tasp_lab.validation.gpu_check import Check
from tasp_lab.workload.layer import Work, Workload
from tests.gpu import shared_gpu
from tests.gpu.ghosts import GhostRun, with_peers
from tests.gpu.training import grows_after
from tests.support.device_faults import FAULTS, NO_PLACE, RANK, report
from tests.support.one_device import run_on_one_device

pytestmark = pytest.mark.gpu

BOTH = AttentionOptions("both")
GHOST_SCHEDULES = ("ring-attention", "zigzag-ring-attention", "tasp")


def layer_of(check: Check, per_rank: int, **changes: Any) -> Workload:
    """A layer with heads for all ranks; on a GPU of sizes that its kernels have."""
    n, head_dim, dtype = check.machine.topology.world_size, *((64, "bf16") if check.on_gpu else (8, "fp32"))
    layer = Workload(n * per_rank + 4, heads=2 * n, kv_heads=n, head_dim=head_dim, dtype=dtype, mask="full")
    return replace(layer, **changes)


def test_every_schedule_pass_and_mask_is_exact_in_random_orders(check: Check, numbers: dict[str, object]) -> None:
    """A message is matched wrongly, or memory is used too early. A fault of tasp-lab; send the record."""
    labels, runs, unapplied = set[str](), 0, list[dict[str, object]]()
    for label, schedule in all_schedules(check, unapplied):
        labels.add(label)
        for seed in range(check.seed, check.seed + (1 if check.quick else 2)):
            try:
                run_on_one_device(schedule, check.device, seed)
            except RunError as error:
                raise RunError(f"{label}, seed {seed}: {error}") from None
            runs += 1
        numbers |= {"schedules": len(labels), "runs": runs, "ranks": schedule.world_size}
    numbers["do_not_apply"] = unapplied or "none"


def all_schedules(check: Check, unapplied: list[dict[str, object]]) -> Iterator[tuple[str, Schedule]]:
    """All schedules by name, pass and mask; those that do not apply are noted."""
    layer = layer_of(check, 256 if check.on_gpu else 9)
    half, linear = layer.sequence // 2, replace(layer, mask="causal", kind="linear", decay="head")
    masks = {
        "full": layer, "causal": replace(layer, mask="causal"),
        "window": replace(layer, mask="causal", window=layer.sequence // 3),
        "documents": replace(layer, mask="causal", documents=(half - 3, layer.sequence - half + 3)),
    }  # fmt: skip
    for name in check.names:
        works: Mapping[str, Work] = {"bytes": 4099} if name in COLLECTIVES else {"causal": linear}
        for mask, work in (works if name in COLLECTIVES or name in LINEAR else masks).items():
            options = BOTH if isinstance(work, Workload) else AttentionOptions()
            try:
                built = build_schedules(name, check.machine.topology, work, options=options)
            except TaspLabError as error:
                unapplied.append({"schedule": name, "mask": mask, "reason": reason_of(error, name)})
                continue
            check.progress(f"{name}, {mask}")
            for number, schedule in enumerate(built):
                yield f"{name}, {mask}, {('forward', 'backward')[number]}", schedule


def test_planted_faults_of_messages_waits_and_memory_are_found(check: Check, numbers: dict[str, object]) -> None:
    """What passed above proves little. A fault of tasp-lab; send the record."""
    layer, topology = Workload(72, heads=2, head_dim=8, dtype="fp32", mask="full"), full_mesh(6)
    rows = numbers["faults"] = list[dict[str, object]]()
    for fault in FAULTS:
        for name, options in (("tasp", AttentionOptions()), ("ring-attention", AttentionOptions(buffers=2))):
            (schedule,) = build_schedules(name, topology, layer, options=options)
            told = report(fault, schedule, check.device)
            if told == NO_PLACE or (fault == "swapped order" and name != "tasp"):
                continue
            rows.append({"fault": fault, "schedule": name, "reported": told or "not found"})
            assert told is not None, f"{fault} in {name}: not found"
            assert "stay in use" not in told, f"{fault} in {name}: {told}"
    missing = set(FAULTS) - {row["fault"] for row in rows}
    assert not missing, f"no schedule has a place for {missing}"


def ghost_layers(check: Check, per_rank: int) -> Iterator[tuple[str, str, Schedule]]:
    layer = layer_of(check, *((per_rank,) if check.on_gpu else (16,)), mask="causal")
    layer = replace(layer, head_dim=128) if check.on_gpu else layer
    for name in GHOST_SCHEDULES:
        passes = build_schedules(name, check.machine.topology, layer, options=BOTH)
        yield from zip((name,) * 2, ("forward", "backward"), passes, strict=True)


def test_a_pass_without_network_runs_with_every_kind_of_peer(
    check: Check, gpu: torch.device, numbers: dict[str, object]
) -> None:
    """Peers that send nothing, whose messages are copies, or NCCL's from this rank to itself. Kernels do not run as
    fast as alone.
    """
    rows = numbers["ghosts"] = list[dict[str, object]]()
    with with_peers() as kinds:
        for name, which, schedule in ghost_layers(check, 2048 if check.quick else 8192):
            times_s = {f"{peers}_s": GhostRun(schedule, RANK, gpu, peers).time_s() for peers in kinds}
            rows.append({"schedule": name, "pass": which, **times_s})


def test_a_pass_queues_as_many_operations_each_time(check: Check, numbers: dict[str, object]) -> None:
    """Memory is not reused: a first run makes what later ones keep. A fault of tasp-lab; send the record."""
    rows = numbers["launches"] = list[dict[str, object]]()
    for name, which, schedule in ghost_layers(check, 512):
        run = GhostRun(schedule, RANK, check.device)
        run.run()
        first, second = run.operations(), run.operations()
        calls, total = len(run.trial.executor.part.calls), sum(first.values())
        rows.append({
            "schedule": name, "pass": which, "calls": calls, "operations": total,
            "per_call": round(total / max(1, calls), 2),
        })  # fmt: skip
        told = f"{name}, {which}: {total} operations, then {sum(second.values())}, expected as many"
        assert first == second, told
        assert total >= calls > 0


def test_reserved_memory_does_not_grow_from_layer_to_layer(
    check: Check, gpu: torch.device, numbers: dict[str, object]
) -> None:
    """A fault of tasp-lab; send the record."""
    layer = layer_of(check, 1024, mask="causal")
    passes = build_schedules("tasp", check.machine.topology, layer, options=BOTH)
    reserved = numbers["reserved_bytes"] = list[int]()
    for _ in range(8 if check.quick else 20):
        for schedule in passes:
            run_on_one_device(schedule, gpu)
        reserved.append(torch.cuda.memory_reserved(gpu))
    grown = grows_after(tuple(reserved), 3)
    assert not grown, f"grew by {grown} bytes after round 3"


def test_replays_of_a_captured_pass_have_the_same_bits(check: Check, gpu: torch.device) -> None:
    """A fault of tasp-lab; send the record."""
    for name, which, schedule in ghost_layers(check, 512):
        equal = GhostRun(schedule, RANK, gpu).replays_equal(50)
        assert equal, f"{name}, {which}: replays differ from the run"


def test_layers_of_two_ranks_on_one_gpu_are_those_of_a_single_process(
    check: Check, gpu: torch.device, numbers: dict[str, object]
) -> None:
    """NCCL or its use differs from what tests on hosts assume. A fault of tasp-lab; send the record."""
    if reason := shared_gpu.reason_against(gpu):
        pytest.skip(reason)
    check.progress("two ranks on this GPU")
    shared = shared_gpu.share("nccl")  # beside this process, which leaves them the memory that it does not use
    numbers["passed"] = list(shared.passed)
    if shared.refusal:
        pytest.skip(shared.refusal)
    assert not shared.failure, shared.failure
