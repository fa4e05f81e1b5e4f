"""The bytes that a rank sends in each schedule, beside the published formulas; where they differ, the table says why.

X and Y are the elements of a rank's keys and of its queries, L the bytes of its log-sum-exps in float32, P the ranks.
Elements have 16 bits. Sources by schedule, read in code unless said otherwise: ring, zigzag and striped
zhuzilin/ring-flash-attention 8996282; `kv-all-gather` its llama3 variant; `rotate-kv-back` Transformer Engine
d0067d0d, ``p2p``; Ulysses arXiv:2309.14509; USP feifeibear/long-context-attention 56118e0; TokenRing
ACA-Lab-SJTU/token-ring 3fb15e4; Burst MayDomine/Burst-Attention b088c55; the double ring InternEvo; grids StarTrail,
arXiv:2407.00611 (paper, second hand).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.registry import ATTENTION, attention_names_on
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload
from tests.support.systems import passes_of


class Shard(NamedTuple):
    """X, Y, L and P; of a family, its split in two factors, else 1 and P."""

    x: Fraction
    y: Fraction
    l: Fraction  # noqa: E741
    p: int
    first: int
    second: int

    @property
    def away(self) -> Fraction:
        """The share of an all-to-all in the groups of a family that leaves the rank."""
        return Fraction(self.first - 1, self.first)


Formula = Callable[[Shard], Fraction]


@dataclass(frozen=True)
class Ledger:
    """Bytes sent per rank in each pass: as published (None if nowhere), and ours less that, with the reason.

    Without a published formula `more` is what ours is. Full masks have nothing to trim.
    """

    forward: Formula | None
    backward: Formula | None
    more_forward: Formula = lambda s: Fraction(0)
    more_backward: Formula = lambda s: Fraction(0)
    why: str = ""
    mask: str = "full"
    options: dict[str, Any] = field(default_factory=dict)


def keys_around(s: Shard) -> Fraction:
    return 4 * s.x * (s.p - 1)


def queries_and_results(s: Shard) -> Fraction:
    return (2 * s.y + 2 * s.y + s.l) * (s.p - 1)


def queries_and_their_gradients(s: Shard) -> Fraction:
    """Queries, gradients of results, two numbers per row; gradients of queries."""
    return (4 * s.y + 2 * s.l + 2 * s.y) * (s.p - 1)


def ring_flash_attention(s: Shard) -> Fraction:
    return keys_around(s) + 8 * s.x * s.p


def three_quarters(formula: Formula) -> Formula:
    return lambda s: Fraction(3, 4) * formula(s)


def star_trail(s: Shard) -> Fraction:
    """Of as many teams as a team has ranks, whose rings are left without a hop."""
    return 8 * s.y * (s.first - 1) if s.x == s.y and s.first == s.second else Fraction(0)


def beyond_star_trail(s: Shard) -> Fraction:
    return s.l * (s.first - 1) if star_trail(s) else (4 * s.y + s.l) * (s.second - 1) + 4 * s.x * (s.first - 1)


STAYS = "the part of a gradient that its owner makes is added at home, so the sum starts at the first other rank"
NO_BACKWARD = "no backward pass is published"
RING = Ledger(
    keys_around,
    ring_flash_attention,
    more_backward=lambda s: -8 * s.x,
    why=STAYS,
    options={"dataflow": "rotate-kv", "gradient_dtype": "fp32"},
)
TOKEN_RING = Ledger(queries_and_results, None, more_backward=queries_and_their_gradients, why=NO_BACKWARD)
KV_ALL_GATHER = Ledger(
    keys_around,
    lambda s: 2 * keys_around(s),
    more_backward=lambda s: -keys_around(s),
    why="gathered keys are kept for the backward pass, not gathered again",
    options={"gradient_dtype": "input"},
)
ULYSSES = Ledger(
    lambda s: 4 * (s.x + s.y) * Fraction(s.p - 1, s.p),
    lambda s: 4 * (s.x + s.y) * Fraction(s.p - 1, s.p),
    more_forward=lambda s: s.l * Fraction(s.p - 1, s.p),
    more_backward=lambda s: (2 * s.y + 2 * s.l) * Fraction(s.p - 1, s.p),
    why="results travel with their log-sum-exps, which are not kept with the heads; backward, queries travel again "
    "with two numbers per row, while the published code keeps those of its heads",
)

LEDGERS = {
    "ring-attention": RING,
    "zigzag-ring-attention": RING,
    "striped-ring-attention": RING,
    "half-each-way": RING,
    "tasp": RING,
    "token-ring": TOKEN_RING,
    "zigzag-token-ring": Ledger(
        three_quarters(queries_and_results),
        None,
        more_backward=three_quarters(queries_and_their_gradients),
        why=NO_BACKWARD,
        mask="causal",
    ),
    "token-multi-ring": TOKEN_RING,
    "kv-and-q-rings": Ledger(
        None,
        None,
        more_forward=lambda s: min(keys_around(s), queries_and_results(s)),
        more_backward=lambda s: min(2 * keys_around(s) - 4 * s.x, queries_and_their_gradients(s)),
        why="not published: under a full mask it is the cheaper of the ring and of TokenRing, gradients in 16 bits; "
        "keys start where the forward pass left them, and make a hop less",
        options={"gradient_dtype": "input"},
    ),
    "ulysses": ULYSSES,
    "staged-ulysses": ULYSSES,
    "usp": Ledger(
        lambda s: 4 * (s.x + s.y) * s.away + 4 * s.x * (s.second - 1),
        lambda s: 4 * (s.x + s.y) * s.away + 4 * s.x * (s.second - 1) + 8 * s.x * s.second,
        more_forward=lambda s: s.l * s.away,
        more_backward=lambda s: ((2 * s.y + 4 * s.x + 2 * s.l) + (2 * s.y + 4 * s.x)) * s.away - 8 * s.x,
        why="as Ulysses, and keys travel again too; gradients return from the groups in float32; and " + STAYS,
        options=RING.options,
    ),
    "kv-all-gather": KV_ALL_GATHER,
    "multi-ring-kv-all-gather": KV_ALL_GATHER,
    "direct-kv-all-gather": KV_ALL_GATHER,
    "trees-kv-all-gather": KV_ALL_GATHER,
    "direct-attention": Ledger(
        keys_around,
        None,
        more_backward=lambda s: 2 * keys_around(s),
        why="MagiAttention sends each rank the keys that it needs, once; bytes of its backward pass are not published: "
        "here keys come again, and gradients in 16 bits return",
    ),
    "burst": Ledger(
        keys_around,
        lambda s: 4 * s.y * (s.p - 1) + 2 * s.l * (s.p - 1) + 2 * s.y * s.p,
        more_backward=lambda s: -2 * s.y,
        why=STAYS,
        options={"gradient_dtype": "input"},
    ),
    "double-ring": Ledger(
        keys_around,
        None,
        more_backward=lambda s: keys_around(s) + 8 * s.x * (s.p - 1 + s.second - 1),
        why="the gradients of the published code change their dtype on the way and no formula is given; here they make "
        "P - 1 hops in float32, and R - 1 more, since each window ends where it began",
    ),
    "grid": Ledger(
        star_trail,
        None,
        more_forward=beyond_star_trail,
        more_backward=lambda s: (6 * s.y + 2 * s.l) * (s.second - 1) + 4 * s.x * (s.first - 1),
        why="published for as many KV heads as heads and rows as columns, without log-sum-exps; backward not tabulated",
    ),
}
"""By schedule or family."""

VARIANTS = {"usp:ring-attention": "usp", "usp:tasp": "usp", "double-ring:tasp": "double-ring"}
"""Variants of a family that send what the family does; others have no published formula."""


def ledger_of(name: str) -> Ledger | None:
    """The ledger of a name with its split and variant, if there is one."""
    family, *rest = name.split(":")
    variant = ":".join([family, *rest[1:]])
    return LEDGERS.get(VARIANTS.get(variant, variant))


CASES = [(p, name) for p in (4, 6, 9) for name in attention_names_on(p, variants=True) if ledger_of(name)]


layers = st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from([60, 120]), st.sampled_from([2, 4, 8]))
"""Batch, heads per KV head, half the positions of a rank, which all rings share equally, and elements per head."""


def layer_and_shard(name: str, p: int, mask: str, drawn: tuple[int, int, int, int]) -> tuple[Workload, Shard]:
    batch, group, half, head_dim = drawn
    layer = Workload(2 * half * p, batch, p * group, p, head_dim, mask=mask)
    rows = Fraction(batch * 2 * half)
    split = name.split(":")[1].split("x") if ":" in name else (1, p)
    first, second = map(int, split)
    return layer, Shard(rows * p * head_dim, rows * p * group * head_dim, 4 * rows * p * group, p, first, second)


def sent_per_rank(name: str, layer: Workload, p: int, **options: Any) -> list[Fraction]:
    """The mean over all ranks, forward and backward."""
    return [Fraction(int(each.bytes_sent().sum()), p) for each in passes_of(name, full_mesh(p), layer, **options)]


def test_every_schedule_has_a_ledger() -> None:
    """That of StarTrail, by teams and rings, is in `test_star_trail`; those of decode layers are in `test_decode`."""
    names = {name for name, spec in ATTENTION.items() if not spec.decode}
    assert sorted(names - LEDGERS.keys()) == ["startrail"]


@pytest.mark.parametrize(("p", "name"), CASES)
@settings(max_examples=6, deadline=None)
@given(layers)
def test_a_rank_sends_the_published_bytes_or_differs_as_explained(
    p: int, name: str, drawn: tuple[int, int, int, int]
) -> None:
    ledger = ledger_of(name)
    assert ledger is not None
    layer, shard = layer_and_shard(name, p, ledger.mask, drawn)
    published = [formula(shard) if formula else Fraction(0) for formula in (ledger.forward, ledger.backward)]
    more = [ledger.more_forward(shard), ledger.more_backward(shard)]
    assert ledger.why or not any(more)
    sent = sent_per_rank(name, layer, p, **ledger.options)
    assert sent == [a + b for a, b in zip(published, more, strict=True)]


@pytest.mark.parametrize("name", CIRCULATIONS)
@pytest.mark.parametrize("p", [2, 4, 5])
@settings(max_examples=6, deadline=None)
@given(layers)
def test_the_other_dataflows_send_what_transformer_engine_and_burst_do_less_what_stays_at_home(
    p: int, name: str, drawn: tuple[int, int, int, int]
) -> None:
    """Keys that return start at the last rank, so they make a hop less than published: their owner has them."""
    layer, s = layer_and_shard(name, p, "full", drawn)
    published = 8 * s.x * (s.p - 1)
    _, back = sent_per_rank(name, layer, p, dataflow="rotate-kv-back", gradient_dtype="input", trim=False)
    assert back == published - 4 * s.x
    published = 4 * s.y * (s.p - 1) + 2 * s.l * (s.p - 1) + 2 * s.y * s.p
    _, queries = sent_per_rank(name, layer, p, dataflow="rotate-q", gradient_dtype="input")
    assert queries == published - 2 * s.y
