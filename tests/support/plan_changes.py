"""Plans in MSCCL XML with one change, judged by the reader and by an interpreter in random orders."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tasp_lab.core.errors import ScheduleError
from tasp_lab.formats import msccl_xml
from tests.formats.msccl_interpreter import faults
from tests.formats.worlds import SHARD_BYTES, schedules

ORDERS = 300
"""Random orders in which a plan is executed, until one has a wrong result."""

FOLDER = Path(__file__).parents[1] / "formats" / "plans"

PLANS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.xml"))}
"""Small plans of the structure of published ones; the dependency of one is missing, the others are right."""


def exported() -> Iterator[tuple[str, str]]:
    """Each collective on each small topology as a plan, where one fits, and the plans of others."""
    for name, schedule in schedules().items():
        try:
            yield name, msccl_xml.write(schedule)
        except ScheduleError:
            continue
    yield from PLANS.items()


def changes(text: str) -> Iterator[tuple[str, str]]:
    """The plan after each single change, and the line and kind of the change.

    >>> for kind, changed in changes('<step s="0" type="s" cnt="1" depid="1" deps="2"/>'):
    ...     print(kind, changed)
    1: no dependency <step s="0" type="s" cnt="1" depid="-1" deps="-1"/>
    1: dependency one step earlier <step s="0" type="s" cnt="1" depid="1" deps="1"/>
    1: dependency one step later <step s="0" type="s" cnt="1" depid="1" deps="3"/>
    1: one chunk more <step s="0" type="s" cnt="2" depid="1" deps="2"/>
    """
    lines = text.splitlines()
    for at, line in enumerate(lines):
        depid, deps, count, step = (re.search(rf' {name}="(\d+)"', line) for name in ("depid", "deps", "cnt", "s"))
        changed = {}
        if depid and deps:
            changed["no dependency"] = re.sub(r'depid="\d+" deps="\d+"', 'depid="-1" deps="-1"', line)
            changed["dependency one step earlier"] = line.replace(deps[0], f' deps="{int(deps[1]) - 1}"')
            changed["dependency one step later"] = line.replace(deps[0], f' deps="{int(deps[1]) + 1}"')
        if count:
            changed["one chunk more"] = line.replace(count[0], f' cnt="{int(count[1]) + 1}"')
        for kind, new in changed.items():
            yield f"{at + 1}: {kind}", "\n".join([*lines[:at], new, *lines[at + 1 :]])
        if step and (after := re.search(r' s="(\d+)"', lines[at + 1] if at + 1 < len(lines) else "")):
            first, second = lines[at + 1].replace(after[0], step[0]), line.replace(step[0], after[0])
            yield f"{at + 1}: two steps swapped", "\n".join([*lines[:at], first, second, *lines[at + 2 :]])


def refusal(text: str, shard_bytes: int = SHARD_BYTES) -> str:
    """The message of the reader, or nothing if it accepts the plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.xml"
        path.write_text(text)
        try:
            msccl_xml.read(path, shard_bytes)
        except ScheduleError as error:
            return str(error).removeprefix(f"{path}: ")
    return ""


def fault(text: str, orders: int = ORDERS) -> str:
    """What goes wrong in the first random order that does, or nothing."""
    return next(faults(text, orders), "")
