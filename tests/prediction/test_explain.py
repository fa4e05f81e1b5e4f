"""Why one schedule takes longer: parts of times follow closed forms, add up, and the largest is put into words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import ComputeRate, Machine
from tasp_lab.prediction.compare import Ranking, compare
from tasp_lab.prediction.explain import Explanation, PassExplanation
from tasp_lab.topology.builders import full_mesh
from tasp_lab.workload.layer import Workload

SEQUENCE, HEADS, DIM, RANKS = 4096, 4, 64, 4
LAYER = Workload(SEQUENCE, heads=HEADS, head_dim=DIM, mask="causal")
FULL = Workload(SEQUENCE, heads=HEADS, head_dim=DIM, mask="full")
SHARD = SEQUENCE // RANKS
SHARD_BYTES = 2 * 2 * SHARD * HEADS * DIM
"""Keys and values of a rank in 16 bit."""


def machine(bandwidth: float = 1e9, latency_s: float = 0.0, rate: float = 1e12) -> Machine:
    return Machine(full_mesh(RANKS, bandwidth, latency_s), compute=ComputeRate(rate))


def sides(found: Explanation) -> dict[str, PassExplanation]:
    """The explanation of each schedule of one pass."""
    ((first, *others),) = found.passes
    return {each.schedule: each for each in (first, *others)}


def test_the_busiest_rank_of_a_causal_ring() -> None:
    """Rank r of a contiguous layout has r whole blocks and a triangle; 4 FLOPs per pair, head and element."""
    found = compare(machine(), LAYER, ["zigzag-ring-attention"]).explain("ring-attention")
    pairs = [rank * SHARD**2 + SHARD * (SHARD + 1) // 2 for rank in range(RANKS)]
    seconds = [4 * HEADS * DIM * each / 1e12 for each in pairs]
    mean_s = sum(seconds) / RANKS
    ring, zigzag = sides(found)["ring-attention"], sides(found)["zigzag-ring-attention"]
    assert ring.parts.work_s == zigzag.parts.work_s == pytest.approx(mean_s)
    assert ring.parts.imbalance_s == pytest.approx(seconds[-1] - mean_s)
    assert ring.work_share == pytest.approx(seconds[-1] / mean_s)
    assert zigzag.parts.imbalance_s == 0
    assert ring.parts.calls_s == ring.parts.merges_s == ring.parts.contention_s == ring.parts.host_s == 0


def test_imbalance_in_words() -> None:
    """Links so fast that calls alone decide: the last rank has 7 of the mean's 4 triangles, nearly."""
    found = compare(machine(1e15), LAYER, ["zigzag-ring-attention"]).explain("ring-attention")
    assert "busiest rank of ring-attention has 75% more work than the mean" in found.lines()[1]


def test_more_bytes_on_a_link() -> None:
    """A ring over one link carries the shards of three ranks there, direct messages of each link one."""
    found = compare(machine(), FULL, ["direct-kv-all-gather"]).explain("kv-all-gather")
    ring, direct = sides(found)["kv-all-gather"], sides(found)["direct-kv-all-gather"]
    assert direct.link_bytes == SHARD_BYTES
    assert ring.link_bytes == ring.bytes_per_rank == direct.bytes_per_rank == 3 * SHARD_BYTES
    assert direct.bandwidth_s == pytest.approx(SHARD_BYTES / 1e9)
    assert [ring.bandwidth_s, ring.parts.messages_s] == pytest.approx([3 * SHARD_BYTES / 1e9] * 2)
    assert "forward messages of kv-all-gather have more bytes for one link or lane" in found.lines()[1]


def test_more_steps_with_latency() -> None:
    """Three messages one after another take three latencies, three at once one."""
    found = compare(machine(1e15, 1e-3), FULL, ["direct-kv-all-gather"]).explain("kv-all-gather")
    ring, direct = sides(found)["kv-all-gather"], sides(found)["direct-kv-all-gather"]
    assert ring.communication_s == pytest.approx(3e-3, rel=1e-3)
    assert direct.communication_s == pytest.approx(1e-3, rel=1e-3)
    assert "wait for each other" in found.lines()[1]


def test_messages_that_nothing_hides() -> None:
    """A ring that computes beside its messages hides them; one that gathers all keys first hides none."""
    found = compare(machine(1e9, rate=1e12), FULL, ["ring-attention"]).explain("kv-all-gather")
    gather, ring = sides(found)["kv-all-gather"], sides(found)["ring-attention"]
    assert gather.communication_s == pytest.approx(ring.communication_s)
    assert gather.parts.messages_s == pytest.approx(gather.communication_s)
    assert ring.parts.messages_s < gather.parts.messages_s
    assert "hide less behind calls: 100% of" in found.lines()[1]


@pytest.mark.parametrize(
    ("work", "names", "settings"),
    [
        (LAYER, ["ulysses", "zigzag-ring-attention"], {"passes": "both"}),
        (LAYER, ["ulysses", "zigzag-ring-attention"], {"passes": "both", "stack": "trl"}),
        (Workload(4096, heads=8, mask="causal", kind="linear"), ["lasp", "lasp-2"], {}),
        (Workload(4096, heads=8, mask="causal", kind="hybrid", layers="LS"), ["lasp-2+ulysses", "lasp-2+tasp"], {}),
    ],
    ids=["kernel", "host model", "linear", "hybrid"],
)
def test_parts_add_up(work: Workload, names: Sequence[str], settings: dict[str, str]) -> None:
    """Calls are those of the busiest rank as the ranking has them, and all parts together its time."""
    ranking = compare("h100-4", work, names, **settings)  # type: ignore[arg-type]
    found = ranking.explain(names[1])
    answers = {each.schedule: each for each in ranking.candidates}
    for side, name in enumerate(dict.fromkeys(each.schedule for pair in found.passes for each in pair)):
        explained = [pair[side] for pair in found.passes]
        assert [each.compute_s for each in explained] == [float(each.compute_s) for each in answers[name].passes]
        for each in explained:
            assert sum(each.parts) == pytest.approx(each.time_s, rel=1e-9)
            assert sum(each.parts[:4]) == pytest.approx(each.compute_s, rel=1e-9)
            assert all(part >= 0 for part in each.parts[:4])
        assert sum(each.time_s for each in explained) == pytest.approx(float(answers[name].time_s))
    if settings.get("stack"):
        zigzag = found.passes[-1][[each.schedule for each in found.passes[-1]].index("zigzag-ring-attention")]
        assert zigzag.parts.merges_s > 0
        assert zigzag.parts.host_s > 0


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    layer = Workload(16384, heads=32, kv_heads=8, mask="causal")
    return compare("mi300x-8", layer, ["direct-kv-all-gather", "zigzag-ring-attention"], passes="both")


def test_short_calls(ranking: Ranking) -> None:
    """A rank calls its kernel once per block that passes it, here eight times, and loses more than in fewer calls.

    The work at full speed is 10 FLOPs per pair, head and element over the highest rate of the kernel.
    """
    found = ranking.explain("zigzag-ring-attention")
    direct, zigzag = found.passes[1]
    assert zigzag.calls == 8
    assert direct.calls < zigzag.calls
    pairs, rate = 16384 * 16385 // 2 / 8, ranking.best.passes[1].rate.flops_per_s
    work_s = 10 * 32 * 128 * pairs / float(rate or 0)
    assert [direct.parts.work_s, zigzag.parts.work_s] == pytest.approx([work_s, work_s])
    assert found.lines()[1].endswith("more are tiles and waves.")
    assert "backward calls of zigzag-ring-attention are short: 8 of" in found.lines()[1]
    assert any(str(part).startswith("tiles and waves: ") for part in found.parts())


def test_the_recommended_schedule_is_beside_the_fastest_other(ranking: Ranking) -> None:
    found = ranking.explain("direct-kv-all-gather")
    assert found.lines()[0].startswith("direct-kv-all-gather is the recommended schedule")
    assert found.other is not None
    assert found.other.schedule == "zigzag-ring-attention"
    alone = compare("full-mesh:2", LAYER, ["ulysses"]).explain("ulysses")
    assert alone.lines() == ["ulysses is the recommended schedule, and the only one that applies."]
    assert alone.other is None


def test_the_picture_has_one_time_axis(ranking: Ranking) -> None:
    """Also where one takes more than twice as long as the other."""
    found = ranking.explain("startrail:2x4")
    assert abs(found.difference_s) > float(found.recommended.time_s) * 0.5
    ends = {panel.get_xlim() for panel in found.plot().axes if panel.get_ylabel() == "rank"}
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zigzag-ring", "did you mean 'zigzag-ring-attention'"),
        ("usp:3x2", "explain: usp:3x2 does not apply: "),
        ("ring", "is an AllGather"),
    ],
)
def test_names_that_cannot_be_explained(ranking: Ranking, name: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        ranking.explain(name)
