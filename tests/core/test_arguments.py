"""Types of arguments: fields of layers and options are never cast, whatever Python could make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasp_lab.core.arguments import Argument, Option, arguments_of, check_arguments
from tasp_lab.core.errors import QuantityError, ScheduleError, TaspLabError, TopologyError, WorkloadError
from tasp_lab.prediction.predict import predict
from tasp_lab.prediction.question import SETTINGS
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

WHOLE = ("sequence", "batch", "heads", "head_dim", "cached_keys", "kv_heads", "linear_kv_heads", "window",
         "value_dim")  # fmt: skip
COUNTS = ("sequence", "cached_keys", "window")
"""The arguments that may be given as texts, such as 64Ki."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value) for value in OTHERS for name in WHOLE
        if not (name in COUNTS and isinstance(value, str))
        and not (name == "window" and isinstance(value, tuple | list | set | bytes))  # which may be a pair
    ],
    ids=repr,
)  # fmt: skip
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


ALL: dict[str, Argument] = {
    **arguments_of(Workload, WorkloadError), **arguments_of(AttentionOptions, ScheduleError), **SETTINGS,
    **arguments_of(predict),
}  # fmt: skip


@given(st.sampled_from(sorted(name for name, argument in ALL.items() if argument.expected)), anything)
def test_what_passes_is_of_the_type_that_is_named(name: str, value: Any) -> None:
    argument = ALL[name]
    is_number, is_list = argument.expected.startswith("a whole number"), argument.items is not None
    if is_list and isinstance(value, argument.types):
        is_right = not isinstance(value, str | bytes) and all(isinstance(each, str) for each in value)
    elif isinstance(value, bool):
        is_right = bool in argument.types
    else:
        is_right = isinstance(value, argument.types) and (not is_number or not isinstance(value, float))
    if is_right:
        check_arguments({name: value}, ALL)
        return
    with pytest.raises(TaspLabError) as told:
        check_arguments({name: value}, ALL)
    assert type(told.value) is argument.error
    assert len(str(told.value).splitlines()) == 1


class Shape(NamedTuple):
    """One of each kind of annotation."""

    count: int | None = None
    rate: float | str = 1.0
    name: Literal["a", "b"] = "a"
    links: Annotated[Sequence[str], Option(expected="links", error=TopologyError)] = ()
    anything: Any = None
    call: Callable[[int], None] | None = None


@pytest.mark.parametrize(
    ("name", "expected", "wrong"),
    [("count", "a whole number or None", 1.0), ("rate", "", b""), ("name", "a text", 1), ("links", "links", "0-1"),
     ("links", "links", [0]), ("anything", "", None), ("call", "a function or None", 1)],
)  # fmt: skip
def test_types_and_words_follow_from_the_annotation(name: str, expected: str, wrong: Any) -> None:
    argument = arguments_of(Shape)[name]
    assert argument.expected == expected
    assert argument.error is (TopologyError if name == "links" else QuantityError)
    if expected:
        with pytest.raises(argument.error, match=f"^{name}: .*, expected {expected}$"):
            argument.check(name, wrong)
    else:
        argument.check(name, wrong)
    argument.check(name, Shape._field_defaults[name])
    assert arguments_of(Shape)["name"].choices == ("a", "b")
