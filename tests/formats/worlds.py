"""Topologies and the collectives that run on them, for the tests of formats."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tasp_lab.core.errors import ScheduleError, TaspLabError
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.registry import COLLECTIVES
from tasp_lab.topology.expressions import EXPRESSION_DEFAULTS, parse_expression

TOPOLOGIES = ("full-mesh:4", "ring:4", "torus:2x3", "switch:5", "nodes:2x3", "hypercube:3")
SHARD_BYTES = 16 * 5040


REFUSED = (
    "is a SendRecv, expected one of",
    "steps, expected at most 64",
    "thread blocks, expected at most 64",
    "semaphores, expected at most 16",
    "channels, expected at most 16",
)
"""The limits of formats, in the messages of schedules that do not fit."""


def written(write: Callable[[Schedule], str], schedule: Schedule) -> str:
    """The file of a schedule; the test is skipped if a limit of the format refuses it."""
    text, reason = "", ""
    try:
        text = write(schedule)
    except ScheduleError as error:
        reason = str(error)
    if reason:
        uneven = schedule.name == "trees" and "have no equal chunks" in reason
        assert uneven or any(words in reason for words in REFUSED), reason
        pytest.skip(reason)
    return text


def schedules(shard_bytes: int = SHARD_BYTES) -> dict[str, Schedule]:
    """All collectives on all topologies on which they apply, by topology and name."""
    found = {}
    for text in TOPOLOGIES:
        topology = parse_expression(text).build(EXPRESSION_DEFAULTS)
        for name in COLLECTIVES:
            try:
                found[f"{text} {name}"] = collective(name, topology, shard_bytes)
            except TaspLabError:
                continue  # a message between ranks without a link
    return found
