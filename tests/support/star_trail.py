"""StarTrail (arXiv:2407.00611), forward: teams of ranks share their queries and keys, which then go round in rings.

Ranks pass on several blocks at once, which came together or from several ranks, and give results to their owners.
"""

from __future__ import annotations

import numpy as np

from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.calls import Calls
from tasp_lab.schedule.model import Step
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS
from tasp_lab.schedules.attention.span_blocks import owner_schedule, span_task
from tasp_lab.schedules.attention.task import KEYS, QUERIES, RESULTS
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import zigzag

Moves = list[tuple[int, ...]]


def star_trail(topology: Topology, layer: Workload, members: int) -> Schedule:
    """Consecutive `members` ranks are a team; there is a multiple of `members` teams.

    Of each `members` teams, member m of a team attends all queries of its team to the keys of the m-th one.
    """
    n = topology.world_size
    teams, ranks = n // members, range(n)
    task = span_task(layer, zigzag(layer.sequence, n, layer.documents, layer.cached_keys), layer.dtype)
    mates = {rank: [each for each in ranks if each // members == rank // members] for rank in ranks}
    keys, queries = (
        {rank: [block for mate in mates[rank] for block in task.blocks_of(tensor) if task.owner[block] == mate]
         for rank in ranks} for tensor in (KEYS, QUERIES)
    )  # fmt: skip
    kept = np.zeros((n, len(task.tensor)), dtype=bool)
    for rank in ranks:
        kept[rank, queries[rank] + keys[rank]] = True
    share: Moves = [
        (rank, mate, (mate - rank) % members, block)
        for rank in ranks for mate in mates[rank] if mate != rank
        for block in queries[rank] + keys[rank] if task.owner[block] == rank
    ]  # fmt: skip
    team_of = {rank: rank // members**2 * members + rank % members for rank in ranks}  # whose keys a rank has first
    begin: Moves = [
        (team_of[rank] * members + rank // members % members, rank, 0, block)
        for rank in ranks if team_of[rank] != rank // members for block in keys[team_of[rank] * members]
    ]  # fmt: skip
    steps, attended = [Step.of(share), Step.of(begin)], set[tuple[int, int]]()
    for hop in range(teams // members):
        guests = {rank: keys[(team_of[rank] - hop * members) % teams * members] for rank in ranks}
        rows = [
            (rank, [[query], [key]], band)
            for rank in ranks for query in queries[rank] for key in guests[rank]
            for band in [tuple(int(each) for each in task.tile_bands(np.array(query), np.array(key)))]
            if band[0] <= band[1]
        ]  # fmt: skip
        attended |= {(rank, int(task.output_of[query])) for rank, ((query,), _), _ in rows}
        last = hop == teams // members - 1
        onward = [] if last else [(r, (r + members**2) % n, 0, block) for r in ranks for block in guests[r]]
        steps.append(Step.of(onward, [Calls.of(task.kernel, rows)] if rows else []))
    home = [(rank, int(task.owner[block]), block) for rank, block in sorted(attended) if task.owner[block] != rank]
    steps.append(Step.of((rank, owner, (owner - rank) % members, block, True) for rank, owner, block in home))
    pools = {KEYS: Pool("keys", DEFAULT_OPTIONS.buffers), QUERIES: None, RESULTS: None}
    return owner_schedule("star-trail", topology, task, steps, lanes=members, circulating=pools, kept=kept)
