"""What the residuals are left out with that may judge a measured table."""

from __future__ import annotations

import re

from tasp_lab.measurements import AnyTable


def left_out_with(table: AnyTable) -> str:
    """What the residuals are left out with that may judge a table: its provider, else its source.

    A source is the repository on GitHub, the host and the first two parts of the path of its address, else its text.
    """
    if provider := table.headers.get("provider"):
        return provider
    source = table.headers.get("source") or ""
    if repository := re.search(r"\bgithub(?:\.com/| )([\w.-]+/[\w.-]+)", source):
        return f"github.com/{repository[1]}"
    address = re.search(r"https?://([^/\s]+(?:/[^/\s]+){0,2})", source)
    return address[1] if address else source
