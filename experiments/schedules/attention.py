"""Schedules of attention in a file of their own; ``--schedule experiments/schedules/attention.py:both-ways``."""

from tasp_lab.core.errors import ScheduleError
from tasp_lab.schedule.blocks import Pool
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.attention.heads import head_pieces
from tasp_lab.schedules.attention.options import DEFAULT_OPTIONS, AttentionOptions
from tasp_lab.schedules.attention.program import Plan, Program, Tree
from tasp_lab.schedules.attention.span_blocks import span_task
from tasp_lab.schedules.attention.task import KEY_GRADIENTS, KEYS, QUERIES, RESULTS, AttentionTask
from tasp_lab.schedules.registry import schedule
from tasp_lab.schedules.writer import LayerWriter
from tasp_lab.topology.graph import Topology
from tasp_lab.workload.layer import Workload
from tasp_lab.workload.sequence_layout import layout_named

Passes = tuple[Schedule, ...]


def layer_task(
    workload: Workload, n: int, layout: str, options: AttentionOptions, backward: bool = False, groups: int = 1
) -> AttentionTask:
    """The blocks of a layer in spans of a layout, for each of some groups of heads."""
    dtype = options.wire_dtype(workload.dtype, backward=backward, sums=groups == 1)
    return span_task(
        workload, layout_named(layout, workload, n), dtype, backward=backward, pieces=head_pieces(workload, groups)
    )


@schedule("both-ways", "softmax", layout="zigzag", options=("buffers", "gradient_dtype"))
def both_ways(name: str, topology: Topology, workload: Workload, options: AttentionOptions = DEFAULT_OPTIONS) -> Passes:
    """Half of the keys of each rank go up one ring, the other half down it, with their gradients (`half-each-way`)."""
    n = topology.world_size

    def one_pass(backward: bool) -> Schedule:
        task = layer_task(workload, n, "zigzag", options, backward)
        pools = {KEYS: Pool("keys", options.buffers), KEY_GRADIENTS: Pool("key gradients", options.buffers)}
        writer = LayerWriter(name, topology, task, pools)
        for hop in range(n + 1):
            with writer.step():
                for rank in range(n):
                    for half, way in enumerate((1, -1)):
                        to, guests = (rank + way) % n, writer.keys((rank - way * hop) % n)[half::2]
                        if hop < n:
                            writer.attend(rank, writer.queries(rank), guests)
                        if hop < n - 1:
                            writer.send(guests, rank, to=to, lane=half)
                        if backward and hop > 1:
                            before = writer.keys((rank - way * (hop - 1)) % n)[half::2]
                            writer.give(writer.sums(rank, before), rank, to=to, lane=2 + half)
        return writer.schedule()

    return options.build(one_pass)


@schedule("rows-then-columns", "softmax", layout="zigzag")
def rows_then_columns(
    name: str, topology: Topology, workload: Workload, options: AttentionOptions = DEFAULT_OPTIONS
) -> Passes:
    """Keys along the rows of a square, then those of whole rows along its columns, forward."""
    n, side = topology.world_size, round(topology.world_size**0.5)
    if side * side != n or options.passes != "forward":
        raise ScheduleError(f"{n} ranks, pass {options.passes}: expected a square, and forward")
    writer = LayerWriter(name, topology, layer_task(workload, n, "zigzag", options), {KEYS: None})
    rows = [[block for mate in range(side) for block in writer.keys(row * side + mate)] for row in range(side)]
    for hop in range(side):
        with writer.step():
            for rank in range(n):
                row, column = divmod(rank, side)
                guests = writer.keys(row * side + (column - hop) % side)
                writer.attend(rank, writer.queries(rank), guests)
                if hop < side - 1:
                    writer.send(guests, rank, to=row * side + (column + 1) % side, keep=True)
    for hop in range(side):
        with writer.step():
            for rank in range(n):
                guests = rows[(rank // side - hop) % side]
                if hop > 0:
                    writer.attend(rank, writer.queries(rank), guests)
                if hop < side - 1:
                    writer.send(guests, rank, to=(rank + side) % n, lane=1, keep=True)
    return (writer.schedule(),)


@schedule("tree-decode", "softmax", layout="contiguous", options=("result_dtype",))
def tree_decode(
    name: str, topology: Topology, workload: Workload, options: AttentionOptions = DEFAULT_OPTIONS
) -> Passes:
    """Tree attention for decoding (arXiv:2408.04093), forward: queries down a binomial tree, results up it."""
    if options.passes != "forward":
        raise ScheduleError(f"pass {options.passes}, expected forward")
    n, ranks = topology.world_size, range(topology.world_size)
    writer = LayerWriter(name, topology, layer_task(workload, n, "contiguous", options), {QUERIES: None, RESULTS: None})
    edges = [[(v, v + 2**level) for v in range(2**level) if v + 2**level < n] for level in range((n - 1).bit_length())]
    for level in edges:
        with writer.step():
            for root in ranks:
                for above, below in level:
                    writer.send(writer.queries(root), (root + above) % n, to=(root + below) % n, keep=True)
    with writer.step():
        for rank in ranks:
            writer.attend(rank, [query for root in ranks for query in writer.queries(root)], writer.keys(rank))
    for level in reversed(edges):
        with writer.step():
            for root in ranks:
                for above, below in level:
                    source = (root + below) % n
                    writer.give(writer.sums(source, writer.queries(root)), source, to=(root + above) % n)
    return (writer.schedule(),)


@schedule("chunked-ulysses", "softmax", layout="contiguous", options=("stages", "result_dtype"))
def chunked_ulysses(
    name: str, topology: Topology, workload: Workload, options: AttentionOptions = DEFAULT_OPTIONS
) -> Passes:
    """Ulysses in `stages` groups of heads, forward: one is attended to while the next comes and the last leaves."""
    n, stages = topology.world_size, options.stage_count
    if workload.heads % (n * stages) or workload.kv_head_count % (n * stages) or options.passes != "forward":
        raise ScheduleError(f"pass {options.passes}, expected forward, and heads in multiples of {n * stages}")
    task = layer_task(workload, n, "contiguous", options, groups=n * stages)
    writer = LayerWriter(name, topology, task, {KEYS: None, QUERIES: None, RESULTS: None})

    assert task.first_head is not None, "there are several groups"
    assert task.heads is not None, "there are several groups"
    group = task.first_head // task.heads

    def of_group(blocks: list[int], stage: int, rank: int) -> list[int]:
        return [block for block in blocks if group[block] == stage * n + rank]

    for step in range(stages + 2):
        with writer.step():
            for rank in range(n):
                for owner in range(n):
                    queries, keys = writer.queries(owner), writer.keys(owner)
                    if owner != rank and step < stages:
                        moving = of_group(queries, step, rank) + of_group(keys, step, rank)
                        writer.send(moving, owner, to=rank, lane=(rank - owner) % n, keep=True)
                    if 1 <= step <= stages:
                        for other in range(n):
                            guests = of_group(writer.keys(other), step - 1, rank)
                            writer.attend(rank, of_group(queries, step - 1, rank), guests)
                    if owner != rank and step > 1:
                        done = writer.sums(rank, of_group(queries, step - 2, rank))
                        writer.give(done, rank, to=owner, lane=n + (owner - rank) % n)
    return (writer.schedule(),)


@schedule("once-per-node", "softmax", options=("gradient_dtype",))
def once_per_node(
    name: str, topology: Topology, workload: Workload, options: AttentionOptions = DEFAULT_OPTIONS
) -> Program:
    """Keys go once to each other node, to the GPU of their owner's number, which sends them on inside the node.

    They stay there. Backward, ranks compute with their own keys last, while the gradients of the keys of others come
    back the way those went, added up. Of m nodes a NIC carries m - 1 times the keys of one rank; if keys went straight
    to all ranks, as many times more as a node has GPUs. Found by ``tasp-lab search``.
    """
    nodes = 1 + max(topology.node_of_rank)
    gpus = topology.world_size // nodes
    via = tuple(node * gpus if gpu else 0 for node in range(nodes) for gpu in range(gpus))
    arrival = tuple(min(node, 1) * min(gpu, 1) for node in range(nodes) for gpu in range(gpus))
    tree = (Tree(via, arrival),)
    layout = workload.visible.balanced_layout
    return Program(layout, (nodes, gpus), keep=True, forward=Plan(tree), backward=Plan(tree, home="tree", own=3))
