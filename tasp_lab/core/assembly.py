"""Translate functions of numbers and tables to the assembly language of LLVM.

    text = translate(run_events, Struct("", ("a0", "a1"), (Struct("Plan", ...), "i64")))

These functions need a small part of Python: assignments, `if`, `while`, ``for ... in range``, `assert`, `return`,
arithmetic, comparisons, `and`, `or` and `not` of conditions, `len`, `min`, `max`, conversions, and calls of functions
that are annotated. Numbers have 64 bits, and results are those of Python to the last bit; only that integers are not
longer, that negative indices do not count from the end, and that a division by zero is not noticed. A variable has one
type. `TypeError` names the line of what is not in this language.

Arguments are words of eight bytes: a number is one, a table two (the address of its first row, and how many rows it
has), and a named tuple the words of its fields. In the text every variable is a place in memory, as `clang` writes it:
LLVM makes registers of these.
"""

from __future__ import annotations

import ast
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache, reduce
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

INT, FLOAT = "i64", "double"
"""The types of numbers, as LLVM has them."""

_OF_ANNOTATION = {"int": INT, "bool": INT, "float": FLOAT, "None": INT}
_OPERATIONS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.BitAnd: "and", ast.BitOr: "or",
    ast.BitXor: "xor", ast.LShift: "shl", ast.RShift: "ashr", ast.FloorDiv: "sdiv", ast.Mod: "srem",
}  # fmt: skip
_STORED = {"f8": FLOAT, "i8": INT, "i4": "i32", "i2": "i16", "b1": "i8"}
_COMPARISONS = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}


class Rows(NamedTuple):
    """The type of a table whose rows, numbers or records, lie `stride` bytes apart."""

    row: np.dtype[Any]
    stride: int


class Struct(NamedTuple):
    """The type of a named tuple."""

    name: str
    fields: tuple[str, ...]
    types: tuple[Any, ...]


class _Value(NamedTuple):
    """A value: its type, and a number or the address of a record, or of the words of a table or of a named tuple."""

    kind: Any
    text: str


_NONE = _Value(INT, "0")

_ENTRY = """define i32 @entry(ptr %result, ptr %words) {{
%answer = call {{ {0}, i1 }} @{1}(ptr %words)
%value = extractvalue {{ {0}, i1 }} %answer, 0
store {0} %value, ptr %result
%failed = extractvalue {{ {0}, i1 }} %answer, 1
%status = zext i1 %failed to i32
ret i32 %status
}}
!0 = !{{}}"""


def translate(function: Callable[..., object], arguments: Struct) -> str:
    """A module with `entry`, which takes the addresses of the result and of the words of arguments of these types.

    It returns 1 if an `assert` fails, else 0.
    """
    functions: dict[Any, _Function] = {}
    node = ast.parse(f"def all(words): return function({', '.join(f'words.{each}' for each in arguments.fields)})")
    all_of_it = _Function("all", node.body[0], {"function": function}, result_of(function), (arguments,), functions)
    lines = [line for each in functions.values() for line in each.lines]
    return "\n".join([*lines, _ENTRY.format(all_of_it.result, all_of_it.name)])


def result_of(function: Callable[..., object]) -> str:
    """The type of the result of a function; that of None is a number, too."""
    return _OF_ANNOTATION[function.__annotations__["return"]]


class _Function:
    """A function for arguments of some types, as `lines`; those that it calls are added to `functions`."""

    def __init__(
        self, name: str, node: Any, names: dict[str, Any], result: str, types: Sequence[Any], functions: dict[Any, Any]
    ) -> None:
        self.name, self.result, self.lines = f"{name}.{len(functions)}", result, list[str]()
        self._globals, self._functions, self._answer = names, functions, f"{{ {result}, i1 }}"
        self._variables: dict[str, _Value] = {}
        self._loops: list[tuple[str, str]] = []
        self._count = 0
        functions[names.get(name), tuple(types)] = self
        self._body(node, types)

    def _body(self, node: ast.FunctionDef, types: Sequence[Any]) -> None:
        given = ", ".join(f"{_llvm(kind)} %given{number}" for number, kind in enumerate(types))
        for number, (argument, kind) in enumerate(zip(node.args.args, types, strict=True)):
            self._set(argument.arg, _Value(kind, f"%given{number}"))
        self._run(node.body)
        self._return(_NONE)
        places = [f"{place} = alloca {_llvm(kind)}" for kind, place in self._variables.values()]
        head = f"define internal {self._answer} @{self.name}({given}) nounwind {{"
        self.lines = [head, *places, *self.lines, "unreachable", "}"]

    def _new(self, operation: str) -> str:
        """Append an operation; returns the name of its result."""
        self._count += 1
        self.lines.append(f"%t{self._count} = {operation}")
        return f"%t{self._count}"

    def _labels(self, count: int) -> list[str]:
        self._count += count
        return [f"part.{self._count - number}" for number in range(count)]

    def _go(self, label: str, begin: str = "") -> None:
        """Go on at a label; another part begins with `begin`, or is never reached."""
        self.lines += [f"br label %{label}", f"{begin or self._labels(1)[0]}:"]

    def _return(self, value: _Value, failed: bool = False) -> None:
        answer = self._new(f"insertvalue {self._answer} poison, {self.result} {self._as(self.result, value)}, 0")
        answer = self._new(f"insertvalue {self._answer} {answer}, i1 {int(failed)}, 1")
        self.lines += [f"ret {self._answer} {answer}", f"{self._labels(1)[0]}:"]

    def _run(self, nodes: Sequence[ast.stmt]) -> None:
        for node in nodes:
            try:
                self._statement(node)
            except (AttributeError, KeyError, ValueError) as error:
                line = f"{self._globals.get('__file__')}:{node.lineno}: {ast.unparse(node).splitlines()[0]}"
                raise TypeError(f"{line}: cannot be compiled: {error}") from error

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(sources)):
                for target, value in list(zip(targets, map(self._value, sources), strict=True)):
                    self._assign(target, value)
            case ast.Assign(targets, source):
                value = self._value(source)
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as source):
                self._assign(target, self._value(source))
            case ast.AugAssign(ast.Name(name), operation, source):
                self._set(name, self._operate(operation, self._variable(name), self._value(source)))
            case ast.AugAssign(target, operation, source):
                place = self._place(target)
                self._store(*place, self._operate(operation, self._load(*place), self._value(source)))
            case ast.If(test, body, otherwise):
                self._choose(self._truth(test), lambda: self._run(body), lambda: self._run(otherwise))
            case ast.While(test, body, []):
                self._loop(lambda: self._truth(test), lambda: self._run(body), lambda: None)
            case ast.For(target, ast.Call(ast.Name("range"), limits), body, []) if len(limits) < 3:
                self._count_through(target, [self._value(each) for each in limits], body)
            case ast.Break() | ast.Continue():
                self._go(self._loops[-1][isinstance(node, ast.Break)])
            case ast.Return(source):
                self._return(self._value(source) if source else _NONE)
            case ast.Assert(test):
                self._choose(self._truth(test), lambda: None, lambda: self._return(_NONE, failed=True))
            case ast.Expr(source):
                if not isinstance(source, ast.Constant):  # such as a docstring
                    self._value(source)
            case _:
                raise ValueError("an unknown statement")

    def _choose(self, test: str, one: Callable[[], object], other: Callable[[], object]) -> _Value:
        """Run one part or the other; returns the value that the part returns."""
        *begins, after = self._labels(3)
        self.lines.append(f"br i1 {test}, label %{begins[0]}, label %{begins[1]}")
        for begin, part in zip(begins, (one, other), strict=True):
            self.lines.append(f"{begin}:")
            if isinstance(value := part(), _Value):
                self._set(after, value)
            self.lines.append(f"br label %{after}")
        self.lines.append(f"{after}:")
        return self._variable(after) if after in self._variables else _NONE

    def _loop(self, test: Callable[[], str], body: Callable[[], object], advance: Callable[[], None]) -> None:
        again, inside, onward, after = self._labels(4)
        self._go(again, begin=again)
        self.lines += [f"br i1 {test()}, label %{inside}, label %{after}", f"{inside}:"]
        self._loops.append((onward, after))
        body()
        self._loops.pop()
        self._go(onward, begin=onward)
        advance()
        self._go(again, begin=after)

    def _count_through(self, target: ast.expr, limits: list[_Value], body: Sequence[ast.stmt]) -> None:
        first, end = [_NONE, *limits][-2:]
        counter = self._labels(1)[0]  # not the target, which the body may set
        self._set(counter, first)

        def run() -> None:
            self._assign(target, self._variable(counter))
            self._run(body)

        self._loop(
            lambda: self._compare(ast.Lt(), self._variable(counter), end),
            run,
            lambda: self._set(counter, self._operate(ast.Add(), self._variable(counter), _number(1))),
        )

    def _assign(self, target: ast.expr, value: _Value) -> None:
        if isinstance(target, ast.Name):
            self._set(target.id, value)
        else:
            self._store(*self._place(target), value)

    def _store(self, kind: np.dtype[Any], address: str, value: _Value) -> None:
        stored = _STORED[kind.str[1:]]
        text = self._as(FLOAT if stored == FLOAT else INT, value)
        text = text if stored in (INT, FLOAT) else self._new(f"trunc i64 {text} to {stored}")
        self.lines.append(f"store {stored} {text}, ptr {address}")

    def _set(self, name: str, value: _Value) -> None:
        kind, place = self._variables.setdefault(name, _Value(value.kind, f"%{name}.place"))
        self.lines.append(f"store {_llvm(kind)} {self._as(kind, value)}, ptr {place}")

    def _variable(self, name: str) -> _Value:
        kind, place = self._variables[name]
        return _Value(kind, self._new(f"load {_llvm(kind)}, ptr {place}"))

    def _value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Constant(number):
                return _number(number)
            case ast.Name(name):
                return self._variable(name) if name in self._variables else _number(self._globals[name])
            case ast.Attribute(ast.Name(name), field) if isinstance(self._globals.get(name), ModuleType):
                return _number(getattr(self._globals[name], field))
            case ast.Attribute() | ast.Subscript():
                return self._load(*self._place(node))
            case ast.BinOp(left, operation, right):
                return self._operate(operation, self._value(left), self._value(right))
            case ast.UnaryOp(ast.USub(), operand):
                return self._operate(ast.Mult(), self._value(operand), _number(-1))
            case ast.UnaryOp(ast.Not()) | ast.Compare() | ast.BoolOp():
                return self._flag(self._truth(node))
            case ast.IfExp(test, one, other):
                return self._choose(self._truth(test), lambda: self._value(one), lambda: self._value(other))
            case ast.Call(ast.Name("bool"), [operand]):
                return self._flag(self._truth(operand))
            case ast.Call(ast.Name(name), operands, []):
                return self._call(name, [self._value(each) for each in operands])
        raise ValueError("an unknown expression")

    def _truth(self, node: ast.expr) -> str:
        match node:
            case ast.UnaryOp(ast.Not(), operand):
                return self._new(f"xor i1 {self._truth(operand)}, 1")
            case ast.Compare(left, operations, others):
                values = [self._value(each) for each in (left, *others)]
                tests = [self._compare(*each) for each in zip(operations, values, values[1:], strict=False)]
                return reduce(lambda one, other: self._new(f"and i1 {one}, {other}"), tests)
            case ast.BoolOp(operation, [first, *others]):
                # the rest is computed only if it decides
                test, is_and = self._truth(first), isinstance(operation, ast.And)
                rest = others[0] if len(others) == 1 else ast.BoolOp(operation, others)
                parts = (lambda: self._flag(self._truth(rest))), (lambda: _number(not is_and))
                value = self._choose(test, *parts if is_and else parts[::-1])
            case _:
                value = self._value(node)
        return self._compare(ast.NotEq(), value, _NONE)

    def _flag(self, truth: str) -> _Value:
        return _Value(INT, self._new(f"zext i1 {truth} to i64"))

    def _call(self, name: str, values: list[_Value]) -> _Value:
        match name, values:
            case "len", [_Value(Rows(), address)]:
                return self._word(INT, address, 8)
            case "int" | "float", [value]:
                return _Value(_OF_ANNOTATION[name], self._as(_OF_ANNOTATION[name], value))
            case "min" | "max", [first, *others]:
                for other in others:
                    kind = FLOAT if FLOAT in (first.kind, other.kind) else INT
                    test = self._compare(ast.Lt() if name == "min" else ast.Gt(), other, first)
                    both = f"{kind} {self._as(kind, other)}, {kind} {self._as(kind, first)}"
                    first = _Value(kind, self._new(f"select i1 {test}, {both}"))
                return first
        function = self._globals[name]
        annotated = list(function.__annotations__.values())[:-1]
        types = tuple(_OF_ANNOTATION.get(each, value.kind) for each, value in zip(annotated, values, strict=True))
        called = self._functions.get((function, types)) or _Function(
            name, _definition(function), function.__globals__, result_of(function), types, self._functions
        )
        given = [f"{_llvm(kind)} {self._as(kind, value)}" for kind, value in zip(types, values, strict=True)]
        answer = self._new(f"call {called._answer} @{called.name}({', '.join(given)})")
        failed = self._new(f"extractvalue {called._answer} {answer}, 1")
        self._choose(failed, lambda: self._return(_NONE, failed=True), lambda: None)
        return _Value(called.result, self._new(f"extractvalue {called._answer} {answer}, 0"))

    def _operate(self, operation: ast.operator, left: _Value, right: _Value) -> _Value:
        name, is_division = _OPERATIONS[type(operation)], isinstance(operation, ast.FloorDiv | ast.Mod)
        kind = FLOAT if isinstance(operation, ast.Div) or FLOAT in (left.kind, right.kind) else INT
        if kind == FLOAT:
            name = f"f{name}"
        one, other = self._as(kind, left), self._as(kind, right)
        value = _Value(kind, self._new(f"{name} {kind} {one}, {other}"))
        if not is_division:
            return value
        # LLVM divides towards zero, Python downwards: one less if the remainder has not the sign of the divisor.
        rest = self._new(f"srem i64 {one}, {other}")
        differs = self._new(f"icmp slt i64 {self._new(f'xor i64 {rest}, {other}')}, 0")
        less = self._new(f"and i1 {differs}, {self._new(f'icmp ne i64 {rest}, 0')}")
        more = "-1, i64 0" if isinstance(operation, ast.FloorDiv) else f"{other}, i64 0"
        return _Value(INT, self._new(f"add i64 {value.text}, {self._new(f'select i1 {less}, i64 {more}')}"))

    def _compare(self, operation: ast.cmpop, left: _Value, right: _Value) -> str:
        name = _COMPARISONS[type(operation)]
        if FLOAT in (left.kind, right.kind):
            kind = f"fcmp {'u' if name == 'ne' else 'o'}{name} double"
            return self._new(f"{kind} {self._as(FLOAT, left)}, {self._as(FLOAT, right)}")
        kind = "icmp " + (name if name in ("eq", "ne") else f"s{name}")
        return self._new(f"{kind} i64 {self._as(INT, left)}, {self._as(INT, right)}")

    def _as(self, kind: Any, value: _Value) -> str:
        """A value as one of a type: an integer can be a float."""
        if kind == FLOAT and value.kind == INT:
            return self._new(f"sitofp i64 {value.text} to double")
        if kind != value.kind:
            raise ValueError(f"expected {kind}, not {value.kind}")
        return value.text

    def _word(self, kind: str, address: str, offset: int) -> _Value:
        """A word of an argument. Nothing is written there, so what was read once may be kept."""
        at = self._new(f"getelementptr i8, ptr {address}, i64 {offset}")
        return _Value(kind, self._new(f"load {kind}, ptr {at}, !invariant.load !0"))

    def _place(self, node: ast.expr) -> tuple[Any, str]:
        """The type and the address of a row of a table, or of a field of a record or of a named tuple."""
        match node:
            case ast.Subscript(of, index):
                rows, address = self._value(of)
                at = self._operate(ast.Mult(), self._value(index), _number(rows.stride)).text
                data = self._word("ptr", address, 0).text
                return rows.row, self._new(f"getelementptr i8, ptr {data}, i64 {at}")
            case ast.Attribute(of, field):
                kind, address = self._value(of)
                if isinstance(kind, Struct):
                    number = kind.fields.index(field)
                    kind, offset = kind.types[number], 8 * sum(map(_words, kind.types[:number]))
                else:
                    kind, offset = kind.fields[field][:2]
                return kind, self._new(f"getelementptr i8, ptr {address}, i64 {offset}")
        raise ValueError("an unknown target")

    def _load(self, kind: Any, address: str) -> _Value:
        """What lies at a place: a number, or else the place itself."""
        if isinstance(kind, str):
            return self._word(kind, address, 0)
        if isinstance(kind, Rows | Struct) or kind.names is not None:
            return _Value(kind, address)
        stored = _STORED[kind.str[1:]]
        text = self._new(f"load {stored}, ptr {address}")
        is_whole = stored in (INT, FLOAT)
        return _Value(stored, text) if is_whole else _Value(INT, self._new(f"sext {stored} {text} to i64"))


def _words(kind: Any) -> int:
    """How many words of arguments a value takes."""
    return sum(map(_words, kind.types)) if isinstance(kind, Struct) else 1 + isinstance(kind, Rows)


def _llvm(kind: Any) -> str:
    return kind if isinstance(kind, str) else "ptr"


def _number(value: Any) -> _Value:
    """A number that is known: the exact bits of a float."""
    is_float = isinstance(value, float)
    return _Value(FLOAT, f"0x{struct.pack('>d', value).hex()}") if is_float else _Value(INT, str(value.__index__()))


def _definition(function: Callable[..., object]) -> ast.FunctionDef:
    """The syntax tree of a function of a module."""
    return _definitions(str(sys.modules[function.__module__].__file__))[function.__name__]


@cache
def _definitions(file: str) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in ast.parse(Path(file).read_text()).body if isinstance(each, ast.FunctionDef)}
