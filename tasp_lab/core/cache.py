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
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasp_lab.core.errors import OutputError, QuantityError
from tasp_lab.core.files import write_whole
from tasp_lab.core.units import parse_size_bytes

LIMIT, DEFAULT_LIMIT = "TASP_LAB_CACHE_SIZE", "1GiB"
"""The environment variable with the most bytes of a shelf, or 0 to keep nothing; and ten comparisons on 32 GPUs."""

_SUFFIX, _DIGEST_BYTES = ".kept", 32

_SLACK = 1 / 16
"""The share of a limit by which files may exceed it for a while: to look through thousands of them takes 20 ms."""

_unseen_bytes: dict[Path, float] = {}
"""By folder what this process has written there since it last looked through all files; it begins by looking."""


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


@dataclass(frozen=True)
class Shelf:
    """Objects in the files of a folder, which several processes use at once.

    Beyond a limit, and up to a sixteenth more for a while, those are removed whose last use was longest ago.
    """

    name: str

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return cache_folders()[0] / self.name

    @property
    def limit_bytes(self) -> int:
        """The most bytes of all files. Raises `QuantityError` where the environment has no size."""
        text = os.environ.get(LIMIT) or DEFAULT_LIMIT
        try:
            return 0 if text == "0" else parse_size_bytes(text)
        except QuantityError as error:
            raise QuantityError(f"{LIMIT}: {error}, or 0 to keep nothing") from None

    def files(self) -> list[tuple[int, int, Path]]:
        """The last use of each file in ns since 1970, in this order, its bytes and path."""
        files = []
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                with suppress(OSError):  # another process has removed it
                    if entry.name.endswith((_SUFFIX, ".tmp")):  # or left half written by an interrupted process
                        files.append((entry.stat().st_mtime_ns, entry.stat().st_size, Path(entry.path)))
        return sorted(files)

    def read(self, name: str) -> Any:
        """The object of this name, which counts as used now; None if there is none."""
        content = read_kept([self.folder], name + _SUFFIX) if self.limit_bytes else None
        with suppress(OSError):
            os.utime(self.folder / (name + _SUFFIX))
        return None if content is None else pickle.loads(content)

    def keep(self, objects: Iterable[tuple[str, object]]) -> None:
        """Write objects by name, but for one that alone exceeds the limit, and remove what is too much."""
        if not (limit_bytes := self.limit_bytes):
            return
        for name, value in objects:
            file = io.BytesIO()
            pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
            pickler.dispatch_table = {**copyreg.dispatch_table, np.ndarray: _reduce}
            pickler.dump(value)
            if file.tell() <= limit_bytes:
                keep([self.folder], name + _SUFFIX, file.getvalue())
                _unseen_bytes[self.folder] = _unseen_bytes.get(self.folder, inf) + file.tell()
        if _unseen_bytes.get(self.folder, 0) > _SLACK * limit_bytes:
            _unseen_bytes[self.folder] = 0
            with suppress(OSError):
                self.shrink(limit_bytes)

    def shrink(self, most_bytes: int) -> None:
        """Remove files until the rest has at most so many bytes. Raises `OSError` for one that stays."""
        files = self.files()
        rest_bytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if rest_bytes > most_bytes:
                path.unlink(missing_ok=True)
                rest_bytes -= size


# Arrays in files. Most have numbers that need one or two of eight bytes: files take a third of the bytes.

_FEW = 256
"""Elements of an array that is written as it is: narrow numbers would take longer to find than to write."""

_NARROW = [(np.dtype(each), int(np.iinfo(each).min), int(np.iinfo(each).max)) for each in ("u1", "i2", "i4")]
"""Types that take fewer bytes, with their first and last numbers."""

_Array = npt.NDArray[Any]
_Dtype = np.dtype[Any]
_Shape = tuple[int, ...]


def _reduce(values: _Array) -> Any:
    """What makes an array again; one that cannot change will not be able to, either."""
    if values.dtype.hasobject or (values.size < _FEW and values.flags.writeable):
        return values.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    # axes that repeat, as `numpy.broadcast_to` makes them, are written once
    repeats = 0 in values.strides
    once = values[tuple(slice(0, 1) if each == 0 else slice(None) for each in values.strides)] if repeats else values
    if once.size < _FEW and once.shape == values.shape:
        return np.ndarray, (values.shape, values.dtype, values.tobytes())
    flat = stored = once.ravel()
    if flat.dtype.kind == "i" and len(flat):
        low, high = flat.min(), flat.max()
        narrow = next((each for each, least, most in _NARROW if least <= low and high <= most), flat.dtype)
        stored = flat.astype(narrow, copy=False)
    form = stored.dtype, values.dtype, once.shape, values.shape, values.flags.writeable
    return _restore, (stored.tobytes(), *form)


def _restore(data: bytes, stored: _Dtype, dtype: _Dtype, once: _Shape, shape: _Shape, is_writeable: bool) -> _Array:
    """The array of a `dtype` whose values were `stored` as another one, without axes that repeat."""
    flat: _Array = np.frombuffer(data, stored)
    if stored != dtype or is_writeable:
        flat = flat.astype(dtype)
    if not is_writeable and flat.flags.writeable:  # see `tasp_lab.core.arrays.frozen`
        flat = np.frombuffer(flat.tobytes(), dtype)
    return flat.reshape(once) if once == shape else np.broadcast_to(flat.reshape(once), shape)
