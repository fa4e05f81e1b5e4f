"""The reproductions by name, in the order of the index."""

from __future__ import annotations

from importlib import import_module

from experiments.reproductions import libraries
from experiments.reproductions.reproduction import Reproduction

NAMES = (
    "tasp", "token_ring", "magi_attention", "ultra_attn", "usp", "ring_flash_attention", "burst_attention", "lasp2",
    "zeco",
)  # fmt: skip


def reproduction(name: str) -> Reproduction:
    """The reproduction with this name: one of `libraries`, or that of the module ``result`` in its folder."""
    for published in libraries.REPRODUCTIONS:
        if published.name == name:
            return published
    published = import_module(f"experiments.reproductions.{name}.result").REPRODUCTION
    assert isinstance(published, Reproduction)
    return published
