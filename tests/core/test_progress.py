"""Lines of text for people."""

from __future__ import annotations

import io
import os

from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.progress import on_one_line, print_line


class CountedPipe(io.RawIOBase):
    """A stream that remembers each write by itself."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self.writes.append(bytes(data))
        return len(data)


def test_a_line_is_one_write_where_streams_are_unbuffered() -> None:
    pipe = CountedPipe()
    stream = io.TextIOWrapper(pipe, write_through=True)  # type: ignore[type-var]  # the streams of python -u
    print_line("rank 1: 333 positions", stream)
    assert pipe.writes == [b"rank 1: 333 positions" + os.linesep.encode()]
    print("rank 1: 333 positions", file=stream)
    assert len(pipe.writes) == 3, "print writes the end of a line apart"


@given(st.text())
def test_what_is_printed_is_one_line(text: str) -> None:
    assert len(on_one_line(text).splitlines()) <= 1
    assert on_one_line(text).isprintable()
