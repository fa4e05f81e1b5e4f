"""Shapes and masks of tests of other projects, and how each is said in the language of tasp-lab.

    case = next(case for case in cases() if case.needs <= known())
    case.says               # 'attention(q, k, v, causal=True, window=33)', or what is missing
    case.workload, case.keywords, case.seen

``*.toml`` beside this module has the rows. Heads, widths, masks, dtypes and batches are those of the tests, lengths are
divided by `divide`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from runtime import attention_with_lse
from tasp_lab.core.errors import WorkloadError
from tasp_lab.workload.layer import Workload

FOLDER = Path(__file__).parent

BEFORE = "1ce82bdb"

WIDTH, RANGES, SIDES, SINKS, BIAS = NEEDS = (
    "values of another width than keys",
    "masks as ranges",
    "windows on both sides",
    "sinks",
    "additive bias",
)
"""What a case may need of the language beyond what it had at the commit `BEFORE`."""


@dataclass(frozen=True)
class Case:
    """A row of a file, lengths as in the test; see the comments of the files."""

    project: str
    source: str
    name: str
    sequence: int
    divide: int
    heads: tuple[int, int]
    head_dim: int
    dtype: str
    mask: str
    batch: int = 1
    value_dim: int = 0
    kind: str = "softmax"
    window: tuple[int, int] = (-1, -1)
    documents: tuple[int, ...] = ()
    ranges: tuple[str, ...] = ()
    also: str = ""
    sinks: int = 0
    off_by_one: bool = False
    bias: str = ""
    way: str = ""
    decay: str = "none"
    scale: float | None = None
    gate_normalizer: float = 1.0
    states: bool = False
    normalize: bool = False
    ranks: int = 0
    groups: int = 1

    @property
    def value_size(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def cut_documents(self) -> list[int]:
        """The lengths of documents that are run, one if they are not packed."""
        if self.documents or not self.ranges:
            return [each // self.divide for each in self.documents or (self.sequence,)]
        return [end - start for start, end in pairwise(sorted({0, *(row[1] for row in self.cut_ranges)}))]

    @property
    def length(self) -> int:
        """The positions that are run."""
        return sum(self.cut_documents) if self.documents else self.sequence // self.divide

    @property
    def cut_window(self) -> tuple[int, int]:
        left, right = (each if each < 0 else each // self.divide for each in self.window)
        return left, right

    @property
    def cut_ranges(self) -> list[tuple[int, int, int, int, str]]:
        """First query, end of queries, first key, end of keys and kind, of the positions that are run."""
        found = []
        for text in self.ranges:
            queries, keys, kind = text.split("/")
            ends = [int(end) // self.divide for side in (queries, keys) for end in side.split(":")]
            found.append((ends[0], ends[1], ends[2], ends[3], kind))
        return found

    @property
    def seen(self) -> torch.Tensor:
        """Which query sees which key: bool [positions, positions]."""
        n = self.length
        query, key = torch.arange(n)[:, None], torch.arange(n)[None]
        if self.ranges:
            found = torch.zeros(n, n, dtype=torch.bool)
            for first, end, first_key, end_key, kind in self.cut_ranges:
                own = (query >= first) & (query < end) & (key >= first_key) & (key < end_key)
                if kind in ("causal", "bi-causal"):
                    own = own & (key - end_key <= query - end)
                if kind in ("inverse-causal", "bi-causal"):
                    own = own & (key - first_key >= query - first)
                found |= own
            return found
        document = torch.arange(len(self.cut_documents)).repeat_interleave(torch.tensor(self.cut_documents))
        found = document[:, None] == document
        if self.mask == "causal":
            found &= key <= query
        left, right = self.cut_window
        if left >= 0:
            found &= query - key <= left
        if right >= 0:
            found &= key - query <= right
        return found

    @property
    def needs(self) -> frozenset[str]:
        """What it needs of the language beyond that of the commit `BEFORE`."""
        needed = {
            WIDTH: self.value_size != self.head_dim, RANGES: self.ranges and not self.also, SINKS: self.sinks,
            SIDES: self.mask == "full" and self.window[1] > 0, BIAS: self.bias,
        }  # fmt: skip
        return frozenset(each for each, is_needed in needed.items() if is_needed)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of `runtime.attention` or `runtime.linear_attention`, but for tensors of heads and positions."""
        if self.kind == "linear":
            return {"return_final_state": True} if self.states else {}
        found: dict[str, Any] = {} if self.scale is None else {"scale": self.scale}
        left, right = self.cut_window
        if self.ranges and (not self.also or RANGES in known()):
            return found | {"ranges": [((a, b), (c, d), kind) for a, b, c, d, kind in self.cut_ranges]}
        if self.mask == "causal":
            found |= {"causal": True} | ({"window": left + 1} if left >= 0 else {})
        elif left >= 0:
            found |= {"window": (left, right)}
        if self.documents or self.also == "documents":
            found["cu_seqlens"] = list(accumulate(self.cut_documents, initial=0))
        return found

    @property
    def workload(self) -> Workload:
        heads, kv_heads = self.heads
        given, more = self.keywords, dict[str, Any]()
        if self.kind == "linear":
            decay = self.decay if self.decay in ("none", "scalar", "channel") else "head"
            more = {"kind": "linear", "decay": decay}
        if "cu_seqlens" in given:
            more["documents"] = tuple(self.cut_documents)
        more |= {name: given[name] for name in ("window", "ranges") if name in given}
        if "ranges" not in given:
            more["mask"] = self.mask
        if self.value_dim:
            more["value_dim"] = self.value_dim
        return Workload(self.length, batch=self.batch // self.groups, heads=heads, kv_heads=kv_heads, dtype=self.dtype,
                        head_dim=self.head_dim, **more)  # fmt: skip

    @property
    def says(self) -> str:
        """How it is said, or what is missing."""
        missing = sorted(self.needs - known())
        if missing:
            return f"not to be said: {', '.join(missing)}"
        given = self.keywords | ({"sinks": "logarithms of sums"} if self.sinks else {})
        if self.kind == "linear":
            given |= {"gates": "g"} if self.decay in ("scalar", "channel") else {}
            given |= {"decay": self.decay} if self.decay in ("alibi", "retention") else {}
        shown = ", ".join(["q, k, v", *(f"{name}={value}" for name, value in given.items())])
        normalized = " / the same for values of 1" if self.normalize else ""
        return f"{'linear_' * (self.kind == 'linear')}attention({shown}){normalized}"


@cache
def known() -> frozenset[str]:
    """What the language has of what cases need."""
    keywords = signature(attention_with_lse).parameters
    found = {WIDTH: True, RANGES: "ranges" in keywords, SINKS: "sinks" in keywords, BIAS: "bias" in keywords}
    both_sides: dict[str, Any] = {"mask": "full", "window": (1, 1)}
    try:
        found[SIDES] = bool(Workload(8, **both_sides))
    except WorkloadError:
        found[SIDES] = False
    return frozenset(each for each, is_there in found.items() if is_there)


@cache
def cases() -> list[Case]:
    """All cases; lists of heads, head dims and dtypes in a file or row stand for each of their combinations."""
    found = []
    for path in sorted(FOLDER.glob("*.toml")):
        common = tomllib.loads(path.read_text())
        for row in common.pop("cases"):
            given: dict[str, Any] = {name: _hashable(value) for name, value in (common | row).items()}
            lists = [name for name in ("heads", "head_dim", "dtype") if _is_list(name, given[name])]
            for values in product(*(given[name] for name in lists)):
                one = Case(**given | dict(zip(lists, values, strict=True)))
                one = replace(one, name=", ".join(map(str, (one.name, *values))))
                found.append(replace(one, scale=_scale(one)))
    return found


def _hashable(value: object) -> object:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _is_list(name: str, value: object) -> bool:
    return isinstance(value, tuple) and (name != "heads" or isinstance(value[0], tuple))


def _scale(case: Case) -> float | None:
    """MagiAttention's tests scale scores by 1 / head_dim in about half of their cases."""
    is_half = case.project == "MagiAttention" and crc32(case.name.encode()) % 2 == 0
    return 1 / case.head_dim if is_half else case.scale
