"""The launcher: starts one process per rank, reuses them for many jobs, and identifies a rank that fails.

When a rank dies, crashes or hangs, the run ends within seconds: all other ranks are killed and `RunError` names the
failed rank. The kernel kills the ranks if the launcher itself is killed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait

from runtime.protocol.heartbeat import Heartbeat, Watchdog
from runtime.protocol.jobs import Job, RankLocation, RankSetup, Result, Value, our_module
from tasp_lab.core.errors import RunError

START_LIMIT_S = 120.0
"""Time limit for all ranks to join the process group; importing torch on a slow, busy machine takes most of it."""

_GRACE_S = 2.0
"""How long to wait, after the first error, for the exit code of the rank that caused it."""

_POLL_INTERVAL_S = 0.2


class LaunchedRanks:
    """Ranks as child processes of a fork server (`runtime.ranks.fork_server`). Use `launch`.

    Ranks and launcher share only memory behind descriptors, so no cleanup of files is needed.
    """

    is_reporter = True
    """See `runtime.protocol.jobs.Ranks`: the launcher is the one process that is not a rank."""

    environment: Mapping[str, object] = {"backend": "gloo", "device": "cpu"}
    """See `runtime.protocol.jobs.Ranks`."""

    def __init__(self, locations: Sequence[RankLocation]) -> None:
        self.world_size = len(locations)
        self._stopped = False
        self._exit_codes: dict[int, int] = {}
        self._heartbeat_descriptor = Heartbeat.create(self.world_size)
        self._heartbeat = Heartbeat(self._heartbeat_descriptor, self.world_size)
        self._store = os.memfd_create("store")
        self._logs = [os.memfd_create(f"rank{rank}.log") for rank in range(self.world_size)]
        self._fork_server_log = os.memfd_create("fork_server.log")
        pairs = [socket.socketpair() for _ in locations]
        self._channels: list[Connection] = [Connection(ours.detach()) for ours, _ in pairs]
        setups = [
            RankSetup(rank, self.world_size, location, pairs[rank][1].fileno(), self._store, self._logs[rank],
                      self._heartbeat_descriptor)
            for rank, location in enumerate(locations)
        ]  # fmt: skip
        self._fork_server, self._exits = self._start_fork_server(setups)
        for _, theirs in pairs:
            theirs.close()

    def _start_fork_server(self, setups: Sequence[RankSetup]) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        passed = {theirs.fileno(), self._heartbeat_descriptor, self._store, *self._logs}
        for setup in setups:
            passed |= {setup.channel, setup.location.network_namespace, setup.location.user_namespace} - {-1}
        with theirs:
            process = subprocess.Popen(
                our_module("runtime.ranks.fork_server", str(theirs.fileno())),
                pass_fds=sorted(passed),
                stdin=subprocess.DEVNULL,
                stdout=self._fork_server_log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                start_new_session=True,
            )
        exits: Connection = Connection(ours.detach())
        exits.send(list(setups))
        return process, exits

    def agree(self, value: Value) -> Value:
        """See `runtime.protocol.jobs.Ranks`: only the launcher has a value."""
        return value

    def perform(self, job: Job, longest_silence_s: float) -> list[Result]:
        """See `runtime.protocol.jobs.Ranks`. After a `RunError` all ranks have been killed."""
        if self._stopped:
            raise RunError("the ranks are gone: an earlier job failed")
        try:
            for rank, channel in enumerate(self._channels):
                try:
                    channel.send((job, 10 * longest_silence_s))
                except OSError:
                    raise RunError(f"rank {rank} {self._exit_reason(rank)} before the run") from None
            return self._collect("the run", None, Watchdog(self._heartbeat, self.world_size, longest_silence_s))
        except RunError:
            self.stop()
            raise

    def _collect(self, what: str, deadline_s: float | None, watchdog: Watchdog | None) -> list[Result]:
        """The results of all ranks. Raises `RunError` that names the failed rank."""
        results: dict[int, Result] = {}
        while missing := sorted(set(range(self.world_size)) - set(results)):
            for rank in self._readable(missing):
                results[rank] = self._receive(rank, what)
            if (dead := next((rank for rank in missing if rank in self._exit_codes), None)) is not None:
                raise RunError(f"rank {dead} {self._exit_reason(dead)} during {what}")
            if watchdog is not None and (failed_rank := watchdog.failed_rank()) is not None:
                raise RunError(f"rank {failed_rank[0]} hangs during {what}: {failed_rank[1]}")
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise RunError(f"rank {missing[0]} was not ready within {START_LIMIT_S:.0f} s")
        return [results[rank] for rank in range(self.world_size)]

    def _readable(self, ranks: Sequence[int]) -> list[int]:
        """The ranks with a pending answer, after one poll interval; exit codes are recorded."""
        rank_of = {self._channels[rank]: rank for rank in ranks}
        ready = wait([*rank_of, self._exits], timeout=_POLL_INTERVAL_S)
        if self._exits in ready:
            self._read_exits(lambda: True)
        return sorted(rank_of[channel] for channel in ready if isinstance(channel, Connection) and channel in rank_of)

    def _receive(self, rank: int, what: str) -> Result:
        try:
            kind, value = self._channels[rank].recv()
        except (EOFError, OSError):
            raise RunError(f"rank {rank} {self._exit_reason(rank)} during {what}") from None
        if kind == "crashed":
            raise RunError(f"rank {rank} failed during {what}: {str(value).strip().splitlines()[-1]}")
        if kind == "failed":
            self._read_exits(lambda: bool(self._exit_codes))  # a rank that has lost a peer is not the cause
            dead = next(iter(self._exit_codes), None)
            raise RunError(str(value) if dead is None else f"rank {dead} {self._exit_reason(dead)} during {what}")
        result: Result = value
        return result

    def _read_exits(self, enough: Callable[[], bool]) -> None:
        """Record exit codes of ranks until `enough()` or the grace period ends."""
        deadline_s = time.monotonic() + _GRACE_S
        with contextlib.suppress(EOFError, OSError):
            while self._exits.poll(0 if enough() else max(deadline_s - time.monotonic(), 0)):
                rank, code = self._exits.recv()
                self._exit_codes.setdefault(rank, code)

    def _exit_reason(self, rank: int) -> str:
        self._read_exits(lambda: rank in self._exit_codes)
        if rank not in self._exit_codes:
            return f"was lost ({_last_line(self._fork_server_log)})"
        code = self._exit_codes[rank]
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code} ({_last_line(self._logs[rank])})"

    def stop(self) -> None:
        """Kill all ranks. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._fork_server.pid, signal.SIGKILL)
        self._fork_server.wait()
        for channel in (*self._channels, self._exits):
            channel.close()
        for descriptor in (self._heartbeat_descriptor, self._store, self._fork_server_log, *self._logs):
            os.close(descriptor)


def _last_line(log: int) -> str:
    lines = os.pread(log, 2**20, 0).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


@contextlib.contextmanager
def launch(locations: Sequence[RankLocation]) -> Iterator[LaunchedRanks]:
    """Start a rank per location as a gloo process group; all ranks are killed on exit of the context.

    Raises `RunError` if a rank does not start.
    """
    if platform.system() != "Linux":
        raise RunError(f"starting ranks needs Linux, this is {platform.system()}; torchrun works anywhere")
    ranks = LaunchedRanks(locations)
    try:
        ranks._collect("the start", time.monotonic() + START_LIMIT_S, None)
        yield ranks
    finally:
        ranks.stop()
