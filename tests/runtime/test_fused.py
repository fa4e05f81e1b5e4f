"""What a pass does with rows beside attention, against float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels import fused

Tensor = torch.Tensor


class Sides(NamedTuple):
    """Two partial results, [positions, batch, heads, head_dim], and which rows are merged, if not all."""

    out: Tensor
    lse: Tensor
    part: Tensor
    part_lse: Tensor
    rows: Tensor | None
    part_rows: Tensor | None

    def copy(self) -> Sides:
        return Sides(*(None if x is None else x.clone() for x in self))


@st.composite
def sides(draw: st.DrawFn) -> Sides:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    count, batch, heads, dim = (draw(st.integers(1, most)) for most in (6, 2, 3, 5))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    has_rows, has_part_rows = draw(st.booleans()), draw(st.booleans())

    def side(whole: int) -> tuple[Tensor, Tensor]:
        out = torch.randn(whole, heads, batch, dim, generator=generator).transpose(1, 2)
        lse = 9 * torch.randn(whole, batch, heads, generator=generator)
        empty = torch.rand(whole, batch, heads, generator=generator) < 0.3
        return out.masked_fill_(empty[..., None], 0), lse.masked_fill_(empty, -math.inf)

    into, part = side(count + 3 if has_rows else count), side(count + 2 if has_part_rows else count)
    if draw(st.booleans()):  # as flash operators say that a row has no keys
        part[1].masked_fill_(part[1] == -math.inf, math.inf)
    rows = torch.randperm(count + 3, generator=generator)[:count] if has_rows else None
    part_rows = torch.randperm(count + 2, generator=generator)[:count] if has_part_rows else None
    return Sides(*into, part[0].to(dtype), part[1], rows, part_rows)


def exact(case: Sides, empty: bool) -> tuple[Tensor, Tensor]:
    """The merged rows in float64, by the definition: weights are shares of the sum of exponentials."""
    out, lse = (x.double() if case.rows is None else x.double()[case.rows] for x in (case.out, case.lse))
    part, part_lse = (x.double() if case.part_rows is None else x.double()[case.part_rows] for x in case[2:4])
    part_lse = part_lse.masked_fill(part_lse == math.inf, -math.inf)
    lse = torch.full_like(lse, -math.inf) if empty else lse
    total = torch.logaddexp(lse, part_lse)
    shares = [(x - total).exp().nan_to_num(0)[..., None] for x in (lse, part_lse)]
    return out.nan_to_num(0) * shares[0] + part * shares[1], total


UNIT = 2.0**-22
"""Two units in the last place of float32, relative to the largest term."""


def check_merge(case: Sides, empty: bool) -> None:
    expected, untouched, found = exact(case, empty), case.copy(), case.copy()
    fused.merge(*found[:4], found.rows, found.part_rows, empty=empty)
    out, lse = (x if case.rows is None else x[case.rows] for x in found[:2])
    assert (out - expected[0]).abs().max() <= UNIT * 8
    assert torch.equal(lse == -math.inf, expected[1] == -math.inf)
    there = lse > -math.inf
    assert torch.allclose(lse[there].double(), expected[1][there], rtol=UNIT, atol=UNIT)
    if case.rows is not None:
        others = torch.ones(len(case.out), dtype=torch.bool)
        others[case.rows] = False
        assert torch.equal(found.out[others], untouched.out[others])
        assert torch.equal(found.lse[others], untouched.lse[others])


@given(sides(), st.booleans())
@settings(max_examples=100)
def test_merged_rows_are_those_of_all_keys(case: Sides, empty: bool) -> None:
    check_merge(case, empty)


def check_add(case: Sides, empty: bool, rounded: bool, most: float = 0) -> None:
    """`most`: error of a rounding, relative to the terms, whose sum may cancel."""
    total, part = case.out.to(case.part.dtype), case.out if case.part.dtype == torch.bfloat16 else case.part
    rows = case.rows if case.rows is not None else torch.arange(len(case.out))
    rows = rows[: len(part)]
    part_rows = None if len(rows) == len(part) else torch.arange(len(rows))
    added = part if part_rows is None else part[part_rows]
    added = added.to(total.dtype) if rounded else added
    expected, terms = total.clone(), torch.zeros(total.shape)
    expected[rows] = (added if empty else total[rows] + added).to(total.dtype)
    terms[rows] = total[rows].abs().float() + added.abs().float()
    twice = total.clone()
    fused.add((total, twice), (part, part), rows, part_rows, empty=empty, rounded=rounded)
    for found in (total, twice):
        assert ((found.double() - expected.double()).abs() <= most * terms).all()


@given(sides(), st.booleans(), st.booleans())
def test_added_rows_are_rounded_where_it_is_wanted(case: Sides, empty: bool, rounded: bool) -> None:
    check_add(case, empty, rounded)


def check_stand_in(case: Sides) -> None:
    delta = fused.inner_products(case.out, case.out.flip(0))
    assert torch.allclose(delta, (case.out.double() * case.out.flip(0)).sum(-1).float(), atol=1e-6)
    found = fused.stand_in_for_out(case.out, delta)
    has_length = case.out.abs().amax(-1) > 0
    assert torch.allclose((found * case.out).sum(-1)[has_length], delta[has_length], rtol=1e-5, atol=1e-5)
    assert not found[~has_length].any()


@given(sides())
def test_a_stand_in_has_the_inner_products_of_what_it_stands_for(case: Sides) -> None:
    check_stand_in(case)


def check_special_rows() -> None:
    out, lse = torch.ones(3, 1, 1, 2), torch.zeros(3, 1, 1)
    part = torch.tensor([math.nan, math.nan, 3.0]).view(3, 1, 1, 1).repeat(1, 1, 1, 2)
    fused.merge(out, lse, part, torch.tensor([math.nan, -math.inf, 0.0]).view(3, 1, 1))
    assert out[:, 0, 0, 0].isnan().tolist() == [True, False, False]
    assert out[1:, 0, 0, 0].tolist() == [1, 2]


def test_an_infinite_value_stays_so() -> None:
    for first, second in ((math.inf, 1.0), (1.0, math.inf)):
        out = torch.full((1, 1, 1, 2), first)
        fused.merge(out, torch.zeros(1, 1, 1), torch.full_like(out, second), torch.ones(1, 1, 1))
        assert out.flatten().tolist() == [math.inf, math.inf]


def test_a_nan_stays_in_its_row_and_what_weighs_nothing_may_be_one() -> None:
    check_special_rows()
