"""Records of the files of machines and profiles: constants with their sources."""

from __future__ import annotations

from tasp_lab.core.records import Record as Record
from tasp_lab.core.records import Text as Text


class ConstantRecord(Record, frozen=True, forbid_unknown_fields=True):
    """A constant with its source and, if it states one, its 5 to 95 % `interval`: two values, or a width: ``5%``."""

    name: Text
    value: Text
    source: Text
    interval: tuple[Text, Text] | Text | None = None
