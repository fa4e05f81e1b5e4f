"""Every schedule by name on real processes: results and gradients against float64 on one, whatever the layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from runtime import attention
from tasp_lab.core.choices import WireDtype
from tasp_lab.core.errors import WorkloadError
from tasp_lab.schedules.attention.forward import CIRCULATIONS
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.topology.builders import nodes
from tasp_lab.topology.renumbered import renumbered
from tasp_lab.workload.layer import Workload
from tests.runtime.test_distributed_gradients import Errors, Shard, Squares, alone, exact, relative_errors, squares
from tests.support.ranks import on_ranks, succeeded
from tests.support.systems import schedules_for

pytestmark = pytest.mark.distributed

DOCUMENTS = (13, 0, 1, 40, 16)
HEADS = 24
"""A multiple of every world size but 5 and 7, on which no schedule shares out heads."""

LAYERS = [
    Workload(67, batch=2, heads=HEADS, kv_heads=12, head_dim=8, dtype="fp32", mask="causal"),
    Workload(53, heads=HEADS, head_dim=8, dtype="fp32"),
    Workload(61, heads=HEADS, kv_heads=2, head_dim=8, dtype="fp32", mask="causal", window=13),
    Workload(70, heads=HEADS, kv_heads=1, head_dim=8, dtype="fp32", documents=DOCUMENTS),
    Workload(70, heads=HEADS, kv_heads=8, head_dim=8, dtype="fp32", mask="causal", documents=DOCUMENTS),
]
"""Lengths that no world size divides, every mask, packed documents, and from 1 KV head to as many as heads."""


def names_of(layer: Workload, world_size: int, variants: bool) -> list[str]:
    """The variants of families, or all else but circulations, whose gradients have tests of their own."""
    names = [name for name in schedules_for(layer, world_size, variants=variants) if name not in CIRCULATIONS]
    return [name for name in names if (name.count(":") == 2) == variants and not left_out(name, world_size)]


def left_out(name: str, world_size: int) -> bool:
    """Of the many variants of USP, all run on four ranks and one on more."""
    return world_size > 4 and name.startswith("usp:") and name.count(":") == 2 and not name.endswith(":tasp")


def errors_of_rank(layers: list[Workload], dtype: WireDtype, variants: bool) -> list[Squares]:
    """On a rank: the squared errors of its part of both passes, of every layer and schedule."""
    found, options = [], AttentionOptions("both", gradient_dtype=dtype)
    for layer in layers:
        for name in names_of(layer, dist.get_world_size(), variants):
            here = Shard(layer, name)
            found.append(squares(here.run(options=options), here.expected()))
    return found


def errors(
    layers: list[Workload], world_size: int, dtype: WireDtype = "auto", variants: bool = False
) -> list[tuple[Workload, str, Errors]]:
    parts = succeeded(on_ranks(errors_of_rank, world_size, layers, dtype, variants))
    cases = [(layer, name) for layer in layers for name in names_of(layer, world_size, variants)]
    return [(*case, relative_errors(of_ranks)) for case, *of_ranks in zip(cases, *parts, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 8])
def test_results_and_gradients_are_those_of_one_process(world_size: int) -> None:
    found = errors(LAYERS, world_size)
    assert {"token-ring", "zigzag-token-ring"} <= {name for _, name, _ in found}
    assert ("ulysses" in {name for _, name, _ in found}) == (HEADS % world_size == 0)
    for layer, name, each in found:
        assert max(each) < 1e-5, (layer, name, each)


@pytest.mark.parametrize("world_size", [4, 6, 8])
def test_variants_of_families_give_the_same(world_size: int) -> None:
    found = errors(LAYERS[::2], world_size, variants=True)
    splits = {4: ["2x2"], 6: ["2x3", "3x2"], 8: ["2x4", "4x2"]}[world_size]
    assert {f"double-ring:{split}:tasp" for split in splits} <= {name for _, name, _ in found}
    for layer, name, each in found:
        assert max(each) < 1e-5, (layer, name, each)


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_what_half_precision_costs(dtype: WireDtype) -> None:
    """At most half as much again as on one process, which rounds once: sums of several ranks are sent in float32."""
    layer = Workload(64, heads=8, head_dim=32, dtype="bf16", mask="causal")
    single = relative_errors([squares(alone(layer), exact(layer))])
    for _, name, found in errors([layer], 4, dtype):
        for error in Errors._fields:
            assert getattr(found, error) <= 1.5 * getattr(single, error), (name, error, found, single)


INTERLEAVED = renumbered(nodes(2, 2), np.array([0, 2, 1, 3]))
"""Ranks 0 and 2 are one node, ranks 1 and 3 the other one."""

GROUPS = [("usp:2x2", "strided"), ("double-ring:2x2", "3,1|0,2"), ("grid:2x2", "0,3|2,1")]


def errors_in_groups() -> tuple[list[Squares], str]:
    """On a rank: the squared errors with groups of other ranks, and why groups by the topology are refused."""
    found = []
    for name, groups in GROUPS:
        options = AttentionOptions("both", groups=groups)
        here = Shard(LAYERS[0], name, options=options)
        found.append(squares(here.run(options=options, topology=INTERLEAVED), here.expected()))
    here = Shard(LAYERS[0], "usp:2x2")
    with pytest.raises(WorkloadError) as refused:
        here.run(topology=INTERLEAVED)
    found.append(squares(here.run(topology=INTERLEAVED, options=CONSECUTIVE), here.expected()))
    return found, str(refused.value)


CONSECUTIVE = AttentionOptions("both", groups="consecutive")


def test_groups_of_other_ranks_compute_the_same() -> None:
    """A topology whose nodes are other groups than those by which shards were cut is refused, not misread."""
    answers = succeeded(on_ranks(errors_in_groups, 4))
    for case, *of_ranks in zip([*GROUPS, "consecutive"], *(found for found, _ in answers), strict=True):
        assert max(relative_errors(of_ranks)) < 1e-5, case
    for _, refused in answers:
        assert "groups of schedule 'usp:2x2' on nodes:2x2 are 0,2|1,3" in refused


def on_one_rank() -> list[float]:
    """On the only rank: the largest difference of each schedule's result from that of the first."""
    layer = LAYERS[0]
    results = []
    for name in schedules_for(layer, 1):
        here = Shard(layer, name)
        results.append(attention(here.q, here.k, here.v, schedule=name, causal=True).detach())
    return [float((each - results[0]).abs().max()) for each in results]


def test_one_rank_needs_no_other() -> None:
    (found,) = succeeded(on_ranks(on_one_rank, 1))
    assert max(found) < 1e-6
