"""Code of users that registers and builds schedules, from a file or a package: it is run with care.

    tasp-lab predict torus:4x4 --schedule mine.py:bidirectional --schedule ring --shard-bytes 4MiB

The name ``mine.py:bidirectional`` is the schedule that ``mine.py`` registers as ``bidirectional``, by the decorator of
this package's schedules. A split follows: ``mine.py:startrail:2x2``. A name contains its file, so it means the
same in every process that has the file, and a file whose content changes is run again. Files of one name in different
folders are different modules. A file imports what is installed, not files beside it, so its content is all there is.

What user code prints goes to stderr, as stdout is for results. Errors become a `ScheduleError` with the line of the
file. Code that runs for too long is stopped: no count of work can stop an endless loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from tasp_lab.core.errors import QuantityError, ScheduleError, TaspLabError, first_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "tasp_lab.schedules"
"""The group of entry points by which an installed package offers schedules, each under its own name."""

READERS = (".xml", ".json")
"""Ends of names of files that are schedules: of other tools, which a package above reads, and of `tasp-lab search`."""

LIMIT_S = 60.0
"""Processor time that user code may take at once, in seconds; the variable `LIMIT` sets another one."""

LIMIT = "TASP_LAB_BUILD_LIMIT_S"

WAITING = 10
"""How many times as long user code may take by the clock: on a loaded machine, or asleep."""


def parts_of(name: str) -> tuple[str, list[str]]:
    """The schedule or family of a name, with its file, and what follows after colons.

    >>> parts_of("usp:2x4:tasp"), parts_of("my/trail.py:startrail:2x2")
    (('usp', ['2x4', 'tasp']), ('my/trail.py:startrail', ['2x2']))
    """
    file = file_of(name) if ".py:" in name else ""
    own, *parts = name[len(file) :].removeprefix(":").split(":")
    return f"{file}:{own}" if file else own, parts


def file_of(name: str) -> str:
    """The file that a name contains; empty for a name without one.

    >>> file_of("my/trail.py:startrail:2x2"), file_of("taccl.xml"), file_of("ring")
    ('my/trail.py', 'taccl.xml', '')
    """
    file, extension, _ = name.partition(".py:")
    return file + ".py" if extension else name if name.endswith((".py", *READERS)) else ""


def names_in(name: str) -> list[str]:
    """The names that a plus joins, as in one of a hybrid; a plus in the path of a file that is there joins none.

    >>> names_in("lasp-2+usp:2x4"), names_in("my.py:scan+my.py:rows")
    (['lasp-2', 'usp:2x4'], ['my.py:scan', 'my.py:rows'])
    """
    parts, found = name.split("+"), []
    while parts:
        for count in reversed(range(1, len(parts) + 1)):
            joined = "+".join(parts[:count])
            file = file_of(joined)
            if count == 1 or ("+" in file and "+" not in joined[len(file) :] and Path(file).is_file()):
                break
        found.append(joined)
        parts = parts[count:]
    return found


def content_name(name: str) -> str:
    """A name with the content of its file in place of where the file is; any other name as it is.

    A hybrid may have two files. A file that cannot be read has no content, and building its schedule says so.
    """

    def with_content(each: str) -> str:
        file = file_of(each)
        path = Path(file)
        if not file or not path.is_file():
            return each
        return f"{path.name}:{each[len(file) + 1 :]} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"

    return "+".join(map(with_content, names_in(name)))


def beside(name: str, folder: Path) -> str:
    """A name with a relative file as seen from a folder, if it is there; as it is otherwise."""
    file = file_of(name)
    there = folder / file
    return os.path.relpath(there) + name[len(file) :] if file and there.is_file() else name


def module_of(file: str) -> str:
    """The name of the module of a file with its present content. Raises `ScheduleError` if it cannot be read."""
    return f"{Path(file).stem}_{_digest(file)}"


def _digest(file: str) -> str:
    return hashlib.sha256(str(Path(file).resolve()).encode() + b"\0" + _content(file)).hexdigest()[:16]


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ScheduleError(f"{file}: {error.strerror}, expected a Python file that registers schedules") from None


def run_file(file: str, name: str) -> None:
    """Run a file as a module of this name. Raises `ScheduleError`."""
    module = ModuleType(name)
    module.__file__ = str(Path(file).resolve())
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with careful(file, file):
            exec(compile(_content(file), file, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise


def load_entry_point(name: str) -> bool:
    """Import what an installed package offers under a name; whether there is such a package. Raises `ScheduleError`."""
    point = _entry_points().get(name)
    if point is not None:
        with careful(f"entry point {point.name} = {point.value}", point.module):
            point.load()
    return point is not None


@cache
def _entry_points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # for names that are not ours: it takes as long to import as numpy

    return {each.name: each for each in entry_points(group=ENTRY_POINTS)}


class _TooLong(BaseException):
    """User code has run for too long. No `Exception`, so that user code does not catch it."""


@contextlib.contextmanager
def careful(what: str, file: str) -> Iterator[None]:
    """Run user code of a file: prints go to stderr, errors become a `ScheduleError` that begins with `what`."""
    try:
        with contextlib.redirect_stdout(sys.stderr), _limited(_limit_s()):
            yield
    except _TooLong:
        limit = f"{_limit_s():g} s of processor time or {WAITING} times as long by the clock"
        raise ScheduleError(
            f"{what}: still running after {limit}, an endless loop? {LIMIT}=600 allows more seconds"
        ) from None
    except MemoryError:
        raise
    except SystemExit as error:
        raise ScheduleError(f"{what}{_line(error, file)}: exits Python, expected schedules") from None
    except TaspLabError as error:
        text = re.sub(r"^schedule '[^']*'[:,] *", "", first_line(error))  # the name is in `what`
        raise ScheduleError(f"{what}{_line(error, file)}: {text}") from error
    except Exception as error:
        text = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
        text = re.sub(r" \([^()]*, line \d+\)$", "", text)  # a syntax error has its line already
        raise ScheduleError(f"{what}{_line(error, file)}: {text}") from error


def _line(error: BaseException, file: str) -> str:
    """The line of the file that an error is about, with a comma before it: the innermost one that ran."""
    line = error.line if isinstance(error, ScheduleError) else None
    if isinstance(error, SyntaxError) and error.filename == file:
        line = error.lineno
    if line is None:
        frames = traceback.walk_tb(error.__traceback__)
        lines = [number for frame, number in frames if frame.f_code.co_filename == file]
        line = lines[-1] if lines else None
    return "" if line is None else f", line {line}"


def _limit_s() -> float:
    text = os.environ.get(LIMIT, "")
    try:
        limit_s = float(text or LIMIT_S)
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise QuantityError(f"{LIMIT}: {text!r}, expected a number of seconds")
    return limit_s


@contextlib.contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raise `_TooLong` after so much processor time of this process, or `WAITING` times as long by the clock.

    Only a main thread can be stopped so. Processor time, as other programs must not decide; and its signal is not that
    of timers of tests. Code that waits takes none, so a thread sends the same signal by the clock.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    main = threading.main_thread().ident or 0
    clock = threading.Timer(WAITING * limit_s, signal.pthread_kill, (main, signal.SIGVTALRM))
    clock.daemon = True
    clock.start()
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        clock.cancel()
        signal.signal(signal.SIGVTALRM, before)
