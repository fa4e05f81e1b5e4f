"""A measured table as an input: what identifies it, and whose errors its intervals leave out."""

from __future__ import annotations

import re
from pathlib import Path

from tasp_lab.measure.readers import AnyTable, MeasuredTable
from tasp_lab.prediction.provenance import plain, sha256


def left_out_with(table: AnyTable) -> str:
    """The group of a table, whose residuals do not count for it: that of its provider, else that of its source.

    Of a source that measured several systems only that of the table is left out. A source is the
    repository on GitHub, the host and the first two parts of the path of its address, else its text.
    """
    if provider := table.headers.get("provider"):
        return provider
    source = table.headers.get("source") or ""
    if repository := re.search(r"\bgithub(?:\.com/| )([\w.-]+/[\w.-]+)", source):
        return " ".join([f"github.com/{repository[1]}", *filter(None, [table.headers.get("system")])])
    address = re.search(r"https?://([^/\s]+(?:/[^/\s]+){0,2})", source)
    return address[1] if address else source


def table_inputs(table: AnyTable) -> dict[str, object]:
    """A measured table as an input: the name of its file without folders, and the hash of what it states."""
    if not isinstance(table, MeasuredTable):
        stated = [plain(table.headers), plain(table.rows)]
        return {"file": Path(table.name).name, "sha256": sha256(stated)}
    content = [table.profile, table.collective, table.ranks, plain(table.headers), plain(table.rows), table.reason]
    return {"file": Path(table.name).name, "sha256": sha256([*content, table.from_size_bytes])}
