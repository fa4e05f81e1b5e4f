"""The set-up of a launched rank, as plain data that a launcher without torch can construct."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankLocation:
    """The location of a rank: its network interface, and its namespaces (descriptors, -1 for none)."""

    interface: str = "lo"
    network_namespace: int = -1
    user_namespace: int = -1


@dataclass(frozen=True)
class RankSetup:
    """The set-up of one rank. `channel`, `store`, `log`, `heartbeat` and the namespaces are inherited descriptors.

    `store` is the in-memory file for the rendezvous of the process group, `log` the one for the rank's output.
    """

    rank: int
    world_size: int
    channel: int
    store: int
    log: int
    heartbeat: int
    interface: str
    network_namespace: int
    user_namespace: int


def our_module(name: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules, independently of modules in the current directory."""
    root = str(Path(__file__).parents[2])
    program = f"import sys; sys.path.insert(0, {root!r}); import runpy; runpy.run_module({name!r}, run_name='__main__')"
    return [sys.executable, "-P", "-c", program, *arguments]
