"""Folders of studies as a run writes them, from rows that follow a formula, so that tests know every winner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w

import tasp_lab
from tasp_lab.study.folder import FORMAT, POINTS, POINTS_CSV, PROVENANCE, STUDY, UNANSWERED
from tasp_lab.study.point import COLUMNS

MACHINES = {"h100-8": (1, 8), "h100-4x8": (4, 8), "mi300x-8": (1, 8)}
MODELS = {"llama-3-8b": 32, "llama-3-70b": 64, "llama-3-405b": 128}
SEQUENCES = tuple(2**power for power in range(13, 21))
SCHEDULES = ("zigzag-ring-attention", "tasp", "ulysses")
BASELINE = "zigzag-ring-attention"
RATE, LATENCY_S, NETWORK = 4e14, 2e-4, 2e10
"""FLOP/s of a rank; of a step; bytes per second of a ring between nodes."""


def times(machine: str, heads: int, seq: int, schedule: str) -> tuple[float, float]:
    """Compute and communication of a point, in seconds: compute grows with the square of the length."""
    nodes, per_node = MACHINES[machine]
    ranks = nodes * per_node
    compute_s = 7 * heads * 128 * seq**2 / ranks / RATE
    sent = 2 * 8 * 128 * seq * 2 * (ranks - 1) / ranks
    bandwidth = NETWORK if nodes > 1 else 1.5e11 if machine.startswith("h100") else 4.5e10
    if schedule == "tasp":
        return compute_s * 1.02, 2 * LATENCY_S + sent / bandwidth / (3 if nodes > 1 else 5)
    if schedule == "ulysses":
        return compute_s * 1.05, LATENCY_S + sent / bandwidth / 2
    return compute_s, LATENCY_S * (ranks - 1) / 7 + sent / bandwidth


def row(machine: str, model: str, seq: int, schedule: str, **changed: Any) -> dict[str, Any]:
    """One row; `changed` are other cells and further axes."""
    nodes, per_node = MACHINES[machine]
    heads = MODELS[model]
    compute_s, communication_s = times(machine, heads, seq, schedule)
    time_s = max(compute_s, communication_s) + 0.1 * min(compute_s, communication_s)
    memory = 2 * seq * heads * 128 * 6 // (nodes * per_node)
    cells = {
        "key": hashlib.sha256(repr((machine, model, seq, schedule)).encode()).hexdigest()[:32],
        "machine": machine, "nodes": nodes, "ranks": nodes * per_node, "library": "nccl", "model": model, "seq": seq,
        "batch": 1, "heads": heads, "kv_heads": 8, "head_dim": 128, "dtype": "bf16", "mask": "causal",
        "kind": "softmax", "passes": "both", "schedule": schedule, "variant": "as is", "overrides": "",
        "time_s": time_s, "time_low_s": 0.8 * time_s, "time_high_s": 1.4 * time_s, "setting": "library", "steps": 8,
        "compute_s": compute_s, "exposed_s": time_s - compute_s,
        "bound_s": 0.9 * compute_s, "bottleneck": "compute" if compute_s > communication_s else "link 0-1",
        "bytes_per_rank": 2 * 8 * 128 * seq * 2, "buffer_bytes": memory // 6, "memory_bytes": memory, "fits": True,
        "engine": "array", "settled_by": "simulation", "search_complete": True, "version": tasp_lab.__version__,
        "constants": "0" * 64, "status": "ok", "error": None,
    }  # fmt: skip
    point = {"machine": machine, "schedule": schedule, "seq": seq, "heads": heads}
    return cells | {"inputs": json.dumps(point)} | changed


def settled(found: Mapping[str, Any]) -> dict[str, Any]:
    """The row as a bound settles it: its bound is slower than another time, so there is none of its own."""
    none = dict.fromkeys(("time_s", "time_low_s", "time_high_s", "exposed_s", "engine", "bottleneck"))
    return dict(found) | none | {"status": "settled", "settled_by": "bound", "bound_s": found["time_s"]}


def not_applicable(found: Mapping[str, Any], error: str) -> dict[str, Any]:
    """The row of a point that was refused."""
    none = dict.fromkeys(("time_s", "time_low_s", "time_high_s", "compute_s", "exposed_s",
                          "bound_s", "bottleneck", "memory_bytes", "fits", "settled_by"))  # fmt: skip
    return dict(found) | none | {"status": "does not apply", "error": error}


def study_rows() -> Iterator[dict[str, Any]]:
    """Three machines, three models, eight lengths, three schedules; one does not apply, one is settled by a bound."""
    for machine in MACHINES:
        for model in MODELS:
            for seq in SEQUENCES:
                for schedule in SCHEDULES:
                    found = row(machine, model, seq, schedule)
                    if schedule == "ulysses" and machine == "h100-4x8" and model == "llama-3-70b":
                        error = "64 heads and 8 KV heads on 32 ranks, expected a multiple of the ranks"
                        yield not_applicable(found, error)
                    elif schedule == "ulysses" and machine == "mi300x-8" and seq >= 2**19:
                        yield settled(found)
                    else:
                        yield found


CONSTANTS = [
    {"machine": "h100-8", "name": "link_bandwidth", "value": "450GB/s", "low": None, "high": None,
     "source": "NVIDIA H100 data sheet", "assumed": False},
    {"machine": "h100-4x8", "name": "nic_channel_rate", "value": "13GB/s", "low": "12GB/s", "high": "15GB/s",
     "source": "assumption: no measurement of one channel", "assumed": True},
    {"machine": "mi300x-8", "name": "compute_rate", "value": "320TFLOP/s", "low": "260TFLOP/s", "high": "390TFLOP/s",
     "source": "fit: 12 rows of <a table & its notes>", "assumed": False},
]  # fmt: skip

STUDY_FILE = {
    "study": {"name": "long-context-training", "seed": 0},
    "layer": {"model": list(MODELS), "seq": "geom(8Ki, 1Mi, 2)"},
    "machine": {"name": list(MACHINES)},
    "schedule": {"name": list(SCHEDULES), "baseline": BASELINE},
    "find": {"crossover": {"along": "seq", "between": ["tasp", BASELINE]}},
}


def write_study(
    folder: Path,
    rows: Sequence[Mapping[str, Any]] | None = None,
    asked: Mapping[str, Any] = STUDY_FILE,
    **told: Any,
) -> Path:
    """Write the folder of a study; `told` changes its provenance."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STUDY).write_text(tomli_w.dumps(dict(asked)))
    table = pd.DataFrame(list(study_rows()) if rows is None else list(rows))
    table = table.reindex(columns=[*COLUMNS, *(each for each in table.columns if each not in COLUMNS)])
    table.to_parquet(folder / POINTS, index=False)
    table.to_csv(folder / POINTS_CSV, index=False)
    table[table["status"] == "does not apply"].to_csv(folder / UNANSWERED, index=False)
    provenance = {
        "format": FORMAT,
        "study": "long-context-training",
        "seed": 0,
        "version": tasp_lab.__version__,
        "command": "tasp-lab study run longctx.toml --output longctx",
        "constants": CONSTANTS,
        "assumptions": ["the rates of flash-attention-2 hold for every mask", "one document per sequence"],
    }
    (folder / PROVENANCE).write_text(json.dumps(provenance | told))
    return folder
