"""Failed passes on GPUs: the rank announces its error, and the others end instead of waiting for its messages.

    with announced(group):             # around a pass of a rank; None where hosts wait for messages themselves
        run()

A kernel of NCCL waits for a message that does not come until torch's watchdog ends the process, by default after 10
minutes, and no host sees why. So a rank whose pass fails leaves its error in the store of the group, and ends its own
kernels (`ProcessGroup.abort`, without which the process may not end either). A thread of every other rank looks there
once a second, prints the error, and ends its process as the watchdog would.

A rank that is killed leaves nothing: its launcher ends the others, and the next agreement over gloo names it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_process_group_store

from tasp_lab.core.errors import first_line
from tasp_lab.core.process import at_once, leave
from tasp_lab.core.progress import print_line

LOOK_EVERY_S = 1.0

_KEY = "tasp_lab/failed"
_WATCHED: WeakSet[dist.ProcessGroup] = WeakSet()


@contextlib.contextmanager
def announced(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Announce an error to the ranks of a group, and watch for theirs; raises it unchanged."""
    if group is not None and group not in _WATCHED:
        _WATCHED.add(group)
        where = _get_process_group_store(group), dist.get_rank(group)
        threading.Thread(target=_watch, args=where, name="failed ranks", daemon=True).start()
    try:
        yield
    except Exception as error:
        if group is not None:
            with contextlib.suppress(Exception):  # the store may be gone, or the group aborted by the watchdog
                _announce(_get_process_group_store(group), dist.get_rank(group), error)
                group.abort()
        raise


def _announce(store: Store, rank: int, error: Exception) -> None:
    """The first error stays: later ones are of ranks that miss messages of the failed one."""
    if not store.check([_KEY]):
        store.set(_KEY, f"{rank} {first_line(error)}")


def _watch(store: Store, rank: int) -> None:
    """End this process when another rank has failed; return if this one has, or if the group is over."""
    with contextlib.suppress(Exception):
        while not store.check([_KEY]):
            time.sleep(LOOK_EVERY_S)
        failed, _, message = store.get(_KEY).decode().partition(" ")
        if int(failed) != rank:
            _end(rank, failed, message)


def _end(rank: int, failed: str, message: str) -> NoReturn:
    print_line(f"rank {rank}: ends, as rank {failed} has failed: {message}", sys.stderr)
    at_once()  # the main thread may wait for the GPU for ever
    leave(1)
