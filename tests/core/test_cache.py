"""Files that are kept for later processes: whole or missing, within a limit, and used by several processes at once."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.cache import LIMIT, Shelf, cache_folders, digest_of_sources, keep, read_kept
from tasp_lab.core.errors import QuantityError

SHELF = Shelf("objects")

EDGES = (0, 255, 256, -1, 2**15 - 1, 2**15, -(2**15) - 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63))
"""The first and last numbers of types of arrays."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty folder of the shelf, which takes 1 MiB."""
    monkeypatch.setenv("TASP_LAB_CACHE", str(tmp_path))
    monkeypatch.setenv(LIMIT, "1MiB")
    return tmp_path / "objects"


def again(value: object) -> object:
    """An object after it has been written and read."""
    SHELF.keep([("value", value)])
    return SHELF.read("value")


@given(st.lists(st.sampled_from(EDGES), min_size=1, max_size=4), st.sampled_from([1, 300]), st.booleans())
def test_whole_numbers_come_back(numbers: list[int], times: int, are_mutable: bool) -> None:
    values = np.array(numbers * times, dtype=np.int64).reshape(times, -1)
    values.flags.writeable = are_mutable
    read = again(values)
    assert isinstance(read, np.ndarray)
    assert (read.dtype, read.shape) == (values.dtype, values.shape)
    assert read.tolist() == values.tolist()
    assert read.flags.writeable == are_mutable


@pytest.mark.parametrize("count", [0, 1, 7, 1001])
@pytest.mark.parametrize("dtype", ["?", "u1", "i4", "i8", "f8", "i4,i4,i4", "i4,f8", "i2,i4", "U3"])
def test_arrays_of_all_types_come_back(dtype: str, count: int) -> None:
    values = (np.arange(count) * 5 % 7).astype(dtype)
    padded = values.astype(np.dtype(dtype, align=True))
    for each in (values, padded, values[::-1], values[::3], values[:, None], values[:0]):
        read = again(each)
        assert isinstance(read, np.ndarray)
        assert (read.dtype, read.shape) == (each.dtype, each.shape)
        assert read.dtype.isalignedstruct == each.dtype.isalignedstruct
        assert read.tolist() == each.tolist()


def test_axes_that_repeat_come_back_and_take_no_space(folder: Path) -> None:
    read = again(np.broadcast_to(np.arange(1000), (1000, 1000)))
    assert isinstance(read, np.ndarray)
    assert (read == np.arange(1000)).all()
    assert read.shape == (1000, 1000)
    assert SHELF.files()[0][1] < 10_000


@pytest.mark.parametrize("count", [3, 1000])
def test_arrays_that_cannot_change_cannot_afterwards(count: int) -> None:
    values = np.ndarray(count, np.int64, bytes(8 * count))
    for each in (values, values.astype(bool), values > 0):
        each.flags.writeable = False
        read = again(each)
        assert isinstance(read, np.ndarray)
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            read.flags.writeable = True


@given(st.integers(0, 80), st.integers(0, 255))
def test_what_is_cut_short_or_changed_is_missing(place: int, byte: int) -> None:
    SHELF.keep([("value", "some text of more than a few characters")])
    ((_, _, path),) = SHELF.files()
    content = path.read_bytes()
    place = min(place, len(content) - 1)
    for broken in (content[:place], content[:place] + bytes([content[place] ^ (byte or 1)]) + content[place + 1 :]):
        path.write_bytes(broken)
        assert SHELF.read("value") is None
    path.write_bytes(content)
    assert SHELF.read("value") == "some text of more than a few characters"


def test_without_a_folder_nothing_is_kept_and_nothing_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TASP_LAB_CACHE", str(tmp_path / "file"))
    assert again(1) is None
    SHELF.shrink(0)
    assert SHELF.files() == []


def test_the_next_folder_is_taken_where_the_first_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = [tmp_path / "file" / "a", tmp_path / "b"]
    keep(folders, "name", b"content")
    assert read_kept(folders, "name") == b"content"
    assert read_kept(folders[:1], "name") is None


def test_folders_are_given_or_beside_a_package_or_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folders() == cache_folders(tmp_path / "package") == [tmp_path]
    monkeypatch.delenv("TASP_LAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folders() == [tmp_path / "tasp-lab"]
    assert cache_folders(Path("package")) == [Path("package/__pycache__"), tmp_path / "tasp-lab"]


def test_those_go_whose_last_use_was_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "3500")
    for number, name in enumerate("abc"):
        SHELF.keep([(name, bytes(1000))])
        os.utime(SHELF.folder / f"{name}.kept", (number, number))
    assert [path.stem for _, _, path in SHELF.files()] == ["a", "b", "c"]
    assert SHELF.read("a") is not None
    SHELF.keep([("d", bytes(1000))])
    assert [path.stem for _, _, path in SHELF.files()] == ["c", "a", "d"]
    assert sum(size for _, size, _ in SHELF.files()) <= 3500
    assert [SHELF.read(name) is None for name in "abcd"] == [False, True, False, False]


def test_many_files_are_looked_through_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first, then after each sixteenth of the limit: so files exceed it by no more."""
    looked, files = list[int](), Shelf.files
    monkeypatch.setattr(Shelf, "files", lambda self: looked.append(1) or files(self))  # type: ignore[func-returns-value]
    for number in range(200):
        SHELF.keep([(str(number), bytes(10_000))])
    assert len(looked) == 1 + 199 // 7, "64 KiB are more than six of them"
    assert sum(size for _, size, _ in files(SHELF)) <= 2**20 * 17 / 16 + 10_100


def test_what_alone_exceeds_the_limit_is_not_kept_and_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "3500")
    SHELF.keep([("small", bytes(1000)), ("large", bytes(4000))])
    assert [path.stem for _, _, path in SHELF.files()] == ["small"]


def test_with_a_limit_of_zero_nothing_is_kept_or_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert again(1) == 1
    monkeypatch.setenv(LIMIT, "0")
    assert SHELF.read("value") is None
    SHELF.keep([("other", 1)])
    assert [path.stem for _, _, path in SHELF.files()] == ["value"]


def test_a_limit_that_is_no_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(QuantityError, match="TASP_LAB_CACHE_SIZE: size 'much': expected a number and a unit"):
        SHELF.read("value")


def test_only_files_of_a_shelf_are_removed(folder: Path) -> None:
    SHELF.keep([("value", 1)])
    (folder / ".tasp-lab-0.tmp").write_bytes(b"half")  # as an interrupted process leaves it
    (folder / "notes.txt").write_text("of the user")
    assert len(SHELF.files()) == 2
    SHELF.shrink(0)
    assert [each.name for each in folder.iterdir()] == ["notes.txt"]


def test_the_digest_of_sources_depends_on_each_file(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    digests = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("inner/b.py", "2"), ("inner/b.py", "3")):
        (tmp_path / name).write_text(text)
        digests.add(digest_of_sources.__wrapped__(tmp_path))
    (tmp_path / "notes.txt").write_text("no source")
    assert digest_of_sources.__wrapped__(tmp_path) in digests
    assert len(digests) == 4


def _use(number: int) -> None:
    """Write and read the same names as others, most of which do not fit."""
    for turn in range(60):
        name = f"{turn * (number + 1) % 7}"
        assert SHELF.read(name) in (None, name * 1000)
        SHELF.keep([(name, name * 1000)])


def test_processes_that_write_and_remove_at_once_read_whole_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "4000")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_use, args=(number,)) for number in range(3)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0, 0, 0]
    SHELF.keep([("last", 1)])
    assert sum(size for _, size, _ in SHELF.files()) <= 4000
    assert SHELF.read("last") == 1
