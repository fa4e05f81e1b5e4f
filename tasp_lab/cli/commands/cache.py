"""``tasp-lab cache``: what earlier questions left on disk for the next ones."""

from __future__ import annotations

from typing import Annotated

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.options import RUN, Json, flag


def cache(*, clear: Annotated[bool, flag(RUN)] = False, json: Json = False) -> None:
    """Say how much disk the schedules of earlier questions take, and where, or remove them.

    The same question, or one with other bandwidths, reads them instead of building, proving and preparing them again.

    Example: tasp-lab cache --clear

    Args:
        clear: Remove them.
    """
    from tasp_lab.core.cache import LIMIT
    from tasp_lab.core.units import format_size_about
    from tasp_lab.prediction.kept import SHELF

    limit_bytes, removed = SHELF.limit_bytes, SHELF.shrink(0) if clear else []
    files = SHELF.files()
    size_bytes, removed_bytes = (sum(each.bytes for each in some) for some in (files, removed))
    if json:
        print_json({
            "folder": str(SHELF.folder), "files": len(files), "bytes": size_bytes, "limit_bytes": limit_bytes,
            "removed_files": len(removed), "removed_bytes": removed_bytes,
        })  # fmt: skip
        return
    of_limit = f"of at most {format_size_about(limit_bytes)}" if limit_bytes else f"and {LIMIT}=0 adds none"
    print_parts([
        *([f"removed {len(removed)} files, {format_size_about(removed_bytes)}"] if clear else []),
        f"{len(files)} files of schedules, {format_size_about(size_bytes)} {of_limit}, in {SHELF.folder}",
        f"TASP_LAB_CACHE sets another folder, {LIMIT}=4GiB another limit; tasp-lab cache --clear removes the files",
    ])  # fmt: skip
