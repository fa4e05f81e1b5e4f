"""Families of machines: a topology of any size with its communication library and constants.

A member is named by its size: ``h100-8`` is one node of 8 ranks, ``h100-10x8`` has ten nodes, ``h100-2x8-rails`` two
nodes with rails. `tasp_lab.machines.profile_files` reads families from files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tasp_lab.core.errors import ProfileError, TopologyError
from tasp_lab.machines.compute_rates import COMPUTE_RATES
from tasp_lab.machines.constants import CONSTANTS, PROTOCOLS
from tasp_lab.machines.contention import NONE, Contention
from tasp_lab.machines.kernel_compute import compute_on
from tasp_lab.machines.libraries.channels import (
    ChannelLibrary,
    ChannelRule,
    Medium,
    PairLibrary,
    Protocol,
    ProtocolName,
    channel_rule,
    channels_per_net_peer,
    power_of_two,
)
from tasp_lab.machines.libraries.library import IDEAL, CommLibrary, TcpLibrary
from tasp_lab.machines.library_constants import gloo, split_at
from tasp_lab.machines.machine import Constant, Machine, NetworkKind
from tasp_lab.topology.builders import full_mesh, nodes, switch
from tasp_lab.topology.expressions import MAX_WORLD_SIZE
from tasp_lab.topology.graph import Topology

Library = Literal["nccl", "rccl", "gloo", "ideal"]
LIBRARIES: tuple[Library, ...] = ("nccl", "rccl", "gloo", "ideal")

SIZE = re.compile(r"(?:(?P<nodes>[1-9][0-9]{0,4})x)?(?P<ranks>[1-9][0-9]{0,4})(?P<rails>-rails)?")
"""The size of a member, like ``8``, ``2x8`` or ``2x8-rails``."""


@dataclass(frozen=True)
class Profile:
    """A family of machines.

    Parameters
    ----------
    name : name of the family, like ``h100``.
    summary : one line for users.
    library : the communication library.
    inside : the network of a domain: a switch, or a link between any two GPUs.
    ranks_per_node : GPUs per node; members may use fewer.
    nodes_per_domain : nodes per switch; more than one for racks.
    constants : the profile's own constants, then those of its library and accelerator that it does not override.
    aliases : other names of members, to their sizes.
    machines : the members in the catalogue: their sizes, or aliases of these, each with a summary.
    accelerator : the name of its GPUs, see `tasp_lab.machines.compute_rates`; empty if they are unknown.
    network : whether the network of its machines is documented, or that of a cloud.
    """

    name: str
    summary: str
    library: Library
    inside: Literal["switch", "full-mesh"]
    ranks_per_node: int
    nodes_per_domain: int
    constants: tuple[Constant, ...]
    aliases: Mapping[str, str]
    machines: Mapping[str, str]
    accelerator: str = ""
    network: NetworkKind = "documented"

    def number(self, name: str) -> float:
        """The value of a constant in SI units. Raises `ProfileError` if the profile lacks it."""
        for constant in self.constants:
            if constant.name == name:
                value = CONSTANTS[name].parse(constant.value)
                if constant.at:
                    other, text = split_at(constant.at)
                    value *= self.number(other) / CONSTANTS[other].parse(text)
                return value
        raise ProfileError(f"profile {self.name!r}: constant {name!r} is missing; {self.library} needs it here")

    def clamped(self, name: str, value: float) -> float:
        """The nearest possible value of a constant: a share is at most 1, a payload at most its line rate, and a hop
        takes at least the wire's latency."""
        spec = CONSTANTS[name]
        lowest = self.number(spec.min_constant) if self.has(spec.min_constant) else 0.0
        highest = self.number(spec.depends_on) if spec.is_part and self.has(spec.depends_on) else math.inf
        return max(min(value, highest, spec.quantity.max_value), lowest)

    def restated(self, constant: Constant, value: str, source: str) -> Constant:
        """A constant of this profile with another value, stated at the present value of the constant it depends on."""
        other, _ = split_at(constant.at)
        now = [f"{other} = {each.value}" for each in self.constants if constant.at and each.name == other]
        return Constant(constant.name, value, source, "".join(now))

    def constant(self, name: str) -> Constant | None:
        """The constant of a name, None if there is none."""
        return next((each for each in self.constants if each.name == name), None)

    def with_constant(self, constant: Constant) -> Profile:
        """The profile with a constant in place of that of its name."""
        return replace(self, constants=tuple(constant if c.name == constant.name else c for c in self.constants))

    def has(self, name: str) -> bool:
        """Whether the profile has a constant of this name."""
        return any(constant.name == name for constant in self.constants)

    def machine(
        self,
        node_count: int,
        ranks_per_node: int,
        *,
        rails: bool = False,
        name: str = "",
        summary: str = "",
        library: str = "auto",
    ) -> Machine:
        """The member of `node_count` nodes with `ranks_per_node` ranks each.

        `library` is ``auto`` or the name of the profile's own, or ``ideal`` or ``gloo``. With another library than its
        own, the member has only the constants of its links and compute rates, and the profile needs no others.

        Raises `ProfileError` for a size outside the family, and for other libraries.
        """
        if ranks_per_node > self.ranks_per_node or node_count * ranks_per_node > MAX_WORLD_SIZE:
            raise ProfileError(
                f"profile {self.name!r}: {node_count} node{'s' * (node_count != 1)} of {ranks_per_node} ranks, "
                f"expected at most {self.ranks_per_node} ranks per node and {MAX_WORLD_SIZE} in all"
            )
        domains, ranks = self._domains(node_count, ranks_per_node)
        name = name or f"{self.name}-{node_count}x{ranks_per_node}"
        return Member(self, domains, ranks, rails, library, name, summary or self.summary).machine()

    def member(self, size: str, name: str, library: str = "auto") -> Machine | None:
        """The member of a size like ``10x8`` or ``2x8-rails``, or of an alias; None for other texts."""
        found = SIZE.fullmatch(self.aliases.get(size, size))
        if found is None:
            return None
        nodes_and_ranks = int(found["nodes"] or 1), int(found["ranks"])
        rails, summary = bool(found["rails"]), self.machines.get(size, "")
        return self.machine(*nodes_and_ranks, rails=rails, name=name, summary=summary, library=library)

    def comm_library(self, size: str) -> CommLibrary:
        """The library of a member, without its topology. Raises `ProfileError` for a size outside the family."""
        found = SIZE.fullmatch(self.aliases.get(size, size))
        if found is None:
            raise ProfileError(f"profile {self.name!r} has no size {size!r}, expected one like 8 or 2x8")
        return self._comm_library(*self._domains(int(found["nodes"] or 1), int(found["ranks"])))

    def _domains(self, node_count: int, ranks_per_node: int) -> tuple[int, int]:
        """The domains of a member, and the ranks of each."""
        domains = -(-node_count // self.nodes_per_domain)
        if node_count % domains:
            raise ProfileError(f"profile {self.name!r}: {node_count} nodes do not fill {domains} domains equally")
        return domains, node_count // domains * ranks_per_node

    def _topology(self, domains: int, ranks: int, rails: bool) -> Topology:
        numbers = [self.number(name) for name in ("link_bandwidth", "link_latency")] if ranks > 1 else [1.0, 0.0]
        if domains == 1:
            return (switch if self.inside == "switch" else full_mesh)(ranks, *numbers)
        return nodes(
            domains,
            ranks,
            self.inside,
            "rails" if rails else "fabric",
            link_bandwidth_bytes_per_s=numbers[0],
            link_latency_s=numbers[1],
            nic_bandwidth_bytes_per_s=self.number("nic_bandwidth"),
            nic_latency_s=self.number("nic_latency"),
        )

    def _other(self, library: str, name: str) -> CommLibrary:
        """A communication library other than the profile's."""
        if library not in ("ideal", "gloo"):
            raise ProfileError(
                f"library {library!r}: the profile of {name} is of {self.library}; expected auto, ideal or gloo there"
            )
        return gloo() if library == "gloo" else IDEAL

    def _contention(self, domains: int, ranks: int) -> Contention:
        """What messages take from kernel calls; nothing if the profile does not say how many multiprocessors it has."""
        if self.library not in ("nccl", "rccl") or not (self.has("sms") and self.has("sms_per_channel")):
            return NONE
        channels = _Channels(self, domains, ranks).message_channels
        try:
            return Contention(self.number("sms"), self.number("sms_per_channel"), channels)
        except TopologyError as error:
            raise ProfileError(f"profile {self.name!r}: {error}") from error

    def _comm_library(self, domains: int, ranks: int) -> CommLibrary:
        if self.library == "ideal":
            return IDEAL
        if self.library == "gloo":
            return TcpLibrary("gloo", self.number("launch"), self.number("tcp_payload"))
        return _Channels(self, domains, ranks).comm_library()


@dataclass(frozen=True)
class _Reading(Profile):
    """A profile that remembers which of its constants were read."""

    read: set[str] = field(default_factory=set)

    def number(self, name: str) -> float:
        """See `Profile.number`."""
        self.read.add(name)
        return super().number(name)


@dataclass(frozen=True)
class Member:
    """The recipe of a member with `domains` domains of `ranks` ranks each, and a library; see `PairLibrary`."""

    profile: Profile
    domains: int
    ranks: int
    rails: bool
    library: str
    name: str
    summary: str
    in_pairs: bool = False

    def machine(self) -> Machine:
        """The member. Raises `ProfileError` if its profile lacks a constant."""
        profile, own = self.profile, self.library in ("auto", self.profile.library)
        wires = _of_wires(self.domains)
        return Machine(
            replace(profile._topology(self.domains, self.ranks, self.rails), name=self.name),
            self._comm_library(profile),
            compute_on(profile.constants, profile.accelerator),
            self.summary,
            profile.constants if own else tuple(each for each in profile.constants if each.name in wires),
            accelerator=profile.accelerator,
            contention=profile._contention(self.domains, self.ranks) if own else NONE,
            network=profile.network,
            recipe=self,
        )

    def constants_read(self) -> frozenset[str]:
        """The constants on which its topology, library and contention depend.

        >>> from tasp_lab.machines.profile_files import load_profile
        >>> sorted(load_profile("h100").machine(2, 8, library="ideal").recipe.constants_read())
        ['link_bandwidth', 'link_latency', 'nic_bandwidth', 'nic_latency']
        """
        reading = _Reading(**vars(self.profile))
        replace(self, profile=reading).machine()
        return frozenset(reading.read)

    def topology(self, constants: tuple[Constant, ...]) -> Topology:
        """See `tasp_lab.machines.machine.Recipe`."""
        return self._with(constants)._topology(self.domains, self.ranks, self.rails)

    def comm_library(self, constants: tuple[Constant, ...]) -> CommLibrary:
        """See `tasp_lab.machines.machine.Recipe`."""
        return self._comm_library(self._with(constants))

    def _comm_library(self, profile: Profile) -> CommLibrary:
        if self.library not in ("auto", profile.library):
            return profile._other(self.library, self.name)
        found = profile._comm_library(self.domains, self.ranks)
        return self._pairs(profile, found) if self.in_pairs and isinstance(found, ChannelLibrary) else found

    def with_pairs(self) -> Member:
        """See `tasp_lab.machines.machine.Recipe`."""
        return replace(self, in_pairs=True)

    def _pairs(self, profile: Profile, world: ChannelLibrary) -> PairLibrary:
        inside = _Channels(profile, 1, 2).comm_library() if self.ranks > 1 else None
        between = _Channels(profile, 2, 1).comm_library() if self.domains > 1 else None
        return PairLibrary(name=world.name, world=world, inside=inside, between=between)

    def _with(self, constants: tuple[Constant, ...]) -> Profile:
        """The profile with these constants in place of its own, as far as they are possible (`Profile.clamped`)."""
        known = {constant.name: constant for constant in constants}
        changed = replace(self.profile, constants=tuple(known.get(c.name, c) for c in self.profile.constants))
        for constant in changed.constants:
            value = changed.number(constant.name)
            if (possible := changed.clamped(constant.name, value)) != value:
                text = CONSTANTS[constant.name].format(possible, 17)
                changed = changed.with_constant(changed.restated(constant, text, constant.source))
        return changed


@dataclass(frozen=True)
class _Channels:
    """Builds a library with channels for `domains` domains of `ranks` ranks each."""

    profile: Profile
    domains: int
    ranks: int

    def comm_library(self) -> ChannelLibrary:
        of = self.profile.number
        shared = self.domains > 1
        ring = of("ring_rate") if self.ranks > 1 else math.inf
        return ChannelLibrary(
            name=self.profile.library,
            domain_ranks=self.ranks,
            media=(self._inside(), *([self._between()] if shared else [])),
            protocols={protocol: self._protocol(protocol) for protocol in PROTOCOLS},
            rule=self._rule(),
            ring_bytes_per_s=min(ring, self.ranks * of("nic_ring_rate")) if shared else ring,
            short_bytes=int(of("short_message")),
        )

    @property
    def message_channels(self) -> int:
        """All channels of send and receive of a rank."""
        of = self.profile.number
        if self.domains == 1:
            return power_of_two(int(of("channels")))
        searched = int(of("channels_per_nic")) * self.ranks
        doubled = searched * (2 if searched < of("enough_channels") else 1)
        return power_of_two(min(doubled, int(of("max_channels"))))

    def _rule(self) -> ChannelRule:
        of, world_size, channels = self.profile.number, self.domains * self.ranks, self.message_channels
        if self.domains == 1:
            return channel_rule(world_size, channels, power_of_two(int(of("channels_per_peer"))))
        per_peer = int(of("nic_channels_per_peer"))
        # RCCL keeps one channel free, NCCL none
        free = channels - (self.profile.library == "rccl")
        most = channels_per_net_peer(world_size, free, per_peer, int(of("peers_per_channel")))
        return channel_rule(world_size, channels, most)

    def _inside(self) -> Medium:
        of, prefix = self.profile.number, "nic_" if self.domains > 1 else ""
        return Medium(
            of("message_launch"), of("link_bandwidth"), of("link_payload"), of("link_many_payload"),
            of("link_channel_rate"),
            int(of(f"{prefix}chunk")), int(of(f"{prefix}bytes_per_channel")), int(of(f"{prefix}min_bytes_per_channel")),
        )  # fmt: skip

    def _between(self) -> Medium:
        of = self.profile.number
        return Medium(
            of("nic_message_launch"), of("nic_bandwidth"), of("nic_payload"), of("nic_payload"), of("nic_channel_rate"),
            int(of("nic_chunk")), int(of("nic_bytes_per_channel")), int(of("nic_min_bytes_per_channel")),
        )  # fmt: skip

    def _protocol(self, name: ProtocolName) -> Protocol:
        of, key = self.profile.number, name.lower()
        hops = [of(f"link_hop_{key}") - of("link_latency")]
        if self.domains > 1:
            hops.append(of(f"nic_hop_{key}") - of("nic_latency"))
        ring_hops = self._ring_hops(key)
        if min(hops) < 0:
            raise ProfileError(f"profile {self.profile.name!r}: a hop of {name} takes less than the wire")
        return Protocol(
            name,
            of(f"base_{key}"),
            (hops[0], hops[-1]),
            (ring_hops[0], ring_hops[-1]),
            payload_share=of("ll_payload") if name == "LL" else 1,
            ring_share=1 if name == "Simple" else of(f"{key}_share"),
            max_bytes_per_s=of(self._ll_max()) if name == "LL" else None,
        )

    def _ring_hops(self, key: str) -> list[float]:
        """Latency of a ring collective's hops beyond the wire's, in s: inside a domain, and between domains."""
        of = self.profile.number
        if self.domains == 1:
            return [of(f"link_hop_{key}") - of("link_latency")]
        inside = max(of(f"link_hop_{key}"), of("net_overhead") * (3 if key == "simple" else 1))
        between = of(f"nic_hop_{key}" if self.ranks > 1 else f"lone_hop_{key}")
        return [inside - of("link_latency"), between - of("nic_latency")]

    def _ll_max(self) -> str:
        return {1: "ll_max", 2: "two_ll_max"}.get(self.domains, "nic_ll_max")


def _of_wires(domains: int) -> tuple[str, ...]:
    """The constants of links and compute rates of `domains` domains."""
    of_network = ("nic_bandwidth", "nic_latency") if domains > 1 else ()
    return ("link_bandwidth", "link_latency", *of_network, *COMPUTE_RATES)
