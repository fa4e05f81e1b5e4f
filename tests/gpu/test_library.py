"""What ranks run on, and the communication library without us."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from runtime.ranks.watch import CheckedGroup
from tasp_lab.core.errors import TaspLabError
from tasp_lab.measure.readers.nccl_tests import parse_nccl_tests
from tests.gpu import hardware
from tests.gpu.sizes import Sizes

pytestmark = pytest.mark.gpu

PEERS = (1, 2, 4, 7)
"""NCCL serves them with different numbers of channels each; 7 are all peers of a rank of 8."""


def test_ranks_have_a_gpu_each_of_one_kind_with_peer_access(group: CheckedGroup, numbers: dict[str, object]) -> None:
    """The job does not have the GPUs that you think it has, or NCCL cannot use them. Compare --nproc-per-node with
    nvidia-smi or rocm-smi, look at CUDA_VISIBLE_DEVICES, and run again with NCCL_DEBUG=INFO.
    """
    ranks = group.gather(hardware.inventory_of_rank(group.rank, group.device, group.local_world_size))
    buses = [rank.pci_bus for rank in ranks if rank.host == ranks[0].host]
    order = "as the PCI bus" if buses == sorted(buses) else (
        "not as the PCI bus: set CUDA_DEVICE_ORDER=PCI_BUS_ID for imported machines"
    )  # fmt: skip
    numbers |= {"ranks": list(map(asdict, ranks)), "gpu_order": order if all(buses) else "unknown"}
    if group.rank == 0 and group.on_gpu:
        numbers["topology"] = hardware.topology_text() or "neither nvidia-smi, rocm-smi nor amd-smi is installed"
    hardware.check_same_gpus(ranks)
    hardware.check_library(group.device, group.world_size)


def test_the_library_delivers_every_byte(
    several: CheckedGroup, sizes: Sizes, numbers: dict[str, object], ceilings: dict[tuple[str, int], float]
) -> None:
    """NCCL or RCCL by itself fails or delivers wrong bytes. Run nccl-tests or rccl-tests; nothing of tasp-lab is
    involved yet.
    """
    n = several.world_size
    measured: list[tuple[str, int, float, str]] = []
    for operation in hardware.OPERATIONS:
        for size in sizes.message_bytes:
            time_s = hardware.measure_operation(several, operation, size - size % n, sizes.calls)
            ceilings[operation, size] = time_s
            measured.append((operation, size - size % n, time_s, "own calls"))
    if several.on_gpu and several.local_world_size == n:
        faster: dict[tuple[str, int], float] = {}
        if several.rank == 0:  # the programs use the GPUs of all ranks, which wait for rank 0 without a kernel
            notes: list[str] = []
            for operation, size_bytes, time_s in by_nccl_tests(n, sizes, notes):
                measured.append((operation, size_bytes, time_s, "nccl-tests"))
                for size in sizes.message_bytes:  # nccl-tests rounds sizes to elements of all ranks
                    if abs(size - size_bytes) < n * 16 and time_s < ceilings[operation, size]:
                        faster[operation, size] = time_s
            numbers["nccl_tests"] = notes or "used"
        for operation, size, time_s in several.gather([(*key, time_s) for key, time_s in faster.items()])[0]:
            ceilings[operation, size] = time_s
    numbers["library"] = [
        {"operation": operation, "bytes": size, "time_s": time_s,
         "busbw_bytes_per_s": hardware.bus_bandwidth(operation, size, time_s, n), "by": by}
        for operation, size, time_s, by in measured
    ]  # fmt: skip
    by_peers = numbers["peers"] = list[dict[str, object]]()  # whether a ring, which has one peer, has all bandwidth
    for peers in (each for each in PEERS if each < n):
        for size in sizes.peer_bytes:
            time_s = hardware.measure_peers(several, peers, size, sizes.calls)
            by_peers.append(
                {"peers": peers, "bytes": size, "time_s": time_s, "sent_bytes_per_s": peers * size / time_s}
            )


def by_nccl_tests(ranks: int, sizes: Sizes, notes: list[str]) -> Iterator[tuple[str, int, float]]:
    """Operation, size and time of every row that the installed programs print; why others are missing in `notes`."""
    programs = {operation: shutil.which(f"{operation}_perf") for operation in hardware.OPERATIONS}
    if not any(programs.values()):
        notes.append("not on the path: the ceiling is that of our own calls")
    for operation, path in programs.items():
        if path is None:
            continue
        try:
            tables = parse_nccl_tests(hardware.run_program(path, ranks, sizes.message_bytes), f"{operation}_perf")
        except TaspLabError as error:
            notes.append(str(error))
            continue
        yield from ((operation, row.size_bytes, row.time_s) for table in tables for row in table.rows)
