"""Files that are written whole or not at all.

A reader never meets half a file: the content goes to a temporary file in the same folder, down to the disk, and only
then takes the name. Whatever fails before that leaves the old file, or none, and nothing else behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from tasp_lab.errors import OutputError


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path`, replacing a file of that name and following a link to one.

    Raises `OutputError`, with path and reason in one line, if it cannot be done; nothing is left behind then.
    """
    with _named_errors(path):
        target = _regular_target(path)
        temporary = _create_temporary(target.parent)
        try:
            _write_to_disk(temporary, content)
            os.replace(temporary, target)
        except BaseException:
            _remove(temporary)
            raise


def check_writable(path: Path) -> None:
    """Find out before long work whether `path` can be written at its end.

    Raises `OutputError` if the folder is missing, is no folder or cannot be written to, or if `path` is a folder or
    another thing that is no regular file. The folder is tried with an empty file that is removed at once.
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
    """Where `path` leads. A device or a folder of that name must not be replaced by a file."""
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
    """An empty file with the permissions of any new file, under a name of its own in `folder`."""
    temporary = folder / f".tasp-lab-{secrets.token_hex(8)}.tmp"
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return temporary


def _write_to_disk(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
