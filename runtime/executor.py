"""The executor: runs one rank's part of a schedule over a transport and records what happened.

All blocks of a rank live in one buffer, in the order of their numbers; for AllGather that is the gathered result.
How the steps are walked is in `runtime.walks`.
"""

from __future__ import annotations

import numpy as np
import torch

from runtime.host import BusyShare
from runtime.records import RankRecord
from runtime.transport import Message, Transport
from runtime.walks import Progress, Row, Traffic, Walk, WalkByLanes, WalkBySteps
from tasp_lab.errors import RunError
from tasp_lab.schedule import Schedule, Step


def _no_progress(_: int) -> None:
    pass


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
        self._transport, self._progress = transport, progress
        self._lanes, self._steps = schedule.lanes, len(schedule.steps)
        self._offsets = np.concatenate([[0], np.cumsum(schedule.block_bytes)])
        self._buffer = torch.zeros(int(self._offsets[-1]), dtype=torch.uint8, device=device)
        self._initial = np.flatnonzero(schedule.initial[rank]).tolist()
        self._final = np.flatnonzero(schedule.final[rank]).tolist()
        self._sends: list[Row] = []
        self._receives: list[Row] = []
        for index, step in enumerate(schedule.steps):
            self._sends += _rows(index, step, step.source == rank, step.destination)
            self._receives += _rows(index, step, step.destination == rank, step.source)

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

    def prepare(self) -> None:
        """Post the receives that come first; when all ranks have, each finds a receiver ready for what it sends."""
        self._traffic = Traffic(self.rank, self._transport, self._message, self._progress)
        self._walk = self._new_walk()
        self._walk.prepare()

    def run(self) -> RankRecord:
        """Execute the rank's part once, after `prepare`; times count from the call."""
        traffic, busy = self._traffic, BusyShare()
        traffic.begin()
        self._walk.run()
        traffic.finish_sends()
        return RankRecord(self.rank, traffic.now(), busy.so_far(), tuple(traffic.sent), tuple(traffic.received))

    def _new_walk(self) -> Walk:
        if self._transport.whole_steps:
            return WalkBySteps(self._traffic, self._sends, self._receives, self._steps)
        held, ahead = set(self._initial), self._transport.receives_ahead
        return WalkByLanes(self._traffic, self._sends, self._receives, held, ahead)

    def _message(self, row: Row) -> Message:
        return Message(row.peer, row.step * self._lanes + row.lane, self._block(row.block))

    def _block(self, block: int) -> torch.Tensor:
        return self._buffer[self._offsets[block] : self._offsets[block + 1]]


def _rows(index: int, step: Step, mine: np.ndarray, peers: np.ndarray) -> list[Row]:
    """The messages of a step that concern one rank, lane by lane."""
    columns = (peers[mine].tolist(), step.lane[mine].tolist(), step.block[mine].tolist())
    return sorted(
        (Row(index, lane, peer, block) for peer, lane, block in zip(*columns, strict=True)), key=lambda r: r.lane
    )


def test_pattern(block: int, size_bytes: int) -> torch.Tensor:
    """The bytes of a block in a test run: pseudo-random, the same on every rank, different for every block."""
    generator = np.random.Generator(np.random.Philox(key=block))
    return torch.from_numpy(generator.integers(0, 256, size_bytes, dtype=np.uint8))


test_pattern.__test__ = False  # type: ignore[attr-defined]
