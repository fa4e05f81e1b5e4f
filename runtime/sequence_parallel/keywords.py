"""Keywords that a function does not have: refused, with what stands here for those of other libraries.

    check_names({"is_causal": True}, ["causal", "window"])  # raises WorkloadError: ..., expected causal

``keywords.toml`` has the names, from flash-attn, PyTorch, MagiAttention, fla and LASP.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from tasp_lab.core.errors import WorkloadError, unknown

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `WorkloadError` for a keyword that is not known, with what stands for it if another library has it."""
    names = list(known)
    for name in given:
        if name not in names:
            text = Path(__file__).with_suffix(".toml").read_text()
            others = (each for each in tomllib.loads(text)["others"] if name in each["names"])
            raise WorkloadError(_message(name, names, **next(others, {"names": []})))


def _message(name: str, known: list[str], names: list[str], here: Iterable[str] = (), text: str = "") -> str:
    there = [each for each in here if each in known]
    if not names:
        return unknown("argument", name, known)
    if here and not there:
        return f"unknown argument {name!r}, expected none: this function has nothing like it"
    return ": ".join([f"unknown argument {name!r}, expected {' or '.join(there) or 'none'}", *filter(None, [text])])


def names_checked(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function that refuses keywords as `check_names` does, where Python raises a TypeError."""
    names = inspect.signature(function).parameters

    @wraps(function)
    def checked(*tensors: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        check_names(keywords, names)
        return function(*tensors, **keywords)

    return checked
