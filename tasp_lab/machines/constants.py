"""Table of all constants a machine may have: unit, meaning, limits, dependence and identification of each.

`CONSTANTS` is the only such list. Profiles, accelerators, machine files, fits and reports read it, so a new constant is
one `ConstantSpec` here and one value with its source in a data file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

from tasp_lab.core.errors import QuantityError
from tasp_lab.core.units import (
    parse_bandwidth_bytes_per_s,
    parse_count,
    parse_flops_per_s,
    parse_size_bytes,
    parse_time_s,
)
from tasp_lab.machines.libraries.channels import ProtocolName

Traffic = Literal["rings", "messages", "tcp"]
"""What a measurement consists of: ring collectives, send and receive, or either of them over TCP."""

Kind = tuple[str, str]
"""A dtype (``bf16``, ``fp16``, ``fp32`` or ``fp8``) and a pass (``forward`` or ``backward``)."""

PROTOCOLS: tuple[ProtocolName, ...] = get_args(ProtocolName)


def _parse_share(text: str) -> float:
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value <= 1:
        raise QuantityError(f"share {text!r}: expected a number more than 0, at most 1")
    return value


def _format_number(value: float, digits: int) -> str:
    return f"{value:.{digits}g}"


def _format_bandwidth(value: float, digits: int) -> str:
    return f"{value / 1e9:.{digits}g}GB/s"


def _format_time(value: float, digits: int) -> str:
    return f"{value * 1e6:.{digits}g}us"


class Quantity(NamedTuple):
    """A kind of number: its SI unit, its parser, its text form with so many digits, and its largest value."""

    unit: str
    parse: Callable[[str], float]
    format: Callable[[float, int], str] = _format_number
    max_value: float = math.inf


_BANDWIDTH = Quantity("bytes/s", parse_bandwidth_bytes_per_s, _format_bandwidth)
_TIME = Quantity("s", parse_time_s, _format_time)
_FLOP_RATE = Quantity("FLOP/s", parse_flops_per_s)
_SIZE = Quantity("bytes", parse_size_bytes)
_COUNT = Quantity("", parse_count)
_SHARE = Quantity("", _parse_share, max_value=1.0)


@dataclass(frozen=True, kw_only=True)
class ConstantSpec:
    """Definition of one constant.

    Parameters
    ----------
    name : of the constant in files.
    quantity : its unit, parser, text form and largest value.
    meaning : one line for users, without a full stop.
    depends_on : a constant to which it is proportional; files state it at a value of that one (`Parameter.at`). Channel
        counts do not depend on a NIC's rate in this way, although NCCL derives them from it: they change the protocol
        of a message, and their values for another NIC are in the library's code.
    is_part : whether it never exceeds `depends_on`; otherwise predictions would beat the bound.
    min_constant : a constant that it never falls below, like the wire's latency for a hop.
    kind : dtype and pass of a compute rate; None for all others.
    fitted_to : the traffic whose measurements can identify it; empty for constants that are never fitted.
    identified_by : the measurement that identifies it, for users.
    """

    name: str
    quantity: Quantity
    meaning: str
    depends_on: str = ""
    is_part: bool = False
    min_constant: str = ""
    kind: Kind | None = None
    fitted_to: frozenset[Traffic] = frozenset()
    identified_by: str = ""

    @property
    def unit(self) -> str:
        """SI unit of the value; empty for counts and shares."""
        return self.quantity.unit

    def parse(self, text: str) -> float:
        """The value of a text in SI units. Raises `QuantityError`."""
        return self.quantity.parse(text)

    def format(self, value: float, digits: int = 6) -> str:
        """A value in SI units as a text for files.

        >>> CONSTANTS["link_payload"].format(3.708e11), CONSTANTS["message_launch"].format(1.5e-5)
        ('370.8GB/s', '15us')
        """
        return self.quantity.format(value, digits)

    def rounded(self, value: float, digits: int) -> float:
        """A value to so many digits, as a file that states it so has it."""
        return self.parse(self.format(value, digits))


_RINGS: frozenset[Traffic] = frozenset({"rings"})
_MESSAGES: frozenset[Traffic] = frozenset({"messages"})
_TCP: frozenset[Traffic] = frozenset({"tcp"})


def _wires() -> Iterator[ConstantSpec]:
    yield ConstantSpec(
        name="link_bandwidth",
        quantity=_BANDWIDTH,
        meaning="bandwidth of a link, or of a GPU's port into its switch, one way",
    )
    yield ConstantSpec(
        name="link_latency", quantity=_TIME, meaning="latency of the links from rank to rank inside a domain"
    )
    yield ConstantSpec(name="nic_bandwidth", quantity=_BANDWIDTH, meaning="bandwidth of a GPU's NIC, one way")
    yield ConstantSpec(
        name="nic_latency", quantity=_TIME, meaning="latency of the links from rank to rank through the network"
    )


def _compute_rates() -> Iterator[ConstantSpec]:
    """Rates of attention. fp16 has the rate of bf16: all data sheets that list both give one number for the two."""
    names: dict[str, Kind] = {
        "compute_rate": ("bf16", "forward"),
        "compute_rate_backward": ("bf16", "backward"),
        "compute_rate_fp32": ("fp32", "forward"),
        "compute_rate_fp32_backward": ("fp32", "backward"),
    }
    for name, kind in names.items():
        meaning = f"how fast a rank computes attention, {', '.join(kind)}"
        yield ConstantSpec(name=name, quantity=_FLOP_RATE, meaning=meaning, kind=kind)


def _rates() -> Iterator[ConstantSpec]:
    yield ConstantSpec(
        name="ring_rate",
        quantity=_BANDWIDTH,
        meaning="what all channels of a ring collective reach together, out of each rank, inside a domain",
        depends_on="link_bandwidth",
        fitted_to=_RINGS,
        identified_by="all_gather of 256 MiB and more inside a domain",
    )
    yield ConstantSpec(
        name="nic_ring_rate",
        quantity=_BANDWIDTH,
        meaning="what the channels of a ring collective reach through one NIC",
        depends_on="nic_bandwidth",
        is_part=True,
        fitted_to=_RINGS,
        identified_by="all_gather of 256 MiB and more between domains, where nic_payload is more",
    )
    yield ConstantSpec(
        name="link_payload",
        quantity=_BANDWIDTH,
        meaning="what protocols leave of link_bandwidth for one peer",
        depends_on="link_bandwidth",
        is_part=True,
        fitted_to=_RINGS | _MESSAGES,
        identified_by="sendrecv of 1 GiB and more inside a domain, or a log of pairs",
    )
    yield ConstantSpec(
        name="link_many_payload",
        quantity=_BANDWIDTH,
        meaning="what they leave of it where a rank sends to several peers at one step",
        depends_on="link_bandwidth",
        is_part=True,
        fitted_to=_MESSAGES,
        identified_by="alltoall of 256 MiB and more inside a domain",
    )
    yield ConstantSpec(
        name="nic_payload",
        quantity=_BANDWIDTH,
        meaning="what protocols leave of nic_bandwidth",
        depends_on="nic_bandwidth",
        is_part=True,
        fitted_to=_RINGS | _MESSAGES,
        identified_by="sendrecv of 256 MiB and more between domains",
    )
    yield ConstantSpec(
        name="message_launch",
        quantity=_TIME,
        meaning="from the call until a group of messages flows, inside a domain",
        fitted_to=_MESSAGES,
        identified_by="sendrecv below 64 KiB inside a domain",
    )
    yield ConstantSpec(
        name="nic_message_launch",
        quantity=_TIME,
        meaning="the same for messages through the network",
        fitted_to=_MESSAGES,
        identified_by="sendrecv below 64 KiB between domains",
    )
    yield ConstantSpec(
        name="link_channel_rate",
        quantity=_BANDWIDTH,
        meaning="what one channel of send and receive reaches inside a domain",
        depends_on="link_bandwidth",
        fitted_to=_MESSAGES,
        identified_by="sendrecv between 4 and 64 MiB inside a domain",
    )
    yield ConstantSpec(
        name="nic_channel_rate",
        quantity=_BANDWIDTH,
        meaning="what one channel of send and receive reaches through the network",
        fitted_to=_MESSAGES,
        identified_by="sendrecv between 4 and 64 MiB between domains, where a peer gets few channels",
    )


def _copies() -> Iterator[ConstantSpec]:
    yield ConstantSpec(
        name="ll_channel_rate",
        quantity=_BANDWIDTH,
        meaning="what a channel of a ring collective moves by LL inside a domain",
        identified_by="all_gather of 256 KiB to 2 MiB",
    )
    yield ConstantSpec(
        name="copy_rate",
        quantity=_BANDWIDTH,
        meaning="how fast the channels of a ring collective copy inside a GPU",
        identified_by="all_gather of 256 MiB and more on 2 ranks, beside one on 8",
    )
    yield ConstantSpec(
        name="own_copy_rate",
        quantity=_BANDWIDTH,
        meaning="how fast an all-to-all copies a rank's own part",
        identified_by="alltoall of 256 MiB and more on 2 ranks, beside one on 8",
    )


def _latencies() -> Iterator[ConstantSpec]:
    identified_by: dict[ProtocolName, str] = {
        "Simple": "all_gather of some MiB, where the library takes Simple",
        "LL": "all_gather of a few KiB",
        "LL128": "all_gather of some 100 KiB, where the library takes LL128",
    }
    for protocol, text in identified_by.items():
        yield ConstantSpec(
            name=f"base_{protocol.lower()}",
            quantity=_TIME,
            meaning=f"latency of a call, protocol {protocol}",
            fitted_to=_RINGS,
            identified_by=text,
        )
    for medium, where, counted in (("nic", "through the network", "nodes"), ("link", "inside a domain", "ranks")):
        for protocol in identified_by:
            yield ConstantSpec(
                name=f"{medium}_hop_{protocol.lower()}",
                quantity=_TIME,
                meaning=f"latency of a hop {where}, that of the link included, protocol {protocol}",
                min_constant=f"{medium}_latency",
                fitted_to=_RINGS,
                identified_by=f"the same small sizes of all_gather on two numbers of {counted}",
            )
    for protocol in PROTOCOLS:
        hop = "a hop of a ring collective through the network with one GPU per domain"
        yield ConstantSpec(
            name=f"lone_hop_{protocol.lower()}",
            quantity=_TIME,
            meaning=f"latency of {hop}, protocol {protocol}",
            min_constant="nic_latency",
        )
    for protocol in identified_by:
        yield ConstantSpec(
            name=f"message_hop_{protocol.lower()}",
            quantity=_TIME,
            meaning=f"latency of a hop of send and receive inside a domain, protocol {protocol}; else that of a ring",
            min_constant="link_latency",
        )
    yield ConstantSpec(
        name="nvls_base",
        quantity=_TIME,
        meaning="latency of a call that the switch adds up and multicasts",
        identified_by="all_reduce of 2 to 64 MiB on 8 ranks behind an NVSwitch",
    )
    yield ConstantSpec(
        name="nvls_chunk",
        quantity=_TIME,
        meaning="latency of a chunk of a channel of such a call",
        identified_by="all_reduce of 128 MiB and more on 8 ranks behind an NVSwitch",
    )
    yield ConstantSpec(
        name="net_overhead",
        quantity=_TIME,
        meaning="a hop inside one of several domains takes no less; with Simple three times that",
    )


def _tcp() -> Iterator[ConstantSpec]:
    yield ConstantSpec(
        name="launch",
        quantity=_TIME,
        meaning="what a rank needs to post one message; gloo",
        fitted_to=_TCP,
        identified_by="sendrecv below 1 KiB",
    )
    yield ConstantSpec(
        name="tcp_payload",
        quantity=_SHARE,
        meaning="share of a link's bandwidth that carries data; gloo",
        fitted_to=_TCP,
        identified_by="sendrecv of 64 MiB and more",
    )


def _contention() -> Iterator[ConstantSpec]:
    yield ConstantSpec(
        name="sms", quantity=_COUNT, meaning="multiprocessors of a GPU: SMs of NVIDIA, compute units of AMD"
    )
    yield ConstantSpec(
        name="sms_per_channel",
        quantity=_COUNT,
        meaning="how many of them a channel takes from kernel calls while its message is in flight",
    )


def _rules() -> Iterator[ConstantSpec]:
    """Constants of a library's code, which no fit changes."""
    counts = {
        "channels": "channels of collectives inside a domain",
        "channels_per_nic": "channels of collectives per NIC where there are several domains",
        "enough_channels": "if there are fewer then, they are doubled",
        "max_channels": "there are no more, whatever the number of NICs",
        "channels_per_peer": "the most channels of send and receive for one peer inside a domain",
        "nic_channels_per_peer": "the most for a peer behind the network, before all peers have to fit",
        "peers_per_channel": "how many peers one channel serves at once",
        "nvls_channels": "channels of calls that the switch adds up",
    }
    sizes = {
        "chunk": "chunks of send and receive inside one domain",
        "nic_chunk": "chunks of send and receive where there are several domains",
        "bytes_per_channel": "channels double while a channel's part of a message is larger, inside one domain",
        "nic_bytes_per_channel": "the same where there are several domains",
        "min_bytes_per_channel": "a channel's part is no smaller, inside one domain",
        "nic_min_bytes_per_channel": "the same where there are several domains",
        "short_message": "messages up to this size, times the most channels per peer, go by LL",
    }
    shares = {
        "ll_payload": "share of LL's bytes that is data",
        "ll_share": "what LL reaches of the ring rate",
        "ll128_share": "what LL128 reaches of the ring rate",
    }
    limits = {
        "ll_max": "what LL reaches at most in a ring collective inside a domain",
        "two_ll_max": "the same over two domains",
        "nic_ll_max": "the same over more",
    }
    for quantity, group in ((_COUNT, counts), (_SIZE, sizes), (_SHARE, shares), (_BANDWIDTH, limits)):
        for name, meaning in group.items():
            yield ConstantSpec(name=name, quantity=quantity, meaning=meaning)


CONSTANTS: Mapping[str, ConstantSpec] = {
    spec.name: spec
    for group in (_wires(), _compute_rates(), _rates(), _copies(), _latencies(), _tcp(), _contention(), _rules())
    for spec in group
}
"""All constants by name, those on which others depend first. A fit takes them in this order, those with the largest
effect first."""
