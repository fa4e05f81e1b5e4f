"""Our own launcher: starts one process per rank, keeps them for many jobs, and names the one that fails.

A rank that dies, crashes or hangs ends the run within seconds: all other ranks are killed and `RunError` names the
culprit. The kernel kills the ranks when the launcher itself is killed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

from runtime.jobs import Job, Result, Value
from runtime.pulse import Pulse, Watch
from runtime.setup import Placement, RankSetup, our_module
from tasp_lab.errors import RunError

START_LIMIT_S = 120.0
"""Until all ranks have joined the process group; most of it is for importing torch on a slow, busy machine."""

_GRACE_S = 2.0
"""How long to wait, after the first sign of trouble, for the sign that names the culprit."""

_LOOK_EVERY_S = 0.2


class LaunchedRanks:
    """Ranks as child processes of a nursery (`runtime.worker`). Use `launch`.

    Everything that ranks and launcher share lives in memory behind descriptors, so nothing can be left behind.
    """

    def __init__(self, placements: Sequence[Placement]) -> None:
        self.world_size = len(placements)
        self._stopped = False
        self._exit_codes: dict[int, int] = {}
        self._pulse_descriptor = Pulse.create(self.world_size)
        self._pulse = Pulse(self._pulse_descriptor, self.world_size)
        self._store = os.memfd_create("store")
        self._logs = [os.memfd_create(f"rank{rank}.log") for rank in range(self.world_size)]
        self._nursery_log = os.memfd_create("nursery.log")
        pairs = [socket.socketpair() for _ in placements]
        self._channels: list[Connection] = [Connection(ours.detach()) for ours, _ in pairs]
        setups = [self._setup(rank, pairs[rank][1].fileno(), placement) for rank, placement in enumerate(placements)]
        self._nursery, self._news = self._start_nursery(setups)
        for _, theirs in pairs:
            theirs.close()

    def _setup(self, rank: int, channel: int, placement: Placement) -> RankSetup:
        return RankSetup(
            rank=rank,
            world_size=self.world_size,
            channel=channel,
            store=self._store,
            log=self._logs[rank],
            pulse=self._pulse_descriptor,
            interface=placement.interface,
            network_namespace=placement.network_namespace,
            user_namespace=placement.user_namespace,
        )

    def _start_nursery(self, setups: Sequence[RankSetup]) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        passed = {theirs.fileno(), self._pulse_descriptor, self._store, *self._logs}
        for setup in setups:
            passed |= {setup.channel, setup.network_namespace, setup.user_namespace} - {-1}
        with theirs:
            process = subprocess.Popen(
                our_module("runtime.worker", str(theirs.fileno())),
                pass_fds=sorted(passed),
                stdin=subprocess.DEVNULL,
                stdout=self._nursery_log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                start_new_session=True,
            )
        news: Connection = Connection(ours.detach())
        news.send(list(setups))
        return process, news

    def wait_until_ready(self) -> None:
        """Return when every rank has joined the process group. Raises `RunError`."""
        self._collect("the start", time.monotonic() + START_LIMIT_S, None)

    def agree(self, value: Value) -> Value:
        """See `runtime.jobs.Ranks`: the ranks are told what to do, they decide nothing."""
        return value

    def perform(self, job: Job, longest_silence_s: float) -> list[Result]:
        """See `runtime.jobs.Ranks`. After a `RunError` all ranks are gone."""
        if self._stopped:
            raise RunError("the ranks are gone: an earlier job failed")
        try:
            for rank, channel in enumerate(self._channels):
                try:
                    channel.send((job, 10 * longest_silence_s))
                except OSError:
                    raise RunError(f"rank {rank} {self._fate(rank)} before the run") from None
            return self._collect("the run", None, Watch(self._pulse, self.world_size, longest_silence_s))
        except RunError:
            self.stop()
            raise

    def _collect(self, what: str, deadline_s: float | None, watch: Watch | None) -> list[Result]:
        """One answer of every rank, or the `RunError` that names who did not give one."""
        results: dict[int, Result] = {}
        while missing := sorted(set(range(self.world_size)) - set(results)):
            for rank in self._readable(missing):
                results[rank] = self._receive(rank, what)
            if (dead := next((rank for rank in missing if rank in self._exit_codes), None)) is not None:
                raise RunError(f"rank {dead} {self._fate(dead)} during {what}")
            if watch is not None and (culprit := watch.culprit()) is not None:
                raise RunError(f"rank {culprit[0]} hangs during {what}: {culprit[1]}")
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise RunError(f"rank {missing[0]} was not ready within {START_LIMIT_S:.0f} s")
        return [results[rank] for rank in range(self.world_size)]

    def _readable(self, ranks: Sequence[int]) -> list[int]:
        """Ranks that have something to say, after a moment of listening; deaths are noted."""
        rank_of = {self._channels[rank]: rank for rank in ranks}
        ready = wait([*rank_of, self._news], timeout=_LOOK_EVERY_S)
        if self._news in ready:
            self._read_news(lambda: True)
        return sorted(rank_of[channel] for channel in ready if isinstance(channel, Connection) and channel in rank_of)

    def _receive(self, rank: int, what: str) -> Result:
        try:
            kind, value = self._channels[rank].recv()
        except (EOFError, OSError):
            raise RunError(f"rank {rank} {self._fate(rank)} during {what}") from None
        if kind == "crashed":
            raise RunError(f"rank {rank} failed during {what}: {str(value).strip().splitlines()[-1]}")
        if kind == "failed":
            raise RunError(self._first_dead(what) or str(value))
        result: Result = value
        return result

    def _first_dead(self, what: str) -> str | None:
        """A rank that says it lost another is not the cause: wait a moment for news of one that died."""
        self._read_news(lambda: bool(self._exit_codes))
        dead = next(iter(self._exit_codes), None)
        return None if dead is None else f"rank {dead} {self._fate(dead)} during {what}"

    def _read_news(self, enough: Callable[[], bool]) -> None:
        """Note which ranks have ended, until that is enough or nothing more comes for a moment."""
        deadline_s = time.monotonic() + _GRACE_S
        with contextlib.suppress(EOFError, OSError):
            while self._news.poll(0 if enough() else max(deadline_s - time.monotonic(), 0)):
                rank, code = self._news.recv()
                self._exit_codes.setdefault(rank, code)

    def _fate(self, rank: int) -> str:
        self._read_news(lambda: rank in self._exit_codes)
        if rank not in self._exit_codes:
            return f"was lost ({_last_words(self._nursery_log)})"
        code = self._exit_codes[rank]
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code} ({_last_words(self._logs[rank])})"

    def stop(self) -> None:
        """Kill all ranks. Doing so again does nothing."""
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._nursery.pid, signal.SIGKILL)
        self._nursery.wait()
        for channel in (*self._channels, self._news):
            channel.close()
        for descriptor in (self._pulse_descriptor, self._store, self._nursery_log, *self._logs):
            os.close(descriptor)


def _last_words(log: int) -> str:
    lines = os.pread(log, 2**20, 0).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


@contextlib.contextmanager
def launch(placements: Sequence[Placement]) -> Iterator[LaunchedRanks]:
    """Start a rank per placement as a gloo process group; all are gone when the block is left, however it is left.

    Raises `RunError` when a rank does not come up.
    """
    if platform.system() != "Linux":
        raise RunError(f"starting ranks needs Linux, this is {platform.system()}; torchrun works anywhere")
    ranks = LaunchedRanks(placements)
    try:
        ranks.wait_until_ready()
        yield ranks
    finally:
        ranks.stop()
