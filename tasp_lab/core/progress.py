"""Progress reports of long computations."""

from __future__ import annotations

import sys
from collections.abc import Callable

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from typing import TextIO

ProgressCallback = Callable[[str], None]
"""Called with one line of text at the start of each stage."""

ShareCallback = Callable[[float], None]
"""Called now and then with the share of a computation that is done."""


CountCallback = Callable[[int, int, str], None]
"""Called with how many of how many stages have ended, and what runs now; at the end without the latter."""


def no_share(_: float) -> None:
    """No-op callback."""


def no_progress(_: str) -> None:
    """No-op progress callback."""


def print_progress(line: str) -> None:
    """Print a line of progress on standard error."""
    print_line(on_one_line(line), sys.stderr)


def print_line(line: str, stream: TextIO) -> None:
    """Print a line by one write: an unbuffered `print` writes its end apart, and another process may come between.

    torchrun starts all processes of a host unbuffered, on the same streams.
    """
    stream.write(f"{line}\n")
    stream.flush()


def count_lines(progress: ProgressCallback) -> CountCallback:
    """A callback that reports a line at the start of each stage.

    >>> count_lines(print)(2, 5, "tasp")
    3 of 5: tasp
    """

    def count(done: int, total: int, what: str) -> None:
        if done < total:
            progress(f"{done + 1} of {total}: {what}")

    return count


def on_one_line(text: str) -> str:
    r"""The text without line breaks, and with an escape for each character that cannot be printed.

    >>> on_one_line("a\n b\a")
    'a b\\x07'
    """
    joined = " ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in joined)
