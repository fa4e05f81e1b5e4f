"""Docstrings as Markdown, as an extension of griffe: sections as lists, doctests and tables as code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from griffe import Extension, Object

_ENTRY = re.compile(r"(\*{0,2}\w[\w, *]*) : (.*)")


class Markdown(Extension):
    """Rewrites the docstring of every object."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(docstring: str) -> str:
    """A docstring as Markdown.

    >>> print(to_markdown("A link.\\n\\nParameters\\n----------\\nsource : where it starts,\\n    a rank."))
    A link.
    <BLANKLINE>
    **Parameters**
    <BLANKLINE>
    - `source`: where it starts,
      a rank.
    """
    paragraphs = [
        list(lines) for filled, lines in groupby(docstring.splitlines(), lambda line: bool(line.strip())) if filled
    ]
    return "\n\n".join(_joined(paragraphs))


def _joined(paragraphs: list[list[str]]) -> Iterator[str]:
    for lines in paragraphs:
        if len(lines) > 1 and re.fullmatch("-{3,}", lines[1].strip()):
            yield f"**{lines[0].strip()}**"
            yield "\n".join(map(_entry, lines[2:]))
        elif lines[0].lstrip().startswith(">>>"):
            yield "\n".join(["```pycon", *lines, "```"])
        elif re.fullmatch("[= ]{3,}", lines[0].strip()):
            yield "\n".join(["```text", *lines, "```"])
        else:
            yield "\n".join(lines)


def _entry(line: str) -> str:
    match = _ENTRY.fullmatch(line)
    return f"- `{match[1]}`: {match[2]}" if match else f"  {line.strip()}"
