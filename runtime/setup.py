"""What a launched process has to know, as plain data that a launcher without torch can build."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Placement:
    """Where a rank runs: the interface it talks through, and its namespaces (descriptors, -1 for none)."""

    interface: str = "lo"
    network_namespace: int = -1
    user_namespace: int = -1


@dataclass(frozen=True)
class RankSetup:
    """One rank. `channel`, `store`, `log`, `pulse` and the namespaces are descriptors that the rank inherits.

    `store` is the file in memory in which ranks find each other, `log` the one that takes what the rank prints.
    """

    rank: int
    world_size: int
    channel: int
    store: int
    log: int
    pulse: int
    interface: str
    network_namespace: int
    user_namespace: int


def our_module(name: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules, whatever the current folder holds under the same name."""
    root = str(Path(__file__).parent.parent)
    program = f"import sys; sys.path.insert(0, {root!r}); import runpy; runpy.run_module({name!r}, run_name='__main__')"
    return [sys.executable, "-P", "-c", program, *arguments]
