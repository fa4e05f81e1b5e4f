"""Answers to some questions of all kinds, kept to see that they moved: ``python -m tests.support.golden_answers``.

They are copies of our own output and do not say what is right. They guard `tasp_lab.core.version.MODEL_VERSION` alone:
as long as it is the same, stored answers of studies hold, so it must be raised whenever an answer changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasp_lab import load_model, predict, predict_step
from tasp_lab.core.errors import StudyError, TaspLabError, first_line
from tasp_lab.core.files import write_whole
from tasp_lab.core.version import MODEL_VERSION
from tasp_lab.machines.sampling import Sampling
from tasp_lab.prediction.columns import fields_of
from tasp_lab.schedules.attention.options import AttentionOptions
from tasp_lab.study.evaluate import evaluate
from tasp_lab.study.point import Point
from tasp_lab.workload.layer import Workload

FILE = Path(__file__).with_suffix(".json")

COMMAND = "python -m tests.support.golden_answers"

SAME = 1e-9
"""Numbers that differ by at most this share are the same: that far both engines agree."""

Answers = Mapping[str, Mapping[str, float]]

BOTH = AttentionOptions("both")
LLAMA = load_model("llama-3-8b").layer(32768, mask="causal")
LINEAR = Workload(16384, heads=16, mask="causal", kind="linear", decay="scalar")
HYBRID = Workload(16384, heads=16, mask="causal", kind="hybrid", layers="LLS", decay="scalar")

LAYERS: Mapping[str, Point] = {
    "ring, mesh": Point("full-mesh:4", "ring-attention", Workload(4096, heads=4, mask="full")),
    "zigzag ring, both passes": Point("h100-8", "zigzag-ring-attention", LLAMA, BOTH),
    "tasp, backward": Point("mi300x-8", "tasp", LLAMA, AttentionOptions("backward")),
    "tasp, two nodes, faster NICs": Point("h100-2x8", "tasp", LLAMA, BOTH, overrides=("nic.bandwidth=x2",)),
    "ulysses, samples": Point("a100-8", "ulysses", LLAMA, BOTH, sampling=Sampling(8)),
    "usp, Ethernet": Point("a100_100g-2x8", "usp:8x2", LLAMA, BOTH),
    "token ring, one rail per GPU": Point("h100-2x8-rails", "token-ring", LLAMA, BOTH),
    "keys gathered, PCIe": Point("l20-8-pcie", "kv-all-gather", LLAMA),
    "two rings, torus": Point("torus:4x4", "kv-and-q-rings", Workload(8192, heads=8, mask="causal"), BOTH),
    "ulysses, routes through ranks": Point("torus:4x4", "ulysses", Workload(8192, heads=16, mask="causal"), BOTH),
    "direct, rates without kernels": Point("gaudi2-8", "direct-attention", LLAMA, BOTH),
    "grid, window": Point("h100-8", "grid:2x4", Workload(32768, heads=8, mask="causal", window=4096)),
    "no contention": Point("h100-8", "tasp", LLAMA, contention=False),
    "host model": Point("h100-8", "zigzag-ring-attention", LLAMA, BOTH, stack="ring-flash-attn"),
    "kernel by name": Point("h100-8", "burst", LLAMA, BOTH, kernel="flash-attention-3"),
    "slow rank": Point("h100-8", "ulysses", LLAMA, overrides=("rank.3.compute=x0.5",)),
    "gloo": Point("full-mesh:4", "striped-ring-attention", Workload(4096, heads=4, mask="causal"), library="gloo"),
    "linear attention": Point("h100-8", "lasp-2", LINEAR, BOTH),
    "linear attention, scan": Point("h100-2x8", "all-scan", LINEAR),
    "hybrid": Point("h100-8", "lasp-2+kv-all-gather", HYBRID, BOTH),
}

COLLECTIVES: Mapping[str, tuple[str, str, str]] = {
    "all-gather": ("h100-8", "ring", "16MiB"),
    "all-gather, short messages": ("h100-2x8", "ring", "1KiB"),
    "all-reduce, middle messages": ("h100-8", "library-ring-all-reduce", "128KiB"),
    "all-to-all": ("mi300x-8", "all-to-all", "1MiB"),
    "all-gather, many rings": ("nodes:2x4", "multi-ring", "1MiB"),
    "all-reduce, two nodes": ("h100-2x8", "library-ring-all-reduce", "64MiB"),
    "trees": ("torus:4x4", "trees", "8MiB"),
}


def answers() -> dict[str, dict[str, float]]:
    """The numbers of all answers, by question."""
    found = {name: dict(_numbers(evaluate(point))) for name, point in LAYERS.items()}
    for name, (machine, schedule, size) in COLLECTIVES.items():
        found[name] = dict(_numbers(fields_of(predict(machine, schedule, size, samples=8)[-1], "collective")))
    step = predict_step("h100-8", "llama-3-8b", 16384, "ulysses")
    return found | {"step of a model": dict(_numbers(step.to_dict()))}


def _numbers(answer: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of an answer by the path of their names; a row without any has failed."""
    if answer.get("error"):
        raise StudyError(f"{answer['schedule']} on {answer['machine']}: {answer['error']}")
    for name, value in answer.items():
        if isinstance(value, Mapping) and name != "provenance":
            yield from ((f"{name}.{inner}", number) for inner, number in _numbers(value))
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in ("models", "seed"):
            yield name, value


def stored(file: Path = FILE) -> tuple[int, Answers]:
    """The version and the answers of the file."""
    document = json.loads(file.read_text())
    return document["models"], document["answers"]


def moved(before: Answers, after: Answers) -> list[str]:
    """Numbers that both sides have and that differ by more than `SAME`, a text for each."""
    return [
        f"{question}: {name} was {numbers[name]!r}, is {after[question][name]!r}"
        for question, numbers in before.items()
        for name in numbers
        if question in after and name in after[question]
        if not math.isclose(numbers[name], after[question][name], rel_tol=SAME)
    ]


def advice(differences: Sequence[str]) -> str:
    """What to do about answers that moved."""
    return (
        f"answers moved, {len(differences)} numbers ({'; '.join(differences[:3])}): if that is meant, raise "
        f"MODEL_VERSION in tasp_lab/core/version.py and write the file again with {COMMAND}"
    )


def write(now: Answers, version: int = MODEL_VERSION, file: Path = FILE) -> None:
    """Write the file. Raises `StudyError` for answers that moved without a higher version."""
    if file.exists():
        before, old = stored(file)
        if (differences := moved(old, now)) and version <= before:
            raise StudyError(advice(differences))
    write_whole(file, (json.dumps({"models": version, "answers": now}, indent=1) + "\n").encode())


if __name__ == "__main__":
    try:
        write(answers())
    except TaspLabError as error:
        raise SystemExit(first_line(error)) from error
    print(f"{FILE.name}: {len(LAYERS) + len(COLLECTIVES) + 1} answers of models {MODEL_VERSION}")
