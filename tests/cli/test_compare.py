"""``tasp-lab compare``: the table, the JSON object, and what is refused."""

from __future__ import annotations

import json

import pytest

from tasp_lab.attention.registry import attention_names_on
from tests.conftest import Tell

LAYER = ("--seq", "4096", "--heads", "8")
FIELDS = {
    "schedule", "computes", "applies", "reason", "time_s", "bound_s", "sent_bytes", "link_bytes", "peak_bytes", "ccr",
    "bound_by", "measured_s", "measured_prediction_s",
}  # fmt: skip


def test_json_has_every_field(tell: Tell) -> None:
    code, out, _ = tell("compare", "full-mesh:6", *LAYER, "--json")
    assert code == 0
    found = json.loads(out)
    assert {"library", "results", "fabric", "provenance"} == set(found)
    assert all(set(row) == FIELDS for row in found["results"])
    refused = [row for row in found["results"] if not row["applies"]]
    assert [row["schedule"] for row in refused] == ["ulysses", "usp:3x2"]
    assert all(row["time_s"] is None and row["reason"] for row in refused)
    assert all(row["computes"] == "softmax" for row in found["results"])


def test_the_table_has_all_schedules(tell: Tell) -> None:
    code, out, err = tell("compare", "full-mesh:4", *LAYER, "--mask", "causal", "--pass", "both")
    assert code == 0
    assert all(name in out for name in attention_names_on(4))
    assert all(f": {name}" in err for name in attention_names_on(4))


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        ((), "expected an attention layer: --seq, or --documents"),
        (("--seq", "64", "--schedule", "multi-ring"), "'multi-ring' is an AllGather, expected one for attention"),
        (("--seq", "64", "--schedule", "usp"), "schedule 'usp': expected usp:UxR with two numbers, like usp:2x4"),
        (("--seq", "64", "--validate", "-1"), "measure: -1, expected 0 or more"),
    ],
)
def test_what_cannot_be_compared(tell: Tell, arguments: tuple[str, ...], telling: str) -> None:
    code, out, err = tell("compare", "full-mesh:4", *arguments)
    assert (code, out) == (2, "")
    assert telling in err.splitlines()[-1]
