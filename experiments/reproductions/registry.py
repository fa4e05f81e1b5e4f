"""The reproductions by name, in the order of the index: a folder each, with the file ``published.toml``.

A result whose file names ``tables`` of layers is found in these and in the tables of its folder, whose rows are run as
their library runs them (`found_in`); `REASONS` are why rows may be outside. Others have a module ``result`` with the
function ``find``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module

from experiments.reproductions.layers import (
    Reason,
    Row,
    found_in,
    layer_tables,
    links_alone,
    with_full_mask,
    with_overlap,
    without_contention,
    without_merges,
)
from experiments.reproductions.report import FOLDER
from experiments.reproductions.reproduction import Found, Reproduction

NAMES = (
    "tasp", "token_ring", "magi_attention", "ultra_attn", "usp", "ring_flash_attention", "burst_attention", "lasp2",
    "zeco",
)  # fmt: skip


def is_ring(row: Row) -> bool:
    """Whether a row is Transformer Engine's ring."""
    return row.measured.schedule in ("ring-attention", "zigzag-ring-attention")


def is_ulysses_backward(row: Row) -> bool:
    """Whether a row is Ulysses, backward."""
    return row.measured.schedule == "ulysses" and row.has(**{"pass": "backward"})


def is_balanced(row: Row) -> bool:
    """A zigzag or striped ring, whose calls are on halves or masked."""
    return row.measured.schedule != "ring-attention"


def any_row(row: Row) -> bool:
    """All rows: those of one GPU and of eight have the same error."""
    return True


REASONS: Mapping[str, Sequence[Reason]] = {
    "magi_attention": (
        Reason("calls of Transformer Engine's ring take longer than those of its kernel alone",
               "Transformer Engine's ring", is_ring,
               {"no contention": without_contention, "links alone": links_alone}),
        Reason("FlashAttention-3 is faster backward than on the GPU that its rate is from",
               "Ulysses backward", is_ulysses_backward,
               {"no contention": without_contention, "links alone": links_alone}),
    ),
    "ring_flash_attention": (
        Reason("calls on halves or under a mask take longer", "zigzag and striped rings", is_balanced,
               {"messages beside kernels": with_overlap, "no merges": without_merges}),
    ),
    "burst_attention": (
        Reason("the time is that of a full mask", "all rows", any_row, {"a full mask": with_full_mask}),
    ),
}  # fmt: skip


def reproduction(name: str) -> Reproduction:
    """The reproduction with this name."""
    folder = FOLDER / name
    published = tomllib.loads((folder / "published.toml").read_text(encoding="utf-8"))
    find: Callable[[], Found]
    if patterns := published.pop("tables", None):
        files = [*sorted(folder.glob("*.csv")), *layer_tables(*patterns)]
        find = partial(found_in, files, REASONS.get(name, ()))
    else:
        find = import_module(f"experiments.reproductions.{name}.result").find
    return Reproduction(name, find, **published)
