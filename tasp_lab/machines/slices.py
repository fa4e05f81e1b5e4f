"""Slices of TPU pods by family and shape: ``tpu-v5p:4x4x4`` is a cube of 64 chips, ``tpu-v5p:4x4`` a plane of it.

::

    load_slice("tpu-v6e", "8x16")          # 128 chips; the sides of 16 wrap around, those of 8 do not

A family is a file of ``tasp_lab/machines/pods``. Its chips form a grid, with a link both ways between neighbours. A
side wraps around where the pod has the links for it: on v6e if it is as long as the pod, on v5p if the slice is made of
whole cubes of 4x4x4, whose faces the optical switches join. A shape with fewer sides than the pod is a plane or an axis
of a larger slice, such as the devices of one axis of a JAX mesh.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from importlib.resources import files
from math import prod
from typing import Annotated

import msgspec

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.records import Record, converted, data_names
from tasp_lab.machines.compute import compute_on, with_accelerator
from tasp_lab.machines.machine import IDEAL, Machine
from tasp_lab.machines.parameters import Constant, Parameters
from tasp_lab.topology.builders import torus


class Pod(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A family of slices, as its file states it.

    A slice has up to `dimensions` sides, each one of `sides`, and at most `most_chips`. A side wraps around if it is a
    multiple of `wraps_at`; if `wraps_together`, only where all are. `shapes` are the slices in the catalogue. Of the
    links, `constants` has bandwidth (one way) and latency. `summary` follows the number of chips.
    """

    summary: str
    accelerator: str
    dimensions: Annotated[int, msgspec.Meta(ge=1)]
    sides: tuple[int, ...]
    most_chips: int
    wraps_at: int
    wraps_together: bool
    shapes: tuple[str, ...]
    constants: tuple[Constant, ...]


def pod_names() -> list[str]:
    """The families of slices, in alphabetical order."""
    return data_names("tasp_lab.machines", "pods")


@cache
def load_pod(name: str) -> Pod:
    """The family of a name, which is one of `pod_names`."""
    file = files("tasp_lab.machines") / "pods" / f"{name}.toml"
    return converted(msgspec.toml.decode(file.read_bytes()), Pod)


def listed_slices() -> list[str]:
    """The slices in the catalogue, like ``tpu-v5p:4x4x4``, family by family."""
    return [f"{name}:{shape}" for name in pod_names() for shape in load_pod(name).shapes]


def load_slice(name: str, shape: str) -> Machine:
    """The slice of a family in a shape like ``4x4x4``, with links alone as its library.

    Raises `TopologyError` for a shape that the pod does not have.

    >>> len(load_slice("tpu-v5p", "4x4").topology.links), len(load_slice("tpu-v5p", "2x4").topology.links)
    (64, 20)
    """
    pod = load_pod(name)
    sides = [int(side) for side in shape.split("x")] if re.fullmatch(r"[0-9]{1,4}(x[0-9]{1,4})*", shape) else [0]
    if len(sides) > pod.dimensions or not {*sides} <= {*pod.sides} or prod(sides) > pod.most_chips:
        raise TopologyError(
            f"machine {f'{name}:{shape}'.rstrip(':')!r}: expected {name}: and 1 to {pod.dimensions} sides, each one of "
            f"{', '.join(map(str, pod.sides))}, with at most {pod.most_chips} chips in all, such as "
            f"{name}:{pod.shapes[0]}"
        )
    wraps = [side % pod.wraps_at == 0 for side in sides]
    if pod.wraps_together:
        wraps = [all(wraps)] * len(sides)
    parameters = Parameters.of_constants(pod.constants)
    numbers = parameters.numbers
    topology = torus(sides, numbers["link_bandwidth"], numbers["link_latency"], wraps)
    every = Parameters(with_accelerator(tuple(parameters.values()), pod.accelerator))
    return Machine(
        replace(topology, name=f"{name}:{shape}"),
        IDEAL,
        compute_on(every, pod.accelerator),
        f"{topology.world_size} {pod.summary}",
        every,
        accelerator=pod.accelerator,
    )
