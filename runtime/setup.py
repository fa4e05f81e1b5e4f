"""What a launched rank has to know, as plain data that a launcher without torch can build."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Where a rank runs: the interface it talks through, and its namespaces (descriptors, -1 for none)."""

    interface: str = "lo"
    network_namespace: int = -1
    user_namespace: int = -1


@dataclass(frozen=True)
class RankSetup:
    """One rank. `channel` and `pulse_descriptor` are descriptors that the rank inherits."""

    rank: int
    world_size: int
    channel: int
    store_path: str
    log_path: str
    pulse_descriptor: int
    interface: str
    network_namespace: int
    user_namespace: int
