"""Failed passes: the rank that fails announces its error, and the others end instead of waiting for its messages.

    hosts = hosts_of(group)
    with hosts.together(lambda: "the forward pass"):     # around what a rank does together with the others
        connections = hosts.connect(timeout_s)           # a process group of gloo, for the messages of hosts
        run()

A rank that fails leaves its error in the store of the group, then closes its connections. That ends all waits for it:
ranks that waited find the error in the store, and close theirs. So an error reaches all ranks of a pass within a
second, and a pass without one costs nothing. The next call makes new connections, on which nothing old can arrive.

Every rank raises once for each failure, so ranks that repeat what has failed stay together: in the pass itself or, if
it had its results already, in its next call. With a process that has ended the group has ended, too: later calls raise
at once, and say why.

Where GPUs wait for messages no host sees that one does not come: a kernel of NCCL waits until torch's watchdog ends the
process, by default after 10 minutes. So a rank whose pass on GPUs fails (`on_gpus` of `Hosts.together`) ends its own
kernels, too (`ProcessGroup.abort`, without which the process may not end either). A thread of every other rank looks
into the store once a second, prints the error, and ends its process as the watchdog would.

A rank that is killed leaves nothing: its launcher ends the others, and the next agreement over gloo names it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

from runtime.executor.kept import release_memory
from runtime.executor.messages import Group, LostPeer, LostRankError, Wait, call_peers, group_of
from runtime.executor.transports import AGREEMENT_TAG
from tasp_lab.core.errors import RunError, first_line
from tasp_lab.core.process import at_once, leave
from tasp_lab.core.progress import print_line

LOOK_EVERY_S = 1.0

PATIENCE_S = 2.0
"""How long a rank looks for the error of a peer that has closed its connections, before it takes the peer for lost.

Assumed. A peer whose wait times out closes them a moment before it can announce why.
"""

ALIKE_S = 0.5
"""How long a rank that has failed lets the others fail by themselves, as all do that have no memory for a batch.

Assumed: long beside the time in which ranks reach the same kernel call.
"""

_NEVER_SENT = AGREEMENT_TAG + 1
"""The tag of messages that are received and never sent."""

_END, _FAILED = "end", "failed"
"""The keys of the first error with which connections have ended, and of how many ranks have failed by themselves."""

_MAX_LETTERS = 2000


class _End(NamedTuple):
    """Why connections have ended: the rank that saw it first, in words, whether the group has ended, and on GPUs."""

    rank: int
    text: str
    is_over: bool
    on_gpus: bool = False


class Hosts:
    """The connections between the hosts of a group, which all ranks make anew when they have ended; see `hosts_of`.

    `calls` counts the calls of layers that all ranks have agreed on. `exchanges` are the tokens and proposals of the
    latest ones by the proposal of this rank, `waits` those of the last one (`runtime.executor.messages.Wait`).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._store = PrefixStore("tasp_lab", _get_process_group_store(group))
        self._connections: dist.ProcessGroup | None = None
        self._ended = 0  # how many connections have ended so far, as many on all ranks that have raised
        self._last = _End(self._rank, "", is_over=False)
        self._lock, self._is_watched = threading.Lock(), False
        self.calls = 0
        self.exchanges = OrderedDict[str, tuple[bytes, list[Mapping[str, object]]]]()
        self.waits: Sequence[Wait] = ()

    def connect(self, timeout_s: float) -> dist.ProcessGroup:
        """The connections, which all ranks make in their first call. Raises `LostRankError` for absent ranks."""
        if self._connections is None:
            self._connections = self._meet(timeout_s)
        return self._connections

    @contextlib.contextmanager
    def together(
        self,
        during: Callable[[], str],
        alike: Callable[[BaseException], bool] = lambda _: False,
        on_gpus: dist.ProcessGroup | None = None,
    ) -> Iterator[None]:
        """End the connections when this rank fails, or find out why they have ended; `during` names what the ranks do.

        An error of this rank is raised unchanged, that of another one as a `RunError` that names it. An error that is
        `alike` is raised by all ranks, each by itself, so it ends nothing. `on_gpus` is the group for whose messages
        GPUs wait, which ends with an error.
        """
        ended = self._ended
        if on_gpus is not None and not self._is_watched:
            self._is_watched = True
            where = self._store_of, ended, self._rank
            threading.Thread(target=_watch, args=where, name="failed ranks", daemon=True).start()
        try:
            yield
        except LostRankError as error:
            raise self._end_of_another(ended, error, during(), on_gpus) from None
        except BaseException as error:
            if not alike(error) and ended == self._ended and not self._last.is_over:
                self._announce(ended, error, during(), on_gpus)
            raise

    def _announce(self, ended: int, error: BaseException, during: str, on_gpus: dist.ProcessGroup | None) -> None:
        what, on_gpu = f"rank {self._rank} raised {type(error).__name__}", on_gpus is not None
        what += f" in {during}" if during else ""
        first = own = _End(self._rank, f"{what}: {first_line(error)}" if str(error) else what, on_gpu, on_gpu)
        store, end = self._store_of(ended), time.monotonic() + ALIKE_S
        try:
            with contextlib.suppress(Exception):  # the store may be gone with the process that has it
                first = _first_end(store, own)
                if on_gpus is not None:
                    on_gpus.abort()
                failed = store.add(_FAILED, 1)
                while failed < self._world_size and time.monotonic() < end:
                    time.sleep(0.01)
                    failed = store.add(_FAILED, 0)
        finally:
            self._close(ended, first)

    def _end_of_another(
        self, ended: int, error: LostRankError, during: str, on_gpus: dist.ProcessGroup | None
    ) -> RunError:
        on_gpu = on_gpus is not None
        own = _End(self._rank, f"{error}{f', in {during}' if during else ''}", on_gpu or not error.is_late, on_gpu)
        try:
            first = _first_end(self._store_of(ended), own, 0.0 if error.is_late else PATIENCE_S)
        except Exception:  # the store is gone with the process that has it
            gone = "the store of the group is gone, too, which is often in the process of rank 0"
            first = own._replace(text=f"{own.text}; {gone}", is_over=True)
        if on_gpus is not None:
            with contextlib.suppress(Exception):  # aborted by the watchdog, perhaps
                on_gpus.abort()
        self._close(ended, first)
        if first.rank == self._rank:
            return RunError(first.text)
        here = f", in {during}" if during and during not in first.text else ""
        return RunError(f"rank {self._rank}{here}: {first.text}")

    def _store_of(self, number: int) -> Store:
        """Where ranks meet to make connections, and leave the error with which these end."""
        return PrefixStore(str(number), self._store)

    def _close(self, ended: int, end: _End) -> None:
        """End all waits on these connections, in all threads and on all peers, unless another thread has done so.

        In gloo a wait that times out does that. Its `abort` does not.
        """
        with self._lock:
            if ended != self._ended:
                return
            connections, self._connections = self._connections, None
            self._ended, self._last = ended + 1, end
        for peer in range(self._world_size):
            if connections is not None and peer != self._rank:
                with contextlib.suppress(Exception):  # raised where one is closed already, and by the wait itself
                    connections.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        release_memory()  # executors are kept with messages on these connections

    def _meet(self, timeout_s: float) -> dist.ProcessGroup:
        """Make connections once all ranks have come to the store."""
        if self._last.is_over:
            raise RunError(f"rank {self._rank}: the group has ended: {self._last.text}")
        store, ranks = self._store_of(self._ended), [str(rank) for rank in range(self._world_size)]
        store.set(str(self._rank), str(self.calls))
        now = time.monotonic()
        end, look, pause_s = now + timeout_s, now + LOOK_EVERY_S, 1e-3
        while True:
            if store.check([_END]):
                raise LostRankError(f"rank {self._rank}: lost a rank before the start")
            if store.check(ranks):
                break
            now = time.monotonic()
            if now > end:
                missing = [rank for rank in range(self._world_size) if not store.check([str(rank)])]
                raise LostRankError(self.absent(missing, timeout_s), is_late=True)
            if now > look:
                self._check_life([rank for rank in range(self._world_size) if not store.check([str(rank)])])
                look = now + LOOK_EVERY_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        try:
            connections = call_peers(False, _gloo, store, self._rank, self._world_size, timeout_s)
        except LostPeer as error:
            raise LostRankError(
                f"rank {self._rank}: hosts talk over gloo, which does not start ({error}); GLOO_SOCKET_IFNAME names "
                "the interface", is_late=True
            ) from None  # fmt: skip
        if self._ended:  # ranks that have left a failed call earlier than others have counted fewer calls
            self.calls = max(int(store.get(rank)) for rank in ranks)
        return connections

    def absent(self, ranks: Sequence[int], timeout_s: float, hint: str = "") -> str:
        """The error of ranks that do not take part, in words."""
        they_have = "it has" if len(ranks) == 1 else "they have"
        return self.lost(ranks, f"{they_have} not come within {timeout_s:g} s{hint}")

    def lost(self, ranks: Sequence[int], reason: object) -> str:
        """The error of ranks that are lost before the start, in words."""
        after = f", after {self._last.text}" if self._last.text and self._connections is None else ""
        return f"rank {self._rank}: lost {ranks_in_words(ranks)} before the start ({reason}){after}"

    def _check_life(self, missing: Sequence[int]) -> None:
        """Raise `LostRankError` for a process that has ended, whose connections of a group of gloo are closed.

        To post a message raises then. A wait for it would close the group's connections when it times out.
        """
        group = self._group()
        if group is None or "cpu:gloo" not in dist.get_backend_config(group):
            return
        for peer in missing:
            try:
                call_peers(False, group.recv, [torch.empty(1)], peer, _NEVER_SENT)
            except LostPeer as error:
                raise LostRankError(self.lost([peer], error)) from None


_HOSTS: weakref.WeakKeyDictionary[dist.ProcessGroup, Hosts] = weakref.WeakKeyDictionary()


def hosts_of(group: Group) -> Hosts:
    """The hosts of a group."""
    found = group_of(group)
    if found not in _HOSTS:
        _HOSTS[found] = Hosts(found)
    return _HOSTS[found]


def _gloo(store: Store, rank: int, world_size: int, timeout_s: float) -> dist.ProcessGroup:
    """A process group of gloo that torch does not list: it has no name, on which ranks in other groups might differ."""
    made, backend = dist.ProcessGroup(store, rank, world_size), dist.ProcessGroup.BackendType.GLOO
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, timedelta(seconds=timeout_s))
    made._set_default_backend(backend)
    made._register_backend(torch.device("cpu"), backend, gloo)
    return made


def _first_end(store: Store, own: _End, patience_s: float = 0.0) -> _End:
    """The first error with which connections have ended: this one, unless there is another, or one comes meanwhile."""
    end = time.monotonic() + patience_s
    while not store.check([_END]) and time.monotonic() < end:
        time.sleep(0.02)
    text = own.text.encode("ascii", "replace").decode()[:_MAX_LETTERS]
    return _End(*json.loads(store.compare_set(_END, "", json.dumps(own._replace(text=text)))))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks in ascending order, those that follow one another as a range.

    >>> ranks_in_words([0, 1, 2, 5]), ranks_in_words([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"


def _watch(store_of: Callable[[int], Store], number: int, rank: int) -> None:
    """End this process when another rank has failed in a pass on GPUs; return if this one has, or the group is over."""
    with contextlib.suppress(Exception):
        while True:
            time.sleep(LOOK_EVERY_S)
            if not store_of(number).check([_END]):
                continue
            end = _End(*json.loads(store_of(number).get(_END)))
            if end.on_gpus:
                break
            number += 1  # all ranks go on with new connections
        if end.rank != rank:
            print_line(f"rank {rank}: ends, as {end.text}", sys.stderr)
            at_once()  # the main thread may wait for the GPU for ever
            leave(1)
