"""Systems: how links, communication library and contention of a machine follow from its numbers.

::

    system = load_profile("h100").system("2x8")
    numbers = load_profile("h100").parameters.numbers
    system.topology(numbers), system.comm_library(numbers)

A system is everything about a machine of a family that is no number: its links, of a member of the family in one size
or of a file of one's own, and its library. With other numbers (`tasp_lab.machines.change`) links change in proportion,
and what was done to single ones (`edits`) is done again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from tasp_lab.core.arrays import IntArray
from tasp_lab.core.errors import ProfileError, TopologyError
from tasp_lab.core.records import Record
from tasp_lab.machines.constants import PROTOCOLS, WIRES
from tasp_lab.machines.contention import NONE, Contention
from tasp_lab.machines.libraries.channels import (
    ChannelLibrary,
    ChannelRule,
    InsideCalls,
    Medium,
    Nvls,
    Protocol,
    ProtocolName,
    channel_rule,
    halved,
    power_of_two,
)
from tasp_lab.machines.libraries.groups import Communicators, GroupLibrary
from tasp_lab.machines.libraries.library import IDEAL, CommLibrary, TcpLibrary
from tasp_lab.machines.libraries.nccl_tuning import DEFAULT_VERSION, Generation, Tuner, parse_version
from tasp_lab.machines.parameters import library_parameters
from tasp_lab.topology.derived import LinkField, with_class
from tasp_lab.topology.expressions import MAX_WORLD_SIZE
from tasp_lab.topology.graph import Topology
from tasp_lab.topology.missing import nics_of
from tasp_lab.topology.routing import ANY_ROUTE, Forwarding

Library = Literal["nccl", "rccl", "gloo", "ideal"]
LIBRARIES: tuple[Library, ...] = ("nccl", "rccl", "gloo", "ideal")

FORWARDING: Mapping[str, Forwarding] = {
    "nccl": Forwarding(1, software="NCCL"),
    "rccl": Forwarding(0, software="RCCL"),
}
"""What libraries do where GPUs are not linked; others have routes over any ranks, as networks of hosts do.

NCCL sends through one other GPU, by NVLink or to a NIC beside it (NVIDIA NCCL documentation, environment variables
NCCL_NVB_DISABLE and NCCL_PXN_DISABLE). RCCL goes through host memory where two GPUs have no link; that is not modelled.
"""

Numbers = Mapping[str, float]
"""Values of parameters in SI units, by name."""

Edit = Callable[[Topology], Topology]

NetworkKind = Literal["documented", "cloud"]
"""Whether the network of a machine is documented, or that of a cloud, which differs from provider to provider."""

Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]
"""A number of ranks, or of nodes, in a file."""


def gloo(numbers: Numbers) -> CommLibrary:
    """gloo over TCP, with the constants of its file where the numbers have none."""
    launch_s, payload_share = (numbers.get(each.name, each.number) for each in library_parameters("gloo"))
    return TcpLibrary("gloo", launch_s, payload_share)


class Family(Record, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the file of a family of machines states beside its constants.

    Attributes
    ----------
    name : name of the family, like ``h100``.
    summary : one line for users.
    library : the communication library.
    inside : the network of a domain: a switch, or a link between any two GPUs.
    ranks_per_node : GPUs per node; members may use fewer.
    nodes_per_domain : nodes per switch; more than one for racks.
    ranks_per_nic : GPUs that share a NIC: 2 for nodes of 8 GPUs and 4 NICs.
    providers : the clouds whose nodes of its base these are, in lower case.
    accelerator : the name of its GPUs, see `tasp_lab.machines.compute`; empty if they are unknown.
    network : whether the network of its machines is documented, or that of a cloud.
    generation : of the GPUs, as NCCL tells them apart, empty where it is not known; its constants are in
        ``libraries/constants/nccl_<generation>.toml``.
    aliases : other names of members, to their sizes.
    machines : the members in the catalogue: their sizes, or aliases of these, each with a summary.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]*\Z")]
    summary: str
    library: Library
    inside: Literal["switch", "full-mesh"]
    ranks_per_node: Ranks = 8
    nodes_per_domain: Ranks = 1
    ranks_per_nic: Ranks = 1
    providers: tuple[str, ...] = ()
    accelerator: str = ""
    network: NetworkKind = "documented"
    generation: Generation | Literal[""] = ""
    aliases: dict[str, str] = msgspec.field(default_factory=dict)
    machines: dict[str, str] = msgspec.field(default_factory=dict)


def forwarding_of(family: Family, library: str) -> Forwarding:
    """How GPUs of a family send to those that they are not linked to, with a library as of `System`."""
    name = library.partition("==")[0]
    return FORWARDING.get(family.library if name == "auto" else name, ANY_ROUTE)


@dataclass(frozen=True)
class System:
    """The machine of a family without its numbers: `domains` domains of `ranks` ranks each, and a library.

    Parameters
    ----------
    family : what its file states.
    links : the topology where its wires have the numbers `at`, before the `edits`.
    library : ``auto`` for that of the family, or its name, or ``ideal`` or ``gloo``; of NCCL with or without its
        version, like ``nccl==2.28``.
    own_links : the name or file of the family where the links are those of a file; empty where it has such members.
    in_pairs : whether messages go through a communicator per pair of ranks, see `tasp_lab.machines.libraries.groups`.
    edits : what was done to the links, in order.
    sizes, nics : where parts are missing, the ranks of each domain that is left, and the least NICs of one.
    """

    family: Family
    domains: int
    ranks: int
    links: Topology
    at: Numbers
    library: str = "auto"
    own_links: str = ""
    in_pairs: bool = False
    edits: tuple[Edit, ...] = ()
    sizes: tuple[int, ...] = ()
    nics: int = 0

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return self.sizes or (self.ranks,) * self.domains

    @cached_property
    def _shape(self) -> tuple[int, int]:
        """Its domains, and the ranks of each: where these differ NCCL counts on the mean, rounded down."""
        return len(self._sizes), sum(self._sizes) // len(self._sizes)

    def reshaped(self, before: Topology, after: Topology) -> System:
        """The system whose ranks and NICs are those of a topology from which some of the former are missing."""
        (sizes, nics), new = _parts(before), _parts(after)
        return self if (sizes, nics) == new else replace(self, sizes=new[0], nics=new[1])

    @property
    def has_own_library(self) -> bool:
        """Whether its library is that of its family, rather than ``ideal`` or ``gloo`` in its place."""
        return self.library.partition("==")[0] in ("auto", self.family.library)

    @property
    def wires(self) -> tuple[str, ...]:
        """The constants of its links; a domain of one rank has no links, and one domain alone no network."""
        return WIRES[: 2 * (self.ranks > 1)] + WIRES[2 : 2 + 2 * (self.domains > 1)]

    def topology(self, numbers: Numbers) -> Topology:
        """The topology with these numbers: each link as many times faster as the constant of its kind."""
        topology = self.links
        for name in self.wires:
            field: LinkField = "latency_s" if name.endswith("latency") else "bandwidth_bytes_per_s"
            topology = with_class(topology, name.startswith("nic"), field, self.at[name], numbers[name])
        for edit in self.edits:
            topology = edit(topology)
        return topology

    def comm_library(self, numbers: Numbers) -> CommLibrary:
        """The communication library with these numbers.

        Raises `ProfileError` if one is missing, and for a library that the family does not have.
        """
        if not self.has_own_library:
            if self.library not in ("ideal", "gloo"):
                raise ProfileError(
                    f"library {self.library!r}: the profile of {self.links.name} is of {self.family.library}; "
                    "expected auto, ideal or gloo there"
                )
            return gloo(numbers) if self.library == "gloo" else IDEAL
        with needed(self.family):
            return self._own_library(numbers)

    def _own_library(self, numbers: Numbers) -> CommLibrary:
        if self.family.library == "ideal":
            return IDEAL
        if self.family.library == "gloo":
            return gloo(numbers)
        _, stated, version = self.library.partition("==")
        if stated and self.family.library != "nccl":
            raise ProfileError(
                f"library {self.library!r}: only versions of nccl are modelled, expected {self.family.library}"
            )
        parse_version(version or DEFAULT_VERSION)  # refuses a malformed one
        (domains, ranks), sizes = self._shape, self._sizes
        world = self._channels(numbers, domains, ranks, sum(sizes) - domains * ranks)
        world = world if len({*sizes}) == 1 else replace(world, sizes=sizes)
        if not self.in_pairs:
            return world
        # a pair inside a domain has no network, so its chunks are those of one domain
        domain_of_rank = np.repeat(np.arange(domains), sizes)
        kinds = [Communicators(self._channels(numbers, 1, 2), domain_of_rank)] if max(sizes) > 1 else []
        if domains > 1:
            kinds.append(Communicators(self._channels(numbers, 2, 1), np.zeros_like(domain_of_rank)))
        return GroupLibrary(name=world.name, kinds=tuple(kinds), domain_of_rank=domain_of_rank, world=world)

    def group_library(
        self, numbers: Numbers, domain_of_rank: IntArray, kinds: Sequence[tuple[IntArray, bool]]
    ) -> CommLibrary:
        """The library of a program with a communicator per group of ranks; without channels that of all ranks.

        Parameters
        ----------
        numbers : of the profile.
        domain_of_rank : int array (world_size,).
        kinds : the smallest groups first, for each kind its groups, an int array (groups, ranks), and whether its
            messages are those of collective calls.
        """
        library = self.comm_library(numbers)
        if not isinstance(library, ChannelLibrary):
            return library
        found = []
        with needed(self.family):
            for groups, collective in kinds:
                of_domain = np.unique(domain_of_rank[groups[0]], return_counts=True)[1]
                domains, ranks = len(of_domain), int(of_domain.max())
                channels = _call_channels(numbers, domains, self._nics(ranks)) if collective else None
                own = np.empty(len(domain_of_rank), dtype=np.int64)
                own[groups] = np.arange(len(groups))[:, None]
                found.append(Communicators(self._channels(numbers, domains, ranks), own, channels))
        return GroupLibrary(name=library.name, kinds=tuple(found), domain_of_rank=domain_of_rank)

    def contention(self, numbers: Numbers) -> Contention:
        """What messages take from kernel calls; nothing if it is unknown how many multiprocessors a GPU has."""
        known = "sms" in numbers and "sms_per_channel" in numbers
        if self.family.library not in ("nccl", "rccl") or not self.has_own_library or not known:
            return NONE
        try:
            domains, ranks = self._shape
            with needed(self.family):
                channels = _message_channels(numbers, domains, self._nics(ranks))
                waits = numbers.get("messages_wait", 0)
                return Contention(numbers["sms"], numbers["sms_per_channel"], channels, waits)
        except TopologyError as error:
            raise ProfileError(f"profile {self.family.name!r}: {error}") from error

    def numbers_read(self, numbers: Numbers) -> frozenset[str]:
        """The names of the numbers on which topology, library and contention depend.

        >>> from tasp_lab.machines.profile import load_profile
        >>> h100 = load_profile("h100")
        >>> sorted(h100.system("2x8", library="ideal").numbers_read(h100.parameters.numbers))
        ['link_bandwidth', 'link_latency', 'nic_bandwidth', 'nic_latency']
        """
        read = ReadNumbers(numbers)
        self.comm_library(read)
        self.contention(read)
        return frozenset([*self.wires, *read.names])

    def _channels(self, numbers: Numbers, domains: int, ranks: int, more: int = 0) -> ChannelLibrary:
        """The library with a communicator of `domains` domains of `ranks` ranks each, and `more` in some of them."""
        shared = domains > 1
        ring = numbers["ring_rate"] if ranks > 1 else math.inf
        inside = _medium(numbers, "", "nic_" if shared else "")
        version = parse_version(self.library.partition("==")[2] or DEFAULT_VERSION)
        tuner = self._tuner(numbers, domains, ranks, version)
        tuner = replace(tuner, more=more) if tuner and more else tuner
        # over several domains rings are those of NCCL's search, which are slower than the links of a domain
        between = ring if tuner is None or ranks == 1 else min(ring, tuner.ring_bytes_per_s())
        calls = nvls = None
        if tuner and ranks > 1 and "ll_channel_rate" in numbers and "copy_rate" in numbers:
            calls = InsideCalls(int(numbers["channels"]), numbers["ll_channel_rate"], numbers["copy_rate"])
        if tuner and tuner.has_nvls and "nvls_base" in numbers and "nvls_chunk" in numbers:
            nvls = Nvls(numbers["nvls_base"], numbers["nvls_chunk"], int(numbers["nvls_channels"]))
        return ChannelLibrary(
            name=self.family.library,
            domain_ranks=ranks,
            media=(inside, _medium(numbers, "nic_", "nic_")) if shared else (inside,),
            protocols={name: self._protocol(numbers, name, domains, ranks) for name in PROTOCOLS},
            rule=self._rule(numbers, domains, ranks, more),
            ring_bytes_per_s=min(between, self._nics(ranks) * numbers["nic_ring_rate"]) if shared else ring,
            short_bytes=int(numbers["short_message"]),
            short_by_most=self.family.library != "nccl" or version < (2, 29),
            own_copy_bytes_per_s=numbers.get("own_copy_rate"),
            tuner=tuner,
            inside=calls,
            wire_s=(numbers["link_latency"] if ranks > 1 else 0.0, *((numbers["nic_latency"],) if shared else ())),
            nvls=nvls,
        )

    def _tuner(self, numbers: Numbers, domains: int, ranks: int, version: tuple[int, ...]) -> Tuner | None:
        """NCCL's choice of protocols; None where the generation of the GPUs is not known."""
        if self.family.library != "nccl" or not self.family.generation:
            return None
        peers = 1 if self.family.inside == "switch" else max(ranks - 1, 1)
        shared = domains > 1
        return Tuner(
            self.family.generation,
            version,
            domains,
            ranks,
            numbers["link_payload"] * peers if ranks > 1 else 0.0,
            self.family.inside == "switch",
            *((numbers["nic_ring_rate"] * self._nics(ranks) / ranks, numbers["net_overhead"]) if shared else ()),
        )

    def _nics(self, ranks: int) -> int:
        """The NICs of so many ranks of a domain; all have as many as those of the domain with the fewest.

        The ranks of a communicator agree on the least number of channels (NVIDIA/nccl, src/init.cc, ncclCommInitRank).
        """
        if self.nics:
            return min(self.nics, -(-ranks * self.nics // self._shape[1]))
        return -(-ranks // self.family.ranks_per_nic)

    def _rule(self, numbers: Numbers, domains: int, ranks: int, more: int) -> ChannelRule:
        channels, world = _message_channels(numbers, domains, self._nics(ranks)), domains * ranks + more
        if domains == 1:
            return channel_rule(world, channels, power_of_two(int(numbers["channels_per_peer"])))
        # as many as fill a NIC, but those of all groups of peers that one channel serves must fit; RCCL keeps one free
        groups = -(-world // int(numbers["peers_per_channel"]))
        free = channels - (self.family.library == "rccl")
        per_peer = halved(power_of_two(int(numbers["nic_channels_per_peer"])), groups, free)
        return channel_rule(world, channels, per_peer)

    def _protocol(self, numbers: Numbers, name: ProtocolName, domains: int, ranks: int) -> Protocol:
        key = name.lower()
        link_s, inside_s = numbers["link_latency"], numbers[f"link_hop_{key}"]
        hop_s = inside_s - link_s
        message_s = numbers[f"message_hop_{key}"] - link_s if f"message_hop_{key}" in numbers else hop_s
        hops_s, ring_hops_s = (message_s, message_s), (hop_s, hop_s)
        if domains > 1:
            nic_s, between_s = numbers["nic_latency"], numbers[f"nic_hop_{key}"]
            hops_s = (message_s, between_s - nic_s)
            # a hop inside one of several domains takes at least net_overhead, with Simple three times that
            inside_s = max(inside_s, numbers["net_overhead"] * (3 if key == "simple" else 1))
            ring_hops_s = (inside_s - link_s, (between_s if ranks > 1 else numbers[f"lone_hop_{key}"]) - nic_s)
        if min(hops_s) < 0:
            raise ProfileError(f"profile {self.family.name!r}: a hop of {name} takes less than the latency of its link")
        return Protocol(
            name,
            numbers[f"base_{key}"],
            hops_s,
            ring_hops_s,
            payload_share=numbers["ll_payload"] if name == "LL" else 1,
            ring_share=1 if name == "Simple" else numbers[f"{key}_share"],
            max_bytes_per_s=numbers[_LL_MAX.get(domains, "nic_ll_max")] if name == "LL" else None,
        )


def _parts(topology: Topology) -> tuple[tuple[int, ...], int]:
    """The ranks of each node, and the NICs of the node with the fewest."""
    nodes, nics = Counter(topology.node_of_rank), Counter(nic.node for nic in nics_of(topology))
    return tuple(nodes.values()), min((nics[node] for node in nodes), default=0)


@contextmanager
def needed(family: Family) -> Iterator[None]:
    """Turns a missing number into a `ProfileError`."""
    try:
        yield
    except KeyError as error:
        name = error.args[0]
        raise ProfileError(
            f"profile {family.name!r}: constant {name!r} is missing; {family.library} needs it here"
        ) from error


class ReadNumbers(dict[str, float]):
    """Numbers that remember which of them were read."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__(numbers)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> float:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The number, or the default, which was read then."""
        self.names.add(name)
        return super().get(name, default)


_LL_MAX = {1: "ll_max", 2: "two_ll_max"}
"""What LL reaches at most in a ring, by the number of domains."""


def _message_channels(numbers: Numbers, domains: int, nics: int) -> int:
    """All channels of send and receive of a rank; `nics` are those of a domain."""
    return power_of_two(_call_channels(numbers, domains, nics))


def _call_channels(numbers: Numbers, domains: int, nics: int) -> int:
    """The channels of a collective call."""
    if domains == 1:
        return int(numbers["channels"])
    searched = int(numbers["channels_per_nic"]) * nics
    doubled = searched * (2 if searched < numbers["enough_channels"] else 1)
    return min(doubled, int(numbers["max_channels"]))


def _medium(numbers: Numbers, prefix: str, chunks: str) -> Medium:
    """The medium inside a domain, or that of the network; `chunks` is before the names of chunk sizes."""
    payload = numbers[f"{prefix}payload" if prefix else "link_payload"]
    wire = prefix or "link_"
    return Medium(
        numbers[f"{prefix}message_launch"],
        numbers[f"{wire}bandwidth"],
        payload,
        payload if prefix else numbers["link_many_payload"],
        numbers[f"{wire}channel_rate"],
        int(numbers[f"{chunks}chunk"]),
        int(numbers[f"{chunks}bytes_per_channel"]),
        int(numbers[f"{chunks}min_bytes_per_channel"]),
    )
