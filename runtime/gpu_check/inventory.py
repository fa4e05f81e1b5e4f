"""What a rank runs on: its GPU, how GPUs are connected, and whether the communication library starts."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

import torch
import torch.distributed as dist

from runtime.executor.messages import reason_of
from tasp_lab.core.errors import RunError

_TOPOLOGY_COMMANDS = (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopo"))
_COMMANDS_TAKE_S = 60.0


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

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def inventory_of_rank(rank: int, device: torch.device, local_world_size: int) -> RankInventory:
    """What this rank runs on. GPUs of the same host are numbered as torch does."""
    host = sha256(socket.gethostname().encode()).hexdigest()[:8]
    if device.type == "cpu":
        return RankInventory(rank, host)
    here = device.index or 0
    properties = torch.cuda.get_device_properties(here)
    others = [each for each in range(local_world_size) if each != here]
    return RankInventory(
        rank,
        host,
        properties.name,
        _pci_bus(properties),
        properties.total_memory,
        properties.multi_processor_count,
        tuple(each for each in others if not torch.cuda.can_device_access_peer(here, each)),
    )


def _pci_bus(properties: object) -> str:
    """Domain, bus and device; empty if this torch does not show them."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(properties, name) for name in names):
        return ""
    domain, bus, device = (int(getattr(properties, name)) for name in names)
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def check_same_gpus(found: Sequence[RankInventory]) -> None:
    """Raise `RunError` for two ranks on one GPU, for GPUs of several kinds, and for a pair without peer access."""
    taken: dict[tuple[str, str], int] = {}
    for each in found:
        if each.pci_bus and (other := taken.setdefault((each.host, each.pci_bus), each.rank)) != each.rank:
            raise RunError(f"ranks {other} and {each.rank} use the same GPU, {each.pci_bus}: expected one GPU per rank")
    first = found[0]
    for each in found:
        if _kind(each) != _kind(first):
            raise RunError(
                f"GPUs of two kinds: rank 0 has {_kind(first)}, rank {each.rank} has {_kind(each)}; expected equal ones"
            )
        if each.peers_without_access:
            raise RunError(
                f"rank {each.rank}: no peer access to GPU {each.peers_without_access[0]} of its host, so messages "
                "would go through host memory; expected peer access between all GPUs (IOMMU, ACS or the container?)"
            )


def _kind(each: RankInventory) -> str:
    """Name and memory; drivers may reserve a little more on one GPU than on another."""
    return f"{each.gpu or 'no GPU'} ({each.memory_bytes / 2**30:.0f} GiB)"


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
        found = float(ones.item())
    except RuntimeError as error:
        hint = "; run again with NCCL_DEBUG=INFO" if name == "nccl" else ""
        raise RunError(f"{name} cannot start: {reason_of(error)}{hint}") from None
    if found != world_size:
        raise RunError(f"{name}: the sum of a one from each of {world_size} ranks is {found:g}")
