"""Functions that run as machine code or as Python: one source, the same results.

Such a function takes numbers and *tables*, NumPy arrays whose rows are numbers or records, also in named tuples, and
uses no other Python objects: ``table[row].field``. It changes tables in place. Importing numba and loading machine code
takes about half a second, so small inputs run as Python.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from tasp_lab.core.progress import print_progress

Function = TypeVar("Function", bound=Callable[..., object])
Result = TypeVar("Result")

_OPTIONS = {"_nrt": False}
"""Tables are allocated in Python and live as long as a call, so compiled functions need not count references."""

_parts: list[Callable[..., object]] = []


def compilable(function: Function) -> Function:
    """Mark a function that compiled functions call. It remains an ordinary Python function."""
    _parts.append(function)
    return function


def table(rows: int, **columns: str) -> Any:
    """A table of records of zeros, by the names and types of their fields.

    >>> table(2, number="i4", due_s="f8").dtype.names
    ('number', 'due_s')
    """
    return np.zeros(rows, dtype=np.dtype(list(columns.items()), align=True))


def call(function: Callable[..., Result], *arguments: object, fast: bool) -> Result:
    """Call a function of tables; `fast`: compiled."""
    if fast:
        machine_code: Callable[..., Result] = compiled(function)
        return machine_code(*arguments)
    known: dict[int, list[Any]] = {}
    result = function(*(_as_objects(each, known) for each in arguments))
    for argument in arguments:
        _copy_back(argument, known)
    return result


@cache
def compiled(function: Function) -> Function:
    """The function as machine code, which numba keeps on disk: beside this package, or in ``NUMBA_CACHE_DIR``.

    Numba notices changes of the module of `function` only. So machine code is kept under a name with a digest of all
    modules of the package of `function`, and of this one.
    """
    from numba import njit

    _register()
    _announce_compilation()
    package = Path(str(sys.modules[function.__module__].__file__)).parent
    sources = b"".join(each.read_bytes() for each in (Path(__file__), *sorted(package.glob("*.py"))))
    named = FunctionType(function.__code__, function.__globals__)
    named.__qualname__ = f"{function.__name__}-{hashlib.sha256(sources).hexdigest()[:16]}"
    named.__module__ = function.__module__
    try:
        return njit(cache=True, **_OPTIONS)(named)  # type: ignore[no-any-return]
    except RuntimeError:  # there is no folder to keep it in
        return njit(**_OPTIONS)(named)  # type: ignore[no-any-return]


@cache
def _announce_compilation() -> None:
    """Say once, on a terminal, that functions are being compiled; not if their machine code was kept."""
    from numba.core import event

    class Announcement(event.Listener):  # type: ignore[misc]
        def on_start(self, _: event.Event) -> None:
            if not said and sys.stderr.isatty():
                said.append(True)
                print_progress("compiling the simulator, once after an installation: about 10 s")

        def on_end(self, _: event.Event) -> None:
            pass

    said: list[bool] = []
    event.register("numba:compile", Announcement())


@cache
def _register() -> None:
    """Let compiled functions call the `compilable` ones.

    Their machine code is put where they are called: a call would copy every table that it passes, which are hundreds of
    numbers, and so take longer than most of these functions.
    """
    from numba.extending import register_jitable

    options = {"no_cfunc_wrapper": True, "no_cpython_wrapper": True, "forceinline": True, **_OPTIONS}
    for part in _parts:
        register_jitable(**options)(part)


def _as_objects(value: Any, known: dict[int, list[Any]]) -> Any:
    """The plan with lists instead of tables, which Python indexes faster; `known`: by the identity of the table."""
    if isinstance(value, np.ndarray):
        if id(value) not in known:
            rows, names = value.tolist(), value.dtype.names
            records = [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in rows] if names else rows
            known[id(value)] = records
        return known[id(value)]
    return type(value)(*(_as_objects(each, known) for each in value)) if isinstance(value, tuple) else value


def _copy_back(value: Any, known: dict[int, list[Any]]) -> None:
    """Copy the lists of `_as_objects` back to their tables."""
    if isinstance(value, np.ndarray):
        rows: Sequence[Any] = known[id(value)]
        if value.flags.writeable:
            value[:] = [tuple(vars(row).values()) for row in rows] if value.dtype.names else rows
    elif isinstance(value, tuple):
        for each in value:
            _copy_back(each, known)
