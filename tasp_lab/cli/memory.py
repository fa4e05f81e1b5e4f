"""How much memory a command may take: beyond it the command is refused, before the system ends it without a word.

Counts refuse what is known to be too large before it is made (`tasp_lab.schedule.proof.check_holdings`). This limit is
for the rest. It does not depend on what is free, so a command has the same answer on every machine with enough memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasp_lab.core.errors import QuantityError
from tasp_lab.core.units import parse_size_bytes

VARIABLE = "TASP_LAB_MEMORY"
"""The environment variable that sets another limit, a size such as ``32GiB``."""

DEFAULT_MEMORY = "8GiB"
"""Enough for schedules of 2^30 pairs of a rank and a block, the most that are proved."""

_STATUS = Path("/proc/self/status")


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let what is inside allocate `DEFAULT_MEMORY` more than is allocated now, or what the environment says.

    Only on Linux. Raises `QuantityError` for a value that is no size, and in place of a `MemoryError`.
    """
    text = os.environ.get(VARIABLE, "") or DEFAULT_MEMORY
    try:
        more_bytes = parse_size_bytes(text)
    except QuantityError as error:
        raise QuantityError(f"{VARIABLE}: {error}") from None
    if not _STATUS.exists():
        yield
        return
    import resource

    # The limit counts private writable memory, of which the process has some already.
    taken = next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith("VmData:"))
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [taken * 1024 + more_bytes, *(each for each in (before, most) if each != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), most))
    try:
        yield
    except MemoryError:
        raise QuantityError(
            f"not enough memory: this takes more than {text}; set {VARIABLE} to allow more, such as {VARIABLE}=32GiB"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))
