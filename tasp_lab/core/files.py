"""Atomic file writes.

The content is written to a temporary file in the same folder, flushed to disk, and then renamed, so readers never see a
partial file. A failure leaves the old file, if any, unchanged and no temporary file behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from tasp_lab.core.errors import OutputError

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
"""File name suffixes of the supported picture formats."""


def check_picture_name(path: Path) -> None:
    """Raise `OutputError` unless the name ends in one of `PICTURE_SUFFIXES`, case-insensitively."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise OutputError(f"cannot write {_on_one_line(path)}: expected a name that ends in .png, .svg or .pdf")


def write_whole(path: Path, content: bytes, *, flush: bool = True) -> None:
    """Write `content` to `path` atomically, replacing an existing file and following symbolic links.

    Without `flush` a crash of the system may leave another content.

    Raises `OutputError`, with path and reason on one line, on failure; no partial file remains.
    """
    with _named_errors(path):
        target = _regular_target(path)
        temporary = _create_temporary(target.parent)
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            _remove(temporary)
            raise


def file_sha256(name: str | None) -> str:
    """The hash of the file that a text names, so that an edited file is seen; empty if there is no such file.

    >>> file_sha256("h100-8"), file_sha256(None)
    ('', '')
    """
    if not isinstance(name, str) or not os.path.isfile(name):
        return ""
    with contextlib.suppress(OSError):  # the reader of its content raises the error
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    return ""


def make_folder(path: Path) -> None:
    """Make a folder unless it is there. Raises `OutputError`, with path and reason on one line, on failure."""
    with _named_errors(path):
        path.mkdir(exist_ok=True)


def check_writable(path: Path) -> None:
    """Check that `path` can be written, before long work whose result goes there.

    Raises `OutputError` if the folder does not exist, is not a folder or is not writable, or if `path` exists and is
    not a regular file. The folder is tested with an empty file that is removed at once.
    """
    with _named_errors(path):
        target = _regular_target(path)
        _remove(_create_temporary(target.parent))


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {_on_one_line(path)}: {error.strerror or error}") from error


def _on_one_line(path: Path) -> str:
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _regular_target(path: Path) -> Path:
    """The resolved path. A device or folder must not be replaced by a file."""
    target = Path(os.path.realpath(path))
    if not target.parent.exists():
        raise OutputError(f"cannot write {_on_one_line(path)}: its folder does not exist")
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(target).st_mode
        if stat.S_ISDIR(mode):
            raise OutputError(f"cannot write {_on_one_line(path)}: it is a folder")
        if not stat.S_ISREG(mode):
            raise OutputError(f"cannot write {_on_one_line(path)}: it is not a regular file")
    return target


def _create_temporary(folder: Path) -> Path:
    """A new empty file in `folder` with a unique name and default permissions."""
    temporary = folder / f".tasp-lab-{secrets.token_hex(8)}.tmp"
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return temporary


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
