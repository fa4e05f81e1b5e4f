"""The reproductions by name, in the order of the index: a folder each, with the file ``published.toml``.

A result whose file names ``tables`` of layers is found in these and in the tables of its folder, whose rows are run as
their library runs them (`found_in`); ``reasons`` are why rows may be outside: the rows with the ``schedule`` and
``passing`` that are given, and what is changed to check it. Others have a module ``result`` with the function ``find``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from importlib import import_module

from experiments.reproductions.layers import Reason, found_in, layer_tables
from experiments.reproductions.report import FOLDER
from experiments.reproductions.reproduction import Found, Reproduction

NAMES = (
    "tasp", "token_ring", "magi_attention", "ultra_attn", "usp", "ring_flash_attention", "burst_attention", "lasp2",
    "zeco",
)  # fmt: skip


def reproduction(name: str) -> Reproduction:
    """The reproduction with this name."""
    folder = FOLDER / name
    published = tomllib.loads((folder / "published.toml").read_text(encoding="utf-8"))
    find: Callable[[], Found]
    if patterns := published.pop("tables", None):
        files = [*sorted(folder.glob("*.csv")), *layer_tables(*patterns)]
        find = partial(found_in, files, [Reason.of(**each) for each in published.pop("reasons", [])])
    else:
        find = import_module(f"experiments.reproductions.{name}.result").find
    return Reproduction(name, find, **published)
