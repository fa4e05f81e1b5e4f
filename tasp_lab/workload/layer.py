"""A workload: the attention layer that a schedule computes. It converts positions to bytes and pairs to FLOPs.

A sequence may be *packed*: it is a concatenation of **documents**, and a query attends only to keys of its document.
Or it may begin with a **cached prefix**, whose keys and values were computed before and which has no queries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import Field, dataclass, field, fields, replace
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Annotated, Any, get_args

from tasp_lab.core.arguments import Option, arguments_of, check_arguments, is_whole
from tasp_lab.core.choices import WHAT_IF_DTYPE
from tasp_lab.core.choices import AttentionKind as AttentionKind
from tasp_lab.core.choices import Decay as Decay
from tasp_lab.core.errors import WorkloadError
from tasp_lab.core.units import count_of
from tasp_lab.workload.mask import CAUSAL, MASKS, RANGES, Mask, Window, mask_named
from tasp_lab.workload.ranges import EXPECTED as EXPECTED_RANGES
from tasp_lab.workload.ranges import MaskRange, check_ranges

if TYPE_CHECKING:
    from tasp_lab.core.arrays import IntArray

LAYER_KINDS: Mapping[str, AttentionKind] = {"L": "linear", "S": "softmax"}
"""The kind of attention of each letter."""

MAX_LAYERS = 1024
"""Maximum number of layers: more than any published model has, and few enough to be written out."""

_EXPECTED = "a pattern such as LLSLLS or 4xLLLS"


def expand_layers(pattern: str, known: str = "LS") -> str:
    """The letters of all layers, in order: parts after commas, each with a COUNTx before it or without.

    >>> expand_layers("LL,2xLS"), expand_layers("LLLSLLLS") == expand_layers("2xLLLS")
    ('LLLSLS', True)

    Raises `WorkloadError` for letters that are not `known`, for parts without layers, a count of 0, and more than
    `MAX_LAYERS` layers.
    """
    if not isinstance(pattern, str):
        raise WorkloadError(f"layers: {pattern!r}, expected {_EXPECTED}")
    shown, found = f"layers {pattern[:40]!r}", ""
    for number, part in enumerate(pattern.split(","), start=1):
        count, letters = re.fullmatch("(?:([0-9]+)x)?(.*)", part, re.DOTALL).groups()  # type: ignore[union-attr]
        other = next((each for each in letters if each not in known), None)
        if other is not None:
            windowed = ", or W (softmax attention with a window)" if "W" in known else ""
            raise WorkloadError(
                f"{shown}: unknown layer {other!r}, expected L (linear) or S (softmax attention){windowed}"
            )
        if not letters:
            raise WorkloadError(f"{shown}: no layers in part {number}, expected {_EXPECTED}")
        times = 1 if count is None else int(count.lstrip("0")[:9] or 0)  # of a longer count nine digits are too many
        if not times:
            raise WorkloadError(f"{shown}: {count} times {letters[:40]}, expected 1 or more")
        if len(found) + times * len(letters) > MAX_LAYERS:
            raise WorkloadError(f"{shown}: too many layers, expected at most {MAX_LAYERS}")
        found += letters * times
    return found


ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes per element of each dtype."""

MAX_POSITIONS = 2**31
"""Maximum sequence length; the number of (query, key) pairs then fits into 64 bits."""

MAX_SUM = 2**63 - 1
"""Maximum of sums of FLOPs and bytes, which use 64-bit integers."""


@dataclass(frozen=True)
class Workload:
    """One attention layer, forward; a hybrid is a stack of such layers.

    Parameters
    ----------
    sequence : number of positions, over all ranks, or a text such as ``"128Ki"``.
    batch : number of sequences of that length.
    heads : query heads; 32, as in layers of about 7 billion parameters, unless given.
    kv_heads : heads of keys and values, a divisor of `heads`; equal to `heads` if None.
    head_dim : elements per head of queries and keys.
    dtype : ``bf16``, ``fp16``, ``fp32`` or ``fp8``, of queries, keys, values and the output; fp8 is only predicted.
    mask : a name in `tasp_lab.workload.mask.MASKS`: ``causal``, a query attends to the keys at its own and earlier
        positions, or ``full``; `visible` is the mask itself.
    window : with ``causal``, maximum number of keys per query, its own included; all if None. With ``full`` a pair, how
        many keys before and after its own position a query attends to, None or -1: all; or a text, see `window_of`.
    documents : the number of positions of each document, in order, 0 allowed; one document if None.
    cached_keys : the number of first positions that have keys and values only, as in a KV cache, or a text; the queries
        are those of the other positions. Such a layer has no backward pass.
    kind : ``softmax`` or ``linear`` attention, see `tasp_lab.schedules.linear.task`; ``hybrid``, a stack of both.
    decay : of the state of ``linear`` attention: ``none``, a constant per KV ``head``, or one that depends on the data,
        per position and KV head (``scalar``) or also per ``channel`` of the keys.
    layers : of a hybrid, the pattern of its layers, L for linear and S for softmax attention, such as ``LLSLLS`` or
        ``4xLLLS`` (`expand_layers`); expanded. A window is that of softmax layers.
    linear_kv_heads : of a hybrid, the KV heads of its linear layers; as many as `kv_heads`, those of its softmax
        layers, if None.
    value_dim : elements per head of values and of the output; equal to `head_dim` if None, see `value_size`.
    ranges : the mask as ranges of queries and keys, a `tasp_lab.workload.ranges.MaskRange` each, or a text; `mask` is
        then ``ranges``.
    sinks : whether every softmax has one more term, of a logit per head (`runtime.attention`). It is applied by the
        owner of a result, so it adds no bytes to messages and no FLOPs to pairs.
    decode : one query per sequence, that of its last position, whose key is one of the cached ones: engines write it to
        the cache before they attend. So `sequence` and `cached_keys` are one number, of which either may be left out.
        The ranks own queries and results by heads, `heads` / ranks each, and keys by positions; without window and
        documents.
    values_in_keys : values are the first `value_dim` elements of keys, one tensor that is kept, sent and read once, as
        in absorbed MLA (arXiv:2405.04434): one KV head, `head_dim` 576 and `value_dim` 512. Forward only.

    Raises `WorkloadError` for invalid or unsupported values.

    >>> layer = Workload("8Ki", heads=32, kv_heads=8, head_dim=128)
    >>> layer.sequence, layer.kv_bytes_per_position, layer.flops_per_pair
    (8192, 4096, 16384)
    """

    sequence: Annotated[
        int,
        Option(
            "Positions of an attention layer over all ranks: 8192 or 128Ki (131072).",
            flag="seq",
            is_count=True,
            expected="a whole number, or a text such as '128Ki'",
        ),
    ] = 0
    batch: Annotated[int, Option("Sequences.")] = 1
    heads: Annotated[int, Option("Query heads.")] = 32
    kv_heads: Annotated[int | None, Option("Key and value heads. Default: --heads.")] = None
    head_dim: Annotated[int, Option("Elements per head of queries and keys.")] = 128
    dtype: Annotated[str, Option("Dtype of queries, keys, values and results.")] = "bf16"
    mask: Annotated[str, Option(f"{', '.join(MASKS)}; causal: queries attend to keys up to their position.")] = "causal"
    window: Annotated[
        Window | None,
        Option(
            "Of a causal mask: the most keys that a query attends to; of a full one: keys before and after its "
            "position, such as 1023,1024, -1 for all.",
            is_count=True,
            expected="a whole number, a pair of keys before and after a query, or None",
        ),
    ] = None
    documents: Annotated[
        tuple[int, ...] | None,
        Option(
            "Lengths of packed documents, which attend only to themselves: 1000,200,4096 or 8x512. Replaces --seq, "
            "their sum.",
            is_count=True,
        ),
    ] = None
    cached_keys: Annotated[
        int,
        Option(
            "How many of the first --seq positions have keys and values only, as in a KV cache. Forward only, without "
            "--documents. With --decode all, in place of --seq.",
            is_count=True,
        ),
    ] = field(default=0, metadata={"optional": True})
    kind: Annotated[
        AttentionKind,
        Option(
            "Attention of the layer; hybrid: a stack of both kinds; all: a table of each (compare only). Hybrid with "
            "--layers."
        ),
    ] = field(default="softmax", metadata={"optional": True})
    decay: Annotated[
        Decay,
        Option(
            "Decay of linear attention under a causal mask: constant per KV head (head), or from the data, per "
            "position and KV head (scalar) or also per channel."
        ),
    ] = field(default="none", metadata={"optional": True})
    layers: Annotated[
        str,
        Option(
            "Layers of a hybrid, L for linear and S for softmax attention, such as LLSLLS or 4xLLLS.",
            expected=_EXPECTED,
        ),
    ] = field(default="", metadata={"optional": True})
    linear_kv_heads: Annotated[
        int | None, Option("KV heads of the linear layers of a hybrid. Default: --kv-heads.")
    ] = field(default=None, metadata={"optional": True})
    value_dim: Annotated[int | None, Option("Elements per head of values and results. Default: --head-dim.")] = field(
        default=None, metadata={"optional": True}
    )
    sinks: Annotated[bool, Option("A logit per head in every softmax, as in gpt-oss; times and bytes stay.")] = field(
        default=False, metadata={"optional": True}
    )

    ranges: Annotated[
        tuple[MaskRange | Sequence[Any], ...] | str | None,
        Option(
            "The mask as ranges of queries and keys: 0:4Ki/0:4Ki/causal,4Ki:8Ki/0:8Ki/full, also inverse-causal and "
            "bi-causal. Replaces --seq, which is the end of the last one, and --mask.",
            expected=EXPECTED_RANGES,
        ),
    ] = field(default=None, metadata={"optional": True})
    decode: Annotated[
        bool, Option("One query per sequence after --cached-keys, whose heads are spread over ranks.")
    ] = field(default=False, metadata={"optional": True})
    values_in_keys: Annotated[
        bool, Option("Values are the first --value-dim elements of keys, as in absorbed MLA. Forward only.")
    ] = field(default=False, metadata={"optional": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequence", count_of(self.sequence, "sequence"))
        object.__setattr__(self, "cached_keys", count_of(self.cached_keys, "cached keys", least=0))
        object.__setattr__(self, "window", window_of(self.window))
        check_arguments(vars(self), arguments_of(Workload, WorkloadError))
        if self.decode:
            if self.documents is not None:
                raise WorkloadError("decode with documents, expected neither documents nor a window")
            keys = self.cached_keys or self.sequence
            if self.sequence not in (0, keys):
                raise WorkloadError(f"sequence: {self.sequence} of a decode layer with {keys} cached keys, expected as "
                                    "many, or one of the two")  # fmt: skip
            object.__setattr__(self, "sequence", keys)
            object.__setattr__(self, "cached_keys", keys)
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("sequence", "batch", "heads", "kv_heads", "head_dim", "window", "cached_keys", "linear_kv_heads",
                     "value_dim"):  # fmt: skip
            value = getattr(self, name)
            if value is None or isinstance(value, tuple):
                continue
            if value < 1 and name not in ("cached_keys", "linear_kv_heads"):
                raise WorkloadError(f"{name.replace('_', ' ')}: {value}, expected 1 or more")
            object.__setattr__(self, name, index(value))  # a plain int
        if self.sequence > MAX_POSITIONS:
            raise WorkloadError(f"sequence: {self.sequence} positions, expected at most {MAX_POSITIONS}")
        if self.heads % self.kv_head_count:
            raise WorkloadError(f"{self.heads} heads are not a multiple of {self.kv_heads} KV heads")
        if self.dtype not in ELEMENT_BYTES:
            raise WorkloadError(f"unknown dtype {self.dtype!r}, expected one of {', '.join(ELEMENT_BYTES)}")
        self._check_ranges()
        mask = mask_named(self.mask)
        is_causal = mask.is_causal and mask.is_of_order
        if isinstance(self.window, tuple) and is_causal and self.window[1] == 0:  # a pair of flash-attn
            before = self.window[0]
            object.__setattr__(self, "window", None if before is None else before + 1)
        if self.window is not None and not (mask.is_full if isinstance(self.window, tuple) else is_causal):
            expected = "a causal mask (--mask causal), or a pair such as 7,7 with a full one"
            if isinstance(self.window, tuple):
                expected = f"{'0 keys after a query, or ' * is_causal}a full mask (--mask full)"
            raise WorkloadError(f"window: {window_text(self.window)} with the mask {self.mask}, expected {expected}")
        self._check_kind()
        positions = self.sequence**2 * max(self.flops_per_pair, self.kv_bytes_per_position)
        state = self.batch * self.heads * self.head_dim * self.value_size
        states = 0 if self.kind == "softmax" else 16 * self.sequence * state
        if max(positions, states) * max(1, len(self.layers)) > MAX_SUM:
            raise WorkloadError(f"layer too large: {self.sequence} positions, {self.heads} heads of {self.widths} "
                                f"elements, batch {self.batch}; expected FLOPs and bytes below 2**63")  # fmt: skip
        if self.documents is not None:
            object.__setattr__(self, "documents", check_documents(self.documents, self.sequence))
        if not 0 <= self.cached_keys < self.sequence + self.decode:
            raise WorkloadError(f"cached keys: {self.cached_keys}, expected 0 or more and fewer than the sequence of "
                                f"{self.sequence} positions")  # fmt: skip
        if self.cached_keys and self.documents is not None:
            raise WorkloadError(f"cached keys: {self.cached_keys} in packed documents, expected one document")

    def __repr__(self) -> str:
        given = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if not is_left_out(self, each))
        return f"Workload({', '.join(given)})"

    def _check_ranges(self) -> None:
        """Raise `WorkloadError` for ranges that are wrong, and beside anything else that says what queries see."""
        if self.ranges is None:
            if self.mask == RANGES.name:
                raise WorkloadError(f"mask {self.mask!r} without ranges, expected {EXPECTED_RANGES}")
            return
        for name in ("window", "documents", "cached_keys"):
            if getattr(self, name):
                raise WorkloadError(f"ranges beside {name.replace('_', ' ')}, expected one of them: ranges say which "
                                    "keys a query attends to")  # fmt: skip
        if self.kind != "softmax":
            raise WorkloadError(f"ranges of {self.kind} attention, expected softmax attention")
        if self.mask not in (CAUSAL.name, RANGES.name):
            raise WorkloadError(f"ranges beside the mask {self.mask}, expected none: each range has its own")
        object.__setattr__(self, "mask", RANGES.name)
        object.__setattr__(self, "ranges", check_ranges(self.ranges, self.sequence))

    def _check_kind(self) -> None:
        """Expand `layers`. Raise `WorkloadError` for an unknown kind or decay, and for what a kind cannot have."""
        for name, choice in (("kind", AttentionKind), ("decay", Decay)):
            if getattr(self, name) not in get_args(choice):
                known = ", ".join(get_args(choice))
                raise WorkloadError(f"unknown {name} {getattr(self, name)!r}, expected one of {known}")
        linear = self.linear_kv_heads
        if linear is not None and (self.kind != "hybrid" or linear < 1 or self.heads % linear):
            raise WorkloadError(f"linear KV heads: {linear}, expected a divisor of the {self.heads} heads of a hybrid")
        if self.layers and self.kind != "hybrid":
            raise WorkloadError(f"layers {self.layers[:40]!r} of {self.kind} attention, expected kind 'hybrid'")
        if self.kind == "hybrid" and not self.layers:
            raise WorkloadError(f"a hybrid without layers, expected {_EXPECTED}")
        object.__setattr__(self, "layers", expand_layers(self.layers) if self.layers else "")
        for name in ("decode", "values_in_keys"):
            if getattr(self, name) and self.kind != "softmax":
                raise WorkloadError(f"{name.replace('_', ' ')} of {self.kind} attention, expected softmax attention")
        if self.decode and self.window is not None:
            raise WorkloadError("decode with a window, expected neither documents nor a window")
        if self.values_in_keys and self.value_size > self.head_dim:
            raise WorkloadError(f"values in keys: {self.value_size} elements of values, expected at most the "
                                f"{self.head_dim} of keys")  # fmt: skip
        if self.kind == "softmax" and self.decay != "none":
            raise WorkloadError(f"decay {self.decay!r} of softmax attention, expected linear attention")
        if self.kind == "linear" and self.sinks:
            raise WorkloadError("sinks of linear attention, expected softmax attention, whose sums they are in")
        if self.kind == "linear" and self.window is not None:
            raise WorkloadError(
                f"window: {window_text(self.window)}, expected none for linear attention, whose state has no window"
            )
        mask, of_kind = mask_named(self.mask), "a hybrid" if self.kind == "hybrid" else "linear attention"
        if self.kind != "softmax":
            if self.dtype == WHAT_IF_DTYPE:
                raise WorkloadError(f"dtype {self.dtype!r} of {self.kind} attention, expected softmax attention")
            if self.cached_keys:
                raise WorkloadError(f"cached keys: {self.cached_keys}, expected none for {of_kind}")
            if not (mask.is_full or (mask.is_causal and mask.is_of_order)):
                raise WorkloadError(f"mask {self.mask!r} of {self.kind} attention, whose states hold all keys or all "
                                    "keys before a position: expected full or causal")  # fmt: skip
        if self.decay != "none" and not mask.is_causal:
            raise WorkloadError(
                f"decay {self.decay!r} with a full mask has no agreed meaning, expected a causal mask or no decay"
            )

    def of(self, letter: str) -> Workload:
        """One layer of a hybrid: ``L``, linear attention with its decay, or ``S``, softmax attention with its window.

        >>> hybrid = Workload(64, heads=1, mask="causal", window=8, kind="hybrid", decay="head", layers="2xLS")
        >>> hybrid.of("L").decay, hybrid.of("S").window, hybrid.of("L").window
        ('head', 8, None)

        Raises `WorkloadError` for another letter, and for a layer that is no hybrid.
        """
        if self.kind != "hybrid" or letter not in LAYER_KINDS:
            raise WorkloadError(f"layer {letter!r} of {self.kind} attention, expected L or S of a hybrid")
        if letter == "L":
            kv_heads = self.linear_kv_heads or self.kv_heads
            return replace(
                self, kind="linear", layers="", window=None, kv_heads=kv_heads, linear_kv_heads=None, sinks=False
            )
        return replace(self, kind="softmax", layers="", decay="none", linear_kv_heads=None)

    def resized(self, sequence: int) -> Workload:
        """The layer with another number of positions; of a decode layer also of cached keys."""
        return replace(self, sequence=sequence, cached_keys=sequence if self.decode else self.cached_keys)

    @property
    def kv_head_count(self) -> int:
        """The number of KV heads, as a plain int."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def value_size(self) -> int:
        """Elements per head of values and of the output.

        >>> Workload(8, head_dim=192).value_size, Workload(8, head_dim=192, value_dim=128).value_size
        (192, 128)
        """
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def widths(self) -> str:
        """Elements per head in words: ``128``, or ``192/128`` of keys and of values."""
        return f"{self.head_dim}" if self.value_size == self.head_dim else f"{self.head_dim}/{self.value_size}"

    @property
    def visible(self) -> Mask:
        """The keys that a query attends to: the mask, within the window if that limits it.

        >>> Workload(sequence=8, mask="causal", window=3).visible.high
        2
        """
        mask, window, farthest = mask_named(self.mask), self.window, self.sequence - 1
        if isinstance(window, tuple):
            before, after = (None if side is None or side >= farthest else side for side in window)
            return mask.within((before, after))
        return mask.within(None if window is None or window > farthest else window)

    @property
    def queries(self) -> int:
        """The number of positions that have queries."""
        return 1 if self.decode else self.sequence - self.cached_keys

    @property
    def document_starts(self) -> IntArray:
        """The start positions of the non-empty documents, ascending, an int array (documents,).

        >>> import numpy as np
        >>> layer = Workload(sequence=5, documents=(2, 0, 3), heads=1)
        >>> np.searchsorted(layer.document_starts, range(5), side="right") - 1      # the document of each position
        array([0, 0, 1, 1, 1])
        """
        import numpy as np  # the help of commands lists the fields of a layer, and takes long enough without it

        lengths = np.array(self.documents or (self.sequence,), dtype=np.int64)
        return (np.cumsum(lengths) - lengths)[lengths > 0]

    @property
    def slices(self) -> IntArray:
        """Which pairs of queries and keys attend, an int array (slices, 6), see `tasp_lab.workload.ranges`.

        >>> Workload(sequence=5, documents=(2, 0, 3), heads=1).slices.tolist()
        [[0, 2, 0, 2, 0, 1], [2, 5, 2, 5, 0, 2]]
        """
        import numpy as np

        if self.ranges is not None:
            return np.array([MaskRange(*each).slice for each in self.ranges], dtype=np.int64)
        first, mask = self.document_starts, self.visible
        end = np.append(first, self.sequence)[1:]
        query = np.maximum(first, self.sequence - self.queries)
        low = query - (end - 1) if mask.low is None else np.full_like(first, mask.low)
        high = end - 1 - first if mask.high is None else np.full_like(first, mask.high)
        return np.stack([query, end, first, end, low, np.minimum(high, end - 1 - first)], axis=1)

    def keys_of(self, query: int) -> IntArray:
        """The positions of the keys that the query at a position attends to, an int array (keys,).

        >>> Workload(8, heads=1, mask="causal", window=3).keys_of(5)
        array([3, 4, 5])
        """
        return _positions(self.slices, query, (0, 1), (2, 3), lambda low, high: (query - high, query - low))

    def queries_of(self, key: int) -> IntArray:
        """The positions of the queries that attend to the key at a position, an int array (queries,).

        >>> Workload(8, heads=1, mask="causal", window=3).queries_of(5)
        array([5, 6, 7])
        """
        return _positions(self.slices, key, (2, 3), (0, 1), lambda low, high: (key + low, key + high))

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of keys and values per position, over the whole batch."""
        values = 0 if self.values_in_keys else self.value_size
        return self.batch * self.kv_head_count * (self.head_dim + values) * ELEMENT_BYTES[self.dtype]

    @property
    def query_bytes_per_position(self) -> int:
        """Bytes of queries per position, over the whole batch."""
        return self.batch * self.heads * self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def output_bytes_per_position(self) -> int:
        """Bytes of the output per position, over the whole batch."""
        return self.batch * self.heads * self.value_size * ELEMENT_BYTES[self.dtype]

    @property
    def flops_per_pair(self) -> int:
        """FLOPs per (query, key) pair over all heads and sequences, forward (`pair_flops`)."""
        return self.batch * self.heads * pair_flops("forward", self.head_dim, self.value_size)

    @property
    def backward_flops_per_pair(self) -> int:
        """FLOPs per (query, key) pair over all heads and sequences, backward (`pair_flops`)."""
        return self.batch * self.heads * pair_flops("backward", self.head_dim, self.value_size)


def _positions(
    slices: IntArray, at: int, own: tuple[int, int], other: tuple[int, int], limits: Callable[..., tuple[Any, Any]]
) -> IntArray:
    """The positions of the other side that attend in slices with a position of one side; columns of slices."""
    import numpy as np

    rows = slices[(slices[:, own[0]] <= at) & (at < slices[:, own[1]])]
    least, most = limits(rows[:, 4], rows[:, 5])
    first, end = np.maximum(rows[:, other[0]], least), np.minimum(rows[:, other[1]], most + 1)
    parts = [np.arange(*each) for each in zip(first.tolist(), end.tolist(), strict=True)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def pair_flops(passing: str, head_dim: int, value_dim: int) -> int:
    """FLOPs per head and pair of a query and a key of `head_dim` elements, with values of `value_dim`.

    Forward the products Q K^T and P V; backward Q K^T again, dO V^T, P^T dO, dS K and dS^T Q (arXiv:2205.14135,
    appendix B.2).

    >>> pair_flops("forward", 192, 128), pair_flops("backward", 192, 128)
    (640, 1664)
    """
    return 2 * (head_dim + value_dim) if passing == "forward" else 2 * (3 * head_dim + 2 * value_dim)


Work = int | Workload
"""The bytes that each rank owns of a collective (`tasp_lab.schedules.collectives.kinds`), or an attention layer."""


def is_left_out(value: object, each: Field[Any]) -> bool:
    """Whether a field of a dataclass is one that is shown only where it is given."""
    return bool(each.metadata.get("optional")) and getattr(value, each.name) == each.default


def window_of(given: object) -> Any:
    """A window as `Workload` has it, of a text of the command line or a pair of flash-attn, where -1 is no limit.

    >>> window_of("4Ki"), window_of("1023,-1"), window_of([7, 0]), window_of((-1, None))
    (4096, (1023, None), (7, 0), None)

    Raises `WorkloadError` for what is no pair; what is neither a text nor a sequence is returned as it is.
    """
    found = given
    if isinstance(given, str):
        parts = [-1 if part.strip() == "-1" else count_of(part, "window", least=0) for part in given.split(",")]
        found = parts[0] if len(parts) == 1 else parts
    if not isinstance(found, Sequence | Set):
        return found
    sides = [-1 if side is None else side for side in found]
    if isinstance(found, Set) or len(sides) != 2 or not all(is_whole(side) and side >= -1 for side in sides):
        raise WorkloadError(f"window: {str(given)[:40]}, expected how many keys before and after a query, such as "
                            "1023,1024, with -1 for no limit")  # fmt: skip
    before, after = (None if side == -1 else index(side) for side in sides)
    return None if before is after is None else (before, after)


def window_text(window: Window) -> str:
    """As the command line takes it.

    >>> window_text(512), window_text((1023, None))
    ('512', '1023,-1')
    """
    return ",".join("-1" if side is None else f"{side}" for side in (window if isinstance(window, tuple) else [window]))


def documents_of(cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    """The lengths of documents from cumulative lengths, the format of attention kernels for packed batches.

    >>> documents_of([0, 2, 2, 5])
    (2, 0, 3)

    Raises `WorkloadError` if the first is not 0 or the sequence decreases.
    """
    ends = _whole_numbers("cumulative length", cu_seqlens)
    if ends[:1] != (0,):
        raise WorkloadError(f"cumulative lengths start with {ends[0] if ends else 'nothing'}, expected 0")
    for number, (start, end) in enumerate(pairwise(ends), start=1):
        if end < start:
            raise WorkloadError(f"cumulative length {number}: {end}, expected {start} or more, the preceding length")
    return tuple(end - start for start, end in pairwise(ends))


def check_documents(documents: Iterable[int], sequence: int) -> tuple[int, ...]:
    """The lengths of documents as plain ints; `WorkloadError` unless they sum to the sequence length.

    >>> check_documents([2, 0, 3], 5)
    (2, 0, 3)
    """
    lengths = _whole_numbers("document", documents)
    if not lengths:
        raise WorkloadError("no documents, expected one or more")
    for number, length in enumerate(lengths):
        if length < 0:
            raise WorkloadError(f"document {number}: {length} positions, expected 0 or more")
    if sum(lengths) != sequence:
        raise WorkloadError(f"documents: {sum(lengths)} positions together, expected {sequence}, the sequence length")
    return lengths


def _whole_numbers(what: str, numbers: Iterable[int]) -> tuple[int, ...]:
    """Integers of any type, such as NumPy's, as plain ints, in an order that is given."""
    if not isinstance(numbers, Iterable) or isinstance(numbers, bytes | bytearray | Mapping | Set):
        raise WorkloadError(f"{what}s: {type(numbers).__name__}, expected a sequence of whole numbers")
    found = tuple(numbers)
    for number, value in enumerate(found):
        if not is_whole(value):
            raise WorkloadError(f"{what} {number}: a {type(value).__name__}, expected a whole number")
    return tuple(map(index, found))
