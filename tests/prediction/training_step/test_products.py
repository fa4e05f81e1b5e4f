"""Matrix products by shape: laws of the model, and the tables that it was fitted to."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tables.matrix_fits import GPUS, errors_of, fitted, read
from tasp_lab.machines.kernel_model.constants import gpus
from tasp_lab.prediction.training_step.costs import Matrix
from tasp_lab.prediction.training_step.products import LARGE, PARTS, TILES, Shapes, forms, shapes_of
from tasp_lab.workload.kernel_shapes import Product, ProductKind

sizes = st.integers(1, 40_000)
products = st.builds(Product, sizes, sizes, sizes, st.sampled_from(get_args(ProductKind)), st.integers(1, 8))
shapes = st.sampled_from([shapes_of(gpus()[name]) for name in ("a100", "b200", "h100", "mi300x")])


def rate_of(own: Shapes) -> float:
    """A rate that large products may have."""
    return 0.6 * own.gpu.peak_flops.value


@pytest.mark.parametrize("gpu", sorted(gpus()))
def test_a_large_product_has_the_rate_of_the_accelerator(gpu: str) -> None:
    own, large = shapes_of(gpus()[gpu]), Product(LARGE, LARGE, LARGE, "results")
    assert own.time_s(rate_of(own), large) == pytest.approx(large.flops / rate_of(own), rel=1e-9)


@given(shapes, products)
def test_no_product_is_faster_than_its_bytes_or_the_highest_rate(own: Shapes, product: Product) -> None:
    rows, inner, columns, kind, copies = product
    moved = 2 * inner * (rows + columns) + (8 if kind == "sums" else 2) * rows * columns
    time_s = own.time_s(rate_of(own), product)
    assert time_s >= copies * moved / own.gpu.memory_bytes_per_s.value * (1 - 1e-9)
    assert time_s >= product.flops / own.highest(rate_of(own)) * (1 - 1e-9)


@given(shapes, products, st.integers(1, 3))
def test_whole_tiles_more_never_take_less_time(own: Shapes, product: Product, more: int) -> None:
    step = max(high for high, _ in TILES)
    rows, columns = (-(-each // step) * step for each in (product.rows, product.columns))
    inner = -(-product.inner // (64 * max(PARTS))) * 64 * max(PARTS)
    one = product._replace(rows=rows, inner=inner, columns=columns)
    for larger in (
        one._replace(rows=rows + step * more),
        one._replace(inner=inner + 64 * max(PARTS) * more),
        one._replace(columns=columns + step * more),
        one._replace(copies=one.copies + more),
    ):
        assert own.time_s(rate_of(own), larger) >= own.time_s(rate_of(own), one) * (1 - 1e-12)


@given(shapes, products, st.fractions(min_value="1/4", max_value=4).map(float))
def test_faster_accelerators_take_no_more_time(own: Shapes, product: Product, factor: float) -> None:
    slow, fast = sorted((1.0, factor))
    assert own.time_s(rate_of(own) * fast, product) <= own.time_s(rate_of(own) * slow, product) * (1 + 1e-12)


def test_one_tile_takes_the_depth_of_its_ends_by_hand() -> None:
    """A product of a tile on each SM, deep enough that bytes do not count, takes its inner dimension and the ends."""
    own = shapes_of(gpus()["b200"])
    form, sms = forms()["b200"], round(own.gpu.sms.value)
    times = [own.time_s(rate_of(own), Product(256 * sms, inner, 256, "results")) for inner in (8192, 16384, 24576)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    per_element = (times[1] - times[0]) / 8192
    assert times[0] - form.launch_s == pytest.approx(per_element * (8192 + form.depth))


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 99), st.sampled_from([1, 2, 4]))
def test_matrices_of_a_tensor_group_multiply_what_one_rank_does(
    inputs: int, outputs: int, tokens: int, tp: int
) -> None:
    """Results and both gradients have the FLOPs of the matrix, which tensor groups share."""
    for divided in ("inputs", "outputs"):
        matrix = Matrix(inputs * 4, outputs * 4, divided)  # type: ignore[arg-type]
        for kind in get_args(ProductKind):
            product = matrix._replace(kind=kind).product(tokens, tp)
            assert product.flops * tp == tokens * matrix.flops
            assert {*product[:3]} <= {tokens, inputs * 4, outputs * 4, inputs * 4 // tp, outputs * 4 // tp}


@pytest.mark.parametrize("gpu", GPUS)
def test_left_out_shapes_are_within_eight_percent(gpu: str) -> None:
    errors = errors_of(gpu, read(gpu)).abs()
    assert errors.median() < 0.08
    assert np.mean(errors < 0.3) > 0.9


def test_constants_are_those_of_the_fit() -> None:
    gpu = "a100-pcie"
    found, shipped = fitted(gpu, read(gpu)).form, forms()[gpu]
    for name in ("depth", "loads", "sustained"):
        assert getattr(shipped, name) == pytest.approx(getattr(found, name), rel=0.02)
    assert shipped.kinds == pytest.approx(found.kinds, rel=1e-3)


def test_every_table_has_its_source() -> None:
    for path in sorted((Path("experiments") / "published" / "matrices").glob("*.csv")):
        assert path.read_text().startswith("# source: ")
