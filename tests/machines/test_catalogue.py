"""Machines by name, file and expression: what loads, what it holds, what is refused and with which words."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_lab.core.errors import TopologyError
from tasp_lab.core.units import parse_bandwidth_bytes_per_s, parse_time_s
from tasp_lab.machines.catalogue import catalogue_names, is_expression, load_machine
from tasp_lab.machines.machine import INSTANT, ComputeRate, Machine
from tasp_lab.machines.machine_file import topology_document
from tasp_lab.topology.expressions import MAX_WORLD_SIZE, ExpressionDefaults
from tasp_lab.topology.graph import Link

DEFAULTS = ExpressionDefaults(64e9, 2e-6, 25e9, 8e-6)
LINK = {"source": 0, "destination": 1, "bandwidth_bytes_per_s": 5e10, "latency_s": 1e-6}
BACK = {"source": 1, "destination": 0, "bandwidth_bytes_per_s": "50GB/s", "latency_s": "1us"}
PAIR: dict[str, Any] = {"name": "pair", "world_size": 2, "links": [LINK, BACK]}
BANDWIDTH = {"name": "link_bandwidth", "value": "450GB/s", "source": "a data sheet"}
LATENCY = {"name": "link_latency", "value": "600ns", "source": "a table"}
NOTE = {"name": "wiring", "value": "a ring", "source": "a test"}
RATE = {"name": "compute_rate", "value": "300TFLOP/s", "source": "a measurement"}
SWITCH: dict[str, Any] = {"name": "eight", "expression": "switch:8", "constants": [BANDWIDTH, LATENCY]}


def write(folder: Path, document: object, name: str = "machine.json") -> str:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return str(path)


def refusal(text: str) -> str:
    """The message with which `text` is refused, which must be one line."""
    with pytest.raises(TopologyError) as caught:
        load_machine(text)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def numbers_of(machine: Machine) -> set[tuple[float, float]]:
    return {(float(link.bandwidth_bytes_per_s), float(link.latency_s)) for link in machine.topology.links}


# The catalogue


def test_the_catalogue_is_its_data_files_and_the_members_that_profiles_list() -> None:
    stems = {Path(entry.name).stem for entry in (files("tasp_lab.machines") / "descriptions").iterdir()}
    listed = {"a100-8", "a100_100g-2x8", "a800-8", "b200-8", "b200_p6-2x8", "b300-8", "gb200-nvl72", "gb300-2x1x4",
              "gb300-4x1x4", "gb300-nvl72", "h100-2x8",
              "h100-2x8-rails", "h100-4x8", "h100-8", "h100_a3mega-2x8", "h100_p5-2x8", "h20-8", "h200-8",
              "h800-8", "mi300x-2x8", "mi300x-4x8", "mi300x-8", "mi325x-8", "mi355x-8"}  # fmt: skip
    assert stems == {"a10-4-pcie", "ascend-910b-8", "ascend-910c-384", "ascend-910c-8", "dgx-1v", "gaudi2-8",
                     "gaudi3-2x8", "gaudi3-4x8", "gaudi3-8", "l20-8-pcie", "l20-8-pcie-switch", "l40s-8-pcie",
                     "rtx-pro-6000-8-pcie", "rtx4090-4-pcie", "rtx4090d-8-pcie", "trn2-16", "trn2-64"}  # fmt: skip
    slices = {"tpu-v5p:4x4", "tpu-v5p:4x4x4", "tpu-v6e:4x4"}
    assert set(catalogue_names()) == stems | listed | slices
    assert catalogue_names() == sorted(catalogue_names())


@pytest.mark.parametrize("name", catalogue_names())
def test_every_machine_of_the_catalogue_is_described_and_sourced(name: str) -> None:
    machine = load_machine(name)
    assert machine.topology.name == name
    assert machine.summary
    assert machine.parameters
    assert all(constant.source.strip() and constant.text.strip() for constant in machine.parameters.values())


@pytest.mark.parametrize("name", catalogue_names())
def test_every_number_of_the_catalogue_is_one_of_its_constants(name: str) -> None:
    """Half a latency counts too: both links of a way through a switch share it. So does a spine of two nodes' NICs."""
    machine = load_machine(name, library="ideal")
    texts = {constant.name: constant.text for constant in machine.parameters.values()}
    bandwidths = {parse_bandwidth_bytes_per_s(text) for key, text in texts.items() if key.endswith("bandwidth")}
    latencies = {parse_time_s(text) for key, text in texts.items() if key.endswith("latency")}
    found = {bandwidth for bandwidth, _ in numbers_of(machine)}
    assert bandwidths <= found <= bandwidths | {2 * bandwidth for bandwidth in bandwidths}
    assert {latency for _, latency in numbers_of(machine)} <= latencies | {latency / 2 for latency in latencies}


def test_a10_4_pcie_shares_the_upstream_link_between_pairs() -> None:
    topology = load_machine("a10-4-pcie").topology
    assert (topology.world_size, len(topology.links)) == (4, 10)
    ways = {pair: [topology.links[link].name for link in topology.route(*pair).links] for pair in topology.rank_pairs()}
    assert ways[0, 1] == ["0->pcie0", "pcie0->1"]
    assert ways[0, 2] == ["0->pcie0", "pcie0->pcie1", "pcie1->2"]
    across = {pair for pair, way in ways.items() if "pcie0->pcie1" in way}
    assert across == {(0, 2), (0, 3), (1, 2), (1, 3)}


# Expressions


@pytest.mark.parametrize(
    ("text", "world_size", "link_count"),
    [
        ("full-mesh:8", 8, 8 * 7),
        ("switch:8", 8, 2 * 8),
        ("ring:8", 8, 8),
        ("ring:2", 2, 2),
        ("nodes:2x8", 16, 2 * 8 * 7 + 2 * 16),
        ("nodes:2x8:switch", 16, 2 * 16 + 2 * 16),
        ("nodes:2x8:rails", 16, 2 * 8 * 7 + 2 * 16 + 2 * 8),
        ("nodes:2x8:switch:rails", 16, 2 * 16 + 2 * 16 + 2 * 8),
        ("nodes:1x8", 8, 8 * 7),
        ("nodes:8x1", 8, 2 * 8),
        ("switch:4096", 4096, 2 * 4096),
        *((text, 1, 0) for text in ("full-mesh:1", "switch:1", "ring:1", "nodes:1x1", "nodes:1x1:switch:rails")),
    ],
)
def test_an_expression_gives_the_links_of_its_closed_form(text: str, world_size: int, link_count: int) -> None:
    topology = load_machine(text).topology
    assert (topology.name, topology.world_size, len(topology.links)) == (text, world_size, link_count)


def test_the_words_of_nodes_come_in_any_order() -> None:
    assert load_machine("nodes:2x4:rails:switch") == load_machine("nodes:2x4:switch:rails")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("full-mesh:4", {(64e9, 2e-6)}),
        ("ring:4", {(64e9, 2e-6)}),
        ("switch:4", {(64e9, 1e-6)}),
        ("nodes:2x4", {(64e9, 2e-6), (25e9, 4e-6)}),
        ("nodes:2x4:switch:rails", {(64e9, 1e-6), (25e9, 4e-6), (50e9, 4e-6)}),
    ],
)
def test_an_expression_takes_its_numbers_from_the_defaults(text: str, numbers: set[tuple[float, float]]) -> None:
    assert numbers_of(load_machine(text, DEFAULTS)) == numbers


def test_the_defaults_do_not_touch_names_and_files() -> None:
    assert load_machine("h100-8", DEFAULTS) == load_machine("h100-8")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("switch", "switch:N with 1 to 16384 ranks"),
        ("switch:", "switch:N with 1 to 16384 ranks"),
        ("switch:0", "switch:N with 1 to 16384 ranks"),
        ("switch:-1", "switch:N with 1 to 16384 ranks"),
        ("switch:eight", "switch:N with 1 to 16384 ranks"),
        ("switch:٨", "switch:N with 1 to 16384 ranks"),
        ("switch:8:rails", "switch:N with 1 to 16384 ranks"),
        ("switch:8\n", "switch:N with 1 to 16384 ranks"),
        ("ring:16385", "ring:N with 1 to 16384 ranks"),
        ("ring:" + "9" * 5000, "ring:N with 1 to 16384 ranks"),
        ("nodes:2x1024", "2095104 links, expected at most 1047552"),
        ("nodes:8", "nodes:UxM[:switch][:rails|:rails-only] with 1 to 16384 ranks in all"),
        ("nodes:0x8", "nodes:UxM[:switch][:rails|:rails-only] with 1 to 16384 ranks in all"),
        ("nodes:128x129:switch", "nodes:UxM[:switch][:rails|:rails-only] with 1 to 16384 ranks in all"),
        ("nodes:2x8:torus", "nodes:UxM[:switch][:rails|:rails-only] with 1 to 16384 ranks in all"),
        ("nodes:2x8:rails:rails", "nodes:UxM[:switch][:rails|:rails-only] with 1 to 16384 ranks in all"),
    ],
)
def test_a_bad_expression_says_what_it_should_be(text: str, expected: str) -> None:
    message = refusal(text)
    assert repr(text) in message
    assert expected in message


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("h100_8", "h100-8"),
        ("H100-8", "h100-8"),
        ("mi300-8", "mi300x-8"),
        ("fullmesh:8", "full-mesh"),
        ("rings:8", "ring"),
        ("tpu-v5p-4x4x4", "tpu-v5p:4x4x4"),
        ("tpu_v6e", "tpu-v6e:4x4"),
    ],
)
def test_an_unknown_machine_suggests_the_nearest_and_what_lists_all(text: str, near: str) -> None:
    message = refusal(text)
    assert message.startswith(f"machine {text!r} is unknown (did you mean {near!r}")
    assert all(form in message for form in ["full-mesh:8", "nodes:2x8", ".json", "tasp-lab topologies lists all"])
    assert sum(name in message for name in catalogue_names()) <= 6
    assert len(message) < 400


def test_an_unknown_machine_that_resembles_nothing_suggests_nothing() -> None:
    assert "did you mean" not in refusal("zzz")
    assert "is unknown" in refusal("")


@pytest.mark.parametrize(
    ("text", "takes"), [("ring:8", True), ("nodes:2x4", True), ("h100-8", False), ("machine.json", False)]
)
def test_only_expressions_take_numbers(text: str, takes: bool) -> None:
    assert is_expression(text) is takes


# Files


def test_the_explicit_form_reads_numbers_and_texts_with_units(tmp_path: Path) -> None:
    shared = [{"name": "bus", "bandwidth_bytes_per_s": "400Gbit/s", "links": ["0->1", "1->0"]}]
    machine = load_machine(write(tmp_path, PAIR | {"summary": "two", "shared": shared, "constants": [BANDWIDTH]}))
    assert machine.topology.links == (Link(0, 1, 5e10, 1e-6), Link(1, 0, 5e10, 1e-6))
    assert machine.topology.shared[0].bandwidth_bytes_per_s == 5e10
    assert (machine.summary, next(iter(machine.parameters.values())).source) == ("two", "a data sheet")


@pytest.mark.parametrize("document", [PAIR | {"constants": [RATE]}, SWITCH | {"constants": [BANDWIDTH, RATE, LATENCY]}])
def test_a_constant_says_how_fast_ranks_compute(tmp_path: Path, document: dict[str, Any]) -> None:
    machine = load_machine(write(tmp_path, document))
    assert machine.compute.rate("bf16", "forward") == ComputeRate(300e12, "a measurement")
    assert machine.compute.rate("fp32", "backward").flops_per_s == 300e12
    assert load_machine(write(tmp_path, topology_document(machine))) == machine
    assert load_machine(write(tmp_path, PAIR)).compute == INSTANT


def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    toml = """
        name = "eight"
        expression = "switch:8"
        constants = [
            { name = "link_bandwidth", value = "450GB/s", source = "a data sheet" },
            { name = "link_latency", value = "600ns", source = "a table" },
        ]
    """
    from_toml = load_machine(write(tmp_path, toml, "machine.TOML"))
    assert from_toml == load_machine(write(tmp_path, SWITCH))
    assert numbers_of(from_toml) == {(450e9, 3e-7)}
    assert from_toml.topology.name == "eight"


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert load_machine(write(tmp_path, "\ufeff" + json.dumps(PAIR))).topology.world_size == 2


def without(document: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != key}


def links(**changes: object) -> dict[str, Any]:
    """The pair with its second link changed."""
    return PAIR | {"links": [LINK, BACK | changes]}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (without(PAIR, "name"), ["missing required field `name`"]),
        (
            PAIR | {"links": [without(LINK, "latency_s")]},
            ["expected `latency` with a unit or `latency_s`, got none", "$.links[0]"],
        ),
        (links(bandwidth="5GB/s"), ["expected `bandwidth` with a unit or `bandwidth_bytes_per_s`, got both"]),
        (PAIR | {"links": [without(LINK, "latency_s") | {"latency": 1e-6}]}, ["Expected `str`", "$.links[0].latency"]),
        (links(both_ways=True), ["0->1 is listed twice"]),
        (PAIR | {"colour": "red"}, ["unknown field `colour`"]),
        (PAIR | {"world_sise": 2}, ["unknown field `world_sise`, did you mean `world_size`?"]),
        (links(bandwith="5GB/s"), ["unknown field `bandwith`, did you mean `bandwidth`?", "$.links[1]"]),
        (links(colour="red"), ["unknown field `colour`", "$.links[1]"]),
        (PAIR | {"world_size": "2"}, ["Expected `int`, got `str`", "$.world_size"]),
        (PAIR | {"world_size": 0}, [">= 1", "$.world_size"]),
        (PAIR | {"world_size": MAX_WORLD_SIZE + 1}, ["<= 16384", "$.world_size"]),
        (PAIR | {"world_size": 1}, ["0->1", "there is no rank 1"]),
        (PAIR | {"world_size": 3}, ["not connected", "rank 2"]),
        (PAIR | {"links": [LINK]}, ["not connected", "rank 1"]),
        (PAIR | {"links": [LINK, BACK, LINK]}, ["0->1 is listed twice"]),
        (PAIR | {"name": " "}, ["$.name"]),
        (PAIR | {"name": "a\x1b[31mb"}, ["`name` has the character '\\x1b'"]),
        (PAIR | {"name": "a\nb"}, ["`name` has the character '\\n'"]),
        (PAIR | {"name": "a\u202eb"}, ["`name` has the character '\\u202e'"]),
        (PAIR | {"summary": "a\x07"}, ["`summary` has the character"]),
        (SWITCH | {"expression": "switch:8\x1b"}, ["`expression` has the character"]),
        (PAIR | {"constants": [BANDWIDTH | {"source": "a\x9bb"}]}, ["`source` has the character", "$.constants[0]"]),
        (links(source=9), ["9->0", "there is no rank 9"]),
        (links(source=-1), ["-1->0", "there is no rank -1"]),
        (links(source=10**400), ["there is no rank 1000000"]),
        (links(source=0), ["connects a vertex with itself"]),
        (links(source=True), ["$.links[1].source"]),
        (links(source="1"), ["$.links[1].source"]),
        (links(source="a->b"), ["$.links[1].source"]),
        (links(bandwidth_bytes_per_s=-5), ["1->0", "bandwidth_bytes_per_s is -5.0", "more than 0"]),
        (links(bandwidth_bytes_per_s=0), ["1->0", "bandwidth_bytes_per_s is 0.0", "more than 0"]),
        (links(bandwidth_bytes_per_s="-5GB/s"), ["'-5GB/s'", "more than 0", "$.links[1].bandwidth_bytes_per_s"]),
        (links(bandwidth_bytes_per_s="50 apples"), ["'50 apples'", "a unit", "$.links[1].bandwidth_bytes_per_s"]),
        (links(bandwidth_bytes_per_s="50"), ["'50'", "a unit", "$.links[1].bandwidth_bytes_per_s"]),
        (links(bandwidth_bytes_per_s=None), ["got `null`", "$.links[1].bandwidth_bytes_per_s"]),
        (links(latency_s="1GB/s"), ["'1GB/s'", "a unit", "$.links[1].latency_s"]),
        (links(latency_s=-1e-6), ["1->0", "latency_s is -1e-06", "0 or more"]),
        (links(latency_s=1e308), ["1->0", "latency_s is 1e+308", "at most 1e+09"]),
        (links(bandwidth_bytes_per_s=5e-324), ["1->0", "bandwidth_bytes_per_s is 5e-324", "expected 1e-09 to 1e+18"]),
        (PAIR | {"shared": [{"name": "b", "bandwidth_bytes_per_s": 1, "links": ["0->1"]}] * 2}, ["'b'", "another"]),
        (PAIR | {"shared": [{"name": "b", "bandwidth_bytes_per_s": 1, "links": ["0->2"]}]}, ["'b'", "0->2"]),
        (PAIR | {"shared": [{"name": "b", "bandwidth_bytes_per_s": "1", "links": []}]}, ["$.shared[0]"]),
        (PAIR | {"constants": [BANDWIDTH | {"source": ""}]}, ["$.constants[0].source"]),
        (PAIR | {"expression": "switch:8"}, ["`links`", "`expression`", "both"]),
        ({"name": "nothing"}, ["`links`", "`expression`", "none"]),
        ([1, 2], ["Expected `object`, got `array`"]),
        (SWITCH | {"expression": "switches:8"}, ["'switches:8'", "switch:N"]),
        (SWITCH | {"expression": "h100-8"}, ["'h100-8'", "switch:N"]),
        (SWITCH | {"expression": "switch:0"}, ["'switch:0'", "switch:N"]),
        (SWITCH | {"constants": [BANDWIDTH]}, ["needs the constants link_bandwidth, link_latency", "$.constants"]),
        (SWITCH | {"constants": [BANDWIDTH, BANDWIDTH]}, ["'link_bandwidth' occurs twice", "$.constants[1]"]),
        (SWITCH | {"constants": [BANDWIDTH, LATENCY, LATENCY | {"name": "nic"}]}, ["got", "nic", "$.constants"]),
        (SWITCH | {"expression": "nodes:2x8"}, ["nic_bandwidth, nic_latency", "$.constants"]),
        (without(SWITCH, "constants") | {"expression": "nodes:1x1", "constants": [LATENCY]}, ["(none)"]),
        (SWITCH | {"constants": [BANDWIDTH | {"value": "fast"}, LATENCY]}, ["'fast'", "$.constants[0].value"]),
        (SWITCH | {"constants": [RATE]}, ["needs the constants link_bandwidth, link_latency", "got (none)"]),
        (PAIR | {"constants": [RATE, RATE]}, ["'compute_rate' occurs twice", "$.constants[1]"]),
        (PAIR | {"constants": [NOTE, NOTE]}, ["'wiring' occurs twice", "$.constants[1]"]),
        (PAIR | {"constants": [LATENCY | {"value": "fast"}]}, ["'fast'", "$.constants[0].value"]),
        (PAIR | {"constants": [BANDWIDTH, RATE | {"value": "fast"}]}, ["rate 'fast'", "$.constants[1].value"]),
        (SWITCH | {"world_size": 8}, ["unknown field `world_size`"]),
        (PAIR | {"grid": {"sides": [3], "wraps": [True]}}, ["a grid of 3, but other links", "$.grid"]),
        (PAIR | {"grid": {"sides": [2], "wraps": []}}, ["a torus of the shape (2,)", "for each if it wraps"]),
        (PAIR | {"grid": {"sides": [2, 0, 10**9], "wraps": [True]}}, ["but other links", "$.grid"]),
        (PAIR | {"grid": {"sides": [-1, -2], "wraps": [True, True]}}, ["expected sides of 1 or more"]),
        (PAIR | {"grid": {"sides": [2]}}, ["missing required field `wraps`", "$.grid"]),
    ],
)
def test_a_bad_document_says_what_is_wrong_and_where(tmp_path: Path, document: object, words: list[str]) -> None:
    message = refusal(write(tmp_path, document))
    assert "machine.json" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("m.json", "", ["is empty"]),
        ("m.json", "{'name': 'x'}", ["JSON is malformed"]),
        ("m.json", json.dumps(links(latency_s=float("nan"))), ["JSON is malformed"]),
        ("m.json", json.dumps(links(latency_s=float("inf"))), ["JSON is malformed"]),
        ("m.json", json.dumps(PAIR).replace("50000000000.0", "1e999"), ["out of range"]),
        ("m.json", json.dumps(PAIR).replace('"source": 1', '"source": ' + "9" * 5000), ["out of range"]),
        ("m.json", "[" * 100_000, ["recursion"]),
        ("m.toml", "name = ", ["Invalid value"]),
        ("m.toml", "name = " + "[" * 100_000, ["recursion"]),
        ("m.toml", "name = " + "9" * 5000, ["digits"]),
        ("m.toml", json.dumps(PAIR), ["Invalid"]),
        ("m.toml", "world_size = 2\nname = 'x'\nlinks = 3", ["$.links"]),
        ("m.yaml", "name: x", ["ends in .json, .toml or .csv"]),
        ("m", "name: x", ["ends in .json, .toml or .csv"]),
    ],
)
def test_a_broken_file_is_named_with_the_reason(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    message = refusal(write(tmp_path, text, name))
    assert name in message
    for word in words:
        assert word in message


TOML_PAIR = """
name = "pair"
world_size = 2
links = [
    {{ source = 0, destination = 1, bandwidth_bytes_per_s = {bandwidth}, latency_s = {latency} }},
    {{ source = 1, destination = 0, bandwidth_bytes_per_s = 5e10, latency_s = 1e-6 }},
]
"""


@pytest.mark.parametrize(
    ("bandwidth", "latency", "expected"),
    [
        ("nan", "0", "bandwidth_bytes_per_s is nan, expected a finite number"),
        ("inf", "0", "bandwidth_bytes_per_s is inf, expected a finite number"),
        ("1", "nan", "latency_s is nan, expected a finite number"),
        ("1", "-inf", "latency_s is -inf, expected a finite number"),
        ("1" + "0" * 400, "0", "machine.toml"),
    ],
)
def test_numbers_that_are_none_are_refused(tmp_path: Path, bandwidth: str, latency: str, expected: str) -> None:
    text = TOML_PAIR.format(bandwidth=bandwidth, latency=latency)
    assert expected in refusal(write(tmp_path, text, "machine.toml"))


def test_what_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "latin.json").write_bytes(b'{"name": "caf\xe9"}')
    assert "No such file" in refusal(str(tmp_path / "absent.json"))
    assert "is a directory" in refusal(str(tmp_path / "folder.json"))
    assert "UTF-8 text, byte 13" in refusal(str(tmp_path / "latin.json"))
    assert "is a directory" in refusal(str(tmp_path))
    assert "null byte" in refusal("a\0b.json")
    assert "too long" in refusal("a" * 5000 + ".json")
    os.mkfifo(tmp_path / "pipe.json")
    assert "is no regular file" in refusal(str(tmp_path / "pipe.json"))


# Documents


@pytest.mark.parametrize("text", [*catalogue_names(), "full-mesh:4", "ring:1", "nodes:2x4:switch:rails"])
def test_the_document_of_a_machine_is_a_file_of_it(tmp_path: Path, text: str) -> None:
    """With the library that its constants make, where it has such."""
    machine = load_machine(text, library="auto" if "peer_write_share" in load_machine(text).parameters else "ideal")
    assert load_machine(write(tmp_path, topology_document(machine))) == machine


SWITCH_NAMES = ["switch", "pcie0", "spine-1", "rail_2"]
BANDWIDTHS = st.floats(1e-3, 1e15) | st.integers(1, 10**12) | st.sampled_from(["50GB/s", "400Gbit/s", "1.5 MiB/s"])
LATENCIES = st.floats(0, 10) | st.integers(0, 3) | st.sampled_from(["0s", "1us", "2.5ms", "300ns"])
PRINTABLE = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), max_size=8)
NAMES = PRINTABLE.filter(str.strip)


@st.composite
def explicit_documents(draw: st.DrawFn) -> dict[str, Any]:
    """Valid files in the explicit form: one cycle through all ranks and some switches, and further links."""
    world_size = draw(st.integers(1, 5))
    switches = draw(st.lists(st.sampled_from(SWITCH_NAMES), unique=True))
    cycle = draw(st.permutations([*range(world_size), *switches]))
    hops = dict.fromkeys(zip(cycle, [*cycle[1:], cycle[0]], strict=True)) if len(cycle) > 1 else {}
    more = draw(st.lists(st.tuples(st.sampled_from(cycle), st.sampled_from(cycle)), max_size=5))
    hops |= dict.fromkeys((a, b) for a, b in more if a != b)
    names = [f"{a}->{b}" for a, b in hops]
    groups = draw(st.lists(st.sets(st.sampled_from(names), min_size=1), max_size=2)) if names else []
    return {
        "name": draw(NAMES),
        "summary": draw(PRINTABLE),
        "world_size": world_size,
        "links": [
            {"source": a, "destination": b, "bandwidth_bytes_per_s": draw(BANDWIDTHS), "latency_s": draw(LATENCIES)}
            for a, b in hops
        ],
        "shared": [
            {"name": f"{i} {draw(NAMES)}", "bandwidth_bytes_per_s": draw(BANDWIDTHS), "links": sorted(group)}
            for i, group in enumerate(groups)
        ],
        "constants": draw(
            st.lists(
                st.fixed_dictionaries({"name": NAMES, "value": NAMES, "source": NAMES}),
                max_size=2,
                unique_by=lambda constant: constant["name"],
            )
        ),
    }


@settings(max_examples=60, deadline=None)
@given(explicit_documents())
def test_file_machine_document_machine_is_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    machine = load_machine(write(folder, document))
    again = topology_document(machine)
    assert load_machine(write(folder, again)) == machine
    assert topology_document(load_machine(write(folder, again))) == again
    assert {key: again[key] for key in ("name", "summary", "world_size", "constants")} == {
        key: document[key] for key in ("name", "summary", "world_size", "constants")
    }
    assert [f"{link['source']}->{link['destination']}" for link in document["links"]] == [
        link.name for link in machine.topology.links
    ]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=3,
)


def load_or_message(text: str) -> Machine | str:
    """The machine, or the message of its refusal. Any other error is a bug."""
    try:
        return load_machine(text)
    except TopologyError as error:
        return str(error)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([PAIR, SWITCH]), st.sampled_from([*PAIR, *SWITCH, "shared", "summary"]), ANYTHING)
def test_a_file_with_anything_in_a_field_loads_or_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any], key: str, value: object
) -> None:
    found = load_or_message(write(tmp_path_factory.getbasetemp(), document | {key: value}))
    assert isinstance(found, Machine) or len(found.splitlines()) == 1


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12) | st.from_regex(r"(switch|ring|nodes|full-mesh):[0-9x:a-z]{0,6}", fullmatch=True))
def test_any_text_is_a_machine_or_refused_in_one_line(text: str) -> None:
    found = load_or_message(text)
    assert len(found.splitlines()) == 1 if isinstance(found, str) else found.topology.world_size <= MAX_WORLD_SIZE


LIST = """# two ranks behind a switch
source, destination, bandwidth, latency, both_ways
0, leaf, 25GB/s, 1us, yes

1, leaf, 25GB/s, 1us, true
"""


def test_a_list_of_links_is_the_explicit_form_in_lines(tmp_path: Path) -> None:
    """Of a line that goes both ways, and of one line for each way; texts with a unit, and numbers."""
    one = load_machine(write(tmp_path, LIST, "pair.csv")).topology
    lines = "\n".join(
        f"{link.source},{link.destination},{link.bandwidth_bytes_per_s},{link.latency_s}" for link in one.links
    )
    other = load_machine(write(tmp_path, f"source,destination,bandwidth_bytes_per_s,latency_s\n{lines}\n", "pair.csv"))
    assert other.topology == one
    assert (one.name, one.world_size, len(one.links)) == ("pair", 2, 4)
    assert {(link.bandwidth_bytes_per_s, link.latency_s) for link in one.links} == {(25e9, 1e-6)}
    document = {"name": "pair", "links": [{"source": rank, "destination": "leaf", "bandwidth": "25GB/s",
                                           "latency": "1us", "both_ways": True} for rank in (0, 1)]}  # fmt: skip
    assert load_machine(write(tmp_path, document)).topology == one


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("25GB/s, 1us, yes", "25GBs, 1us, yes", ["line 3: bandwidth '25GBs'"]),
        ("1us, true", "1us, perhaps", ["line 5: Expected `bool`"]),
        ("1us, true", "1us", ["line 5: 4 cells, expected 5"]),
        ("1, leaf", "1, leaf 2", ["line 5: Expected `str` matching"]),
        ("1, leaf", "-1, leaf", ["there is no rank -1"]),
        ("latency,", "latncy,", ["line 3: Object contains unknown field `latncy`, did you mean `latency`?"]),
        ("bandwidth,", "destination,", ["line 2: the columns are", "expected each once"]),
        ("25GB/s, 1us, yes", '"25GB/s, 1us, yes', ["unexpected end of data"]),
        ("25GB/s, 1us, yes", "25GB/s, 1us, no", ["is not connected"]),
    ],
)
def test_a_wrong_line_of_a_list_is_named(tmp_path: Path, before: str, after: str, words: list[str]) -> None:
    message = refusal(write(tmp_path, LIST.replace(before, after), "pair.csv"))
    assert "pair.csv" in message
    for word in words:
        assert word in message
