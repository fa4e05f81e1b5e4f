"""Change: another machine by other numbers, which all have names.

::

    machine = load_machine("h100-2x4")
    change(machine, {"nic_bandwidth": Change(2), "rank.0.nic.bandwidth": 10e9})

`change` is the one way to another machine: overrides (`tasp_lab.machines.overrides`), samples, sensitivities and
what-ifs call it. A name is one of

- a constant, as files have them: all that follows from it is built again. On a machine without a profile, a constant
  of wires is that of a class of its links. The latency of a class is that from rank to rank; a link between a rank and
  a switch has a part of it;
- ``nics``: how many NICs each node has, at most as many as it has; neighbours share them evenly;
- ``spine.oversubscription``: without it the network between nodes carries all that NICs bring. With rails, NICs meet in
  rail switches, and the spine is the links between these. Otherwise the NICs of a node meet in a switch of their own,
  whose links up to the spine and down from it have the bandwidth of these NICs over the oversubscription: a capacity
  that they share;
- ``node.1.nic.bandwidth``, ``rank.3.link.latency``: the links and NICs that begin or end at a rank of the place;
- ``nic.3.bandwidth``: those of one NIC, counted node by node, and the capacity that ranks share which use it;
- ``link.0-1``, ``link.0>1.latency``: single links, without another word their bandwidth; ``0>1`` is one direction;
- ``compute.rate``: all rates of kernel calls together; ``rank.3.compute``, ``node.1.compute``: how many times as fast
  as the others a rank or a node computes.

Whatever the order of the changes, they are made in this one: what is narrower has the last word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from tasp_lab.core.errors import OverrideError, QuantityError
from tasp_lab.core.units import Number, parse_count
from tasp_lab.machines.compute import ASSUMED_COMPUTE, COMPUTE_RATES, KernelCompute, compute_of
from tasp_lab.machines.constants import CONSTANTS, WIRES, Quantity
from tasp_lab.machines.libraries.library import CommLibrary, TcpLibrary, library_of
from tasp_lab.machines.machine import INSTANT, ComputeRate, ComputeRates, Machine
from tasp_lab.machines.parameters import (
    Change,
    Parameter,
    Parameters,
    as_changes,
    changed,
    library_parameters,
    nearest_possible,
)
from tasp_lab.machines.system import ReadNumbers, gloo
from tasp_lab.topology.derived import LinkField, links_named, rank_ends, with_class, with_number
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.links import Link, MeshLinks, SharedCapacity
from tasp_lab.topology.missing import nics_of, with_nics

COMPUTE = "compute.rate"
"""The name of all rates of kernel calls together."""

SPINE, NICS = "spine.oversubscription", "nics"

_FIELDS: Mapping[str, LinkField] = {"bandwidth": "bandwidth_bytes_per_s", "latency": "latency_s"}
"""The field of a link, by the last word of a name."""

_NAME = re.compile(
    r"(?:(?P<kind>node|rank)\.(?P<number>\d{1,5})\.)?(?:compute|(?P<links>link|port|nic)[._](?:bandwidth|latency))"
    r"|nic\.(?P<nic>\d{1,5})\.(?:bandwidth|latency)"
    r"|link\.(?P<ends>.*?[->].*?)(?:\.(?:bandwidth|latency))?",
    re.ASCII,
)


class Place(NamedTuple):
    """What a name means: links of a class, a node, a rank, a NIC or between two `ends`, and which number of them."""

    kind: str
    number: int
    links: str
    ends: str
    quantity: str


_KINDS = ("class", "nics", "spine", "node", "rank", "nic", "link")
"""Kinds of places, in the order in which they are changed."""


def place_of(name: str) -> Place | None:
    """The place that a name means; None for other names.

    >>> place_of("node.1.nic.bandwidth")
    Place(kind='node', number=1, links='nic', ends='', quantity='bandwidth')
    >>> place_of("link.0>1").ends, place_of("link.0-1.latency").quantity, place_of("link_bandwidth").kind
    ('0>1', 'latency', 'class')
    """
    if name == SPINE:
        return Place("spine", 0, "nic", "", "oversubscription")
    if name == NICS:
        return Place("nics", 0, "nic", "", "count")
    found = _NAME.fullmatch(name)
    if found is None or name == "compute":
        return None
    ends, last = found["ends"] or "", re.split("[._]", name)[-1]
    kind = "link" if ends else "nic" if found["nic"] else found["kind"] or "class"
    links = "nic" if found["nic"] else (found["links"] or "").replace("port", "link")
    return Place(
        kind,
        int(found["number"] or found["nic"] or 0),
        links,
        ends,
        last if last in (*_FIELDS, "compute") else "bandwidth",
    )


def _place(name: str) -> Place:
    place = place_of(name)
    assert place is not None, "names of places only"
    return place


def quantity_of(name: str) -> Quantity:
    """The quantity of the number of this name, by which its texts are read."""
    if name in CONSTANTS:
        return CONSTANTS[name].quantity
    if name == COMPUTE:
        return CONSTANTS["compute_rate"].quantity
    place = _place(name)
    if place.quantity in _FIELDS:
        return CONSTANTS[f"link_{place.quantity}"].quantity
    return Quantity("", {"spine": _parse_ratio, "nics": parse_count}.get(place.kind, _refuse_speed))


def _parse_ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 1 <= ratio < 1e6:
        raise QuantityError(f"{text!r}, expected a number of 1 or more, like 4")
    return ratio


def _refuse_speed(_: str) -> float:
    raise QuantityError("expected a factor, like x0.5")


def has_nics(machine: Machine) -> bool:
    """Whether ranks have NICs into a network."""
    return "network" in machine.topology.switch_kinds.values()


def constants_of(machine: Machine) -> list[str]:
    """The constants on which the times of a machine depend, in the order of `CONSTANTS`."""
    numbers = ReadNumbers(_with_defaults(machine).numbers)
    if machine.system is not None:
        found = {*machine.system.numbers_read(numbers)} & numbers.keys()
    else:
        topology = machine.topology
        links = topology.links[:1] if isinstance(topology.links, MeshLinks) else topology.links
        own = _library_without_profile(machine, numbers) == machine.comm_library
        found = numbers.names & numbers.keys() if own else set()
        found |= {f"{'nic' if topology.is_nic(link) else 'link'}_{quantity}" for link in links for quantity in _FIELDS}
    if isinstance(machine.compute, KernelCompute | ComputeRates):
        of_16_bit = isinstance(machine.compute, ComputeRates)  # a kernel has constants of its own for 16 bit
        rates = (name for name in machine.parameters if name in COMPUTE_RATES)
        found |= {name for name in rates if of_16_bit or COMPUTE_RATES[name][0] == "fp32"}
    return [name for name in CONSTANTS if name in found]


def _with_defaults(machine: Machine) -> Parameters:
    """The parameters of a machine, with those of gloo where it takes the place of another library."""
    defaults = library_parameters("gloo") if isinstance(machine.comm_library, TcpLibrary) else ()
    missing = [each for each in defaults if each.name not in machine.parameters]
    return Parameters([*machine.parameters.values(), *missing]) if missing else machine.parameters


def _library_without_profile(machine: Machine, numbers: Mapping[str, float]) -> CommLibrary:
    return gloo(numbers) if isinstance(machine.comm_library, TcpLibrary) else library_of(numbers)


def change(machine: Machine, changes: Mapping[str, Change | float], *, clamp: bool = True) -> Machine:
    """The machine with changes of its numbers, or new values, by their names.

    Parameters
    ----------
    changes : those with a name and a text of their own, as a user gave them, are stated as parameters with sources.
    clamp : whether impossible numbers of the library become the nearest possible ones; else they are refused.

    >>> from tasp_lab.machines.catalogue import load_machine
    >>> slow = change(load_machine("h100-8"), {"message_launch": Change(2)})
    >>> slow.comm_library.media[0].launch_s / load_machine("h100-8").comm_library.media[0].launch_s
    2.0

    Raises `OverrideError` for a value that a number cannot have, and where a place or its links do not exist,
    `ProfileError` for what the library of a machine does not have, and `TopologyError` for an unknown link.
    """
    wanted, of_links = as_changes(changes), WIRES if machine.system is None else ()
    constants = {name: each for name, each in wanted.items() if name in CONSTANTS and name not in of_links}
    places = {name: place for name in wanted if name not in constants and (place := place_of(name))}
    lines, found = dict[str, str](), machine
    if constants:
        found = _with_constants(machine, constants, lines, clamp=clamp)
    found = _with_links(found, {name: wanted[name] for name in places if places[name].quantity != "compute"}, lines)
    if COMPUTE in wanted:
        found = _with_compute(found, wanted[COMPUTE])
    if speeds := {name: wanted[name] for name in places if places[name].quantity == "compute"}:
        found = _with_speeds(found, speeds)
    added = (lines.get(name, f"{each.name} {each.text}") for name, each in wanted.items() if each.name)
    return replace(found, changes=(*machine.changes, *added))


def _line(change: Change, was: str, now: str) -> str:
    """What became of a number.

    >>> _line(Change(1, -5e9, "nic.bandwidth", "-5GB/s"), "50GB/s", "45GB/s")
    'nic.bandwidth 50GB/s → 45GB/s (-5GB/s)'
    """
    return f"{change.name} {was} → {now}{f' ({change.text})' if change.times else ''}"


# ------------------------------------------------------------------------------------------- constants: nic_hop_ll


def _with_constants(machine: Machine, changes: Mapping[str, Change], lines: dict[str, str], *, clamp: bool) -> Machine:
    """The machine with other constants of its system or library, and of the rates of its ranks."""
    known = _with_defaults(machine)
    parameters = changed(known, changes, clamp=clamp)
    if not clamp:
        _check(parameters, changes)
    for name, each in ((name, each) for name, each in changes.items() if each.name):
        was = known[name].text if CONSTANTS[name].kind else CONSTANTS[name].format(known.numbers[name])
        lines[name] = _line(each, was, parameters[name].text)
    if len(known) > len(machine.parameters):  # of the defaults only what was changed is stated
        stated = machine.parameters.keys() | changes.keys()
        parameters = Parameters(each for name, each in parameters.items() if name in stated)
    if changes.keys() <= COMPUTE_RATES.keys():
        found = replace(machine, parameters=parameters)
    elif machine.system is not None:
        found = machine.rebuilt(parameters)
    else:
        library = _library_without_profile(machine, parameters.numbers)
        found = replace(machine, comm_library=library, parameters=parameters)
    if changes.keys().isdisjoint(COMPUTE_RATES):
        return found
    rates, compute = compute_of(parameters.values()), machine.compute
    return replace(found, compute=replace(compute, rest=rates) if isinstance(compute, KernelCompute) else rates)


def _check(parameters: Parameters, changes: Mapping[str, Change]) -> None:
    """Raise `OverrideError` for impossible numbers, also for payloads above their line rate, or hops below the wire."""
    for name, each in changes.items():
        Change(0, parameters.numbers[name], each.name, each.text).check(0, CONSTANTS[name].quantity)
    nearest = nearest_possible(parameters.numbers)
    for name in (each for each in parameters if each in nearest):
        value, possible, spec = parameters.numbers[name], nearest[name], CONSTANTS[name]
        # a payload that is its whole line rate stays possible when both are multiplied
        if math.isclose(possible, value, rel_tol=1e-9, abs_tol=1e-15):
            continue
        other = spec.depends_on if value > possible else spec.min_constant
        why = ", ".join(str(changes[each]) for each in (name, other) if each in changes)
        limit = f"expected at {'most' if value > possible else 'least'} {spec.format(possible)}, {other}"
        raise OverrideError(f"override {why}: {name} would be {spec.format(value)}, {limit}")


# ------------------------------------------------------------------------------- links: link.0-1, rank.3.nic.bandwidth


def _with_links(machine: Machine, changes: Mapping[str, Change], lines: dict[str, str]) -> Machine:
    """The machine with changed links; the new numbers are stated, of several links that of the first."""
    single, stated = dict[tuple[int, str], Change](), list[Parameter]()
    places = {name: _place(name) for name in changes}
    for name in sorted(places, key=lambda name: (_KINDS.index(places[name].kind), places[name].number)):
        place = places[name]
        topology, each, source = machine.topology, changes[name], f"given: {changes[name]}, was 1"
        machine = machine.edited(partial(change_links, name=name, change=each))
        if place.kind in ("spine", "nics"):
            stated.append(Parameter(name, each.text.removeprefix("x"), source))
            continue
        links, spec = _links_of(topology, place, each), CONSTANTS[f"link_{place.quantity}"]
        for link in links if place.kind == "link" else ():
            if (other := single.setdefault((link, place.quantity), each)) is not each:
                which = f"{topology.links[link].name} has the override {other}"
                raise OverrideError(f"override {each}: {which}, too, expected one")
        old = _number_of(topology, place, links, each)
        was, now = spec.format(float(old)), spec.format(float(each.of(old)))
        lines[name] = _line(each, was, now)
        of_class = place.kind == "class"
        known = machine.parameters.get(name) if of_class else None  # the one kind that a file may state
        whose = f"{topology.links[links[0]].name} of the machine" if place.kind == "link" else "of the machine"
        source = each.source(was, known.source if known else whose)
        shown = name.replace("_", ".", 1) if of_class else name
        new = Parameter(name, float(each.of(old)), source, written=now) if known else Parameter(shown, now, source)
        if each.name:
            stated.append(new)
    return replace(machine, parameters=machine.parameters.with_parameters(stated)) if stated else machine


def change_links(topology: Topology, name: str, change: Change) -> Topology:
    """The topology with a change of the links that a name means.

    Raises `OverrideError` where a place or its links do not exist, and `TopologyError` for an unknown link.
    """
    place = _place(name)
    if place.kind == "spine":
        return _with_spine(topology, change)
    if place.kind == "nics":
        return _with_nics(topology, change)
    links, field, quantity = _links_of(topology, place, change), _FIELDS[place.quantity], quantity_of(name)
    if place.kind == "class":
        old = _number_of(topology, place, links, change)
        change.check(old, quantity)
        return with_class(topology, place.links == "nic", field, old, change.of(old))
    chosen = frozenset(links)

    def changed_link(index: int, link: Link) -> Link:
        if index not in chosen:
            return link
        change.check(getattr(link, field), quantity)
        return with_number(link, field, change.of(getattr(link, field)))

    found = topology.map_links(changed_link)
    if place.links != "nic" or field != "bandwidth_bytes_per_s" or not topology.shared:
        return found
    names = {topology.links[index].name for index in chosen}  # a NIC all of whose links change does
    whole = {each.name for nic in nics_of(topology) for each in nic.shared if names.issuperset(each.links)}
    return replace(found, shared=tuple(
        with_number(each, field, change.of(each.bandwidth_bytes_per_s)) if each.name in whole else each
        for each in topology.shared
    ))  # fmt: skip


def _links_of(topology: Topology, place: Place, change: Change) -> Sequence[int]:
    """The links that a change is of, by number; of a mesh, all of whose links are equal, only the first."""
    if place.kind == "link":
        return links_named(topology, place.ends)
    if place.kind == "class" and isinstance(topology.links, MeshLinks):
        return [0]
    if place.kind == "nic":
        found = nics_of(topology)
        if place.number >= len(found):
            which = f"NICs 0 to {len(found) - 1}" if found else "no NICs at its ranks"
            raise OverrideError(f"override {change}: {topology.name} has {which}")
        return [link for own in found[place.number].links.values() for link in own]
    every, nics = topology.listed_links(), place.links == "nic"
    members = [index for index, link in enumerate(every) if topology.is_nic(link) == nics]
    if place.kind == "class":
        return members
    ranks = set(_ranks_of(topology, place, change))
    members = [index for index in members if not ranks.isdisjoint((every[index].source, every[index].destination))]
    if not members:
        what = f"{place.kind} {place.number} of {topology.name} has no {'NICs' if nics else 'links'}"
        raise OverrideError(f"override {change}: {what}")
    return members


def _ranks_of(topology: Topology, place: Place, change: Change) -> list[int]:
    """The ranks of a place. Raises `OverrideError` if there are none."""
    places = topology.node_of_rank if place.kind == "node" else range(topology.world_size)
    ranks = [rank for rank, at in enumerate(places) if at == place.number]
    if not ranks:
        last = topology.world_size - 1 if place.kind == "rank" else max(topology.node_of_rank)
        raise OverrideError(f"override {change}: {topology.name} has {place.kind}s 0 to {last}")
    return ranks


def _number_of(topology: Topology, place: Place, links: Sequence[int], change: Change) -> Number:
    """The number of the first of some links; of a class the largest one from rank to rank.

    The latency of a class is twice that of a link into or out of a switch. Raises `OverrideError` where links of the
    class differ, except for a factor.
    """
    field = _FIELDS[place.quantity]
    first: Number = getattr(topology.links[links[0]], field)
    if place.kind != "class":
        return first
    at_ranks = [link for link in (topology.links[each] for each in links) if rank_ends(link)]
    halves = 2 if field == "latency_s" else 1
    found: list[Number] = list(
        dict.fromkeys(getattr(link, field) * (halves if rank_ends(link) == 1 else 1) for link in at_ranks)
    )
    if len(found) > 1 and not change.is_factor:
        texts = " and ".join(CONSTANTS[f"link_{place.quantity}"].format(float(each)) for each in found[:2])
        raise OverrideError(
            f"override {change}: links of {topology.name} have {texts}, expected a factor like x2, or one link by "
            "name like link.0-1"
        )
    return max(found)


def _with_nics(topology: Topology, change: Change) -> Topology:
    """The topology whose nodes have fewer NICs, which neighbours share."""
    if not nics_of(topology):
        raise OverrideError(f"override {change}: {topology.name} has no NICs at its ranks")

    def count(known: int) -> int:
        left = change.of(known)
        if left != int(left) or not 1 <= left <= known:
            raise OverrideError(
                f"override {change}: a node of {topology.name} has {known} NICs, expected a whole number up to {known}"
            )
        return int(left)

    return with_nics(topology, count)


def _with_spine(topology: Topology, change: Change) -> Topology:
    """The topology whose spine carries a part of what NICs bring."""
    ratio = Fraction(change.of(1.0))
    if not (change.is_factor or not change.times) or ratio < 1:
        raise OverrideError(f"override {change}: expected a number of 1 or more, like 4")
    if ratio == 1:
        return topology
    network = {name for name, kind in topology.switch_kinds.items() if kind == "network"}
    if any({link.source, link.destination} <= network for link in topology.links):

        def thinned(_: int, link: Link) -> Link:
            is_of_spine = {link.source, link.destination} <= network
            rate = link.bandwidth_bytes_per_s
            return with_number(link, "bandwidth_bytes_per_s", rate / ratio) if is_of_spine else link

        return topology.map_links(thinned)
    shared = []
    for node in dict.fromkeys(topology.node_of_rank):
        ranks = {rank for rank, of_rank in enumerate(topology.node_of_rank) if of_rank == node}
        out = [link for link in topology.links if link.destination in network and link.source in ranks]
        into = [link for link in topology.links if link.source in network and link.destination in ranks]
        for where, nics in (("to", out), ("from", into)):
            if not nics:
                raise OverrideError(
                    f"override {change}: ranks of {topology.name} have no NICs of their own, expected a machine of "
                    "nodes with a NIC per rank"
                )
            bandwidth: Number = sum(link.bandwidth_bytes_per_s for link in nics) / ratio
            shared.append(SharedCapacity(f"node {node} {where} spine", bandwidth, tuple(link.name for link in nics)))
    return replace(topology, shared=(*topology.shared, *shared))


# --------------------------------------------------------------------------------- ranks: compute.rate, rank.3.compute


def _with_compute(machine: Machine, change: Change) -> Machine:
    """The machine whose kernel calls all have another rate, or times divided by a factor.

    Raises `OverrideError` for an amount that is added: calls of different shapes have different rates.
    """
    compute = ASSUMED_COMPUTE if machine.compute == INSTANT else machine.compute
    if not change.times:
        return replace(machine, compute=ComputeRate(change.plus, f"given: {change}"))
    if not change.is_factor:
        raise OverrideError(f"override {change}: expected a factor like x0.9, or a rate like 300TFLOP/s")
    scaled = compute if change.times == 1 else compute.scaled(float(change.times))
    if not change.name:
        return replace(machine, compute=scaled)
    source = "kernel calls of all shapes, dtypes and passes; their times are divided by the factor"
    parameter = Parameter(COMPUTE, change.text, f"given: {change.name} {change.text} ({source})")
    return replace(machine, compute=scaled, parameters=machine.parameters.with_parameters([parameter]))


def _with_speeds(machine: Machine, changes: Mapping[str, Change]) -> Machine:
    """The machine with other speeds of ranks beside the others."""
    speeds: list[Number] = list(machine.rank_speeds or [1] * machine.topology.world_size)
    for name, each in changes.items():
        for rank in _ranks_of(machine.topology, _place(name), each):
            speeds[rank] = speeds[rank] * each.times
    parameters = [Parameter(name, each.text, f"given: {each}") for name, each in changes.items() if each.name]
    return replace(
        machine,
        rank_speeds=() if all(speed == 1 for speed in speeds) else tuple(Fraction(speed) for speed in speeds),
        parameters=machine.parameters.with_parameters(parameters),
    )
