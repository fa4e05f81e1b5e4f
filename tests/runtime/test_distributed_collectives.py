"""The collectives on real processes: every bit of their results, and the same from torch.distributed's own."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from runtime.executor.executor import Executor
from runtime.executor.transports import make_transport
from runtime.protocol.jobs import RunSchedule
from runtime.protocol.records import RankRecord, merge_records
from runtime.ranks.launcher import LaunchedRanks
from tasp_lab.schedules.build import collective
from tasp_lab.schedules.registry import COLLECTIVES, kind_of
from tasp_lab.topology.builders import full_mesh
from tests.conftest import Command
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.distributed

OTHERS = [name for name, spec in COLLECTIVES.items() if spec.kind != "AllGather"]
SHARD_BYTES = 20_011
"""Divides by nothing; a third is longer than what is posted by steps."""


@pytest.mark.parametrize("transport", ["p2p", "batched", "all-to-all"])
@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_every_collective_runs_in_every_way(ranks: LaunchedRanks, name: str, transport: str) -> None:
    """The ranks check their results bit for bit, after the first run and the last: sums against sums computed alone."""
    schedule = collective(name, full_mesh(4), SHARD_BYTES)
    results = ranks.perform(RunSchedule(schedule, transport, repeats=2, warm_ups=1), longest_silence_s=20)
    for repeat in range(2):
        records = [of_rank[repeat] for of_rank in results if isinstance(of_rank, list)]
        assert all(isinstance(record, RankRecord) for record in records)
        events = merge_records(records, schedule, "local").events
        assert len(events) == schedule.transfers
        shards = {"AllGather": 3, "ReduceScatter": 3, "AllReduce": 6, "AllToAll": 3, "SendRecv": 1}[kind_of([name])]
        assert sum(event.bytes for event in events) == 4 * shards * SHARD_BYTES


def messages_of_rank(name: str) -> tuple[list[int], list[int]]:
    """On a rank: its result of a message drawn for it, by the schedule of this name and by torch.distributed."""
    rank, n = dist.get_rank(), dist.get_world_size()
    message = torch.randint(
        0, 256, (n * SHARD_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank)
    )
    executor = Executor(collective(name, full_mesh(n), SHARD_BYTES), rank, make_transport("p2p", 60))
    sizes = executor.schedule.block_bytes.tolist()
    start = 0
    copies = executor.copies
    for block in executor.schedule.initial[rank].nonzero()[0].tolist():
        copies.resident([block])[0].copy_(message[start : start + sizes[block]])
        start += sizes[block]
    executor.prepare()
    dist.barrier()
    executor.run()
    kept = [block for block in executor.schedule.final[rank].nonzero()[0].tolist() if _is_result(name, rank, n, block)]
    found = torch.cat([copies.resident([block])[0] for block in kept])
    return found.tolist(), _by_torch(name, message).tolist()


def _is_result(name: str, rank: int, n: int, block: int) -> bool:
    return name != "all-to-all" or block % n == rank


def _by_torch(name: str, message: torch.Tensor) -> torch.Tensor:
    if name == "all-to-all":
        found = torch.empty_like(message)
        dist.all_to_all_single(found, message)
        return found
    dist.all_reduce(message)
    return message if name.endswith("all-reduce") else message.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "send-recv"])
def test_results_are_those_of_torch(name: str) -> None:
    for answer in on_ranks(messages_of_rank, 3, name):
        assert isinstance(answer, tuple), answer
        found, expected = answer
        assert found == expected


def test_validate_runs_them_beside_their_prediction(command: Command) -> None:
    done = command(
        "validate full-mesh:3 --schedule ring-all-reduce --schedule multi-ring-all-reduce "
        "--shard-bytes 64KiB --fabric local --repeat 2 --json"
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(run["schedule"], run["collective"]) for run in runs] == [
        ("ring-all-reduce", "AllReduce"), ("multi-ring-all-reduce", "AllReduce"),
    ]  # fmt: skip
    assert all(run["measured_s"] > 0 and run["predicted_s"] > 0 for run in runs)
