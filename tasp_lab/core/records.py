"""Records of the files that users write."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

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
