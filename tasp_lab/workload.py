"""A workload: the attention layer that a schedule computes. It turns positions into bytes and pairs into FLOPs.

A sequence may be *packed*: several **documents** lie in it one after the other, and a query sees only keys of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Literal

import numpy as np

from tasp_lab.arrays import IntArray
from tasp_lab.errors import WorkloadError

Mask = Literal["full", "causal"]

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element by the name of its dtype."""

MOST_POSITIONS = 2**31
"""With this many positions the number of (query, key) pairs still fits into 64 bits."""

MOST_SUM = 2**63 - 1
"""FLOPs and bytes are summed in 64 bits."""


@dataclass(frozen=True)
class Workload:
    """One attention layer, forward.

    Parameters
    ----------
    sequence : number of positions, over all ranks.
    batch : number of sequences, all of that length.
    heads : query heads.
    kv_heads : heads of keys and values, a divisor of `heads`; as many as `heads` when None.
    head_dim : elements per head of queries, keys and values.
    dtype : ``bf16``, ``fp16`` or ``fp32``, of queries, keys, values and the result.
    mask : ``full``, or ``causal``: a query sees the keys at its own position and before it.
    window : with ``causal``, how many keys a query sees at most, its own included; all when None.
    documents : the number of positions of each document, in order, 0 allowed; one document when None.

    Raises `WorkloadError` for what cannot be computed.

    >>> layer = Workload(sequence=8192, heads=32, kv_heads=8, head_dim=128)
    >>> layer.kv_bytes_per_position, layer.flops_per_pair
    (4096, 16384)
    """

    sequence: int
    batch: int = 1
    heads: int = 1
    kv_heads: int | None = None
    head_dim: int = 128
    dtype: str = "bf16"
    mask: Mask = "full"
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("sequence", "batch", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name.replace('_', ' ')}: {getattr(self, name)}, expected 1 or more")
        if self.sequence > MOST_POSITIONS:
            raise WorkloadError(f"sequence: {self.sequence} positions, expected at most {MOST_POSITIONS}")
        if self.heads % self.kv_head_count:
            raise WorkloadError(f"{self.heads} heads are not a multiple of {self.kv_heads} KV heads")
        if self.dtype not in ELEMENT_BYTES:
            raise WorkloadError(f"unknown dtype {self.dtype!r}, expected one of {', '.join(ELEMENT_BYTES)}")
        if self.mask not in ("full", "causal"):
            raise WorkloadError(f"unknown mask {self.mask!r}, expected full or causal")
        if self.window is not None and (self.mask != "causal" or self.window < 1):
            raise WorkloadError(f"window: {self.window}, expected 1 or more, and the mask causal")
        if self.sequence**2 * max(self.flops_per_pair, self.kv_bytes_per_position) > MOST_SUM:
            raise WorkloadError(f"too large a layer: {self.sequence} positions, {self.heads} heads of {self.head_dim} "
                                f"elements, batch {self.batch}; expected FLOPs and bytes below 2**63")  # fmt: skip
        if self.documents is not None:
            object.__setattr__(self, "documents", check_documents(self.documents, self.sequence))

    @property
    def kv_head_count(self) -> int:
        """The number of KV heads, as a plain int."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def keys_seen(self) -> int | None:
        """How many keys a query sees at most where the window limits that, else None."""
        return self.window if self.window is not None and self.window < self.sequence else None

    @property
    def document_starts(self) -> IntArray:
        """The positions at which documents start that are not empty, ascending, an int array (documents,).

        >>> layer = Workload(sequence=5, documents=(2, 0, 3))
        >>> np.searchsorted(layer.document_starts, range(5), side="right") - 1      # the document of each position
        array([0, 0, 1, 1, 1])
        """
        lengths = np.array(self.documents or (self.sequence,), dtype=np.int64)
        return (np.cumsum(lengths) - lengths)[lengths > 0]

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of the keys and values at one position, of all sequences of the batch."""
        return 2 * self.batch * self.kv_head_count * self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def query_bytes_per_position(self) -> int:
        """Bytes of the queries, or of the result, at one position."""
        return self.batch * self.heads * self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def flops_per_pair(self) -> int:
        """FLOPs per (query, key) pair, all heads and sequences: two products of `head_dim` multiplications."""
        return 4 * self.batch * self.heads * self.head_dim


def documents_of(cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    """The lengths of documents from their cumulative lengths, as attention kernels for packed batches take them.

    >>> documents_of([0, 2, 2, 5])
    (2, 0, 3)

    Raises `WorkloadError` if the first is not 0, or one is less than that before it.
    """
    ends = _whole_numbers("cumulative length", cu_seqlens)
    if ends[:1] != (0,):
        raise WorkloadError(f"cumulative lengths start with {ends[0] if ends else 'nothing'}, expected 0")
    for number, (start, end) in enumerate(pairwise(ends), start=1):
        if end < start:
            raise WorkloadError(f"cumulative length {number}: {end}, expected {start} or more, as that before it")
    return tuple(end - start for start, end in pairwise(ends))


def check_documents(documents: Iterable[int], sequence: int) -> tuple[int, ...]:
    """The lengths of documents as plain ints; `WorkloadError` if they are not those of a sequence of this length.

    >>> check_documents([2, 0, 3], 5)
    (2, 0, 3)
    """
    lengths = _whole_numbers("document", documents)
    if not lengths:
        raise WorkloadError("documents: none, expected one or more")
    for number, length in enumerate(lengths):
        if length < 0:
            raise WorkloadError(f"document {number}: {length} positions, expected 0 or more")
    if sum(lengths) != sequence:
        raise WorkloadError(f"documents: {sum(lengths)} positions together, expected {sequence}, as in the sequence")
    return lengths


def _whole_numbers(what: str, numbers: Iterable[int]) -> tuple[int, ...]:
    """Integers of any type, such as NumPy's, as plain ints."""
    if not isinstance(numbers, Iterable):
        raise WorkloadError(f"{what}s: one {type(numbers).__name__}, expected several whole numbers")
    whole = []
    for number, value in enumerate(numbers):
        try:
            whole.append(index(value))
        except TypeError:
            raise WorkloadError(f"{what} {number}: a {type(value).__name__}, expected a whole number") from None
    return tuple(whole)
