"""Fields of blocks as tensors: prepared views are those of the bytes, and change them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.executor.views import DTYPES, FieldViews, store, views
from tasp_lab.core.errors import RunError
from tasp_lab.schedule.blocks import Field

fields = st.lists(
    st.builds(
        Field, st.just("field"), st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 3), max_size=3).map(tuple)
    ),
    min_size=1,
    max_size=4,
)


@given(fields, st.integers(0, 9), st.integers(1, 4))
def test_prepared_views_are_those_of_the_bytes(drawn: list[Field], offset: int, positions: int) -> None:
    """There are none where a field is unaligned."""
    sizes = [DTYPES[each.dtype].itemsize * torch.Size(each.shape).numel() for each in drawn]
    size = positions * sum(sizes)
    memory = torch.randint(0, 255, (offset + size + 3,), dtype=torch.uint8)
    expected = views(memory[offset : offset + size], drawn)
    starts = [offset + sum(sizes[:at]) for at in range(len(sizes))]
    itemsizes = [DTYPES[each.dtype].itemsize for each in drawn]
    aligned = all(not start % item and not sum(sizes) % item for start, item in zip(starts, itemsizes, strict=True))
    found = FieldViews(memory, drawn).at(offset, size)
    assert (found is not None) == aligned
    if found is not None:
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            assert one.data_ptr() == other.data_ptr()
            assert torch.equal(bytes_of(one), bytes_of(other))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def test_a_block_of_one_position_may_be_unaligned() -> None:
    """Its only row has a stride all the same, which no float32 has."""
    fields = [Field("k", "bf16", (1,)), Field("lse", "fp32", (1,))]
    values = [torch.full((1, 1), 2, dtype=torch.bfloat16), torch.full((1, 1), 3.0)]
    data = torch.zeros(6, dtype=torch.uint8)
    store(data, fields, values)
    assert [each.item() for each in views(data, fields)] == [2, 3]


def test_fields_of_positions_beside_fields_of_blocks_are_refused() -> None:
    mixed = [Field("state", "fp32", (2,), per_position=False), Field("k", "bf16", (2,))]
    with pytest.raises(RunError, match="fields state, k: expected all per position or all per block"):
        FieldViews(torch.zeros(24, dtype=torch.uint8), mixed)
