"""Slices of TPU pods: their links by a formula, where they wrap around, and what is no slice."""

from __future__ import annotations

from math import prod

import pytest

from tasp_lab.core.errors import TopologyError
from tasp_lab.machines.catalogue import load_machine
from tasp_lab.machines.slices import load_pod, load_slice, pod_names

V5P = ("1", "2", "2x2x1", "2x2x2", "2x4x4", "4", "4x4", "4x4x1", "4x4x4", "4x4x8", "4x8x12")
V6E = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SLICES = [*(("tpu-v5p", shape) for shape in V5P), *(("tpu-v6e", shape) for shape in V6E)]


def wrapped(name: str, sides: list[int]) -> list[bool]:
    """Cubes of v5p have the links of optical switches, a v6e those of its 16 x 16 pod."""
    if name == "tpu-v6e":
        return [side == 16 for side in sides]
    return [all(side % 4 == 0 for side in sides)] * len(sides)


@pytest.mark.parametrize(("name", "shape"), SLICES)
def test_a_side_has_as_many_links_as_chips_if_it_wraps_and_one_less_if_not(name: str, shape: str) -> None:
    """Both ways, and for each of the lines along it; two chips have one cable."""
    sides = [int(side) for side in shape.split("x")]
    cables = sum(
        prod(sides) // side * (side if wraps and side > 2 else side - 1)
        for side, wraps in zip(sides, wrapped(name, sides), strict=True)
    )
    topology = load_machine(f"{name}:{shape}").topology
    assert (topology.name, topology.world_size) == (f"{name}:{shape}", prod(sides))
    assert len(topology.links) == 2 * cables


@pytest.mark.parametrize(("name", "shape"), SLICES)
def test_links_join_chips_that_differ_by_one_step_in_one_side(name: str, shape: str) -> None:
    sides = [int(side) for side in shape.split("x")]
    wraps = wrapped(name, sides)

    def place(rank: int) -> list[int]:
        return [rank // prod(sides[at + 1 :]) % side for at, side in enumerate(sides)]

    for link in load_machine(f"{name}:{shape}").topology.links:
        assert isinstance(link.source, int)
        assert isinstance(link.destination, int)
        steps = [abs(a - b) for a, b in zip(place(link.source), place(link.destination), strict=True)]
        [(at, step)] = [(at, step) for at, step in enumerate(steps) if step]
        assert step == 1 or (wraps[at] and step == sides[at] - 1)


def test_a_cube_of_v5p_has_the_shortest_way_between_corners_that_a_slice_below_has_not() -> None:
    """Opposite corners of 4 x 4 x 4 are three steps apart by the wrap-around links; those of 4 x 4 x 1 have none."""
    cube, plane = load_slice("tpu-v5p", "4x4x4").topology, load_slice("tpu-v5p", "4x4x1").topology
    assert {link.destination for link in cube.links if link.source == 0} == {1, 3, 4, 12, 16, 48}
    assert {link.destination for link in plane.links if link.source == 0} == {1, 4}


@pytest.mark.parametrize("name", pod_names())
def test_a_pod_states_numbers_with_sources_and_slices_that_exist(name: str) -> None:
    pod = load_pod(name)
    assert all(constant.source.strip() for constant in pod.constants)
    for shape in pod.shapes:
        assert load_slice(name, shape).summary.startswith(f"{prod(int(side) for side in shape.split('x'))} TPU")


@pytest.mark.parametrize(
    "text",
    ["tpu-v5p", "tpu-v5p:", "tpu-v5p:4x0", "tpu-v5p:3x4", "tpu-v5p:4x4x4x4", "tpu-v5p:28x28x28", "tpu-v5p:4x",
     "tpu-v5p:x4", "tpu-v5p:-4x4", "tpu-v5p:4X4", "tpu-v5p:99999x4", "tpu-v6e", "tpu-v6e:16x32", "tpu-v6e:4x4x4",
     "tpu-v6e:12x12"],
)  # fmt: skip
def test_what_is_no_slice_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        load_machine(text)
    example = {"tpu-v5p": "tpu-v5p:4x4x4", "tpu-v6e": "tpu-v6e:4x4"}[text.partition(":")[0]]
    assert str(caught.value).startswith(f"machine {text.rstrip(':')!r}: expected ")
    assert str(caught.value).endswith(f"such as {example}")
    assert len(str(caught.value).splitlines()) == 1
