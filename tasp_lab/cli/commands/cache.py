"""``tasp-lab cache``: what earlier questions left on disk for the next ones."""

from __future__ import annotations

from typing import Annotated

from tasp_lab.cli.console import print_json, print_parts
from tasp_lab.cli.options import RUN, Json, flag


def cache(*, clear: Annotated[bool, flag(RUN)] = False, json: Json = False) -> None:
    """Say how much disk the schedules of earlier questions and their times take, and where, or remove them.

    The same question reads times. One with other bandwidths reads schedules instead of building them again.

    Example: tasp-lab cache --clear

    Args:
        clear: Remove them.
    """
    from tasp_lab.core.units import format_size_about
    from tasp_lab.prediction.kept import SHELF

    before = sum(size for _, size, _ in SHELF.files())
    if clear:
        SHELF.shrink(0)
    files, folder, limit_bytes = SHELF.files(), str(SHELF.folder), SHELF.limit_bytes
    size_bytes = sum(size for _, size, _ in files)
    if json:
        print_json({"folder": folder, "files": len(files), "bytes": size_bytes, "limit_bytes": limit_bytes,
                    "removed_bytes": before - size_bytes})  # fmt: skip
        return
    removed = f"removed {format_size_about(before - size_bytes)}; " if clear else ""
    size, most = format_size_about(size_bytes), format_size_about(limit_bytes)
    print_parts([f"{removed}{len(files)} files of schedules and their times, {size} of at most {most}, in {folder}",
                 "TASP_LAB_CACHE sets another folder, TASP_LAB_CACHE_SIZE=4GiB another limit"])  # fmt: skip
