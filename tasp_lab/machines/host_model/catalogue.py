"""Runtimes by name: the data files ``tasp_lab/machines/host_model/data/*.toml``, each number with its source."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from tasp_lab.core.errors import ProfileError, unknown
from tasp_lab.core.units import parse_time_s
from tasp_lab.machines.host_model.runtime import NO_PASSES, NO_RUNTIME, Batches, Communicators, Passes, Runtime

_FOLDER = files("tasp_lab.machines.host_model") / "data"


class _Number(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: str
    source: str


class _RuntimeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    summary: str
    batches: Batches
    overlaps: bool
    call: _Number
    backward_call: _Number
    batch: _Number
    waits_for_sends: bool = False
    communicators: Communicators = "all"
    separate: tuple[Literal["forward", "backward"], ...] = ()
    passes: Passes = NO_PASSES


def runtime_names() -> list[str]:
    """The runtimes of tasp-lab, in alphabetical order; ``none`` takes no time.

    >>> "none" in runtime_names()
    True
    """
    suffix = ".toml"
    found = [entry.name[: -len(suffix)] for entry in _FOLDER.iterdir() if entry.name.endswith(suffix)]
    return sorted([*found, NO_RUNTIME.name])


@cache
def load_runtime(name: str) -> Runtime:
    """The runtime of a name. Raises `ProfileError` for an unknown one.

    >>> load_runtime("none").is_instant
    True
    """
    if name == NO_RUNTIME.name:
        return NO_RUNTIME
    if name not in runtime_names():
        raise ProfileError(unknown("runtime", name, runtime_names()))
    record = msgspec.toml.decode((_FOLDER / f"{name}.toml").read_bytes(), type=_RuntimeFile)
    numbers = {"call_s": record.call, "backward_call_s": record.backward_call, "batch_s": record.batch}
    return Runtime(
        name,
        **{field: parse_time_s(each.value) for field, each in numbers.items()},
        batches=record.batches,
        overlaps=record.overlaps,
        waits_for_sends=record.waits_for_sends,
        communicators=record.communicators,
        separate=record.separate,
        passes=record.passes,
        sources=tuple((field, each.source) for field, each in numbers.items()),
    )
