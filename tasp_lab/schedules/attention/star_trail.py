"""StarTrail (arXiv:2407.00611): teams of ranks share queries and keys, and the keys of teams go around many rings.

``startrail:CxT`` has T teams of C consecutive ranks; C divides T. First the ranks of a team share their queries and
keys, so each has those of its whole team. The queries of a team then meet the keys of every C-th team at each of its
ranks: these go around C*C rings of T/C ranks, each ring with its own start, and at each hop a rank attends with all
queries of its team. At last the ranks give results to their owners in the team. With as many teams as a team has ranks
the rings have no hop; with teams of one rank it is a ring.

Backward, keys make the same way, and the sums of their gradients follow one hop behind, at last home to their owners;
gradients of queries are given to their owners as results are. A rank sends (T/C - 1) times the keys of a team around.

Shards are zigzag, which is nearly balanced under a causal mask: of a team, the rank that meets its own keys has more to
compute, by the tiles on the diagonal. The steps are written transfer by transfer, as the paper describes
them.
"""

from __future__ import annotations

from dataclasses import replace

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.schedules.attention.span_blocks import span_task
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, QUERY_GRADIENTS, RESULTS
from tasp_lab.schedules.build import attention_layout
from tasp_lab.schedules.registry import schedule
from tasp_lab.schedules.writer import LayerWriter
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload

MAX_RANKS = 256
"""A pass takes up to 0.5 s to write on so many ranks, and four times as long on twice as many."""


@schedule(
    "startrail:CxT",
    "softmax",
    follows="ranks",
    moves="queries and keys within T teams of C ranks, then keys of teams around C*C rings; results back (StarTrail)",
    layout="zigzag",
    options=("buffers", "gradient_dtype", "result_dtype", "groups"),
    fits=lambda c, teams: teams % c == 0,
)
def startrail(
    name: str, topology: Topology, workload: Workload, options: AttentionOptions, *, split: tuple[int, int]
) -> tuple[Schedule, ...]:
    """The passes of ``startrail:CxT``, `split` being C and T.

    Raises `ScheduleError` if C does not divide T, for too many ranks, and if ranks have no links.
    """
    (c, teams), n = split, topology.world_size
    if teams % c:
        raise ScheduleError(f"schedule {name!r}: {teams} teams of {c} ranks, expected teams in multiples of {c}")
    if n > MAX_RANKS:
        raise ScheduleError(f"schedule {name!r}: {n} ranks, expected at most {MAX_RANKS}")
    layout, hops = attention_layout(name, workload, n), teams // c
    team = [range(rank // c * c, rank // c * c + c) for rank in range(n)]

    def one_pass(backward: bool) -> Schedule:
        dtype = options.wire_dtype(workload.dtype, backward=backward, sums=backward)
        task = replace(span_task(workload, layout, dtype, backward=backward), home_dtype="fp32")
        pools = {KEYS: Pool("keys", options.buffers), KEY_GRADIENTS: Pool("key gradients", options.buffers)}
        writer = LayerWriter(name, topology, task, pools | dict.fromkeys((QUERIES, RESULTS, QUERY_GRADIENTS)))
        keys = [[block for rank in team[each * c] for block in writer.keys(rank)] for each in range(teams)]

        def guest(rank: int, hop: int) -> int:
            return (rank // c**2 * c + rank % c - hop * c) % teams  # the team whose keys a rank has at a hop

        with writer.step():
            for rank in range(n):
                for mate in set(team[rank]) - {rank}:
                    shared, lane = writer.queries(rank) + writer.keys(rank), (mate - rank) % c
                    writer.send(shared, rank, to=mate, lane=lane, keep=True)
        with writer.step():
            for rank in range(n):
                if guest(rank, 0) != rank // c:
                    writer.send(keys[guest(rank, 0)], guest(rank, 0) * c + rank // c % c, to=rank)
        for hop in range(hops):
            with writer.step():
                for rank in range(n):
                    guests, onward = keys[guest(rank, hop)], (rank + c * c) % n
                    writer.attend(rank, [query for mate in team[rank] for query in writer.queries(mate)], guests)
                    if hop < hops - 1:
                        writer.send(guests, rank, to=onward)
                    if backward and hop > 0:
                        writer.give(writer.sums(rank, keys[guest(rank, hop - 1)]), rank, to=onward, lane=c)
        with writer.step():
            for rank in range(n):
                for place, mate in enumerate(team[rank]):
                    owner = guest(rank, hops - 1) * c + place
                    if mate != rank:
                        done = writer.sums(rank, writer.queries(mate))
                        writer.give(done, rank, to=mate, lane=(mate - rank) % c)
                    if backward and owner != rank:
                        writer.give(writer.sums(rank, writer.keys(owner)), rank, to=owner, lane=c + 1 + place)
        return writer.schedule()

    return options.build(one_pass)
