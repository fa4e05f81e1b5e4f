"""Keywords of other libraries are refused in one line that names what stands for them here."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import runtime
from runtime.sequence_parallel import hugging_face, keywords
from tasp_lab.core.errors import WorkloadError
from tests.docs.documents import ROOT

OTHERS: list[dict[str, Any]] = tomllib.loads(Path(keywords.__file__).with_suffix(".toml").read_text())["others"]
NAMES = [name for each in OTHERS for name in each["names"]]


def module(q: Any, k: Any, v: Any, **given: Any) -> object:
    return runtime.SequenceParallelAttention(**given)


def registered(q: Any, k: Any, v: Any, **given: Any) -> object:
    return hugging_face.register("never", **given)


SOFTMAX = [runtime.attention, runtime.attention_with_lse, runtime.prepare, module, registered]
OF_SOFTMAX = inspect.signature(runtime.attention_with_lse).parameters
OF_LINEAR = inspect.signature(runtime.linear_attention).parameters


def refusal(function: Callable[..., object], name: str) -> str:
    """Why a function refuses a keyword; found before anything else, so that it needs no process group."""
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(WorkloadError) as refused:
        function(q, q, q, **{name: None})
    return str(refused.value)


@pytest.mark.parametrize("function", [*SOFTMAX, runtime.linear_attention])
@pytest.mark.parametrize("name", NAMES)
def test_what_others_call_otherwise_is_refused_with_its_name_here(function: Callable[..., object], name: str) -> None:
    own: Mapping[str, object] = OF_LINEAR if function is runtime.linear_attention else OF_SOFTMAX
    if name in own:
        return
    message = refusal(function, name)
    assert message.startswith(f"unknown argument {name!r}, expected ")
    assert "\n" not in message
    expected = message.split(", expected ")[1].split(":")[0]
    here = next(each.get("here", []) for each in OTHERS if name in each["names"])
    assert expected == (" or ".join(each for each in here if each in own) or "none")


def test_the_table_names_keywords_that_there_are() -> None:
    assert len(NAMES) == len(set(NAMES))
    named = {here for each in OTHERS for here in each.get("here", [])}
    assert named <= {*OF_SOFTMAX, *OF_LINEAR}
    for name in NAMES:
        assert name not in OF_SOFTMAX or name not in OF_LINEAR, f"{name} is a keyword of both functions"
    for each in OTHERS:
        assert each.get("here") or each["text"], each


def test_what_no_library_has_is_refused_with_the_nearest_keyword() -> None:
    for function in SOFTMAX:
        assert "did you mean 'schedule'?" in refusal(function, "shedule")
    assert "did you mean 'gates'?" in refusal(runtime.linear_attention, "gate")


def test_the_documents_have_the_same_names() -> None:
    """The section lists every name that errors know, and no other name beside those of this package."""
    text = (ROOT / "docs" / "attention.md").read_text()
    section = text.split("### Names in other libraries")[1].split("\n### ")[0]
    words = {word for code in re.findall(r"`([^`\n]+)`", section) for word in re.findall(r"[a-z]\w*", code)}
    assert [name for name in NAMES if name not in words] == []
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith(("| `", "| -"))]
    own = {*OF_SOFTMAX, *OF_LINEAR}
    for ours, theirs in (map(identifiers, row) for row in rows):
        assert ours <= own
        assert theirs <= {*NAMES, *own}
        for name in theirs - ours:
            here = {keyword for each in OTHERS if name in each["names"] for keyword in each.get("here", [])} & own
            assert ours & here or not here, f"{name} stands beside {ours or 'nothing'}, but errors name {here}"


def identifiers(cell: str) -> set[str]:
    """The keywords in a cell of the table, which stand between backticks."""
    return set(re.findall(r"`([a-z]\w*)`", cell))
