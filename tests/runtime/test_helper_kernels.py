"""Kernels beside attention and messages: how many a pass launches on a GPU, counted on tensors without data."""

from __future__ import annotations

import pytest

from tests.support.helper_kernels import count


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("zigzag-ring-attention", 20, 30),
        ("tasp", 30, 45),
        ("kv-and-q-rings", 35, 60),
        ("token-multi-ring", 60, 80),
    ],
)
def test_few_kernels_beside_attention(name: str, forward: int, backward: int) -> None:
    passes = count(name)
    for counted, most in zip(passes, (forward, backward), strict=True):
        assert counted.calls > 1, "attention itself is called"
        assert counted.calls <= counted.helpers.total() <= most, counted.helpers
