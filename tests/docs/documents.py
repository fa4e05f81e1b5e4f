"""The Markdown documents of the repository, and what tests look for in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT

DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for folder in ("", "reference", "why") for path in sorted((ROOT / "docs" / folder).glob("*.md"))),
)
"""The documents that describe the present: all but the changelog."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code: its document, its language and its text."""

    document: Path
    language: str
    text: str


def blocks(*languages: str) -> Iterator[Block]:
    """All blocks of code in these languages."""
    for document in DOCUMENTS:
        for language, text in _FENCE.findall(document.read_text()):
            if language in languages:
                yield Block(document, language, text)


def prose(document: Path) -> str:
    """A document without its blocks of code."""
    return _FENCE.sub("", document.read_text())


def inline_code(document: Path) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(document))


def commands(block: Block) -> Iterator[list[str]]:
    """The arguments of each call of ``tasp-lab`` in a block, whoever starts it; of a loop, those of its first turn.

    >>> text = "$ torchrun --nproc-per-node 4 -m tasp_lab.cli doctor --json > all.json  # why" + chr(10) + "output"
    >>> list(commands(Block(Path(), "console", text)))
    [['doctor', '--json']]
    """
    text = block.text.replace("\\\n", " ")
    for variable, value in re.findall(r"\bfor (\w+) in (\S+)", text):
        text = text.replace(f"${variable}", value)
    for line in text.splitlines():
        if block.language == "console" and not line.startswith("$ "):
            continue
        found = re.search(r"(?:^|\s)(?:tasp-lab|-m tasp_lab\.cli) (.*)", line)
        if found:
            yield shlex.split(re.split(r"\s>\s|;|\s\|\s", found[1])[0], comments=True)


def redirected(block: Block) -> Iterator[tuple[list[str], str]]:
    """The commands of a block of a shell, each with the file that its output goes to; empty for none.

    >>> list(redirected(Block(Path(), "sh", "tasp-lab topologies ring:4 --json > a.json   # a file" + chr(10))))
    [(['topologies', 'ring:4', '--json'], 'a.json')]
    """
    for line in block.text.replace("\\\n", " ").splitlines():
        target = re.search(r"\s>\s+([\w.-]+)", line)
        for arguments in commands(Block(block.document, "sh", line)):
            yield arguments, target[1] if target else ""


def shown(block: Block) -> Iterator[tuple[list[str], str]]:
    """The commands of a console block, each with the output that is shown for it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        for arguments in commands(Block(block.document, "sh", line)):
            yield arguments, output
