"""Topologies by expression: ``full-mesh:8``, ``torus:4x4``, ``nodes:2x8:switch:rails``.

An expression is the name of a builder and its sizes. Its bandwidths and latencies are given apart from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import NamedTuple

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import Number, parse_bandwidth_bytes_per_s, parse_time_s
from tasp_lab.topology import builders
from tasp_lab.topology.graph import MAX_LISTED_LINKS, Topology

MAX_WORLD_SIZE = 16384
"""The largest world size of an expression or a file."""

PARSERS: dict[str, tuple[str, Callable[[str], float]]] = {
    "link_bandwidth": ("link_bandwidth_bytes_per_s", parse_bandwidth_bytes_per_s),
    "link_latency": ("link_latency_s", parse_time_s),
    "nic_bandwidth": ("nic_bandwidth_bytes_per_s", parse_bandwidth_bytes_per_s),
    "nic_latency": ("nic_latency_s", parse_time_s),
}
"""For each constant of an expression: the field of `ExpressionDefaults` that it sets, and its parser."""


@dataclass(frozen=True)
class ExpressionDefaults:
    """The numbers of a bare expression: bandwidths in bytes/s one way, latencies in seconds from rank to rank."""

    link_bandwidth_bytes_per_s: Number = builders.LINK_BYTES_PER_S
    link_latency_s: Number = builders.LINK_S
    nic_bandwidth_bytes_per_s: Number = builders.NIC_BYTES_PER_S
    nic_latency_s: Number = builders.NIC_S


EXPRESSION_DEFAULTS = ExpressionDefaults()


def expression_defaults(texts: Mapping[str, str]) -> ExpressionDefaults:
    """The default numbers of an expression, with overrides given by constant name as text with a unit.

    >>> expression_defaults({"nic_latency": "3us"}).nic_latency_s
    3e-06
    """
    parsed = {field: parse(texts[name]) for name, (field, parse) in PARSERS.items() if name in texts}
    return ExpressionDefaults(**parsed)


@dataclass(frozen=True)
class Expression:
    """A parsed expression: its number of ranks, its approximate number of links, and its builder."""

    world_size: int
    link_count: int
    build: Callable[[ExpressionDefaults], Topology]
    has_links: bool
    has_nics: bool = False

    @property
    def constant_names(self) -> list[str]:
        """The constants that this expression needs."""
        kinds = [kind for kind, used in (("link", self.has_links), ("nic", self.has_nics)) if used]
        return [f"{kind}_{quantity}" for kind in kinds for quantity in ("bandwidth", "latency")]


def parse_expression(text: str) -> Expression:
    """Parse an expression. Raises `TopologyError` with the expected form.

    >>> parse_expression("torus:3x4").world_size
    12
    """
    form = _FORMS.get(text.partition(":")[0])
    match = form.pattern.fullmatch(text) if form else None
    expression = form.parse(match) if form and match else None
    if expression is None or not 1 <= expression.world_size <= MAX_WORLD_SIZE:
        expected = form.text if form else " or ".join(expression_forms().values())
        raise TopologyError(f"machine {text!r}: expected {expected} with 1 to {MAX_WORLD_SIZE} ranks in all")
    if expression.link_count > MAX_LISTED_LINKS:
        raise TopologyError(
            f"machine {text!r}: that is {expression.link_count} links, expected at most {MAX_LISTED_LINKS}"
        )
    return expression


def expression_forms() -> dict[str, str]:
    """The form of each expression, by its first word.

    >>> expression_forms()["torus"]
    'torus:AxB[xC...]'
    """
    return {kind: form.text for kind, form in _FORMS.items()}


def _of_links(world_size: int, link_count: int, builder: Callable[..., Topology], *sizes: object) -> Expression:
    """An expression whose links all have one bandwidth, which its builder takes after its sizes."""

    def build(numbers: ExpressionDefaults) -> Topology:
        return builder(*sizes, numbers.link_bandwidth_bytes_per_s, numbers.link_latency_s)

    return Expression(world_size, link_count, build, has_links=world_size > 1)


def _circulant(match: re.Match[str]) -> Expression:
    n, offsets = int(match[1]), tuple(map(int, match[2].split(",")))
    return _of_links(n, n * len(offsets), builders.circulant, n, offsets)


def _multipartite(match: re.Match[str]) -> Expression:
    parts, ranks = int(match[1]), int(match[2])
    links = parts * (parts - 1) * ranks**2
    return replace(_of_links(parts * ranks, links, builders.multipartite, parts, ranks), has_links=links > 0)


def _torus(match: re.Match[str]) -> Expression:
    shape = _sides(match[1])
    return _of_links(prod(shape), 2 * len(shape) * prod(shape), builders.torus, shape)


def _fat_tree(match: re.Match[str]) -> Expression:
    sides, over = _sides(match[1]), int(match[2] or 1)

    def build(numbers: ExpressionDefaults) -> Topology:
        return builders.fat_tree(sides, numbers.link_bandwidth_bytes_per_s, numbers.link_latency_s, over)

    return Expression(prod(sides), 2 * len(sides) * prod(sides), build, has_links=True)


def _sides(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def _nodes(match: re.Match[str]) -> Expression:
    u, m = int(match[1]), int(match[2])
    inside: builders.Inside = "switch" if "switch" in match[3] else "full-mesh"
    networks: tuple[builders.Network, ...] = ("rails-only", "rails", "fabric")
    network = next(each for each in networks if each in match[3] or each == "fabric")
    links = u * m * (2 if inside == "switch" else m - 1)

    def build(numbers: ExpressionDefaults) -> Topology:
        return builders.nodes(u, m, inside, network, **asdict(numbers))

    return Expression(u * m, links, build, has_links=m > 1, has_nics=u > 1)


def _dragonfly(match: re.Match[str]) -> Expression:
    g, a, p = int(match[1]), int(match[2]), int(match[3])
    links = 2 * g * a * p + g * a * (a - 1) + g * (g - 1)

    def build(numbers: ExpressionDefaults) -> Topology:
        return builders.dragonfly(g, a, p, **asdict(numbers))

    return Expression(g * a * p, links, build, has_links=True, has_nics=g > 1)


class _Form(NamedTuple):
    text: str
    pattern: re.Pattern[str]
    parse: Callable[[re.Match[str]], Expression]


def _by_count(builder: Callable[..., Topology], links_per_rank: int) -> Callable[[re.Match[str]], Expression]:
    """The parser of a builder that takes the number of ranks."""
    return lambda match: _of_links(int(match[1]), links_per_rank * int(match[1]), builder, int(match[1]))


def _hypercube(match: re.Match[str]) -> Expression:
    return _of_links(2 ** int(match[1]), int(match[1]) * 2 ** int(match[1]), builders.hypercube, int(match[1]))


_SIZE = "([1-9][0-9]{0,4})"
_SIDES = "([1-9][0-9]{0,4}(?:x[1-9][0-9]{0,4}){1,5})"
_OFFSETS = "(-?[0-9]{1,5}(?:,-?[0-9]{1,5}){0,63})"
_SWITCH_AND_RAILS = "(|:switch|(?::switch)?:rails(?:-only)?|:rails(?:-only)?:switch)"
_FORMS = {
    kind: _Form(text, re.compile(f"{kind}:{pattern}"), parse)
    for kind, text, pattern, parse in (
        ("full-mesh", "full-mesh:N", _SIZE, _by_count(builders.full_mesh, 0)),  # its links are made when accessed
        ("switch", "switch:N", _SIZE, _by_count(builders.switch, 2)),
        ("ring", "ring:N", _SIZE, _by_count(builders.ring, 1)),
        ("bidirectional-ring", "bidirectional-ring:N", _SIZE, _by_count(builders.bidirectional_ring, 2)),
        ("torus", "torus:AxB[xC...]", _SIDES, _torus),
        ("hypercube", "hypercube:D", "([0-9]|1[0-9])", _hypercube),
        ("circulant", "circulant:N:OFFSET[,OFFSET...]", f"{_SIZE}:{_OFFSETS}", _circulant),
        ("multipartite", "multipartite:PARTSxRANKS", f"{_SIZE}x{_SIZE}", _multipartite),
        ("fat-tree", "fat-tree:AxB[xC...][:OVERSUBSCRIPTION]", f"{_SIDES}(?::([1-9][0-9]{{0,2}}))?", _fat_tree),
        ("dragonfly", "dragonfly:GROUPSxROUTERSxRANKS", f"{_SIZE}x{_SIZE}x{_SIZE}", _dragonfly),
        ("nodes", "nodes:UxM[:switch][:rails|:rails-only]", f"{_SIZE}x{_SIZE}{_SWITCH_AND_RAILS}", _nodes),
    )
}
