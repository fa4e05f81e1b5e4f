"""Provenance: equal inputs have one hash in every process, other inputs another one, and constants have sources."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasp_lab
from tasp_lab.machines.machine import CommLibrary, ComputeRate, Machine
from tasp_lab.prediction.provenance import Provenance, plain, rings_inputs, sha256, topology_inputs
from tasp_lab.topology.builders import full_mesh
from tests.conftest import ROOT

LAYER = tasp_lab.Workload(sequence=512, heads=2, mask="causal")


def provenance_of(document: dict[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(document["provenance"], allow_nan=False))
    return found


def asked(machine: str, shard_bytes: int, **options: Any) -> dict[str, Any]:
    return provenance_of(tasp_lab.predict(machine, ["ring", "multi-ring"], shard_bytes, **options).to_dict())


def test_the_hash_is_that_of_the_inputs_in_canonical_form() -> None:
    found = asked("h100-2x2", 1000)
    canonical = json.dumps(found["inputs"], sort_keys=True, separators=(",", ":")).encode()
    assert found["inputs_sha256"] == hashlib.sha256(canonical).hexdigest()


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("machine", {"machine": "full-mesh:5"}),
    ("schedules", {"schedules": ["multi-ring"]}),
    ("order of schedules", {"schedules": ["multi-ring", "ring"]}),
    ("work", {"work": 2**20 + 1}),
    ("layer", {"schedules": "tasp", "work": LAYER}),
    ("library", {"library": "gloo"}),
    ("a link", {"overrides": ["link.0-1=10GB/s"]}),
    ("a missing link", {"without": ["link.0-1"]}),
    ("lanes", {"lanes": 2}),
    ("search budget", {"search_budget": 10_000}),
    ("engine", {"engine": "array"}),
    ("rings", {"decomposition": tasp_lab.decompose("full-mesh:4")}),
]
QUESTION: dict[str, Any] = {"machine": "full-mesh:4", "schedules": ["ring", "multi-ring"], "work": 2**20}
LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("mask", {"work": replace(LAYER, mask="full")}),
    ("heads", {"work": replace(LAYER, heads=4)}),
    ("documents", {"work": replace(LAYER, documents=(500, 12))}),
    ("passes", {"passes": "both"}),
    ("trim", {"trim": False}),
    ("buffers", {"buffers": 2}),
    ("compute", {"compute": 1e12}),
]


@pytest.mark.parametrize(
    ("question", "changes"), [(QUESTION, CHANGES), (QUESTION | {"schedules": "tasp", "work": LAYER}, LAYERS)]
)
def test_every_changed_input_changes_the_hash(
    question: dict[str, Any], changes: list[tuple[str, dict[str, Any]]]
) -> None:
    hashes = {"": tasp_lab.predict(**question).provenance.inputs_sha256}
    for name, change in changes:
        hashes[name] = tasp_lab.predict(**question | change).provenance.inputs_sha256
    assert len(set(hashes.values())) == len(hashes)


def test_output_that_is_asked_for_is_no_input() -> None:
    plainly, more = (tasp_lab.predict(**QUESTION, explain=each, events=each) for each in (False, True))
    assert plainly.provenance.inputs_sha256 == more.provenance.inputs_sha256


@pytest.mark.parametrize(
    "ask",
    [
        lambda: tasp_lab.predict("h100-2x2", "tasp", LAYER, passes="both", explain=True),
        lambda: tasp_lab.decompose("torus:3x3"),
        lambda: tasp_lab.accuracy(ROOT / "tasp_lab/measure/tables/h100_xxrjun_1x8_sendrecv.csv"),
    ],
)
def test_the_same_call_gives_the_same_answer_but_for_the_date(ask: Any) -> None:
    first, again = ask().to_dict(), ask().to_dict()
    for found in (first, again):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["provenance"].pop("date"))
        assert found["provenance"]["version"] == tasp_lab.__version__
    assert json.dumps(first) == json.dumps(again)


def test_the_date_and_the_version_do_not_enter_the_hash() -> None:
    one = Provenance({"a": 1}, version="0.2.0", date="2026-01-01T00:00:00+00:00")
    assert one.inputs_sha256 == replace(one, version="9.9", date="2030-01-01T00:00:00+00:00").inputs_sha256
    assert one.inputs_sha256 != replace(one, inputs={"a": 2}).inputs_sha256


def test_constants_have_a_value_and_a_source() -> None:
    found = provenance_of(tasp_lab.predict("b200-8", "tasp", replace(LAYER, dtype="fp32"), passes="both").to_dict())
    named = {each["name"]: each for each in found["constants"]}
    assert {"link_bandwidth", "compute rate fp32 forward", "compute rate fp32 backward"} <= set(named)
    assert all(each["value"] and each["source"] for each in named.values())
    assert all(each["assumed"] == each["source"].startswith("assum") for each in named.values())
    assert found["engine"] == "array"
    assert found["search_complete"] is True


def test_what_a_collective_does_not_use_is_not_listed() -> None:
    found = asked("h100-8", 64)
    assert not [each["name"] for each in found["constants"] if each["name"].startswith("compute")]
    assert tasp_lab.predict("h100-8", "ring", 64).provenance.search_complete is None


def test_engines_are_those_that_were_used() -> None:
    assert asked("full-mesh:4", 64, engine="array")["engine"] == "array"
    assert asked("full-mesh:4", 64)["engine"] == "array"
    assert asked("full-mesh:4", 64, engine="simpy")["engine"] == "simpy"


def test_a_search_that_its_budget_ended_is_not_complete() -> None:
    few = tasp_lab.decompose("full-mesh:9", overrides=["link.0-3=13GB/s"], search_budget=1000)
    assert few.provenance.search_complete is few.search_complete is False


def test_equal_topologies_have_one_hash_however_they_are_written() -> None:
    mesh = full_mesh(4, 50e9, 1e-6)
    listed = replace(mesh, links=tuple(mesh.links))
    exact = full_mesh(4, Fraction(50 * 10**9), Fraction(1e-6))
    assert topology_inputs(mesh) == topology_inputs(listed) == topology_inputs(exact)
    assert topology_inputs(mesh) != topology_inputs(full_mesh(4, 50e9, 2e-6))
    assert topology_inputs(mesh) != topology_inputs(replace(mesh, name="other"))


numbers = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.fractions(), st.booleans(), st.none(), st.text()
)
values = st.recursive(
    numbers, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@given(values)
def test_every_value_has_a_plain_form_that_json_keeps(value: object) -> None:
    found = plain(value)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert sha256(found) == sha256(json.loads(json.dumps(found)))


@given(st.fractions() | st.floats(allow_nan=False, allow_infinity=False), st.data())
def test_equal_numbers_have_one_form_and_others_another(value: float | Fraction, data: st.DataObject) -> None:
    assert plain(value) == plain(Fraction(value))
    assert type(plain(value)) is type(plain(Fraction(value)))
    other = data.draw(st.fractions())
    assert (sha256(plain(value)) == sha256(plain(other))) == (Fraction(value) == other)


@given(st.dictionaries(st.text(min_size=1), st.integers(), min_size=2))
def test_the_order_of_keys_does_not_matter(fields: dict[str, int]) -> None:
    assert sha256(plain(fields)) == sha256(plain(dict(reversed(fields.items()))))


@settings(max_examples=30)
@given(st.integers(2, 6), st.data())
def test_rings_are_told_apart_by_their_ranks(ranks: int, data: st.DataObject) -> None:
    rings = tasp_lab.decompose(full_mesh(ranks))
    order = data.draw(st.permutations(range(len(rings.rings))))
    moved = replace(rings, rings=rings.rings[list(order)])
    same = bool(np.array_equal(moved.rings, rings.rings))
    assert (rings_inputs([moved]) == rings_inputs([rings])) == same


def test_a_machine_differs_by_library_and_compute_rate() -> None:
    mesh = full_mesh(2)
    machines = [
        Machine(mesh),
        Machine(mesh, CommLibrary("other")),
        Machine(mesh, CommLibrary("ideal", 1e-6)),
        Machine(mesh, compute=ComputeRate(1e12)),
        Machine(mesh, compute=ComputeRate(2e12)),
    ]
    hashes = {tasp_lab.predict(each, "ring-attention", LAYER).provenance.inputs_sha256 for each in machines}
    assert len(hashes) == len(machines)


def test_a_table_is_known_by_its_content_and_not_by_its_folder(tmp_path: Path) -> None:
    text = (ROOT / "tasp_lab/measure/tables/h100_xxrjun_1x8_sendrecv.csv").read_text()
    last = text.rstrip().rpartition("\n")[2]
    hashes = []
    for folder, content in (("a", text), ("b", text), ("c", text.replace(last, ""))):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "table.csv"
        path.write_text(content)
        hashes.append(tasp_lab.accuracy(path).provenance.inputs_sha256)
    assert hashes[0] == hashes[1] != hashes[2]
