"""Types of arguments: one table for public functions, and for the fields of layers and options.

>>> check_arguments({"window": 8.7})
Traceback (most recent call last):
tasp_lab.core.errors.WorkloadError: window: 8.7 of type float, expected a whole number or None; for flash-attn's \
(left, 0), window = left + 1

Nothing is converted before it is checked: a window of 8.7 is an error, not 8. Whole numbers are of any type that Python
counts among them, such as NumPy's, but True and False are none. Modules that have types of their own extend the table.
This one imports nothing heavy, since the command line needs options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from numbers import Integral
from typing import Any, NamedTuple

from tasp_lab.core.errors import QuantityError, ScheduleError, TaspLabError, WorkloadError, of_type


class ArgumentType(NamedTuple):
    """What an argument may be: its types, the words for them, the error for others, and what a list has in it."""

    types: tuple[type, ...]
    expected: str
    error: type[TaspLabError] = QuantityError
    items: type | None = None


NONE_TYPE = type(None)
BOOL = ArgumentType((bool,), "True or False")
MAYBE_BOOL = ArgumentType((bool, NONE_TYPE), "True, False or None")
WHOLE = ArgumentType((Integral,), "a whole number")
MAYBE_WHOLE = ArgumentType((Integral, NONE_TYPE), "a whole number or None")

_WHOLE_OF_LAYER = WHOLE._replace(error=WorkloadError)
_MAYBE_WHOLE_OF_LAYER = MAYBE_WHOLE._replace(error=WorkloadError)
_TEXT_OF_LAYER = ArgumentType((str,), "a text", WorkloadError)
_WHOLE_OPTION = WHOLE._replace(error=ScheduleError)

TYPES: Mapping[str, ArgumentType] = {
    "sequence": ArgumentType((Integral, str), "a whole number, or a text such as '128Ki'", WorkloadError),
    "batch": _WHOLE_OF_LAYER,
    "heads": _WHOLE_OF_LAYER,
    "kv_heads": _MAYBE_WHOLE_OF_LAYER,
    "head_dim": _WHOLE_OF_LAYER,
    "cached_keys": _WHOLE_OF_LAYER,
    "linear_kv_heads": _MAYBE_WHOLE_OF_LAYER,
    "window": _MAYBE_WHOLE_OF_LAYER._replace(
        expected="a whole number or None; for flash-attn's (left, 0), window = left + 1"
    ),
    "dtype": _TEXT_OF_LAYER,
    "kind": _TEXT_OF_LAYER,
    "decay": _TEXT_OF_LAYER,
    "layers": _TEXT_OF_LAYER._replace(expected="a pattern such as LLSLLS or 4xLLLS"),
    "trim": BOOL._replace(error=ScheduleError),
    "buffers": _WHOLE_OPTION,
    "tail_chunks": _WHOLE_OPTION,
    "stages": MAYBE_WHOLE._replace(error=ScheduleError),
    "pieces": MAYBE_WHOLE._replace(error=ScheduleError),
    **dict.fromkeys(
        ("passes", "dataflow", "direction", "gradient_dtype", "result_dtype", "groups", "travels"),
        ArgumentType((str,), "a text", ScheduleError),
    ),
}
"""The arguments and fields that occur in several packages, by name: each means the same wherever it occurs."""


def is_whole(value: object) -> bool:
    """Whether a value is a whole number.

    >>> is_whole(8), is_whole(True), is_whole(8.0)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_arguments(given: Mapping[str, Any], types: Mapping[str, ArgumentType] = TYPES, **other: str) -> None:
    """Raise the `TaspLabError` of the first argument that is of a wrong type; those that `types` lacks may be anything.

    `given` are arguments by name. `other` are names of arguments that stand for those of another name here:
    ``work="layer"``.
    """
    for name, value in given.items():
        expected = types.get(other.get(name, name) if other else name)
        if expected is None:
            continue
        is_flag = isinstance(value, bool) and bool not in expected.types
        is_one_text = isinstance(value, str) and expected.items is not None and str not in expected.types
        if is_flag or is_one_text or not isinstance(value, expected.types):
            raise expected.error(of_type(name.replace("_", " "), value, expected.expected))
        if expected.items is not None and isinstance(value, Sequence | Set):
            for item in value:
                if not isinstance(item, expected.items):
                    raise expected.error(of_type(name.replace("_", " "), item, expected.expected))
