"""Files that change what NCCL and RCCL do: rings of channels, and the algorithm of a collective. Writing only.

    graph(schedule, topology)                 # for NCCL_GRAPH_FILE: NCCL's rings become those of the schedule
    tuner_rules(schedule, machine)            # for the tuner plug-in of NCCL's examples

Grammars: src/graph/search.cc and plugins/tuner/example of NVIDIA/nccl 2.30.7 (5067397).
"""

from __future__ import annotations

from collections import Counter

from tasp_lab.core.errors import ScheduleError
from tasp_lab.machines.machine import Machine
from tasp_lab.schedule.schedule import Schedule
from tasp_lab.schedules.collectives.all_gather import RingSteps
from tasp_lab.schedules.collectives.conditions import collectives_of
from tasp_lab.schedules.registry import COLLECTIVES
from tasp_lab.topology.graph import Topology

MAX_CHANNELS = 32
"""Of NCCL on GPUs before Blackwell."""

_ALGORITHMS = {"ring": "ring", "tree": "tree", "nvls": "nvls", "nvls-tree": "nvls_tree"}


def graph(schedule: Schedule, topology: Topology) -> str:
    """The graph of one node: a channel for each ring of a schedule around rings, with equal shares.

    Raises `ScheduleError` for other schedules, several nodes, rings of unequal shares, and too many.

    >>> from tasp_lab.schedules.collectives.all_gather import ring_all_gather
    >>> from tasp_lab.topology.builders import full_mesh
    >>> print(graph(ring_all_gather(full_mesh(2), 64), full_mesh(2)).splitlines()[2].strip())
    <channel> <gpu dev="0" rank="0"/> <gpu dev="1" rank="1"/> </channel>
    """
    where = f"schedule {schedule.name!r}"
    if not isinstance(schedule.steps, RingSteps):
        raise ScheduleError(f"{where} does not go around rings, expected one that does, such as multi-ring")
    if len({*topology.node_of_rank}) > 1:
        raise ScheduleError(
            f"{where}: {topology.name} has several nodes, expected one: a graph has the rings of a node"
        )
    rings, chunks = schedule.steps.rings, schedule.steps.chunks
    if len(rings) > MAX_CHANNELS:
        raise ScheduleError(f"{where} has {len(rings)} rings, expected at most {MAX_CHANNELS} channels of NCCL")
    sizes = schedule.block_bytes[: len(rings) * chunks].reshape(len(rings), chunks).sum(axis=1)
    if sizes.max() > 1.02 * sizes.min():
        raise ScheduleError(
            f"{where}: rings carry from {sizes.min()} to {sizes.max()} bytes, expected equal shares, as channels have"
        )
    load: Counter[int] = Counter()
    for ring in rings.tolist():
        for pair in zip(ring, [*ring[1:], ring[0]], strict=True):
            load.update(topology.route(*pair).constraints)
    rates = [float(each.bandwidth_bytes_per_s) for each in topology.constraints]
    speed = min(rates[number] / count for number, count in load.items()) / 1e9
    lines = [
        '<graphs version="1">',
        f'  <graph id="0" pattern="4" crossnic="0" nchannels="{len(rings)}" speedintra="{speed:g}" '
        f'speedinter="{speed:g}" latencyinter="0" typeintra="NVL" typeinter="PIX" samechannels="0">',
    ]
    for ring in rings.tolist():  # devices are parsed as hexadecimal numbers
        gpus = " ".join(f'<gpu dev="{rank:x}" rank="{rank}"/>' for rank in ring)
        lines.append(f"    <channel> {gpus} </channel>")
    return "\n".join([*lines, "  </graph>", "</graphs>", ""])


def tuner_rules(schedule: Schedule, machine: Machine) -> str:
    """The rules by which NCCL takes the algorithm of a schedule for its collective, at any size.

    The plug-in pins other collectives to one channel, so they have rules, too: rings. Raises `ScheduleError` for
    schedules that are not the library's own, and for an AllToAll or SendRecv, which are not tuned.

    >>> from tasp_lab.schedules.collectives.library_rings import library_ring_all_gather
    >>> from tasp_lab.topology.builders import switch
    >>> print(tuner_rules(library_ring_all_gather(switch(8), 64), Machine(switch(8))).splitlines()[1])
    allgather,0,18446744073709551615,ring,-1,32,1,8
    """
    spec = COLLECTIVES.get(schedule.name)
    known = [name for name, each in COLLECTIVES.items() if each.library_call]
    if spec is None or not spec.library_call:
        raise ScheduleError(f"schedule {schedule.name!r} is not an algorithm of NCCL, expected {', '.join(known)}")
    kind = next(iter(collectives_of(schedule)))
    nodes, ranks = max(len({*machine.topology.node_of_rank}), 1), schedule.world_size
    names = {"AllGather": "allgather", "ReduceScatter": "reducescatter", "AllReduce": "allreduce"}
    lines = [
        f"# tasp-lab: {schedule.name} on {machine.topology.name}; "
        "collective,from bytes,to bytes,algorithm,protocol,channels,nodes,ranks"
    ]
    for name in (names[kind], *({"broadcast", "reduce", *names.values()} - {names[kind]})):
        algorithm = _ALGORITHMS[schedule.algorithm] if name == names[kind] else "ring"
        lines.append(f"{name},0,{2**64 - 1},{algorithm},-1,{MAX_CHANNELS},{nodes},{ranks}")
    return "\n".join([lines[0], lines[1], *sorted(lines[2:]), ""])
