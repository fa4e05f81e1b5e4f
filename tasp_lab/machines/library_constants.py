"""Constants in files, and those that hold for all machines of a library
(``tasp_lab/machines/libraries/constants/*.toml``)."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

from tasp_lab.core.errors import ProfileError, QuantityError
from tasp_lab.machines.constants import CONSTANTS
from tasp_lab.machines.intervals import stated_interval
from tasp_lab.machines.libraries.library import CommLibrary, TcpLibrary
from tasp_lab.machines.machine import Constant
from tasp_lab.machines.records import ConstantRecord, Record


class DependentRecord(ConstantRecord, frozen=True, forbid_unknown_fields=True):
    """A constant with its source, stated `at` a value of the constant on which it depends, if any."""

    at: str = ""


class _LibraryFile(Record, frozen=True, forbid_unknown_fields=True):
    constants: tuple[DependentRecord, ...]


@cache
def library_constants(library: str) -> tuple[Constant, ...]:
    """The constants of a library; none for ``ideal``.

    >>> [constant.name for constant in library_constants("gloo")]
    ['launch', 'tcp_payload']
    """
    file = files("tasp_lab.machines.libraries") / "constants" / f"{library}.toml"
    if not file.is_file():
        return ()
    return checked_constants(msgspec.toml.decode(file.read_bytes(), type=_LibraryFile).constants)


def gloo() -> CommLibrary:
    """gloo over TCP with the constants of its file."""
    values = {constant.name: CONSTANTS[constant.name].parse(constant.value) for constant in library_constants("gloo")}
    return TcpLibrary("gloo", values["launch"], values["tcp_payload"])


def split_at(at: str) -> tuple[str, str]:
    """The name and the value in a text like ``nic_bandwidth = 400Gbit/s``."""
    name, _, value = at.partition("=")
    return name.strip(), value.strip()


def checked_constants(records: tuple[DependentRecord, ...]) -> tuple[Constant, ...]:
    """The constants of a file. Raises `ProfileError` for unknown, repeated and malformed ones."""
    for index, record in enumerate(records):
        if record.name not in CONSTANTS:
            raise ProfileError(
                f"unknown constant {record.name!r}, expected one of {', '.join(CONSTANTS)} - at `$.constants[{index}]`"
            )
        if any(record.name == other.name for other in records[:index]):
            raise ProfileError(f"constant {record.name!r} occurs twice - at `$.constants[{index}]`")
        try:
            CONSTANTS[record.name].parse(record.value)
        except QuantityError as error:
            raise ProfileError(f"{error} - at `$.constants[{index}].value`") from error
        if record.at:
            _check_at(record, f"at `$.constants[{index}].at`")
    return tuple(
        Constant(record.name, record.value, record.source, record.at, *stated_interval(record, f"$.constants[{index}]"))
        for index, record in enumerate(records)
    )


def _check_at(record: DependentRecord, where: str) -> None:
    """Check that a constant is stated at a value of the one on which it depends."""
    other, text = split_at(record.at)
    expected = CONSTANTS[record.name].depends_on
    if not expected:
        raise ProfileError(f"constant {record.name!r} does not depend on another - {where}")
    if other != expected:
        raise ProfileError(
            f"{record.name} depends on {expected}, expected `{expected} = ...`, got {record.at!r} - {where}"
        )
    try:
        CONSTANTS[other].parse(text)
    except QuantityError as error:
        raise ProfileError(f"{error} - {where}") from error
