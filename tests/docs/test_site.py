"""The site builds without a warning, all of its links and anchors lead somewhere, and it loads nothing remote."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs.docstrings import to_markdown
from docs.repository_pages import link_on_site
from tests.conftest import ROOT

REMOTE = ("http:", "https:", "//")
ASSETS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Page(HTMLParser):
    """The anchors, links and assets of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.assets = {""}, list[str](), list[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag in ASSETS and ASSETS[tag] in attributes:
            self.assets.append(attributes[ASSETS[tag]])


@pytest.mark.slow
def test_the_site_builds_strictly_and_is_complete_without_a_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    built = subprocess.run(
        line, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert {"index.html", "tutorial.html", "CONTRIBUTING.html"} <= {path.name for path in pages}
    assert [problem for path in pages for problem in broken_links(path, pages)] == []
    assert [asset for page in pages.values() for asset in page.assets if asset.startswith(REMOTE)] == []
    assert [style for style in site.rglob("*.css") if "url(http" in style.read_text()] == []
    assert (site / "search" / "search_index.js").exists()


def broken_links(path: Path, pages: dict[Path, Page]) -> list[str]:
    """The links and assets of a page that lead nowhere."""
    broken = []
    for link in pages[path].links + pages[path].assets:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if target.is_dir():
            target /= "index.html"
        known = unquote(parts.fragment) in pages[target].anchors if target in pages else not parts.fragment
        if not target.exists() or not known:
            broken.append(f"{path.name}: {link}")
    return broken


def test_broken_links_are_found(tmp_path: Path) -> None:
    path, other = tmp_path / "a.html", tmp_path / "b.html"
    path.write_text(
        '<a href="b.html#there">x</a><a href="b.html#gone">x</a><a href="c.html">x</a><a href="#here" id="here">x</a>'
    )
    other.write_text('<p id="there">')
    assert broken_links(path, {each: Page(each) for each in (path, other)}) == ["a.html: b.html#gone", "a.html: c.html"]


@pytest.mark.parametrize(
    ("link", "folder", "site_folder", "expected"),
    [
        ("plan.md", "docs", "", "plan.md"),
        ("../CHANGELOG.md", "docs", "", "CHANGELOG.md"),
        ("../../CHANGELOG.md", "docs/why", "why", "../CHANGELOG.md"),
        ("docs/json.md", "", "", "json.md"),
        ("../../docs/accuracy.md", "experiments/accuracy", "experiments/accuracy", "../../accuracy.md"),
        ("accuracy.json", "experiments/accuracy", "experiments/accuracy", "accuracy.json"),
        ("mailto:a@b", "docs", "", "mailto:a@b"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(
    link: str, folder: str, site_folder: str, expected: str
) -> None:
    assert link_on_site(link, folder, site_folder) == expected


def test_docstrings_become_markdown() -> None:
    text = (
        "One.\n\nAttributes\n----------\na, b : two\n    lines.\n*args : more.\n\n>>> 1\n1\n\n=== ===\nx   y\n=== ==="
    )
    assert to_markdown(text) == (
        "One.\n\n**Attributes**\n\n- `a, b`: two\n  lines.\n- `*args`: more.\n\n```pycon\n>>> 1\n1\n```\n\n"
        "```text\n=== ===\nx   y\n=== ===\n```"
    )
