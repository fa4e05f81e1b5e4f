"""What ranks of a check tell each other through the store: data of known types, and no code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import msgspec
import pytest

from runtime.ranks.watch import CheckedGroup, End, Watch
from tests.gpu.hardware import RankInventory


class Shared:
    """A store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def groups(store: Shared) -> list[CheckedGroup]:
    """Two ranks with this store."""
    found = []
    for rank in range(2):
        group = object.__new__(CheckedGroup)
        group.rank, group.world_size, group.store, group._told = rank, 2, store, 0
        found.append(group)
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.5, 2.5),
        (RankInventory(0, "a", "GPU", peers_without_access=(1, 2)), RankInventory(1, "b")),
        ([("sendrecv", 8, 1e-6)], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ranks_have_the_values_of_all(one: object, other: object) -> None:
    first, second = groups(Shared())
    second.store.set(second_key := "gpu-check/told/1/1", msgspec.msgpack.encode(other))
    assert first.gather(one) == [one, other]
    assert second_key in first.store.values  # type: ignore[attr-defined]
    told = second.gather(other)
    assert told[1] == other
    assert type(told[0]) is type(one)


class Hostile:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_the_store_is_not_run(tmp_path: Path) -> None:
    store, made = Shared(), tmp_path / "made"
    first, _ = groups(store)
    store.set("gpu-check/told/1/1", pickle.dumps(Hostile(made)))
    with pytest.raises(msgspec.DecodeError):
        first.gather(1.5)
    watch = Watch(0, 2, lambda end: None)
    watch.connect(store)
    store.set("gpu-check/failed/1", pickle.dumps(Hostile(made)))
    assert watch._first_failure() == End("failed", "rank 1: failed, and its message cannot be read")
    assert not made.exists()


def test_the_first_failure_is_told_with_the_others() -> None:
    store = Shared()
    watch = Watch(0, 3, lambda end: None)
    watch.connect(store)
    store.set("gpu-check/failed/2", msgspec.msgpack.encode((1.0, "too hot")))
    store.set("gpu-check/failed/1", msgspec.msgpack.encode((2.0, "lost rank 2")))
    assert watch._first_failure() == End("failed", "rank 2: too hot; then rank 1: lost rank 2")
