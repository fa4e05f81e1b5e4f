"""Steps 0 and 1: what the machine is, and how fast its communication library is by itself."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.gpu_check.inventory import (
    check_library,
    check_same_gpus,
    inventory_of_rank,
    topology_text,
)
from runtime.gpu_check.library import (
    OPERATIONS,
    bus_bandwidth,
    installed_programs,
    measure_operation,
    run_program,
)
from tasp_lab.core.errors import TaspLabError
from tasp_lab.measure.readers.nccl_tests import parse_nccl_tests
from tasp_lab.prediction.provenance import host_environment
from tasp_lab.topology.graph import Topology
from tasp_lab.validation.gpu_check.steps import Context, Outcome


def take_inventory(context: Context) -> Outcome:
    """Step 0. The inventories of all ranks are compared before the library is started."""
    group = context.group
    found = group.gather(inventory_of_rank(group.rank, group.device, group.local_world_size))
    numbers: dict[str, object] = {
        "device": group.device.type,
        "environment": {**host_environment(), **group.ranks.environment},
        "ranks": [each.to_dict() for each in found],
        "gpu_order": _order([each.pci_bus for each in found if each.host == found[0].host]),
    }
    if group.rank == 0 and group.on_gpu:
        numbers["topology"] = topology_text() or "neither nvidia-smi nor rocm-smi is installed"
    try:
        check_same_gpus(found)
    except TaspLabError as error:
        return Outcome(numbers, failure=str(error))
    check_library(group.device, group.world_size)
    return Outcome(numbers)


def _order(buses: list[str]) -> str:
    """Whether ranks of a host are in the order of the PCI bus, as imported topologies are."""
    if not all(buses):
        return "unknown"
    if buses == sorted(buses):
        return "as the PCI bus"
    return "not as the PCI bus: set CUDA_DEVICE_ORDER=PCI_BUS_ID for imported machines"


def measure_ceiling(context: Context) -> Outcome:
    """Step 1: the library's own collectives by our clock and, if installed on one host, by nccl-tests."""
    group, n = context.group, context.group.world_size
    rows: list[dict[str, object]] = []
    for operation in OPERATIONS:
        for size in context.sizes.message_bytes:
            size_bytes = size - size % n
            time_s = measure_operation(group, operation, size_bytes, context.sizes.calls)
            context.ceilings[operation, size] = time_s
            rows.append(_row(operation, size_bytes, time_s, n, "own calls"))
    numbers: dict[str, object] = {"library": rows}
    if group.on_gpu and group.local_world_size == n:
        notes: list[str] = []
        if group.rank == 0:
            measured = list(_by_programs(context, notes))
            rows += [_row(*each, n, "nccl-tests") for each in measured]
            faster = _faster(context, measured)
            numbers |= {"nccl_tests": notes or "used"}
        else:
            faster = {}
        context.ceilings |= group.gather(faster)[0]
    return Outcome(numbers)


def _row(operation: str, size_bytes: int, time_s: float, world_size: int, by: str) -> dict[str, object]:
    busbw = bus_bandwidth(operation, size_bytes, time_s, world_size)
    return {"operation": operation, "bytes": size_bytes, "time_s": time_s, "busbw_bytes_per_s": busbw, "by": by}


def _by_programs(context: Context, notes: list[str]) -> Iterator[tuple[str, int, float]]:
    """Operation, size and time of every row that the installed programs print; why others are missing in `notes`."""
    programs = installed_programs()
    if not programs:
        notes.append("not on the path: the ceiling is that of our own calls")
    for operation, path in programs.items():
        try:
            text = run_program(path, context.group.world_size, context.sizes.message_bytes)
            tables = parse_nccl_tests(text, f"{operation}_perf")
        except TaspLabError as error:
            notes.append(str(error))
            continue
        yield from ((operation, row.size_bytes, row.time_s) for table in tables for row in table.rows)


def _faster(context: Context, measured: list[tuple[str, int, float]]) -> dict[tuple[str, int], float]:
    """Times of nccl-tests at our sizes, where they are shorter than ours: a ceiling is the fastest that was seen."""
    found: dict[tuple[str, int], float] = {}
    for operation, size_bytes, time_s in measured:
        for size in context.sizes.message_bytes:
            same = abs(size - size_bytes) < context.group.world_size * 16
            if same and time_s < context.ceilings[operation, size]:
                found[operation, size] = time_s
    return found


def neighbours_bandwidth(topology: Topology) -> float:
    """The slowest route from a rank to the next one, in bytes/s: what bounds a ring of messages."""
    n = topology.world_size
    routes = [topology.route(rank, (rank + 1) % n) for rank in range(n)]
    return min(float(topology.links[link].bandwidth_bytes_per_s) for route in routes for link in route.links)
