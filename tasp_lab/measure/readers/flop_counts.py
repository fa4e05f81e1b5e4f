"""How a table counts FLOPs: what a rate in TFLOP/s stands for.

Attention has 4 FLOPs forward per (query, key) pair and element of a head, and 10 backward. Tables differ in the pairs:
those that a causal mask leaves (*masked*, half of a square), or all of the rectangle (*full*). A rate without that
convention is no time, so a table must state it::

    # flops: causal halved

or ``causal full``. The line that benchmark tables carry, ``# note: FLOPs = ...; causal halved``, says the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from tasp_lab.core.errors import TableError
from tasp_lab.measure.readers.file_position import quoted
from tasp_lab.workload.kernel_calls import pairs_in_band

CountedPairs = Literal["masked", "full"]
"""The pairs that a table counts under a causal mask."""

FLOPS_BY_PASS = {"forward": 4, "backward": 10, "forward+backward": 14}
"""FLOPs per pair and element of a head."""

_WORDS: dict[str, CountedPairs] = {"half": "masked", "halved": "masked", "masked": "masked", "full": "full"}
_HEADER = re.compile(rf"\b({'|'.join(_WORDS)})\b", re.IGNORECASE)
_NOTE = re.compile(
    r"t?flops = .*?\bcausal[ -](?:is |are )?(?:counted )?(?:as |in )?(half|halved|full)\b", re.IGNORECASE
)


def counted_pairs(headers: Mapping[str, str], file: str) -> CountedPairs | None:
    """The pairs that the rates of a table count; None if its headers do not say.

    >>> counted_pairs({"flops": "causal full"}, "t.csv"), counted_pairs({"source": "a page"}, "t.csv")
    ('full', None)
    >>> counted_pairs({"note": "FLOPs = 4*B*H*Sq*Sk*D forward, 2.5x that backward; causal halved"}, "t.csv")
    'masked'

    Raises `TableError` for a header ``flops`` that says neither.
    """
    if stated := headers.get("flops"):
        found = _HEADER.search(stated)
        if found is None:
            raise TableError(f"{file}: header flops {quoted(stated)}, expected causal halved or causal full")
        return _WORDS[found[1].lower()]
    for line in headers.get("note", "").splitlines():
        if found := _NOTE.match(line):
            return _WORDS[found[1].lower()]
    return None


def attention_flops(pairs: int, batch: int, heads: int, head_dim: int, passing: str) -> int:
    """The FLOPs of attention with this number of (query, key) pairs per head; `passing` is one of `FLOPS_BY_PASS`."""
    return FLOPS_BY_PASS[passing] * pairs * batch * heads * head_dim


def pairs_of(queries: int, keys: int, *, causal: bool, counted: CountedPairs = "masked") -> int:
    """The (query, key) pairs of a rectangle; a causal mask is aligned to its last query and key.

    >>> pairs_of(3, 3, causal=True), pairs_of(2, 4, causal=True), pairs_of(3, 3, causal=True, counted="full")
    (6, 7, 9)
    """
    low = queries - keys if causal and counted == "masked" else 1 - keys
    return int(pairs_in_band(low, queries - 1, queries, keys))
