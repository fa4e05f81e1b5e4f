"""The executor: runs one rank's part of a schedule over a transport and records what happened.

It walks the steps of its rank. Receives are posted ahead, a block is sent as soon as it has arrived, and nothing
waits for a step to end on other ranks. All blocks of a rank live in one buffer, in the order of their numbers; for
AllGather that buffer is the gathered result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from runtime.records import RankRecord, Received, Sent
from runtime.transport import Message, Transport, Wait
from tasp_lab.errors import RunError
from tasp_lab.schedule import Schedule, Step

Progress = Callable[[int, int], None]
"""Called with the step and the rank that is waited for (-1 for none)."""


def _no_progress(step: int, peer: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Incoming:
    received: tuple[int, int, int, int]
    wait: Wait


class Executor:
    """Runs a schedule as one rank. Raises `RunError` that names the rank that was lost, the step and the block."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transport: Transport,
        device: str = "cpu",
        progress: Progress = _no_progress,
    ) -> None:
        self.rank = rank
        self._transport = transport
        self._progress = progress
        self._offsets = np.concatenate([[0], np.cumsum(schedule.block_bytes)])
        self._buffer = torch.zeros(int(self._offsets[-1]), dtype=torch.uint8, device=device)
        self._initial = np.flatnonzero(schedule.initial[rank]).tolist()
        self._final = np.flatnonzero(schedule.final[rank]).tolist()
        self._sends = [_rows(step, step.source == rank, step.destination) for step in schedule.steps]
        self._receives = [_rows(step, step.destination == rank, step.source) for step in schedule.steps]
        self._lanes = schedule.lanes

    def fill(self) -> None:
        """Put the test pattern into the blocks that the rank holds at the start and zeros everywhere else."""
        self._buffer.zero_()
        for block in self._initial:
            self._block(block).copy_(test_pattern(block, self._block(block).numel()))

    def verify(self) -> None:
        """Check every block that the rank must hold at the end, bit for bit. Raises `RunError`."""
        for block in self._final:
            found = self._block(block).cpu()
            if not torch.equal(found, test_pattern(block, found.numel())):
                raise RunError(f"rank {self.rank}: block {block} is not what its owner sent")

    def run(self) -> RankRecord:
        """Execute the rank's part once; times count from the call."""
        self._pending: dict[int, _Incoming] = {}
        self._posted = 0
        self._received: list[Received] = []
        self._began = time.perf_counter()
        sent: list[Sent] = []
        leaving: list[tuple[int, int, Wait]] = []
        for step in range(len(self._sends)):
            self._post_receives(up_to=step + self._transport.receives_ahead)
            for group in self._send_groups(step):
                for row in group:
                    self._await_block(row[2])
                messages = [self._message(step, *row) for row in group]
                now = self._now()
                waits = self._transport.send(messages)
                sent += [Sent(step, lane, peer, block, now) for peer, lane, block in group]
                leaving += [(step, row[0], wait) for row, wait in zip(group, waits, strict=True)]
        for block in list(self._pending):
            self._await_block(block)
        for step, peer, wait in leaving:
            self._guard(step, peer, "to be taken by", wait)
        return RankRecord(self.rank, self._now(), tuple(sent), tuple(self._received))

    def _send_groups(self, step: int) -> list[list[tuple[int, int, int]]]:
        """What is posted together: the whole step, or each message on its own."""
        rows = self._sends[step]
        return [rows] if self._transport.whole_steps else [[row] for row in rows]

    def _post_receives(self, up_to: int) -> None:
        while self._posted <= min(up_to, len(self._receives) - 1):
            step = self._posted
            rows = self._receives[step]
            waits = self._transport.receive([self._message(step, *row) for row in rows])
            for (peer, lane, block), wait in zip(rows, waits, strict=True):
                self._pending[block] = _Incoming((step, lane, peer, block), wait)
            self._posted += 1

    def _await_block(self, block: int) -> None:
        """Wait until a block that is on its way has arrived."""
        incoming = self._pending.pop(block, None)
        if incoming is not None:
            step, lane, peer, _ = incoming.received
            self._guard(step, peer, f"block {block} from", incoming.wait)
            self._received.append(Received(step, lane, peer, block, self._now()))

    def _guard(self, step: int, peer: int, what: str, wait: Wait) -> None:
        self._progress(step, peer)
        try:
            wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RunError(
                f"rank {self.rank}, step {step}: lost rank {peer} waiting for {what} it ({reason})"
            ) from None
        self._progress(step, -1)

    def _message(self, step: int, peer: int, lane: int, block: int) -> Message:
        return Message(peer, step * self._lanes + lane, self._block(block))

    def _block(self, block: int) -> torch.Tensor:
        return self._buffer[self._offsets[block] : self._offsets[block + 1]]

    def _now(self) -> float:
        return time.perf_counter() - self._began


def _rows(step: Step, mine: np.ndarray, peers: np.ndarray) -> list[tuple[int, int, int]]:
    """The (peer, lane, block) rows of a step that concern one rank, in the order of lanes."""
    rows = zip(peers[mine].tolist(), step.lane[mine].tolist(), step.block[mine].tolist(), strict=True)
    return sorted(rows, key=lambda row: row[1])


def test_pattern(block: int, size_bytes: int) -> torch.Tensor:
    """The bytes of a block in a test run: pseudo-random, the same on every rank, different for every block."""
    generator = np.random.Generator(np.random.Philox(key=block))
    return torch.from_numpy(generator.integers(0, 256, size_bytes, dtype=np.uint8))


test_pattern.__test__ = False  # type: ignore[attr-defined]
