"""What the site has besides the pages of ``docs/``, as a hook of MkDocs: pages from outside, and generated references.

The site has the folders of the repository without ``docs/``: ``docs/plan.md`` is the page ``plan.md``,
``experiments/results/passes.md`` keeps its path. So one relative link works on both: it is written for the repository,
and rewritten here for the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.generate import with_site_parts

ROOT = Path(__file__).parent.parent
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "experiments/**/*.md", "experiments/**/*.png",
           "experiments/**/*.json", "experiments/studies/**/*.html", "experiments/studies/**/*.js",
           "experiments/studies/**/*.csv", "experiments/ranking_benchmark/*.csv", "tasp_lab/study/*.js",
           "notebooks/*.ipynb", "notebooks/*.md")  # fmt: skip
"""What the site has from outside ``docs/``, as patterns."""

_NAME = re.compile(r'(?<!">)<code>((?:tasp_lab|sim|runtime)(?:\.\w+)+)</code>')
_LINK = re.compile(r"(\]\()([^)\s#]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files from outside ``docs/``."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is made with the site, and rewrite the links of a page."""
    markdown = with_site_parts(markdown)
    source = page.file.src_uri
    folder = posixpath.dirname(source if page.file.generated_by else f"docs/{source}")
    return _LINK.sub(lambda match: match[1] + link_on_site(match[2], folder, posixpath.dirname(source)), markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link names of code to the API reference, where it has them."""
    return _NAME.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)


def link_on_site(link: str, folder: str, site_folder: str) -> str:
    """A link of a file in this folder of the repository, for its page in that folder of the site.

    >>> link_on_site("../experiments/results/passes.md", "docs", "")
    'experiments/results/passes.md'
    >>> link_on_site("../../docs/plan.md", "experiments/accuracy", "experiments/accuracy")
    '../../plan.md'
    >>> link_on_site("https://simgrid.org", "docs", "")
    'https://simgrid.org'
    """
    if ":" in link:
        return link
    target = posixpath.normpath(posixpath.join(folder, link)).removeprefix("docs/")
    return posixpath.relpath(target, site_folder or ".")
