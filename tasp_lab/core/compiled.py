"""Functions that run as machine code or as Python: one source, the same results.

Such a function takes numbers and *tables*, NumPy arrays whose rows are numbers or records, also in named tuples, and
uses no other Python objects: ``table[row].field``. It changes tables in place.

Machine code of a function, with all that it calls in the same package, is made once and kept on disk. The largest one
takes half a second (`tasp_lab.core.assembly` translates it, LLVM compiles it), and 0.02 s from then on.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import pack
from threading import Lock
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from tasp_lab.core.assembly import FLOAT, INT, Rows, Struct, result_of, translate
from tasp_lab.core.cache import cache_folders, keep, read_kept

Result = TypeVar("Result")


def table(rows: int, **columns: str) -> Any:
    """A table of records of zeros, by the names and types of their fields.

    >>> table(2, number="i4", due_s="f8").dtype.names
    ('number', 'due_s')
    """
    return np.zeros(rows, dtype=np.dtype(list(columns.items()), align=True))


def call(function: Callable[..., Result], *arguments: object, fast: bool) -> Result:
    """Call a function of tables; `fast`: compiled."""
    if fast:
        return _call_compiled(function, arguments)
    known: dict[int, list[Any]] = {}
    result = function(*(_as_objects(each, known) for each in arguments))
    for argument in arguments:
        _copy_back(argument, known)
    return result


# Machine code.


_loaded: dict[tuple[Callable[..., object], Struct], Any] = {}
"""The machine code of functions for types of arguments."""

_loading = Lock()
"""Functions are loaded and compiled one at a time; threads run them at the same time."""

_engines: list[Any] = []
"""What machine code lives in."""


def _call_compiled(function: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
    kind, words = _pack(arguments)
    with _loading:
        if (function, kind) not in _loaded:
            _loaded[function, kind] = _load(_code_of(function, kind))
    result = (ctypes.c_double if result_of(function) == FLOAT else ctypes.c_int64)()
    failed = _loaded[function, kind](ctypes.byref(result), words)
    assert not failed, f"{function.__name__} keeps what it asserts"
    return cast(Result, result.value)


def _pack(value: object) -> tuple[Any, bytes]:
    """The type of an argument and its words, as `tasp_lab.core.assembly` has them."""
    if isinstance(value, np.ndarray):
        assert value.ndim == 1, f"a table, not an array of {value.ndim} dimensions"
        # that of an empty table may be any number, and would be another type
        stride = value.itemsize if value.flags.c_contiguous else value.strides[0]
        return Rows(value.dtype, stride), pack("qq", value.ctypes.data, len(value))
    if isinstance(value, tuple):
        kinds, words = zip(*map(_pack, value), strict=True)
        fields = getattr(value, "_fields", None) or tuple([f"a{number}" for number in range(len(value))])
        return Struct(type(value).__name__, fields, kinds), b"".join(words)
    if isinstance(value, float | np.floating):
        return FLOAT, pack("d", value)
    assert isinstance(value, int | np.integer | np.bool_), f"a number or a table, not {value!r}"
    return INT, pack("q", value)


def _load(code: bytes) -> Any:
    """Machine code, ready to be called with the addresses of its result and of the words of its arguments."""
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    # Unlike PYFUNCTYPE, it lets other threads run meanwhile: machine code touches no Python objects.
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p)
    return prototype(engine.get_function_address("entry"))


def _machine() -> Any:
    """Any processor of this architecture: code for this very one is not faster."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(jit=True)


def _code_of(function: Callable[..., object], kind: Struct) -> bytes:
    """The object code of a function for these types; from disk if it is there.

    It is kept under a digest of the types, the platform, and the sources.
    """
    from llvmlite import binding

    package = Path(str(sys.modules[function.__module__].__file__)).parent
    digest = hashlib.sha256(f"{kind} {binding.get_process_triple()}".encode())
    for path in (Path(__file__), Path(__file__).with_name("assembly.py"), *sorted(package.glob("*.py"))):
        digest.update(path.read_bytes())
    name = f"{function.__name__}-{digest.hexdigest()[:32]}.o"
    folders = cache_folders(package)
    if (kept := read_kept(folders, name)) is not None:
        return bytes(kept)
    code = _compile(function, kind)
    keep(folders, name, code)
    return code


def _compile(function: Callable[..., object], kind: Struct) -> bytes:
    """The object code of a function for arguments of these types."""
    from llvmlite import binding

    module, machine = binding.parse_assembly(translate(function, kind)), _machine()
    module.verify()
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    return code


# Python.


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
