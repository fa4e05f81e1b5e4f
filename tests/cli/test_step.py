"""``tasp-lab step``: its table, its JSON, and what is refused in one line."""

from __future__ import annotations

import json
import re

from docs.generate import with_site_parts
from tests.conftest import Tell
from tests.docs.documents import ROOT

STEP = ("step", "h100-8", "--model", "llama-3-8b", "--seq", "4Ki")


def test_the_table_shows_time_throughput_and_memory(tell: Tell) -> None:
    code, out, err = tell(*STEP, "--schedule", "ulysses", "--cp", "4", "--checkpointing", "selective")
    assert code == 0, err
    answer, software, title, *_ = out.splitlines()
    assert software.startswith("Software: cudnn, measured on h100, ")
    assert re.fullmatch(
        r"\S+ \S+ per step, in runs \S+ \(.*\), .* tokens/s per GPU, MFU .*%, .* of 77.65 GiB per GPU.", answer
    )
    assert title.startswith("Training step of llama-3-8b, 4096 positions, cp 4 x dp 2, ulysses, ")
    for text in ("whole step", "tokens per second", "MFU", "79.65 GiB: fits", "8 of 32", "less checked"):
        assert text in out
    assert re.search(r"context and communication library\W+2 GiB", out)


def test_every_field_of_the_object_is_documented(tell: Tell) -> None:
    code, out, err = tell(*STEP, "--schedule", "ulysses", "--pass", "forward", "--no-fsdp", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["pass"], found["zero"], found["backward_s"]) == ("forward", 0, 0)
    text = with_site_parts((ROOT / "docs" / "json.md").read_text())
    assert [name for name in found if f"`{name}`" not in text] == []
