"""Records of the files that users write, and the names of those of tasp-lab."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, TypeVar, cast, get_args

import msgspec

from tasp_lab.core.errors import ProfileError, TaspLabError, expected_one_of, nearest, of_type

Text = Annotated[str, msgspec.Meta(pattern=r"\S")]
"""Text that is not blank."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
"""A number of things, 1 or more."""

_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")
"""Characters that are invisible in a line: controls, line breaks, direction and width marks, lone surrogates."""


class Record(msgspec.Struct, frozen=True):
    """A part of a file. Raises `ValueError` for text with invisible characters."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, str) and (unseen := _UNSEEN.search(value)):
                raise ValueError(f"`{field}` has the character {unseen[0]!a}, expected text that can be seen")


Found = TypeVar("Found")


def converted(document: object, kind: type[Found]) -> Found:
    """A document as a record. Raises `msgspec.ValidationError`, with the nearest known field for an unknown one."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        unknown = re.search("unknown field `(.*?)`", str(error))
        near = nearest(unknown[1], dict.fromkeys(_field_names(kind))) if unknown else []
        if unknown is None or not near:
            raise
        text = str(error).replace(unknown[0], f"{unknown[0]}, did you mean `{near[0]}`?")
        raise msgspec.ValidationError(text) from error


def _field_names(kind: object) -> Iterator[str]:
    """The names of the fields of a record, and of the records in it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            yield field.encode_name
            yield from _field_names(field.type)
    for part in get_args(kind):
        yield from _field_names(part)


def data_names(package: str, folder: str) -> list[str]:
    """The names of the ``.toml`` files in a folder of a package, without their ending, in alphabetical order.

    >>> "llama-3-8b" in data_names("tasp_lab.workload.models", "data")
    True
    """
    return list(_names_in(package, folder))


@cache
def _names_in(package: str, folder: str) -> tuple[str, ...]:
    entries = (resources.files(package) / folder).iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml")))


def load_named(
    what: str,
    package: str,
    folder: str,
    name: str,
    read: Callable[[str, bytes], Found],
    error: type[TaspLabError] = ProfileError,
    endings: tuple[str, ...] = (".toml",),
) -> Found:
    """What `read` makes of the name and the content of a file: one of `data_names`, or a user's file.

    Files of tasp-lab are read once, those of users each time: they may have been edited.
    Raises `error` for an unknown name, and for a file that cannot be read.
    """
    if not isinstance(name, str):
        raise error(of_type(what, name, f"the name of a {what}"))
    names = data_names(package, folder)
    if name in names:
        return cast(Found, _load_once(package, folder, name, read))
    if name.lower().endswith(endings) or os.path.exists(name):
        return read(name, read_file(name, error))
    near = expected_one_of(name.rpartition("/")[2], names)  # Hugging Face has the maker of a model before its name
    raise error(f"unknown {what} {name!r}, {near}, or a {' or '.join(endings)} file")


@cache
def _load_once(package: str, folder: str, name: str, read: Callable[[str, bytes], object]) -> object:
    return read(name, (resources.files(package) / folder / f"{name}.toml").read_bytes())


def read_file(path: str | Path, error: type[TaspLabError]) -> bytes:
    """The content of a user's file. Raises `error`, with its name and the reason on one line."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as failure:  # a name with a null character is a `ValueError`
        why = getattr(failure, "strerror", None) or failure
        raise error(f"file {str(path)!r} cannot be read: {why}") from failure


def as_text(data: bytes) -> str:
    """The content of a file as text, without a byte order mark. Raises `ValueError` for what is no UTF-8.

    >>> as_text(bytes([65, 255]))
    Traceback (most recent call last):
    ValueError: expected UTF-8 text, byte 1 is something else
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text, byte {error.start} is something else") from error
