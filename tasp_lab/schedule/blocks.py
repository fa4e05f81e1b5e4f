"""Blocks: what a schedule moves and computes. Every block is a sum of parts; a datum is a block of one part.

The *copy* of a block at a rank is the set of parts that the rank has. It is complete if it has all parts that exist.
A **kind** describes blocks of one sort: the tensors they consist of, how parts are joined, and the pool of buffers
that blocks of other ranks are received into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np

from tasp_lab.core.arrays import BoolArray, IntArray, freeze, frozen, whole
from tasp_lab.core.errors import ScheduleError
from tasp_lab.core.tables import brief
from tasp_lab.workload.layer import ELEMENT_BYTES

Join = Literal["", "add", "merge"]
"""How parts are joined: not at all (data), by addition, or as attention results by their log-sum-exp."""

MIN_BUFFERS = 2
"""Arrivals of a step must not overwrite what the same step sends and computes with."""

MAX_BYTES = 2**63
"""Bytes are counted with 64-bit integers."""

MAX_PARTS = 2**31 - 1
"""Maximum parts of a block."""


_COLUMN = "an int array of shape (blocks,)"


@dataclass(frozen=True)
class Field:
    """A tensor of a block: its elements per position, or per block.

    Parameters
    ----------
    name : its name.
    dtype : its dtype on the wire, a key of `tasp_lab.workload.layer.ELEMENT_BYTES`.
    shape : the elements per position, or per block.
    per_position : which of both.
    home_dtype : the dtype of resident copies, if it is wider than on the wire.

    >>> Field("lse", "fp32", (1, 32)).element_count
    32
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    per_position: bool = True
    home_dtype: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(whole(f"field {self.name!r}: shape", size) for size in self.shape))

    @property
    def element_count(self) -> int:
        """Elements per position, or per block."""
        return prod(self.shape)

    @property
    def at_home(self) -> Field:
        """The field of resident copies."""
        return self if self.home_dtype is None else replace(self, dtype=self.home_dtype, home_dtype=None)

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire per position, or per block."""
        return ELEMENT_BYTES[self.dtype] * self.element_count


@dataclass(frozen=True)
class Pool:
    """Buffers that blocks of one or more kinds are received into: the arrivals of step s occupy buffer s mod `buffers`.

    Raises `ScheduleError` for fewer than 2 buffers, and for what is no whole number.
    """

    name: str
    buffers: int

    def __post_init__(self) -> None:
        if not isinstance(self.buffers, int | np.integer) or self.buffers < MIN_BUFFERS:
            raise ScheduleError(f"pool {self.name!r}: {self.buffers} buffers, expected {MIN_BUFFERS} or more")
        object.__setattr__(self, "buffers", int(self.buffers))


@dataclass(frozen=True)
class Kind:
    """A sort of blocks.

    Parameters
    ----------
    name : the kind's name in messages.
    join : how parts are joined; empty for data, whose blocks have one part.
    pool : the buffers that copies are received into; None if what arrives is kept.
    fields : the tensors of a block, one after another; empty for plain bytes.
    bound : whether resident copies at the rank that owns them are the caller's tensors, not part of its memory.

    The fields of sums may be wider at home than on the wire: what is sent is rounded, what arrives is joined to a
    resident copy in its dtype.

    Raises `ScheduleError` for an unknown dtype, for a field that is not wider at home, and for data with two dtypes.
    """

    name: str
    join: Join = ""
    pool: Pool | None = None
    fields: tuple[Field, ...] = ()
    bound: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        for part in self.fields:
            for dtype in (part.dtype, part.at_home.dtype):
                if dtype not in ELEMENT_BYTES:
                    raise ScheduleError(
                        f"field {part.name!r} of {self.name}: unknown dtype {dtype!r}, expected one of "
                        f"{', '.join(ELEMENT_BYTES)}"
                    )
            if part.home_dtype is not None and part.at_home.size_bytes <= part.size_bytes:
                raise ScheduleError(
                    f"field {part.name!r} of {self.name} is {part.home_dtype} at home and {part.dtype} on the wire, "
                    "expected a wider dtype at home"
                )
        if self.is_wide_at_home and not self.join:
            raise ScheduleError(f"{self.name} are data that are wider at home than on the wire, expected sums")

    @property
    def home_fields(self) -> tuple[Field, ...]:
        """The fields of resident copies."""
        return tuple(each.at_home for each in self.fields)

    @property
    def is_wide_at_home(self) -> bool:
        """Whether resident copies have wider dtypes than blocks on the wire."""
        return self.home_fields != self.fields


DATA = Kind("data")
"""Plain bytes that are kept where they arrive."""


@dataclass(frozen=True, eq=False, repr=False)
class Blocks:
    """The blocks of a schedule, one entry per block.

    Parameters
    ----------
    kinds : the kinds.
    kind : int array (blocks,), the index in `kinds` of each block.
    bytes : int array (blocks,), the size of each block on the wire, 1 or more.
    parts : int array (blocks,), the number of parts of each; 1 for data.

    Raises `ScheduleError` if the arrays do not fit each other, for empty blocks, for more bytes than can be counted,
    and for data of several parts.

    >>> Blocks.of_data(np.array([8, 8])).parts
    array([1, 1])
    """

    kinds: Sequence[Kind]
    kind: IntArray
    bytes: IntArray
    parts: IntArray
    home_bytes: IntArray = field(init=False)
    """Int array (blocks,): the size of a resident copy of each block."""
    buffers: IntArray = field(init=False)
    """Int array (blocks,): the buffers of each block's pool, 0 without one."""
    pool: IntArray = field(init=False)
    """Int array (blocks,): the number of each block's pool in `pools`, -1 without one."""
    pools: Sequence[Pool] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))
        freeze(self, ("kind", "bytes", "parts"), "blocks: ", np.int64, 1, _COLUMN)
        lengths = {len(self.kind), len(self.bytes), len(self.parts)}
        if len(lengths) != 1:
            raise ScheduleError(f"blocks have columns of lengths {sorted(lengths)}, expected one length")
        _check(self.bytes < 1, "has no bytes")
        if (total := float(self.bytes.sum(dtype=np.float64))) >= MAX_BYTES:
            raise ScheduleError(f"blocks of {total:.3g} bytes in all, expected less than 2**63")
        _check(
            (self.kind < 0) | (self.kind >= len(self.kinds)),
            f"has an unknown kind, expected 0 to {len(self.kinds) - 1}",
        )
        _check((self.parts < 1) | (self.parts > MAX_PARTS), f"has too few or too many parts, expected 1 to {MAX_PARTS}")
        _check((self.parts > 1) & ~self.are_sums, "is data of several parts, expected one part")
        pools = list(dict.fromkeys(kind.pool for kind in self.kinds if kind.pool is not None))
        buffers = np.array([0 if kind.pool is None else kind.pool.buffers for kind in self.kinds], dtype=np.int64)
        numbers = np.array([-1 if kind.pool is None else pools.index(kind.pool) for kind in self.kinds], dtype=np.int64)
        object.__setattr__(self, "home_bytes", self._home_bytes())
        object.__setattr__(self, "pools", tuple(pools))
        object.__setattr__(self, "buffers", buffers[self.kind])
        object.__setattr__(self, "pool", numbers[self.kind])
        freeze(self, ("home_bytes", "buffers", "pool"), "blocks: ", np.int64, 1, _COLUMN)

    def _home_bytes(self) -> IntArray:
        home_bytes = self.bytes
        for number, kind in enumerate(self.kinds):
            if kind.is_wide_at_home:
                wire, home = (sum(each.size_bytes for each in fields) for fields in (kind.fields, kind.home_fields))
                of_kind = self.kind == number
                _check(of_kind & (self.bytes % wire != 0), f"of {kind.name} is no multiple of {wire} bytes")
                home_bytes = np.where(of_kind, self.bytes // wire * home, home_bytes)
        return home_bytes

    @cached_property
    def are_sums(self) -> BoolArray:
        """Bool array (blocks,): which blocks have parts that are joined."""
        return np.array([bool(kind.join) for kind in self.kinds], dtype=bool)[self.kind]

    @classmethod
    def of_data(cls, sizes_bytes: IntArray) -> Blocks:
        """Blocks of plain bytes. Raises `ScheduleError` unless their sizes are an int array."""
        sizes = frozen("sizes of blocks", sizes_bytes, np.int64, 1, _COLUMN)
        return cls((DATA,), np.zeros_like(sizes), sizes, np.ones_like(sizes))

    @classmethod
    def of_sums(cls, sizes_bytes: IntArray, parts: int) -> Blocks:
        """Blocks of bytes that are sums of the same number of parts. Raises as `of_data` does."""
        sizes = frozen("sizes of blocks", sizes_bytes, np.int64, 1, _COLUMN)
        count = max(0, min(whole("parts of blocks", parts), MAX_PARTS + 1))  # what is refused anyway may not fit
        return cls((Kind("sum", "add"),), np.zeros_like(sizes), sizes, np.full_like(sizes, count))

    def __repr__(self) -> str:
        return brief(self, f"{len(self)} blocks of {', '.join(each.name for each in self.kinds)}")

    def __len__(self) -> int:
        return len(self.kind)

    def kind_of(self, block: int) -> Kind:
        return self.kinds[int(self.kind[block])]

    def name(self, block: int) -> str:
        """A block in messages: its number and its kind, if it is not plain data.

        >>> Blocks.of_data(np.array([8])).name(0), Blocks.of_sums(np.array([8]), 2).name(0)
        ('block 0', 'block 0 (sum)')
        """
        kind = self.kind_of(block)
        return f"block {block}" if kind is DATA else f"block {block} ({kind.name})"


def _check(wrong: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], what: str) -> None:
    if wrong.any():
        raise ScheduleError(f"block {int(wrong.argmax())} {what}")
