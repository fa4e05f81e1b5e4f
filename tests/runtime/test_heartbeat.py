"""Who hangs, by a clock that the test sets."""

from __future__ import annotations

import time

import pytest

from runtime.protocol.heartbeat import AT_BARRIER, IDLE, WORKING, Heartbeat, Watchdog


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def heartbeat() -> Heartbeat:
    return Heartbeat(Heartbeat.create(3), 3)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch(heartbeat: Heartbeat, clock: Clock, no_beat_s: float = 1e9) -> Watchdog:
    """Ranks may be silent for 10 s; that they do not beat counts where it is asked for only."""
    return Watchdog(heartbeat, 3, longest_silence_s=10.0, no_beat_s=no_beat_s, clock=clock)


def test_all_is_well_while_ranks_progress(heartbeat: Heartbeat, clock: Clock) -> None:
    eye = watch(heartbeat, clock)
    for _ in range(5):
        clock.now_s += 9.0
        for rank in range(3):
            heartbeat.report(rank, (rank + 1) % 3)
        assert eye.failed_rank() is None


@pytest.mark.parametrize("silent_s", [10.0, 10.5])
def test_a_rank_that_works_without_progress_is_named(heartbeat: Heartbeat, clock: Clock, silent_s: float) -> None:
    """Though it beats: a thread of its process goes on while it computes for ever."""
    for rank, state in enumerate((1, WORKING, 1)):
        heartbeat.report(rank, state)
    eye = watch(heartbeat, clock)
    clock.now_s += silent_s
    for rank in range(3):
        heartbeat.show_life(rank)
    assert eye.failed_rank() == (None if silent_s == 10.0 else (1, "no progress for 10 s"))


def test_when_all_wait_the_one_that_is_waited_for_is_named(heartbeat: Heartbeat, clock: Clock) -> None:
    """Rank 0 waits longest, and for rank 2, which waits for rank 1."""
    heartbeat.report(0, 2)
    eye = watch(heartbeat, clock)
    assert eye.failed_rank() is None
    clock.now_s += 5.0
    heartbeat.report(1, 0)
    heartbeat.report(2, 1)
    assert eye.failed_rank() is None
    clock.now_s += 8.0  # rank 0 has been silent for 13 s, the others for 8
    assert eye.failed_rank() is None
    clock.now_s += 4.0
    assert eye.failed_rank() == (2, "rank 0 has been waiting for it for 17 s")


def test_who_is_missing_at_a_barrier_is_named(heartbeat: Heartbeat, clock: Clock) -> None:
    for rank, state in enumerate((AT_BARRIER, AT_BARRIER, WORKING)):
        heartbeat.report(rank, state)
    eye = watch(heartbeat, clock)
    clock.now_s += 11.0
    assert (eye.failed_rank() or (None,))[0] == 2


def test_idle_ranks_are_not_blamed(heartbeat: Heartbeat, clock: Clock) -> None:
    for rank in range(3):
        heartbeat.report(rank, IDLE)
    eye = watch(heartbeat, clock)
    clock.now_s += 11.0
    assert eye.failed_rank() is None


def test_a_process_without_beat_is_named(heartbeat: Heartbeat, clock: Clock) -> None:
    eye = watch(heartbeat, clock, no_beat_s=5.0)
    for _ in range(2):
        clock.now_s += 3.0
        for rank in (0, 2):
            heartbeat.show_life(rank)
        named = eye.failed_rank()
    assert named == (1, "no heartbeat for 5 s")


def test_a_process_that_beats_shows_life_by_itself(heartbeat: Heartbeat) -> None:
    heartbeat.beat(0)
    while heartbeat.row(0)[0] < 2:
        time.sleep(0.01)
    assert [heartbeat.row(rank)[0] for rank in (1, 2)] == [0, 0]
