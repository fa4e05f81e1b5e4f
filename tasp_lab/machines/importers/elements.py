"""XML as elements that know their line, read without anything that could do harm.

Document types are refused, and with them entities, so that a text cannot grow while it is read; nothing is loaded from
elsewhere; and elements nest no deeper than `DEEPEST`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from tasp_lab.core.errors import TopologyError
from tasp_lab.machines.importers.survey import shown

DEEPEST = 64
"""Far more levels than a PCIe tree has."""


@dataclass(frozen=True)
class Element:
    """One element: its name, attributes and children, and the number of its line, counted from 1."""

    name: str
    attributes: Mapping[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def refuse(self, found: str, expected: str) -> NoReturn:
        """Raise `TopologyError` for this element."""
        raise TopologyError(f"line {self.line}: <{shown(self.name)[1:-1]}> {found}, expected {expected}")

    def attribute(self, name: str, expected: str) -> str:
        """An attribute that must be there."""
        if name not in self.attributes:
            self.refuse(f"has no {name}", expected)
        return self.attributes[name]

    def check_children(self, *names: str) -> None:
        """Raise `TopologyError` for a child with another name."""
        for child in self.children:
            if child.name not in names:
                child.refuse(f"is in <{self.name}>", " or ".join(f"<{name}>" for name in names) or "nothing")


def read_elements(text: str) -> Element:
    """The root of the document.

    >>> read_elements("<system><cpu numaid='0'/></system>").children[0].attributes
    {'numaid': '0'}

    Raises `TopologyError` where the text is not well-formed, has a document type, or nests too deep.
    """
    parser = expat.ParserCreate()
    top = Element("", {}, 0)
    open_elements = [top]

    def start(name: str, attributes: dict[str, str]) -> None:
        element = Element(name, attributes, parser.CurrentLineNumber)
        if len(open_elements) > DEEPEST:
            element.refuse("is nested too deep", f"at most {DEEPEST} levels")
        open_elements[-1].children.append(element)
        open_elements.append(element)

    def refuse_document_type(*_: object) -> NoReturn:
        raise TopologyError(f"line {parser.CurrentLineNumber}: a document type, expected XML without one")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: open_elements.pop()
    parser.StartDoctypeDeclHandler = refuse_document_type
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise TopologyError(
            f"line {error.lineno}: the XML is not well-formed: {expat.ErrorString(error.code)}"
        ) from error
    return top.children[0]
