"""Whether ranks share cores, so that a prediction that gives each a core of its own is none.

Kernel calls on a host are predicted by a rate of each rank, and messages of local processes by one shared medium.
Both need cores. With fewer cores than ranks a call lasts as long as other ranks, their copies and their threads of
communication let it, which depends on what runs at the same moment and on the scheduler. No engine models that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tasp_lab.core.choices import FabricKind
from tasp_lab.core.process import usable_cores


def why_not_comparable(
    fabric: FabricKind, ranks: int, real_kernels: bool, environment: Mapping[str, object]
) -> str | None:
    """The reason why times measured on a fabric cannot be compared with predictions, or None if they can.

    On the emulated fabric only real kernels need cores; waits and shaped links hardly do. Under torchrun the ranks of
    this host count (``LOCAL_WORLD_SIZE``).
    """
    if environment.get("device", "cpu") != "cpu" or (fabric == "emulated" and not real_kernels):
        return None
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if fabric == "torchrun" else ranks
    cores = usable_cores()
    if here <= cores:
        return None
    what = "kernels and messages" if real_kernels else "messages"
    return f"{here} ranks share {cores} core{'s' * (cores != 1)} for their {what}, which predictions do not model"
