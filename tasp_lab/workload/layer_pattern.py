"""Patterns of hybrids: which layers of a stack are of linear (L) and which of softmax attention (S)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tasp_lab.core.choices import AttentionKind
from tasp_lab.core.errors import WorkloadError

LAYER_KINDS: Mapping[str, AttentionKind] = {"L": "linear", "S": "softmax"}
"""The kind of attention of each letter."""

MAX_LAYERS = 1024
"""Maximum number of layers: more than any published model has, and few enough to be written out."""

_PART = re.compile(r"(?:(\d+)x)?(.*)", re.ASCII | re.DOTALL)

_EXPECTED = "a pattern such as LLSLLS or 4xLLLS"


def expand_layers(pattern: str) -> str:
    """The letters of all layers, in order: parts after commas, each with a COUNTx before it or without.

    >>> expand_layers("LL,2xLS"), expand_layers("LLLSLLLS") == expand_layers("2xLLLS")
    ('LLLSLS', True)

    Raises `WorkloadError` for other letters, for parts without layers, a count of 0, and more than `MAX_LAYERS` layers.
    """
    if not isinstance(pattern, str):
        raise WorkloadError(f"layers: {pattern!r}, expected {_EXPECTED}")
    shown, found = f"layers {pattern[:40]!r}", ""
    for number, part in enumerate(pattern.split(","), start=1):
        match = _PART.fullmatch(part)
        assert match is not None, "anything may follow the count"
        count, letters = match.groups()
        other = next((each for each in letters if each not in LAYER_KINDS), None)
        if other is not None:
            raise WorkloadError(f"{shown}: unknown layer {other!r}, expected L (linear) or S (softmax attention)")
        if not letters:
            raise WorkloadError(f"{shown}: no layers in part {number}, expected {_EXPECTED}")
        if count is not None and not count.strip("0"):
            raise WorkloadError(f"{shown}: {count} times {letters[:40]}, expected 1 or more")
        times = 1 if count is None else int(count.lstrip("0")[:9])
        if len(found) + times * len(letters) > MAX_LAYERS:
            raise WorkloadError(f"{shown}: too many layers, expected at most {MAX_LAYERS}")
        found += letters * times
    return found
