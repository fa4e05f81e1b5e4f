"""Another process, which orders sets and dictionaries of texts differently, finds, draws and hashes the same."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import tasp_lab
from tasp_lab.plots.rings import draw_decomposition
from tasp_lab.plots.timelines import render
from tasp_lab.rings.rings import Decomposition
from tasp_lab.schedules.attention.forward import attention
from tasp_lab.topology.builders import full_mesh, nodes
from tasp_lab.workload.layer import Workload


def found() -> list[str]:
    """The digest of a schedule, the hash of the inputs of a prediction, and that of a picture."""
    layer = Workload(48, heads=4, kv_heads=2, mask="causal", documents=(40, 8))
    rings = Decomposition(nodes(2, 2, "switch", "rails"), np.array([[0, 1, 3, 2]]), 1, "because")
    return [
        attention("tasp", full_mesh(3), layer).digest,
        tasp_lab.predict("h100-2x2", ["ring", "multi-ring"], 1000).provenance.inputs_sha256,
        hashlib.sha256(render(draw_decomposition(rings, "same"), "svg")).hexdigest(),
    ]


def test_other_processes_find_the_same() -> None:
    program = "from tests.test_determinism import found; print(*found())"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        line = [sys.executable, "-c", program]
        done = subprocess.run(
            line, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == found()
