"""What ranks run on, whether the communication library starts there, and how fast it is by itself.

Sizes and bus bandwidths are those of nccl-tests: a size is that of a message for ``sendrecv``, of what a rank sends
altogether for ``alltoall``, and of the whole result for ``all_gather``; see PERFORMANCE.md of NVIDIA/nccl-tests.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

import torch
import torch.distributed as dist

from runtime.executor.messages import Group, reason_of
from runtime.kernels.timing import batch_s
from runtime.ranks.torchrun import HIGH_PRIORITY, TorchrunRanks
from runtime.ranks.watch import CheckedGroup
from tasp_lab.core.errors import RunError

_TOPOLOGY_COMMANDS = (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopo"), ("amd-smi", "topology"))
_COMMANDS_TAKE_S = 60.0
PROGRAMS_TAKE_S = 300.0
BATCHES = 5


@dataclass(frozen=True)
class RankInventory:
    """What one rank runs on; `host` is a hash of the host's name, `gpu` fields are empty on a CPU."""

    rank: int
    host: str
    gpu: str = ""
    pci_bus: str = ""
    memory_bytes: int = 0
    processors: int = 0
    peers_without_access: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """Name and memory; drivers may reserve a little more on one GPU than on another."""
        return f"{self.gpu or 'no GPU'} ({self.memory_bytes / 2**30:.0f} GiB)"


def inventory_of_rank(rank: int, device: torch.device, local_world_size: int) -> RankInventory:
    """What this rank runs on. GPUs of the same host are numbered as torch does."""
    host = sha256(socket.gethostname().encode()).hexdigest()[:8]
    if device.type == "cpu":
        return RankInventory(rank, host)
    here = device.index or 0
    gpu = torch.cuda.get_device_properties(here)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")  # an old torch does not have them
    bus = (
        "{:04x}:{:02x}:{:02x}".format(*(getattr(gpu, name) for name in names))
        if all(hasattr(gpu, name) for name in names)
        else ""
    )
    others = [peer for peer in range(local_world_size) if peer != here]
    apart = tuple(peer for peer in others if not torch.cuda.can_device_access_peer(here, peer))
    return RankInventory(rank, host, gpu.name, bus, gpu.total_memory, gpu.multi_processor_count, apart)


def check_same_gpus(ranks: Sequence[RankInventory]) -> None:
    """Raise `RunError` for two ranks on one GPU, for GPUs of several kinds, and for a pair without peer access."""
    taken: dict[tuple[str, str], int] = {}
    for rank in ranks:
        if rank.pci_bus and (other := taken.setdefault((rank.host, rank.pci_bus), rank.rank)) != rank.rank:
            raise RunError(f"ranks {other} and {rank.rank} use the same GPU, {rank.pci_bus}: expected one GPU per rank")
    for rank in ranks:
        if rank.kind != ranks[0].kind:
            raise RunError(f"GPUs of two kinds: rank 0 has {ranks[0].kind}, rank {rank.rank} has {rank.kind}; "
                           "expected equal ones")  # fmt: skip
        if rank.peers_without_access:
            raise RunError(
                f"rank {rank.rank}: no peer access to GPU {rank.peers_without_access[0]} of its host, so messages "
                "would go through host memory; expected peer access between all GPUs (IOMMU, ACS or the container?)"
            )


def topology_text() -> str | None:
    """How the GPUs of this host are connected, as the vendor's tool prints it; None without one."""
    for command in _TOPOLOGY_COMMANDS:
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMANDS_TAKE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command[0]}: {error}"
        return done.stdout or done.stderr
    return None


def check_library(device: torch.device, world_size: int) -> None:
    """One collective, by which a communication library starts. Raises `RunError` if it cannot or adds wrongly."""
    name = dist.get_backend()
    ones = torch.ones(1, device=device)
    try:
        dist.all_reduce(ones)
        total = float(ones.item())
    except RuntimeError as error:
        hint = "; run again with NCCL_DEBUG=INFO" if name == "nccl" else ""
        raise RunError(f"{name} cannot start: {reason_of(error)}{hint}") from None
    if total != world_size:
        raise RunError(f"{name}: the sum of a one from each of {world_size} ranks is {total:g}")


OPERATIONS = ("sendrecv", "alltoall", "all_gather")


def bus_bandwidth(operation: str, size_bytes: int, time_s: float, world_size: int) -> float:
    """The bus bandwidth in bytes/s.

    >>> bus_bandwidth("sendrecv", 100, 2.0, 4), bus_bandwidth("all_gather", 100, 0.5, 4)
    (50.0, 150.0)
    """
    share = 1.0 if operation == "sendrecv" else (world_size - 1) / world_size
    return size_bytes / time_s * share


def measure_operation(group: CheckedGroup, operation: str, size_bytes: int, count: int) -> float:
    """The seconds of one of the library's own calls on the slowest rank: `count` back to back, median of batches.

    Raises `RunError` if its result is wrong: every byte is the number of the rank that it is from.
    """
    rank, n, device = group.rank, group.world_size, group.device
    if operation == "sendrecv":
        return measure_peers(group, 1, size_bytes, count)
    part = size_bytes // n
    sent = torch.full((part * (n if operation == "alltoall" else 1),), rank, dtype=torch.uint8, device=device)
    received = torch.full((part * n,), 255, dtype=torch.uint8, device=device)

    def call() -> None:
        if operation == "alltoall":
            dist.all_to_all_single(received, sent)
        else:  # the call has a new name from torch 2.13 on, and the old one warns
            (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(received, sent)

    call()
    if not torch.equal(received.cpu(), torch.arange(n, dtype=torch.uint8).repeat_interleave(part)):
        raise RunError(f"{operation} of {size_bytes} bytes: what arrived is not what was sent")
    return _slowest_s(group, call, count)


def measure_peers(group: CheckedGroup, peers: int, size_bytes: int, count: int) -> float:
    """The seconds of a batch, on the slowest rank, in which each sends `size_bytes` to each of its next `peers` ranks.

    NCCL gives one peer few channels at first, so a rank may send to one at a fraction of its bandwidth.

    Raises `RunError` if what arrives is wrong: every byte is the number of the rank that it is from.
    """
    rank, n, device = group.rank, group.world_size, group.device
    sent = torch.full((size_bytes,), rank, dtype=torch.uint8, device=device)
    received = torch.full((peers, size_bytes), 255, dtype=torch.uint8, device=device)
    ends = [dist.P2POp(dist.irecv, received[each], (rank - 1 - each) % n) for each in range(peers)]
    ends += [dist.P2POp(dist.isend, sent, (rank + 1 + each) % n) for each in range(peers)]

    def call() -> None:
        for work in dist.batch_isend_irecv(ends):
            work.wait()

    call()
    for each in range(peers):
        if not bool((received[each] == (rank - 1 - each) % n).all()):
            raise RunError(f"{size_bytes} bytes to {peers} peers: what arrived is not what was sent")
    return _slowest_s(group, call, count)


def _slowest_s(group: CheckedGroup, call: Callable[[], object], count: int) -> float:
    """The time of a call on the slowest rank: medians of batches of `count` calls, which begin together."""
    batches = []
    for _ in range(BATCHES):
        group.barrier()
        batches.append(batch_s(call, count, group.device) / count)
    return max(group.gather(statistics.median(batches)))


def run_program(path: str, gpus: int, sizes_bytes: Sequence[int]) -> str:
    """The output of a program of nccl-tests or rccl-tests on GPUs of this host. Raises `RunError`."""
    first, last = min(sizes_bytes), max(sizes_bytes)
    line = [path, "-g", str(gpus), "-b", str(first), "-e", str(last), "-f", "8"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=PROGRAMS_TAKE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{path}: {error}") from None
    if done.returncode:
        last_line = ((done.stderr or done.stdout).strip().splitlines() or ["no output"])[-1]
        raise RunError(f"{path} ended with exit code {done.returncode}: {last_line}")
    return done.stdout


def ranks_by_priority(group: CheckedGroup) -> Iterator[tuple[str, TorchrunRanks]]:
    """Ranks whose messages have normal and high priority over kernels; on a host the ranks as they are.

    torch reads the variable for every new group: also for those of further channels.
    """
    if not group.on_gpu:
        yield "host", group.ranks
        return
    before = os.environ.get(HIGH_PRIORITY)
    for priority, value in (("normal", "0"), ("high", "1")):
        os.environ[HIGH_PRIORITY] = value
        yield priority, TorchrunRanks(_group_with(priority))
    os.environ.pop(HIGH_PRIORITY)
    if before is not None:
        os.environ[HIGH_PRIORITY] = before


@cache
def _group_with(priority: str) -> Group:
    """One group of all ranks: each has communicators with buffers on the GPU."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority == "high")
    made: Group = dist.new_group(backend="nccl", pg_options=options)
    return made
