"""Tables of text: what results print on a terminal, in a file and in a notebook."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any, Literal

from tasp_lab.core.units import format_bandwidth, format_size, format_time

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_WIDTH = 170
"""Columns of text where no terminal limits them."""


MAX_BRIEF = 160
"""The most characters of an object on one line."""


def brief(value: object, *facts: str) -> str:
    """An object on one short line, for `repr`: its class and some facts, cut after `MAX_BRIEF` characters.

    >>> brief(3, "a number", "odd")
    '<int: a number, odd>'
    """
    text = " ".join(", ".join(facts).split())
    return f"<{type(value).__name__}: {text if len(text) <= MAX_BRIEF else text[: MAX_BRIEF - 3] + '...'}>"


Row = Mapping[str, object]
"""A row by field, as JSON has it."""

Formats = Mapping[str, "str | Callable[[Any], str]"]
"""The columns of a table: under each title a format of fields, like ``"{error:+.1%}"``, or a function of a row.

Besides those of Python, formats have ``time``, ``size`` and ``bandwidth``; None is a dash, a list is its elements.
"""


class _CellFormatter(Formatter):
    UNITS: Mapping[str, Callable[..., str]] = {"time": format_time, "size": format_size, "bandwidth": format_bandwidth}

    def format_field(self, value: object, format_spec: str) -> str:
        if value is None:
            return "-"
        if isinstance(value, (list, tuple)):
            return ", ".join(self.format_field(each, format_spec) for each in value)
        unit = self.UNITS.get(format_spec)
        return format(value, format_spec) if unit is None else unit(value)


_FORMATTER = _CellFormatter()


def cells_of(row: Row, columns: Formats) -> list[str]:
    """The texts of a row.

    >>> cells_of({"name": "ring", "time_s": 0.25, "error": None}, {"": "{name}, {time_s:time}", "error": "{error:.1%}"})
    ['ring, 250 ms', '-']
    """
    return [each(row) if callable(each) else _FORMATTER.vformat(each, (), row) for each in columns.values()]


class _Wrapper(TextWrapper):
    """Breaks lines at spaces, and paths and addresses after a slash."""

    wordsep_simple_re = re.compile(r"(\s+|(?<=/)(?=\S))")


def _wrapped(text: str, width: int) -> str:
    return _Wrapper(width, break_on_hyphens=False).fill(text)


def _words(text: str) -> list[str]:
    """The parts of a text that are not broken.

    >>> _words("as github.com/name has")
    ['as', 'github.com/', 'name', 'has']
    """
    return [word for word in _Wrapper.wordsep_simple_re.split(text) if word.strip()]


READABLE = 20
"""Characters that a column of text has at least, where it has longer lines."""


@dataclass(frozen=True)
class Table:
    """A titled table of texts.

    Parameters
    ----------
    title, columns, rows : the texts.
    texts : positions of columns that are aligned to the left, others are numbers and aligned to the right.
    order : positions of columns, the most important first; empty for the order of `columns`. A narrow console shows as
        many of them as fit without breaking a word, in the order of `columns`, and a line that names the others.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = (0,)
    order: Sequence[int] = ()

    @classmethod
    def of(cls, title: str, rows: Iterable[Row], columns: Formats, texts: Sequence[int] = (0,)) -> list[Table]:
        """The table of some rows; none without a row."""
        cells = [cells_of(row, columns) for row in rows]
        return [cls(title, tuple(columns), cells, texts)] if cells else []

    def print_on(self, console: Console) -> None:
        """Print the table on a console of rich, with a line that names the columns for which there is no space."""
        from rich.table import Table as RichTable

        shown = self.fitting(console.width)
        widths = self._widths(shown, console.width)
        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for position, width in zip(shown, widths, strict=True):
            table.add_column(self.columns[position], justify=self._side(position), width=width)
        for row in self.rows:
            # rich breaks long words where a line ends, so lines are broken here
            table.add_row(*(_wrapped(row[position], width) for position, width in zip(shown, widths, strict=True)))
        console.print(table)
        if left_out := [column for position, column in enumerate(self.columns) if position not in shown]:
            console.print(f"--wide also shows: {', '.join(filter(None, left_out))}", highlight=False)

    def fitting(self, width: int) -> list[int]:
        """The positions of the columns that a console of so many characters shows.

        >>> Table("times", ("name", "time", "rate"), [("ring", "1.25 s", "3 GB/s")], order=(0, 2, 1)).fitting(20)
        [0, 2]
        """
        first, *others = self.order or range(len(self.columns))
        shown, used = [first], self._width(first)[0] + 4
        for position in others:
            used += self._width(position)[0] + 3
            if used > width:
                break
            shown.append(position)
        return sorted(shown)

    def _widths(self, shown: Sequence[int], width: int) -> list[int]:
        """The widths of the columns shown: the least ones, and of the rest of the line equal parts as far as needed."""
        least, longest = zip(*map(self._width, shown), strict=True)
        found = [min(each, width - 4) for each in least]
        rest = width - 1 - sum(each + 3 for each in found)
        # Columns that need least come first, so that what they leave goes to the others.
        by_need = sorted(range(len(shown)), key=lambda place: longest[place] - found[place])
        for count, place in enumerate(by_need):
            more = max(0, min(longest[place] - found[place], rest // (len(shown) - count)))
            found[place] += more
            rest -= more
        return found

    def _width(self, position: int) -> tuple[int, int]:
        """The least width of a column and that of its longest text. A text and a title may be on several lines."""
        cells, words = [row[position] for row in self.rows], _words(self.columns[position])
        longest = max([1, *map(len, (self.columns[position], *cells))])  # nothing is written in no width
        if position not in self.texts:
            return max([1, *map(len, (*words, *cells))]), longest
        words += [word for cell in cells for word in _words(cell)]
        return max([min(READABLE, longest), *map(len, words)]), longest

    def to_html(self) -> str:
        """The table as an HTML element.

        >>> Table("times", ("name", "time"), [("a<b", "1 s")]).to_html()[:47]
        '<table><caption>times</caption><thead><tr><th s'
        """
        head = self._html_row("th", self.columns)
        body = "".join(self._html_row("td", row) for row in self.rows)
        title = html.escape(self.title)
        return f"<table><caption>{title}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"

    def _html_row(self, element: str, cells: Sequence[str]) -> str:
        styled = (
            f'<{element} style="text-align: {self._side(position)}">{html.escape(cell)}</{element}>'
            for position, cell in enumerate(cells)
        )
        return f"<tr>{''.join(styled)}</tr>"

    def _side(self, position: int) -> Literal["left", "right"]:
        return "left" if position in self.texts else "right"


Part = Table | str
"""A table, or a line of text."""


def to_text(parts: Iterable[Part], width: int = DEFAULT_WIDTH) -> str:
    """Tables and lines as plain text.

    >>> to_text(["one line", "another"])
    'one line\\nanother'
    """
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False, emoji=False, color_system=None)
    for part in parts:
        if isinstance(part, Table):
            part.print_on(console)
        else:
            stream.write(f"{part}\n")
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def csv_text(rows: Sequence[Row], columns: Iterable[str] = ()) -> str:
    """Rows as CSV: these columns, then one for each further field of a row. A list is its texts with spaces between.

    >>> csv_text([{"name": "ring", "time_s": 0.25}, {"name": "tasp", "error": 0.1}])
    'name,time_s,error\\nring,0.25,\\ntasp,,0.1\\n'
    """
    stream = io.StringIO()
    names = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: " ".join(cell) if isinstance(cell, list) else cell for name, cell in row.items()})
    return stream.getvalue()


def to_html(parts: Iterable[Part]) -> str:
    """Tables and lines as HTML."""
    return "".join(part.to_html() if isinstance(part, Table) else f"<div>{html.escape(part)}</div>" for part in parts)
