from __future__ import annotations

import time

import pytest

from runtime.pulse import AT_BARRIER, IDLE, WORKING, Pulse, Watch


@pytest.fixture
def pulse() -> Pulse:
    return Pulse(Pulse.create(3), 3)


def watch(pulse: Pulse) -> Watch:
    return Watch(pulse, 3, longest_silence_s=0.05, no_beat_s=60.0)


def test_all_is_well_while_ranks_progress(pulse: Pulse) -> None:
    eye = watch(pulse)
    for _ in range(5):
        time.sleep(0.02)
        for rank in range(3):
            pulse.report(rank, (rank + 1) % 3)
        assert eye.culprit() is None


def test_a_rank_that_works_without_progress_is_named(pulse: Pulse) -> None:
    for rank, state in enumerate((1, WORKING, 1)):
        pulse.report(rank, state)
    eye = watch(pulse)
    time.sleep(0.1)
    assert eye.culprit() == (1, "no progress for 0 s")


def test_when_all_wait_the_one_that_is_waited_for_is_named(pulse: Pulse) -> None:
    """Rank 0 waits longest, and for rank 2, which waits for rank 1."""
    pulse.report(0, 2)
    eye = watch(pulse)
    eye.culprit()
    time.sleep(0.02)
    pulse.report(1, 0)
    pulse.report(2, 1)
    eye.culprit()
    time.sleep(0.1)
    rank, reason = eye.culprit() or (None, "")
    assert rank == 2
    assert reason.startswith("rank 0 waits for it since")


def test_who_is_missing_at_a_barrier_is_named(pulse: Pulse) -> None:
    for rank, state in enumerate((AT_BARRIER, AT_BARRIER, WORKING)):
        pulse.report(rank, state)
    eye = watch(pulse)
    time.sleep(0.1)
    assert (eye.culprit() or (None,))[0] == 2


def test_idle_ranks_are_not_blamed(pulse: Pulse) -> None:
    for rank in range(3):
        pulse.report(rank, IDLE)
    eye = watch(pulse)
    time.sleep(0.1)
    assert eye.culprit() is None


def test_a_process_without_beat_is_named(pulse: Pulse) -> None:
    eye = Watch(pulse, 3, longest_silence_s=60.0, no_beat_s=0.3)
    pulse.beat(0)
    pulse.beat(2)
    time.sleep(0.6)
    culprit = eye.culprit()
    time.sleep(0.01)
    assert culprit is None or culprit[0] == 1
    time.sleep(0.3)
    assert (eye.culprit() or (None,))[0] == 1
