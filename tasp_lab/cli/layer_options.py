"""Options that describe what is done: an attention layer and how it is computed, or a collective's bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter, Token

from tasp_lab.attention import USUAL_ROOMS
from tasp_lab.attention_backward import Way
from tasp_lab.errors import QuantityError
from tasp_lab.quantities import parse_count, parse_flops_per_s, parse_size_bytes
from tasp_lab.schedules import AttentionOptions, Pass, Work
from tasp_lab.workload import Mask, Workload

_LIKE = "like timed:300TFLOP/s"

MOST_DOCUMENTS = 100_000
"""A schedule has blocks and kernel calls of its own for each document, so many fewer can be simulated."""


def whole_number(_: object, tokens: Sequence[Token]) -> int:
    """Converts an option; what is no whole number is answered in one line."""
    text = tokens[0].value
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(f"{text[:40]!r}, expected a whole number")
    return int(text)


def _whole(text: str) -> Parameter:
    return Parameter(converter=whole_number, help=text)


@Parameter(name="*")
@dataclass(frozen=True)
class LayerChoice:
    """An attention layer, and how it is computed."""

    seq: Annotated[
        str | None, Parameter(help="Attention over so many positions, like 8192, 128Ki or 1M; over all ranks.")
    ] = None
    documents: Annotated[
        str | None,
        Parameter(
            help="A packed batch: lengths of documents that see only themselves, like 1000,200,4096 or 8x512. Their "
            "sum is --seq, which need not be given then."
        ),
    ] = None
    batch: Annotated[int, _whole("Sequences.")] = 1
    heads: Annotated[int, _whole("Query heads.")] = 32
    kv_heads: Annotated[int | None, _whole("Heads of keys and values; as many as --heads if not given.")] = None
    head_dim: Annotated[int, _whole("Elements per head.")] = 128
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], Parameter(help="Of queries, keys, values and the result.")] = (
        "bf16"
    )
    mask: Annotated[Mask, Parameter(help="causal: a query sees the keys up to its own position.")] = "full"
    window: Annotated[int | None, _whole("With causal, how many keys a query sees at most.")] = None
    passes: Annotated[Pass, Parameter(name="--pass", help="both: forward, then backward.")] = "forward"
    way: Annotated[
        Way,
        Parameter(
            help="Of a backward pass. onward: keys and values travel as forward, gradients follow; reversed: they "
            "travel back from where an untrimmed forward pass has left them; queries: queries travel. auto: the one "
            "that sends fewest bytes."
        ),
    ] = "auto"
    gradient_dtype: Annotated[
        Literal["fp32", "input"], Parameter(help="Of gradients that travel; input: as --dtype.")
    ] = "fp32"
    trim: Annotated[bool, Parameter(help="Blocks stop where nobody sees them any more.")] = True
    rooms: Annotated[int, _whole("How many steps' arrivals a rank has room for.")] = USUAL_ROOMS
    compute: Annotated[
        str | None,
        Parameter(
            help="timed:RATE, kernel calls take as long as at that rate, like timed:300TFLOP/s, on the fabric's own "
            "clock; real, kernels are real (validate only). If not given, the machine's own rate or 300TFLOP/s, on the "
            "emulated fabric times its scale; real on other fabrics.",
            show_default=False,
        ),
    ] = None

    def work(self, shard_bytes: str | None) -> Work:
        """What is done: a layer of `seq` positions, or a collective."""
        is_layer = self.seq is not None or self.documents is not None
        if is_layer == (shard_bytes is not None):
            got = "both" if is_layer else "neither"
            raise QuantityError(f"expected --seq (an attention layer) or --shard-bytes (a collective), got {got}")
        if shard_bytes is not None:
            if self != USUAL_LAYER:
                raise QuantityError("options of attention layers apply with --seq only, not with --shard-bytes")
            return parse_size_bytes(shard_bytes)
        documents = None if self.documents is None else parse_documents(self.documents)
        return Workload(
            sequence=sum(documents or ()) if self.seq is None else parse_count(self.seq, "sequence"),
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            mask=self.mask,
            window=self.window,
            documents=documents,
        )

    def options(self) -> AttentionOptions:
        """Which passes are computed, and how."""
        return AttentionOptions(self.passes, self.trim, self.rooms, self.way, self.gradient_dtype)

    def rate_flops_per_s(self) -> float | Literal["real"] | None:
        """How kernel calls are computed: at a rate in FLOP/s, ``real``, or as is usual."""
        if self.compute is None:
            return None
        if self.compute == "real":
            return "real"
        kind, _, rate = self.compute.partition(":")
        if kind != "timed":
            raise QuantityError(f"compute {self.compute!r}: expected timed:RATE, {_LIKE}, or real")
        return parse_flops_per_s(rate)

    def predicted_flops_per_s(self) -> float | None:
        """The same for a prediction, which needs a rate."""
        rate = self.rate_flops_per_s()
        if rate == "real":
            raise QuantityError(f"compute 'real': a prediction has no kernels, expected timed:RATE, {_LIKE}")
        return rate


def parse_documents(text: str) -> tuple[int, ...]:
    """The lengths of documents, one by one or so many of the same, at most `MOST_DOCUMENTS`.

    >>> parse_documents("1000,2x1Ki,200")
    (1000, 1024, 1024, 200)
    """
    found = list[int]()
    for part in text.split(","):
        times, of, length = part.rpartition("x")
        count = parse_count(times, "number of documents") if of else 1
        if len(found) + count > MOST_DOCUMENTS:
            raise QuantityError(f"documents {text[:40]!r}: expected at most {MOST_DOCUMENTS} of them")
        found += [parse_count(length, "document")] * count
    return tuple(found)


USUAL_LAYER = LayerChoice()
