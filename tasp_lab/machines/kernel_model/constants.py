"""Constants of GPUs and kernels, each with an interval and a source, and their files.

A file names each source once, in its table ``sources``; a constant is ``[value, low, high, name of its source]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from tasp_lab.core.errors import ProfileError, unknown
from tasp_lab.core.records import converted
from tasp_lab.machines.kernel_model.tiles import SplitRule

Passing = Literal["forward", "backward"]
PASSES: tuple[Passing, ...] = get_args(Passing)
Order = Literal["listed", "reversed", "longest-first"]
"""Tiles of a head in order of their rows, in reverse, or the longest of all heads first."""


class KernelConstant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value in SI units, the ends of its 90 % interval, and where it comes from.

    A source that begins with ``assum`` marks an assumption, one with ``fit`` a fit and its tables. `low` and `high`
    equal the value for what is known exactly.
    """

    value: float
    low: float
    high: float
    source: str

    def __post_init__(self) -> None:
        if not (0 <= self.low <= self.value <= self.high < float("inf")) or not self.source.strip():
            raise ValueError(f"{self.low} to {self.high} for {self.value}: expected low <= value <= high and a source")

    @property
    def assumed(self) -> bool:
        return self.source.startswith("assum")


class Gpu(msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True):
    """A GPU in numbers: SMs (compute units), dense 16-bit peak (FLOP/s), float32 vector peak, bandwidth reached.

    `exponentials`: elements of a head (4 FLOPs each) that the tensor cores of an SM go through while it computes one
    exponential. `like`: the GPUs whose kernels it takes, the nearest first, where it has no file of its own.
    """

    name: str
    like: tuple[str, ...]
    sms: KernelConstant
    peak_flops: KernelConstant
    vector_flops: KernelConstant
    memory_bytes_per_s: KernelConstant
    exponentials: KernelConstant


class Design(msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True):
    """What the code of a kernel fixes: the tile, how many an SM holds, their order and split-KV.

    `group` is how many SMs share what limits them: the slots are then those of a group. `query_bytes` and `key_bytes`
    are what kernels beside the main one move per element of Q and of K: gradients, or what a serving engine does with
    the KV cache. Backward, `key_bytes` and `repeated_key_bytes`, the latter per element of K as if every head had its
    own, count where heads share a KV head: they are the sums of its gradients.
    """

    rows: int
    columns: int
    slots: int
    group: int
    order: Order
    split: SplitRule
    packs_heads: bool
    source: str
    query_bytes: float = 0.0
    key_bytes: float = 0.0
    repeated_key_bytes: float = 0.0


class Variant(msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True, omit_defaults=True):
    """A kernel for one pass and head dimension.

    Attributes
    ----------
    rate : FLOP/s of all SMs at this head dimension, all slots taken, without starts and ends of tiles.
    exponentials : what the softmax of one score costs, in elements of a head; tells the rate of other dimensions.
    alone : the share of an SM's speed that a tile alone on it reaches.
    tile_columns : what the start and end of a tile cost, in columns of scores.
    launch_s : the fixed part of a call.
    masked, offset : the speed of a call with a mask, as a share of one without; `offset` applies besides when the
        mask's diagonal does not begin at the first query and key, as in a step of a ring.
    split : the speed with split keys, as a share of that without: other tiles, and parts that are merged.
    sustained : the share of `rate` that power allows in the long run; reached after some `settle_s`.
    faster_than_forward : of a backward pass, why long calls have a higher rate than forward; empty if they have not.
    """

    passing: Passing
    head_dim: int
    design: Design
    rate: KernelConstant
    exponentials: KernelConstant
    alone: KernelConstant
    tile_columns: KernelConstant
    launch_s: KernelConstant
    masked: KernelConstant
    offset: KernelConstant
    split: KernelConstant
    sustained: KernelConstant
    settle_s: KernelConstant
    faster_than_forward: str = ""


def constants_in(part: Gpu | Variant) -> dict[str, KernelConstant]:
    """The constants of a GPU or of a variant by name."""
    values = ((name, getattr(part, name)) for name in part.__struct_fields__)
    return {name: value for name, value in values if isinstance(value, KernelConstant)}


class KernelFile(msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True):
    """A named kernel on one GPU. `hardware` is that GPU where it is none of `gpus`."""

    gpu: str
    kernel: str
    variants: tuple[Variant, ...]
    hardware: Gpu | None = None

    @property
    def gpu_constants(self) -> Gpu:
        """The constants of the GPU."""
        return self.hardware or gpus()[self.gpu]


def data_folder() -> Path:
    """Where the constants are."""
    return Path(str(files("tasp_lab.machines.kernel_model") / "data"))


@cache
def gpus() -> Mapping[str, Gpu]:
    """All GPUs by name."""
    document = msgspec.toml.decode((data_folder() / "gpus.toml").read_bytes())
    return {gpu.name: gpu for gpu in converted(_with_sources(document)["gpus"], tuple[Gpu, ...])}


def read_kernel_file(path: Path) -> KernelFile:
    """A file of a kernel. Raises `ProfileError` for one that cannot be read or is no such file."""
    try:
        found = converted(_with_sources(msgspec.toml.decode(path.read_bytes())), KernelFile)
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise ProfileError(f"{path}: no kernel file: {error}") from error
    if {variant.passing for variant in found.variants} != {"forward", "backward"}:
        raise ProfileError(f"{path}: expected variants for forward and backward")
    if found.hardware is None and found.gpu not in gpus():
        raise ProfileError(f"{path}: " + unknown("GPU", found.gpu, gpus()))
    return found


def _with_sources(document: dict[str, Any]) -> dict[str, Any]:
    """A document with the text of each source in place of its name. Raises `ValueError` for a name without text."""
    sources = converted(document.pop("sources", {}), dict[str, str])

    def text(name: object) -> str:
        if not isinstance(name, str) or name not in sources:
            raise ValueError(unknown("source", str(name), sources))
        return sources[name]

    def resolve(value: object) -> object:
        if isinstance(value, dict):
            return {key: text(each) if key == "source" else resolve(each) for key, each in value.items()}
        if isinstance(value, list) and len(value) == 4 and isinstance(value[0], int | float):
            return [*value[:3], text(value[3])]
        return [resolve(each) for each in value] if isinstance(value, list) else value

    return {key: resolve(value) for key, value in document.items()}


def kernel_document(kernel: KernelFile) -> bytes:
    """The text of a kernel file."""
    names: dict[str, str] = {}
    lines = [f"gpu = {_toml(kernel.gpu)}", f"kernel = {_toml(kernel.kernel)}"]
    parts = [("[hardware]", kernel.hardware)] if kernel.hardware else []
    for header, part in [*parts, *(("[[variants]]", variant) for variant in kernel.variants)]:
        lines += ["", header]
        for field, value in msgspec.to_builtins(part).items():
            if isinstance(value, dict):
                value = value | {"source": names.setdefault(value["source"], f"s{len(names) + 1}")}
            elif isinstance(getattr(part, field), KernelConstant):
                value = [*value[:3], names.setdefault(value[3], f"s{len(names) + 1}")]
            lines.append(f"{field} = {_toml(value)}")
    sources = [f"{name} = {_toml(text)}" for text, name in names.items()]
    return "\n".join([*lines[:2], "", "# constants: value, low and high end of the 90 % interval, source", "[sources]",
                      *sources, *lines[2:], ""]).encode()  # fmt: skip


def _toml(value: object) -> str:
    """A value on one line of TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
