"""Ctrl-C from the first moment on, by a handler that imports nothing that the interpreter has not built in.

with Interrupts() as interrupts:
    ...  # Ctrl-C raises KeyboardInterrupt here, but not inside an import

An exception inside an import may be lost: some libraries turn it into an `ImportError`, and where one is raised in a
callback of the import machinery, Python prints its traceback and goes on. So a first Ctrl-C takes effect as soon as the
import has ended; a second one does not wait. What happens before this module is there is up to Python.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` imports enum
import sys

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn, Self


class Interrupts:
    """A handler of Ctrl-C while its context is open, unless another one than Python's own is installed.

    `heard` is whether there was one. The handler stays if it ignores Ctrl-C in the end.
    """

    heard = False
    ignored = False
    _is_installed = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        is_first, self.heard = not self.heard, True
        if self.ignored:
            return
        importer = _importer(frame)
        if importer is None or not is_first:
            raise KeyboardInterrupt
        importer.f_trace = _interrupt
        sys.settrace(_trace_nothing_new)

    def ignore_from_now_on(self) -> None:
        """All is done: nothing is left to interrupt."""
        self.ignored = True

    def __enter__(self) -> Self:
        handler = _signal.getsignal(_signal.SIGINT)
        if isinstance(handler, type(self)):  # whose context is open already
            return handler
        if handler is _signal.default_int_handler:
            try:
                _signal.signal(_signal.SIGINT, self)
                self._is_installed = True
            except ValueError:  # not the main thread
                pass
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed and not self.ignored:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def _importer(frame: FrameType | None) -> FrameType | None:
    """The frame that imports what this frame is part of: the outermost one; None if nothing is being imported."""
    importer = None
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            importer = frame.f_back
        frame = frame.f_back
    return importer


def _interrupt(frame: FrameType, event: str, argument: Any) -> NoReturn:
    """The trace function of a frame whose import has ended: it is called at its next line, or when it returns."""
    sys.settrace(None)
    raise KeyboardInterrupt


def _trace_nothing_new(frame: FrameType, event: str, argument: Any) -> None:
    """The trace function of new frames; without one, Python calls none."""
