"""How measured libraries run a layer: system and variant of a table, as a schedule, options, a runtime and a kernel.

The mapping is data, ``systems.toml``, with a source for each entry; what cannot be simulated has a reason there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import msgspec

from tasp_lab.core.choices import Pass
from tasp_lab.core.errors import TableError
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.registry import check_attention

_FIELD = re.compile(r"\{(\w+)(?:/(\w+))?\}")
_BACKWARD = ("dataflow", "gradient_dtype")
"""Options that a forward pass refuses."""


@dataclass(frozen=True)
class LibraryRun:
    """What a library runs for a row of a table.

    Parameters
    ----------
    schedule : the name of an attention schedule; empty if none of ours is the same.
    fields : fields of `AttentionOptions` other than their defaults.
    runtime : the name of a runtime (`tasp_lab.machines.host_model.catalogue`).
    kernels : attention kernels by accelerator; ``default`` is that of all others.
    source : where the library's code says so.
    reason : why it cannot be simulated; empty if it can.
    """

    schedule: str
    fields: Mapping[str, bool | int | str]
    runtime: str
    kernels: Mapping[str, str]
    source: str
    reason: str = ""

    def options(self, passes: Pass) -> AttentionOptions:
        """The options for these passes; without those of the backward pass if they have none."""
        left_out = _BACKWARD if passes == "forward" else ()
        return AttentionOptions(passes, **{k: v for k, v in self.fields.items() if k not in left_out})  # type: ignore[arg-type]

    def kernel(self, accelerator: str | None) -> str | None:
        """The attention kernel on an accelerator, like ``h100``; None if nothing is known."""
        return self.kernels.get(accelerator or "", self.kernels.get("default"))


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    systems: str
    variants: str
    sources: str = ".*"
    schedule: str = ""
    options: dict[str, bool | int | str] = {}
    runtime: str = "none"
    kernels: dict[str, str] = {}
    source: str = ""
    reason: str = ""


class _SystemsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rings: dict[str, str]
    directions: dict[str, str]
    entries: tuple[_Entry, ...]


@cache
def _systems() -> _SystemsFile:
    return msgspec.toml.decode((files("tasp_lab.measure.readers") / "systems.toml").read_bytes(), type=_SystemsFile)


def library_run(system: str, variant: str, *, causal: bool, ranks: int, source: str = "") -> LibraryRun:
    """What the library of a table runs, from the columns ``system`` and ``variant``, under a mask on so many ranks.

    `source` is the header of the table: some have changed the library that they name.

    >>> library_run("TE", "ring p2p (zigzag for causal)", causal=True, ranks=8).schedule
    'zigzag-ring-attention'
    >>> library_run("USP (yunchang)", "ulysses 4 x striped 2; qkv packed", causal=True, ranks=8).schedule
    'usp:4x2:striped-ring-attention'

    Raises `TableError` for a system or a variant that is not listed, and for ranks that its groups do not divide.
    """
    for entry in _systems().entries:
        if not (re.fullmatch(entry.systems, system, re.IGNORECASE) and re.fullmatch(entry.sources, source)):
            continue
        if found := re.fullmatch(entry.variants, variant, re.IGNORECASE):
            return _run(entry, {k: v or "" for k, v in found.groupdict().items()}, causal, ranks)
    raise TableError(
        f"system {system!r}, variant {variant!r}: not known, "
        "expected one that tasp_lab/measure/readers/systems.toml lists"
    )


def _run(entry: _Entry, groups: Mapping[str, str], causal: bool, ranks: int) -> LibraryRun:
    rings = _systems().rings
    fields = {name: rings.get(value.lower(), value) for name, value in groups.items()}
    fields |= {"ring": rings["zigzag" if causal else "ring"], "ranks": str(ranks)}
    ring = fields.get("kind", fields["ring"])
    fields |= {"style": ring.partition("-")[0], "direction": _systems().directions.get(ring, "auto")}

    def filled(text: str) -> str:
        return _FIELD.sub(lambda field: _value(fields, field[1], field[2]), text)

    name = filled(entry.schedule)
    check_attention([name] if name else [])
    options = {field: filled(value) if isinstance(value, str) else value for field, value in entry.options.items()}
    return LibraryRun(name, options, filled(entry.runtime), entry.kernels, entry.source, entry.reason)


def _value(fields: Mapping[str, str], name: str, divisor: str | None) -> str:
    """A field, or its quotient by another one."""
    if not divisor:
        return fields[name]
    whole, part = int(fields[name]), int(fields[divisor])
    if whole % part:
        raise TableError(f"{name} {whole}: expected a multiple of {part}, the {divisor} of its variant")
    return str(whole // part)
