"""Functions that run as machine code or as Python: one source, the same results.

Such a function takes numbers and *tables*, NumPy arrays whose rows are numbers or records, also in named tuples, and
uses no other Python objects: ``table[row].field``. It changes tables in place.

numba compiles a function once, and its object code is kept on disk. From then on llvmlite alone loads it, which takes a
tenth of the time that numba needs to be imported and to load a function. So the code is called as numba's own wrappers
call it: with the address of the result and of an exception, and each table as the numbers of numba's array structure.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tasp_lab.core.errors import OutputError
from tasp_lab.core.files import write_whole
from tasp_lab.core.progress import print_progress

Function = TypeVar("Function", bound=Callable[..., object])
Result = TypeVar("Result")

_OPTIONS = {"no_cfunc_wrapper": True, "no_cpython_wrapper": True}

_RESULTS = {"int64": ctypes.c_int64, "float64": ctypes.c_double, "bool": ctypes.c_bool, "none": ctypes.c_void_p}
"""What compiled functions return, by numba's names."""

_parts: list[Callable[..., object]] = []
"""Those of `compilable` that numba does not know yet."""


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


class Kept:
    """An argument of many calls: what machine code takes for it is found once. Its tables must stay where they are."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.values: list[Any] = []
        self.type = _flatten(value, self.values)


def call(function: Callable[..., Result], *arguments: object, fast: bool) -> Result:
    """Call a function of tables; `fast`: compiled. Instead of an argument it takes `Kept` of it."""
    if fast:
        return _call_compiled(function, arguments)
    known: dict[int, list[Any]] = {}
    given = [each.value if isinstance(each, Kept) else each for each in arguments]
    result = function(*(_as_objects(each, known) for each in given))
    for argument in given:
        _copy_back(argument, known)
    return result


# Machine code.


class _Code(NamedTuple):
    """Object code: the name of the function in it, numba's name of the type of its result, and the code itself."""

    name: str
    result: str
    code: bytes

    def to_bytes(self) -> bytes:
        """The content of a file, with a digest of the rest in front."""
        content = f"{self.name}\n{self.result}\n".encode() + self.code
        return hashlib.sha256(content).digest() + content

    @classmethod
    def of_bytes(cls, content: bytes) -> _Code | None:
        """The code in a file; None if that is no whole one."""
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            return None
        name, result, code = content[32:].split(b"\n", 2)
        return cls(name.decode(), result.decode(), code)


_loaded: dict[tuple[Callable[..., object], str], tuple[Any, Any]] = {}
"""The machine code of functions for types of arguments, and the type of its result."""

_loading = Lock()
"""Functions are loaded and compiled one at a time; threads run them at the same time."""

_engines: list[Any] = []
"""What machine code lives in."""


def _call_compiled(function: Callable[..., Result], arguments: Sequence[object]) -> Result:
    values: list[Any] = []
    types = ",".join([_flatten(each, values) for each in arguments])
    with _loading:
        if (function, types) not in _loaded:
            _loaded[function, types] = _load(_code_of(function, types, arguments, len(values)), values)
    machine_code, result_type = _loaded[function, types]
    result, exception = result_type(), ctypes.c_void_p()
    status = machine_code(ctypes.byref(result), ctypes.byref(exception), *values)
    # numba's calling convention: 0 for a result, -2 for None, others for exceptions
    assert status in (0, -2), f"{function.__name__} keeps what it asserts: status {status}"
    found: Result = result.value
    return found


def _flatten(value: object, values: list[Any]) -> str:
    """Append the numbers that compiled code takes for an argument to `values`, and return what its type is."""
    if isinstance(value, Kept):
        values += value.values
        return value.type
    if isinstance(value, np.ndarray):
        data = value.ctypes.data  # __array_interface__ would also describe the fields
        # the owners that numba counts references to are not given, since nothing is allocated (nrt)
        values += (None, None, value.size, value.itemsize, data, *value.shape, *value.strides)
        flags = value.flags
        kind = _name_of(value.dtype)
        layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        return f"{kind}{value.ndim}{layout}{flags.aligned:d}{flags.writeable:d}"
    if isinstance(value, tuple):
        return f"{type(value).__name__}({','.join([_flatten(each, values) for each in value])})"
    if isinstance(value, bool | np.bool_):
        values.append(ctypes.c_bool(bool(value)))
        return "bool"
    if isinstance(value, float | np.floating):
        values.append(ctypes.c_double(float(value)))
        return "float"
    assert isinstance(value, int | np.integer), f"a number or a table, not {value!r}"
    values.append(int(value))
    return "int"


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """What tells a type of rows from others."""
    return dtype.str if dtype.names is None else str(dtype.descr)


def _load(code: _Code, values: Sequence[Any]) -> tuple[Any, Any]:
    """The machine code of a function that takes these numbers, ready to be called, and the type of its result."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(code.code))
    engine.finalize_object()
    _engines.append(engine)
    types = [type(each) if isinstance(each, ctypes._SimpleCData) else ctypes.c_ssize_t for each in values]
    types = [ctypes.c_void_p if value is None else kind for value, kind in zip(values, types, strict=True)]
    # Unlike PYFUNCTYPE, it lets other threads run meanwhile: machine code touches no Python objects.
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *types)
    return prototype(engine.get_function_address(code.name)), _RESULTS[code.result]


def _code_of(function: Callable[..., object], types: str, arguments: Sequence[object], values: int) -> _Code:
    """The object code of a function for these types, which takes so many numbers; from disk if it is there.

    It is kept under a digest of the types, the processor, and all modules of the package of `function` and this one.
    """
    from llvmlite import binding

    package = Path(str(sys.modules[function.__module__].__file__)).parent
    digest = hashlib.sha256(f"{types} {binding.get_process_triple()} {binding.get_host_cpu_name()}".encode())
    digest.update(binding.get_host_cpu_features().flatten().encode())
    for path in (Path(__file__), *sorted(package.glob("*.py"))):
        digest.update(path.read_bytes())
    name = f"{function.__name__}-{digest.hexdigest()[:32]}.o"
    for folder in _folders(package):
        with suppress(OSError):
            if (code := _Code.of_bytes((folder / name).read_bytes())) is not None:
                return code
    code = _compile(function, arguments, values)
    for folder in _folders(package):
        with suppress(OSError, OutputError):  # without a folder to keep it in it is made anew each time
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, code.to_bytes())
            break
    return code


def _folders(package: Path) -> list[Path]:
    """Where object code is kept: ``NUMBA_CACHE_DIR``, beside the package, or in the cache of the user."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    users = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return [Path(given)] if given else [package / "__pycache__", users / "tasp-lab"]


def _compile(function: Callable[..., object], arguments: Sequence[object], values: int) -> _Code:
    """The object code of a function for arguments like these, which are so many numbers."""
    from numba import typeof
    from numba.core import compiler
    from numba.core.registry import cpu_target

    _announce_compilation()
    _register()
    flags = compiler.Flags()
    for option in _OPTIONS:
        setattr(flags, option, True)
    typing, target = cpu_target.typing_context, cpu_target.target_context
    typing.refresh()
    target.refresh()
    types = tuple(typeof(each.value if isinstance(each, Kept) else each) for each in arguments)
    compiled = compiler.compile_extra(typing, target, function, types, None, flags, {})
    name = compiled.fndesc.llvm_func_name
    taken = len(list(compiled.library.get_function(name).arguments))
    assert taken == 2 + values, f"numba's {function.__name__} takes {taken} numbers, expected 2 and {values}"
    return _Code(name, str(compiled.fndesc.restype), compiled.library._get_compiled_object())


@cache
def _announce_compilation() -> None:
    """Say once, on a terminal, that functions are being compiled."""
    if sys.stderr.isatty():
        print_progress("compiling the simulator, once after an installation: about 10 s")


def _register() -> None:
    """Let compiled functions call the `compilable` ones; of modules loaded since the last call, too.

    Their machine code is put where they are called: a call would copy every table that it passes, which are hundreds of
    numbers, and so take longer than most of these functions. Tables are allocated in Python and live as long as a call,
    so compiled functions need not count references.
    """
    from numba.extending import register_jitable

    while _parts:
        register_jitable(forceinline=True, _nrt=False, **_OPTIONS)(_parts.pop())


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
