"""Files that are made once and read by later processes: machine code, and schedules that were built and proved.

    content = read_kept(folders, "engine-3f2a.o")
    keep(folders, "engine-3f2a.o", content)
    shelf = Shelf("schedules")                  # many files, of which the last ones that were used stay
    shelf.keep([("3f2a", passes)])
    passes = shelf.read("3f2a")

A name has a digest of all that its content follows from. A file begins with a digest of its content: one that was cut
short, or that something else has written, counts as missing. Without a folder that can be written nothing is kept.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import os
import pickle
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tasp_lab.core.errors import OutputError, QuantityError
from tasp_lab.core.files import TEMPORARY_SUFFIX, write_whole
from tasp_lab.core.units import parse_size_bytes

LIMIT = "TASP_LAB_CACHE_SIZE"
"""The environment variable with the most bytes of a shelf, a size such as ``4GiB``; with 0 nothing is kept there."""

DEFAULT_LIMIT = "1GiB"
"""Schedules of some ten comparisons on 32 GPUs."""

_DIGEST_BYTES = 32


def read_kept(folders: Iterable[Path], name: str) -> memoryview | None:
    """The content of the first whole file of this name; None if there is none."""
    for folder in folders:
        with suppress(OSError):
            content = memoryview((folder / name).read_bytes())
            if hashlib.sha256(content[_DIGEST_BYTES:]).digest() == content[:_DIGEST_BYTES]:
                return content[_DIGEST_BYTES:]
    return None


def keep(folders: Iterable[Path], name: str, content: bytes) -> None:
    """Write a file into the first of these folders that can be written."""
    for folder in folders:
        with suppress(OSError, OutputError):
            folder.mkdir(parents=True, exist_ok=True)
            # a file that a crash of the system left half written has another digest
            write_whole(folder / name, hashlib.sha256(content).digest() + content, flush=False)
            return


def cache_folders(package: Path | None = None) -> list[Path]:
    """Where files are kept: ``TASP_LAB_CACHE``, beside a package, or in the cache of the user."""
    given = os.environ.get("TASP_LAB_CACHE")
    users = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tasp-lab"
    return [Path(given)] if given else [users] if package is None else [package / "__pycache__", users]


@cache
def digest_of_sources(*packages: Path) -> str:
    """The digest of all Python files of packages, and of what else decides how objects of theirs are read."""
    digest = hashlib.sha256(repr((sys.version_info, np.__version__, sys.byteorder)).encode())
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SUFFIX = ".kept"


class KeptFile(NamedTuple):
    """A file of a shelf: when it was used, in nanoseconds since 1970, and its size."""

    used_ns: int
    bytes: int
    path: Path


class Shelf:
    """Objects in files of one folder, which several processes use at once.

    Beyond a limit those are removed whose last use was longest ago.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return cache_folders()[0] / self._name

    @property
    def limit_bytes(self) -> int:
        """The most bytes of all files. Raises `QuantityError` where the environment has no size."""
        text = os.environ.get(LIMIT, "") or DEFAULT_LIMIT
        try:
            return 0 if text == "0" else parse_size_bytes(text)
        except QuantityError as error:
            raise QuantityError(f"{LIMIT}: {error}, or 0 to keep nothing") from None

    def files(self) -> list[KeptFile]:
        """The files, those first whose last use was longest ago; with what interrupted processes left half written."""
        files = []
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                if entry.name.endswith((_SUFFIX, TEMPORARY_SUFFIX)):
                    with suppress(OSError):  # another process has removed it
                        state = entry.stat()
                        files.append(KeptFile(state.st_mtime_ns, state.st_size, Path(entry.path)))
        return sorted(files)

    def read(self, name: str) -> Any:
        """The object of this name, which counts as used now; None if there is none."""
        content = read_kept([self.folder], name + _SUFFIX) if self.limit_bytes else None
        if content is None:
            return None
        with suppress(OSError):
            os.utime(self.folder / (name + _SUFFIX))
        return pickle.loads(content)

    def keep(self, objects: Iterable[tuple[str, object]]) -> None:
        """Write objects by name, but for one that alone exceeds the limit, and remove what is too much."""
        if not (limit_bytes := self.limit_bytes):
            return
        for name, value in objects:
            file = io.BytesIO()
            pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
            pickler.dispatch_table = _REDUCERS
            pickler.dump(value)
            if file.tell() <= limit_bytes:
                keep([self.folder], name + _SUFFIX, file.getvalue())
        with suppress(OSError):
            self.shrink(limit_bytes)

    def shrink(self, most_bytes: int) -> list[KeptFile]:
        """Remove files until the rest has at most so many bytes; returns them. Raises `OSError` for one that stays."""
        files, removed = self.files(), []
        total = sum(each.bytes for each in files)
        for each in files:
            if total <= most_bytes:
                break
            each.path.unlink(missing_ok=True)
            total -= each.bytes
            removed.append(each)
        return removed


# Arrays in files. Most have numbers that need one or two of eight bytes: files take a third of the bytes.

_FEW = 256
"""Elements of an array that is written as it is: narrow numbers would take longer to find than to write."""

_NARROW = [(np.dtype(each), int(np.iinfo(each).min), int(np.iinfo(each).max)) for each in ("u1", "i2", "i4")]
"""Types that take fewer bytes, with their first and last numbers."""


def _reduce(values: np.ndarray[Any, Any]) -> Any:
    """What makes an array again; one that cannot change will not be able to, either."""
    if values.dtype.hasobject or (values.size < _FEW and values.flags.writeable):
        return values.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    # axes that repeat, as `numpy.broadcast_to` makes them, are written once
    repeats = 0 in values.strides
    once = values[tuple(slice(0, 1) if each == 0 else slice(None) for each in values.strides)] if repeats else values
    if once.size < _FEW and once.shape == values.shape:
        return np.ndarray, (values.shape, values.dtype, values.tobytes())
    flat, kinds = once.ravel(), {each[0] for each in (values.dtype.fields or {}).values()}
    if len(kinds) == 1 and sum(each.itemsize for each in kinds) * len(values.dtype) == values.itemsize:
        flat = flat.view(*kinds)  # records of equal fields
    stored = np.packbits(flat) if flat.dtype == np.bool_ else _narrowed(flat)
    form = flat.dtype, values.dtype, once.shape, values.shape, values.flags.writeable
    return _restore, (stored.tobytes(), stored.dtype, *form)


def _narrowed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers of one dimension in a narrower type that has them all, if there is one."""
    if values.dtype.kind == "i" and len(values):
        low, high = values.min(), values.max()
        for narrow, least, most in _NARROW:
            if narrow.itemsize < values.itemsize and least <= low and high <= most:
                return values.astype(narrow)
    return values


def _restore(
    data: bytes,
    stored: np.dtype[Any],
    kind: np.dtype[Any],
    dtype: np.dtype[Any],
    once: tuple[int, ...],
    shape: tuple[int, ...],
    is_writeable: bool,
) -> np.ndarray[Any, Any]:
    """The array whose numbers of a `kind` were `stored` in another type, without axes that repeat."""
    flat = np.frombuffer(data, stored)
    if kind == np.bool_:
        flat = np.unpackbits(flat, count=prod(once)).view(np.bool_)
    elif stored != kind or is_writeable:
        flat = flat.astype(kind)
    if not is_writeable and flat.flags.writeable:  # see `tasp_lab.core.arrays.frozen`
        flat = np.frombuffer(flat.tobytes(), kind)
    values = flat.view(dtype).reshape(once)
    return values if once == shape else np.broadcast_to(values, shape)


_REDUCERS = {**copyreg.dispatch_table, np.ndarray: _reduce}
