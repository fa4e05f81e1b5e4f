"""Types of arguments: fields of layers and options are never cast, whatever Python could make of them."""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.arguments import TYPES, check_arguments, is_whole
from tasp_lab.core.errors import ScheduleError, TaspLabError, WorkloadError
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.workload.layer import Workload


class Two(IntEnum):
    """A whole number of another type."""

    HEADS = 2


OTHERS: list[Any] = [
    8.0, 8.7, float("nan"), "8", b"8", True, np.bool_(True), np.float32(8), np.array(8), np.array([8]), Fraction(8),
    Decimal(8), 8j, (127, 0), [8], {8}, {"keys": 8}, ..., int,
]  # fmt: skip
"""What is no whole number, though Python converts some of it to one."""

WHOLE = ("sequence", "batch", "heads", "head_dim", "cached_keys", "kv_heads", "linear_kv_heads", "window")


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for value in OTHERS for name in WHOLE if not (name == "sequence" and isinstance(value, str))],
    ids=repr,
)
def test_a_field_of_a_layer_that_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(
        WorkloadError, match=f"^{name.replace('_', ' ')}: .* of type .*, expected a whole number"
    ) as told:
        Workload(**{"sequence": 64, "mask": "causal", name: value})
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["buffers", "tail_chunks", "stages", "pieces"])
@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_an_option_that_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ScheduleError, match=f"^{name.replace('_', ' ')}: .* of type .*, expected a whole number"):
        AttentionOptions(**{name: value})


@pytest.mark.parametrize("value", ["no", 0, 1, None, np.array([True, False])], ids=repr)
def test_a_flag_is_true_or_false(value: Any) -> None:
    with pytest.raises(ScheduleError, match=r"^trim: .*, expected True or False"):
        AttentionOptions(trim=value)


@pytest.mark.parametrize("value", [2, np.int32(2), np.uint8(2), Two.HEADS], ids=repr)
def test_whole_numbers_of_any_type_become_plain_ones(value: Any) -> None:
    layer = Workload(sequence=value, heads=value, kv_heads=value, mask="causal", window=value)
    assert {type(each) for each in (layer.sequence, layer.heads, layer.kv_heads, layer.window)} == {int}
    assert layer == Workload(sequence=2, heads=2, kv_heads=2, mask="causal", window=2)


@pytest.mark.parametrize(
    "documents", [b"\x20\x20", {32: 1, 31: 2}, {31, 33}, [True] * 64, [32.0, 32.0], [[64]], None, 64]
)
def test_documents_are_whole_numbers_in_order(documents: Any) -> None:
    if documents is None:
        assert Workload(64, documents=documents, mask="full").documents is None
        return
    with pytest.raises(WorkloadError, match=r"^documents?.*, expected a (sequence of )?whole number"):
        Workload(64, documents=documents, mask="full")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.fractions() | st.decimals(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


@given(st.sampled_from(sorted(TYPES)), anything)
def test_what_passes_is_of_the_type_that_is_named(name: str, value: Any) -> None:
    expected, is_number = TYPES[name], TYPES[name].expected.startswith("a whole number")
    if isinstance(value, expected.types) and (not is_number or is_whole(value) or value is None):
        check_arguments({name: value})
        return
    with pytest.raises(TaspLabError) as told:
        check_arguments({name: value})
    assert type(told.value) is expected.error
    assert len(str(told.value).splitlines()) == 1
