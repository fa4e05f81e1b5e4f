"""``tasp-lab step``: its table, its JSON, and what is refused in one line."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import Tell
from tests.docs.documents import ROOT

STEP = ("step", "h100-8", "--model", "llama-3-8b", "--seq", "4Ki")


def test_the_table_shows_time_throughput_and_memory(tell: Tell) -> None:
    code, out, err = tell(*STEP, "--schedule", "ulysses", "--group", "4", "--checkpointing", "selective")
    assert code == 0, err
    assert out.startswith("Training step of llama-3-8b, 4096 positions, 1 per group, 2 groups of 4 ranks by ulysses")
    for text in ("whole step", "tokens per second", "MFU", "79.65 GiB: fits", "8 of 32", "less checked"):
        assert text in out
    assert re.search(r"context and communication library\W+2 GiB", out)


def test_every_field_of_the_object_is_documented(tell: Tell) -> None:
    code, out, err = tell(*STEP, "--schedule", "ulysses", "--pass", "forward", "--no-fsdp", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["pass"], found["fsdp"], found["backward_s"]) == ("forward", False, 0)
    text = (ROOT / "docs" / "json.md").read_text()
    assert [name for name in found if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schedule", "tas"), "did you mean 'tasp'"),
        (("--schedule", "lasp-2"), "is for linear attention"),
        (("--schedule", "tasp", "--group", "3"), "groups of 3 ranks on h100-8, expected a divisor"),
        (("--schedule", "tasp", "--batch", "0"), "batch: 0, expected 1 or more"),
        (("--schedule", "tasp", "--matrix-rate", "timed:2000TFLOP/s"), "at most its peak"),
        (("--schedule", "tasp", "--matrix-rate", "600"), "expected timed:RATE"),
        (("--schedule", "tasp", "--checkpointing", "half"), "half"),
        (("--schedule", "tasp", "--set", "layer.heads=4"), "the layer of a step is that of its model"),
        (("--schedule", "tasp", "--set", "nic.bandwith=x2"), "nic.bandwith"),
        (("--schedule", "ulysses", "--group", "8", "--kernel", "flash"), "kernel"),
    ],
)
def test_wrong_input_is_one_line(tell: Tell, options: tuple[str, ...], message: str) -> None:
    code, out, err = tell(*STEP, *options)
    assert (code, out) == (2, "")
    assert message in err


def test_an_unknown_model_and_a_model_without_heads(tell: Tell) -> None:
    code, _, err = tell("step", "h100-8", "--model", "lama-3-8b", "--seq", "4Ki", "--schedule", "tasp")
    assert code == 2
    assert "did you mean 'llama-3-8b'" in err
