"""Profiles: a machine together with the communication library that people run on it.

A profile file describes a *family* of machines: what joins the GPUs of a node or of a rack, what joins those, which
library sends messages and with which constants. A member is named by its size: ``h100-8`` is one node of 8 ranks,
``h100-10x8`` ten of them, ``h100-2x8-rails`` two with rails. Every constant has its source; `tasp-lab profile show`
prints them.

Files of families are `tasp_lab/profiles/*.toml`, and one's own may stand anywhere. Constants that are the same for all
machines of a library are in `tasp_lab/libraries/*.toml`; a profile may state them anew.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from tasp_lab.builders import full_mesh, nodes, switch
from tasp_lab.channel_library import (
    ChannelLibrary,
    ChannelRule,
    Medium,
    Protocol,
    ProtocolName,
    channel_rule,
    channels_per_net_peer,
    power_of_two,
)
from tasp_lab.errors import ProfileError, QuantityError
from tasp_lab.expressions import MAX_WORLD_SIZE
from tasp_lab.machine import INSTANT, Compute, Constant, Machine
from tasp_lab.quantities import (
    parse_bandwidth_bytes_per_s,
    parse_count,
    parse_flops_per_s,
    parse_size_bytes,
    parse_time_s,
)
from tasp_lab.topology import Topology
from tasp_lab.transport import IDEAL, TcpLibrary, Transport

Library = Literal["nccl", "rccl", "gloo", "ideal"]
LIBRARIES: tuple[Library, ...] = ("nccl", "rccl", "gloo", "ideal")


def _parse_share(text: str) -> float:
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value <= 1:
        raise QuantityError(f"share {text!r}: expected a number more than 0, at most 1")
    return value


class Meaning(NamedTuple):
    """What a constant of a profile is: how its text is read, the unit of what that gives, and what it says."""

    parse: Callable[[str], float]
    unit: str
    text: str


def _rate(text: str) -> Meaning:
    return Meaning(parse_bandwidth_bytes_per_s, "bytes/s", text)


def _time(text: str) -> Meaning:
    return Meaning(parse_time_s, "s", text)


def _count(text: str) -> Meaning:
    return Meaning(parse_count, "", text)


def _size(text: str) -> Meaning:
    return Meaning(parse_size_bytes, "bytes", text)


def _share(text: str) -> Meaning:
    return Meaning(_parse_share, "", text)


MEANINGS: Mapping[str, Meaning] = {
    "link_bandwidth": _rate("line rate of a link, or of a GPU's port into its switch, one way"),
    "link_latency": _time("of the wire, from rank to rank inside a domain"),
    "nic_bandwidth": _rate("line rate of a GPU's NIC, one way"),
    "nic_latency": _time("of the wire, from rank to rank through the network"),
    "compute_rate": Meaning(parse_flops_per_s, "FLOP/s", "how fast a rank computes attention"),
    "launch": _time("what a rank needs to post one message; gloo"),
    "tcp_payload": _share("what of a link's bytes is payload; gloo"),
    "message_launch": _time("from the call until a group of messages flows, inside a domain"),
    "nic_message_launch": _time("the same for messages through the network"),
    "link_payload": _rate("what protocols leave of link_bandwidth for one peer"),
    "link_many_payload": _rate("what they leave of it where a rank sends to several peers at one step"),
    "link_channel_rate": _rate("what one channel of send and receive reaches inside a domain"),
    "ring_rate": _rate("what all channels of a ring collective reach together, out of each rank, inside a domain"),
    "nic_payload": _rate("what protocols leave of nic_bandwidth"),
    "nic_channel_rate": _rate("what one channel of send and receive reaches through the network"),
    "nic_ring_rate": _rate("what the channels of a ring collective reach through one NIC"),
    "channels": _count("channels of collectives inside a domain"),
    "channels_per_nic": _count("channels of collectives per NIC where there are several domains"),
    "enough_channels": _count("if there are fewer then, they are doubled"),
    "most_channels": _count("there are no more, whatever the number of NICs"),
    "channels_per_peer": _count("the most channels of send and receive for one peer inside a domain"),
    "nic_channels_per_peer": _count("the most for a peer behind the network, before all peers have to fit"),
    "peers_per_channel": _count("how many peers one channel serves at once"),
    "chunk": _size("chunks of send and receive inside one domain"),
    "nic_chunk": _size("chunks of send and receive where there are several domains"),
    "part": _size("channels double while a channel's part of a message is larger, inside one domain"),
    "nic_part": _size("the same where there are several domains"),
    "least_part": _size("a channel's part is no smaller, inside one domain"),
    "nic_least_part": _size("the same where there are several domains"),
    "short_message": _size("messages up to this size, times the most channels per peer, go by LL"),
    **{
        f"{what}_{protocol.lower()}": _time(f"{text}, protocol {protocol}")
        for what, text in (
            ("base", "latency of a call"),
            ("link_hop", "latency of a hop inside a domain, the wire's included"),
            ("nic_hop", "latency of a hop through the network, the wire's included"),
        )
        for protocol in ("LL", "LL128", "Simple")
    },
    "ll_payload": _share("what part of LL's bytes is payload"),
    "ll_share": _share("what LL reaches of the ring rate"),
    "ll128_share": _share("what LL128 reaches of the ring rate"),
    "ll_most": _rate("what LL reaches at most in a ring collective inside a domain"),
    "two_ll_most": _rate("the same over two domains"),
    "nic_ll_most": _rate("the same over more"),
    "net_overhead": _time("a hop inside one of several domains takes no less; with Simple three times that"),
    **{
        f"lone_hop_{protocol.lower()}": _time(
            f"latency of a hop of a ring collective through the network with one GPU per domain, protocol {protocol}"
        )
        for protocol in ("LL", "LL128", "Simple")
    },
}
"""Every constant that a profile may have."""


_NO_MORE_THAN = (
    ("link_payload", "link_bandwidth"),
    ("link_many_payload", "link_bandwidth"),
    ("nic_payload", "nic_bandwidth"),
    ("nic_ring_rate", "nic_bandwidth"),
)
"""Constants of which the first is a part of the second; else predictions would beat the bound."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=r"\S")]
    value: Annotated[str, msgspec.Meta(pattern=r"\S")]
    source: Annotated[str, msgspec.Meta(pattern=r"\S")]


class _LibraryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    constants: tuple[_Record, ...]


class _ProfileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]*\Z")]
    summary: str
    library: Library
    inside: Literal["switch", "full-mesh"]
    constants: tuple[_Record, ...]
    ranks_per_node: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)] = 8
    nodes_per_domain: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)] = 1
    aliases: dict[str, str] = {}


_SIZE = re.compile(r"(?:(?P<nodes>[1-9][0-9]{0,4})x)?(?P<ranks>[1-9][0-9]{0,4})(?P<rails>-rails)?")


@dataclass(frozen=True)
class Profile:
    """A family of machines.

    Parameters
    ----------
    name : of the family, like ``h100``.
    summary : a line for people.
    library : that sends messages.
    inside : what joins the GPUs of a domain: a switch, or a link between any two.
    ranks_per_node : how many GPUs a node has; members may use fewer.
    nodes_per_domain : how many nodes one switch joins; more than one for racks.
    constants : of the profile, then those of its library that it does not state itself.
    aliases : other names of members, to their sizes.
    """

    name: str
    summary: str
    library: Library
    inside: Literal["switch", "full-mesh"]
    ranks_per_node: int
    nodes_per_domain: int
    constants: tuple[Constant, ...]
    aliases: Mapping[str, str]

    def number(self, name: str) -> float:
        """The value of a constant in SI units. Raises `ProfileError` where the profile lacks it."""
        for constant in self.constants:
            if constant.name == name:
                return MEANINGS[name].parse(constant.value)
        raise ProfileError(f"profile {self.name!r}: constant {name!r} is missing; {self.library} needs it here")

    def has(self, name: str) -> bool:
        """Whether there is such a constant."""
        return any(constant.name == name for constant in self.constants)

    def machine(
        self, node_count: int, ranks_per_node: int, *, rails: bool = False, name: str = "", wires: bool = False
    ) -> Machine:
        """The member with so many nodes, of so many ranks each: its wires, its library and its compute rate.

        With `wires` it is without its library, whose constants may then be missing.

        Raises `ProfileError` for a size that the family does not come in.
        """
        if ranks_per_node > self.ranks_per_node or node_count * ranks_per_node > MAX_WORLD_SIZE:
            raise ProfileError(
                f"profile {self.name!r}: {node_count} nodes of {ranks_per_node} ranks, expected at most "
                f"{self.ranks_per_node} ranks per node and {MAX_WORLD_SIZE} in all"
            )
        domains = -(-node_count // self.nodes_per_domain)
        if node_count % domains:
            raise ProfileError(f"profile {self.name!r}: {node_count} nodes do not fill {domains} domains equally")
        ranks = node_count // domains * ranks_per_node
        return Machine(
            replace(self._topology(domains, ranks, rails), name=name or f"{self.name}-{node_count}x{ranks_per_node}"),
            IDEAL if wires else self._transport(domains, ranks),
            Compute(self.number("compute_rate")) if self.has("compute_rate") else INSTANT,
            self.summary,
            self.constants,
        )

    def member(self, size: str, name: str, *, wires: bool = False) -> Machine | None:
        """The member of a size like ``10x8`` or ``2x8-rails``, or of an alias; None for a text that is no size."""
        found = _SIZE.fullmatch(self.aliases.get(size, size))
        if found is None:
            return None
        nodes_and_ranks = int(found["nodes"] or 1), int(found["ranks"])
        return self.machine(*nodes_and_ranks, rails=bool(found["rails"]), name=name, wires=wires)

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

    def _transport(self, domains: int, ranks: int) -> Transport:
        if self.library == "ideal":
            return IDEAL
        if self.library == "gloo":
            return TcpLibrary("gloo", self.number("launch"), self.number("tcp_payload"))
        return _Channels(self, domains, ranks).transport()


@dataclass(frozen=True)
class _Channels:
    """The transport of a library with channels, on so many domains of so many ranks."""

    profile: Profile
    domains: int
    ranks: int

    def transport(self) -> ChannelLibrary:
        of = self.profile.number
        shared = self.domains > 1
        ring = of("ring_rate") if self.ranks > 1 else math.inf
        return ChannelLibrary(
            name=self.profile.library,
            domain_ranks=self.ranks,
            media=(self._inside(), *([self._between()] if shared else [])),
            protocols={protocol: self._protocol(protocol) for protocol in get_args(ProtocolName)},
            rule=self._rule(),
            ring_bytes_per_s=min(ring, self.ranks * of("nic_ring_rate")) if shared else ring,
            short_bytes=int(of("short_message")),
        )

    def _rule(self) -> ChannelRule:
        of, world_size = self.profile.number, self.domains * self.ranks
        if self.domains == 1:
            channels = power_of_two(int(of("channels")))
            return channel_rule(world_size, channels, power_of_two(int(of("channels_per_peer"))))
        searched = int(of("channels_per_nic")) * self.ranks
        doubled = searched * (2 if searched < of("enough_channels") else 1)
        channels = power_of_two(min(doubled, int(of("most_channels"))))
        per_peer = int(of("nic_channels_per_peer"))
        # RCCL wants fewer than all of them taken where NCCL takes all
        free = channels - (self.profile.library == "rccl")
        most = channels_per_net_peer(world_size, free, per_peer, int(of("peers_per_channel")))
        return channel_rule(world_size, channels, most)

    def _inside(self) -> Medium:
        of, prefix = self.profile.number, "nic_" if self.domains > 1 else ""
        return Medium(
            of("message_launch"), of("link_bandwidth"), of("link_payload"), of("link_many_payload"),
            of("link_channel_rate"),
            int(of(f"{prefix}chunk")), int(of(f"{prefix}part")), int(of(f"{prefix}least_part")),
        )  # fmt: skip

    def _between(self) -> Medium:
        of = self.profile.number
        return Medium(
            of("nic_message_launch"), of("nic_bandwidth"), of("nic_payload"), of("nic_payload"), of("nic_channel_rate"),
            int(of("nic_chunk")), int(of("nic_part")), int(of("nic_least_part")),
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
            most_bytes_per_s=of(self._ll_most()) if name == "LL" else None,
        )

    def _ring_hops(self, key: str) -> list[float]:
        """What hops of a ring collective take beside the wire's latency: inside a domain, and between domains."""
        of = self.profile.number
        if self.domains == 1:
            return [of(f"link_hop_{key}") - of("link_latency")]
        inside = max(of(f"link_hop_{key}"), of("net_overhead") * (3 if key == "simple" else 1))
        between = of(f"nic_hop_{key}" if self.ranks > 1 else f"lone_hop_{key}")
        return [inside - of("link_latency"), between - of("nic_latency")]

    def _ll_most(self) -> str:
        return {1: "ll_most", 2: "two_ll_most"}.get(self.domains, "nic_ll_most")


def profile_names() -> list[str]:
    """The families that tasp-lab brings along, in alphabetical order."""
    return sorted(entry.name[: -len(".toml")] for entry in (files("tasp_lab") / "profiles").iterdir()
                  if entry.name.endswith(".toml"))  # fmt: skip


def load_profile(text: str) -> Profile:
    """The family of that name, or of a file that ends in ``.toml``. Raises `ProfileError` in one line.

    >>> load_profile("h100").machine(10, 8).topology.world_size
    80
    """
    if text in profile_names():
        return _read(f"profile {text!r}", (files("tasp_lab") / "profiles" / f"{text}.toml").read_bytes())
    if not text.endswith(".toml"):
        raise ProfileError(
            f"profile {text!r} is unknown: expected one of {', '.join(profile_names())}, or a .toml file"
        )
    try:
        return _read(f"file {text!r}", Path(text).read_bytes())
    except OSError as error:
        raise ProfileError(f"file {text!r} cannot be read: {error.strerror}") from error


def member(text: str, *, wires: bool = False) -> Machine | None:
    """The machine with its library that a text names: a member of a family, or of the one in a file; None for others.

    With `wires` it is without its library.

    A member is ``h100-8``, ``h100-10x8`` or ``h100-2x8-rails``; of a file, ``my.toml`` (one node) or ``my.toml:4x8``.

    >>> member("h100-8").transport.name, member("torus:3x3")
    ('nccl', None)
    """
    path, _, size = text.rpartition(":") if re.search(r"\.toml:[^:/]+\Z", text) else (text, "", "")
    if path.endswith(".toml"):
        if not is_profile_file(path):
            return None
        profile = load_profile(path)
        size = size or str(profile.ranks_per_node)
    else:
        family, _, size = text.partition("-")
        if family not in profile_names():
            return None
        profile = load_profile(family)
    return profile.member(size, text, wires=wires)


def find_profile(text: str) -> tuple[Profile, Machine]:
    """The profile that a text names, by its family or by a member of it, and that member; of a family, one node.

    Raises `ProfileError`.
    """
    found = member(text)
    if found is None:
        profile = load_profile(text)
        return profile, profile.machine(1, profile.ranks_per_node)
    path = re.sub(r"\.toml:[^:/]+\Z", ".toml", text)
    return load_profile(path if path.endswith(".toml") else text.partition("-")[0]), found


def is_profile_file(path: str) -> bool:
    """Whether a file is one of a profile; one of a machine has no library."""
    try:
        return b"\nlibrary" in b"\n" + Path(path).read_bytes()
    except OSError:
        return False


def gloo() -> Transport:
    """gloo over TCP with the constants that tasp-lab brings along."""
    values = {constant.name: MEANINGS[constant.name].parse(constant.value) for constant in _library("gloo")}
    return TcpLibrary("gloo", values["launch"], values["tcp_payload"])


def profile_document(profile: Profile) -> str:
    """The profile as the text of a file that `load_profile` reads."""
    head = {
        "name": profile.name,
        "summary": profile.summary,
        "library": profile.library,
        "inside": profile.inside,
        "ranks_per_node": profile.ranks_per_node,
        "nodes_per_domain": profile.nodes_per_domain,
        "aliases": dict(profile.aliases),
        "constants": [{"name": c.name, "value": c.value, "source": c.source} for c in profile.constants],
    }
    return msgspec.toml.encode(head).decode()


def _read(where: str, data: bytes) -> Profile:
    try:
        record = msgspec.toml.decode(data, type=_ProfileFile)
        own = _constants(record.constants)
    except (ValueError, QuantityError, ProfileError) as error:
        raise ProfileError(" ".join(f"{where}: {error}".split())) from error
    stated = {constant.name for constant in own}
    shared = tuple(constant for constant in _library(record.library) if constant.name not in stated)
    profile = Profile(
        record.name, record.summary, record.library, record.inside, record.ranks_per_node, record.nodes_per_domain,
        own + shared, record.aliases,
    )  # fmt: skip
    for part, whole in _NO_MORE_THAN:
        if profile.has(part) and profile.has(whole) and profile.number(part) > profile.number(whole):
            raise ProfileError(f"{where}: {part} is more than {whole}")
    return profile


def _library(library: Library) -> tuple[Constant, ...]:
    file = files("tasp_lab") / "libraries" / f"{library}.toml"
    return _constants(msgspec.toml.decode(file.read_bytes(), type=_LibraryFile).constants) if file.is_file() else ()


def _constants(records: tuple[_Record, ...]) -> tuple[Constant, ...]:
    """The constants of a file; each is known, can be read, and is there once."""
    for index, record in enumerate(records):
        if record.name not in MEANINGS:
            raise ProfileError(
                f"unknown constant {record.name!r}, expected one of {', '.join(MEANINGS)} - at `$.constants[{index}]`"
            )
        if any(record.name == other.name for other in records[:index]):
            raise ProfileError(f"constant {record.name!r} is there twice - at `$.constants[{index}]`")
        try:
            MEANINGS[record.name].parse(record.value)
        except QuantityError as error:
            raise ProfileError(f"{error} - at `$.constants[{index}].value`") from error
    return tuple(Constant(record.name, record.value, record.source) for record in records)
